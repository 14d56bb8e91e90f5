"""Settings of TRL's trainers: the objective that they mean, and whether completions can be selected."""

from typing import Any

from whence.errors import Unsupported
from whence.llm.scores import GroupObjective

# Loss types that average rows (and have to be rescaled), with how each reduces the tokens of a row; and loss types
# that divide by the number of tokens.
ROW_LOSSES = {"grpo": "mean", "sapo": "mean", "dr_grpo": "sum", "luspo": "sum"}
TOKEN_LOSSES = ("dapo", "cispo", "vespo", "bnpo")


def check_selectable(args: Any, *, has_router_loss: bool = False) -> None:
    """Refuse settings under which dropped completions would still affect a step.

    Args:
        args: TRL's GRPOConfig or RLOOConfig.
        has_router_loss: whether TRL adds a router's auxiliary loss.

    Raises:
        Unsupported: the message names the setting.
    """
    loss_type = getattr(args, "loss_type", "grpo")
    steps = args.steps_per_generation // args.gradient_accumulation_steps
    unaccounted = "scores do not account for it; "
    refusals = [
        (
            loss_type not in (*ROW_LOSSES, *TOKEN_LOSSES),
            f"loss_type={loss_type!r}: whence does not know how it reduces tokens",
        ),
        (
            loss_type == "bnpo" and args.gradient_accumulation_steps * args.world_size > 1,
            "loss_type='bnpo' with several passes a step: each pass, and each process, is divided by its own tokens; "
            "use loss_type='dapo', or gradient_accumulation_steps=1 in one process",
        ),
        (
            steps > 1 or args.steps_per_generation % args.gradient_accumulation_steps != 0,
            "several optimiser steps on a generation batch: each would have another share of kept completions; set "
            "steps_per_generation to gradient_accumulation_steps (num_iterations may be more than 1)",
        ),
        (
            getattr(args, "entropy_coef", 0.0) != 0.0 or getattr(args, "use_adaptive_entropy", False),
            "an entropy bonus: it is a mean over the tokens of each pass; set entropy_coef=0, and "
            "use_adaptive_entropy=False",
        ),
        (
            getattr(args, "top_entropy_quantile", 1.0) < 1.0,
            "top_entropy_quantile: its threshold is computed in each pass; set it to 1",
        ),
        (
            has_router_loss,
            "a router's auxiliary loss: dropped completions would affect it; set router_aux_loss_coef=0",
        ),
        (
            getattr(args, "off_policy_mask_threshold", None) is not None,
            f"off_policy_mask_threshold: {unaccounted}leave it unset",
        ),
        (
            getattr(args, "delta", None) is not None and args.delta < 1,
            f"delta below 1, which clips already at the first step: {unaccounted}set it above 1 + epsilon",
        ),
        (
            getattr(args, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False),
            f"vLLM's importance sampling ratio: {unaccounted}set vllm_importance_sampling_correction=False",
        ),
        (getattr(args, "use_liger_kernel", False), "use_liger_kernel: its layers have no rules; leave it off"),
    ]
    if reason := next((reason for is_set, reason in refusals if is_set), None):
        raise Unsupported(f"Completions cannot be selected with {reason}.")


def make_group_objective(args: Any) -> GroupObjective:
    """Return the objective of a completion's training by TRL, at the policy that drew it.

    Args:
        args: TRL's GRPOConfig, or its RLOOConfig, whose divergence is part of the rewards.
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
