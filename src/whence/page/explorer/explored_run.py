"""A run that is looked at: its directory, and what was read and computed of its last few rounds."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from whence.errors import RunDirectoryError, WhenceError, first_line
from whence.experiments.rl.labels import action_labels, box_action_labels, state_names
from whence.experiments.rl.rebuilding import AnyEnv
from whence.page.explorer import columns, opening, parts
from whence.page.explorer.columns import Labels
from whence.page.moment_view import find_env
from whence.runs import RunDirectory

MEMORIES = 24
"""Results that a run remembers at a time: those of a few rounds."""

QUIET_SECONDS = 600.0
"""A run whose number of rounds is not planned counts as finished once no file of it changed for so long."""


class Round(NamedTuple):
    """The records of a round as the page shows them.

    Attributes:
        number: the round.
        table: its records, with scores if they were stored or could be computed.
        scored: whether there is a score.
        notes: what is missing, and what was computed on demand.
    """

    number: int
    table: pl.DataFrame
    scored: bool
    notes: list[str]


class ExploredRun:
    """A run whose rounds are looked at.

    Heavy work is done under `lock`; results are remembered until the files that they came from change.

    Attributes:
        directory: the run's directory, finished or not.
        label: its name on the page.
        env: the environment, for replay; None: the run's own.
        notes: what is wrong with the directory.
        lock: held while a round is computed.
    """

    def __init__(self, directory: RunDirectory | str | Path, label: str | None = None, env: AnyEnv = None) -> None:
        self.notes: list[str] = []
        if isinstance(directory, RunDirectory):
            self.directory = directory
        else:
            self.directory, self.notes = opening.open_run(directory)
        self.label = label or name_run(self.directory)
        self.env = env
        self.lock = threading.RLock()
        self._memories: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

    @property
    def is_language(self) -> bool:
        """Whether the records are responses of a language model."""
        return columns.is_language_run(self.directory.config)

    @property
    def planned(self) -> int | None:
        """The number of rounds that the run is to have; None: not known."""
        rounds = self.directory.experiment.get("rounds", self.directory.config.get("rounds"))
        return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else None

    def is_finished(self) -> bool:
        """Return whether no round is to come."""
        numbers = self.directory.rounds()
        if self.planned is not None:
            return bool(numbers) and max(numbers) >= self.planned
        newest = max((_modified(file) for file in (self.directory.path / "records").glob("*.parquet")), default=0.0)
        return time.time() - newest > QUIET_SECONDS

    def find_env(self) -> str:
        """Return the environment's id; "" if it is not known."""
        return find_env(self.directory, self.env)

    def labels(self) -> Labels:
        """Return the names of the environment's discrete actions; None: unknown."""
        labels: Labels = self.remember("labels", (), lambda: action_labels(self.find_env()))
        return labels

    def box_labels(self) -> Labels:
        """Return the names of the axes of the environment's continuous actions; None: unknown."""
        labels: Labels = self.remember("axes", (), lambda: box_action_labels(self.find_env()))
        return labels

    def state_names(self) -> Labels:
        """Return the names of the entries of the environment's observations; None: unknown."""
        names: Labels = self.remember("states", (), lambda: state_names(self.find_env()))
        return names

    def check_round(self, number: int) -> None:
        """Refuse a round that is not there.

        Raises:
            RunDirectoryError: it is not there.
        """
        opening.locate_records(self.directory, number)

    def round(self, number: int) -> Round:
        """Return a round's records, scored on demand if they were not.

        A round whose file is damaged has no records, and a note.

        Raises:
            RunDirectoryError: the round is not there.
        """
        file = opening.locate_records(self.directory, number)
        records: Round = self.remember(
            ("round", number), (file, self.directory.round_path("policies", number)), lambda: self._read_round(number)
        )
        return records

    def remember(self, key: Any, files: Iterable[Path], compute: Callable[[], Any]) -> Any:
        """Return what `compute` returned when the files were last what they are now.

        Args:
            key: names the result.
            files: what it comes from.
            compute: takes nothing.
        """
        stamps = tuple(stamp_file(file) for file in files)
        with self.lock:
            if key in self._memories and self._memories[key][0] == stamps:
                self._memories.move_to_end(key)
                return self._memories[key][1]
            result = compute()
            self._memories[key] = stamps, result
            while len(self._memories) > MEMORIES:
                self._memories.popitem(last=False)
            return result

    def _read_round(self, number: int) -> Round:
        notes: list[str] = []
        try:
            with opening.explain_parquet(opening.locate_records(self.directory, number)):
                table = opening.scan_records(self.directory, number, notes).collect()
        except RunDirectoryError as broken:
            return Round(number, pl.DataFrame({"record_id": []}, schema={"record_id": pl.Int64}), False, [str(broken)])
        if "score" not in table.columns and not self.is_language and len(table):
            table = self._score(number, table, notes)
        elif "score" not in table.columns:
            notes.append("No record of this round was scored.")
        return Round(number, table, "score" in table.columns, notes)

    def _score(self, number: int, table: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
        if "observation_digest" not in table.columns and not any(n.startswith("observation") for n in table.columns):
            notes.append("Nothing was scored in this round, and its observations were not stored.")
            return table
        try:
            scores = parts.score_round(self.directory, number, self.env)
        except (WhenceError, *opening.FOREIGN) as refusal:
            notes.append(f"Nothing was scored in this round, and scoring it now failed: {first_line(refusal)}")
            return table
        notes.append(
            "Nothing was scored while this round trained. These scores were computed now, for the return, by the "
            "policy that collected the round."
        )
        return table.join(scores, on="record_id", how="left", maintain_order="left")


def name_run(run: RunDirectory) -> str:
    """Return a run's name: its arm or rule, and its seed if it is known."""
    label, seed = identify_run(run)
    return label if seed is None else f"{label}, seed {seed}"


def identify_run(run: RunDirectory) -> tuple[str, int | None]:
    """Return a run's arm or rule, and its seed; None if it is not known."""
    config = run.config
    hyperparameters = config.get("hyperparameters")
    inner = hyperparameters.get("seed") if isinstance(hyperparameters, dict) else None
    seed = run.experiment.get("seed", config.get("seed", inner))
    return str(run.experiment.get("arm") or config.get("rule") or "run"), seed if isinstance(seed, int) else None


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def stamp_file(file: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written anew; None if it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
