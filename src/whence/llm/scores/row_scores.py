"""Scores of a rollout's rows, in one process or several, and of a training's rounds."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator

from whence.attribution import Summed, open_problem, score_targets
from whence.engines import Gradient, target_gradients
from whence.errors import Unsupported, WhenceError
from whence.influence import Influence
from whence.layers import Layers, choose_parameters, restrict_view
from whence.llm.base.language_view import language_view
from whence.llm.base.processes import NO_KEPT_GRADIENT, ONE, Processes
from whence.llm.scores.language_targets import Along, SequenceReturn, TokenReturn, ValidationLoss, target_share
from whence.objectives import Objective
from whence.policies import is_in_shards
from whence.records import RecordBatch
from whence.targets import Target, target_name

log = logging.getLogger("whence")


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the rows of a rollout are scored.

    Attributes:
        target: the target.
        objective: the objective of a row's training.
        temperature: the sampling temperature of the responses.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold at a time, in each process; None: those that `chunk_size` rows take.
        chunk_size: rows that are scored at a time if no memory is given.
        processes: the processes; each scores a part of the rows.
        layers: the layers to score by; see `whence.attribute`.
    """

    target: Target
    objective: Objective
    temperature: float
    engine: str
    memory: int | None
    chunk_size: int
    processes: Processes = ONE
    layers: Layers | None = None


def score(model: Any, rows: RecordBatch, scoring: Scoring) -> Influence:
    """Return the influence of every row on a target, in every process.

    Args:
        model: the model; its parameters that train are scored.
        rows: all rows of the rollout, in every process.
        scoring: how they are scored.
    """
    processes, target = scoring.processes, scoring.target
    local_rows, local_target, reduce = split_work(rows, target, processes)
    limits: Any = {"chunk_size": scoring.chunk_size} if scoring.memory is None else {"memory": scoring.memory}
    influence = score_targets(
        restrict_view(language_view(model, temperature=scoring.temperature), scoring.layers),
        local_rows,
        {"": local_target},
        objective=scoring.objective,
        engine=scoring.engine,
        summed=reduce,
        **limits,
    )[""]
    if processes.number == 1:
        return influence
    device = next(iter(model.parameters())).device
    return Influence(
        processes.gather(influence.scores.to(device), len(rows)).cpu(),
        rows.ids.cpu().clone(),
        replace(influence.provenance, target=target_name(target), records=rows.fingerprint),
    )


def split_work(rows: RecordBatch, target: Target, processes: Processes) -> tuple[RecordBatch, Target, Summed | None]:
    """Return a process's rows, its share of the target, and what sums gradients; None: there is one process."""
    if processes.number == 1:
        return rows, target, None
    share = target_share(target, rows, processes.rank, processes.number)
    return rows.take(processes.part(len(rows))), share, processes.sum_tensors


def held_out_target(target: Target, rows: RecordBatch) -> Target:
    """Return the target over held-out rows instead of the scored ones."""
    assert isinstance(target, SequenceReturn | TokenReturn)
    return replace(target, rows=rows)


def check_held_out(
    target: Target,
    held_out: Sequence[Sequence[int]] | None,
    prompts: Sequence[Sequence[int]],
    processes: Processes = ONE,
) -> None:
    """Refuse held-out prompts that the target cannot use, and warn of prompts that train as well.

    Args:
        target: the trainer's target.
        held_out: token ids of the held-out prompts; None: there are none.
        prompts: token ids of the prompts that train.
        processes: the processes, each of which answers a part; the first logs the warning.

    Raises:
        WhenceError: the target reads no drawn responses, or has rows already; or held-out prompts are
            fewer than the processes.
    """
    if held_out is not None:
        if not isinstance(target, SequenceReturn | TokenReturn) or target.rows is not None:
            raise WhenceError(
                f"held_out gives prompts for a target over drawn responses, and {target_name(target)} reads none of "
                "them: use SequenceReturn() or TokenReturn(), without rows."
            )
        if not held_out:
            raise WhenceError("held_out is empty; give at least one prompt, or None.")
        if len(held_out) < processes.number:
            raise WhenceError(f"{len(held_out)} held-out prompts are fewer than the processes; give one for each.")
    kind, validation = "held-out prompts", held_out
    if isinstance(target, ValidationLoss):
        kind, validation = "prompts of the demonstrations", target.prompts()
    trained = {tuple(ids) for ids in prompts}
    if processes.rank == 0 and validation and (shared := sum(tuple(ids) in trained for ids in validation)):
        log.warning(
            "%d of %d %s also train, so the target is not one of unseen prompts.", shared, len(validation), kind
        )


