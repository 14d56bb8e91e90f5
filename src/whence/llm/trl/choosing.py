"""Choosing completions inside TRL's own steps, between the two halves of a pass's backward pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whence.core import RecordBatch
from whence.engines import TrainingPass, record_training_pass
from whence.llm.scores import RoundChooser, scale_gradients
from whence.llm.trl.completions import ROW, disable_autocast, take_rows
from whence.llm.trl.fused_head import FusedHead, find_changed_head
from whence.llm.trl.supported_settings import averages_rows, measure_denominator
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
        self._head, self._change = FusedHead(model.get_output_embeddings()), find_changed_head()
        if self._change is not None:
            self._head.function = None
        layer = self._head.describe({id(p): name for name, p in self.parameters.items()})
        self.layers += [layer] if layer.names else []
        self.choice: tuple[Influence | None, Selection] | None = None
        self._rows_left = self._rows_of_step = 0

    @property
    def is_open(self) -> bool:
        """Whether rows of the generation batch still wait for their first pass."""
        return self._rows_left > 0

    def begin(self, rows: RecordBatch, progress: Progress, draw_rows: Callable[[], RecordBatch] | None = None) -> None:
        """Begin a generation batch; see `RoundChooser`."""
        super().begin(rows, progress, draw_rows)
        self._rows_left, self._rows_of_step = len(rows), 0

    def find_difference(self, output: Mapping[str, Any]) -> str | None:
        """Return how a recorded pass on two rows of a generation batch differs from a plain one; None: it does not."""
        trainer, advantages = self._trainer, output["advantages"]
        order = advantages.reshape(len(advantages), -1).abs().sum(dim=1).argsort(descending=True)
        places = order[: 2 if len(order) > 1 else 1].repeat(2)[:2]

        def compute_loss(alone: bool) -> Tensor:
            inputs = take_rows(output, places[:1] if alone else places)
            with nullcontext() if alone else self._head.replace(inputs["completion_mask"]):
                return self._compute_plain_loss(inputs) * measure_denominator(trainer, inputs)

        difference = self.confirm(compute_loss)
        return difference and (self._change or difference)

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
            record_training_pass(self.layers, self.parameters, len(mask)) as self._step,
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
        self._rows_of_step += len(positions)
        if self._trainer.accelerator.sync_gradients:
            self._finish_step(unit)

    def _add_plain(self, loss: Tensor) -> None:
        # The weight of TRL's fused output layer is no part of the recorded graph.
        assert self._loss is not None
        (factor,) = torch.autograd.grad(loss, self._loss)  # Transformers' and Accelerate's
        super()._add_plain(self._compute_plain_loss(self._inputs) * factor)

    def _finish_step(self, unit: float) -> None:
        """End a step: its gradient becomes the mean over processes and over the kept rows; `unit` is a row's.

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
        self._scoring.processes.sum_gradients(self.parameters.values())
        for parameter in self.parameters.values() if not count else ():
            parameter.grad = torch.zeros_like(parameter)  # which a gradient scaler needs
        scale_gradients(self.parameters, scale / number)
        self.end_step(1 / (unit * self._rows_of_step))
        self._rows_of_step = 0
        if not self.is_open:
            with disable_autocast(self._model):
                self.choice = self.end()
