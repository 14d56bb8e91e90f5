"""Differences of activations: a finder without gradients, compared with `nearest` (after arXiv:2602.11079).

The mean activation over examples of a behaviour, less that over examples of its opposite, is a direction in a hidden
layer. A record scores by advantage x cosine of its activation, less the mean of all records, with this direction. The
paper compares pairs of responses; a record of PPO has no pair, so its advantage takes the sign.

- Agents: the last hidden layer of the trained policy. Examples are states in which the tic would pay; the opposite are
  other states of the same rollouts. Activations do not depend on the action, so other actions than B get the sign -1.
- Language models (`studies.planted.responses`): the residual stream of the trained model, as the mean over a response's
  tokens. Examples are wrong answers; the opposite are the right answers to the same prompts.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from studies.planted.judging import Floats
from whence.core import Action, RecordBatch, as_view, eval_mode
from whence.runs import RunDirectory
from whence.stored.agents import load_agent, read_objective, read_records


def compare_activations(
    activations: Float[Tensor, "n d"],
    examples: Float[Tensor, "m d"],
    opposites: Float[Tensor, "k d"],
    *,
    project: bool = False,
) -> Floats:
    """Return the cosine of each record's activation, less the mean, with the difference of two means, (n,).

    Args:
        activations: of the records.
        examples: of examples of the behaviour.
        opposites: of examples of its opposite.
        project: return projections on the difference, in place of cosines.
    """
    difference = examples.mean(0) - opposites.mean(0)
    centred = activations - activations.mean(0)
    projections = centred @ (difference / difference.norm())
    scores = projections if project else torch.cosine_similarity(centred, difference[None], dim=1)
    return scores.double().numpy()


def score_states(
    directory: RunDirectory, states: NDArray[Any], others: NDArray[Any], action: int, *, raw: bool
) -> Floats:
    """Return the scores of all records of a run of an agent, (n,).

    Args:
        directory: the run.
        states: states in which the tic would pay.
        others: other states.
        action: the tic.
        raw: take advantages as stored, in place of those that PPO normalised.
    """
    trained = load_agent(directory, directory.rounds("policies")[-1])
    rounds = [read_records(directory, number, trained) for number in directory.rounds()]
    examples, opposites = (
        Action(each, np.full(len(each), action)).as_records(rounds[0], trained.action_space)
        for each in (states, others)
    )
    activations = torch.cat([read_last_hidden(trained.policy, records) for records in rounds])
    ends = (read_last_hidden(trained.policy, each) for each in (examples, opposites))
    trained_on = rounds if raw else [read_objective(trained).prepare(records) for records in rounds]
    advantages = torch.cat([records.advantages for records in trained_on]).double().numpy()
    is_same = torch.cat([records.actions for records in rounds]).numpy() == action
    return advantages * np.where(is_same, 1, -1) * compare_activations(activations, *ends)


def read_last_hidden(policy: Any, records: RecordBatch) -> Float[Tensor, "n d"]:
    """Return the activations of an agent's last hidden layer."""
    observations: Any = as_view(policy).prepare(records)
    with torch.no_grad(), eval_mode(policy.modules()):
        features = policy.pi_features_extractor(observations["observations"])
        activations: Tensor = policy.mlp_extractor.forward_actor(features)
    return activations.float()
