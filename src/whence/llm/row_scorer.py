"""The scores of a training's rounds: what makes them cheaper, and what of it a checkpoint keeps."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from accelerate import Accelerator

from whence.attribution import open_problem
from whence.engines import Gradient, target_gradients
from whence.errors import Unsupported, WhenceError
from whence.influence import Influence
from whence.layers import choose_parameters, restrict_view
from whence.llm.processes import NO_KEPT_GRADIENT
from whence.llm.scoring import Scoring, score, split_work
from whence.llm.targets import Along, SequenceReturn, TokenReturn
from whence.llm.view import language_view
from whence.records import RecordBatch
from whence.shards import is_in_shards
from whence.targets import Target, target_name


class RowScorer:
    """Scores the rows of each round of a training.

    Args:
        scoring: how rows are scored.
        model: the model.
        accelerator: the accelerator of Accelerate.
        refresh_target_every: see `PPOTrainer`.
        autocast: see `PPOTrainer`.
        has_held_out: whether each round has a target over held-out prompts' responses.

    Raises:
        WhenceError: the model has no such layers, the target is new in each round, or mixed precision is float16.
    """

    def __init__(
        self,
        scoring: Scoring,
        model: Any,
        accelerator: Accelerator,
        *,
        refresh_target_every: int = 1,
        autocast: bool = False,
        has_held_out: bool = False,
    ) -> None:
        if autocast and accelerator.mixed_precision == "fp16":
            raise WhenceError(
                "autocast scores in the precision of training, which is float16: small gradients would be 0 there. "
                "Train in bfloat16 (mixed_precision='bf16'), or leave autocast off."
            )
        if scoring.layers is not None:
            trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            choose_parameters(model, trained, scoring.layers)
        _check_refresh(refresh_target_every, scoring.target, has_held_out)
        self.autocast, self._every = autocast, refresh_target_every
        self._scoring, self._accelerator = scoring, accelerator
        self._round, self._name, self._gradient = 0, "", Gradient()

    def score(
        self, model: Any, rows: RecordBatch, number: int, make_target: Callable[[], Target] | None = None
    ) -> Influence:
        """Return the influence of every row of a round, in every process.

        Args:
            model: the model.
            rows: all rows of the round.
            number: the round, from 1.
            make_target: returns the round's target, which is called only if it is due; None: the training's target.
        """
        with self._set_precision():
            target = self._choose_target(model, rows, number, make_target or (lambda: self._scoring.target))
            return score(model, rows, replace(self._scoring, target=target))

    def _choose_target(self, model: Any, rows: RecordBatch, number: int, make_target: Callable[[], Target]) -> Target:
        """Return the round's target: along the gradient that is kept, or along a new one if it is due."""
        if self._every == 1:
            return make_target()
        if not self._gradient or number >= self._round + self._every:
            target = make_target()
            self._gradient = compute_target_gradient(model, rows, replace(self._scoring, target=target))
            self._round, self._name = number, f"{target_name(target)} of round {number}"
        return Along(self._gradient, self._name)

    def _set_precision(self) -> AbstractContextManager[Any]:
        return self._accelerator.autocast() if self.autocast else nullcontext()

    def describe(self) -> dict[str, Any]:
        """Return the settings that are not at their defaults, by their names, in JSON types."""
        layers = self._scoring.layers
        settings: dict[str, Any] = {}
        if layers is not None:
            settings["layers"] = layers if isinstance(layers, int | str) else list(layers)
        if self._every > 1:
            settings["refresh_target_every"] = self._every
        if self.autocast:
            settings["autocast"] = True
        return settings

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        if not self._gradient:
            return {}
        return {"round": self._round, "name": self._name, "gradient": dict(self._gradient)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what a checkpoint kept."""
        if state:
            self._round, self._name, self._gradient = state["round"], state["name"], dict(state["gradient"])


def _check_refresh(every: int, target: Target, has_held_out: bool) -> None:
    """Refuse rounds between two computations of a target's gradient if the target is over each round's own rows."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise WhenceError(f"refresh_target_every is {every!r}; a number of rounds, 1 or more, is needed.")
    if every > 1 and not has_held_out and isinstance(target, SequenceReturn | TokenReturn) and target.rows is None:
        raise WhenceError(
            f"refresh_target_every is {every}, and {target_name(target)} is over the scored rows, which are new in "
            "each round. Leave it at 1, or use a target over other rows: ValidationLoss, or held-out prompts."
        )


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
