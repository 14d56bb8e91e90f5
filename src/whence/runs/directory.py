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

from whence.core import RunDirectoryError, explain_write_errors, write_atomically
from whence.runs.checkpoints import Checkpoint, list_checkpoints, read_latest
from whence.runs.config_file import (
    FORMAT,
    VERSION,
    check_config_file,
    check_content,
    list_changes,
    read_config_file,
    to_plain_json,
)
from whence.runs.files import check_links, is_empty, read_tensor_file, remove_leftovers
from whence.runs.locks import Lock, lock_run
from whence.runs.signatures import explain_distrust, is_signed, sign_config

POLICIES_EVERY = "policies_every"
"""The note that says how many rounds lie between the policies that a run keeps; missing: it keeps them all."""

_FOLDERS = ["policies", "recordings", "phases", "checkpoints", "model", "trl", "counterfactual", "interventions"]
"""What a run may hold besides tables of rounds."""

_ROUND = re.compile(r"round_([0-9]{5}|[1-9][0-9]{5,17})")

Table: TypeAlias = Literal["metrics", "timings", "evaluations"]
"""Tables with one row a round. Timings have a table of their own, because only they differ between equal runs."""

PerRound: TypeAlias = Literal["records", "episodes", "answers"]
"""Tables that a round has one of. Answers to sample prompts follow a round; those of round 0 are the start model's."""

