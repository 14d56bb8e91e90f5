"""How well a rollout's gradient, filtered or not, agrees with the true one, which a much larger rollout estimates."""

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

from whence.core import RecordBatch, as_view, eval_mode, preserve_rng_state
from whence.lab.agents import RunConfig, make_training_env
from whence.lab.agents.training import make_model
from whence.lab.visits import returns_to_go
from whence.sb3 import collect
from whence.sb3.models import load_tensors, named_tensors

Vector = NDArray[np.float64]

_ENVIRONMENTS = 100


def large_rollout(config: RunConfig, model: PPO, *, steps: int = 200_000, seed: int = 0) -> RecordBatch:
    """Collect many steps with a policy as it is, in a hundred environments side by side; the model is left as it is.

    EnvPool's environments are used if the run is evaluated in them.

    Args:
        config: the run.
        model: from `load_round`.
        steps: time steps, rounded up to equally many in each environment.
        seed: seeds environments and actions.
    """
    steps_each = math.ceil(steps / _ENVIRONMENTS)
    collecting = replace(
        config,
        seed=seed,
        device="cpu",
        n_envs=_ENVIRONMENTS,
        collect_with=config.evaluate_with,
        hyperparameters={**config.hyperparameters, "n_steps": steps_each},
    )
    env = make_training_env(collecting)
    try:
        with preserve_rng_state():
            torch.manual_seed(seed)
            collector = make_model(collecting, env)
            load_tensors(named_tensors(collector.policy), named_tensors(model.policy))
            return collect(collector)
    finally:
        env.close()


def gradient_cosines(
    model: PPO, records: RecordBatch, large: RecordBatch, kept: Mapping[str, Bool[Tensor, " n"]]
) -> pl.DataFrame:
    """Return how well the gradient of some of a rollout's records agrees with that of a much larger rollout.

    Gradients are of `mean(A log pi)`, by the parameters that log-probs depend on, at the policy that collected both.
    The larger rollout's advantages are estimated in two ways: "gae", as the smaller one's are, so that the two differ
    by chance only; and "monte-carlo", returns less values, which no error of the value function biases. The smaller
    one's are read as they are ("raw") and less the mean of the kept ones ("centred", as a minibatch's are).

    Args:
        model: the model whose policy collected the records.
        records: the rollout, n records.
        large: from `large_rollout`.
        kept: by name, a mask (n,) of the records that train.

    Returns:
        A row for each of `kept`, `advantages` (raw, centred) and `truth` (gae, monte-carlo), with `records`, `cosine`,
        and `reliability`: the cosine between the larger rollout's estimate and the gradient of infinitely many steps,
        computed from the agreement of its halves. No higher cosine can be expected.
    """
    second_half = torch.arange(len(large)) >= len(large) // 2  # environments come one after the other
    truths: dict[str, tuple[Vector, float]] = {}
    for name, advantages in (("gae", large.advantages), ("monte-carlo", monte_carlo(large))):
        first, second = (_gradient(model, large.take(half), advantages[half]) for half in (~second_half, second_half))
        agreement = max(0.0, _cosine(first, second))
        truths[name] = first + second, math.sqrt(2 * agreement / (1 + agreement))
    rows = []
    for name, mask in kept.items():
        some = records.take(mask)
        for treated, advantages in (("raw", some.advantages), ("centred", some.advantages - some.advantages.mean())):
            gradient = _gradient(model, some, advantages)
            rows += [
                {
                    "kept": name,
                    "advantages": treated,
                    "truth": truth,
                    "records": len(some),
                    "cosine": _cosine(gradient, truth_gradient),
                    "reliability": reliability,
                }
                for truth, (truth_gradient, reliability) in truths.items()
            ]
    return pl.DataFrame(rows)


def monte_carlo(records: RecordBatch) -> Float[Tensor, " n"]:
    """Return discounted returns less values: advantages that no error of the value function biases.

    Two kinds of episodes still use it: those that the rollout cuts off continue with the value of the state where they
    were cut, and the last reward of those that a time limit ended includes such a value already.
    """

    def array(name: str) -> NDArray[Any]:
        return np.asarray(getattr(records, name).cpu())

    rewards, advantages, values = (array(name).astype(np.float64) for name in ("rewards", "advantages", "values"))
    assert records.gamma is not None
    returns = returns_to_go(rewards, advantages, values, array("episode_starts"), array("env_index"), records.gamma)
    return torch.from_numpy(returns - values)


def _gradient(model: PPO, records: RecordBatch, advantages: Tensor, chunk: int = 10_000) -> Vector:
    """Return the gradient of `mean(A log pi)`, computed over `chunk` records at a time."""
    view = as_view(model.policy)
    params = {name: p.detach().requires_grad_() for name, p in view.parameters().items()}
    total: list[Tensor] | None = None
    with preserve_rng_state(), eval_mode(list(view.module.modules())):
        for start in range(0, len(records), chunk):
            part = slice(start, start + chunk)
            log_probs = view(params, view.prepare(records.take(part))).log_prob
            value = (log_probs * advantages[part].to(log_probs)).sum() / len(records)
            gradients = torch.autograd.grad(value, list(params.values()), allow_unused=True, materialize_grads=True)
            total = list(gradients) if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
    assert total is not None
    return torch.cat([gradient.flatten() for gradient in total]).double().cpu().numpy()


def _cosine(a: Vector, b: Vector) -> float:
    norms = np.linalg.norm(a), np.linalg.norm(b)
    return float(a @ b / (norms[0] * norms[1]))
