"""Memory and work of a post-training run, estimated without loading weights."""

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
    make_sampling_config,
    make_validation_target,
    response_setting,
    scoring_memory,
    split_held_out,
)
from whence.experiments.llm.trainer_config import make_trainer_config
from whence.layers import Layers
from whence.llm.config import PPOConfig
from whence.llm.footprint import (
    BatchShape,
    Pass,
    count_bytes,
    hidden_bytes,
    measure_generating_pass,
    measure_reading_pass,
    measure_training_pass,
    skip_weights,
    train_layers_alone,
)
from whence.llm.generation import check_tokenizer, context_length
from whence.llm.model import WithValueHead, disable_dropout
from whence.llm.prompts import NO_PROMPTS, read_prompts
from whence.llm.rewards import Reward
from whence.llm.scoring import find_first_block, widen_chunk
from whence.llm.targets import SequenceReturn
from whence.llm.trl_settings import check_selectable, has_router_loss


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, and floating-point operations of a round.

    Attributes:
        parameters: number of the model's parameters, including an adapter and a value head.
        trained: number of parameters that train.
        prompts: number of prompts.
        prompt_tokens: tokens of the longest prompt.
        response_tokens: tokens of the longest response.
        stays: bytes in memory throughout the run, by purpose; without a reward's model.
        stages: the most further bytes of each stage.
        flops: operations of each stage except evaluations, in a round in which every response trains; without those
            of rewards.
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
        """The most bytes in tensors at a time; an allocator and its kernels need more."""
        return sum(self.stays.values()) + max(self.stages.values())

    def to_json(self) -> dict[str, Any]:
        """Return the estimate in JSON types."""
        return {**asdict(self), "peak": self.peak}


