"""Advantages by generalised advantage estimation."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def gae(
    rewards: Float[Tensor, "n R"],
    values: Float[Tensor, "n R"],
    mask: Bool[Tensor, "n R"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "n R"]:
    """Return generalised advantage estimates of response tokens; the last token ends the episode.

    Response tokens of a row are consecutive, from the first position on.

    Args:
        rewards: rewards of the tokens; see `token_rewards`.
        values: values of the states before the tokens.
        mask: mask of the response tokens.
        gamma: discount factor.
        lam: lambda of the estimator.
    """
    values = torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    advantage, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, 0.0)
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages
