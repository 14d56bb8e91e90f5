"""Settings of TRL's trainers: the objective that they mean, and whether completions can be selected."""

from collections.abc import Mapping
from typing import Any

from whence.core import Unsupported, require_names
from whence.llm.scores import GroupObjective

# Loss types that average rows (and have to be rescaled), with how each reduces the tokens of a row; and loss types
# that divide by the number of tokens.
ROW_LOSSES = {"grpo": "mean", "sapo": "mean", "dr_grpo": "sum", "luspo": "sum"}
TOKEN_LOSSES = ("dapo", "cispo", "vespo", "bnpo")

TRAINER_METHODS = (
    *("_generate_and_score_completions", "_calculate_rewards", "_compute_loss", "_get_per_token_logps_and_entropies"),
    *("_get_train_sampler", "training_step"),
)
"""The methods of TRL's trainers that whence extends; under other names in TRL, whence's would never be called."""

TRAINER_ATTRIBUTES = ("_buffered_inputs", "_step", "_logs", "_metrics", "_tokenizer", "_load_from_checkpoint")
"""What else whence needs of a trainer of TRL's beyond its documentation."""

# Under these settings dropped completions affect a step, or scores do not account for what a step does: an entropy
# bonus and a threshold are over the tokens of each pass, and Liger's layers have no rules.
_OFF = {
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_liger_kernel": False,
}


def check_release(trainer: object, base: object) -> None:
    """Refuse a release of TRL whose trainer, or whose class `base` as `super()` has it, lacks what whence needs."""
    require_names("trl", base, TRAINER_METHODS)
    require_names("trl", trainer, TRAINER_ATTRIBUTES)


def check_selectable(args: Any, *, has_router_loss: bool = False) -> None:
    """Refuse settings of TRL under which dropped completions would still affect a step; the error names the setting."""
    loss_type = getattr(args, "loss_type", "grpo")
    passes, delta = args.gradient_accumulation_steps, getattr(args, "delta", None)
    refusals = {
        f"loss_type={loss_type!r}: how it reduces tokens is unknown": loss_type not in (*ROW_LOSSES, *TOKEN_LOSSES),
        "loss_type='bnpo' with several passes a step: each pass, and each process, is divided by its own tokens. Use "
        "loss_type='dapo', or gradient_accumulation_steps=1 in one process": (
            loss_type == "bnpo" and passes * args.world_size > 1
        ),
        "several optimiser steps on a generation batch, each with another share of kept completions. Set "
        "steps_per_generation to gradient_accumulation_steps (num_iterations may be more than 1)": (
            args.steps_per_generation != passes
        ),
        "a router's auxiliary loss. Set router_aux_loss_coef=0": has_router_loss,
        "delta below 1, which clips already at the first step. Set it above 1 + epsilon": delta is not None
        and delta < 1,
        "vLLM's importance sampling ratio. Set vllm_importance_sampling_correction=False": (
            getattr(args, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False)
        ),
        **{
            f"{name}={getattr(args, name)!r}. Set it to {off!r}": getattr(args, name) != off
            for name, off in _OFF.items()
            if hasattr(args, name)
        },
    }
    if reason := next((reason for reason, is_set in refusals.items() if is_set), None):
        raise Unsupported(f"Completions cannot be selected with {reason}.")


def make_group_objective(args: Any) -> GroupObjective:
    """Return the objective of a completion's training by TRL, at the policy that drew it.

    RLOO's divergence is part of its rewards.
    """
    if not hasattr(args, "loss_type"):
        return GroupObjective("sum", 0.0)
    highest = args.epsilon if args.epsilon_high is None else args.epsilon_high
    return GroupObjective(
        reduction=ROW_LOSSES.get(args.loss_type, "sum"),
        beta=float(args.beta),
        corrected=bool(getattr(args, "use_bias_correction_kl", False)),
        level=args.importance_sampling_level,
        ratio_cap=min(1.0, float(highest)) if args.loss_type == "cispo" else 1.0,
    )


def averages_rows(trainer: Any) -> bool:
    """Tell whether a trainer's loss is a mean over rows, including the dropped ones, and not over tokens."""
    return getattr(trainer, "loss_type", None) not in TOKEN_LOSSES


def measure_denominator(trainer: Any, inputs: Mapping[str, Any]) -> float:
    """Return what divides the sum of the rows' objectives in TRL's loss of a pass on a minibatch."""
    passes, loss_type = trainer.current_gradient_accumulation_steps, getattr(trainer, "loss_type", None)
    if averages_rows(trainer):
        length = trainer.max_completion_length if loss_type == "dr_grpo" else 1
        return float(passes * len(inputs["completion_ids"]) * length)
    if loss_type == "bnpo":
        return float((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum().clamp(min=1) * passes)
    tokens = float(inputs["num_items_in_batch"].clamp(min=1)) / trainer.accelerator.num_processes
    return float(tokens * passes / trainer.args.steps_per_generation)
