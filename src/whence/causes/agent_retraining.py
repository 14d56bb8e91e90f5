"""An agent's rounds trained again: SB3's own trainings on the stored rollouts, without the records in question."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import polars as pl
import torch
from gymnasium import spaces
from torch import Tensor

from whence.causes.decisions import make_target, read_actions, read_log_probs
from whence.causes.retraining import AgentTraining, Retraining
from whence.core import Action, RecordBatch, named_tensors
from whence.rounds import RoundRecording
from whence.runs import RunDirectory
from whence.sb3.episodes import digest_environment
from whence.sb3.models import copy_tensors, load_tensors
from whence.sb3.rounds import replay_rounds
from whence.scores import raise_if_refused
from whence.selection import read_weights
from whence.stored.agents import (
    AnyEnv,
    draw_minibatches,
    leave_out,
    load_policy,
    load_trainable_rounds,
    make_replay_env,
    measure_returns,
)


@contextmanager
def open_agent(
    run: RunDirectory,
    tables: Mapping[int, pl.DataFrame],
    behaviour: Action | pl.DataFrame | None,
    training: AgentTraining,
    env: AnyEnv,
) -> Iterator[Retraining]:
    """Open an agent's rounds to train again, with advantages as stored; policies are tensors by name.

    In one seed all trainings share their minibatches, less what is left out. In the first seed these are the recorded
    ones where a round was recorded, so that training on all records of recorded rounds gives the run's own policy to
    the bit; else they are drawn by the seed.
    """
    model, recordings, recorded = load_trainable_rounds(run, list(tables), env=env)
    behaviour = read_actions(run, behaviour, env=env) if isinstance(behaviour, pl.DataFrame) else behaviour
    last, episodes = recordings[-1].number, training.test_episodes
    name = "log-density" if isinstance(model.action_space, spaces.Box) else "log-probability"
    has_code = episodes and (env is not None or run.experiment.get("evaluate_with") != "envpool")
    tests = measure_returns(run, model, last, episodes=episodes, seed=0, env=env)
    with tests if episodes else nullcontext() as test:
        digest = digest_environment(make_replay_env(run, env)) if has_code else None

        def make_rows(left_out: pl.DataFrame) -> RecordBatch:
            target = _read_pairs(recordings, left_out) if behaviour is None else behaviour
            return target.as_records(recordings[0].records)

        def train(left_out: pl.DataFrame, seed: int) -> dict[str, Tensor]:
            with raise_if_refused("Training", "Prove fewer rounds."):
                return replay_rounds(model, _list_rounds(recordings, tables, left_out, seed))

        def measure(tensors: Mapping[str, Tensor], rows: RecordBatch, seed: int) -> dict[str, float]:
            load_tensors(named_tensors(model.policy), tensors)
            with raise_if_refused("Training", "Prove fewer rounds."):
                outcomes = {name: float(read_log_probs(model, rows).double().mean())}
                return outcomes if test is None else outcomes | {"test return": test(tensors, seed)}

        def load_end() -> dict[str, Tensor] | None:
            if not run.round_path("policies", last + 1).exists():
                return None
            load_policy(run, last + 1, model)
            return copy_tensors(named_tensors(model.policy))

        yield Retraining(
            records="records",
            subject="what these records did",
            about={"target": repr(behaviour), "test_episodes": episodes, "measured": name, "env": digest},
            notes=_list_notes(list(tables), recorded),
            make_rows=make_rows,
            read=partial(_read_pairs, recordings),
            train=train,
            measure=measure,
            load_end=load_end,
        )


def _list_rounds(
    recordings: Sequence[RoundRecording], tables: Mapping[int, pl.DataFrame], left_out: pl.DataFrame, seed: int
) -> list[RoundRecording]:
    """Return the rounds with a seed's minibatches, without some records."""
    rounds = []
    for recording in recordings:
        table = tables[recording.number]
        if seed or not len(recording.minibatches):
            trained = table["record_id"].filter(pl.Series(read_weights(table) > 0))
            recording = draw_minibatches(recording, trained.to_list(), seed)
        dropped = left_out.filter(pl.col("round") == recording.number)["record_id"]
        rounds.append(leave_out(recording, dropped.to_list()))
    return rounds


def _read_pairs(recordings: Sequence[RoundRecording], keys: pl.DataFrame) -> Action:
    """Return what was done in some records as a target."""
    parts: list[RecordBatch] = []
    for recording in recordings:
        ids = keys.filter(pl.col("round") == recording.number)["record_id"].to_torch()
        if len(places := torch.isin(recording.records.ids, ids).nonzero()[:, 0]):
            parts.append(recording.records.take(places))
    return make_target(parts)


def _list_notes(numbers: Sequence[int], recorded: Sequence[int]) -> list[str]:
    if len(recorded) == len(numbers):
        return ["The first seed has the recorded minibatches: with all records, it gives the run's own policy."]
    missing = [number for number in numbers if number not in recorded]
    note = f"{len(missing)} of {len(numbers)} rounds were not recorded, so their minibatches are drawn by the seed."
    if numbers[0] > 1 and numbers[0] in missing:
        note += " The optimiser begins anew."
    return [f"{note} To record them: --record-rounds {numbers[0]}-{numbers[-1]}."]
