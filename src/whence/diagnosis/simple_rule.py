"""The simple rule to hold influence against: advantage × same action × similarity of state."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import WhenceError
from whence.experiments.rl.rebuilding import AnyEnv
from whence.experiments.rl.stored import load_policy, read_records
from whence.guards import eval_mode
from whence.records import RecordBatch
from whence.runs import RunDirectory
from whence.sb3.policy import actor_critic_view, embed
from whence.targets import Action
from whence.trees import named_leaves

OBSERVED, HIDDEN = "similar", "similar-hidden"
SIMILAR = (OBSERVED, HIDDEN)

SAMPLED_ROUNDS = 16
"""Rounds whose records give the standard deviations of states."""

Similarity = Callable[[RecordBatch], NDArray[np.float64]]


def make_similarity(
    run: RunDirectory, numbers: Sequence[int], model: Any, target: Action, method: str, env: AnyEnv = None
) -> Similarity:
    """Return the function that scores records by the rule `method`; see `whence.diagnosis.find_causes`.

    Args:
        run: the run.
        numbers: its rounds, in order.
        model: the run's model; it holds the last policy afterwards, and has to as long as the function is used.
        target: the decision.
        method: one of `SIMILAR`.
        env: see `load_round`.

    Raises:
        WhenceError: the actions are continuous.
    """
    if isinstance(model.action_space, spaces.Box):
        raise WhenceError(
            f"method={method!r} asks whether actions are the same, and those of {run.path} are continuous. Take "
            "method='raw'."
        )
    load_policy(run, run.policies()[-1], model)
    read = read_hidden if method == HIDDEN else read_observed
    places = np.linspace(0, len(numbers) - 1, min(len(numbers), SAMPLED_ROUNDS)).round().astype(int)
    sample = [
        read_records(run, run.round("records", numbers[place]), model, env=env) for place in dict.fromkeys(places)
    ]
    deviations = torch.cat([read(model.policy, records) for records in sample]).std(dim=0)
    pairs = target.as_records(sample[0])
    centres = _find_centres(read(model.policy, pairs), pairs.actions.reshape(len(pairs), -1))

    def score(records: RecordBatch) -> NDArray[np.float64]:
        states = read(model.policy, records)
        actions = records.actions.reshape(len(records), -1)
        total = torch.zeros(len(records), dtype=torch.float64)
        for action, centre, share in centres:
            sign = torch.where((actions == action).all(dim=1), 1.0, -1.0)
            total += share * sign * compare_states(states, centre, deviations)
        scores: NDArray[np.float64] = (total * records.advantages.double()).numpy()
        return scores

    return score


def compare_states(
    states: Float[Tensor, "n d"], centre: Float[Tensor, " d"], deviations: Float[Tensor, " d"]
) -> Float[Tensor, " n"]:
    """Return `exp(-|z - z_centre|^2 / d)` in units of the deviations; axes that never differ are left out.

    If none differs, all states are the same.
    """
    differs = deviations > 0
    distances = ((states - centre)[:, differs] / deviations[differs]).square().sum(dim=1)
    return torch.exp(-distances / max(1, int(differs.sum()))).double()


def _find_centres(states: Float[Tensor, "m d"], actions: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    """Return each action of the target with the mean of its states, and its share of the target."""
    return [
        (
            action,
            states[(actions == action).all(dim=1)].mean(dim=0),
            float((actions == action).all(dim=1).double().mean()),
        )
        for action in actions.unique(dim=0)
    ]


def read_observed(policy: Any, records: RecordBatch) -> Float[Tensor, "n d"]:
    """Return observations as rows of numbers, as the policy's network reads them."""
    observations = actor_critic_view(policy).prepare(records)["observations"]
    return torch.cat([leaf.reshape(len(records), -1).float() for _, leaf in named_leaves(observations)], dim=1)


def read_hidden(policy: Any, records: RecordBatch) -> Float[Tensor, "n d"]:
    """Return the activations of a policy's last hidden layer."""
    inputs = actor_critic_view(policy).prepare(records)
    with torch.no_grad(), eval_mode(policy.modules()):
        return embed(policy, inputs).float()
