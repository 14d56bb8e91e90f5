"""Whether filtering brings the gradient of a rollout nearer to the true one, which many more steps estimate."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from stable_baselines3 import PPO
from torch import Tensor

from whence.advantages import returns_to_go
from whence.errors import WhenceError
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.environments import make_training_env
from whence.experiments.rl.training import make_model
from whence.guards import eval_mode, preserve_rng_state
from whence.policies import as_view
from whence.records import RecordBatch
from whence.rounds.identity import SAME, compare_outputs
from whence.sb3 import collect
from whence.sb3.state import load_tensors, named_tensors

Vector = NDArray[np.float64]

_ENVIRONMENTS = 100

_RETURNS = ("rewards", "values", "episode_starts", "env_index", "gamma")


def large_rollout(config: RunConfig, model: PPO, *, steps: int = 200_000, seed: int = 0) -> RecordBatch:
    """Collect many steps with a policy as it is, in a hundred environments side by side; the model is left as it is.

    EnvPool's environments are used where the run is evaluated in them.

    Args:
        config: of the run.
        model: from `load_round`.
        steps: at least; rounded up to as many in each environment.
        seed: of environments and actions.

    Raises:
        WhenceError: fewer steps than environments.
    """
    if steps < _ENVIRONMENTS:
        raise WhenceError(f"steps is {steps}; at least {_ENVIRONMENTS} are needed, one in each environment.")
    each = math.ceil(steps / _ENVIRONMENTS)
    asked = replace(
        config,
        seed=seed,
        device="cpu",
        n_envs=_ENVIRONMENTS,
        collect_with=config.evaluate_with,
        hyperparameters={**config.hyperparameters, "n_steps": each},
    )
    env = make_training_env(asked)
    try:
        with preserve_rng_state():
            torch.manual_seed(seed)
            collector = make_model(asked, env)
            load_tensors(named_tensors(collector.policy), named_tensors(model.policy))
            return collect(collector)
    finally:
        env.close()


def gradient_cosines(
    model: PPO, records: RecordBatch, large: RecordBatch, kept: Mapping[str, Bool[Tensor, " n"]]
) -> pl.DataFrame:
    """Return how well the gradient of some of a rollout's records agrees with that of a much larger rollout.

    Gradients are of `mean(A log pi)`, by the parameters that log-probs depend on, at the policy that collected both.
    The larger rollout's advantages are taken in two ways: "gae", as the smaller one's are, so that only chance tells
    the two apart; and "monte-carlo", returns less values, which no error of the value function biases. The smaller
    one's are taken as they are ("raw") and less the mean of what is kept ("centred", as a minibatch's are).

    Args:
        model: the policy that collected the records.
        records: the rollout.
        large: from `large_rollout`.
        kept: which records train, by name.

    Returns:
        A row for each of `kept`, `advantages` (raw, centred) and `truth` (gae, monte-carlo), with `records`, `cosine`,
        and `reliability`: the cosine of the larger rollout's own estimate with the gradient that endless steps would
        give, from the agreement of its halves. No cosine can be expected above it.

    Raises:
        WhenceError: a mask of other records or of fewer than two, records or a rollout of another policy, or a gradient
            that is 0, which has no direction.
    """
    for name, mask in kept.items():
        if mask.shape != (len(records),) or mask.dtype != torch.bool or int(mask.sum()) < 2:
            raise WhenceError(
                f"kept[{name!r}] has shape {tuple(mask.shape)} of {mask.dtype} and keeps {int(mask.sum())}; a mask of "
                f"the {len(records)} records, of torch.bool, that keeps at least two is needed."
            )
    view = as_view(model.policy)
    for name, collected in (("records", records), ("large", large)):
        if not (apart := compare_outputs(view, view.parameters(), collected)["log-probs"]) <= SAME:
            raise WhenceError(
                f"{name} was not collected by this policy: log-probs are {apart:.2g} apart on average. Load the "
                "round's policy (experiments.load_round), and collect the larger rollout with it (large_rollout)."
            )
    halves = torch.arange(len(large)) >= len(large) // 2  # environments come one after the other
    truths: dict[str, tuple[Vector, float]] = {}
    for name, advantages in (("gae", large.advantages), ("monte-carlo", monte_carlo(large))):
        parts = [_gradient(model, large.take(half), advantages[half]) for half in (~halves, halves)]
        agreement = max(0.0, _cosine(*parts))
        truths[name] = parts[0] + parts[1], math.sqrt(2 * agreement / (1 + agreement))
    rows = []
    for name, mask in kept.items():
        some = records.take(mask)
        for treated, advantages in (("raw", some.advantages), ("centred", some.advantages - some.advantages.mean())):
            mine = _gradient(model, some, advantages)
            rows += [
                {
                    "kept": name,
                    "advantages": treated,
                    "truth": truth,
                    "records": len(some),
                    "cosine": _cosine(mine, theirs),
                    "reliability": reliability,
                }
                for truth, (theirs, reliability) in truths.items()
            ]
    return pl.DataFrame(rows)


def monte_carlo(records: RecordBatch) -> Float[Tensor, " n"]:
    """Return discounted returns less values: advantages that no error of the value function biases.

    But for episodes that the rollout cuts off, which go on with the value of where they were cut, and those that a time
    limit ended, whose last reward holds it already.

    Raises:
        WhenceError: records without rewards, values, episode starts, environments or a discount factor.
    """
    lacking = [name for name in _RETURNS if getattr(records, name) is None]
    if lacking:
        raise WhenceError(f"Returns of these records cannot be made: they lack {', '.join(lacking)}.")

    def array(name: str) -> NDArray[Any]:
        return np.asarray(getattr(records, name).cpu())

    rewards, advantages, values = (array(name).astype(np.float64) for name in ("rewards", "advantages", "values"))
    assert records.gamma is not None
    found = returns_to_go(rewards, advantages, values, array("episode_starts"), array("env_index"), records.gamma)
    return torch.from_numpy(found - values)


def _gradient(model: PPO, records: RecordBatch, advantages: Tensor, at_once: int = 10_000) -> Vector:
    view = as_view(model.policy)
    free = {name: p.detach().requires_grad_() for name, p in view.parameters().items()}
    total: list[Tensor] | None = None
    with preserve_rng_state(), eval_mode(list(view.module.modules())):
        for first in range(0, len(records), at_once):
            part = slice(first, first + at_once)
            log_probs = view(free, view.prepare(records.take(part))).log_prob
            value = (log_probs * advantages[part].to(log_probs)).sum() / len(records)
            found = torch.autograd.grad(value, list(free.values()), allow_unused=True, materialize_grads=True)
            total = list(found) if total is None else [one + other for one, other in zip(total, found, strict=True)]
    assert total is not None
    return torch.cat([one.flatten() for one in total]).double().cpu().numpy()


def _cosine(one: Vector, other: Vector) -> float:
    norms = np.linalg.norm(one), np.linalg.norm(other)
    if min(norms) == 0:
        raise WhenceError("A gradient is 0, as where all advantages are, and has no direction: take another round.")
    return float(one @ other / (norms[0] * norms[1]))
