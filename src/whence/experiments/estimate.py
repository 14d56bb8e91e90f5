"""What a post-training run takes, looked at before any weight is loaded."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from whence.experiments.language import LanguageConfig, parted, scoring_memory, validation_of
from whence.experiments.tasks import Task, drawing_of, task_of
from whence.llm.config import PPOConfig
from whence.llm.footprint import Rows, generating_pass, reading_pass, size_of, training_pass, without_weights
from whence.llm.generation import check_tokenizer
from whence.llm.model import WithValueHead
from whence.llm.prompts import prompts_of
from whence.llm.rewards import Reward
from whence.llm.targets import SequenceReturn


@dataclass(frozen=True)
class Estimate:
    """What a run takes on one device; bytes, and floating-point operations of a round.

    Attributes:
        parameters: of the model, an adapter and a value head included.
        trained: how many of them train.
        prompts: how many there are.
        prompt_tokens: of the longest prompt.
        response_tokens: of the longest response.
        stays: bytes held throughout, by what holds them; without a reward's own model.
        stages: bytes that each stage holds besides at its most.
        flops: of each stage but evaluations, in a round in which every response trains; without rewards' own.
    """

    parameters: int
    trained: int
    prompts: int
    prompt_tokens: int
    response_tokens: int
    stays: Mapping[str, int]
    stages: Mapping[str, int]
    flops: Mapping[str, float]

    @property
    def peak(self) -> int:
        """Bytes held at the most, as tensors; an allocator and its kernels take more."""
        return sum(self.stays.values()) + max(self.stages.values())

    def to_json(self) -> dict[str, Any]:
        """Return the estimate in JSON types."""
        return {**asdict(self), "peak": self.peak}


def estimate(config: LanguageConfig) -> Estimate:
    """Check what a run is asked for as far as that goes without weights, and return what it would take.

    Tokenizer, prompts and the configurations of models are loaded, and reward functions. Passes are over rows with the
    longest prompt and the longest response. Mixed precision is that of `ACCELERATE_MIXED_PRECISION`.

    Raises:
        WhenceError: what cannot be loaded, a prompt that does not fit, a reward that needs a column there is not.
        Unsupported: a model that cannot be run without weights.
    """
    task = task_of(config, weights=False)
    check_tokenizer(task.tokenizer)
    settings, drawing = config.trained_by("runs/estimated"), drawing_of(config)
    plan = (_of_ppo if config.algorithm == "ppo" else _of_groups)(settings, config)
    own = settings if isinstance(settings, PPOConfig) else drawing
    context = getattr(task.model.config, "max_position_embeddings", None)

    def lengths(prompts: Any, how: PPOConfig, rewards: Sequence[Reward] = ()) -> list[int]:
        return list(map(len, prompts_of(prompts, task.tokenizer, how, context, rewards).ids))

    training, held_out = parted(config, task)
    prompts = lengths(training, own, [task.reward])
    apart = [] if held_out is None else lengths(held_out, own, [task.reward])
    tested = [] if task.test is None else lengths(task.test, drawing)
    rows = Rows(plan.trained, max(prompts), plan.response)
    with without_weights():
        model: Any = WithValueHead(task.model) if plan.has_values else task.model
    for module in model.modules():
        if plan.disables_dropout and isinstance(module, nn.Dropout):
            module.p = 0.0
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    gradients = size_of(model, trained=True)

    model.eval()
    drawn = generating_pass(task.model, replace(rows, rows=plan.drawn), mixed)
    read = reading_pass(model, replace(rows, rows=plan.read), mixed)
    scored = training_pass(model, rows)  # scores are computed as the model is loaded
    target = _target_rows(config, task, rows, apart)
    of_target = None if target is None else training_pass(model, replace(target, rows=min(target.rows, _AT_ONCE)))
    asked = generating_pass(task.model, Rows(plan.drawn, max(tested), plan.response), mixed) if tested else None
    if plan.recomputes:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    model.train()
    step = training_pass(model, rows, mixed)

    each = {"generation": drawn.flops / plan.drawn, "reading": read.flops / plan.read}
    flops = {"generation": plan.rows * each["generation"], "forward": plan.rows * plan.reads * each["reading"]}
    stages = {"generation": drawn.held, "forward": read.held if plan.reads else 0}
    if apart:
        flops["held_out"] = len(apart) * (each["generation"] + 2 * each["reading"])
        stages["held_out"] = max(drawn.held, read.held)
    if config.rule().needs_influence:
        whole = scored.held * plan.rows // plan.trained
        memory = scoring_memory(config)
        at_once = memory is not None and whole + gradients <= memory
        # In parts, the target's gradient is held beside a pass; a target over the same rows is a pass more.
        stages["scoring"] = (whole if at_once else scored.held) + gradients
        passes = 1 if at_once or of_target is not None else 2
        flops["scoring"] = passes * plan.rows * scored.flops / plan.trained
        if target is not None and of_target is not None:
            so_far = gradients if target.rows > _AT_ONCE else 0
            stages["scoring"] = max(stages["scoring"], of_target.held + so_far)
            flops["scoring"] += target.rows * of_target.flops / min(target.rows, _AT_ONCE)
    stages["optimisation"] = step.held + (gradients if plan.accumulates else 0)
    flops["optimisation"] = plan.rows * plan.epochs * step.flops / plan.trained
    if asked is not None:
        stages["evaluation"] = asked.held
    is_copied = plan.held_back and not hasattr(task.model, "disable_adapter")
    return Estimate(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        prompts=len(prompts),
        prompt_tokens=max(prompts),
        response_tokens=plan.response,
        stays={
            "weights": size_of(model),
            "start model": size_of(task.model) if is_copied else 0,
            "Adam": 2 * gradients,
        },
        stages=stages,
        flops=flops,
    )


_AT_ONCE = SequenceReturn().batch_size
"""Rows of its own that a target goes through at a time."""


def _target_rows(config: LanguageConfig, task: Task, rows: Rows, held_out: Sequence[int]) -> Rows | None:
    """Return the rows that a run's target has of its own; None: it is taken over those that are scored."""
    if config.target == "validation":
        demonstrations = validation_of(task).rows
        width = demonstrations.observations["response_mask"].shape[1]
        whole = demonstrations.observations["input_ids"].shape[1]
        return Rows(len(demonstrations), whole - width, width)
    return replace(rows, rows=len(held_out), prompt=max(held_out)) if held_out else None


