"""Choosing rows inside the steps that train on them: where it can be, by which target, and what a round chose."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whence.core import (
    MeanObjective,
    NonFinite,
    Objective,
    RecordBatch,
    WhenceError,
    eval_mode,
    first_line,
    preserve_rng_state,
    rows_of,
    target_name,
)
from whence.engines import (
    Gradient,
    Layer,
    Precision,
    Refused,
    TrainingPass,
    covered_layers,
    differentiate,
    record_training_pass,
    spread_evenly,
)
from whence.llm.base import Processes, language_view
from whence.llm.scores.row_scores import Scoring, compute_target_gradient
from whence.scores import Influence, Provenance
from whence.selection import KeepAll, Progress, Selection, SelectionRule, find_scorer

log = logging.getLogger("whence")

Way = Literal["in_step", "before"]
"""When rows are chosen: inside the step that first trains on them, or all before the first step."""


def choose_way(
    select: Way | None, rule: SelectionRule, objective: Objective | None, model: nn.Module, processes: Processes
) -> Way:
    """Return when a trainer's rows are chosen; if `select` is None, in the step where that can be, and else say why.

    `objective` is the user's own, if there is one. A `WhenceError` says why "in_step" cannot be.
    """
    if select not in (None, "in_step", "before"):
        raise WhenceError(f"select is {select!r}; 'in_step', 'before' or None is needed.")
    if select == "before":
        return "before"
    obstacle = _find_obstacle(rule, objective, model, processes)
    if obstacle is None:
        return "in_step"
    if select == "in_step":
        raise WhenceError(f"Rows cannot be chosen in the step: {obstacle}. Leave out select='in_step'.")
    if rule.needs_influence:
        _log_way(obstacle)
    return "before"


def _log_way(obstacle: str) -> None:
    log.warning("Rows are scored in passes of their own, before the steps: %s.", obstacle)


def _find_obstacle(
    rule: SelectionRule, objective: Objective | None, model: nn.Module, processes: Processes
) -> str | None:
    """Return why rows cannot be chosen in the step; None: they can."""
    name, unit = type(rule).__name__, getattr(rule, "unit", "record")
    unit = "group" if getattr(rule, "needs_groups", False) else unit
    obstacles = {
        f"{name} reads no scores": not rule.needs_influence,
        f"{name} brings its own scores, which are of the whole round": find_scorer(rule) is not None,
        f"{name} drops by the {unit}, of which a step may have a part only": unit not in ("record", "row"),
        "scores in the step are of the loss that trains, and another objective was given": objective is not None,
        "each process holds a part of the model only": not processes.hold_copies,
    }
    if obstacle := next((text for text, is_there in obstacles.items() if is_there), None):
        return obstacle
    parameters = language_view(model).parameters()  # which also registers the rules of the model's layers
    if len({parameter.device for parameter in parameters.values()}) > 1:
        return "the model is spread over several devices"
    try:
        covered_layers(dict(model.named_modules()), parameters)
    except Refused as refusal:
        return first_line(refusal).rstrip(".")
    return None


class RoundChooser:
    """Chooses a round's rows in the passes of its first epoch, by a gradient of the target that is known before.

    A target with rows of its own is differentiated when a round begins, one over drawn rows when a round ends, over
    that round's. That of `MeanObjective()` is the round's own gradient: the mean over the rows of the first epoch's
    steps, by the loss that trains. Until there is one, all rows train.

    Args:
        model: the model that trains.
        rule: the selection rule.
        scoring: the target, and how it is differentiated.
        refresh_every: the rounds that a gradient serves.

    Attributes:
        parameters: the parameters that train, by name.
        layers: the layers that hold them.
        gradient: the target's gradient by the parameters' names, to be raised; None: there is none yet.
    """

    def __init__(self, model: nn.Module, rule: SelectionRule, scoring: Scoring, refresh_every: int) -> None:
        self._model, self._rule, self._scoring, self._target = model, rule, scoring, scoring.target
        self._is_own = isinstance(scoring.target, MeanObjective) and scoring.target.unit in ("record", "row")
        self._has_rows = rows_of(scoring.target) is not None
        self._refresh_every = refresh_every
        self.parameters: dict[str, Any] = language_view(model).parameters()
        self.layers: list[Layer] = covered_layers(dict(model.named_modules()), self.parameters)
        self.gradient: Gradient | None = None
        self._sum: Gradient | None = None
        self._total: Gradient | None = None
        self._has_refused = False
        self._rows: RecordBatch | None = None
        self._progress = Progress()
        self._is_confirmed = False

    def restore(self, gradient: Gradient | None) -> None:
        """Put back the gradient that the target had when a checkpoint was written; None: it had none."""
        if gradient is not None:
            device = self._scoring.processes.device
            self.gradient = {name: tensor.to(device) for name, tensor in gradient.items()}

    def confirm(self, compute_loss: Callable[[bool], Tensor]) -> bool:
        """Return whether a recorded pass on two rows is as a plain backward pass; if not, a warning says how.

        It is compared once, and nothing of the model changes. Call it in every process. `compute_loss` evaluates the
        model, and returns the loss of two rows, or if its argument is True the first one's part of it.
        """
        if self._is_confirmed:
            return True
        self._is_confirmed = True
        # Without dropout, of which a row by itself gets other numbers; checkpointing is as in training.
        modules = [each for each in self._model.modules() if each is not self._model]
        with eval_mode(each for each in modules if not getattr(each, "gradient_checkpointing", False)):
            try:
                reason = self._compare(compute_loss)
            except Exception as failure:  # a trainer's own pass may have changed with its release
                reason = first_line(failure).rstrip(".")
        if not self._scoring.processes.agree_on_most(int(reason is not None)):
            return True
        _log_way(reason or "another process's pass differs from a plain one")
        return False

    def _compare(self, compute_loss: Callable[[bool], Tensor]) -> str | None:
        """Return how a recorded pass on two rows differs from a plain backward pass of the first; None: it does not."""
        with preserve_rng_state(), Precision() as precision:  # the same dropout in both passes
            loss = compute_loss(True)
        plain = differentiate(loss, self.parameters)
        direction, before = spread_evenly(plain), {name: parameter.grad for name, parameter in self.parameters.items()}
        try:
            for parameter in self.parameters.values():
                parameter.grad = None
            with preserve_rng_state(), self.record_pass(2) as step:
                loss = compute_loss(False)
            scores = step.backward(loss, direction)
            step.add_gradient(torch.tensor([1.0, 0.0]))
            recorded = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        finally:
            for name, parameter in self.parameters.items():
                parameter.grad = before[name]
        assert scores is not None
        tolerance = precision.tolerance(1e-3)
        largest = max((float(each.norm()) for each in plain.values()), default=0.0)
        for name, parameter in self.parameters.items():
            zero = torch.zeros_like(parameter)
            one, other = plain.get(name, zero), recorded.get(name, zero)
            if not float((one - other).norm()) <= tolerance * max(float(one.norm()), 1e-3 * largest):
                return f"on two rows the gradient of `{name}` differs from that of a plain backward pass"
        expected = -float(torch.stack([(plain[name] * each).sum() for name, each in direction.items()]).sum())
        if not abs(float(scores[0]) - expected) <= tolerance * abs(expected):
            return f"on two rows a score is {float(scores[0]):.4g}, and {expected:.4g} by a plain backward pass"
        return None

    def record_pass(self, rows: int) -> AbstractContextManager[TrainingPass]:
        """Return a context in which a forward pass on `rows` rows is recorded, for `run_backward`."""
        return record_training_pass(self.layers, self.parameters, rows)

    def begin(self, rows: RecordBatch, progress: Progress, draw_rows: Callable[[], RecordBatch] | None = None) -> None:
        """Begin a round with the rows of all processes; call it, and all that follows, in every process.

        `draw_rows` draws rows for the target, which has none, in each round that needs them; None: it has some, or is
        over the rows of the round before.
        """
        self._rows, self._progress, self._draws = rows, progress, draw_rows is not None
        self._keep, self._weights = torch.ones(len(rows), dtype=torch.bool), torch.ones(len(rows))
        self._reasons: list[str | None] = [None] * len(rows)
        self._scores = torch.zeros(len(rows))
        self._name = target_name(self._target)
        due = self._is_due(progress.round)
        self._sum, self._total = ({} if due and self._is_own else None), None
        self._rows_summed = self._rows_of_step = 0
        if due and draw_rows is not None:
            self._differentiate(replace(self._target, rows=draw_rows()), rows)  # type: ignore[type-var]
        elif due and self._has_rows:
            self._differentiate(self._target, rows)

    @property
    def _scaler(self) -> Any:
        return getattr(self._scoring.processes.accelerator, "scaler", None)

    def _is_due(self, number: int) -> bool:
        return self.gradient is None or (number - 1) % self._refresh_every == 0

    def _differentiate(self, target: Any, rows: RecordBatch) -> None:
        gradient = compute_target_gradient(self._model, rows, replace(self._scoring, target=target))
        if any(bool(tensor.any()) for tensor in gradient.values()):  # not if all rewards were equal, for instance
            self.gradient, self._name = gradient, target_name(target)

    def run_backward(
        self, step: TrainingPass | None, loss: Tensor | None, positions: Int[Tensor, " b"], scale: float
    ) -> Float[Tensor, " c"]:
        """Add the gradient of the rows of a pass that are chosen among all processes' rows.

        If the pass cannot be taken apart, all its rows train by a plain backward pass and none is scored.

        Args:
            step: the recorded pass of this process; None: it has none of the rows.
            loss: the pass's loss; None without a pass.
            positions: the places in the round of the rows of all processes, in their order.
            scale: the factor of a row's own loss in `loss`.

        Returns:
            The weights of this process's rows.

        Raises:
            NonFinite: a score is not finite, and no gradient scaler leaves out the step.
        """
        processes, refusal = self._scoring.processes, None
        local, scores = processes.part(len(positions)), torch.zeros(len(positions), device=processes.device)
        if self._total is None and self._sum is not None:
            self._total = self._sum if self._scaler is None else {}
        self._rows_of_step += len(positions)
        if step is not None and loss is not None:
            try:
                local_scores = step.backward(loss, self.gradient, scale)
            except Refused as caught:
                refusal = caught
            else:
                scores[local] = 0.0 if local_scores is None else local_scores.to(scores)
        if processes.agree_on_most(int(refusal is not None)):
            if refusal is not None and not self._has_refused:
                self._has_refused = True
                log.warning("A pass trains on all its rows, unscored: %s.", first_line(refusal).rstrip("."))
            weights = torch.ones(len(positions))[local]
        else:
            weights = self._choose(positions, processes.sum_tensors({"": scores})[""]).weights[local]
        if loss is not None and refusal is not None:
            self._add_plain(loss, scale)
        elif step is not None:
            step.add_gradient(weights, self._total, scale)
        return weights

    def _add_plain(self, loss: Tensor, scale: float) -> None:
        """Add the gradient of a loss, by a plain backward pass, to the parameters' and, over `scale`, to the total."""
        total = {} if self._total is None else self._total
        parameters = {} if self._total is None else self.parameters
        before = {name: 0 if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        loss.backward()  # with the parameters' hooks
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + (parameter.grad - before[name]) / scale

    def _choose(self, positions: Int[Tensor, " b"], scores: Float[Tensor, " b"]) -> Selection:
        assert self._rows is not None
        rows, scores = self._rows.take(positions), scores.detach().float().cpu()
        if self.gradient is None:
            return KeepAll().select(rows)
        if not torch.isfinite(scores).all():
            if self._scaler is None:
                ids = rows.ids[~torch.isfinite(scores)].tolist()
                raise NonFinite(
                    f"the score of record {ids[0]} is not finite. No step was taken on it: lower the learning rate, or "
                    "scale the rewards down.",
                    record_ids=ids,
                )
            return KeepAll().select(rows)  # scaled gradients overflow as a rule; a score of 0 stands for none
        selection = self._rule.select(rows, self._make_influence(rows, scores), self._progress)
        self._scores[positions], self._keep[positions] = scores, selection.keep
        self._weights[positions] = selection.weights.float()
        for position, reason in zip(positions.tolist(), selection.reasons, strict=True):
            self._reasons[position] = reason
        return selection

    @property
    def selection(self) -> Selection:
        """What the round's passes have chosen so far; rows that had no pass are kept."""
        return Selection(self._keep.clone(), self._weights.clone(), list(self._reasons))

    def sum_gradients(self, factor: float) -> None:
        """Let a step's gradients be their sum over processes, times a factor: the mean over the rows that were kept."""
        self._scoring.processes.sum_gradients(self.parameters.values())
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if factor != 1 and gradients:
            torch._foreach_mul_(gradients, factor)

    def end_step(self) -> None:
        """End a step. With a gradient scaler, one whose gradient overflows is no part of the round's own gradient."""
        total, self._total = self._total, None
        rows, self._rows_of_step = self._rows_of_step, 0
        if self._sum is None or total is None:
            return
        if total is not self._sum:
            overflows = not all(bool(tensor.isfinite().all()) for tensor in total.values())
            if self._scoring.processes.agree_on_most(int(overflows)):
                return
            for name, tensor in total.items():
                self._sum[name] = self._sum.get(name, 0) + tensor
        self._rows_summed += rows

    def end(self) -> tuple[Influence | None, Selection]:
        """End a round; return its rows' scores, each at its own first step, and what was selected.

        There are no scores as long as there was no gradient of the target.
        """
        assert self._rows is not None
        rows, count = self._rows, self._rows_summed
        influence = None if self.gradient is None else self._make_influence(rows, self._scores, rows.fingerprint)
        if self._sum is not None:
            total = {name: self._sum.get(name, torch.zeros_like(p)) for name, p in self.parameters.items()}
            if count:
                whole = self._scoring.processes.sum_tensors(total)
                self.gradient = {name: tensor / -count for name, tensor in whole.items()}
            self._sum = None
        elif not (self._is_own or self._draws or self._has_rows) and self._is_due(self._progress.round + 1):
            self._differentiate(self._target, rows)
        return influence, self.selection

    def _make_influence(self, rows: RecordBatch, scores: Tensor, records: str | None = None) -> Influence:
        about = Provenance(
            target=self._name,
            objective="the loss that trains",
            engine="in_step",
            engine_reason="the target's gradient is known before the steps",
            parameters=tuple(self.parameters),
            records=records,
        )
        return Influence(scores, rows.ids.cpu().clone(), about)
