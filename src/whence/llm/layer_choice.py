"""The layers that a training scores by: given, or chosen by how well their scores agree with those of all layers."""

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jaxtyping import Float64
from torch import Tensor

from whence.checks import list_last_blocks, rank_agreement
from whence.errors import WhenceError
from whence.layers import Layers, choose_parameters
from whence.llm.scoring import Scoring, find_first_block, score
from whence.records import RecordBatch

log = logging.getLogger("whence")

AGREEMENT = 0.9
"""The least rank correlation with the scores by all layers that "auto" is content with."""


class LayerChoice:
    """The layers that a training scores by.

    Args:
        layers: see `whence.attribute`; "auto": the fewest last blocks (1, 2, 4, ..., up to half of them) whose scores
            have a rank correlation of `AGREEMENT` with those by all layers; all layers if none have. The agreement
            falls while a model trains, so they are chosen in the first round that is scored, and anew whenever the
            rounds have doubled since: in rounds 1, 2, 4, 8, ...
        model: the model.

    Attributes:
        setting: what was given for `layers`.
        layers: the layers to score by now; None: all of them.
        chosen_in: the round of the last choice by rows; 0: there was none.

    Raises:
        WhenceError: the model has no such layers, or none with parameters that train.
    """

    def __init__(self, layers: Layers | Literal["auto"] | None, model: Any) -> None:
        self.setting = layers
        self.layers: Layers | None = None if layers == "auto" else layers
        self.chosen_in = 0
        if layers == "auto":
            list_last_blocks(model)  # refuses a model without blocks
        elif layers is not None:
            choose_parameters(model, _list_trained(model), layers)

    def first_block(self, model: Any, number: int) -> int:
        """Return the block whose incoming hidden states scoring begins at in a round; 0: none, or it is not known."""
        return 0 if self._is_due(number) else find_first_block(model, self.layers)

    def decide(self, model: Any, rows: RecordBatch, scoring: Scoring, number: int) -> Scoring:
        """Choose the layers if a choice by rows is due, and return how to score; call it in every process.

        Args:
            model: the model.
            rows: all rows of a rollout.
            scoring: how they are scored.
            number: the round, from 1.
        """
        if self._is_due(number) and len(rows) > 2:
            scores = score(model, rows, replace(scoring, layers=None)).scores.double()
            if bool((scores != scores[0]).any()):  # else, as where all rewards are equal, there is no order to keep
                self.layers, self.chosen_in = _choose_blocks(model, rows, scoring, scores, number), number
        return replace(scoring, layers=self.layers)

    def _is_due(self, number: int) -> bool:
        return self.setting == "auto" and number >= 2 * self.chosen_in

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"layers": self.layers, "chosen_in": self.chosen_in}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what a checkpoint kept."""
        self.layers, self.chosen_in = state["layers"], state["chosen_in"]


def _choose_blocks(
    model: Any, rows: RecordBatch, scoring: Scoring, whole: Float64[Tensor, " n"], number: int
) -> Layers | None:
    """Return the fewest last blocks that score rows in the order of `whole`, the scores by all layers; None: all."""
    for layers in filter(partial(_do_train, model), list_last_blocks(model)):
        scores = score(model, rows, replace(scoring, layers=layers)).scores.double()
        if (agreement := rank_agreement(scores, whole)) >= AGREEMENT:
            message = (
                "From round %d on scores are of the last %s blocks: rank correlation %.2f with those of all layers."
            )
            log.info(message, number, layers, agreement)
            return layers
    message = "From round %d on scores are of all layers: those of fewer blocks have a rank correlation below %.2f."
    log.info(message, number, AGREEMENT)
    return None


def _do_train(model: Any, layers: Layers) -> bool:
    """Tell whether any parameter of the layers trains."""
    with suppress(WhenceError):
        return bool(choose_parameters(model, _list_trained(model), layers))
    return False


def _list_trained(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
