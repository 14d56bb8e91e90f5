"""Numbers that are not finite in PPO on language models: the training stops and names them, or drops their rows."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.culprits import Culprits, find_culprits, first_broken_layer
from whence.errors import NonFinite
from whence.guards import eval_mode
from whence.influence import Influence
from whence.llm.config import PPOConfig
from whence.llm.objectives import TokenPPO
from whence.llm.processes import Processes
from whence.llm.rollout import Rollout
from whence.llm.view import language_view
from whence.nonfinite import (
    NOT_FINITE,
    check_on_nonfinite,
    count_reasons,
    measure_norms,
    nonfinite_path,
    try_saving,
)
from whence.records import RecordBatch
from whence.selection import Selection

log = logging.getLogger("whence")


@dataclass(frozen=True, eq=False)
class RowChoice:
    """The scores of rows, and which of them train.

    Attributes:
        influence: their scores, or None.
        parts: the tokens' parts of these, (n, R), or None.
        selection: the rows that train.
    """

    influence: Influence | None
    parts: Float[Tensor, "n R"] | None
    selection: Selection


class RowGuard:
    """Checks the numbers of each round of `PPOTrainer`.

    Args:
        on_nonfinite: "stop" or "drop"; see `PPOTrainer`.
        model: the model with a value head.
        optimizer: torch's optimiser of its parameters.
        config: the settings.
        processes: the processes; the first one saves minibatches.

    Raises:
        WhenceError: `on_nonfinite` is neither.
    """

    def __init__(
        self, on_nonfinite: str, model: Any, optimizer: torch.optim.Optimizer, config: PPOConfig, processes: Processes
    ) -> None:
        self.on_nonfinite = check_on_nonfinite(on_nonfinite)
        self._model, self._optimizer, self._config, self._processes = model, optimizer, config, processes
        self._number, self._dropped = 0, list[str]()
        self._steps, self._left_out, self._reason = 0, 0, ""

    @property
    def drops(self) -> bool:
        """Whether rows are dropped."""
        return self.on_nonfinite == "drop"

    @contextmanager
    def name_round(self, number: int) -> Iterator[None]:
        """Begin a round, and add its number to what is raised inside."""
        self._number, self._dropped = number, []
        self._steps, self._left_out, self._reason = 0, 0, ""
        try:
            yield
        except NonFinite as error:
            if error.path is not None or str(error).startswith("Round "):
                raise
            raise self._make_error(f"{error}", None, error.record_ids, error.parameter) from error

    def choose(self, rollout: Rollout, choose: Callable[[RecordBatch], RowChoice]) -> tuple[Rollout, RowChoice]:
        """Return the choice among a rollout's rows, with dropped rows among those that do not train.

        Args:
            rollout: the rollout.
            choose: scores rows and selects among them.

        Raises:
            NonFinite: a score is not finite, and `on_nonfinite` is "stop" or it is not that of single rows; or no row
                is left.
        """
        while True:
            if not bool(rollout.finite.any()):
                reasons = count_reasons(fault for fault in rollout.faults if fault is not None)
                raise self._make_error(
                    f"no row is left to train on, not finite: {reasons}. Look at the reward, and at the last rounds' "
                    "divergence.",
                    rollout.rows,
                )
            try:
                choice = choose(rollout.finite_rows)
                break
            except NonFinite as error:
                ids = list(error.record_ids) or self._find_scored(rollout.finite_rows)
                broken = torch.isin(rollout.rows.ids, torch.tensor(ids, dtype=torch.int64))
                # Other processes have scores of their own, and would wait for this one.
                if not self.drops or not broken.any() or self._processes.number > 1:
                    remedy = f" It is of record {ids[0]}; drop such rows with on_nonfinite='drop'." if ids else ""
                    raise self._make_error(f"{error}{remedy}", rollout.finite_rows, ids, error.parameter) from error
                faults = ["score" if bad else fault for bad, fault in zip(broken, _list_faults(rollout), strict=True)]
                rollout = replace(rollout, faults=tuple(faults))
        self._dropped = [fault for fault in rollout.faults if fault is not None]
        if not self._dropped:
            return rollout, choice
        log.warning(
            "round %d: %d of %d rows dropped, not finite: %s",
            self._number,
            len(self._dropped),
            len(rollout.rows),
            count_reasons(self._dropped),
        )
        parts = choice.parts
        if parts is not None:
            all_parts = parts.new_full((len(rollout.rows), parts.shape[1]), math.nan)
            all_parts[rollout.finite] = parts
            parts = all_parts
        return rollout, RowChoice(choice.influence, parts, _add_dropped(choice.selection, rollout))

    def check_step(self, rows: RecordBatch, positions: Int[Tensor, " b"], losses: Iterable[float]) -> bool:
        """Return whether a step may be taken on the gradients that the parameters hold.

        Gradients that are scaled for float16 overflow as a rule, and the scaler leaves out such a step by itself.

        Args:
            rows: all rows.
            positions: those of the step.
            losses: the step's losses, of this process's rows.

        Raises:
            NonFinite: a gradient or a loss is not finite, and `on_nonfinite` is "stop".
        """
        accelerator = self._processes.accelerator
        if accelerator is not None and accelerator.scaler is not None:
            return True
        self._steps += 1
        norm = measure_norms([p.grad for p in self._model.parameters() if p.grad is not None])
        alone = self._processes.number == 1
        if not math.isnan(norm) and (not alone or all(math.isfinite(loss) for loss in losses)):
            return True
        batch = rows.take(positions)
        if self.drops and self._reason:
            self._left_out += 1
            return False
        culprits = self._find_culprits(batch)
        ids = [int(batch.ids[position]) for position in culprits.positions]
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        where = f"in record {ids[0]}{more}, " if ids else ""
        broken = [n for n, p in self._model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        parameter = culprits.parameter or next(iter(broken), None)
        which = f" in the parameter `{parameter}`" if parameter and culprits.parameter is None else ""
        self._reason = (
            f"the gradient of a minibatch of {len(batch)} rows is not finite{which}: {where}{culprits.reason}"
        )
        if not self.drops:
            self._optimizer.zero_grad()
            raise self._make_error(
                f"{self._reason}. The step was not taken: model and optimiser are as before it. Lower the learning "
                "rate, set max_grad_norm, or leave out such steps with on_nonfinite='drop'.",
                batch,
                ids,
                parameter,
            )
        self._left_out += 1
        return False

    def _find_scored(self, rows: RecordBatch) -> list[int]:
        """Return the ids of the rows that make the gradient of a target over all rows not finite."""
        culprits = self._find_culprits(rows)
        return [] if culprits.is_policy else [int(rows.ids[position]) for position in culprits.positions]

    def _find_culprits(self, batch: RecordBatch) -> Culprits:
        config = self._config
        objective = TokenPPO(clip_range=config.cliprange, vf_coef=config.vf_coef, clip_range_vf=config.cliprange_value)
        view = language_view(self._model, temperature=config.temperature)
        return find_culprits(view, batch.to(next(iter(self._model.parameters())).device), objective)

    def check_model(self, rows: RecordBatch) -> dict[str, Any]:
        """Check what a round's steps made of the model, and return the round's figures.

        Args:
            rows: the round's rows.

        Returns:
            With "drop", the numbers of dropped rows and of steps left out.

        Raises:
            NonFinite: a parameter is not finite, the log-probs of the first row are not, or no step was taken.
        """
        if self._left_out:
            if self._left_out == self._steps:
                raise self._make_error(
                    f"no step was taken, since in each of {self._steps} {self._reason}. The model is as before the "
                    "round. Lower the learning rate, or set max_grad_norm.",
                    None,
                )
            log.warning(
                "round %d: %d of %d steps left out, %s", self._number, self._left_out, self._steps, self._reason
            )
        what, broken = "", find_broken_parameter(self._model)
        if broken is not None:
            what = f"a step made the parameter `{broken}` not finite"
        elif self._steps and (layer := self._find_broken_layer(rows)) is not None:
            what = f"the trained model has no finite log-probs: the output of the layer `{layer}` is not finite"
        if what:
            raise self._make_error(
                f"{what}. Lower the learning rate, or set max_grad_norm, and train again from a checkpoint "
                "(save_every).",
                None,
                parameter=broken,
            )
        return {"nonfinite": len(self._dropped), "nonfinite_steps": self._left_out} if self.drops else {}

    def _find_broken_layer(self, rows: RecordBatch) -> str | None:
        """Return the first layer whose output for the first row is not finite, or None."""
        view = language_view(self._model, temperature=self._config.temperature)
        row = rows.take(slice(0, 1)).to(next(iter(self._model.parameters())).device)
        with torch.no_grad(), eval_mode(self._model.modules()):
            log_probs = view.only({"log_prob"}, view.parameters(), view.prepare(row)).log_prob
        if bool(torch.isfinite(log_probs).all()):
            return None
        return first_broken_layer(view, row) or "the last"

    def _make_error(
        self, text: str, rows: RecordBatch | None, culprits: Iterable[int] = (), parameter: str | None = None
    ) -> NonFinite:
        """Return the error; rows, the parameters that train and the optimiser's state are saved first."""
        message, path, ids = f"Round {self._number}: {text}", None, list(culprits)
        if rows is None or self._processes.rank != 0:
            return NonFinite(message, record_ids=ids, parameter=parameter)
        saved, path = try_saving(
            nonfinite_path(Path(self._config.output_dir), self._number),
            "Rows, trained parameters and optimiser",
            number=self._number,
            message=message,
            records=rows,
            policy={name: p for name, p in self._model.named_parameters() if p.requires_grad},
            optimizer=self._optimizer,
            parameter=parameter,
            culprits=ids,
        )
        return NonFinite(f"{message} {saved}", record_ids=ids, parameter=parameter, path=path)


def find_broken_parameter(model: Any) -> str | None:
    """Return the first parameter that is not finite, or None."""
    trained: list[tuple[str, Tensor]] = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not math.isnan(measure_norms([p.detach() for _, p in trained])):
        return None
    return next(name for name, p in trained if not torch.isfinite(p).all())


def _list_faults(rollout: Rollout) -> list[str | None]:
    return list(rollout.faults) or [None] * len(rollout.rows)


def _add_dropped(selection: Selection, rollout: Rollout) -> Selection:
    """Return a selection among the rows that were not dropped as one among all."""
    finite = rollout.finite
    keep, weights = torch.zeros(len(finite), dtype=torch.bool), selection.weights.new_zeros(len(finite))
    keep[finite], weights[finite] = selection.keep, selection.weights
    reasons = iter(selection.reasons)
    faults = _list_faults(rollout)
    return Selection(keep, weights, [next(reasons) if fault is None else NOT_FINITE + fault for fault in faults])