RoundTensors: TypeAlias = Literal["policies", "recordings"]
"""Tensors that a round has: of the policy that collected it, and of what its optimisation did, see `RoundRecording`.

The policy with the number after the last round is the trained one.
"""


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
    .signature                         of the configuration and the place, by the user who made the run
    .lock                              locked while a process writes the run
    ```

    Each file is complete or absent, whenever the process is killed. Every method that writes raises `RunDirectoryError`
    if the system refuses, or if another writer of this process has taken the directory over.

    Attributes:
        path: the directory.
        config: the run's configuration, JSON types only.
        versions: versions of the libraries it was run with.
        notes: what happened to the run, in JSON types: no part of what it is.
        is_trusted: whether what the configuration names may run, as this user made the run here, or says so.
        checkpoint: the one that `begin` goes on from; None in a run that starts, or is read.
    """

    path: Path
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    notes: Mapping[str, Any] = field(default_factory=dict)
    is_trusted: bool = False
    checkpoint: Checkpoint | None = field(default=None, repr=False, init=False)
    _tables: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, init=False)
    _lock: Lock | None = field(default=None, repr=False, init=False)

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
    ) -> Self:
        """Start a run, or go on with the one that the directory holds, after the round of its latest checkpoint.

        What later rounds wrote is deleted. `checkpoint` holds the checkpoint to go on from, or None.

        Args:
            path: the directory; made if it is missing.
            config: the run's configuration, in JSON types.
            versions: versions of the libraries in use; stored, not compared.
            save_every: rounds from one checkpoint to the next; 0: there will be none.
            overwrite: delete the run that the directory holds, and start anew.
            may_change: names of settings that may differ from the stored ones; `outer.inner` for nested settings.

        Raises:
            RunDirectoryError: see `create` and `resume`.
        """
        path = Path(path)
        # Tables are deleted first, so a run without metrics was being replaced when its process was killed.
        if not overwrite and list_checkpoints(path) and (path / "metrics.parquet").exists():
            run = cls.resume(path, config, may_change=may_change)
        else:
            run = cls.create(path, config, versions=versions, overwrite=overwrite)
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

        The arguments are those of `begin`. A `shared` directory may hold files of another program.

        Raises:
            RunDirectoryError: the directory holds a run with finished rounds, or files that are no run; the
                configuration is not JSON; or the directory cannot be written, or another process does so.
        """
        path, plain = Path(path), to_plain_json(config)
        if (path / "config.json").exists():
            check_config_file(path / "config.json")  # refuses a file that whence did not write
            check_links(path)
        elif path.exists() and (not path.is_dir() or not (shared or is_empty(path))):
            raise RunDirectoryError(
                f"{path} exists and holds no config.json, so it is no run of whence's. Choose a new or empty directory."
            )
        check_content(path, "run")
        run = cls(path, plain, dict(versions or {}))
        run.hold()
        try:
            if (path / "config.json").exists():  # perhaps of a process that had the lock until now
                if not overwrite:
                    cls.open(path)._check_replaceable()
                run._remove_rounds()
            run._write_config(sign=True)
        except RunDirectoryError:
            run.release()
            raise
        return run

    def _check_replaceable(self) -> None:
        """Refuse to delete a run that holds more than the rounds before its first checkpoint."""
        rounds, checkpoints = self.table("metrics").height, list_checkpoints(self.path)
        if rounds and (checkpoints or rounds > self.notes.get("save_every", 0)):
            rest = "" if checkpoints else " and no checkpoint to go on from"
            raise RunDirectoryError(
                f"{self.path} holds a run with {rounds} finished rounds{rest}. To replace it, pass overwrite=True "
                "(--overwrite); to keep it, choose another directory."
            )

    @classmethod
    def resume(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        rounds: int | None = None,
        may_change: Collection[str] = (),
        trust: bool = True,
    ) -> Self:
        """Continue a run after one of its rounds, and delete what later rounds wrote.

        The arguments are those of `begin`. So many `rounds` are kept; None: those of the latest checkpoint, which is
        then in `checkpoint`. Without `trust`, as of a configuration that a stranger's run holds, it is not signed.

        Raises:
            RunDirectoryError: the directory holds no run, one of another configuration, or no checkpoint that can be
                read; or it cannot be written, or another process does so.
        """
        run = cls.open(path)
        check_links(run.path)
        run.check_same(config, but=may_change)
        run.hold()
        try:
            if rounds is None:
                run.checkpoint = read_latest(run.path)
                rounds = 0 if run.checkpoint is None else run.checkpoint.round
            run.config = to_plain_json(config)
            run._write_config(sign=trust)
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
                if (match := _ROUND.match(file.stem)) and int(match[1]) > last:
                    with explain_write_errors(file):
                        file.unlink()

    def _remove_rounds(self) -> None:
        """Delete everything that a run wrote except its configuration."""
        remove_leftovers(self.path)
        with explain_write_errors(self.path):
            for name in get_args(Table):  # first: see `begin`
                (self.path / f"{name}.parquet").unlink(missing_ok=True)
        for name in (*get_args(PerRound), *_FOLDERS):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def hold(self) -> None:
        """Take the directory's lock, unless it is held already; see `lock_run`."""
        if self._lock is None or not self._lock.is_locked:
            self._lock = lock_run(self.path)

    def release(self) -> None:
        """Release the directory's lock, so that others may write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def note(self, **entries: Any) -> None:
        """Add entries to the run's notes, in JSON types, and write them to config.json."""
        self.notes = {**self.notes, **entries}
        self._write_config()

    def sign(self) -> None:
        """Sign the configuration as this user's, if this user can have a key."""
        self.is_trusted = True
        sign_config(self.path, self.config)

    def check_trust(self) -> None:
        """Refuse, with a `RunDirectoryError`, to run what the configuration of a stranger's run names."""
        if not self.is_trusted:
            raise RunDirectoryError(explain_distrust(self.path, is_language=self.is_language))

    def _write_config(self, *, sign: bool = False) -> None:
        document = {"format": FORMAT, "version": VERSION, "config": self.config, "versions": self.versions}
        with self._write_file(self.path / "config.json") as temporary:
            text = json.dumps({**document, "notes": self.notes}, indent=2)
            temporary.write_text(text + "\n", encoding="utf-8")
        if sign:
            self.sign()

    @classmethod
    def open(cls, path: str | Path, *, trust: bool = False) -> Self:
        """Open a run, finished or not; `trust` lets what it names run even if this user did not make it.

        Raises:
            RunDirectoryError: the directory holds no run, one that may not be read, or one of another format.
        """
        content = read_config_file(Path(path) / "config.json")
        return cls(Path(path), **content, is_trusted=trust or is_signed(Path(path), content["config"]))

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The settings of the command that made the run, with `arm` and `seed`; empty if a script made it."""
        experiment = self.config.get("experiment")
        return experiment if isinstance(experiment, Mapping) else {}

    @property
    def is_language(self) -> bool:
        """Whether a language model was trained, and no agent."""
        return self.config.get("kind") == "language"

    def check_same(self, config: Mapping[str, Any], *, but: Collection[str] = ()) -> None:
        """Refuse a configuration, in JSON types, that differs from this run's in a setting, except those in `but`."""
        if changes := list_changes(self.config, to_plain_json(config), but=but):
            rest = [f"and {len(changes) - 5} more"] if len(changes) > 5 else []
            shown = "; ".join([*changes[:5], *rest])
            raise RunDirectoryError(
                f"{self.path} holds a run of another configuration ({shown}). Choose another directory, or pass "
                "overwrite=True (--overwrite) to replace the run."
            )

    def append(self, table: Table, row: Mapping[str, Any]) -> None:
        """Add a row to a table, in the place of those of its round and later ones, and write the table."""
        before = self._tables[table] if table in self._tables else self.table(table)
        added = pl.DataFrame([dict(row)], infer_schema_length=None)
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
        self._write(table, self.round_path(name, number))

    def write_policy(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of the policy that collects round `number` (from 1); no two may share memory."""
        with self._write_file(self.round_path("policies", number)) as temporary:
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary)

    def table(self, name: Table) -> pl.DataFrame:
        """Read a table; it is empty if nothing was written yet."""
        return self._read(path) if (path := self.path / f"{name}.parquet").exists() else pl.DataFrame()

    def round(self, name: PerRound, number: int) -> pl.DataFrame:
        """Read one round's records, episodes or answers; a `RunDirectoryError` says if they are not there."""
        return self._read(self.round_path(name, number))

    def round_path(self, name: PerRound | RoundTensors, number: int) -> Path:
        """Return the path of a file of one round, whether it is there or not."""
        return self.path / name / f"round_{number:05d}.{'safetensors' if name in get_args(RoundTensors) else 'parquet'}"

    def policy(self, number: int) -> dict[str, Tensor]:
        """Read the policy that collected round `number`."""
        path, every = self.round_path("policies", number), self.notes.get(POLICIES_EVERY, 1)
        if every > 1 and not path.exists():
            raise RunDirectoryError(
                f"{path} is not there: {self.path} keeps the policy of one round in {every}, to save space. Take "
                f"one of the rounds {', '.join(map(str, self.rounds('policies')[:4]))}, ..."
            )
        self._check_exists(path)
        return read_tensor_file(path, RunDirectoryError)[1]

    def rounds(self, name: PerRound | RoundTensors = "records") -> list[int]:
        """List the rounds of which there are records, or other files."""
        matches = (_ROUND.fullmatch(file.stem) for file in (self.path / name).glob("round_*.*"))
        return sorted(int(match[1]) for match in matches if match)

    def require_rounds(self, numbers: Collection[int] = ()) -> list[int]:
        """List the rounds whose records were written, at least one, and all of `numbers`.

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

    def _read(self, path: Path) -> pl.DataFrame:
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
        """See `write_atomically`; refuses if a later writer of this process has taken the directory over."""
        if self._lock is not None and not self._lock.is_locked:
            raise RunDirectoryError(
                f"{self.path} is written by a later run of this process, which has taken it over. Start this one again."
            )
        return write_atomically(path)

    def _check_exists(self, path: Path) -> None:
        if not path.exists():
            rounds = self.rounds()
            written = f"rounds {rounds[0]} to {rounds[-1]}" if rounds else "no rounds"
            raise RunDirectoryError(f"{path} is not there; {self.path} holds {written}.")
