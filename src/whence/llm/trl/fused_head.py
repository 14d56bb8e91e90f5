"""TRL's fused output layer, as a layer that engines know.

TRL computes log-probs from hidden states and the output layer's weight, tile by tile, and does not call the layer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.core import first_line
from whence.engines import Layer, LayerRule, LayerTensors, dot, weigh

_NAME = "_ChunkedLogProbFunction"
"""The function that TRL calls; before TRL 1.16 it is another one, and the trainers call the layer instead."""


class FusedHead(nn.Module):
    """A model's output layer as TRL uses it: it takes the numbers of a pass's tokens and returns their log-probs.

    Args:
        head: the output layer.
    """

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.function: Any = getattr(trl_utils, _NAME, None)
        self.state = SimpleNamespace()
        self._inputs: tuple[Any, ...] = ()
        self._columns: tuple[Any, ...] = ()

    def describe(self, names: Mapping[int, str]) -> Layer:
        """Return the layer for engines; `names` are those of the parameters that train, by the parameter's `id`."""
        trained = {key: names[id(p)] for key, p in self._parameters.items() if id(p) in names}
        return Layer(self, LayerRule(_multiply, _sum_rows), trained)

    def forward(self, numbers: Int[Tensor, "n T"]) -> Float[Tensor, "n T"]:
        """Return the log-probs of the tokens with these numbers, all in order; -1 is none and gives 0."""
        self._columns = self.function.apply(*self._inputs)
        log_probs: Tensor = self._columns[0]
        node: Any = log_probs.grad_fn  # it holds what a backward pass needs, until that has run
        names = ("saved_tensors", "compute_dtype", "chunk_size", "kernel_args")
        self.state = SimpleNamespace(**{name: getattr(node, name, None) for name in names})
        return log_probs.new_zeros(numbers.shape).masked_scatter(numbers >= 0, log_probs)

    @contextmanager
    def replace(self, completion_mask: Int[Tensor, "n T"]) -> Iterator[None]:
        """Let TRL's call for the completions of a pass go through this layer, if the layer's weight trains."""
        mask = completion_mask.bool()
        numbers = torch.where(mask, mask.flatten().cumsum(0).reshape(mask.shape) - 1, -1)

        def apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *settings: Any) -> Any:
            if weight is not self.weight:  # a reference's
                return self.function.apply(hidden, weight, bias, targets, *settings)
            places = torch.arange(len(hidden), device=hidden.device)
            if len(hidden) != mask.sum():  # without Triton, TRL computes prompts, too, and masks them afterwards
                places = places.reshape(len(mask), -1)[:, -mask.shape[1] :][mask]
            constants = (tensor if tensor is None else tensor.detach() for tensor in (weight, bias))
            self._inputs = (hidden[places], *constants, targets[places], *settings)
            columns = (self(numbers)[mask], *self._columns[1:])
            self._inputs = self._columns = ()  # they hold the graph
            return tuple(
                None if column is None else column.new_zeros(len(hidden)).index_put((places,), column)
                for column in columns
            )

        if self.function is None or not self.weight.requires_grad:
            yield
            return
        setattr(trl_utils, _NAME, SimpleNamespace(apply=apply))
        try:
            yield
        finally:
            setattr(trl_utils, _NAME, self.function)


def find_changed_head() -> str | None:
    """Return how TRL's function differs from the one that `FusedHead` knows; None: it does not, or there is none.

    What it keeps for its backward pass is no interface of TRL's, and may change with any release. So a tiny layer is
    compared with a plain one before anything is trained.
    """
    if getattr(trl_utils, _NAME, None) is None:
        return None
    weight, bias = torch.linspace(-1, 2, 10).reshape(5, 2), torch.linspace(0, 1, 5)
    tiny = FusedHead(SimpleNamespace(weight=nn.Parameter(weight), bias=nn.Parameter(bias)))
    try:
        failure = None if _is_as_plain(tiny) else "its numbers are others"
    except Exception as error:  # whatever a changed function raises
        failure = f"{type(error).__name__}: {first_line(error)}"
    return failure and f"TRL's fused output layer is not the one that whence knows ({failure.rstrip('.')})"


