"""GRPO and RLOO as TRL trains them, on the completions that a rule keeps.

TRL's own methods run as they are: what they return for a generation batch is edited, and rows are never removed. A
dropped completion's tokens leave the loss (GRPO: `tool_mask`; RLOO: advantage 0), and the loss is rescaled to the kept
ones, so that a step is that of the kept completions alone, with the groups' statistics taken over all of them before.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from whence.errors import Unsupported, WhenceError
from whence.guards import preserve_rng_state
from whence.influence import Influence
from whence.llm.objectives import GroupObjective
from whence.llm.processes import Processes
from whence.llm.rows import make_rows
from whence.llm.scoring import score
from whence.llm.targets import SequenceReturn
from whence.llm.trl_settings import ROW_LOSSES, TOKEN_LOSSES, check_selectable
from whence.objectives import Objective, as_objective
from whence.records import RecordBatch
from whence.selection import KeepAll, Progress, Selection, SelectionRule
from whence.stopwatch import Stopwatch
from whence.targets import Target, as_target

_SCALE = "loss_scale"
"""What is added to TRL's batches: what the loss is to be multiplied by, the same for each row."""


class _Influence:
    """What both trainers have in common."""

    _of_tokens: bool
    """Whether a row is dropped by masking its tokens."""

    def __init__(
        self,
        *args: Any,
        rule: SelectionRule | None = None,
        target: Target | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        memory: int | None = None,
        **kwargs: Any,
    ) -> None:
        if rule is not None and (isinstance(rule, type) or not isinstance(rule, SelectionRule)):
            raise WhenceError(f"rule is {rule!r}; pass an instance, such as NonPositive(), or None to keep everything.")
        super().__init__(*args, **kwargs)
        self.rule: SelectionRule = KeepAll() if rule is None else rule
        self.target = as_target(SequenceReturn() if target is None else target)
        self.influence_objective = self._objective() if objective is None else as_objective(objective)
        self.influence_engine, self.influence_memory = engine, memory
        self.influence: Influence | None = None
        self.selection: Selection | None = None
        self.seconds: dict[str, dict[str, float]] = {}
        if type(self.rule) is not KeepAll:
            self._processes = Processes(self.accelerator)  # type: ignore[attr-defined]
            check_selectable(self.args, has_router_loss=getattr(self, "aux_loss_enabled", False))  # type: ignore[attr-defined]

    def _objective(self) -> Objective:
        raise NotImplementedError

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's generation batch, edited to what a rule keeps; in evaluation as it is."""
        if not self.model.training:  # type: ignore[attr-defined]
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc,no-any-return]
        with self._timed("generation", within="optimisation"):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if type(self.rule) is KeepAll:
            return output
        with self._timed("scoring", within="optimisation"):
            return self._selected(output)

    def _selected(self, output: dict[str, Any]) -> dict[str, Any]:
        with preserve_rng_state():
            rows = self._rows(output)
            self.influence = self._scores(rows) if self.rule.needs_influence else None
        steps = max(1, self.state.max_steps)  # type: ignore[attr-defined]
        progress = Progress(self._batches + 1, 1 - self.state.global_step / steps)  # type: ignore[attr-defined]
        self.selection = self.rule.select(rows, self.influence, progress)
        self._tell(self.selection, self.influence)
        return self._edited(output, self.selection)

    @property
    def _batches(self) -> int:
        """How many generation batches were trained on, also before the training was resumed."""
        return int(self.state.global_step // self.num_iterations)  # type: ignore[attr-defined]

    def _rows(self, output: Mapping[str, Any]) -> RecordBatch:
        """Return the completions of all processes as rows.

        Raises:
            Unsupported: there are images, which scores would know nothing of.
        """
        if others := sorted(output.keys() & {"pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids"}):
            raise Unsupported(f"TRL's batch holds {others[0]}: completions are scored by their tokens alone.")
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        prompts = self._gathered(output["prompt_ids"], pad_first=True)
        seen = self._gathered(output["prompt_mask"], pad_first=True)
        completions, attended = (self._gathered(output[name]) for name in ("completion_ids", "completion_mask"))
        mask = self._gathered(mask).bool()
        advantages = self._processes.gathered(output["advantages"], len(mask))
        extra = {}
        if "ref_per_token_logps" in output:
            extra["ref_log_probs"] = torch.where(mask, self._gathered(output["ref_per_token_logps"]), 0.0)
        rows = make_rows(
            input_ids=torch.cat([prompts, completions], dim=1),
            attention_mask=torch.cat([seen, attended], dim=1),
            response_mask=mask,
            # At the policy that drew them ratios are 1, whatever they are of: objectives take them to be.
            log_probs=torch.zeros(mask.shape, device=mask.device),
            advantages=torch.where(mask, advantages[:, None], 0.0),
            record_ids=torch.arange(self._batches * len(mask), (self._batches + 1) * len(mask)),
        )
        held: Any = rows.observations
        return rows.with_columns({"observations": {**held, **extra}})

    def _gathered(self, own: Tensor, *, pad_first: bool = False) -> Tensor:
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        padded = accelerator.pad_across_processes(own.contiguous(), dim=1, pad_index=0, pad_first=pad_first)
        return self._processes.gathered(padded, len(own) * self._processes.number)

    def _scores(self, rows: RecordBatch) -> Influence:
        model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        size = self.args.per_device_train_batch_size  # type: ignore[attr-defined]
        temperature = float(self.temperature)  # type: ignore[attr-defined]
        with _as_loaded(model):
            return score(
                *(model, rows, self.target, self.influence_objective, temperature),
                *(self.influence_engine, self.influence_memory, size, self._processes),
            )

    def _edited(self, output: dict[str, Any], selection: Selection) -> dict[str, Any]:
        """Return the batch with dropped rows out of the loss, kept ones weighed, and what the loss is multiplied by."""
        own = self._processes.own(len(selection.keep))
        device = output["advantages"].device
        keep, kept = selection.keep[own].to(device), int(selection.keep.sum())
        # A mean of 1 over the kept rows leaves the size of the step to the learning rate.
        weights = selection.weights[own].to(output["advantages"]) * (kept / max(float(selection.weights.sum()), 1e-30))
        output["advantages"] = output["advantages"] * weights if kept else torch.zeros_like(output["advantages"])
        if self._of_tokens:
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            output["tool_mask"] = output.get("tool_mask", torch.ones_like(output["completion_mask"])) * keep[:, None]
            total = self._processes.summed({"": (mask * keep[:, None]).sum()})[""]
            output["num_items_in_batch"] = total.to(output["num_items_in_batch"])
        scale = len(selection.keep) / kept if kept and self._by_rows else float(kept > 0)
        output[_SCALE] = torch.full(keep.shape, scale, device=device)
        return output

    @property
    def _by_rows(self) -> bool:
        """Whether the loss is a mean over rows, the dropped ones among them."""
        return getattr(self, "loss_type", None) not in TOKEN_LOSSES

    def _compute_loss(self, model: Any, inputs: Any) -> Float[Tensor, ""]:
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        return loss * inputs[_SCALE][0] if _SCALE in inputs else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take TRL's step; where a whole batch was dropped, leave no gradient for the optimiser to step on."""
        with self._timed("optimisation"):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        if self.selection is not None and not self.selection.keep.any():
            for parameter in model.parameters():
                parameter.grad = None
        return loss

    @contextmanager
    def _timed(self, stage: str, within: str | None = None) -> Iterator[None]:
        """Add the seconds of a stage to `seconds`, and take them from those of the stage that it lies in."""
        watch = Stopwatch()
        yield
        for clock, value in watch.seconds().items():
            for name, share in ((stage, value), (within, -value)):
                if name is not None:
                    clocks = self.seconds.setdefault(name, {})
                    clocks[clock] = clocks.get(clock, 0.0) + share

    def _tell(self, selection: Selection, influence: Influence | None) -> None:
        """Put scores and what was kept into TRL's table of completions and its metrics."""
        logs: Any = self._logs["extra"]  # type: ignore[attr-defined]
        metrics: Any = self._metrics["train"]  # type: ignore[attr-defined]
        logs["kept"].extend(selection.keep.tolist())
        metrics["influence/kept_share"].append(float(selection.keep.double().mean()))
        if influence is not None:
            logs["influence"].extend(influence.scores.tolist())
            metrics["influence/mean"].append(float(influence.scores.mean()))
            metrics["influence/negative_share"].append(float((influence.scores < 0).double().mean()))


@contextmanager
def _as_loaded(model: Any) -> Iterator[None]:
    """Take the autocast off that Accelerate puts around a model's forward pass: scores are in the model's precision."""
    plain = vars(model).get("_original_forward")
    if plain is None:
        yield
        return
    wrapped, model.forward = model.forward, plain
    try:
        yield
    finally:
        model.forward = wrapped


class InfluenceGRPOTrainer(_Influence, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer, on the completions that a rule keeps.

    Args:
        *args: as GRPOTrainer takes them, and so below.
        rule: which completions train; None: all, and nothing is scored.
        target: what scores are of; None: `SequenceReturn()`.
        objective: what a completion's training raises; None: the loss type's, at the policy that drew it.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold; None: what it holds of `per_device_train_batch_size` completions at a time.
        **kwargs: as GRPOTrainer takes them.

    Attributes:
        influence: scores of the last generation batch, of all processes; None where the rule needs none.
        selection: what of it trained; None where everything does.
        seconds: by stage ("generation", with rewards; "scoring"; "optimisation") and clock ("cpu", "wall"), since it
            was emptied last.

    Raises:
        Unsupported: settings with which a step could not be that of the kept completions alone; see the documentation.
    """

    _of_tokens = True

    def _objective(self) -> Objective:
        corrected = bool(getattr(self.args, "use_bias_correction_kl", False))
        return GroupObjective(ROW_LOSSES.get(self.loss_type, "sum"), float(self.beta), corrected)


class InfluenceRLOOTrainer(_Influence, RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer, on the completions that a rule keeps; arguments and attributes as of `InfluenceGRPOTrainer`.

    The divergence from the reference model is part of RLOO's rewards, and so of the advantages.
    """

    _of_tokens = False

    def _objective(self) -> Objective:
        return GroupObjective("sum", 0.0)
