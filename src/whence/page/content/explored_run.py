"""A run that is looked at: its directory, and what was read and computed of its last few rounds."""

import logging
import shlex
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.causes import has_map, map_extremes
from whence.core import RunDirectoryError, WhenceError, first_line, show
from whence.findings import Check, Finding, choose_findings, count_outcomes, inspect, say_nothing_stands_out
from whence.runs import RunDirectory, is_written, read_vocabulary
from whence.scores import SIGNIFICANT, find_common_groups, list_groupings, name_groups, read_axes
from whence.stored.agents import (
    AnyEnv,
    action_labels,
    compare_policies,
    estimate_advantages,
    is_custom,
    read_reward_scale,
    replay_episode,
    score_round,
    show_taken_actions,
    state_names,
)

log = logging.getLogger("whence")

MEMORIES = 24
"""Results of rounds that are remembered at a time."""

QUIET_SECONDS = 600.0
"""A run whose number of rounds is not planned counts as finished once no round of it came for so long."""

LINKED = 200
"""Records of a finding that the page links at most."""

LOCK = threading.RLock()
"""Held where global random generators are used and restored, which two threads cannot do at once."""

_FLAGGED = ("prompt", "response", "reward", "advantage")
"""Columns that an exported flag has of its record, besides numbers that name it."""

Frames: TypeAlias = Mapping[int, NDArray[np.uint8]]
"""Pictures (height, width, 3) by step."""

T = TypeVar("T")


class Round(NamedTuple):
    """The records of a round, with scores if they can be had; and notes on what is missing or was computed now."""

    table: pl.DataFrame
    notes: list[str]


class Estimate(NamedTuple):
    """An advantage by fresh rollouts, with its standard error, and in a sentence how it was measured, or why not."""

    mc_advantage: float | None = None
    mc_error: float | None = None
    mc_text: str = ""


def remember(read: Callable[["ExploredRun", int], T]) -> Callable[["ExploredRun", int], T]:
    """Let a method that reads a round do so once, until the round's files change; heavy work is done one at a time."""
    read_once = lru_cache(MEMORIES)(lambda run, number, stamps: read(run, number))

    @wraps(read)
    def remembered(run: "ExploredRun", number: int) -> T:
        files = [run.directory.round_path("records", number)]
        files += [run.directory.round_path("policies", each) for each in (number, number + 1)]
        with LOCK:
            return read_once(run, number, tuple(map(stamp_file, files)))

    return remembered


