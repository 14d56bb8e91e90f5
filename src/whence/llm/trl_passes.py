"""Passes over a TRL trainer's model: those of its loss over kept rows alone, and those of scores."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

SCALE = "loss_scale"
"""Added to TRL's batches: the factor of the loss, the same for each row."""

KEPT = "kept_row"
"""Added to TRL's batches: whether a row trains."""


def take_kept(inputs: Mapping[str, Any], count: int, *, averages: bool) -> tuple[dict[str, Any], Tensor]:
    """Return a minibatch's kept rows and the factor of their loss.

    Args:
        inputs: TRL's minibatch.
        count: how many rows to return, at least the kept ones; the others are dropped ones, which have no weight.
        averages: whether TRL's loss is a mean over rows.
    """
    mask = inputs[KEPT]
    places = (~mask).long().argsort(stable=True)[:count].sort().values
    rows = {
        name: column[places] if isinstance(column, Tensor) and column.shape[:1] == mask.shape else column
        for name, column in inputs.items()
    }
    scale: Tensor = inputs[SCALE][0]
    return rows, scale * len(places) / len(mask) if averages else scale


@contextmanager
def disable_autocast(model: Any) -> Iterator[None]:
    """Remove Accelerate's autocast around a model's forward pass: scores are in the model's own precision."""
    original = vars(model).get("_original_forward")
    if original is None:
        yield
        return
    wrapped, model.forward = model.forward, original
    try:
        yield
    finally:
        model.forward = wrapped


def forget_passes(engine: Any) -> None:
    """Let DeepSpeed's ZeRO stage 3 forget in which order scores used the layers; other engines know no order.

    TRL's fused output layer is not called as a layer, and ZeRO would fetch and free its weight by the remembered order.
    """
    optimizer = getattr(engine, "optimizer", None)
    if hasattr(optimizer, "parameter_offload"):
        from trl.models.utils import add_hooks, remove_hooks

        remove_hooks(engine)
        add_hooks(engine)
