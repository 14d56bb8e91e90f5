"""Influence-based selection inside SB3's own training loop, as one callback."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from whence.advice import advice
from whence.errors import WhenceError
from whence.influence import Influence
from whence.objectives import Objective
from whence.records import RecordBatch
from whence.rounds import DRAWS, RoundRecording
from whence.rounds.smoothed import SMOOTHED
from whence.runs import RunDirectory, without_addresses
from whence.sb3.buffer import (
    Last,
    Normalised,
    check_last,
    check_model,
    check_normalised,
    read,
    training_on,
)
from whence.sb3.description import describe
from whence.sb3.episodes import STATE, Ongoing
from whence.sb3.rehearsal import Rehearsal, held_out_gain
from whence.sb3.rounds import Recorder, check_groups, check_steps, tensors_of
from whence.sb3.scoring import Scoring
from whence.sb3.training import around_next_train, cancel
from whence.selection import KeepAll, Progress, Selection, SelectionRule
from whence.stopwatch import Stopwatch
from whence.tables import summary, with_selection
from whence.targets import Target, name_of

log = logging.getLogger("whence")


@dataclass(frozen=True)
class Round:
    """What happened in one round, as `InfluenceCallback.round` gives it.

    Attributes:
        number: from 1.
        records: the rollout.
        influence: its scores; None where the rule needs none.
        selection: what trained.
    """

    number: int
    records: RecordBatch
    influence: Influence | None
    selection: Selection


class InfluenceCallback(BaseCallback):
    """Score each rollout and let SB3's `train()` see the records that a rule selects (LDA Alg. 1).

    Scoring happens after advantages are computed and before optimisation; it changes nothing of the model, its
    optimiser, buffer or generators. `train()` is SB3's own, on a buffer whose `get` yields the selected records, and
    the buffer is as before when `train()` ends, also when it raises. A round that keeps fewer than two records is not
    trained on; it is logged and counted.

    The model's logger gets `influence/dropped_share`, `influence/negative_share`, `influence/mean` (of the scores),
    `influence/seconds` and, with a guard, `influence/held_out_gain` and `influence/fell_back`, so TensorBoard, CSV and
    W&B show them. What a practitioner should know goes once each to the logger "whence" of Python's logging. `round` is
    the last round, `metrics` has a row for each.

    Args:
        rule: which records train: `IIF(drop=0.5)`, another rule of `whence`, or a `SelectionRule` of your own.
        target: what to raise; None: `Return()`.
        objective: None: the model's own, without its value term (clip range, entropy coefficient, and whether it
            normalises advantages are read from the model).
        engine: see `attribute`.
        score: "snapshot"; or "crossfit", where no record has a voice in the target it is scored by; or a method of
            `attribute_round`, for which the round is rehearsed: trained on in full, scored as a whole, and undone.
        draws: trainings that the score "smoothed" averages; under Adam 64 foretell more, at four times the cost.
        memory: bytes that scoring may hold at a time; see `attribute` and `attribute_round`.
        guard: train on everything in rounds in which selecting does not pay, judged by held-out episodes of the same
            rollout (see `held_out_gain`). It costs two trainings of each round more, with a score of whole rounds the
            scoring of one more round, and no environment step.
        advantage_norm: "minibatch" as SB3 does it, or "buffer": once over the rollout, before anything is dropped.
        run: directory for what happened, round by round; see `RunDirectory`. None: nothing is written. A directory
            that holds a run of the same configuration is started over.
        recordings: rounds to record, from 1: what `train()` did in them, to be replayed and attributed as a whole. The
            last is in `recording`; with `run`, all are in the directory.
        last: whether a last minibatch shorter than the others trains: "keep", or "drop" as LDA's code does.
        strict: raise where fewer than two records are kept.
        verbose: 1 prints a line a round.

    Raises:
        Unsupported: `learn()` was called on a model whence cannot score; nothing was trained.
        WhenceError: an argument is not what it should be.
    """

    def __init__(
        self,
        rule: SelectionRule,
        *,
        target: Target | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        score: str = "snapshot",
        draws: int = DRAWS,
        memory: int = 2**31,
        guard: bool = False,
        advantage_norm: Normalised = "minibatch",
        run: str | Path | RunDirectory | None = None,
        last: Last = "keep",
        recordings: Collection[int] = (),
        strict: bool = False,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        if isinstance(rule, type) or not isinstance(rule, SelectionRule):
            raise WhenceError(
                f"rule is {rule!r}; pass an instance, such as IIF(drop=0.5), with `needs_influence` and `select`."
            )
        check_last(last)
        check_normalised(advantage_norm)
        if not isinstance(run, str | Path | RunDirectory | None):
            raise WhenceError(f"run is {run!r}; pass the directory's path, a RunDirectory, or None to write nothing.")
        self.scoring = Scoring.asked(score, target, objective, engine, draws, memory)
        if advantage_norm == "buffer" and recordings:
            raise WhenceError(
                "advantage_norm='buffer' trains on normalised advantages, which recordings would hold in the place of "
                "the raw ones that targets read. Leave out advantage_norm or recordings."
            )
        self.rule, self.last, self.strict = rule, last, strict
        self.guard, self.advantage_norm = guard, advantage_norm
        self.round: Round | None = None
        self.metrics: list[dict[str, Any]] = []
        self.recordings = _rounds_of(recordings)
        self.recording: RoundRecording | None = None
        self.skipped_rounds = 0
        self._advised: set[str] = set()
        self._run_path = None if isinstance(run, RunDirectory) else run
        self._run = run if isinstance(run, RunDirectory) else None
        self._rounds = 0
        self._ongoing: Ongoing | None = None
        self._read_at = 0
        self._reset_states: list[list[str | None]] = []

    def _init_callback(self) -> None:
        cancel(self.model)  # of a learn() that was broken off between a rollout and its training
        check_model(self.model)
        if self.guard or self.recordings or self.scoring.of_round:
            check_groups(self.model)
        if self.scoring.of_round:
            check_steps(self.model)
        if self._run is None and self._run_path is not None:
            self._run = RunDirectory.create(self._run_path, self._config(), versions=library_versions())

    def _on_training_start(self) -> None:
        # learn() resets the environments unless it goes on where it stopped: then the episodes under way go on too,
        # except where steps were taken that no rollout of this callback holds.
        starts = self.locals["self"]._last_episode_starts
        goes_on = self._ongoing is not None and len(self._ongoing.ids) == len(starts)
        if not goes_on or self.model.num_timesteps != self._read_at:
            next_id = 0 if self._ongoing is None else self._ongoing.next_id
            self._ongoing = replace(Ongoing.unknown(len(starts)), next_id=next_id)
        self._reset_states = [[state] if start else [] for state, start in zip(self._states(), starts, strict=True)]

    def _on_rollout_start(self) -> None:
        self._collection = Stopwatch()

    def _on_step(self) -> bool:
        if self._run is not None:
            states: list[str | None] | None = None
            for env in np.flatnonzero(self.locals["dones"]):
                states = states or self._states()
                self._reset_states[env].append(states[env])
        return True

    def _on_rollout_end(self) -> None:
        seconds = {"collection": self._collection.seconds()}
        scoring = Stopwatch()
        records, self._ongoing = read(self.model, self.model.rollout_buffer, self._ongoing)  # type: ignore[attr-defined]
        self._read_at = self.model.num_timesteps
        influence, selection, gain = self._choose(records)
        seconds["scoring"] = scoring.seconds()
        self._rounds += 1
        self.round = Round(self._rounds, records, influence, selection)
        self._count_skipped(self.round)
        metrics = {
            "round": self.round.number,
            "timestep": int(self.round.records.ids.max()) + 1,
            **summary(selection, self.round.influence),
            "episode_return": self._episode_return(),
        }
        metrics["skipped"] = metrics["kept"] < 2
        if self.guard:
            metrics |= {"held_out_gain": gain, "fell_back": gain is not None and not gain >= 0}
        self._log(metrics, seconds["scoring"]["wall"])
        self._write_round(self.round)
        around_next_train(self.model, lambda own_train: self._train(own_train, selection, metrics, seconds))

    def _choose(self, records: RecordBatch) -> tuple[Influence | None, Selection, float | None]:
        """Return scores, what is to train, and where the guard judged it, by how much it pays."""
        rehearsal = Rehearsal(self.model, self._rounds + 1, self._remaining(), self.last, self.advantage_norm)

        def choose(among: Tensor) -> tuple[Influence | None, Selection]:
            influence = self.scoring.influence(rehearsal, records, among) if self.rule.needs_influence else None
            return influence, self._select(records if bool(among.all()) else records.take(among), influence)

        influence, selection = choose(torch.ones(len(records), dtype=torch.bool))
        if not self.guard or (selection.uniform and bool(selection.keep.all())):
            return influence, selection, None
        gain = held_out_gain(rehearsal, records, lambda among: choose(among)[1])
        # Not a number where a half is left with too little to judge by: then nothing speaks for the selection.
        return influence, selection if gain >= 0 else KeepAll().select(records), gain

    def _select(self, records: RecordBatch, influence: Influence | None) -> Selection:
        selection = self.rule.select(records, influence, self._progress())
        if not isinstance(selection, Selection) or len(selection.keep) != len(records):
            got = f"{len(selection.keep)} records" if isinstance(selection, Selection) else repr(selection)
            raise WhenceError(
                f"{self.rule!r}.select() returned a selection of {got} for a rollout of {len(records)}; it must return "
                "a whence.Selection with one entry per record."
            )
        return selection

    def _count_skipped(self, current: Round) -> None:
        kept = int(current.selection.keep.sum())
        if kept < 2 and self.strict:
            raise WhenceError(
                f"Round {current.number} keeps {kept} of {len(current.records)} records, and one needs two to train "
                "on. Drop less, or pass strict=False to skip such rounds."
            )
        self.skipped_rounds += kept < 2

    def _train(
        self,
        own_train: Callable[[], None],
        selection: Selection,
        metrics: Mapping[str, Any],
        seconds: Mapping[str, Mapping[str, float]],
    ) -> None:
        self._optimisation = Stopwatch()
        if not metrics["skipped"]:
            self._train_selected(own_train, selection)
        self._write_rows(metrics, {**seconds, "optimisation": self._optimisation.seconds()})

    def _train_selected(self, own_train: Callable[[], None], selection: Selection) -> None:
        # Apart, so that a subclass can train on what is selected in a way of its own.
        assert self.round is not None
        recorder = Recorder(self.model) if self.round.number in self.recordings else None
        asked: dict[str, Any] = {"last": self.last, "advantage_norm": self.advantage_norm, "recorder": recorder}
        with training_on(self.model, selection, **asked):
            own_train()
        if recorder is not None:
            self.recording = recorder.recording(self.round.number, self.round.records)
            if self._run is not None:
                self.recording.save(self._run.recording_path(self.round.number))

    def _on_training_end(self) -> None:
        cancel(self.model)
        if self._run is not None:
            self._run.write_policy(self._rounds + 1, tensors_of(self.model.policy))

    def _episode_return(self) -> float | None:
        # SB3's own running mean over the last hundred episodes, unshaped; there where environments have a Monitor.
        ended = [float(episode["r"]) for episode in self.model.ep_info_buffer or ()]
        return float(np.mean(ended)) if ended else None

    def _progress(self) -> Progress:
        return Progress(self._rounds + 1, max(0.0, self._remaining()))

    def _remaining(self) -> float:
        # The model's own figure is still that of the round before; train() will see this one, below 0 in a last
        # rollout that goes beyond the steps asked for.
        return 1 - self.model.num_timesteps / self.model._total_timesteps

    def _states(self) -> list[str | None]:
        # The infos of the environments' last resets; there only where the environments are wrapped in RecordResets.
        return [info.get(STATE) for info in self.training_env.unwrapped.reset_infos]

    def _log(self, metrics: Mapping[str, Any], seconds: float) -> None:
        for name in ("dropped_share", "negative_share", "mean"):
            if metrics.get(name) is not None:
                self.logger.record(f"influence/{name}", metrics[name])
        for name in ("held_out_gain", "fell_back"):
            if metrics.get(name) is not None:
                self.logger.record(f"influence/{name}", float(metrics[name]))
        self.logger.record("influence/seconds", seconds)
        self.logger.record("influence/skipped_rounds", self.skipped_rounds)
        if self.verbose:
            skipped = ": skipped, two are needed" if metrics["kept"] < 2 else ""
            print(f"whence: round {metrics['round']} keeps {metrics['kept']} of {metrics['records']} records{skipped}")

    def _write_round(self, current: Round) -> None:
        if self._run is None:
            return
        table = with_selection(current.records.to_polars(observations=True), current.selection, current.influence)
        self._run.write_round("records", current.number, table)
        self._run.write_round("episodes", current.number, self._episodes(table))
        self._run.write_policy(current.number, tensors_of(self.model.policy))

    def _episodes(self, records: pl.DataFrame) -> pl.DataFrame:
        begun = records.filter("episode_start").select("episode_id", "env_index")
        queues = self._reset_states
        states = [queues[env].pop(0) if queues[env] else None for env in begun["env_index"]]
        return begun.with_columns(pl.Series("generator_state", states, dtype=pl.String))

    def _write_rows(self, metrics: Mapping[str, Any], seconds: Mapping[str, Mapping[str, float]]) -> None:
        logged = self.model.logger.name_to_value
        trained = {name: float(value) for name, value in logged.items() if name.startswith("train/")}
        if metrics["skipped"]:
            trained = {}  # what the logger still holds is an earlier round's
        self.metrics.append({**metrics, **trained})
        self._advise()
        if self._run is None:
            return
        self._run.append("metrics", self.metrics[-1])
        flat = {f"{stage}_{clock}": s for stage, clocks in seconds.items() for clock, s in clocks.items()}
        self._run.append("timings", {"round": metrics["round"], **flat})

    def _advise(self) -> None:
        table = pl.DataFrame(self.metrics, infer_schema_length=None)
        config = {"optimizer": type(self.model.policy.optimizer).__name__, "score": self.scoring.score}
        for one in advice(table, config):
            if one.kind not in self._advised:
                self._advised.add(one.kind)
                log.warning("round %d: %s", one.round, one.text)

    def _config(self) -> dict[str, Any]:
        scoring = self.scoring
        return describe(self.model) | {
            "rule": without_addresses(repr(self.rule)),
            "score": scoring.score,
            **({"draws": scoring.draws} if scoring.score == SMOOTHED else {}),
            "target": without_addresses(name_of(scoring.target)),
            "objective": "the model's" if scoring.objective is None else without_addresses(repr(scoring.objective)),
            "engine": scoring.engine,
            "guard": self.guard,
            "advantage_norm": self.advantage_norm,
            "last": self.last,
        }


def _rounds_of(recordings: object) -> frozenset[int]:
    """Return rounds to record.

    Raises:
        WhenceError: they are no collection of numbers from 1 on.
    """
    found = list(recordings) if isinstance(recordings, Iterable) else [None]
    if not all(isinstance(number, int | np.integer) and number >= 1 for number in found):
        raise WhenceError(f"recordings is {recordings!r}; give the rounds to record, from 1, such as [5, 20].")
    return frozenset(int(number) for number in found if number is not None)


def library_versions() -> dict[str, str]:
    """Return the versions that a run's results depend on."""
    found = {package: version(package) for package in ("whence", "torch", "stable-baselines3", "gymnasium", "numpy")}
    for package in ("envpool", "minigrid", "highway-env", "Box2D"):  # environments, where they are installed
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
