"""How far a policy is from the one that collected its rollout."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from whence.guards import eval_mode, preserve_rng_state

CHUNK = 4096
"""Records that the policy reads at a time."""


def measure_divergence(model: Any) -> float:
    """Return the KL divergence of a model's policy from the one that collected its rollout, in nats.

    It is the mean of `ratio - 1 - log ratio` over the rollout buffer, as SB3 estimates it. Nothing of the model
    changes.

    Args:
        model: a model whose buffer `train()` has flattened.
    """
    buffer: RolloutBuffer = model.rollout_buffer
    size = len(buffer.log_probs)
    chunks = (np.arange(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))
    total = sum(measure_sample_divergence(model, buffer._get_samples(indices)) * len(indices) for indices in chunks)
    return total / size


def measure_sample_divergence(model: Any, samples: Any) -> float:
    """Return the same divergence over samples of the rollout buffer.

    Args:
        model: the model.
        samples: what the buffer's `get` yields.
    """
    actions = samples.actions
    if isinstance(model.action_space, spaces.Discrete):
        actions = actions.long().flatten()
    masks = {"action_masks": samples.action_masks} if hasattr(samples, "action_masks") else {}
    with preserve_rng_state(), eval_mode(model.policy.modules()), torch.no_grad():
        _, log_probs, _ = model.policy.evaluate_actions(samples.observations, actions, **masks)
    log_ratio = (log_probs - samples.old_log_prob.flatten()).double()
    return float((log_ratio.exp() - 1 - log_ratio).mean())
