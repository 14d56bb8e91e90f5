"""A run that is looked at: its directory, and what was read and computed of its last few rounds."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from whence.errors import RunDirectoryError, first_line
from whence.experiments import (
    AnyEnv,
    action_labels,
    box_action_labels,
    compare_policies,
    estimate_advantages,
    replay_episode,
    score_round,
    state_names,
)
from whence.runs import RunDirectory
from whence.sb3 import EpisodeReplay

MEMORIES = 24
"""Results that a run remembers at a time: those of a few rounds."""

QUIET_SECONDS = 600.0
"""A run whose number of rounds is not planned counts as finished once no file of it changed for so long."""

LOCK = threading.RLock()
"""Held where global random generators are used and restored, which two threads cannot do at once."""


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
    """A run whose rounds are looked at: pages, pictures and the terminal read and compute through it.

    Heavy work is done one at a time; results are remembered until the files that they came from change.

    Attributes:
        directory: the run's directory, finished or not.
        label: its name on the page.
        env: the environment, for replay; None: the run's own.
    """

    def __init__(self, directory: RunDirectory | str | Path, label: str | None = None, env: AnyEnv = None) -> None:
        self.directory = directory if isinstance(directory, RunDirectory) else RunDirectory.open(directory)
        self.label = label or name_run(self.directory)
        self.env = env
        self._memories: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

    @property
    def is_language(self) -> bool:
        """Whether the records are responses of a language model."""
        return self.directory.is_language

    @property
    def planned(self) -> int | None:
        """The number of rounds that the run is to have; None: not known."""
        rounds = self.directory.experiment.get("rounds", self.directory.config.get("rounds"))
        return rounds if isinstance(rounds, int) else None

    @property
    def env_name(self) -> str:
        """The environment's id, that asked for or the run's; "" if neither is a name."""
        name = self.env if isinstance(self.env, str) else self.directory.config.get("env")
        return name if isinstance(name, str) else ""

    @property
    def labels(self) -> list[str] | None:
        """The names of the environment's discrete actions; None: unknown."""
        return action_labels(self.env_name)

    @property
    def axis_labels(self) -> list[str] | None:
        """The names of the axes of the environment's continuous actions; None: unknown."""
        return box_action_labels(self.env_name)

    @property
    def state_names(self) -> list[str] | None:
        """The names of the entries of the environment's observations; None: unknown."""
        return state_names(self.env_name)

    def is_finished(self) -> bool:
        """Return whether no round is to come."""
        numbers = self.directory.rounds()
        if self.planned is not None:
            return bool(numbers) and max(numbers) >= self.planned
        stamps = [stamp_file(file) for file in (self.directory.path / "records").glob("*.parquet")]
        return time.time() - max((stamp[0] for stamp in stamps if stamp), default=0) / 1e9 > QUIET_SECONDS

    def check_round(self, number: int) -> None:
        """Refuse a round that is not there.

        Raises:
            RunDirectoryError: the round is not there.
        """
        if not self.directory.round_path("records", number).is_file():
            numbers = self.directory.rounds()
            there = f"rounds {numbers[0]} to {numbers[-1]}" if numbers else "no rounds"
            raise RunDirectoryError(f"Round {number} is not there; {self.directory.path} holds records of {there}.")

    def round(self, number: int) -> Round:
        """Return a round's records, scored on demand if they were not.

        A round whose file is damaged has no records, and a note.

        Raises:
            RunDirectoryError: the round is not there.
        """
        self.check_round(number)
        files = (self.directory.round_path("records", number), self.directory.round_path("policies", number))
        records: Round = self.remember(("round", number), files, lambda: self._read_round(number))
        return records

    def record(self, number: int, record: int) -> dict[str, Any]:
        """Return a record's row of its round's table.

        Raises:
            RunDirectoryError: the round or the record is not there.
        """
        rows = self.round(number).table.filter(pl.col("record_id") == record)
        if rows.is_empty():
            missing = f"Round {number} of {self.directory.path} has no record {record}."
            raise RunDirectoryError(" ".join([missing, *self.round(number).notes]))
        return rows.row(0, named=True)

    def changes(self, number: int) -> pl.DataFrame:
        """Return what a round changed in the policy, a row for each record; see `compare_policies`.

        Raises:
            RunDirectoryError: the policies are not there or cannot be built again.
        """

        def compare() -> pl.DataFrame | str:
            # A refusal is remembered, too: each record's details need it.
            try:
                return compare_policies(self.directory, number, env=self.env)
            except Exception as refusal:
                return first_line(refusal)

        files = [self.directory.round_path("policies", each) for each in (number, number + 1)]
        table: pl.DataFrame | str = self.remember(("changes", number), files, compare)
        if isinstance(table, str):
            raise RunDirectoryError(table)
        return table

    def replay(self, episode: int, steps: Collection[int]) -> tuple[EpisodeReplay | None, str | None]:
        """Return an episode's replay with the frames of some steps; or None, and why there is none."""
        try:
            with LOCK:
                run = self.directory
                return replay_episode(run, episode, env=self.env, frames=list(steps), last_step=max(steps)), None
        except Exception as refusal:  # an environment's own code may raise anything
            return None, f"No frames: {first_line(refusal)}"

    def measure(
        self, number: int, record: int, rollouts: int, on_step: Callable[[], None] | None = None
    ) -> tuple[float, float]:
        """Return a record's advantage by fresh rollouts and its standard error; see `estimate_advantages`."""
        with LOCK:
            table = estimate_advantages(
                self.directory, number, [record], env=self.env, continuations=rollouts, seed=0, on_step=on_step
            )
            return table["mc_advantage"][0], table["mc_error"][0]

    def remember(self, key: Any, files: Iterable[Path], compute: Callable[[], Any]) -> Any:
        """Return what `compute` returned when the files were last what they are now.

        Args:
            key: names the result.
            files: what it comes from.
            compute: takes nothing.
        """
        stamps = tuple(stamp_file(file) for file in files)
        with LOCK:
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
            table = self.directory.round("records", number)
        except RunDirectoryError as broken:
            return Round(number, pl.DataFrame({"record_id": []}, schema={"record_id": pl.Int64}), False, [str(broken)])
        if "score" not in table.columns and not self.is_language and len(table):
            table = self._score(number, table, notes)
        elif "score" not in table.columns:
            notes.append("No record of this round was scored.")
        if "score" in table.columns:  # JSON has no NaN
            table = table.with_columns(score=pl.when(pl.col("score").is_finite()).then(pl.col("score")))
        return Round(number, table, "score" in table.columns, notes)

    def _score(self, number: int, table: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
        if "observation_digest" not in table.columns and not any(n.startswith("observation") for n in table.columns):
            notes.append("Nothing was scored in this round, and its observations were not stored.")
            return table
        try:
            scores = score_round(self.directory, number, env=self.env).to_polars()
        except Exception as refusal:
            notes.append(f"Nothing was scored in this round, and scoring it now failed: {first_line(refusal)}")
            return table
        notes.append(
            "Nothing was scored while this round trained. These scores were computed now, for the return, by the "
            "policy that collected the round."
        )
        return table.join(scores, on="record_id", how="left", maintain_order="left")


def attempt(compute: Callable[[], Any], notes: list[str], failure: str, otherwise: Any = None) -> Any:
    """Return what `compute` returns; if the run's files or its environment make it fail, add a note.

    Args:
        compute: takes nothing.
        notes: gets the note.
        failure: what cannot be shown, as the start of a sentence: "The strip cannot be drawn".
        otherwise: returned instead.
    """
    try:
        return compute()
    except Exception as error:
        note = f"{failure}: {first_line(error)}"
        notes += [] if note in notes else [note]
        return otherwise


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


def stamp_file(file: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written anew; None if it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
