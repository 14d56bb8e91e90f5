"""GRPO and RLOO by TRL's trainers, on the completions that a rule keeps.

TRL's own methods run unchanged. Where completions are chosen in the first step on a generation batch, Accelerate's
backward pass is replaced in it (`in_step.py`). For later steps, and for all if they are chosen before, the batch is
edited: the tokens of a dropped completion leave the loss (GRPO: `tool_mask`; RLOO: a weight of 0), and the loss is
rescaled to the kept ones. TRL's loss of a minibatch then gets the kept rows alone, so that dropped ones cost no pass. A
step is on the kept completions, while the groups' statistics are over all of them.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from jaxtyping import Float
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer, RLOOTrainer

from whence.core import (
    LANGUAGE_UNITS,
    MeanObjective,
    Objective,
    RecordBatch,
    Target,
    Unit,
    WhenceError,
    as_objective,
    preserve_rng_state,
)
from whence.llm.base import ONE, Processes
from whence.llm.scores import Scoring, SequenceReturn, Way, choose_way, make_group_objective, score
from whence.llm.trl.completions import (
    KEPT,
    ROW,
    SCALE,
    WEIGHT,
    averages_rows,
    check_group_rewards,
    check_release,
    check_selectable,
    disable_autocast,
    discard_gradients,
    find_other_inputs,
    forget_passes,
    gather_columns,
    make_completion_rows,
    number_doubles,
    sum_rewards,
    take_kept,
    weigh_rows,
)
from whence.llm.trl.in_step import PassChooser
from whence.llm.trl.trl_run import RunCallback, read_progress
from whence.runs import time_stage
from whence.scores import Influence, check_gradients, measure_gradients, name_round
from whence.selection import KeepAll, Progress, ScoreAll, Selection, SelectionRule, check_rule, choose_target


class _SelectingTrainer:
    """Scoring and selection, for both of TRL's trainers."""

    _drops_by_mask: bool
    """Whether a dropped row's tokens are masked; otherwise only its weight is 0."""

    def __init__(
        self,
        *args: Any,
        rule: SelectionRule | None = None,
        target: Target | None = None,
        select: Way | None = None,
        refresh_target_every: int = 1,
        objective: Objective | None = None,
        leave_one_out: Unit | None = "row",
        engine: str = "auto",
        memory: int | None = None,
        run: str | Path | None = None,
        about: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> None:
        self.rule: SelectionRule = KeepAll() if rule is None else rule
        check_rule(self.rule, LANGUAGE_UNITS)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_release(trainer, super())
        selects = type(self.rule) is not KeepAll
        if selects and type(self.rule) is not ScoreAll:
            check_selectable(trainer.args, has_router_loss=getattr(self, "aux_loss_enabled", False))
        self._processes = Processes(trainer.accelerator) if selects or run is not None else ONE
        way = choose_way(select, self.rule, objective, trainer.model, self._processes)
        self.scoring = Scoring(
            target=choose_target(self.rule, target, MeanObjective() if way == "in_step" else SequenceReturn()),
            objective=make_group_objective(trainer.args) if objective is None else as_objective(objective),
            temperature=float(trainer.temperature),
            engine=engine,
            memory=memory,
            chunk_size=trainer.args.per_device_train_batch_size,
            processes=self._processes,
            leave_one_out=leave_one_out if self._processes.hold_copies else None,
        )
        if refresh_target_every < 1:
            raise WhenceError(f"refresh_target_every is {refresh_target_every}; at least 1 generation batch is needed.")
        self.refresh_target_every = refresh_target_every
        self.chooser = PassChooser(self, refresh_target_every) if way == "in_step" else None
        self.influence: Influence | None = None
        self.selection: Selection | None = None
        self.rows: RecordBatch | None = None
        self._run = None if run is None else RunCallback(self, run, about, overwrite=overwrite)
        if self._run is not None:
            trainer.add_callback(self._run)
        self._rewards = torch.zeros(0)
        self.rewards_by_function: dict[str, Tensor] = {}
        self.prompt_columns: dict[str, list[Any]] = {}
        self._epochs_before = 0
        self.seconds: dict[str, dict[str, float]] = {}
        self._minibatch: Mapping[str, Any] | None = None
        self._held_rates: list[tuple[dict[str, Any], float]] = []
        self._removal: RemovableHandle | None = None

    def train(self, resume_from_checkpoint: str | Path | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Transformers does; with `run`, from a checkpoint of the run alone, see the class."""
        if self._run is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        checkpoint = self._run.choose_checkpoint(resume_from_checkpoint)
        if checkpoint is not None and self._run.is_finished(checkpoint):
            self._load_from_checkpoint(str(checkpoint))  # type: ignore[attr-defined]
            return TrainOutput(read_progress(checkpoint).global_step, 0.0, {})
        self._epochs_before = 0 if checkpoint is None else int(read_progress(checkpoint).epoch)
        try:
            return super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)  # type: ignore[misc]
        finally:
            self._run.recorder.end()

    def find_checkpoint(self) -> Path | None:
        """Return the run's last whole checkpoint, which `train(resume_from_checkpoint=True)` continues from."""
        latest = None if self._run is None else self._run.find_checkpoint()
        return None if latest is None else latest.path

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's sampler, whose next order of the prompts is that of the epoch in which training continues."""
        sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        if getattr(sampler, "shuffle", False):
            for _ in range(self._epochs_before):  # as many orders as were drawn before
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's generation batch, edited to the completions that the rule keeps; in evaluation unchanged."""
        if not self.model.training:  # type: ignore[attr-defined]
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc,no-any-return]
        with time_stage(self.seconds, "generation"), nullcontext() if self._run is None else self._run.note_texts():
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self.selection = None
        if self._run is not None:
            self.prompt_columns = gather_columns(inputs)
        if type(self.rule) is not KeepAll:
            with time_stage(self.seconds, "scoring"), preserve_rng_state():
                self.rows = self._make_rows(output)
                if self.chooser is not None and not self.chooser.confirm_batch(output):
                    self.chooser = None
                if self.chooser is not None:
                    self.chooser.begin(self.rows, self._progress)
                    return output
                self.influence = self._score_rows(self.rows) if self.rule.needs_influence else None
            self._note_selection(self.rule.select(self.rows, self.influence, self._progress), [output])
        elif self._run is not None:
            self.rows = None if find_other_inputs(output) else self._make_rows(output)
            self._run.note_batch()
        return output

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Return TRL's rewards of each function, (n, functions); an infinite one is refused, but in evaluation."""
        rewards: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)  # type: ignore[misc]
        if self.model.training:  # type: ignore[attr-defined]
            names = number_doubles(self.reward_func_names)  # type: ignore[attr-defined]
            with name_round(self._batches_done + 1):
                check_group_rewards(rewards, names, self._batches_done * len(rewards))
            self._rewards = sum_rewards(rewards, self.reward_weights)  # type: ignore[attr-defined]
            self.rewards_by_function = dict(zip(names, rewards.cpu().unbind(1), strict=True))
        return rewards

    def _note_selection(self, selection: Selection, batches: Iterable[dict[str, Any]]) -> None:
        """Let later steps be on the selected completions of a generation batch, of which `batches` are the parts."""
        self.selection = selection
        metrics = self._metrics["train"]  # type: ignore[attr-defined]
        metrics["influence/kept_share"].append(float(selection.keep.double().mean()))
        if self.influence is not None:
            metrics["influence/mean"].append(float(self.influence.scores.mean()))
            metrics["influence/negative_share"].append(float((self.influence.scores < 0).double().mean()))
        changes = not (selection.keep.all() and selection.uniform)
        for batch in batches if changes else ():
            self._apply_selection(batch, selection)
        if self._run is not None:
            self._run.note_batch()

    @property
    def _progress(self) -> Progress:
        steps = max(1, self.state.max_steps)  # type: ignore[attr-defined]
        return Progress(self._batches_done + 1, 1 - self.state.global_step / steps)  # type: ignore[attr-defined]

    @property
    def _batches_done(self) -> int:
        """The number of generation batches trained on, including those before a resumption."""
        args: Any = self.args  # type: ignore[attr-defined]
        passes = int(self.state.global_step) * args.gradient_accumulation_steps  # type: ignore[attr-defined]
        return int(passes // (args.steps_per_generation * args.num_iterations))

    def _make_rows(self, output: dict[str, Any]) -> RecordBatch:
        """Return the completions of all processes as rows, and let each in the batch know its place among them."""
        groups = self._rewards, self.num_generations  # type: ignore[attr-defined]
        rows = make_completion_rows(output, self._processes, self._batches_done, *groups)
        part = self._processes.part(len(rows))
        output[ROW] = torch.arange(len(rows), device=output["advantages"].device)[part]
        return rows

    def _score_rows(self, rows: RecordBatch) -> Influence:
        model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        with disable_autocast(model):
            influence = score(model, rows, self.scoring, self.rule)
        forget_passes(self.model_wrapped)  # type: ignore[attr-defined]
        return influence

    def _apply_selection(self, batch: dict[str, Any], selection: Selection) -> None:
        """Edit a batch: dropped rows leave the loss, kept rows get weights, and the loss a factor."""
        assert self.rows is not None
        rows, device = batch[ROW].to(selection.keep.device), batch["advantages"].device
        keep, count = selection.keep[rows].to(device), int(selection.keep.sum())
        # With a mean of 1 over the kept rows, weights do not change the size of a step.
        weights = selection.weights[rows].to(device) * (count / max(float(selection.weights.sum()), 1e-30))
        if self._drops_by_mask:
            columns: Any = self.rows.observations
            total = columns["response_mask"][selection.keep.to(columns["response_mask"].device)].sum()
            batch["tool_mask"] = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * keep[:, None]
            batch["num_items_in_batch"] = total.to(batch["num_items_in_batch"])
        scale = len(selection.keep) / count if count and averages_rows(self) else float(count > 0)
        batch[SCALE] = torch.full(keep.shape, scale, device=device)
        batch[KEPT], batch[WEIGHT] = keep, weights * keep

    def _compute_loss(self, model: Any, inputs: Any) -> Float[Tensor, ""]:
        self._minibatch_size = len(inputs["completion_ids"])
        rows, factor = inputs, None
        if SCALE in inputs:
            # TRL gathers a number of each row, so every process's minibatch has as many rows.
            count = self._processes.agree_on_most(max(1, int(inputs[KEPT].sum())))
            rows, factor = take_kept(inputs, count, averages=averages_rows(self))
        # Selected rows are marked.
        chooser = self.chooser if model.training and self.chooser and self.chooser.is_open else None
        self._minibatch = rows if model.training and ROW in rows else None
        loss = self._compute_trl_loss(model, rows) if chooser is None else chooser.compute_loss(model, inputs)
        self._minibatch = None
        loss = loss if factor is None else loss * factor
        if model.training and self._steps_in_backward:
            self._guard_next_step(model, loss.detach())
        return loss

    def _compute_trl_loss(self, model: Any, inputs: Any) -> Float[Tensor, ""]:
        return super()._compute_loss(model, inputs)  # type: ignore[misc,no-any-return]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's log-probs of tokens, by which a minibatch's rows get their weights; note them for the run."""
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        if self._minibatch is not None:
            if WEIGHT in self._minibatch:
                weigh_rows(outputs[0], self._minibatch[WEIGHT])
            if self._run is not None:
                self._run.signals.note(self._minibatch, *outputs[:2])
        return outputs

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take TRL's step; if the whole batch was dropped, remove the gradients, so that no parameter moves."""
        if self._removal is not None:
            self._removal.remove()
            self._removal = None
        chooser = self.chooser
        with time_stage(self.seconds, "optimisation"), chooser.replace_backward() if chooser else nullcontext():
            try:
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            finally:
                while self._held_rates:
                    group, rate = self._held_rates.pop()
                    group["lr"] = rate
            if not self._steps_in_backward:
                self._check_gradient(model, loss)
        if chooser is not None and chooser.choice is not None:
            (self.influence, selection), chooser.choice = chooser.choice, None
            self._note_selection(selection, self._buffered_inputs)  # type: ignore[attr-defined]
        if self.selection is not None and not self.selection.keep.any():
            optimizer: Any = self.optimizer  # type: ignore[attr-defined]
            self._removal = discard_gradients(model.parameters(), getattr(optimizer, "optimizer", optimizer))
        return loss

    @property
    def _steps_in_backward(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)  # type: ignore[attr-defined]

    def _guard_next_step(self, model: Any, loss: Tensor) -> None:
        """Before a backward pass that also steps: check the loss, and hold the parameters if the batch was dropped."""
        # Every process has to stop, or the others wait for it in the pass.
        processes = Processes(self.accelerator)  # type: ignore[attr-defined]
        if processes.agree_on_most(int(not torch.isfinite(loss))):
            self._check_gradient(model, torch.full_like(loss, math.nan))
        if self.selection is not None and not self.selection.keep.any():
            optimizer: Any = self.optimizer  # type: ignore[attr-defined]
            for group in optimizer.param_groups:  # Adam would step by its earlier gradients
                self._held_rates.append((group, group["lr"]))
                group["lr"] = 0.0

    def _check_gradient(self, model: Any, loss: Tensor) -> None:
        accelerator: Any = self.accelerator  # type: ignore[attr-defined]
        if accelerator.scaler is not None:  # scaled gradients overflow as a rule, and the scaler leaves out the step
            return
        norms = measure_gradients(accelerator.unwrap_model(model).named_parameters())
        with name_round(self._batches_done + 1):
            check_gradients(norms, f"a minibatch of {self._minibatch_size} completions", loss=loss)


class InfluenceGRPOTrainer(_SelectingTrainer, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer, on the completions that a rule keeps.

    With `run`, `train(resume_from_checkpoint=True)` continues after the run's last whole checkpoint of Transformers'.
    On CPUs, with one and two processes, the result was that of an uninterrupted training to the same bits (parameters,
    optimiser, learning rates, records), including dropout, several epochs and a reference that moves. For this the
    checkpoint has to be at the end of a generation batch: `save_steps` is a multiple of the optimiser's steps on one.

    Args:
        *args: arguments of GRPOTrainer.
        rule: the selection rule; None: all completions train, and none is scored. `ScoreAll()`: all train and are
            scored, also under settings where none may be dropped.
        target: the target of the scores; None: in the step `MeanObjective()`, the last generation batch's own
            gradient, before it `SequenceReturn()`.
        select: "in_step": each pass of the first step on a generation batch scores its rows, by a gradient of the
            target that is known before, and trains on those that the rule keeps among them; this costs no further pass.
            "before": the rule sees the whole batch, which is scored in passes of its own. None: in the step where that
            can be; if not, a warning says why. As long as there is no gradient of the target, all rows train.
        refresh_target_every: in the step, the number of generation batches that a gradient of the target serves.
        objective: the objective of a completion's training; None: that of the loss type, at the policy that drew it.
        leave_one_out: before the steps, what a completion's own unit leaves out of a target over the scored ones, since
            else each votes for itself: "row", "group" or None, nothing, as under FSDP and DeepSpeed. In the step the
            target's gradient is older than the completions.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold; None: those of `per_device_train_batch_size` completions at a time.
        run: the directory to write each generation batch to, for `whence report`; None: nothing is written.
        about: a further description of the run for the directory, in JSON types.
        overwrite: with `run`, delete the rounds in the directory that come after the start of this training. Without it
            a directory with more finished rounds is refused.
        **kwargs: arguments of GRPOTrainer.

    Attributes:
        influence: scores of the last generation batch, of all processes; None if the rule needs none, or as long as
            there is no gradient of the target.
        selection: the completions of this batch that train; None without a rule, and before they are chosen in a step.
        rows: the rows of this batch, of all processes; None without a rule and a run.
        seconds: seconds by stage ("generation", with rewards; "scoring"; "optimisation") and clock ("cpu", "wall"),
            since the dictionary was last emptied; with `run` it is emptied after every batch.

    Raises:
        Unsupported: settings under which dropped completions would still affect a step; see the documentation.
        NonFinite: raised by `train()` for a reward that is infinite, and for a loss or gradient that is NaN or
            infinite, before a step on it. A reward that is NaN or None means, as in TRL, that the function does not
            apply.
    """

    _drops_by_mask = True


class InfluenceRLOOTrainer(_SelectingTrainer, RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer, on the completions that a rule keeps; arguments and attributes as in `InfluenceGRPOTrainer`.

    The divergence from the reference model is part of RLOO's rewards, and so of the advantages.
    """

    _drops_by_mask = False
