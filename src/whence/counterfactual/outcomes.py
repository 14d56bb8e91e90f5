"""The outcomes of trainings of a round, and the scores that are to predict them."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import NonFinite, WhenceError
from whence.guards import eval_mode, preserve_rng_state
from whence.policies import Params, compute_outputs
from whence.rounds import RoundRecording
from whence.rounds.replay import SteppedRound, open_round
from whence.targets import Target

Evaluate = Callable[[Mapping[str, Tensor], int], float]
"""`evaluate(params, repetition)` measures trained parameters, a mapping by name: for instance their test return.

Within a repetition all trainings should be measured with the same random numbers, so that they differ in the training
alone. Repetitions need different random numbers, for example by a seed that depends on the repetition: random numbers
that they share would pass for agreement. Global generators are seeded accordingly before each call.
"""

Outcomes = Mapping[str, NDArray[np.float64]]
"""The outcomes of m trainings, (m,), by the outcome's name."""


def measure_outcomes(
    policy: object,
    recording: RoundRecording,
    trained: Mapping[str, Tensor],
    target: Target,
    evaluate: Evaluate | None,
    repetition: int = 0,
) -> Outcomes:
    """Return the outcomes of trainings: "target" and "surrogate" on the round's own records, and "evaluated".

    The surrogate is `mean(rho A)`, with raw advantages. The policy and every random generator are left as they are.

    Args:
        policy: the policy that was trained, or one built like it.
        recording: the recorded round.
        trained: the trained parameters by name, each (m, ...), as `retrain` returns them.
        target: the target to measure.
        evaluate: measures the parameters of one training; None: "evaluated" is left out.
        repetition: the repetition, which seeds `evaluate` and the global generators.

    Raises:
        NonFinite: names the outcome and the training.
    """
    round = open_round(policy, recording)
    modules = list(round.view.module.modules())
    outcomes: dict[str, list[float]] = {"target": [], "surrogate": []}
    if evaluate is not None:
        outcomes["evaluated"] = []
    for number in range(len(next(iter(trained.values())))):
        params = {name: tensor[number] for name, tensor in trained.items()}
        with seed_outcomes(repetition), torch.no_grad():
            with eval_mode(modules):
                outcomes["target"].append(float(target(round.view, params, round.records)))
                outcomes["surrogate"].append(_mean_surrogate(round, params))
            if evaluate is not None:
                outcomes["evaluated"].append(evaluate(params, repetition))
    for name, values in outcomes.items():
        if lost := [number for number, value in enumerate(values) if not math.isfinite(value)]:
            raise NonFinite(
                f"The outcome {name!r} of training {lost[0]}, repetition {repetition}, is {values[lost[0]]}, which has "
                "no rank among the others: check the function that measures it, and whether the round diverges."
            )
    return {name: np.array(values) for name, values in outcomes.items()}


@contextmanager
def seed_outcomes(repetition: int) -> Iterator[None]:
    """Seed global generators by the repetition; on exit they are as before."""
    with preserve_rng_state():
        random.seed(repetition)
        np.random.seed(repetition)  # noqa: NPY002
        torch.manual_seed(repetition)
        yield


def _mean_surrogate(round: SteppedRound, params: Params) -> float:
    log_prob = compute_outputs(round.view, {"log_prob"}, params, round.inputs).log_prob
    return float(((log_prob - round.records.log_probs).exp() * round.records.advantages).mean())


def check_scores(name: str, scores: NDArray[np.floating], n: int) -> NDArray[np.float64]:
    """Return scores by which n records can be ranked, as float64.

    Args:
        name: the name of the scores, for messages.
        scores: (n,) the scores, in the order of the records.
        n: the number of records.

    Raises:
        WhenceError: the scores have another shape, or one is not finite.
    """
    checked = np.asarray(scores, dtype=np.float64)
    if checked.shape != (n,) or not np.isfinite(checked).all():
        raise WhenceError(
            f"The scores {name!r} have shape {checked.shape}, {np.isfinite(checked).sum()} of them finite; a finite "
            f"one for each of the {n} records is needed. Leave these scores out, or find where they come from."
        )
    return checked