@dataclass(frozen=True)
class _Plan:
    """What a round goes through.

    Attributes:
        rows: responses of a round.
        response: tokens of the longest.
        drawn: responses that are generated at a time.
        read: rows of a pass without gradients.
        reads: how many such passes go over each row.
        trained: rows of a pass with gradients.
        epochs: how many of these go over each row.
        held_back: whether the model that training began with is read.
        has_values: whether there is a value head.
        accumulates: whether several passes make a step, which hold gradients from the first on.
        recomputes: whether activations are computed again in the backward pass.
        disables_dropout: whether it is switched off.
    """

    rows: int
    response: int
    drawn: int
    read: int
    reads: int
    trained: int
    epochs: int
    held_back: bool
    has_values: bool
    accumulates: bool
    recomputes: bool
    disables_dropout: bool


def _of_ppo(settings: PPOConfig, config: LanguageConfig) -> _Plan:
    at_once = min(settings.generation_batch_size, settings.batch_size)
    return _Plan(
        *(settings.batch_size, settings.max_new_tokens, at_once, at_once),
        reads=2,
        trained=min(settings.mini_batch_size, settings.batch_size),
        epochs=settings.ppo_epochs,
        held_back=True,
        has_values=True,
        accumulates=settings.gradient_accumulation_steps > 1,
        recomputes=False,
        disables_dropout=settings.disable_dropout,
    )


def _of_groups(settings: Any, config: LanguageConfig) -> _Plan:
    rows, size = settings.generation_batch_size, settings.per_device_train_batch_size
    held_back = bool(settings.beta)
    return _Plan(
        *(rows, settings.max_completion_length, rows, size),
        # RLOO reads the policy that drew them always.
        reads=held_back + (settings.num_iterations > 1 or config.algorithm == "rloo"),
        trained=size,
        epochs=settings.num_iterations,
        held_back=held_back,
        has_values=False,
        accumulates=settings.gradient_accumulation_steps > 1,
        recomputes=bool(settings.gradient_checkpointing),
        disables_dropout=bool(settings.disable_dropout),
    )
