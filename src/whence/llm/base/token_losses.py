"""The arithmetic of PPO on responses: rewards of tokens, advantages, losses. Tensors in, tensors out.

Shapes: n rows, R response tokens; `mask` (n, R) is True at the tokens of a response, including its end-of-text token.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_mean(values: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]) -> Float[Tensor, " n"]:
    """Return each row's mean over its response tokens; 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def whiten(values: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]) -> Float[Tensor, "n R"]:
    """Return values minus their mean over all response tokens, divided by their standard deviation; 0 elsewhere.

    The variance has Bessel's correction, as in TRL.
    """
    chosen = values[mask]
    if len(chosen) < 2:
        return torch.where(mask, values, 0.0)
    return torch.where(mask, (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), 0.0)


def token_rewards(
    scores: Float[Tensor, " n"], penalty: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]
) -> Float[Tensor, "n R"]:
    """Return each token's reward: minus its penalty, plus the row's score at the last response token.

    A row without a response token gets no reward.
    """
    rewards = torch.where(mask, -penalty, 0.0)
    last = last_token(mask)
    rows = mask.any(dim=1)
    rewards[rows, last[rows]] += scores[rows].to(rewards)
    return rewards


def last_token(mask: Bool[Tensor, "n R"]) -> Tensor:
    """Return the position of each row's last response token, (n,) int64; 0 for a row without any."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, 0).amax(dim=1)


def surrogate(
    log_probs: Float[Tensor, "n R"],
    old_log_probs: Float[Tensor, "n R"],
    advantages: Float[Tensor, "n R"],
    clip_range: float,
    highest: float | None = None,
) -> Float[Tensor, "n R"]:
    """Return PPO's clipped objective of each token, to be raised; `highest` is the clip range above 1, if another."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range if highest is None else highest))
    return torch.minimum(ratio * advantages, clipped * advantages)


def value_loss(
    values: Float[Tensor, "n R"],
    old_values: Float[Tensor, "n R"],
    returns: Float[Tensor, "n R"],
    clip_range: float | None,
) -> Float[Tensor, "n R"]:
    """Return half the squared error of each token's value, or of the clipped value, whichever is more."""
    error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error
