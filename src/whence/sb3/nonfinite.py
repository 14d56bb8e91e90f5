"""Numbers that are not finite in a training by SB3: the training stops and names them, or drops their records."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool
from torch import Tensor

from whence.culprits import find_culprits
from whence.errors import InvalidRecords, NonFinite
from whence.nonfinite import (
    NOT_FINITE,
    check_on_nonfinite,
    count_reasons,
    describe_number,
    describe_record,
    find_faults,
    make_unchecked,
)
from whence.records import RecordBatch
from whence.sb3.buffer import read_columns
from whence.sb3.episodes import Ongoing, number_episodes
from whence.sb3.finite_buffer import keep_records, restart_advantages, restore_sizes
from whence.sb3.nonfinite_error import ErrorWriter, can_act, name_broken_layer
from whence.sb3.objective import model_objective
from whence.sb3.results import Choice
from whence.sb3.statistics import describe_spoilt_statistics, original_observation, original_reward
from whence.sb3.step_guard import StepGuard
from whence.selection import Selection

log = logging.getLogger("whence")

_DROP = "on_nonfinite='drop'"


class NumberGuard:
    """Checks the numbers of each round; `InfluenceCallback` calls it as the round goes on.

    Args:
        on_nonfinite: "stop" or "drop"; see `InfluenceCallback`.

    Raises:
        WhenceError: it is neither.
    """

    def __init__(self, on_nonfinite: str) -> None:
        self.on_nonfinite = check_on_nonfinite(on_nonfinite)
        self.dropped: dict[int, str] = {}
        self._everything: RecordBatch | None = None
        self._too_few = False
        self._begun = False
        self._steps_left_out = 0

    def start_round(self, model: Any, number: int, folder: Path | None) -> None:
        """Begin a round, and check the observation that it begins with.

        Args:
            model: the model.
            number: the round's number, from 1.
            folder: the run directory; None: no minibatch is saved.

        Raises:
            NonFinite: the policy cannot act on the observation.
        """
        first, self._begun = not self._begun, True
        self._model, self._errors = model, ErrorWriter(model, number, folder)
        self.dropped, self._everything, self._too_few = {}, None, False
        self._reward_sources: list[int] | None = None
        self._steps_left_out = 0
        self._checks_observations = _holds_floats(model._last_obs)
        # Otherwise the rollout itself says which environment a reward is of.
        self._checks_rewards = model.get_vec_normalize_env() is not None
        if not _is_finite(model._last_obs):
            self._check_observation(model._last_obs, None, None)
        elif first and not can_act(model.policy, model._last_obs):  # later, the round before has checked it
            raise NonFinite(
                f"Round {number}: the policy has no valid action for the first observation{name_broken_layer(model)}. "
                "Nothing was collected. Load a policy that has not diverged, or change that layer."
            )

    def check_step(self, variables: Mapping[str, Any], ongoing: Ongoing | None) -> None:
        """Check an environment step's rewards and observations before the policy reads them.

        Args:
            variables: the local variables of `collect_rollouts`.
            ongoing: the episodes that were ongoing when the rollout began.

        Raises:
            NonFinite: the policy cannot act on an observation.
        """
        if self._checks_rewards and self._reward_sources is None and not _is_finite(variables["rewards"]):
            rewards = original_reward(self._model, variables["rewards"])
            self._reward_sources = np.flatnonzero(~np.isfinite(rewards)).tolist()
        if self._checks_observations and not _is_finite(variables["new_obs"]):
            self._check_observation(variables["new_obs"], variables["dones"], ongoing)

    def _check_observation(self, observation: Any, dones: Any, ongoing: Ongoing | None) -> None:
        model, buffer = self._model, self._model.rollout_buffer
        spoilt = describe_spoilt_statistics(model)
        if self.on_nonfinite == "drop" and not spoilt and can_act(model.policy, observation):
            return  # the record is dropped when the rollout is read
        original = observation if dones is None else original_observation(model, observation)
        name, env, value = _find_number(original)
        place = f"environment {env}"
        if dones is not None:
            starts = np.vstack([buffer.episode_starts[: buffer.pos], model._last_episode_starts, dones]).astype(bool)
            step = int(number_episodes(starts, ongoing)[1][-1, env])
            place += f", step {step}" if step >= 0 else ""
        acts = can_act(model.policy, observation)
        what = "" if acts else ", and the policy has no valid action for it"
        remedy = f", or train without such records: {_DROP}" if acts else ""
        raise NonFinite(
            f"Round {self._errors.number}: `{name}` is {value} in record {model.num_timesteps + env} ({place}), which "
            f"was not collected{what}. Nothing was trained or saved in this round. {spoilt}Find out why the "
            f"environment returns it, or replace it in a wrapper of the environment{remedy}.",
            record_ids=[model.num_timesteps + env],
        )

    def read(self, ongoing: Ongoing | None) -> tuple[RecordBatch, Ongoing]:
        """Return the rollout's records, and the episodes that are ongoing at its end; see `read_buffer`.

        With "drop", records with a number that is not finite are taken out of the rollout buffer as well, until the
        next rollout. If fewer than two others are left, all are returned as they are.

        Raises:
            NonFinite: with "stop", a number is not finite; with "drop", it spoilt VecNormalize's statistics.
        """
        model = self._model
        columns, after = read_columns(model, model.rollout_buffer, ongoing)
        try:
            records = RecordBatch(**columns)
            faults: list[str | None] = [] if _value_loss_is_finite(records) else find_faults(records)
        except InvalidRecords:
            records = make_unchecked(columns)
            faults = find_faults(records)
            if not any(faults):
                raise
        if not any(faults):
            return records, after
        spoilt = describe_spoilt_statistics(model)
        if self.on_nonfinite == "stop" or spoilt or all(fault == "loss" for fault in faults):  # the values diverged
            raise self._explain_rollout(records, faults, spoilt)
        restart_advantages(model.rollout_buffer)
        records = make_unchecked(read_columns(model, model.rollout_buffer, ongoing)[0])
        return self._drop(records, find_faults(records)), after

    def _drop(self, records: RecordBatch, faults: list[str | None]) -> RecordBatch:
        """Take records out of the round, and return the others; all if fewer than two others are left."""
        if self._everything is None:
            self._everything = records
        self.dropped |= {int(i): fault for i, fault in zip(records.ids, faults, strict=True) if fault is not None}
        finite = torch.tensor([fault is None for fault in faults])
        if int(finite.sum()) < 2:
            self._too_few = True
            return self._everything
        keep_records(self._model.rollout_buffer, finite)
        return records.take(finite)

    def choose(self, records: RecordBatch, choose: Callable[[RecordBatch], Choice]) -> tuple[RecordBatch, Choice]:
        """Return the choice among records whose scores are finite, and these records.

        Args:
            records: the records that `read` returned.
            choose: scores and selects.

        Raises:
            NonFinite: a score is not finite, and is no single record's, or `on_nonfinite` is "stop".
        """
        while True:
            if self._too_few:
                reasons = [NOT_FINITE + self.dropped.get(int(i), "the others") for i in records.ids]
                nothing = torch.zeros(len(records), dtype=torch.bool)
                choice = Choice(None, Selection(nothing, nothing.float(), reasons))
                break
            try:
                choice = choose(records)
                break
            except NonFinite as error:
                culprits = self._find_scored(records, error)
                if self.on_nonfinite == "stop" or not culprits.any():
                    raise self._explain_score(records, culprits, error) from error
                records = self._drop(records, ["score" if broken else None for broken in culprits.tolist()])
        if self.dropped:
            log.warning(
                "round %d: %d of %d records dropped, not finite: %s",
                self._errors.number,
                len(self.dropped),
                len(self._everything or records),
                count_reasons(self.dropped.values()),
            )
        return records, choice

    def _find_scored(self, records: RecordBatch, error: NonFinite) -> Bool[Tensor, " n"]:
        """Return which records make a score not finite; a target that is over all records makes all scores NaN."""
        if error.record_ids:
            return torch.isin(records.ids, torch.tensor(error.record_ids))
        objective = model_objective(self._model)
        culprits = find_culprits(self._model.policy, objective.prepare(records), objective)
        mask = torch.zeros(len(records), dtype=torch.bool)
        mask[list(culprits.positions)] = not culprits.is_policy
        return mask

    def add_dropped(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return a round's table with a row for each dropped record; numbers that are not finite are null.

        Args:
            table: the records that were not dropped, with the columns of their selection.
        """
        if not self.dropped or self._everything is None or self._too_few:
            return table if not self._too_few else _blank(table)
        rows = self._everything.to_polars(observations=True)
        order = rows.select("record_id").with_row_index("position")
        reasons = {record_id: NOT_FINITE + reason for record_id, reason in self.dropped.items()}
        rows = _blank(rows.filter(pl.col("record_id").is_in(list(reasons)))).with_columns(
            keep=pl.lit(value=False),
            weight=pl.lit(0.0, dtype=table.schema["weight"]),
            reason=pl.col("record_id").replace_strict(reasons, return_dtype=pl.String),
        )
        joined = pl.concat([table, rows], how="diagonal")
        return joined.join(order, on="record_id").sort("position").drop("position")

    @property
    def metrics(self) -> dict[str, int]:
        """The round's figures: with "drop", the numbers of dropped records and of steps left out so far."""
        if self.on_nonfinite == "stop":
            return {}
        return {"nonfinite": len(self.dropped), "nonfinite_steps": self._steps_left_out}

    @contextmanager
    def watch_training(self, records: RecordBatch) -> Iterator[None]:
        """Check each step's gradient while `train()` runs inside, and the policy afterwards; see `StepGuard`.

        Args:
            records: the records in the rollout buffer, in its order.

        Raises:
            NonFinite: see `InfluenceCallback`.
        """
        guard = StepGuard(self._errors, self.on_nonfinite, records)
        try:
            with guard.watch():
                yield
        finally:
            self._steps_left_out = guard.left_out
            restore_sizes(self._model.rollout_buffer)

    def _explain_rollout(self, records: RecordBatch, faults: list[str | None], spoilt: str) -> NonFinite:
        """Return the error of a rollout in which numbers are not finite."""
        first = self._find_first(records, faults)
        positions = [position for position, fault in enumerate(faults) if fault is not None]
        fault = faults[first]
        assert fault is not None
        others = count_reasons(f for position, f in enumerate(faults) if f is not None and position != first)
        notes = f" Also not finite, in part as advantages reach back to earlier records: {others}." if others else ""
        if fault == "reward" and _ends_episode(records, first):
            notes += " At a time limit SB3 adds the value of the terminal observation, which may be where it arises."
        if fault == "loss":
            notes += " Scale the rewards down, as VecNormalize does, or lower the learning rate."
        remedy = "" if spoilt or self.on_nonfinite == "drop" else f"or train without such records: {_DROP}."
        return self._errors.make_error(
            f"{describe_number(records, first, fault)} in {describe_record(records, first)}.{notes} Nothing was "
            f"trained in this round. {spoilt}Find out where the number arises{', ' if remedy else '.'}{remedy}",
            records.take(torch.tensor(positions)),
            [int(records.ids[first])],
        )

    def _find_first(self, records: RecordBatch, faults: list[str | None]) -> int:
        """Return the position of the record in which the trouble begins: the earliest, if a number of its own is wrong.

        Advantages are computed backwards. So if only they are wrong, or the loss, it is the latest.
        """
        origins = [
            position for position, fault in enumerate(faults) if fault not in (None, "advantage", "return", "loss")
        ]
        if not origins:
            return max((p for p, fault in enumerate(faults) if fault is not None), key=lambda p: int(records.ids[p]))
        sources = self._reward_sources
        if sources and records.env_index is not None:  # VecNormalize spreads a reward over the environments
            origins = [p for p in origins if faults[p] != "reward" or int(records.env_index[p]) in sources] or origins
        return min(origins, key=lambda p: int(records.ids[p]))

    def _explain_score(self, records: RecordBatch, culprits: Bool[Tensor, " n"], error: NonFinite) -> NonFinite:
        first = ""
        if culprits.any():
            first = f" Not finite is the gradient of {describe_record(records, int(culprits.nonzero()[0]))}."
        remedy = f" To drop such records: {_DROP}." if culprits.any() else ""
        return self._errors.make_error(
            f"{error}{first} Nothing was trained in this round.{remedy}",
            records.take(culprits) if culprits.any() else records,
            records.ids[culprits].tolist(),
            error.parameter,
        )