def _is_as_plain(head: FusedHead) -> bool:
    """Tell whether log-probs, gradients and products of a layer, 5 tokens by 2 units, are those of a plain layer."""
    hidden, targets = torch.linspace(-1, 1, 6).reshape(3, 2).requires_grad_(), torch.tensor([4, 0, 2])
    numbers, g = torch.tensor([[0, -1], [1, 2]]), torch.tensor([[1.0, 0.0], [2.0, -1.0]])
    logits = nn.functional.linear(hidden, head.weight, head.bias) / 0.5
    log_probs = logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((log_probs * g[numbers >= 0]).sum(), (head.weight, head.bias))
    with head.replace((numbers >= 0).long()):
        outputs = getattr(trl_utils, _NAME).apply(hidden, head.weight, head.bias, targets, 0.5, 2)
    with torch.no_grad():
        gradient = _sum_rows(head, numbers, g, None)
        product = _multiply(head, dict(zip(("weight", "bias"), expected, strict=True)), numbers, g).sum()
    square = torch.stack([each.square().sum() for each in expected]).sum()
    computed = outputs[0], gradient["weight"], gradient["bias"], product
    pairs = zip(computed, (log_probs, *expected, square), strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def _find_tokens(head: FusedHead, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return the row of each token that has a gradient, this gradient, and what TRL keeps for them."""
    rows, columns = ((x >= 0) & (g != 0)).nonzero(as_tuple=True)
    hidden, weight, bias, targets, log_z, _ = head.state.saved_tensors
    numbers = x[rows, columns]
    return rows, g[rows, columns].float(), (hidden[numbers], weight, bias, targets[numbers], log_z[numbers])


def _sum_rows(head: FusedHead, x: Tensor, g: Tensor, weights: Tensor | None) -> LayerTensors:
    """Return the weighted sum of the rows' gradients, by TRL's own backward pass; see `LayerRule`."""
    _, g, saved = _find_tokens(head, x, weigh(g, weights))
    needs = (False, True, head.bias is not None)
    context = SimpleNamespace(**vars(head.state) | {"saved_tensors": (*saved, saved[-1]), "needs_input_grad": needs})
    _, weight, bias, *_ = head.function.backward(context, g, None)
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _multiply(head: FusedHead, direction: LayerTensors, x: Tensor, g: Tensor) -> Float[Tensor, " n"]:
    """Return the products of the rows' gradients with a direction, tile by tile as TRL goes; see `LayerRule`."""
    from trl.kernels import chunked_logprob as kernels  # which only TRL 1.16 or later has

    rows, g, (hidden, weight, bias, targets, log_z) = _find_tokens(head, x, g)
    step = direction["weight"] if "weight" in direction else torch.zeros_like(weight)
    total, size = torch.zeros_like(g), head.state.chunk_size
    flags = {"HAS_LOGPROB_GRAD": True, "HAS_ENTROPY_GRAD": False, "BLOCK_SIZE": 0}
    for tokens in torch.arange(len(g), device=g.device).split(kernels.TOKEN_CHUNK_SIZE):
        inputs = hidden[tokens].to(head.state.compute_dtype)
        for start in range(0, len(weight), size):
            part = slice(start, start + size)
            tile, change = (
                inputs @ matrix[part].to(inputs.dtype).T + (0 if shift is None else shift[part].to(inputs.dtype))
                for matrix, shift in ((weight, bias), (step, direction.get("bias")))
            )
            columns = (targets[tokens], log_z[tokens], None, g[tokens], None)
            kernels._backward_tile(tile, 0, *columns, start, tile.shape[1], **head.state.kernel_args, **flags)
            total[tokens] += dot(tile, change)
    return total.new_zeros(len(x)).index_add_(0, rows, total)
