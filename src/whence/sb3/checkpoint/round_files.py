"""What a callback's run directory holds of a round: records, the episodes that began in it, and its policy."""

import math
from typing import Any

import polars as pl
from stable_baselines3.common.base_class import BaseAlgorithm

from whence.runs import RunDirectory
from whence.runs.directory import POLICIES_EVERY
from whence.sb3.base.model_tensors import named_tensors
from whence.sb3.episodes.resets import ResetTracker

POLICY_BYTES = 2**29
"""Bytes that a run's policies may take; of larger ones, those of every second round are kept, or of fewer."""


def write_round(
    run: RunDirectory, number: int, records: pl.DataFrame, resets: ResetTracker, model: BaseAlgorithm
) -> None:
    """Write a round's records with the digests of their observations, its episodes and the policy that collected it.

    Args:
        run: the directory.
        number: the round, from 1.
        records: a row for each record, in the order of the flattened buffer.
        resets: what was noted of the round's resets and observations; both are taken from it.
        model: the model, not yet trained on the round.
    """
    digests = pl.Series("observation_digest", resets.take_digests(), dtype=pl.UInt64)
    if digests.count():
        records = records.with_columns(digests)
    run.write_round("records", number, records)
    run.write_round("episodes", number, _list_episodes(records, resets))
    if (number - 1) % run.notes.get(POLICIES_EVERY, 1) == 0:
        run.write_policy(number, named_tensors(model.policy))


def note_policy_interval(run: RunDirectory, model: Any) -> None:
    """Note in a run that begins how many rounds lie between the policies it keeps, so that they fit `POLICY_BYTES`.

    Args:
        run: the directory, without a round.
        model: the model, whose total of steps is known.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(model.policy).values())
    rounds = math.ceil(model._total_timesteps / (model.n_steps * model.n_envs))
    run.note(**{POLICIES_EVERY: max(1, math.ceil(size * rounds / POLICY_BYTES))})


def _list_episodes(records: pl.DataFrame, resets: ResetTracker) -> pl.DataFrame:
    """Return a row for each episode that began in a round, with the generator state before its reset."""
    episodes = records.filter("episode_start").select("episode_id", "env_index")
    states = [resets.take_state(env) for env in episodes["env_index"]]
    return episodes.with_columns(pl.Series("generator_state", states, dtype=pl.String))
