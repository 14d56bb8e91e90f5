"""The scoring of a training's rounds: what makes it cheaper, and what of it a checkpoint keeps."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor

from whence.errors import WhenceError
from whence.influence import Influence
from whence.layers import Layers
from whence.llm.layer_choice import LayerChoice
from whence.llm.scoring import Scoring, score
from whence.llm.target_refresh import check_refresh
from whence.llm.token_scores import score_tokens_of_round
from whence.records import RecordBatch
from whence.targets import Target


class RowScorer:
    """Scores the rows of each round of a training.

    Args:
        scoring: how rows are scored; its `layers` are not read.
        model: the model.
        accelerator: the accelerator of Accelerate.
        layers: see `PPOTrainer`.
        refresh_target_every: see `PPOTrainer`.
        autocast: see `PPOTrainer`.
        has_held_out: whether each round has a target over held-out prompts' responses.

    Attributes:
        choice: the choice of layers.
        autocast: see `PPOTrainer`.

    Raises:
        WhenceError: the model has no such layers, the target is new in each round, or mixed precision is float16.
    """

    def __init__(
        self,
        scoring: Scoring,
        model: Any,
        accelerator: Accelerator,
        *,
        layers: Layers | Literal["auto"] | None,
        refresh_target_every: int,
        autocast: bool,
        has_held_out: bool = False,
    ) -> None:
        if autocast and accelerator.mixed_precision == "fp16":
            raise WhenceError(
                "autocast scores in the precision of training, which is float16: small gradients would be 0 there. "
                "Train in bfloat16 (mixed_precision='bf16'), or leave autocast off."
            )
        self.choice = LayerChoice(layers, model)
        self.autocast = autocast
        self._scoring, self._accelerator = scoring, accelerator
        self._refresh = check_refresh(refresh_target_every, scoring.target, has_held_out=has_held_out)

    def score(
        self,
        model: Any,
        rows: RecordBatch,
        number: int,
        make_target: Callable[[], Target] | None = None,
        hidden: Float[Tensor, "m L d"] | None = None,
    ) -> Influence:
        """Return the influence of every row of a round, in every process.

        Args:
            model: the model.
            rows: all rows of the round.
            number: the round, from 1.
            make_target: returns the round's target, which is called only if it is due; None: the training's target.
            hidden: see `whence.llm.scoring.score`.
        """
        with self._set_precision():
            make_target = make_target or (lambda: self._scoring.target)
            scoring = self._refresh.set_target(model, rows, self._scoring, number, make_target)
            self._last = self.choice.decide(model, rows, scoring, number)
            return score(model, rows, self._last, hidden)

    def score_tokens(self, model: Any, rows: RecordBatch, influence: Influence) -> Float[Tensor, "n R"] | None:
        """Return the tokens' parts of the scores that `score` has just returned; see `score_tokens_of_round`."""
        with self._set_precision():
            return score_tokens_of_round(model, rows, influence, self._last)

    def _set_precision(self) -> AbstractContextManager[Any]:
        return self._accelerator.autocast() if self.autocast else nullcontext()

    def describe(self) -> dict[str, Any]:
        """Return the settings that are not at their defaults, by their names, in JSON types."""
        layers = self.choice.setting
        settings: dict[str, Any] = {}
        if layers is not None:
            settings["layers"] = layers if isinstance(layers, int | str) else list(layers)
        if self._refresh.every > 1:
            settings["refresh_target_every"] = self._refresh.every
        if self.autocast:
            settings["autocast"] = True
        return settings

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"layers": self.choice.state_dict(), "target": self._refresh.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what a checkpoint kept."""
        self.choice.load_state_dict(state["layers"])
        self._refresh.load_state_dict(state["target"])
