"""Passes over a TRL trainer's model: those of its loss over kept rows alone, and those of scores."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

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


def discard_gradients(
    params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, *, scaled: bool
) -> RemovableHandle | None:
    """Remove gradients, so that the next step moves no parameter and leaves the optimiser's state as it is.

    Args:
        params: the parameters.
        optimizer: torch's optimiser.
        scaled: whether a gradient scaler steps: it fails without gradients to check, so they are 0 until then.

    Returns:
        With a scaler the hook that removes them at the step; remove it after the step.
    """
    params = [param for param in params if param.grad is not None]

    def remove(*_: Any) -> None:
        for param in params:
            param.grad = None

    if not scaled:
        remove()
        return None
    for param in params:
        param.grad.zero_()  # type: ignore[union-attr]
    return optimizer.register_step_pre_hook(remove)