def estimate_run(config: LanguageConfig) -> Estimate:
    """Check a run as far as possible without weights, and return its memory and work.

    Tokenizer, prompts, the configurations of models and reward functions are loaded. Rows are assumed to have the
    longest prompt and the longest response. Mixed precision is that of `ACCELERATE_MIXED_PRECISION`.

    Raises:
        WhenceError: something cannot be loaded, a prompt does not fit, or a reward asks for a column that does not
            exist.
        Unsupported: the model cannot be run without weights, or the arm cannot select among its responses.
    """
    task = load_task(config, weights=False)
    check_tokenizer(task.tokenizer)
    settings = make_trainer_config(config, "runs/estimated")
    if config.algorithm != "ppo":
        _check_router(config, settings, task)
    plan = _plan_ppo(settings) if config.algorithm == "ppo" else _plan_trl(settings, config)
    lengths = _count_tokens(config, settings, task)
    shape = BatchShape(plan.trained, max(lengths.trained), plan.response)
    with skip_weights():
        model: Any = WithValueHead(task.model) if plan.has_values else task.model
    if plan.disables_dropout and config.algorithm == "ppo":
        disable_dropout(model)
    for module in model.modules():
        if plan.disables_dropout and isinstance(module, nn.Dropout):  # all that TRL switches off
            module.p = 0.0
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    gradients = count_bytes(model, trained=True)

    model.eval()
    generating = measure_generating_pass(task.model, replace(shape, rows=plan.generated), mixed)
    reading = measure_reading_pass(model, replace(shape, rows=plan.read), mixed)
    draw_flops, read_flops = generating.flops / plan.generated, reading.flops / plan.read
    stages = {"generation": generating.bytes, "forward": reading.bytes if plan.reads else 0}
    flops = {"generation": plan.rows * draw_flops, "forward": plan.rows * plan.reads * read_flops}
    if lengths.held_out:
        stages["held_out"] = max(generating.bytes, reading.bytes)
        flops["held_out"] = len(lengths.held_out) * (draw_flops + 2 * read_flops)
    if config.make_rule().needs_influence:
        target = _target_shape(config, task, shape, lengths.held_out)
        scoring = _measure_scoring(
            model,
            shape,
            plan.rows,
            target,
            scoring_memory(config),
            layers=None if config.layers == "auto" else config.layers,
            keeps_hidden=config.algorithm == "ppo",
        )
        stages["scoring"], flops["scoring"] = scoring.bytes, scoring.flops
    test_shape = BatchShape(plan.generated, max(lengths.tested, default=0), plan.response)
    testing = measure_generating_pass(task.model, test_shape, mixed) if lengths.tested else None
    if plan.recomputes:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    training = measure_training_pass(model.train(), shape, mixed)
    stages["optimisation"] = training.bytes + (gradients if plan.accumulates else 0)
    flops["optimisation"] = plan.rows * plan.epochs * training.flops / plan.trained
    if testing is not None:
        stages["evaluation"] = testing.bytes
    is_copied = plan.has_reference and not hasattr(task.model, "disable_adapter")
    return Estimate(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        prompts=len(lengths.trained),
        prompt_tokens=shape.prompt,
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
    """Make the check that a trainer makes once it has the model."""
    if config.selects:
        check_selectable(settings, has_router_loss=has_router_loss(settings, task.model))


class _Lengths(NamedTuple):
    """Tokens of each prompt: of those that train, those of the target, and those of the test."""

    trained: Sequence[int]
    held_out: Sequence[int]
    tested: Sequence[int]


def _count_tokens(config: LanguageConfig, settings: Any, task: Task) -> _Lengths:
    """Return the lengths of all prompts, and check that they fit and have the columns that the reward asks for."""
    sampling = make_sampling_config(config)
    training = settings if isinstance(settings, PPOConfig) else sampling
    context, limit = context_length(task.model), response_setting(config)

    def count(prompts: Any, how: PPOConfig, *rewards: Reward) -> list[int]:
        if prompts is None:
            return []
        return [len(ids) for ids in read_prompts(prompts, task.tokenizer, how, context, rewards, limit).ids]

    trained, held_out = split_held_out(config, task)
    lengths = _Lengths(
        count(trained, training, task.reward), count(held_out, training, task.reward), count(task.test, sampling)
    )
    if not lengths.trained:
        raise WhenceError(NO_PROMPTS)
    return lengths


def _measure_scoring(
    model: Any,
    shape: BatchShape,
    total: int,
    target: BatchShape | None,
    memory: int | None,
    *,
    layers: Layers | None = None,
    keeps_hidden: bool = False,
) -> Pass:
    """Measure the scoring of `total` responses, in passes of `shape`, or in one pass if `memory` allows it.

    Scores are computed in the model's own precision.

    Args:
        model: the model in eval mode.
        shape: the size of a pass.
        total: responses of a round.
        target: the size of the target's own rows; None: the target is over the scored rows.
        memory: bytes that scoring may hold; None: those of a pass.
        layers: the layers that scores are by; None: all of them.
        keeps_hidden: whether hidden states before the last blocks are at hand; otherwise they take a pass below.
    """
    with train_layers_alone(model, layers):
        block = find_first_block(model, layers)
        scoring = _measure_passes(model, shape, total, target, memory, block)
        if not block:
            return scoring
        below = [measure_reading_pass(model, shape, first_block=first).flops for first in (0, block)]
        hidden_flops = 0.0 if keeps_hidden else (below[0] - below[1]) * total / shape.rows
        return Pass(scoring.bytes + hidden_bytes(model, replace(shape, rows=total)), scoring.flops + hidden_flops)


def _measure_passes(
    model: Any, shape: BatchShape, total: int, target: BatchShape | None, memory: int | None, block: int
) -> Pass:
    """Measure the passes of scoring that begin at a block, and those over the target's own rows, which never do."""
    if block:
        shape = replace(shape, rows=widen_chunk(model, block, shape.rows))
    gradients, part = count_bytes(model, trained=True), measure_training_pass(model, shape, first_block=block)
    whole = part.bytes * total // shape.rows
    at_once = memory is not None and whole + gradients <= memory
    # In parts, the target's gradient is in memory next to a pass, and a target over the scored rows needs another pass.
    passes = 1 if at_once or target is not None else 2
    held_bytes, flops = (whole if at_once else part.bytes) + gradients, passes * total * part.flops / shape.rows
    if target is None:
        return Pass(held_bytes, flops)
    size = min(target.rows, _TARGET_ROWS)
    target_pass = measure_training_pass(model, replace(target, rows=size))
    accumulated = gradients if target.rows > _TARGET_ROWS else 0
    return Pass(max(held_bytes, target_pass.bytes + accumulated), flops + target.rows * target_pass.flops / size)


_TARGET_ROWS = SequenceReturn().batch_size
"""The most of a target's own rows in one pass."""


def _target_shape(config: LanguageConfig, task: Task, shape: BatchShape, held_out: Sequence[int]) -> BatchShape | None:
    """Return the size of the target's own rows; None: the target is over the scored rows."""
    if config.target == "validation":
        demonstrations = make_validation_target(task).rows
        width = demonstrations.observations["response_mask"].shape[1]
        length = demonstrations.observations["input_ids"].shape[1]
        return BatchShape(len(demonstrations), length - width, width)
    return replace(shape, rows=len(held_out), prompt=max(held_out)) if held_out else None


@dataclass(frozen=True)
class _Plan:
    """The passes of a round.

    Attributes:
        rows: responses of a round.
        response: tokens of the longest response.
        generated: responses of a pass that generates.
        read: rows of a pass without gradients.
        reads: number of such passes over each row.
        trained: rows of a pass with gradients.
        epochs: number of such passes over each row.
        has_reference: whether the start model is read.
        has_values: whether there is a value head.
        accumulates: whether a step has several passes, so that gradients are in memory from the first on.
        recomputes: whether activations are computed again in the backward pass.
        disables_dropout: whether dropout is switched off.
    """

    rows: int
    response: int
    generated: int
    read: int
    reads: int
    trained: int
    epochs: int
    has_reference: bool
    has_values: bool
    accumulates: bool
    recomputes: bool
    disables_dropout: bool


def _plan_ppo(settings: PPOConfig) -> _Plan:
    size = min(settings.generation_batch_size, settings.batch_size)
    return _Plan(
        rows=settings.batch_size,
        response=settings.max_new_tokens,
        generated=size,
        read=size,
        reads=2,
        trained=min(settings.mini_batch_size, settings.batch_size),
        epochs=settings.ppo_epochs,
        has_reference=True,
        has_values=True,
        accumulates=settings.gradient_accumulation_steps > 1,
        recomputes=False,
        disables_dropout=settings.disable_dropout,
    )


def _plan_trl(settings: Any, config: LanguageConfig) -> _Plan:
    has_reference = bool(settings.beta)
    return _Plan(
        rows=settings.generation_batch_size,
        response=settings.max_completion_length,
        generated=settings.generation_batch_size,
        read=settings.per_device_train_batch_size,
        # RLOO always reads the policy that drew the responses.
        reads=has_reference + (settings.num_iterations > 1 or config.algorithm == "rloo"),
        trained=settings.per_device_train_batch_size,
        epochs=settings.num_iterations,
        has_reference=has_reference,
        has_values=False,
        accumulates=settings.gradient_accumulation_steps > 1,
        # Older versions of Transformers have one of the two names.
        recomputes=any(getattr(settings, f"{name}_checkpointing", None) for name in ("activation", "gradient")),
        disables_dropout=bool(settings.disable_dropout),
    )
