"""Choosing completions inside TRL's own steps, between the two halves of a pass's backward pass.

TRL computes log-probs from hidden states and the output layer's weight, tile by tile, and does not call the layer.
`FusedHead` is that layer in a form that engines know.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.core import RecordBatch, replace_attribute
from whence.engines import Layer, LayerRule, LayerTensors, TrainingPass, dot, weigh
from whence.llm.scores import RoundChooser
from whence.llm.trl.completions import ROW, averages_rows, disable_autocast, measure_denominator, take_rows
from whence.scores import Influence
from whence.selection import Progress, Selection


class PassChooser(RoundChooser):
    """Chooses the completions of a generation batch in the passes of the first step on it; see `RoundChooser`.

    Args:
        trainer: a trainer of `whence.llm.trl.trainers`.
        refresh_every: see `RoundChooser`.

    Attributes:
        choice: scores and selection of a generation batch whose passes are done; None before.
    """

    def __init__(self, trainer: Any, refresh_every: int) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        super().__init__(model, trainer.rule, trainer.scoring, refresh_every)
        self._trainer = trainer
        self._step: TrainingPass | None = None
        self._loss: Tensor | None = None
        self._head = FusedHead(model.get_output_embeddings())
        layer = self._head.describe({id(p): name for name, p in self.parameters.items()})
        self.layers += [layer] if layer.names else []
        self.choice: tuple[Influence | None, Selection] | None = None
        self._rows_left = 0

    @property
    def is_open(self) -> bool:
        """Whether rows of the generation batch still wait for their first pass."""
        return self._rows_left > 0

    def begin(self, rows: RecordBatch, progress: Progress, draw_rows: Callable[[], RecordBatch] | None = None) -> None:
        """Begin a generation batch; see `RoundChooser`."""
        super().begin(rows, progress, draw_rows)
        self._rows_left = len(rows)

    def confirm_batch(self, output: Mapping[str, Any]) -> bool:
        """Return whether a recorded pass on two rows of a generation batch is as a plain one; see `confirm`."""
        lengths = output["completion_mask"].sum(dim=1)
        places = lengths.argsort(descending=True)[[0, min(1, len(lengths) - 1)]]
        # Rows without an advantage have no gradient to compare.
        output = {**output, "advantages": torch.full_like(output["advantages"], -1.0)}

        def compute_loss(alone: bool) -> Tensor:
            inputs = take_rows(output, places[:1] if alone else places)
            with nullcontext() if alone else self._head.replace(inputs["completion_mask"]):
                return self._compute_plain_loss(inputs) * measure_denominator(self._trainer, inputs)

        return self.confirm(compute_loss)

    def _compute_plain_loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return TRL's loss on a minibatch, without an effect on what TRL logs."""
        trainer, model = self._trainer, self._trainer.model_wrapped
        metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        try:
            with trainer.accelerator.no_sync(model):
                loss: Tensor = trainer._compute_trl_loss(model, inputs)
        finally:
            trainer._metrics["train"].clear()
            trainer._metrics["train"].update(metrics)
        return loss

    def compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Return TRL's loss on a minibatch, whose pass is recorded."""
        self._inputs, mask = inputs, inputs["completion_mask"]
        # DDP would wait for the gradients of parameters, which are averaged over processes at the end of the step.
        with (
            self._trainer.accelerator.no_sync(model),
            self._head.replace(mask),
            self.record_pass(len(mask)) as self._step,
        ):
            loss: Tensor = self._trainer._compute_trl_loss(model, inputs)
        self._loss = loss
        return loss

    @contextmanager
    def replace_backward(self) -> Iterator[None]:
        """Let Accelerate's backward pass choose the rows of a pass that was recorded."""
        accelerator = self._trainer.accelerator
        accelerator.backward = partial(self._run_backward, accelerator.backward)
        try:
            yield
        finally:
            del accelerator.backward
            self._step = self._loss = None

    def _run_backward(self, backward: Any, loss: Tensor, **settings: Any) -> None:
        if self._step is None:
            backward(loss, **settings)
            return
        leaf = loss.detach().requires_grad_()
        backward(leaf, **settings)  # whose gradient is Accelerate's factor: of accumulation, and of a gradient scaler
        assert leaf.grad is not None
        unit = float(leaf.grad) / measure_denominator(self._trainer, self._inputs)
        processes, places = self._scoring.processes, self._inputs[ROW]
        positions = processes.gather(places, len(places) * processes.number).cpu()
        self.run_backward(self._step, loss * leaf.grad, positions, unit)
        self._rows_left -= len(positions)
        if self._trainer.accelerator.sync_gradients:
            self._finish_step()

    def _add_plain(self, loss: Tensor, scale: float) -> None:
        # The weight of TRL's fused output layer is no part of the recorded graph.
        assert self._loss is not None
        (factor,) = torch.autograd.grad(loss, self._loss)  # Transformers' and Accelerate's
        super()._add_plain(self._compute_plain_loss(self._inputs) * factor, scale)

    def _finish_step(self) -> None:
        """End a step: its gradient becomes the mean over processes and over the kept rows.

        A batch of several steps, of which no row is dropped, ends with the last one.
        """
        assert self._rows is not None
        selection, number = self.selection, self._scoring.processes.number
        keep, count = selection.keep, int(selection.keep.sum())
        scale = len(keep) / max(float(selection.weights.sum()), 1e-30)
        if not averages_rows(self._trainer):
            columns: Any = self._rows.observations
            tokens = columns["response_mask"].sum(dim=1).cpu()
            scale *= count / len(keep) * float(tokens.sum() / tokens[keep].sum().clamp(min=1))
        self.sum_gradients(scale / number)
        for parameter in self.parameters.values() if not count else ():
            parameter.grad = torch.zeros_like(parameter)  # which a gradient scaler needs
        self.end_step()
        if not self.is_open:
            with disable_autocast(self._model):
                self.choice = self.end()


_NAME = "_ChunkedLogProbFunction"
"""The function that TRL calls; before TRL 1.16 it is another one, and the trainers call the layer instead."""


class FusedHead(nn.Module):
    """A model's output layer, `head`, as TRL uses it: it takes the numbers of a pass's tokens and returns log-probs."""

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
        with replace_attribute(trl_utils, _NAME, SimpleNamespace(apply=apply)):
            yield


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
