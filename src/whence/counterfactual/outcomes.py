"""What trainings of a round came to, by the measures that scores are held against."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import NonFinite
from whence.guards import eval_mode, preserve_rng_state
from whence.policies import Params, compute_outputs
from whence.rounds import RoundRecording
from whence.rounds.replay import SteppedRound, open_round
from whence.targets import Target

Evaluate = Callable[[Mapping[str, Tensor], int], float]
"""`evaluate(params, repetition)` measures trained parameters, given by name: for instance their test return.

What is compared within a repetition is measured by the same chance, so that a difference is not one of chance. Each
repetition needs chance of its own, as from a seed that it is part of: what repetitions share of it would pass for
something that they agree on. What is drawn from global generators is so by itself.
"""

Outcomes = Mapping[str, NDArray[np.float64]]
"""What each training came to, (m,), by name."""


def measure_outcomes(
    policy: object,
    recording: RoundRecording,
    trained: Mapping[str, Tensor],
    target: Target,
    evaluate: Evaluate | None,
    repetition: int = 0,
) -> Outcomes:
    """Return what trainings came to: "target" and "surrogate" on the round's own records, and "evaluated" where asked.

    The surrogate is `mean(rho A)`, with raw advantages. The policy and every random generator are left as they are.

    Args:
        policy: the policy that was trained, or one built like it.
        recording: of the round.
        trained: parameters by name, each (m, ...), as `retrain` returns them.
        target: to measure.
        evaluate: measures the parameters of one training; None: nothing is.
        repetition: by whose chance it measures all of them.

    Raises:
        NonFinite: names the outcome and the training.
    """
    round = open_round(policy, recording)
    modules = list(round.view.module.modules())
    found: dict[str, list[float]] = {"target": [], "surrogate": []}
    if evaluate is not None:
        found["evaluated"] = []
    for number in range(len(next(iter(trained.values())))):
        own = {name: tensor[number] for name, tensor in trained.items()}
        with seed_outcomes(repetition), torch.no_grad():
            with eval_mode(modules):
                found["target"].append(float(target(round.view, own, round.records)))
                found["surrogate"].append(_surrogate(round, own))
            if evaluate is not None:
                found["evaluated"].append(evaluate(own, repetition))
    for name, values in found.items():
        if lost := [number for number, value in enumerate(values) if not math.isfinite(value)]:
            raise NonFinite(
                f"The outcome {name!r} of training {lost[0]}, repetition {repetition}, is {values[lost[0]]}, which has "
                "no rank among the others: look at what measures it, or at whether the round diverges."
            )
    return {name: np.array(values) for name, values in found.items()}


@contextmanager
def seed_outcomes(repetition: int) -> Iterator[None]:
    """Let global generators draw what they draw in this repetition; on exit they are as before."""
    with preserve_rng_state():
        random.seed(repetition)
        np.random.seed(repetition)  # noqa: NPY002
        torch.manual_seed(repetition)
        yield


def _surrogate(round: SteppedRound, params: Params) -> float:
    log_prob = compute_outputs(round.view, {"log_prob"}, params, round.inputs).log_prob
    return float(((log_prob - round.records.log_probs).exp() * round.records.advantages).mean())
