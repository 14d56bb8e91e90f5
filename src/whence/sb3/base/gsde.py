"""gSDE's exploration noise in evaluations: independent from environment to environment and episode to episode."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Renew: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.bool_]], None]


@contextmanager
def use_fresh_noise(model: Any, n_envs: int) -> Iterator[Renew]:
    """Give each of `n_envs` environments gSDE noise of its own; the policy's noise is restored on exit.

    Yields a function to call before each step, with the indices (envs,) of the environments that the policy is about to
    observe, and whether an episode begins in each (envs,). As in collection, noise stays for `sde_sample_freq` steps.
    If that is -1, it stays until the episode ends. Noise is drawn from torch's global generator. Without gSDE, the
    function does nothing.
    """
    if not model.use_sde:
        yield lambda envs, starts: None
        return
    policy, distribution = model.policy, model.policy.action_dist
    every = model.sde_sample_freq if model.sde_sample_freq > 0 else np.iinfo(np.int64).max
    ages = np.zeros(n_envs, np.int64)
    matrices = distribution.exploration_mat.detach().repeat(n_envs, 1, 1)

    def renew(envs: NDArray[np.int64], starts: NDArray[np.bool_]) -> None:
        ages[envs] = np.where(starts, 0, ages[envs] + 1)
        due = envs[ages[envs] % every == 0]
        if len(due):
            with torch.no_grad():
                policy.reset_noise(len(due))
            matrices[due] = policy.action_dist.exploration_matrices
        policy.action_dist.exploration_matrices = matrices[envs]
        policy.action_dist.exploration_mat = matrices[envs[0]]  # read if there is one environment

    policy.action_dist = copy.copy(distribution)  # for the evaluation to change
    try:
        yield renew
    finally:
        policy.action_dist = distribution