class RowScorer:
    """Scores the rows of each round of a training.

    Args:
        scoring: how rows are scored.
        model: the model.
        accelerator: the accelerator of Accelerate.
        refresh_target_every: see `PPOTrainer`.
        autocast: see `PPOTrainer`.
        has_held_out: whether each round has a target over held-out prompts' responses.

    Raises:
        WhenceError: the model has no such layers, the target is new in each round, or mixed precision is float16.
    """

    def __init__(
        self,
        scoring: Scoring,
        model: Any,
        accelerator: Accelerator,
        *,
        refresh_target_every: int = 1,
        autocast: bool = False,
        has_held_out: bool = False,
    ) -> None:
        if autocast and accelerator.mixed_precision == "fp16":
            raise WhenceError(
                "autocast scores in the precision of training, which is float16: small gradients would be 0 there. "
                "Train in bfloat16 (mixed_precision='bf16'), or leave autocast off."
            )
        if scoring.layers is not None:
            trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            choose_parameters(model, trained, scoring.layers)
        _check_refresh(refresh_target_every, scoring.target, has_held_out)
        self.autocast, self._every = autocast, refresh_target_every
        self._scoring, self._accelerator = scoring, accelerator
        self._round, self._name, self._gradient = 0, "", Gradient()

    def score(
        self, model: Any, rows: RecordBatch, number: int, make_target: Callable[[], Target] | None = None
    ) -> Influence:
        """Return the influence of every row of a round, in every process.

        Args:
            model: the model.
            rows: all rows of the round.
            number: the round, from 1.
            make_target: returns the round's target, which is called only if it is due; None: the training's target.
        """
        with self._set_precision():
            target = self._choose_target(model, rows, number, make_target or (lambda: self._scoring.target))
            return score(model, rows, replace(self._scoring, target=target))

    def _choose_target(self, model: Any, rows: RecordBatch, number: int, make_target: Callable[[], Target]) -> Target:
        """Return the round's target: along the gradient that is kept, or along a new one if it is due."""
        if self._every == 1:
            return make_target()
        if not self._gradient or number >= self._round + self._every:
            target = make_target()
            self._gradient = compute_target_gradient(model, rows, replace(self._scoring, target=target))
            self._round, self._name = number, f"{target_name(target)} of round {number}"
        return Along(self._gradient, self._name)

    def _set_precision(self) -> AbstractContextManager[Any]:
        return self._accelerator.autocast() if self.autocast else nullcontext()

    def describe(self) -> dict[str, Any]:
        """Return the settings that are not at their defaults, by their names, in JSON types."""
        layers = self._scoring.layers
        settings: dict[str, Any] = {}
        if layers is not None:
            settings["layers"] = layers if isinstance(layers, int | str) else list(layers)
        if self._every > 1:
            settings["refresh_target_every"] = self._every
        if self.autocast:
            settings["autocast"] = True
        return settings

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        if not self._gradient:
            return {}
        return {"round": self._round, "name": self._name, "gradient": dict(self._gradient)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what a checkpoint kept."""
        if state:
            self._round, self._name, self._gradient = state["round"], state["name"], dict(state["gradient"])


def _check_refresh(every: int, target: Target, has_held_out: bool) -> None:
    """Refuse rounds between two computations of a target's gradient if the target is over each round's own rows."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise WhenceError(f"refresh_target_every is {every!r}; a number of rounds, 1 or more, is needed.")
    if every > 1 and not has_held_out and isinstance(target, SequenceReturn | TokenReturn) and target.rows is None:
        raise WhenceError(
            f"refresh_target_every is {every}, and {target_name(target)} is over the scored rows, which are new in "
            "each round. Leave it at 1, or use a target over other rows: ValidationLoss, or held-out prompts."
        )


def compute_target_gradient(model: Any, rows: RecordBatch, scoring: Scoring) -> Gradient:
    """Return the gradient of a scoring's target, summed over all processes; call it in every process.

    Raises:
        Unsupported: processes hold the parameters in shards.
    """
    view = restrict_view(language_view(model, temperature=scoring.temperature), scoring.layers)
    if is_in_shards(view.parameters().values()):
        raise Unsupported(NO_KEPT_GRADIENT)
    local_rows, target, reduce = split_work(rows, scoring.target, scoring.processes)
    with open_problem(
        view,
        local_rows,
        targets=[target],
        objective=scoring.objective,
        chunk_size=scoring.chunk_size,
        summed=reduce,
    ) as problem:
        (gradient,) = target_gradients(problem)
    return gradient
