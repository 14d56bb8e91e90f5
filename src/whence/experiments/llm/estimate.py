"""What a post-training run takes, looked at before any weight is loaded."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from whence.errors import WhenceError
from whence.experiments.llm.config import LanguageConfig
from whence.experiments.llm.tasks import (
    Task,
    load_task,
    make_drawing_config,
    make_validation_target,
    scoring_memory,
    split_held_out,
)
from whence.experiments.llm.trainer_config import make_trainer_config
from whence.llm.config import PPOConfig
from whence.llm.footprint import Pass, Rows, count_bytes, generating_pass, reading_pass, training_pass, without_weights
from whence.llm.generation import check_tokenizer
from whence.llm.model import WithValueHead
from whence.llm.prompts import NO_PROMPTS, read_prompts
from whence.llm.rewards import Reward
from whence.llm.targets import SequenceReturn
from whence.llm.trl_settings import check_selectable, has_router_loss


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


def estimate_run(config: LanguageConfig) -> Estimate:
    """Check what a run is asked for as far as that goes without weights, and return what it would take.

    Tokenizer, prompts and the configurations of models are loaded, and reward functions. Passes are over rows with the
    longest prompt and the longest response. Mixed precision is that of `ACCELERATE_MIXED_PRECISION`.

    Raises:
        WhenceError: what cannot be loaded, a prompt that does not fit, a reward that needs a column there is not.
        Unsupported: a model that cannot be run without weights, or that a selection cannot train.
    """
    task = load_task(config, weights=False)
    check_tokenizer(task.tokenizer)
    settings = make_trainer_config(config, "runs/estimated")
    if config.algorithm != "ppo":
        _check_router(config, settings, task)
    plan = (_of_ppo if config.algorithm == "ppo" else _of_groups)(settings, config)
    lengths = _lengths(config, settings, task)
    rows = Rows(plan.trained, max(lengths.trained), plan.response)
    with without_weights():
        model: Any = WithValueHead(task.model) if plan.has_values else task.model
    for module in model.modules():
        if plan.disables_dropout and isinstance(module, nn.Dropout):
            module.p = 0.0
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    gradients = count_bytes(model, trained=True)

    model.eval()
    drawn = generating_pass(task.model, replace(rows, rows=plan.drawn), mixed)
    read = reading_pass(model, replace(rows, rows=plan.read), mixed)
    drawing, reading = drawn.flops / plan.drawn, read.flops / plan.read
    stages = {"generation": drawn.held, "forward": read.held if plan.reads else 0}
    flops = {"generation": plan.rows * drawing, "forward": plan.rows * plan.reads * reading}
    if lengths.held_out:
        stages["held_out"] = max(drawn.held, read.held)
        flops["held_out"] = len(lengths.held_out) * (drawing + 2 * reading)
    if config.rule().needs_influence:
        target = _target_rows(config, task, rows, lengths.held_out)
        scoring = _scoring(model, rows, plan.rows, target, scoring_memory(config))
        stages["scoring"], flops["scoring"] = scoring.held, scoring.flops
    tested = Rows(plan.drawn, max(lengths.tested, default=0), plan.response)
    evaluated = generating_pass(task.model, tested, mixed) if lengths.tested else None
    if plan.recomputes:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    step = training_pass(model.train(), rows, mixed)
    stages["optimisation"] = step.held + (gradients if plan.accumulates else 0)
    flops["optimisation"] = plan.rows * plan.epochs * step.flops / plan.trained
    if evaluated is not None:
        stages["evaluation"] = evaluated.held
    is_copied = plan.held_back and not hasattr(task.model, "disable_adapter")
    return Estimate(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        prompts=len(lengths.trained),
        prompt_tokens=rows.prompt,
        response_tokens=plan.response,
        stays={
            "weights": count_bytes(model),
            "start model": count_bytes(task.model) if is_copied else 0,
            "Adam": 2 * gradients,
        },
        stages=stages,
        flops=flops,
    )


def _check_router(config: LanguageConfig, settings: Any, task: Task) -> None:
    """Refuse what a trainer refuses when it has seen the model."""
    if config.selects:
        check_selectable(settings, has_router_loss=has_router_loss(settings, task.model))


class _Lengths(NamedTuple):
    """Tokens of each prompt: of those that train, of those that the target is taken over, of the test's."""

    trained: Sequence[int]
    held_out: Sequence[int]
    tested: Sequence[int]


def _lengths(config: LanguageConfig, settings: Any, task: Task) -> _Lengths:
    """Return prompts' lengths, each of which fits, with the columns that the reward asks for."""
    drawing = make_drawing_config(config)
    own = settings if isinstance(settings, PPOConfig) else drawing
    context = getattr(task.model.config, "max_position_embeddings", None)

    def of(prompts: Any, how: PPOConfig, *rewards: Reward) -> list[int]:
        return (
            []
            if prompts is None
            else [len(ids) for ids in read_prompts(prompts, task.tokenizer, how, context, rewards).ids]
        )

    trained, held_out = split_held_out(config, task)
    found = _Lengths(of(trained, own, task.reward), of(held_out, own, task.reward), of(task.test, drawing))
    if not found.trained:
        raise WhenceError(NO_PROMPTS)
    return found


def _scoring(model: Any, rows: Rows, total: int, target: Rows | None, memory: int | None) -> Pass:
    """Return what the scores of `total` responses take, `rows` at a time, or at once where `memory` allows it.

    Scores are computed in the model's own precision.

    Args:
        model: in eval mode.
        rows: of a pass.
        total: responses of a round.
        target: rows that the target has of its own; None: it is taken over those that are scored.
        memory: bytes that scoring may hold; None: what a pass holds.
    """
    gradients, part = count_bytes(model, trained=True), training_pass(model, rows)
    whole = part.held * total // rows.rows
    at_once = memory is not None and whole + gradients <= memory
    # In parts, the target's gradient is held beside a pass, and a target over the same rows is a pass more.
    passes = 1 if at_once or target is not None else 2
    held, flops = (whole if at_once else part.held) + gradients, passes * total * part.flops / rows.rows
    if target is None:
        return Pass(held, flops)
    size = min(target.rows, _AT_ONCE)
    of_target = training_pass(model, replace(target, rows=size))
    so_far = gradients if target.rows > _AT_ONCE else 0
    return Pass(max(held, of_target.held + so_far), flops + target.rows * of_target.flops / size)


_AT_ONCE = SequenceReturn().batch_size
"""Rows of its own that a target goes through at a time."""


def _target_rows(config: LanguageConfig, task: Task, rows: Rows, held_out: Sequence[int]) -> Rows | None:
    """Return the rows that a run's target has of its own; None: it is taken over those that are scored."""
    if config.target == "validation":
        demonstrations = make_validation_target(task).rows
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
