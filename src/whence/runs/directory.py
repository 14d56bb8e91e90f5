"""A run on disk: typed, versioned files, each written atomically, no pickles."""

import io
import json
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import polars as pl
from safetensors.torch import save_file
from torch import Tensor

from whence.errors import RunDirectoryError
from whence.runs.checkpoints import Checkpoint, list_checkpoints, read_latest
from whence.runs.columns import check_columns
from whence.runs.config_file import VERSION, describe_change, read_document, read_parts, to_plain_json
from whence.runs.contents import FORMAT, check_content
from whence.runs.files import (
    WriterLock,
    check_links,
    explain_write_errors,
    is_empty,
    remove_leftovers,
    write_run_file,
)
from whence.runs.tensorfiles import read_tensor_file

POLICIES_EVERY = "policies_every"
"""The note that says how many rounds lie between the policies that a run keeps; missing: it keeps them all."""

_FOLDERS = (
    *("policies", "recordings", "phases", "checkpoints", "model", "trl"),
    *("counterfactual", "interventions"),
)
"""What a run may hold besides tables of rounds."""

_ROUND = re.compile(r"round_([0-9]{5,18})")

Table: TypeAlias = Literal["metrics", "timings", "evaluations"]
"""Tables with one row a round. Timings have a table of their own, because only they differ between equal runs."""

PerRound: TypeAlias = Literal["records", "episodes", "answers"]
"""Tables that a round has one of. Answers to sample prompts follow a round; those of round 0 are the start model's."""


