"""PPO for causal language models, on the responses that a rule selects."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers.utils.logging import tqdm

from whence.core import (
    LANGUAGE_UNITS,
    MeanObjective,
    Objective,
    RecordBatch,
    Target,
    Unit,
    WhenceError,
    as_objective,
    call_plugin,
    preserve_rng_state,
)
from whence.llm.base import PPOConfig, Processes, Reference, WithValueHead, disable_dropout
from whence.llm.ppo.ppo_round import (
    Rollout,
    compute_pair_loss,
    make_metrics_row,
    make_optimizer,
    make_response_table,
    make_rollout,
    optimise,
    steer_kl_coef,
)
from whence.llm.ppo.ppo_run import open_run, read_model, restore_model
from whence.llm.scores import RoundChooser, Scoring, SequenceReturn, TokenPPO, Way, check_held_out, choose_way, score
from whence.llm.text import (
    Evaluate,
    Prompt,
    Prompts,
    Responses,
    Reward,
    check_tokenizer,
    context_length,
    generate,
    read_prompts,
    write_evaluation,
)
from whence.runs import Checkpoint, load_states, read_states, time_stage
from whence.scores import Influence, check_parameters, name_round
from whence.selection import KeepAll, Progress, Selection, SelectionRule, check_rule, choose_target

OnRollout = Callable[[Rollout, Influence | None, Selection, Mapping[str, Any]], None]
"""Called after each round with its rollout, scores, selection and metrics."""


class PPOTrainer:
    """Train a causal language model by PPO, on the responses that an influence-based rule selects.

    A round draws a response to each of `batch_size` prompts, rewards it, and computes advantages over the whole
    rollout; scores the rows and selects among them; and takes steps on the selected rows. A step's loss is

        -sum_i w_i (p_i - vf_coef * v_i) / sum_i w_i

    over the selected rows alone, with `p_i` and `v_i` the means over a row's response tokens of the clipped objective
    and of the value loss. A round without a selected row takes no step.

    The results are in `config.output_dir`, a run directory of which `whence report` makes a page. Under `accelerate
    launch` each process takes a part of the rows; scores and selection are the same as in one process.

    Args:
        config: the settings.
        model: a causal language model of Transformers, whole or with a PEFT adapter, or a `WithValueHead`.
        tokenizer: its tokenizer.
        reward: `reward(prompts, responses) -> numbers`. A reward with further arguments gets the data set's columns of
            these names: `reward(prompts, responses, answer)`.
        prompts: texts or chats; or a data set with a column "prompt", or its rows, each a dict.
        rule: the selection rule; None: all rows train, and none is scored.
        target: the target of the scores; None: `MeanObjective()`, the last round's own gradient, where rows are chosen
            in the step, and else, as with `held_out`, `SequenceReturn()`.
        held_out: further prompts, answered in every round; the target is over these responses. None: the target is
            over the scored rows.
        objective: the objective of a row's training; None: in the step the loss that trains, and else the clipped
            objective without the value loss.
        leave_one_out: before the steps, what a row's own unit leaves out of a target over the scored rows, since else
            each votes for itself: "row", "group", or None, nothing. In the step the target's gradient is older than the
            rows.
        select: when rows are chosen: "in_step", in the passes of the first epoch, which costs little more than those;
            "before", by passes of their own before the first step; None: in the step where that can be.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold at a time; more is faster. None: those of a pass over
            `config.mini_batch_size` rows and of the target's gradient.
        evaluate: measures the model before the first round, every `config.eval_every` rounds and after the last.
        sample_prompts: prompts that are answered at each of these moments, by the likeliest tokens; `whence report`
            shows the answers of the start model and of the trained one. None: none.
        about: a further description of the run for the run directory, in JSON types.
        on_rollout: called after every round.

    Raises:
        WhenceError: the tokenizer has no pad token, a prompt does not fit, or a rule, target or reward is invalid.
        Unsupported: processes split the model's parameters among them (FSDP, DeepSpeed).
    """

    def __init__(
        self,
        config: PPOConfig,
        model: Any,
        tokenizer: Any,
        reward: Reward,
        prompts: Sequence[Prompt] | Any,
        *,
        rule: SelectionRule | None = None,
        target: Target | None = None,
        held_out: Sequence[Prompt] | Any | None = None,
        objective: Objective | None = None,
        leave_one_out: Unit | None = "row",
        select: Way | None = None,
        engine: str = "auto",
        memory: int | None = None,
        evaluate: Evaluate | None = None,
        sample_prompts: Sequence[Prompt] | Any | None = None,
        about: Mapping[str, Any] | None = None,
        on_rollout: OnRollout | None = None,
    ) -> None:
        self.rule: SelectionRule = KeepAll() if rule is None else rule
        units = LANGUAGE_UNITS if (config.num_generations or 1) > 1 else LANGUAGE_UNITS[:2]
        check_rule(self.rule, units, " PPOConfig(num_generations=8) draws groups: eight responses to each prompt.")
        check_tokenizer(tokenizer)
        self.config, self.tokenizer, self.evaluate, self.on_rollout = config, tokenizer, evaluate, on_rollout
        self.reward, self.about = reward, dict(about or {})
        self.accelerator = Accelerator(log_with=list(config.report_to) or None, project_dir=config.output_dir)
        self.accelerator.gradient_accumulation_steps = 1  # the trainer itself splits steps into passes
        self.processes = Processes(self.accelerator, need_copies=True)
        self.processes.check_batch(config.batch_size)
        # All processes draw the same numbers while the model is made; later each has a seed of its own.
        set_seed(config.seed)
        self.model = model if isinstance(model, WithValueHead) else WithValueHead(model)
        if config.disable_dropout:
            disable_dropout(self.model)
        context = context_length(self.model.language_model)
        self.prompts = read_prompts(prompts, tokenizer, config, context, reward)
        if not len(self.prompts):
            raise WhenceError("There are no prompts to draw responses to.")
        self.held_out, self.sample_prompts = (
            None if dataset is None else read_prompts(dataset, tokenizer, config, context, reward)
            for dataset in (held_out, sample_prompts)
        )
        way = choose_way(select, self.rule, objective, self.model, self.processes)
        default = MeanObjective() if way == "in_step" and held_out is None else SequenceReturn()
        self.scoring = Scoring(
            target=choose_target(self.rule, target, default),
            objective=TokenPPO(clip_range=config.cliprange) if objective is None else as_objective(objective),
            temperature=config.temperature,
            engine=engine,
            memory=memory,
            chunk_size=config.mini_batch_size,
            processes=self.processes,
            leave_one_out=leave_one_out,
        )
        if self.held_out is not None:
            check_held_out(self.scoring.target, len(self.held_out), self.processes)
        self._chooser: RoundChooser | None = None
        if way == "in_step":
            self._chooser = RoundChooser(self.model, self.rule, self.scoring, config.refresh_target_every or 1)
        # Accelerate would wrap the model, for the mean of gradients over processes and for mixed precision. Here
        # gradients are summed, since a step's loss is divided by numbers of all processes' rows, and scores are
        # computed in the model's own precision.
        if not hasattr(self.model.language_model, "hf_device_map"):
            self.model = self.model.to(self.accelerator.device)
        self.processes.broadcast_model(self.model)
        self.reference = Reference(self.model.language_model)
        self.optimizer = self.accelerator.prepare_optimizer(make_optimizer(self.model, config))
        self.kl_coef = config.init_kl_coef
        self.metrics: list[dict[str, Any]] = []
        self._kinds_of_advice: set[str] = set()
        self._generator = torch.Generator().manual_seed(config.seed)  # of prompts and of the order of rows
        self._prompt_queue: list[int] = []
        self._recorder: Any = None  # until `train`
        set_seed(self._derive_seed())

    def _derive_seed(self, *purpose: int) -> int:
        """Return a seed for this process and a purpose."""
        return int(np.random.SeedSequence([self.config.seed, self.processes.rank, *purpose]).generate_state(1)[0])

    def train(self, *, overwrite: bool = False) -> list[dict[str, Any]]:
        """Train all rounds and return a row of metrics for each.

        If `output_dir` holds an unfinished run of the same settings, training continues after its last checkpoint, to
        the same bits as if it had not been interrupted. A finished run is left as it is; the model becomes the trained
        one.

        Args:
            overwrite: delete the run that `output_dir` holds, and start anew.

        Raises:
            RunDirectoryError: `output_dir` holds a run of another model or other settings, one without a checkpoint, or
                something else than a run; or another process writes to it. Nothing was changed.
            WhenceError: the training would start anew with a model that this trainer has trained already.
        """
        self._recorder, checkpoint = open_run(self, overwrite=overwrite, is_trained=self._recorder is not None)
        done = 0 if checkpoint is None else checkpoint.round  # not the rows of metrics, which may be lost
        try:
            if checkpoint is not None:
                self._restore(checkpoint)
            if done < self.config.rounds:
                self._train_rounds(done + 1)
        finally:
            self._recorder.end()
        return self.metrics

    def _train_rounds(self, first: int) -> None:
        """Train the rounds that have not been trained yet."""
        config = self.config
        if config.report_to:
            plain = {name: value for name, value in config.to_json().items() if isinstance(value, int | float | str)}
            # The variable is W&B's own; Accelerate would not read it.
            self.accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "whence"), plain)
        if first == 1:
            self._evaluate(0)
        shown = not config.disable_tqdm and self.accelerator.is_main_process
        bar = tqdm(range(first, config.rounds + 1), desc="rounds", disable=not shown, unit="round")
        for number in bar:
            row = self._run_round(number)
            bar.set_postfix(
                reward=f"{row['reward']:.3g}", kl=f"{row['kl']:.3g}", kept=f"{1 - row['dropped_share']:.0%}"
            )
            # The first process's clock decides: others' clocks may differ, and all have to take part.
            if self.processes.agree(self._recorder.is_due(number, last=number == config.rounds)):
                self._recorder.save_checkpoint(number, self._read_state)
        for tracker in self.accelerator.trackers:  # `end_training` would also disconnect the processes
            tracker.finish()

    def _run_round(self, number: int) -> dict[str, Any]:
        config, seconds = self.config, dict[str, dict[str, float]]()
        progress = Progress(number, 1 - (number - 1) / config.rounds)
        draw_rows = None if self.held_out is None else partial(self._draw_held_out, self.held_out, number, seconds)
        prompts = self._draw_prompts()
        with time_stage(seconds, "generation"), self.accelerator.autocast():
            responses = self._generate(prompts)
        with time_stage(seconds, "forward"), self.accelerator.autocast(), name_round(number):
            rollout = self._make_rollout(responses, prompts, (number - 1) * config.batch_size)
        with time_stage(seconds, "scoring"), name_round(number):
            if (chooser := self._confirm_chooser(rollout.rows)) is None:
                influence, selection = self._choose(rollout.rows, progress, draw_rows)
            else:
                chooser.begin(rollout.rows, progress, draw_rows)
                influence, selection = None, chooser.selection
        with time_stage(seconds, "optimisation"), name_round(number):
            means = optimise(
                self.model,
                self.optimizer,
                rollout.rows,
                selection,
                config=config,
                generator=self._generator,
                processes=self.processes,
                chooser=chooser,
            )
            check_parameters((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        if chooser is not None:
            with time_stage(seconds, "scoring"), name_round(number):
                influence, selection = chooser.end()
        row = {**make_metrics_row(number, rollout, selection, influence), "kl_coef": self.kl_coef, **means}
        self.kl_coef = steer_kl_coef(self.kl_coef, row["kl"], config)
        self.metrics.append(row)
        self._report_round(rollout, influence, selection, row, seconds)
        if config.eval_every and (number % config.eval_every == 0 or number == config.rounds):
            self._evaluate(number)
        return row

    def _choose(
        self, rows: RecordBatch, progress: Progress, draw_rows: Callable[[], RecordBatch] | None
    ) -> tuple[Influence | None, Selection]:
        """Return the rows' scores, and the rows that train; `draw_rows` draws those of the target, if not None."""
        scoring, influence = self.scoring, None
        if self.rule.needs_influence:
            if draw_rows is not None:
                scoring = replace(scoring, target=replace(scoring.target, rows=draw_rows()))  # type: ignore[type-var]
            influence = score(self.model, rows, scoring, self.rule)
        return influence, self.rule.select(rows, influence, progress)

    def _confirm_chooser(self, rows: RecordBatch) -> RoundChooser | None:
        """Return what chooses rows in the steps, once two rows have confirmed it; None: they are chosen before."""
        compute_loss = partial(compute_pair_loss, self.model, rows, self.config, self.processes)
        if self._chooser is not None and not self._chooser.confirm(compute_loss):
            self._chooser = None
        return self._chooser

    def _draw_held_out(self, prompts: Prompts, number: int, seconds: dict[str, dict[str, float]]) -> RecordBatch:
        """Return responses to held-out prompts as rows, without changing the draws of training."""
        with time_stage(seconds, "held_out"), preserve_rng_state(), self.accelerator.autocast():
            set_seed(self._derive_seed(number))
            return self._make_rollout(self._generate(prompts), prompts).rows

    def _draw_prompts(self) -> Prompts:
        """Draw prompts without replacement; when all have been drawn, start again with all of them."""
        times = self.config.num_generations or 1
        size = self.config.batch_size // times
        while len(self._prompt_queue) < size:
            self._prompt_queue += torch.randperm(len(self.prompts), generator=self._generator).tolist()
        numbers, self._prompt_queue = self._prompt_queue[:size], self._prompt_queue[size:]
        return self.prompts.take([number for number in numbers for _ in range(times)])

    def _generate(self, prompts: Prompts) -> Responses:
        return generate(self.model.language_model, self.tokenizer, prompts.ids, self.config, self.processes)

    def _make_rollout(self, responses: Responses, prompts: Prompts, first_id: int = 0) -> Rollout:
        settings = (self.reward, self.kl_coef, self.config, first_id, self.processes, prompts.columns)
        return make_rollout(self.model, self.reference, responses, *settings)

    def _report_round(
        self,
        rollout: Rollout,
        influence: Influence | None,
        selection: Selection,
        row: Mapping[str, Any],
        seconds: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Write a round to the run directory, log it to trackers, and call `on_rollout`."""
        if not self._recorder.writes:
            return
        number = row["round"]
        self._recorder.write_round(number, make_response_table(rollout, selection, influence))
        self._recorder.write_rows(row, seconds)
        call_plugin("whence.advice", "settings", self.metrics, {}, self._kinds_of_advice)
        numbers = {name: value for name, value in row.items() if value is not None and name != "round"}
        walls = {f"seconds/{stage}": clocks["wall"] for stage, clocks in seconds.items()}
        self.accelerator.log(numbers | walls, step=number)
        if self.on_rollout is not None:
            self.on_rollout(rollout, influence, selection, row)

    def _evaluate(self, number: int) -> None:
        if not self.config.eval_every or not self._recorder.writes:
            return
        measures = write_evaluation(
            *(self._recorder.directory, number, self.model.language_model, self.tokenizer),
            prompts=self.sample_prompts,
            reward=self.reward,
            config=self.config,
            evaluate=self.evaluate,
        )
        if measures:
            self.accelerator.log({f"test/{name}": value for name, value in measures.items()}, step=number)

    def _read_state(self) -> dict[str, Any]:
        """Return all that training needs to continue after a round, for a checkpoint; call it in every process."""
        return {
            **read_model(self.model, self.optimizer.optimizer),
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
            "kl_coef": self.kl_coef,
            "queue": self._prompt_queue,
            "generator": self._generator.get_state(),
            "advice": sorted(self._kinds_of_advice),
            "target": None if self._chooser is None else self._chooser.gradient,
            "processes": self.processes.gather_states({"user": read_states((self.rule, self.reward))}),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Put everything where it was after the checkpoint's round."""
        content = checkpoint.content
        self._recorder.continue_after(checkpoint)
        rows = self._recorder.directory.table("metrics").to_dicts()
        self.metrics = [row for row in rows if row["round"] <= checkpoint.round]
        restore_model(self.model, self.optimizer.optimizer, content)
        if self.accelerator.scaler is not None and content.get("scaler") is not None:
            self.accelerator.scaler.load_state_dict(content["scaler"])  # of gradients in float16
        self.kl_coef, self._prompt_queue = content["kl_coef"], list(content["queue"])
        self._generator.set_state(content["generator"])
        self._kinds_of_advice = set(content["advice"])
        if self._chooser is not None:
            self._chooser.restore(content.get("target"))
        load_states((self.rule, self.reward), self.processes.load_state(content["processes"])["user"])

    def save_model(self, folder: str | Path | None = None) -> None:
        """Write model (or adapter), value head and tokenizer, in Transformers' format."""
        if not self.accelerator.is_main_process:
            return
        folder = Path(self.config.output_dir) / "model" if folder is None else Path(folder)
        self.accelerator.unwrap_model(self.model).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