def _holds_floats(observation: Any) -> bool:
    arrays = observation.values() if isinstance(observation, dict) else [observation]
    return any(array.dtype.kind == "f" for array in arrays)


def _is_finite(observation: Any) -> bool:
    """Return whether an array, or each of a dict of arrays, is finite."""
    if isinstance(observation, dict):
        return all(_is_finite(array) for array in observation.values())
    if observation.dtype.kind != "f":
        return True
    # Cheaper than looking at each number; large numbers overflow, and then it counts.
    return math.isfinite(np.vdot(observation, observation)) or bool(np.isfinite(observation).all())


def _find_number(observation: Any) -> tuple[str, int, float]:
    """Return name, environment and value of the first number that is not finite."""
    arrays = observation if isinstance(observation, dict) else {"": observation}
    for key, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            place = np.argwhere(~np.isfinite(array))[0]
            return f"observation.{key}" if key else "observation", int(place[0]), float(array[tuple(place)])
    return "observation", 0, math.nan  # of VecNormalize, whose statistics are not finite


def _ends_episode(records: RecordBatch, position: int) -> bool:
    """Return whether a record is the last of its episode; True if it is the last of its environment's rollout."""
    assert records.episode_starts is not None
    assert records.env_index is not None
    following = position + 1
    if following == len(records) or records.env_index[following] != records.env_index[position]:
        return True
    return bool(records.episode_starts[following])


def _value_loss_is_finite(records: RecordBatch) -> bool:
    assert records.returns is not None
    assert records.values is not None
    return bool(torch.isfinite((records.returns - records.values).square()).all())


def _blank(table: pl.DataFrame) -> pl.DataFrame:
    """Return a table with null for each number, alone in its column, that is not finite."""
    floats = [name for name, kind in table.schema.items() if kind.is_float()]
    return table.with_columns(pl.when(pl.col(name).is_finite()).then(pl.col(name)) for name in floats)