@dataclass(eq=False)
class RunDirectory:
    """The directory of one training run.

    ```
    config.json                        what was run, and with which versions
    metrics.parquet                    one row a round: what was scored, dropped and trained
    timings.parquet                    one row a round: seconds by stage
    evaluations.parquet                one row an evaluation
    records/round_00005.parquet        the records of round 5: score, kept or not, why
    episodes/round_00005.parquet       the episodes that began in round 5: what is needed to play them again
    answers/round_00005.parquet        a language model's answers to sample prompts after round 5
    policies/round_00005.safetensors   the policy that collected round 5; the trained policy follows the last round
    recordings/round_00005.safetensors what round 5's optimisation did, if recordings are on
    checkpoints/round_00005.safetensors all that training needs to go on after round 5; the last two are kept
    .lock                              locked while a process writes the run
    ```

    Each file is complete or absent, whenever the process is killed. Make a `RunDirectory` with `begin`, `create` or
    `open`. Every method that writes raises `RunDirectoryError` if the system refuses, with the path and the reason, or
    if another writer of this process has taken the directory over.

    Attributes:
        path: the directory.
        config: the run's configuration, JSON types only.
        versions: versions of the libraries it was run with.
        notes: what happened to the run, in JSON types: no part of what it is.
        checkpoint: what `begin` found to go on from; None in a run that starts, or is read.
    """

    path: Path
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint | None = field(default=None, repr=False, init=False)
    _tables: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, init=False)
    _lock: WriterLock | None = field(default=None, repr=False, init=False)

    @classmethod
    def begin(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        versions: Mapping[str, str] | None = None,
        save_every: int = 1,
        overwrite: bool = False,
        may_change: Collection[str] = (),
        shared: bool = False,
    ) -> Self:
        """Start a run, or go on with the one that the directory holds, after the round of its latest checkpoint.

        What later rounds wrote is deleted. `checkpoint` holds the checkpoint to go on from, or None.

        Args:
            path: the directory; made if it is missing.
            config: the run's configuration, in JSON types.
            versions: versions of the libraries in use.
            save_every: rounds from one checkpoint to the next; 0: there will be none.
            overwrite: delete the run that the directory holds, and start anew.
            may_change: names of settings that may differ from the stored ones; `outer.inner` for nested settings.
            shared: see `create`.

        Raises:
            RunDirectoryError: the directory holds a run of another configuration, or one with more than `save_every`
                rounds and no checkpoint; or files that are no run; or it cannot be written, or another process does so.
        """
        path, checkpoint = Path(path), None
        if not overwrite and cls._holds_work(path):
            cls.open(path).check_same(config, but=may_change)
            lock = WriterLock(path)  # from now on, no other process trains on from that checkpoint
            try:
                checkpoint = read_latest(path)
            except RunDirectoryError:
                lock.release()
                raise
        if checkpoint is None:
            run = cls.create(path, config, versions=versions, overwrite=overwrite, shared=shared)
        else:
            run = cls.resume(path, config, rounds=checkpoint.round, may_change=may_change)
        run.checkpoint = checkpoint
        run.note(save_every=save_every)
        return run

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        versions: Mapping[str, str] | None = None,
        overwrite: bool = False,
        shared: bool = False,
    ) -> Self:
        """Start a run. A run in the directory that was interrupted before its first checkpoint is deleted first.

        Args:
            path: the directory; made if it is missing.
            config: the run's configuration, in JSON types.
            versions: versions of the libraries in use; stored, not compared.
            overwrite: delete the run that the directory holds, whichever it is.
            shared: whether another program writes into the directory, too, so that it may hold files that are no run.

        Raises:
            RunDirectoryError: the directory holds a run with finished rounds, or files that are no run; the
                configuration is not JSON; or the directory cannot be written, or another process does so.
        """
        path = Path(path)
        plain = to_plain_json(config)
        holds_run = (path / "config.json").exists()
        if not holds_run and path.exists() and (not path.is_dir() or not (shared or is_empty(path))):
            raise RunDirectoryError(
                f"{path} exists and holds no config.json, so it is no run of whence's. Choose a new or empty directory."
            )
        check_content(path, "run")
        if holds_run:
            read_document(path / "config.json")  # refuses a file that whence did not write
            check_links(path)
        lock = WriterLock(path)
        try:
            if (path / "config.json").exists():  # perhaps of a process that had the lock until now
                if not overwrite and cls._holds_work(path):
                    remedy = "" if list_checkpoints(path) else " and no checkpoint to go on from"
                    raise RunDirectoryError(
                        f"{path} holds a run with {cls.open(path).table('metrics').height} finished rounds{remedy}. To "
                        "replace it, pass overwrite=True (--overwrite); to keep it, choose another directory."
                    )
                with explain_write_errors(path):
                    _remove_rounds(path)
            run = cls(path, plain, dict(versions or {}))
            run._lock = lock
            run._write_config()
        except RunDirectoryError:
            lock.release()
            raise
        return run

    @classmethod
    def _holds_work(cls, path: Path) -> bool:
        """Return whether a directory holds more of a run than the rounds before its first checkpoint."""
        if not (path / "metrics.parquet").exists():
            return False
        run = cls.open(path)
        return bool(list_checkpoints(path)) or run.table("metrics").height > run.notes.get("save_every", 0)

    @classmethod
    def resume(
        cls, path: str | Path, config: Mapping[str, Any], *, rounds: int, may_change: Collection[str] = ()
    ) -> Self:
        """Continue a run after one of its rounds, and delete what later rounds wrote.

        Args:
            path: the directory.
            config: the run's configuration, in JSON types.
            rounds: number of rounds to keep.
            may_change: names of settings that may differ from the stored ones; `outer.inner` for nested settings.

        Raises:
            RunDirectoryError: the directory holds no run, or one of another configuration; or it cannot be written, or
                another process does so.
        """
        old = cls.open(path)
        check_links(old.path)
        old.check_same(config, but=may_change)
        run = cls(old.path, to_plain_json(config), old.versions, old.notes)
        run._lock = WriterLock(old.path)
        try:
            run._write_config()
            run._remove_after(rounds)
        except RunDirectoryError:
            run.release()
            raise
        return run

    def _remove_after(self, rounds: int) -> None:
        """Delete what rounds after the first `rounds` wrote."""
        for name in get_args(Table):
            if not (table := self.table(name)).is_empty():
                self._write(table.filter(pl.col("round") <= rounds), self.path / f"{name}.parquet")
        remove_leftovers(self.path)
        for folder in (*get_args(PerRound), *_FOLDERS):
            last = rounds + (folder == "policies")  # the policy that collects the next round
            for file in (self.path / folder).glob("round_*"):
                if _round_number(file) > last:
                    with explain_write_errors(file):
                        file.unlink()

    def hold(self) -> None:
        """Take the directory's lock, unless it is held already.

        Raises:
            RunDirectoryError: another process writes the run.
        """
        if self._lock is None or not self._lock.held:
            self._lock = WriterLock(self.path)

    def release(self) -> None:
        """Release the directory's lock, so that others may write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def note(self, **entries: Any) -> None:
        """Add entries to the run's notes, in JSON types, and write them to config.json."""
        self.notes = {**self.notes, **entries}
        self._write_config()

    def _write_config(self) -> None:
        document = {"format": FORMAT, "version": VERSION, "config": self.config, "versions": self.versions}
        if self.notes:
            document["notes"] = self.notes
        with self._write_file(self.path / "config.json") as temporary:
            temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a run, finished or not.

        Raises:
            RunDirectoryError: the directory holds no run, one that may not be read, or one of another format.
        """
        path = Path(path)
        return cls(path, **read_parts(path / "config.json"))

    def check_same(
        self, config: Mapping[str, Any], *, but: Collection[str] = (), only: Collection[str] | None = None
    ) -> None:
        """Refuse a configuration, in JSON types, that differs from this run's in a setting.

        Args:
            config: the configuration.
            but: names of settings that may differ; `outer.inner` for nested settings.
            only: names of those to compare, without the names inside them; None: all.

        Raises:
            RunDirectoryError: a setting differs; the message names it, or the kinds of the runs if they differ.
        """
        change = describe_change(self.config, to_plain_json(config), but=but, only=only)
        if change is not None:
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration ({change}). Choose another directory, or pass "
                "overwrite=True (--overwrite) to replace the run."
            )

    def append(self, table: Table, row: Mapping[str, Any]) -> None:
        """Add a row to a table, in the place of those of its round and later ones, and write the table."""
        before, added = self._tables.get(table), pl.DataFrame([dict(row)], infer_schema_length=None)
        if before is None:
            before = self.table(table)
        if "round" in before.columns and row.get("round") is not None:
            before = before.filter(pl.col("round").is_null() | (pl.col("round") < row["round"]))
        rows = added if before.is_empty() else pl.concat([before, added], how="diagonal_relaxed", rechunk=True)
        self._write(rows, self.path / f"{table}.parquet")
        self._tables[table] = rows

    def keep_rows(self, table: Table, rounds: Collection[int]) -> None:
        """Delete a table's rows of all rounds but these."""
        rows = self.table(table)
        if not rows.is_empty() and not rows["round"].is_in(list(rounds)).all():
            self._tables[table] = rows.filter(pl.col("round").is_in(list(rounds)))
            self._write(self._tables[table], self.path / f"{table}.parquet")

    def write_round(self, name: PerRound, number: int, table: pl.DataFrame) -> None:
        """Write one round's records, episodes or answers."""
        self._write(table, self._round_path(name, number, "parquet"))

    def write_policy(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of the policy that collects round `number` (from 1); no two may share memory."""
        with self._write_file(self.policy_path(number)) as temporary:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)

    def recording_path(self, number: int) -> Path:
        """Return the path of round `number`'s recording; see `whence.RoundRecording`."""
        return self._round_path("recordings", number, "safetensors")

    def table(self, name: Table) -> pl.DataFrame:
        """Read a table; it is empty if nothing was written yet."""
        return self._read(self.path / f"{name}.parquet", missing_ok=True)

    def round(self, name: PerRound, number: int) -> pl.DataFrame:
        """Read one round's records, episodes or answers.

        Raises:
            RunDirectoryError: the round is not there, cannot be read, or has columns of other types than whence writes.
        """
        path = self._round_path(name, number, "parquet")
        table = self._read(path)
        check_columns(table, str(path), needed=("record_id",) if name == "records" else (), error=RunDirectoryError)
        return table

    def round_path(self, name: PerRound, number: int) -> Path:
        """Return the path of one round's records, episodes or answers, whether it is there or not."""
        return self._round_path(name, number, "parquet")

    def policy_path(self, number: int) -> Path:
        """Return the path of the policy that collected round `number`, whether it is there or not."""
        return self._round_path("policies", number, "safetensors")

    def policy(self, number: int) -> dict[str, Tensor]:
        """Read the policy that collected round `number`."""
        path, every = self.policy_path(number), self.notes.get(POLICIES_EVERY, 1)
        if every > 1 and not path.exists():
            raise RunDirectoryError(
                f"{path} is not there: {self.path} keeps the policy of one round in {every}, to save space. Take "
                f"one of the rounds {', '.join(map(str, self.policies()[:4]))}, ..."
            )
        self._check_exists(path)
        return read_tensor_file(path, RunDirectoryError)[1]

    def rounds(self) -> list[int]:
        """List the rounds whose records were written."""
        return self._numbers("records", "parquet")

    def require_rounds(self, numbers: Collection[int] = ()) -> list[int]:
        """List the rounds whose records were written, at least one.

        Args:
            numbers: rounds that have to be among them.

        Raises:
            RunDirectoryError: no round was written yet, or one of `numbers` was not.
        """
        rounds = self.rounds()
        if not rounds:
            raise RunDirectoryError(
                f"{self.path} holds no rounds yet: its training is in round 1, or was interrupted there. Wait for the "
                "first round, or start the same command or script again."
            )
        if missing := sorted(set(numbers) - set(rounds)):
            raise RunDirectoryError(
                f"Round {missing[0]} is not in {self.path}, which holds rounds {rounds[0]} to {rounds[-1]}. Name "
                "rounds that it holds."
            )
        return rounds

    def answered_rounds(self) -> list[int]:
        """List the rounds after which sample prompts were answered; 0: before the first."""
        return self._numbers("answers", "parquet")

    def policies(self) -> list[int]:
        """List the rounds whose policy was written; the one after the last round is the trained policy's."""
        return self._numbers("policies", "safetensors")

    def recorded_rounds(self) -> list[int]:
        """List the rounds whose optimisation was recorded."""
        return self._numbers("recordings", "safetensors")

    def _numbers(self, folder: str, suffix: str) -> list[int]:
        numbers = (_round_number(file) for file in (self.path / folder).glob(f"*.{suffix}"))
        return sorted(number for number in numbers if number >= 0)

    def _round_path(self, folder: str, number: int, suffix: str) -> Path:
        return self.path / folder / f"round_{number:05d}.{suffix}"

    def _read(self, path: Path, *, missing_ok: bool = False) -> pl.DataFrame:
        if missing_ok and not path.exists():
            return pl.DataFrame()
        self._check_exists(path)
        try:
            return pl.read_parquet(path, glob=False)
        except (OSError, pl.exceptions.PanicException, pl.exceptions.PolarsError) as broken:
            raise RunDirectoryError(f"{path} cannot be read as Parquet: {broken}") from None

    def _write(self, table: pl.DataFrame, path: Path) -> None:
        with self._write_file(path) as temporary:
            content = io.BytesIO()  # not by Polars, whose older versions hide what the system refuses
            table.write_parquet(content, compression="zstd")
            temporary.write_bytes(content.getbuffer())

    def _write_file(self, path: Path) -> AbstractContextManager[Path]:
        """See `write_run_file`; refuses if a later writer of this process has taken the directory over."""
        if self._lock is not None and not self._lock.held:
            raise RunDirectoryError(
                f"{self.path} is written by a later run of this process, which has taken it over. Start this one again."
            )
        return write_run_file(path)

    def _check_exists(self, path: Path) -> None:
        if not path.exists():
            rounds = self.rounds()
            written = f"rounds {rounds[0]} to {rounds[-1]}" if rounds else "no rounds"
            raise RunDirectoryError(f"{path} is not there; {self.path} holds {written}.")


def _round_number(file: Path) -> int:
    """Return the round that a file's name gives; -1 if it gives none."""
    match = _ROUND.fullmatch(file.stem)
    return int(match[1]) if match and match[0] == f"round_{int(match[1]):05d}" else -1


def _remove_rounds(path: Path) -> None:
    """Delete everything that a run wrote except its configuration."""
    remove_leftovers(path)
    for name in get_args(Table):  # first, since a run without metrics is never gone on with, if this is interrupted
        (path / f"{name}.parquet").unlink(missing_ok=True)
    for name in (*get_args(PerRound), *_FOLDERS):
        shutil.rmtree(path / name, ignore_errors=True)
