"""Changes of a policy by a round: the distribution of actions and the value of each record, before and after."""

from pathlib import Path
from typing import Any

import polars as pl
import torch
from stable_baselines3.common.distributions import BernoulliDistribution, Distribution
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from whence.experiments.rl.stored import AnyEnv, load_policy, load_round
from whence.guards import eval_mode
from whence.records import RecordBatch, to_numpy
from whence.runs import RunDirectory
from whence.sb3 import actor_critic_view, predict

CHUNK = 4096
"""Records that the policy reads at a time."""


def compare_policies(run: RunDirectory | str | Path, number: int, *, env: AnyEnv = None) -> pl.DataFrame:
    """Return how a round changed what the policy does in each of the round's states, the largest change first.

    Args:
        run: a run whose policy can be built again.
        number: the round, from 1.
        env: the environment of runs whose configuration does not name it; see `load_round`.

    Returns:
        A row for each record: `record_id`; `divergence`, KL(before‖after) of the distributions of actions in nats;
        `value_before` and `value_after`; of discrete actions the probabilities `before` and `after`, (actions,); of a
        box `mean_before`, `std_before`, `mean_after`, `std_after`, (axes,), of the Gaussian before any squashing or
        clipping.

    Raises:
        RunDirectoryError: the round, its policy or the policy after it is not there, or cannot be built again.
        Unsupported: the policy is no actor-critic one.
    """
    directory = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    model, records = load_round(directory, number, env=env)
    with torch.no_grad(), eval_mode(model.policy.modules()):
        past, value_before = _predict(model.policy, records)
        load_policy(directory, number + 1, model)
        present, value_after = _predict(model.policy, records)
        divergence = [_divergence(old, new) for old, new in zip(past, present, strict=True)]
    columns = {
        "divergence": torch.cat(divergence).double(),
        **_describe(past, "before"),
        **_describe(present, "after"),
        "value_before": value_before,
        "value_after": value_after,
    }
    table = pl.DataFrame(
        [pl.Series("record_id", records.ids.numpy())]
        + [pl.Series(name, to_numpy(column)) for name, column in columns.items()]
    )
    return table.sort("divergence", "record_id", descending=[True, False])


def _predict(policy: Any, records: RecordBatch) -> tuple[list[Distribution], Tensor]:
    """Return the distributions of actions, one for each chunk of records, and the values, (n,)."""
    view = actor_critic_view(policy)
    distributions, values = [], []
    for start in range(0, len(records), CHUNK):
        distribution, value = predict(policy, view.prepare(records.take(slice(start, start + CHUNK))))
        distributions.append(distribution)
        values.append(value)
    return distributions, torch.cat(values)


def _divergence(before: Distribution, after: Distribution) -> Tensor:
    """Return KL(before‖after) for each record, (n,).

    Squashing is the same bijection on both sides, so that the Gaussians before it have the same divergence.
    """
    return sum(
        (
            kl if isinstance(old, Categorical) else kl.sum(dim=-1)
            for old, new in zip(_parts(before), _parts(after), strict=True)
            for kl in [kl_divergence(old, new)]
        ),
        start=torch.zeros(()),
    )


def _parts(distribution: Distribution) -> list[Any]:
    """Return torch's distributions inside one of SB3's or sb3-contrib's: several of MultiDiscrete actions."""
    inner: Any = getattr(distribution, "distributions", None) or distribution.distribution
    return list(inner) if isinstance(inner, list | tuple) else [inner]


def _describe(chunks: list[Distribution], when: str) -> dict[str, Tensor]:
    """Return the columns of discrete actions' probabilities or of a Gaussian's mean and standard deviation."""
    parts = [_parts(chunk) for chunk in chunks]
    if len(parts[0]) > 1 or isinstance(chunks[0], BernoulliDistribution):
        return {}
    single = [part[0] for part in parts]
    if isinstance(single[0], Categorical):
        return {when: torch.cat([part.probs for part in single])}
    if isinstance(single[0], Normal):
        return {
            f"mean_{when}": torch.cat([part.mean for part in single]),
            f"std_{when}": torch.cat([part.stddev for part in single]),
        }
    return {}
