"""A run on disk: typed, versioned files, each written atomically, no pickles."""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

import polars as pl
from torch import Tensor

from whence.core import RunDirectoryError, WhenceError, check_flag, describe, explain_write_errors, write_json
from whence.runs import files
from whence.runs.checkpoints import Checkpoint, list_checkpoints, read_latest
from whence.runs.config_file import (
    FORMAT,
    POLICIES_EVERY,
    REPLACING,
    VERSION,
    check_place,
    check_same,
    explain_distrust,
    explain_unsigned,
    is_signed,
    read_config_file,
    sign_config,
)
from whence.runs.files import Damaged, PerRound, RoundTensors, RowTable, Table
from whence.runs.locks import Lock, check_writer, lock_run

T = TypeVar("T")
log = logging.getLogger("whence")

Start: TypeAlias = Literal["latest", "anew"] | Checkpoint
"""Where a training begins: after the latest checkpoint if there is one, with a first round, or after a checkpoint."""


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
    checkpoints/round_00005.safetensors all that training needs to continue after round 5; the last two are kept
    flags.parquet                      the records that a reader flagged, with notes
    vocabulary.parquet                 a language model's tokens: the text of each id
    .signature                         of the configuration and the place, by the user who made the run
    .lock                              locked while a process writes the run
    ```

    Each file is complete or absent, whenever the process is killed or the power is cut, and tables and tensors hold a
    checksum. A damaged table counts as lost in a training that continues, which keeps it as NAME.damaged. What writes
    raises `RunDirectoryError` if the system refuses, or if the directory was taken over, deleted or replaced.

    Attributes:
        path: the directory.
        config: the run's configuration, JSON types only.
        versions: versions of the libraries it was run with.
        notes: what happened to the run, in JSON types: no part of what it is.
        is_trusted: whether what the configuration names may run, as this user made the run here, or says so.
        checkpoint: the one that `begin` continues from; None in a run that starts, or is read.
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
        save_every: int | None = 1,
        shared: bool = False,
        **choice: Any,
    ) -> Self:
        """Start a run or continue the one that the directory holds, as `find_start` decides, and hold its lock.

        What the run does not keep, a replaced run or later rounds, is deleted as soon as something is written, so that
        a start that fails deletes nothing. `checkpoint` holds the checkpoint to continue from; None: training begins
        with its first round.

        Args:
            path: the directory; made if it is missing. It stays the same if the working directory changes.
            config: the run's configuration; see `describe`.
            versions: versions of the libraries in use; stored, not compared.
            save_every: rounds from one checkpoint to the next, which is noted; 0: there will be none. None: no note.
            shared: whether the directory may hold files of another program.
            choice: further arguments of `find_start`.

        Raises:
            RunDirectoryError: see `find_start`; or the directory holds files that are no run, cannot be written, or
                another process does so.
        """
        run = cls(Path(path).absolute(), describe(config), dict(versions or {}))
        with explain_write_errors(run.path):
            check_place(run.path, shared=shared)
        run.hold()
        try:
            files.check_writable(run.path)
            # Under the lock: the directory may be that of a process that held it until now.
            stored = cls.find_start(run.path, config, **choice)
            files.put_damaged_aside(run.path)
            if stored is not None:
                stored.config, stored._lock, run = run.config, run._lock, stored
                run._kept_rounds = kept = 0 if run.checkpoint is None else run.checkpoint.round
                if (rows := run.table("metrics").height) < kept:
                    log.warning("%s holds %d of %d rows: a file of metrics was lost.", run.path, rows, kept)
                if not run.is_trusted:  # rounds of a stranger's do not become this user's
                    log.warning("%s is not signed as a run that you made in this place, and stays so.", run.path)
            else:
                run._kept_rounds = -1  # not even what is written of round 0
                if not run.rounds():
                    run.prepare_writing()
            if save_every is not None:
                run.note(save_every=save_every)
        except WhenceError:
            run.release()
            raise
        return run

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], **options: Any) -> Self:
        """Start a run anew, and delete what it replaces; the options are those of `begin`, and of `find_start`."""
        run = cls.begin(path, config, start="anew", save_every=None, **options)
        run.prepare_writing()
        return run

    @classmethod
    def find_start(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        *,
        start: Start = "latest",
        overwrite: bool = False,
        may_change: Collection[str] = (),
        find: Callable[[Path], Checkpoint | None] | None = None,
        check: Callable[[Checkpoint | None], None] | None = None,
        remedy: str = "",
    ) -> Self | None:
        """Decide whether a training continues a run, starts anew or is refused; this alone does, and changes nothing.

        Args:
            path: the directory.
            config: the training's configuration.
            start: where it is to begin; see `Start`.
            overwrite: start anew in place of a run; with a checkpoint for `start`, in place of its later rounds.
            may_change: names of settings that may differ from the stored ones; `outer.inner` for nested settings.
            find: returns the run's latest checkpoint that is whole; None: `read_latest`.
            check: refuses a training that does not fit the checkpoint that it would continue from.
            remedy: what else a refusal says can be done.

        Returns:
            The run that it continues, with `checkpoint`; None: it starts anew.

        Raises:
            WhenceError: overwrite is neither True nor False.
            RunDirectoryError: the directory holds a run of another configuration, or finished rounds that no checkpoint
                to continue from holds.
        """
        path, checkpoint, rounds = Path(path), None, None
        check_flag("overwrite", overwrite)
        is_anew = not os.path.exists(path / "config.json") or (overwrite and isinstance(start, str))
        stored = None if is_anew else cls.open(path)
        if stored is not None and (rounds := stored.count_rounds()) is not None:
            latest, done, kept = None, None, -1
            if start != "anew":
                stored.check_same(config, but=may_change)
                latest = (find or read_latest)(path)
                checkpoint = latest if isinstance(start, str) else start
                done = None if checkpoint is None else checkpoint.round
                kept = stored.notes.get("save_every", 0) if done is None else done
            is_latest = checkpoint is not None and latest is not None and checkpoint.path == latest.path
            if rounds > kept and not (is_latest or overwrite):
                rest = "" if list_checkpoints(path) else " and no checkpoint to go on from"
                rest = rest if done is None else f", and this training starts after {done}"
                raise RunDirectoryError(
                    f"{path} holds a run with {rounds} finished rounds{rest}. {remedy}To replace it, pass "
                    "overwrite=True (--overwrite); to keep it, choose another directory."
                )
            stored.checkpoint = checkpoint
        if check is not None:
            check(checkpoint)
        return None if rounds is None else stored

    def count_rounds(self) -> int | None:
        """Return the number of rounds that were finished, by any file of theirs; None if the run wrote none."""
        if self.notes.get(REPLACING):
            return None
        finished = list_checkpoints(self.path)
        with suppress(Damaged):  # it counts as lost
            finished.append(self.table("metrics").height)
        begun = [*self.rounds("records"), *self.rounds("policies"), *self.rounds("recordings")]
        return max(*finished, max(begun, default=1) - 1, 0) if begun or any(finished) else None

    def prepare_writing(self) -> None:
        """Delete what the directory holds and the run does not keep, unless that was done; see `begin`."""
        check_writer(self.path, self._lock)
        if (rounds := self._kept_rounds) is None:
            return
        self._kept_rounds = None
        if rounds >= 0:
            self._write_config(sign=self.is_trusted)
            files.remove_later(self.path, rounds)
            return
        if (self.path / "config.json").exists():
            notes, self.notes = self.notes, {REPLACING: True}
            self._write_config()
            files.remove_rounds(self.path)
            self.notes = notes
        self._write_config(sign=True)

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
        if self._kept_rounds is None:  # else `prepare_writing` writes them
            self._write_config()

    def sign(self) -> None:
        """Sign the configuration as this user's, if this user can have a key."""
        self.is_trusted = True
        sign_config(self.path, self.config)

    def trusted(self, names: T) -> T:
        """Return what the configuration names and will be imported, made or loaded; refuse it of a stranger's run."""
        if not self.is_trusted:
            raise RunDirectoryError(explain_distrust(self.path, is_language=self.is_language))
        return names

    def check_signed(self) -> None:
        """Refuse to take rounds for what this user measured in this place, unless the run is signed as that."""
        if not self.is_trusted and self.count_rounds() is not None:
            raise RunDirectoryError(explain_unsigned(self.path))

    def _write_config(self, *, sign: bool = False) -> None:
        self.prepare_writing()
        content = {"config": self.config, "versions": self.versions, "notes": self.notes}
        write_json(self.path / "config.json", {"format": FORMAT, "version": VERSION, **content})
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
        """Refuse a configuration, in JSON types, that differs from the run's in a setting, except those in `but`."""
        stored = self if self._kept_rounds is not None else self.open(self.path)  # others may have replaced it
        check_same(self.path, stored.config, describe(config), but=but)

    def append(self, table: Table, row: Mapping[str, Any]) -> None:
        """Add a row to a table, in the place of those of its round and later ones, and write the table."""
        self.prepare_writing()
        self._row_table(table).append(row)

    def keep_rows(self, table: Table, rounds: Collection[int]) -> None:
        """Delete a table's rows of all rounds but these."""
        if self.table(table).height:  # there is none in a run that replaces another one
            self.prepare_writing()
            self._row_table(table).keep(rounds)

    def write_round(self, name: PerRound, number: int, table: pl.DataFrame) -> None:
        """Write one round's records, episodes or answers."""
        self.prepare_writing()
        files.write_table(table, self.round_path(name, number))

    def write_policy(self, number: int, tensors: Mapping[str, Tensor], *, name: RoundTensors = "policies") -> None:
        """Write the tensors of the policy that collects round `number` (from 1), or others; no two may share memory."""
        self.prepare_writing()
        files.write_tensor_file(self.round_path(name, number), tensors, {})

    def table(self, name: Table) -> pl.DataFrame:
        """Read a table; it is empty if nothing was written yet."""
        table, last = self._row_table(name).read(), self._kept_rounds
        return table if last is None or table.is_empty() else table.filter(pl.col("round") <= last)

    def _row_table(self, name: str) -> RowTable:
        return self._tables.setdefault(name, RowTable(self.path / f"{name}.parquet"))

    def round(self, name: PerRound, number: int) -> pl.DataFrame:
        """Read one round's records, episodes or answers; a `RunDirectoryError` says if they are not there."""
        self._check_exists(path := self.round_path(name, number))
        return files.read_table(path)

    def scan(self, name: PerRound = "records") -> pl.LazyFrame:
        """Return the records, episodes or answers of all rounds as one table, which is read when it is collected.

        `round` is its first column. A column that a round lacks is null there, and one that has different types in
        different rounds has a type that holds both. A `RunDirectoryError` says if there is none, or one is damaged.
        """
        paths = {number: self.round_path(name, number) for number in self.rounds(name)}
        self._check_exists(max(paths.values(), default=self.round_path(name, 1)))
        return files.scan_tables(paths)

    def round_path(self, name: PerRound | RoundTensors, number: int) -> Path:
        """Return the path of a file of one round, whether it is there or not."""
        return self.path / name / f"round_{number:05d}.{'safetensors' if name in get_args(RoundTensors) else 'parquet'}"

    def flags(self) -> pl.DataFrame:
        """Read the records that were flagged on the run's page: `round`, `record_id` and `note`."""
        return files.read_flags(self.path)

    def policy(self, number: int, *, name: RoundTensors = "policies") -> dict[str, Tensor]:
        """Read the policy that collected round `number`, or others of its tensors."""
        path, every = self.round_path(name, number), self.notes.get(POLICIES_EVERY, 1)
        if every > 1 and name == "policies" and not path.exists():
            raise RunDirectoryError(
                f"{path} is not there: {self.path} keeps the policy of one round in {every}, to save space. Take "
                f"one of the rounds {', '.join(map(str, self.rounds('policies')[:4]))}, ..."
            )
        self._check_exists(path)
        return files.read_tensor_file(path, RunDirectoryError)[1]

    def rounds(self, name: PerRound | RoundTensors = "records") -> list[int]:
        """List the rounds of which there are records, or other files."""
        return sorted(number for _, number in files.list_numbered(self.path / name))

    def require_rounds(self, numbers: Collection[int] = (), *, name: PerRound | RoundTensors = "records") -> list[int]:
        """List the rounds of which there are records, or other files; refuse a lack of any, or of one of `numbers`."""
        rounds = self.rounds(name)
        if not rounds and self.rounds():
            remedy = f"Restore {name}/ from a copy."
            if self.config.get("policy", "") is None:
                remedy = "It was recorded around its environments alone: findings, moments and groups work without."
            raise RunDirectoryError(f"{self.path} holds no {name}, which this needs. {remedy}")
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

    def _check_exists(self, path: Path) -> None:
        if not path.exists():
            written = f"rounds {rounds[0]} to {rounds[-1]}" if (rounds := self.rounds()) else "no rounds"
            raise RunDirectoryError(f"{path} is not there; {self.path} holds {written}.")


def open_run(path: str | Path, *, trust: bool = False) -> RunDirectory:
    """Open a run's directory, finished or not; see `RunDirectory.open`."""
    return RunDirectory.open(path, trust=trust)
