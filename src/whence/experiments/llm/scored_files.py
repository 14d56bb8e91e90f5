"""Rollout files of any trainer, scored by the command, and their rounds built again."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from whence.core import Target, Unit
from whence.experiments.llm.loading import hide_progress_bars, load_data, load_model
from whence.llm.files import score_rollouts
from whence.llm.scores import RESPONSE_TARGETS, ValidationLoss
from whence.runs import RunDirectory

TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "sequence": "above 0, training on a row raises the mean advantage-weighted log-probability of the others",
        "token": "above 0, training on a row raises the same token by token",
        "reward": "above 0, training on a row raises the mean reward-weighted log-probability of the others",
        "validation": "above 0, training on a row makes the demonstrations likelier",
    }
)


@hide_progress_bars()
def score_files(
    rollouts: Path,
    model: str,
    run: Path,
    *,
    target: str = "sequence",
    demonstrations: str | None = None,
    reference: str | None = None,
    beta: float = 0.0,
    max_tokens: int | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    leave_one_out: Unit | None = "row",
    temperature: float = 1.0,
    batch_size: int = 16,
    dtype: str = "float32",
    overwrite: bool = False,
    on_round: Callable[[int, int], None] | None = None,
) -> RunDirectory:
    """Load a checkpoint, and score rollouts at it; see `score_rollouts` and `whence llm score --help`."""
    policy, tokenizer = load_checkpoint(model, dtype)
    return score_rollouts(
        rollouts,
        policy,
        tokenizer,
        run,
        target=make_scored_target(target, demonstrations, tokenizer, batch_size),
        reference=None if reference is None else load_checkpoint(reference, dtype)[0],
        beta=beta,
        leave_one_out=leave_one_out,
        columns=columns,
        max_tokens=max_tokens,
        temperature=temperature,
        batch_size=batch_size,
        about={
            "model": model,
            "target_kind": target,
            "demonstrations": demonstrations,
            "reference": reference,
            "beta": beta,
            "dtype": dtype,
            "batch_size": batch_size,
        },
        overwrite=overwrite,
        on_round=on_round,
    )


def make_scored_target(kind: str, demonstrations: str | None, tokenizer: Any, batch_size: int) -> Target:
    """Return the target of one of `TARGETS`."""
    if kind == "validation":
        return ValidationLoss.of(load_data(str(demonstrations)), tokenizer, batch_size=batch_size)
    return RESPONSE_TARGETS[kind](batch_size=batch_size)


def load_checkpoint(name: str, dtype: str) -> tuple[Any, Any]:
    """Return the causal language model of a folder or an id, or a PEFT adapter with its base, and the tokenizer."""
    if (Path(name) / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        model, tokenizer = load_model(name, dtype, AutoPeftModelForCausalLM, is_trainable=True)
    else:
        model, tokenizer = load_model(name, dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
