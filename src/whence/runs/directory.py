"""A run on disk: typed, versioned files, each written atomically, no pickles."""

import json
import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

import polars as pl
from torch import Tensor

from whence.core import RunDirectoryError, write_atomically
from whence.runs.checkpoints import Checkpoint, list_checkpoints, read_latest
from whence.runs.config_file import (
    FORMAT,
    VERSION,
    check_config_file,
    check_content,
    check_same,
    read_config_file,
    to_plain_json,
)
from whence.runs.files import (
    FOLDERS,
    PerRound,
    RoundTensors,
    Table,
    check_links,
    explain_rounds,
    is_empty,
    list_numbered,
    read_table,
    read_tensor_file,
    remove_after,
    remove_leftovers,
    write_table,
    write_tensor_file,
)
from whence.runs.flags import FLAGS, read_flags, remove_flags
from whence.runs.locks import Lock, check_writer, lock_run
from whence.runs.row_tables import RowTable
from whence.runs.signatures import explain_distrust, is_signed, sign_config
from whence.runs.vocabulary import VOCABULARY

log = logging.getLogger("whence")

POLICIES_EVERY = "policies_every"
"""The note that says how many rounds lie between the policies that a run keeps; missing: it keeps them all."""

_REPLACING = "replacing"
"""The note of a run in whose place another one is being put; killed meanwhile, the next start does the rest."""


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
    statistics/round_00005.safetensors VecNormalize's statistics when round 5 had been collected
    states/round_00005.safetensors     a recurrent policy's states before round 5 was collected
    recordings/round_00005.safetensors what round 5's optimisation did, if recordings are on
    checkpoints/round_00005.safetensors all that training needs to go on after round 5; the last two are kept
    flags.parquet                      the records that a reader flagged, with notes
    vocabulary.parquet                 a language model's tokens: the text of each id
    .signature                         of the configuration and the place, by the user who made the run
    .lock                              locked while a process writes the run
    ```

    Each file is complete or absent, whenever the process is killed, and tables and tensors hold a checksum. What writes
    raises `RunDirectoryError` if the system refuses, or if the directory was taken over, deleted or replaced.

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
    _tables: dict[str, RowTable] = field(default_factory=dict, repr=False, init=False)
    _lock: Lock | None = field(default=None, repr=False, init=False)
    _kept_rounds: int | None = field(default=None, repr=False, init=False)

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

        What later rounds wrote is deleted as soon as something is written, so that a start that is refused deletes
        nothing. `checkpoint` holds the checkpoint to go on from; None: the run starts with its first round.

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
        if not overwrite and (path / "config.json").exists() and cls.open(path).count_rounds() is not None:
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
        """Start a run. One in the directory is deleted first if this is to overwrite it.

        The arguments are those of `begin`. A `shared` directory may hold files of another program.

        Raises:
            RunDirectoryError: the directory holds a run that wrote something, or files that are no run; the
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
                if not overwrite and (rounds := cls.open(path).count_rounds()) is not None:
                    raise RunDirectoryError(explain_rounds(path, rounds, list_checkpoints(path)))
                run.note(**{_REPLACING: True})
                run._remove_rounds()
                run.notes = {}
            run._write_config(sign=True)
        except RunDirectoryError:
            run.release()
            raise
        return run

    def count_rounds(self) -> int | None:
        """Return the number of rounds that were finished, by any file of theirs; None if the run wrote none."""
        if self.notes.get(_REPLACING):
            return None
        finished = [self.table("metrics").height, *list_checkpoints(self.path)]
        begun = [*self.rounds("records"), *self.rounds("policies"), *self.rounds("recordings")]
        return max(*finished, max(begun, default=1) - 1) if begun or any(finished) else None

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
        """Continue a run after one of its rounds, and delete what later rounds wrote before something is written.

        The arguments are those of `begin`. So many `rounds` are kept; None: those of the latest checkpoint, which is
        then in `checkpoint`; or none, if the run was interrupted before its first one. Without `trust`, as of a
        configuration that a stranger's run holds, it is not signed.

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
            if not rounds and (finished := run.count_rounds() or 0) > run.notes.get("save_every", 0):
                raise RunDirectoryError(explain_rounds(run.path, finished, []))
            if (rows := run.table("metrics").height) < rounds:
                log.warning("%s holds %d of %d rows: a file of metrics was lost.", run.path, rows, rounds)
        except RunDirectoryError:
            run.release()
            raise
        run.config, run._kept_rounds, run.is_trusted = to_plain_json(config), rounds, run.is_trusted or trust
        return run

    def remove_later(self) -> None:
        """Delete what rounds wrote after those that a resumed run goes on from."""
        if (rounds := self._kept_rounds) is None:
            return
        self._kept_rounds = None
        self._write_config(sign=self.is_trusted)
        for name in get_args(Table):
            self.keep_rows(name, range(rounds + 1))
        remove_leftovers(self.path)
        remove_flags(self.path, after=rounds)
        for folder in (*get_args(PerRound), *FOLDERS):
            # The policy that collects the next round stays.
            remove_after(self.path / folder, rounds + (folder == "policies"))

    def _remove_rounds(self) -> None:
        """Delete everything that a run wrote except its configuration."""
        remove_leftovers(self.path)
        for name in (FLAGS, VOCABULARY):
            (self.path / name).unlink(missing_ok=True)
        for name in get_args(Table):
            self._row_table(name).remove()
        for name in (*get_args(PerRound), *FOLDERS):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def hold(self) -> None:
        """Take the directory's lock, unless it is held already; see `lock_run`."""
        if self._lock is None or not self._lock.is_locked:
            self._lock = lock_run(self.path)

    def release(self) -> None:
        """Let others write the directory."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def note(self, **entries: Any) -> None:
        """Add entries to the run's notes, in JSON types, and write them to config.json."""
        self.notes = {**self.notes, **entries}
        if self._kept_rounds is None:  # else `remove_later` writes them
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
        self._prepare_writing()
        with write_atomically(self.path / "config.json") as temporary:
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
        check_same(self.path, self.config, to_plain_json(config), but=but)

    def append(self, table: Table, row: Mapping[str, Any]) -> None:
        """Add a row to a table, in the place of those of its round and later ones, and write the table."""
        self._row_table(table).append(row)

    def keep_rows(self, table: Table, rounds: Collection[int]) -> None:
        """Delete a table's rows of all rounds but these."""
        self._row_table(table).keep(rounds)

    def write_round(self, name: PerRound, number: int, table: pl.DataFrame) -> None:
        """Write one round's records, episodes or answers."""
        self._write(table, self.round_path(name, number))

    def write_policy(self, number: int, tensors: Mapping[str, Tensor], *, name: RoundTensors = "policies") -> None:
        """Write the tensors of the policy that collects round `number` (from 1), or others; no two may share memory."""
        self._prepare_writing()
        write_tensor_file(self.round_path(name, number), tensors, {})

    def table(self, name: Table) -> pl.DataFrame:
        """Read a table; it is empty if nothing was written yet."""
        table, last = self._row_table(name).read(), self._kept_rounds
        return table if last is None or table.is_empty() else table.filter(pl.col("round") <= last)

    def _row_table(self, name: Table) -> RowTable:
        return self._tables.setdefault(name, RowTable(self.path / f"{name}.parquet", self._write))

    def round(self, name: PerRound, number: int) -> pl.DataFrame:
        """Read one round's records, episodes or answers; a `RunDirectoryError` says if they are not there."""
        self._check_exists(path := self.round_path(name, number))
        return read_table(path)

    def round_path(self, name: PerRound | RoundTensors, number: int) -> Path:
        """Return the path of a file of one round, whether it is there or not."""
        return self.path / name / f"round_{number:05d}.{'safetensors' if name in get_args(RoundTensors) else 'parquet'}"

    def flags(self) -> pl.DataFrame:
        """Read the records that were flagged on the run's page: `round`, `record_id` and `note`."""
        return read_flags(self.path)

    def policy(self, number: int, *, name: RoundTensors = "policies") -> dict[str, Tensor]:
        """Read the policy that collected round `number`, or others of its tensors."""
        path, every = self.round_path(name, number), self.notes.get(POLICIES_EVERY, 1)
        if every > 1 and name == "policies" and not path.exists():
            raise RunDirectoryError(
                f"{path} is not there: {self.path} keeps the policy of one round in {every}, to save space. Take "
                f"one of the rounds {', '.join(map(str, self.rounds('policies')[:4]))}, ..."
            )
        self._check_exists(path)
        return read_tensor_file(path, RunDirectoryError)[1]

    def rounds(self, name: PerRound | RoundTensors = "records") -> list[int]:
        """List the rounds of which there are records, or other files."""
        return sorted(number for _, number in list_numbered(self.path / name))

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
                f"Round {missing[0]} is not in {self.path}, which holds rounds {rounds[0]} to {rounds[-1]}: name these."
            )
        return rounds

    def _write(self, table: pl.DataFrame, path: Path) -> None:
        self._prepare_writing()
        write_table(table, path)

    def _prepare_writing(self) -> None:
        self.check_writer()
        self.remove_later()

    def check_writer(self) -> None:
        """See `locks.check_writer`."""
        check_writer(self.path, self._lock)

    def _check_exists(self, path: Path) -> None:
        if not path.exists():
            written = f"rounds {rounds[0]} to {rounds[-1]}" if (rounds := self.rounds()) else "no rounds"
            raise RunDirectoryError(f"{path} is not there; {self.path} holds {written}.")
