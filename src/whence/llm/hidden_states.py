"""Hidden states before a block of a language model: kept from one forward pass, and where another begins."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.engines.sharded import agree_on_most
from whence.errors import Unsupported
from whence.layers import find_blocks
from whence.policies import PolicyView
from whence.records import RecordBatch
from whence.shards import is_in_shards

HIDDEN = "hidden_states"
"""The column of rows that holds them, (n, L, width)."""


class _Stop(Exception):
    """Ends a forward pass that has come to the block."""


@contextmanager
def record_hidden(module: nn.Module, block: int, *, stop: bool = False) -> Iterator[list[Float[Tensor, "n L d"]]]:
    """Yield a list to which each forward pass adds its hidden states before a block.

    Args:
        module: the model.
        block: the block's number, from 0.
        stop: end each pass there, by an exception, as `compute_hidden` does.
    """
    states: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get(HIDDEN)
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            shown = f"a tensor of shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
            raise Unsupported(
                f"A {type(blocks[block]).__name__} got {shown} for its hidden states; (n, tokens, width) is needed. "
                "Score this model by patterns of parameters' names instead of a number of last blocks."
            )
        states.append(hidden.detach())
        if stop:
            raise _Stop

    _, blocks = find_blocks(module)
    handle = blocks[block].register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield states
    finally:
        handle.remove()


def compute_hidden(view: PolicyView, rows: RecordBatch, block: int, size: int) -> Float[Tensor, "n L d"]:
    """Return the hidden states of rows before a block; no block from there on runs, unless parameters are in shards.

    Args:
        view: the model's view.
        rows: the rows.
        block: the block's number, from 0.
        size: rows of a pass.
    """
    params = {name: parameter.detach() for name, parameter in view.parameters().items()}
    starts, in_shards = list(range(0, len(rows), size)), is_in_shards(view.parameters().values())
    count = len(starts)
    if in_shards:  # as many passes as the process with the most, over the first rows again
        starts += [0] * (agree_on_most(count, next(iter(params.values())).device) - count)
    # What gathers parameters has to see the end of a pass that it saw the beginning of.
    with torch.no_grad(), record_hidden(view.module, block, stop=not in_shards) as states:
        for start in starts:
            with suppress(_Stop):
                view(params, view.prepare(rows.take(slice(start, start + size))))
    return torch.cat(states[:count])


@contextmanager
def begin_at_block(module: nn.Module, block: int, hidden: Float[Tensor, "n L d"]) -> Iterator[None]:
    """Let forward passes begin at a block, with hidden states from before; the blocks below do nothing.

    Args:
        module: the model; it is as it was afterwards.
        block: the block's number, from 0.
        hidden: the hidden states before the block.
    """
    _, blocks = find_blocks(module)

    # What a block returns is replaced below in any case; here it only has to be something that the model can pass on.
    def skip(*args: Any, **kwargs: Any) -> Tensor:
        return hidden

    def replace_hidden(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, HIDDEN: hidden})

    with ExitStack() as stack:
        for lower in list(blocks)[:block]:
            stack.enter_context(_replace_forward(lower, skip))
        handle = blocks[block].register_forward_pre_hook(replace_hidden, with_kwargs=True)
        stack.callback(handle.remove)
        yield


@contextmanager
def _replace_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    attributes = vars(module)
    before: Sequence[Any] = [attributes["forward"]] if "forward" in attributes else []  # such as Accelerate's
    module.forward = forward
    try:
        yield
    finally:
        if before:
            module.forward = before[0]
        else:
            del module.forward
