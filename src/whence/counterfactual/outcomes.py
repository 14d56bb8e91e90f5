"""What trainings of a round came to, by the measures that scores are held against."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.guards import eval_mode, kept_generators
from whence.policies import ModuleView, Params
from whence.rounds import RoundRecording
from whence.rounds.replay import Round, opened
from whence.targets import Target

Evaluate = Callable[[Mapping[str, Tensor]], float]
"""Measures trained parameters, given by name: for instance their test return."""

Outcomes = Mapping[str, NDArray[np.float64]]
"""What each training came to, (m,), by name."""


def outcomes_of(
    policy: object,
    recording: RoundRecording,
    trained: Mapping[str, Tensor],
    target: Target,
    evaluate: Evaluate | None,
) -> Outcomes:
    """Return what trainings came to: "target" and "surrogate" on the round's own records, and "evaluated" where asked.

    The surrogate is `mean(rho A)`, with raw advantages. The policy and every random generator are left as they are, so
    that what `evaluate` draws from global ones is the same in each call.

    Args:
        policy: the policy that was trained, or one built like it.
        recording: of the round.
        trained: parameters by name, each (m, ...), as `retrain` returns them.
        target: to measure.
        evaluate: measures the parameters of one training; None: nothing is.
    """
    round = opened(policy, recording)
    modules = list(round.view.module.modules())
    found: dict[str, list[float]] = {"target": [], "surrogate": []}
    if evaluate is not None:
        found["evaluated"] = []
    for number in range(len(next(iter(trained.values())))):
        own = {name: tensor[number] for name, tensor in trained.items()}
        with kept_generators(), torch.no_grad():
            with eval_mode(modules):
                found["target"].append(float(target(round.view, own, round.records)))
                found["surrogate"].append(_surrogate(round, own))
            if evaluate is not None:
                found["evaluated"].append(evaluate(own))
    return {name: np.array(values) for name, values in found.items()}


def _surrogate(round: Round, params: Params) -> float:
    view, records = round.view, round.records
    outputs = (
        view.only({"log_prob"}, params, round.inputs) if isinstance(view, ModuleView) else view(params, round.inputs)
    )
    return float(((outputs.log_prob - records.log_probs).exp() * records.advantages).mean())