class ExploredRun:
    """A run whose rounds are looked at: pages, pictures and the terminal read and compute through it.

    Attributes:
        directory: the run's directory, finished or not.
        label: its name on the page; by default its arm or rule, and its seed if it is known.
        env: the environment, for replay; None: the run's own.
        about: how it was trained, in a sentence, for the head of the page.
    """

    def __init__(
        self, directory: RunDirectory | str | Path, label: str | None = None, env: AnyEnv = None, about: str = ""
    ) -> None:
        self.directory = directory if isinstance(directory, RunDirectory) else RunDirectory.open(directory)
        arm, seed = identify_run(self.directory)
        self.label = label or (arm if seed is None else f"{arm}, seed {seed}")
        self.env, self.about = env, about

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of each token of a language model; none if they were not stored."""
        return read_vocabulary(self.directory.path)

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
        return action_labels(self.env_name, self.directory.config)

    @property
    def state_names(self) -> list[str] | None:
        """The names of the entries of the environment's observations; None: unknown."""
        return state_names(self.env_name, self.directory.config)

    def name_command(self, command: str, options: str = "") -> str:
        """Return a command on this run, with the environment that has to be named where the run names none."""
        env = self.env if isinstance(self.env, str) else None
        is_named = self.env_name or self.directory.config.get("env_wrappers") or is_custom(self.directory)
        if env is None and not (self.is_language or is_named):
            env = "MODULE:FUNCTION"
        words = ["whence", command, shlex.quote(str(self.directory.path)), options, f"--env {env}" if env else ""]
        return " ".join(filter(None, words))

    def flagged(self, number: int, *, scored: bool = True) -> pl.DataFrame:
        """Return a round's records with a column `flag`: a mark and the note, if a reader flagged it.

        Scores that were not stored are computed, unless it need not be `scored`.
        """
        flags = self.directory.flags().filter(pl.col("round") == number)
        texts = flags.select("record_id", flag=(pl.lit("⚑ ") + pl.col("note")).replace("⚑ ", "⚑"))
        records = self.round(number) if scored else self._read_round(number, scored=False)
        return records.table.join(texts, on="record_id", how="left", maintain_order="left")

    def list_flags(self) -> list[dict[str, Any]]:
        """Return the flags of all rounds in JSON types: `run`, `round`, `record_id`, `note`, and what was flagged."""
        flags, rows = self.directory.flags(), list[dict[str, Any]]()
        for number in flags["round"].unique().sort():
            none = pl.DataFrame(schema={"record_id": pl.Int64})
            records = attempt(partial(self.directory.round, "records", number), [], "", none)
            facts = records.select("record_id", *(pl.col(name) for name in _FLAGGED if name in records.columns))
            rows += flags.filter(pl.col("round") == number).join(facts, on="record_id", how="left").to_dicts()
        return [{"run": str(self.directory.path), **row} for row in rows]

    def group(self, number: int, by: str) -> pl.Series:
        """Return the name of the group of each record of a round by a column, or by its region."""
        table = self.round(number).table
        if (groups := name_groups(table, by, self.labels, self.name_axes(number))) is None:
            raise WhenceError(f"Round {number} cannot be grouped by {by[:80]!r}.")
        return groups

    @remember
    def groupings(self, number: int) -> list[str]:
        """Return the columns by which a round's records can be grouped; none of responses, or without scores."""
        table = self.round(number).table
        return [] if self.is_language or "score" not in table.columns else list_groupings(table)

    def name_axes(self, number: int) -> list[str] | None:
        """Return the names of the observation's entries if there is one for each."""
        names = self.state_names
        return names if names and len(names) == len(read_axes(self.round(number).table, most=len(names))) else None

    def list_findings(self) -> list[dict[str, Any]]:
        """Return what stands out in the run in JSON types, what is wrong first.

        Returns:
            `rank`, `kind`, `title`, `evidence`, `advice`, `round`, `records` (up to `LINKED` ids), `total`, their
            number, `of`, that of all records of the round, and `groups`, which hold them: column and name.
        """
        return self._describe_findings(max(self.directory.rounds(), default=0))

    def describe_checks(self) -> dict[str, Any]:
        """Return what was looked at in the run in JSON types; `silence` is what to say where nothing stands out."""
        checks = self._inspect_until(max(self.directory.rounds(), default=0))
        shown = [{"name": check.name, "outcome": check.outcome, "text": check.text} for check in checks]
        return {"checks": shown, "counts": count_outcomes(checks), "silence": say_nothing_stands_out(checks)}

    @remember
    def _inspect_until(self, number: int) -> list[Check]:
        """Look at all rounds; `number` is the last one's. They may be damaged, or of a shape unknown to detectors."""
        notes: list[str] = []
        checks = attempt(lambda: inspect(self.directory), notes, "because it could not be read")
        for reason in notes:
            log.warning("%s: could not be looked at, %s", self.directory.path, reason)
            checks = [Check("the run", "could not be looked at", reason)]
        return checks or []

    @remember
    def _describe_findings(self, number: int) -> list[dict[str, Any]]:
        return [*map(self._describe_finding, choose_findings(self._inspect_until(number)))]

    def _describe_finding(self, finding: Finding) -> dict[str, Any]:
        ids, names = finding.record_ids, ("rank", "kind", "title", "evidence", "advice", "round")
        about = {name: getattr(finding, name) for name in names} | {"records": list(ids[:LINKED]), "total": len(ids)}
        if finding.round is None or not ids:
            return about
        table = self.directory.round("records", finding.round)
        groups = [] if self.is_language else find_common_groups(table, ids, self.labels)
        return about | {"of": len(table), "groups": groups}

    @cached_property
    def _has_map(self) -> bool:
        return has_map(self.directory, env=self.env)

    def is_finished(self) -> bool:
        """Return whether no round is to come."""
        numbers = self.directory.rounds()
        if self.planned is not None:
            return bool(numbers) and max(numbers) >= self.planned
        last = stamp_file(self.directory.round_path("records", max(numbers, default=0)))
        return time.time() - (last[0] if last else 0) / 1e9 > QUIET_SECONDS

    def is_live(self) -> bool:
        """Return whether the run is being trained: its lock says so, or, where there are no locks, new rounds do."""
        is_held = is_written(self.directory.path)
        return not self.is_finished() if is_held is None else is_held

    @remember
    def round(self, number: int) -> Round:
        """Return a round's records, scored now if they were not; of a damaged file no records, and a note."""
        self.directory.require_rounds([number])
        return self._read_round(number, scored=True)

    def _read_round(self, number: int, *, scored: bool) -> Round:
        notes: list[str] = []
        try:
            table = self.directory.round("records", number)
        except RunDirectoryError as broken:
            return Round(pl.DataFrame(schema={"record_id": pl.Int64}), [str(broken)])
        if scored and "score" not in table.columns:
            table = self._add_scores(table, number, notes)
        with suppress(ValueError, KeyError, TypeError, WhenceError):  # a space that is not stored in this way
            table = show_taken_actions(self.directory, table)
        score, columns = pl.col("score"), {*table.columns}
        if "score" in columns:  # JSON has no NaN
            table = table.with_columns(score=pl.when(score.is_finite()).then(score))
        if {"score", "tokens"} <= columns:
            table = table.with_columns(score_per_token=score / pl.col("tokens").clip(lower_bound=1))
        if {"score", "error"} <= columns:
            error = pl.col("error").cast(pl.Float64)
            table = table.with_columns(differs=pl.when(error.is_finite()).then(score.abs() > SIGNIFICANT * error))
        return Round(table, notes)

    @property
    def can_score(self) -> bool:
        """Whether an agent's records can be scored now; not those recorded around environments alone."""
        return self.directory.config.get("policy", "") is not None or is_custom(self.directory)

    def _add_scores(self, table: pl.DataFrame, number: int, notes: list[str]) -> pl.DataFrame:
        if self.is_language:
            remedy = "train with the rule `ScoreAll()`, which keeps all, or give the rollouts to `whence llm score`"
            notes.append(f"No response of this round was scored. To see scores, {remedy}.")
            return table
        if not self.can_score:
            notes.append("The run was recorded around its environments alone: without a policy no record has a score.")
            return table
        failure = "Nothing was scored in this round, and scoring it now failed"
        scores = attempt(lambda: score_round(self.directory, number, env=self.env), notes, failure)
        if scores is None:
            return table
        notes.append(
            "Nothing was scored while this round trained. These scores were computed now, for the return, by the "
            "policy that collected the round."
        )
        return table.join(scores.to_polars(), on="record_id", how="left", maintain_order="left")

    def record(self, number: int, record: int) -> dict[str, Any]:
        """Return a record's row of its round's table."""
        table = self.round(number).table
        if (place := table["record_id"].index_of(record)) is None:
            missing = f"Round {number} of {self.directory.path} has no record {record}."
            raise RunDirectoryError(" ".join([missing, *self.round(number).notes]))
        return table.row(place, named=True)

    @remember
    def changes(self, number: int) -> tuple[pl.DataFrame | None, str | None]:
        """Return what a round changed in the policy, a row for each record, by `compare_policies`; or why not."""
        notes, failure = list[str](), "The policy before and after the round is not known"
        table = attempt(lambda: compare_policies(self.directory, number, env=self.env), notes, failure)
        return table, notes[0] if notes else None

    @remember
    def map(self, number: int) -> dict[str, Any] | None:
        """Return the round's most harmful and helpful records on the map of a grid world; None elsewhere."""
        table = self.round(number).table
        if self.is_language or "score" not in table.columns or not self._has_map:
            return None
        extremes = map_extremes(self.directory, table, env=self.env)
        return None if extremes is None else extremes.to_json()

    def replay(self, episode: int, steps: Collection[int]) -> tuple[Frames, str | None]:
        """Return the frames of some steps of an episode, and why there are none or what is wrong with them."""
        notes: list[str] = []
        options: Any = {"env": self.env, "frames": list(steps), "last_step": max(steps)}
        with LOCK:
            replay = attempt(lambda: replay_episode(self.directory, episode, **options), notes, "No frames")
        return ({}, notes[0]) if replay is None else (replay.frames, replay.mismatch or replay.frames_note)

    def measure(self, number: int, record: int, rollouts: int, on_step: Callable[[], None] | None = None) -> Estimate:
        """Return a record's advantage by fresh rollouts, in the unit of the round's own; see `estimate_advantages`."""
        notes, failure = list[str](), "Not measured by fresh rollouts"
        options: Any = {"env": self.env, "continuations": rollouts, "seed": 0, "on_step": on_step}
        with LOCK:
            table = attempt(lambda: estimate_advantages(self.directory, number, [record], **options), notes, failure)
        if table is None:
            return Estimate(mc_text=notes[0])
        mean, error = table["mc_advantage"][0], table["mc_error"][0]
        text = f"Measured by {rollouts} fresh rollouts each with this action and with the policy's."
        if (scale := read_reward_scale(self.directory, number)) != 1:
            text += (
                f" In the environment's rewards it is {mean:.3g} ± {error:.2g}; VecNormalize divided rewards by "
                f"{scale:.3g} for training, and the figures shown here."
            )
        return Estimate(mean / scale, error / scale, text)


def attempt(compute: Callable[[], T], notes: list[str], failure: str, otherwise: Any = None) -> Any:
    """Return what `compute` returns; if a file or an environment makes it fail, add a note that says so."""
    try:
        return compute()
    except Exception as error:
        note = f"{failure}: {first_line(error)}"
        notes += [] if note in notes else [note]
        return otherwise


def identify_run(run: RunDirectory) -> tuple[str, int | None]:
    """Return a run's arm or rule, and its seed; None if it is not known."""
    config = run.config
    hyperparameters = config.get("hyperparameters")
    inner = hyperparameters.get("seed") if isinstance(hyperparameters, dict) else None
    seed = run.experiment.get("seed", config.get("seed", inner))
    rule = config.get("rule")
    selects = rule is not None and rule not in ({"rule": "KeepAll"}, {"rule": "ScoreAll"})
    label = run.experiment.get("arm") or (show(rule) if selects else config.get("algorithm") or "recorded")
    return str(label), seed if isinstance(seed, int) else None


def stamp_file(file: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written anew; None if it is not there."""
    with suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size
    return None
