"""Changes of a policy by a round: the distribution of actions and the value of each record, before and after."""

from pathlib import Path
from typing import Any

import polars as pl
import torch
from stable_baselines3.common.distributions import BernoulliDistribution, Distribution
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from whence.core import eval_mode, to_numpy
from whence.runs import RunDirectory
from whence.sb3.policy import actor_critic_view, predict
from whence.stored.agents.replaying import AnyEnv
from whence.stored.agents.rounds import load_policy, load_round


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
    policy = model.policy
    inputs = actor_critic_view(policy).prepare(records)
    with torch.no_grad(), eval_mode(policy.modules()):
        past, value_before = predict(policy, inputs)
        load_policy(directory, number + 1, model)
        present, value_after = predict(policy, inputs)
        divergence = _divergence(past, present)
    columns = {
        "divergence": divergence.double(),
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


def _describe(distribution: Distribution, when: str) -> dict[str, Tensor]:
    """Return the columns of discrete actions' probabilities or of a Gaussian's mean and standard deviation."""
    parts = _parts(distribution)
    if len(parts) > 1 or isinstance(distribution, BernoulliDistribution):
        return {}
    if isinstance(parts[0], Categorical):
        return {when: parts[0].probs}
    if isinstance(parts[0], Normal):
        return {f"mean_{when}": parts[0].mean, f"std_{when}": parts[0].stddev}
    return {}
