"""A target's gradient that is computed every so many rounds, and used again in those between."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.attribution import open_problem
from whence.engines import Gradient, target_gradients
from whence.errors import Unsupported, WhenceError
from whence.layers import restrict_view
from whence.llm.processes import NO_KEPT_GRADIENT
from whence.llm.scoring import Scoring, split_work
from whence.llm.targets import SequenceReturn, TokenReturn
from whence.llm.view import language_view
from whence.policies import Params, PolicyView
from whence.records import RecordBatch
from whence.shards import is_in_shards
from whence.targets import Target, target_name


@dataclass(frozen=True, eq=False)
class Along:
    """The target whose gradient is the given one.

    Attributes:
        gradient: a tensor for each parameter that the target depends on.
        name: what the gradient is of.
    """

    gradient: Mapping[str, Tensor]
    name: str = "a gradient"

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target, a scalar."""
        # The scored layers may be fewer than those that the gradient was computed in.
        parts = [(params[name] * along).sum() for name, along in self.gradient.items() if name in params]
        return torch.stack(parts).sum()

    def __repr__(self) -> str:
        return self.name


class TargetRefresh:
    """Computes a target's gradient in the first round and every so many rounds, and keeps it for those between.

    Args:
        every: rounds from one computation to the next; 1: each round computes its own.

    Raises:
        WhenceError: `every` is below 1.
    """

    def __init__(self, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise WhenceError(f"refresh_target_every is {every!r}; a number of rounds, 1 or more, is needed.")
        self.every = every
        self._round, self._name, self._gradient = 0, "", Gradient()

    def set_target(
        self, model: Any, rows: RecordBatch, scoring: Scoring, number: int, make_target: Callable[[], Target]
    ) -> Scoring:
        """Return how to score in a round: along the gradient that is kept, or along a new one if it is due.

        Args:
            model: the model.
            rows: all rows of the round.
            scoring: how they are scored; its target is not read.
            number: the round, from 1.
            make_target: returns the round's target; called only if its gradient is due.
        """
        if self.every == 1:
            return replace(scoring, target=make_target())
        if not self._gradient or number >= self._round + self.every:
            target = make_target()
            self._gradient = compute_target_gradient(model, rows, replace(scoring, target=target))
            self._round, self._name = number, f"{target_name(target)} of round {number}"
        return replace(scoring, target=Along(self._gradient, self._name))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        if not self._gradient:
            return {}
        return {"round": self._round, "name": self._name, "gradient": dict(self._gradient)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what a checkpoint kept."""
        if state:
            self._round, self._name, self._gradient = state["round"], state["name"], dict(state["gradient"])


def check_refresh(every: int, target: Target, *, has_held_out: bool) -> TargetRefresh:
    """Return the refresh of a training's target.

    Raises:
        WhenceError: the target is over the scored rows, which are new in each round; or see `TargetRefresh`.
    """
    refresh = TargetRefresh(every)
    if every > 1 and not has_held_out and isinstance(target, SequenceReturn | TokenReturn) and target.rows is None:
        raise WhenceError(
            f"refresh_target_every is {every}, and {target_name(target)} is over the scored rows, which are new in "
            "each round. Leave it at 1, or use a target over other rows: ValidationLoss, or held-out prompts."
        )
    return refresh


def compute_target_gradient(model: Any, rows: RecordBatch, scoring: Scoring) -> Gradient:
    """Return the gradient of a scoring's target, summed over all processes; call it in every process.

    Raises:
        Unsupported: processes hold the parameters in shards.
    """
    view = restrict_view(language_view(model, temperature=scoring.temperature), scoring.layers)
    if is_in_shards(view.parameters().values()):
        raise Unsupported(NO_KEPT_GRADIENT)
    local_rows, target, reduce = split_work(rows, scoring.target, scoring.processes)
    with open_problem(
        view,
        local_rows,
        targets=[target],
        objective=scoring.objective,
        chunk_size=scoring.chunk_size,
        summed=reduce,
    ) as problem:
        (gradient,) = target_gradients(problem)
    return gradient
