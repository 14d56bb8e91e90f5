"""One training pass that scores its rows before the gradients of the weights are computed.

A backward pass to the layers' outputs holds all that scores need: a layer with input x and output gradient g of a row
adds the product of x'g with the target's gradient. The same x and g then give the weights' gradient of the rows that
are selected. So choosing costs the products alone, about as much as a forward pass, and dropped rows cost less than in
a plain step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.core import Outputs
from whence.engines.problem import Gradient, Refused
from whence.engines.tape import Call, Layer, check_uses, record_call


class TrainingPass:
    """A pass of training whose backward pass waits for a selection; `record_training_pass` makes one.

    The layers hold the parameters that train, by name; n rows are on the first axis of each layer's input and output.
    """

    def __init__(self, layers: Sequence[Layer], parameters: Mapping[str, nn.Parameter], rows: int) -> None:
        self._layers, self._parameters, self._rows = layers, parameters, rows
        self._calls: list[Call] = []
        self._output_gradients: list[Tensor | None] = []
        self._refusal: Refused | None = None

    def backward(self, loss: Float[Tensor, ""], target: Gradient | None, scale: float = 1.0) -> Tensor | None:
        """Run the backward pass to the layers' outputs, and return the rows' scores, (n,), by a target's gradient.

        Row i's part of the loss has the gradient g_i; its score is `-<g_i, target> / scale`. The graph is freed.

        Args:
            loss: a sum over the rows of the pass, with denominators that do not depend on the selection.
            target: the target's gradient by the parameters' names; None: the rows are not scored.
            scale: a factor that the loss was multiplied by, such as a gradient scaler's.

        Raises:
            Refused: the pass cannot be taken apart; the graph is untouched, so that `loss.backward()` still can run.
        """
        if self._refusal is not None:
            raise self._refusal
        check_uses(Outputs(loss), self._calls, self._layers, dict(self._parameters), covers_all=True)
        edges = [call.edge for call in self._calls]
        self._output_gradients = list(torch.autograd.grad(loss, edges, allow_unused=True))
        if target is None:
            return None
        scores = loss.new_zeros(self._rows, dtype=torch.promote_types(loss.dtype, torch.float32))
        with torch.no_grad():
            for call, g in zip(self._calls, self._output_gradients, strict=True):
                if g is not None:
                    scores -= _multiply(call, g, target)
        return scores / scale

    def add_gradient(self, weights: Float[Tensor, " n"], total: Gradient | None = None, scale: float = 1.0) -> None:
        """Add the gradient of the loss with a weight for each row to the parameters' `.grad`; call it once.

        Args:
            weights: the rows' weights; a row of weight 0 costs nothing.
            total: where to add the gradient with all weights 1, divided by `scale`; None: nowhere. Rows of weight 0
                then cost as others.
            scale: see `backward`.
        """
        weights = weights.float().cpu()  # each question to a device would wait for it
        rows, others = (mask.nonzero().flatten() for mask in (weights != 0, weights == 0))
        values = weights[rows].unique()
        factor, factors = (float(values[0]), None) if len(values) == 1 else (1.0, weights[rows])
        with torch.no_grad():
            while self._calls:
                call, g = self._calls.pop(), self._output_gradients.pop()
                if g is None:
                    continue
                selected = _sum_rows(call, g, rows, factors)
                for name, tensor in selected.items():
                    _accumulate(self._parameters[name], tensor, factor)
                if total is not None:
                    same = selected if factors is None else _sum_rows(call, g, rows, None)
                    for part in (same, _sum_rows(call, g, others, None)):
                        self._add_to(total, part, scale)

    def _add_to(self, total: Gradient, part: Gradient, scale: float) -> None:
        for name, tensor in part.items():
            if name not in total:
                total[name] = torch.zeros_like(self._parameters[name])
            total[name].add_(tensor, alpha=1 / scale)


@contextmanager
def record_training_pass(
    layers: Sequence[Layer], parameters: Mapping[str, nn.Parameter], rows: int
) -> Iterator[TrainingPass]:
    """Record the layers' calls of a forward pass on `rows` rows, which runs in this context."""
    step = TrainingPass(layers, parameters, rows)
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            step._refusal = Refused(f"A hook on the parameter `{name}` runs in a plain backward pass alone.")
    handles = [layer.module.register_forward_hook(partial(_note_call, step, layer), prepend=True) for layer in layers]
    try:
        yield step
    finally:
        for handle in handles:
            handle.remove()


def _note_call(
    step: TrainingPass, layer: Layer, module: nn.Module, args: tuple[Any, ...], output: Any
) -> Tensor | None:
    if not torch.is_grad_enabled() or step._refusal is not None:
        return None
    try:
        call, replaced = record_call(layer, args, output, step._rows)
    except Refused as refusal:
        step._refusal = refusal
        return None
    step._calls.append(call)
    return replaced


def _multiply(call: Call, g: Tensor, target: Gradient) -> Float[Tensor, " n"]:
    """Return the products of the rows' gradients in a call's layer with a target's, in single precision at least."""
    if g.dtype == torch.float16:  # small numbers would be 0
        g = g.float()
    direction = {name: target[name].to(g.dtype) for name in call.layer.names.values() if name in target}
    return call.layer.product(direction, _cast(call, g), g)


def _sum_rows(call: Call, g: Tensor, rows: Tensor, weights: Tensor | None) -> Gradient:
    """Return the gradient in a call's parameters, by their names, summed over some rows; weights None: all 1."""
    if not len(rows):
        return {}
    x = _cast(call, g)
    if len(rows) < len(g):
        rows = rows.to(g.device)
        x, g = x[rows], g[rows]
    return call.layer.gradient(x, g, None if weights is None else weights.to(g))


def _cast(call: Call, g: Tensor) -> Tensor:
    # Under autocast a layer computes in the precision of its output.
    return call.x.to(g.dtype) if call.x.is_floating_point() else call.x


def _accumulate(parameter: nn.Parameter, gradient: Tensor, factor: float) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient if factor == 1 else gradient * factor
    else:
        parameter.grad.add_(gradient, alpha=factor)
