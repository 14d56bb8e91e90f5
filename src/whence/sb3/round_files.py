"""What a callback's run directory holds of a round: records, the episodes that began in it, and its policy."""

import polars as pl
from stable_baselines3.common.base_class import BaseAlgorithm

from whence.runs import RunDirectory
from whence.sb3.episodes import ResetTracker
from whence.sb3.state import named_tensors


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
    run.write_policy(number, named_tensors(model.policy))


def _list_episodes(records: pl.DataFrame, resets: ResetTracker) -> pl.DataFrame:
    """Return a row for each episode that began in a round, with the generator state before its reset."""
    episodes = records.filter("episode_start").select("episode_id", "env_index")
    states = [resets.take_state(env) for env in episodes["env_index"]]
    return episodes.with_columns(pl.Series("generator_state", states, dtype=pl.String))
