"""What a post-training run takes, looked at before any weight is loaded."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from whence.experiments.language import LanguageConfig, scoring_memory, validation_of
from whence.experiments.tasks import task_of
from whence.llm.config import PPOConfig
from whence.llm.footprint import Pass, Rows, generating_pass, reading_pass, size_of, training_pass, without_weights
from whence.llm.generation import check_tokenizer
from whence.llm.model import WithValueHead
from whence.llm.prompts import prompts_of
from whence.llm.rewards import asked_for


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
        flops: of each stage in a round in which every response trains, without rewards and demonstrations.
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
    """
    task = task_of(config, weights=False)
    check_tokenizer(task.tokenizer)
    plan = (_of_ppo if config.algorithm == "ppo" else _of_groups)(config.trained_by("runs/estimated"))
    context = getattr(task.model.config, "max_position_embeddings", None)
    prompts = prompts_of(task.prompts, task.tokenizer, PPOConfig("", max_new_tokens=plan.response), context)
    asked_for(task.reward, prompts.columns)
    if config.target == "validation":
        validation_of(task)
    prompt = max(map(len, prompts.ids), default=1)
    with without_weights():
        model: Any = WithValueHead(task.model) if plan.has_values else task.model
    if plan.recomputes:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
        model.train()

    def of(measured: Callable[..., Pass], of_model: Any, rows: int) -> Pass:
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        return measured(of_model, Rows(rows, prompt, plan.response), mixed)

    drawn, read = of(generating_pass, task.model, plan.drawn), of(reading_pass, model, plan.read)
    step = of(training_pass, model, plan.trained)
    shares = {"generation": drawn.flops / plan.drawn, "forward": plan.reads * read.flops / plan.read}
    stages = {"generation": drawn.held, "forward": read.held if plan.reads else 0}
    if config.rule().needs_influence:
        # Of all rows at once, or in parts twice through them, which hold no more than a step on as many.
        whole, memory = step.held * plan.rows // plan.trained, scoring_memory(config) or step.held
        shares["scoring"] = (1 if whole <= memory else 2) * step.flops / plan.trained
        stages["scoring"] = min(whole, memory)
    shares["optimisation"], stages["optimisation"] = plan.epochs * step.flops / plan.trained, step.held
    is_copied = plan.held_back and not hasattr(task.model, "disable_adapter")
    return Estimate(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        prompts=len(prompts),
        prompt_tokens=prompt,
        response_tokens=plan.response,
        stays={
            "weights": size_of(model),
            "start model": size_of(task.model) if is_copied else 0,
            "Adam": 2 * size_of(model, trained=True),
        },
        stages=stages,
        flops={stage: plan.rows * share for stage, share in shares.items()},
    )


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
        recomputes: whether activations are computed again in the backward pass.
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
    recomputes: bool


def _of_ppo(settings: PPOConfig) -> _Plan:
    at_once = min(settings.generation_batch_size, settings.batch_size)
    return _Plan(
        *(settings.batch_size, settings.max_new_tokens, at_once, at_once),
        reads=2,
        trained=min(settings.mini_batch_size, settings.batch_size),
        epochs=settings.ppo_epochs,
        held_back=True,
        has_values=True,
        recomputes=False,
    )


def _of_groups(settings: Any) -> _Plan:
    rows, size = settings.generation_batch_size, settings.per_device_train_batch_size
    held_back = bool(settings.beta)
    return _Plan(
        *(rows, settings.max_completion_length, rows, size),
        reads=held_back + (settings.num_iterations > 1),
        trained=size,
        epochs=settings.num_iterations,
        held_back=held_back,
        has_values=False,
        recomputes=bool(settings.gradient_checkpointing),
    )
