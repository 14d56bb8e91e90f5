"""Evaluations of many episodes: gSDE's noise in them, and EnvPool's environments."""

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy

from whence.core import Tree, Unsupported, WhenceError, eval_mode, map_tree, preserve_rng_state, suggest

Renew: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.bool_]], None]


@contextlib.contextmanager
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


class Pool(NamedTuple):
    """EnvPool's environments of one kind.

    Attributes:
        env: Gymnasium's id of the environment, or module:Id.
        kwargs: EnvPool's settings.
        part: the part of a dict observation that is observed; None: all of it.
    """

    env: str
    kwargs: Mapping[str, Any]
    part: str | None = None

    def make(self, n_envs: int, seed: int) -> Any:
        """Return the pool, with one thread; a `WhenceError` if EnvPool lacks the environment or these settings."""
        # Box2D crashes the interpreter if it is imported after EnvPool (seen with EnvPool 1.2.5 and Box2D 2.3.10), not
        # before. Gymnasium imports it when one of its environments is made.
        if "envpool" not in sys.modules:
            with contextlib.suppress(ImportError):
                import Box2D as _  # noqa: F401
        try:
            import envpool
        except ImportError:
            raise Unsupported(
                "EnvPool is not installed: in whence's source tree, pip install '.[fast]'. Or play in Gymnasium's "
                "environments: --collect-with gymnasium --evaluate-with gymnasium."
            ) from None
        name = self.env.rpartition(":")[2].replace("highway-v0", "Highway-v0")  # of module:Id, as EnvPool spells it
        known = envpool.list_all_envs()
        if name not in known:
            raise WhenceError(f"EnvPool has no environment {name!r}.{suggest(name, known)}")
        try:
            pool = envpool.make(name, env_type="gymnasium", num_envs=n_envs, num_threads=1, seed=seed, **self.kwargs)
        except (TypeError, ValueError, AssertionError) as wrong:
            raise WhenceError(f"EnvPool's {name} refuses {dict(self.kwargs)}: {wrong}") from wrong
        with warnings.catch_warnings():
            # EnvPool states bounds in double precision, which users cannot change. The pool caches the space.
            warnings.filterwarnings("ignore", ".*precision lowered by casting")
            assert pool.observation_space is not None
        return pool

    def observe(self, observation: Any) -> Any:
        """Return the observed part of an observation, or of a space."""
        return observation if self.part is None else observation[self.part]


def cast_actions(actions: NDArray[Any], space: spaces.Space[Any]) -> NDArray[Any]:
    """Return actions in the dtype of their space, which pools insist on."""
    return actions.astype(space.dtype) if space.dtype is not None else actions


def evaluate_pool(model: BaseAlgorithm, environment: Pool, *, episodes: int, seed: int) -> NDArray[np.float64]:
    """Return the returns of episodes with sampled actions, (episodes,).

    Every environment of a pool plays one episode and then stands still, so that short episodes are not counted more
    often than long ones. The same policy and seed give the same returns. Global generators and the policy's mode and
    noise are restored afterwards.
    """
    pool = environment.make(episodes, seed)
    returns = np.zeros(episodes)
    box = model.action_space if isinstance(model.action_space, spaces.Box) else None
    policy, noise = cast(ActorCriticPolicy, model.policy), use_fresh_noise(model, episodes)
    with preserve_rng_state(), eval_mode(policy.modules()), torch.no_grad(), noise as renew:
        torch.manual_seed(seed)
        whole_observations, pool_info = pool.reset()
        ids, observations, starts = pool_info["env_id"], environment.observe(whole_observations), True
        while len(ids):
            renew(ids, np.full(len(ids), starts))
            inputs = _to_policy_input(observations, model.observation_space, model.device)
            # Not the policy's forward(), which computes values and log-probs too.
            actions = policy.get_distribution(inputs).get_actions().cpu().numpy()
            if box is not None:
                squashed = policy.squash_output
                actions = policy.unscale_action(actions) if squashed else np.clip(actions, box.low, box.high)
            actions = cast_actions(actions, model.action_space)
            whole_observations, rewards, terminated, truncated, pool_info = pool.step(actions, ids)
            # A pool returns its environments in the order in which they are ready.
            order = np.argsort(pool_info["env_id"])
            ids, continues = pool_info["env_id"][order], ~(terminated | truncated)[order]
            returns[ids] += rewards[order]
            rows = order[continues]
            observations = map_tree(itemgetter(rows), environment.observe(whole_observations))
            ids, starts = ids[continues], False
    pool.close()
    return returns


def _to_policy_input(observation: Tree, space: spaces.Space[Any], device: torch.device) -> Any:
    """Return an observation as the tensors that a policy reads."""
    if isinstance(space, spaces.Dict):
        return {key: _to_policy_input(observation[key], part, device) for key, part in space.items()}
    # As SB3's VecTransposeImage moves channels in training.
    if observation.ndim == 4 and observation.shape[1:] != space.shape:
        observation = observation.transpose(0, 3, 1, 2)
    return torch.as_tensor(np.ascontiguousarray(observation), device=device)
