"""Which settings of TRL's trainers a selection of completions can be made with; no trainer is imported."""

from typing import Any

from whence.errors import Unsupported

# How a loss type brings the tokens of a row together, and whether rows are averaged (and so have to be rescaled) or
# divided by the number of tokens that count.
ROW_LOSSES = {"grpo": "mean", "sapo": "mean", "dr_grpo": "sum", "luspo": "sum"}
TOKEN_LOSSES = ("dapo", "cispo", "vespo", "bnpo")


def has_router_loss(args: Any, model: Any) -> bool:
    """Tell whether TRL will add a router's auxiliary loss, where its configuration has a coefficient of it."""
    if not hasattr(args, "router_aux_loss_coef"):
        return False
    text, coefficient = model.config.get_text_config(), args.router_aux_loss_coef
    own = getattr(text, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    return hasattr(text, "output_router_logits") and own != 0.0


def check_selectable(args: Any, *, has_router_loss: bool = False) -> None:
    """Refuse settings with which a step cannot be made that of the kept completions alone.

    Args:
        args: TRL's GRPOConfig or RLOOConfig.
        has_router_loss: whether TRL adds a router's auxiliary loss, which the model has a say in.

    Raises:
        Unsupported: names the setting.
    """
    loss_type = getattr(args, "loss_type", "grpo")
    steps = args.steps_per_generation // args.gradient_accumulation_steps
    found = {
        f"loss_type={loss_type!r}": (
            loss_type not in (*ROW_LOSSES, *TOKEN_LOSSES),
            "it is not known how it brings tokens together",
        ),
        "loss_type='bnpo' with several passes a step": (
            loss_type == "bnpo" and args.gradient_accumulation_steps * args.world_size > 1,
            "each pass, and each process, is divided by its own tokens; use loss_type='dapo', or "
            "gradient_accumulation_steps=1 in one process",
        ),
        "several optimiser steps on a generation batch": (
            steps > 1 or args.steps_per_generation % args.gradient_accumulation_steps != 0,
            "each would be on another share of kept completions; set steps_per_generation to "
            "gradient_accumulation_steps (num_iterations may be more than 1)",
        ),
        "an entropy bonus": (
            getattr(args, "entropy_coef", 0.0) != 0.0 or getattr(args, "use_adaptive_entropy", False),
            "it is a mean over the tokens of each pass; set entropy_coef=0, and use_adaptive_entropy=False",
        ),
        "top_entropy_quantile": (
            getattr(args, "top_entropy_quantile", 1.0) < 1.0,
            "its threshold is taken in each pass; set it to 1",
        ),
        "a router's auxiliary loss": (
            has_router_loss,
            "dropped completions would count in it; set router_aux_loss_coef=0",
        ),
        "off_policy_mask_threshold": (
            getattr(args, "off_policy_mask_threshold", None) is not None,
            "scores know nothing of it; leave it unset",
        ),
        "vLLM's importance sampling ratio": (
            getattr(args, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False),
            "scores know nothing of it; set vllm_importance_sampling_correction=False",
        ),
        "use_liger_kernel": (
            getattr(args, "use_liger_kernel", False),
            "its layers have no rules; leave it off",
        ),
    }
    for what, (is_so, why) in found.items():
        if is_so:
            raise Unsupported(f"Completions cannot be selected with {what}: {why}.")
