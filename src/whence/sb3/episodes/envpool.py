"""EnvPool's environments: as SB3 vector environments to collect from, and for evaluations of many episodes."""

import contextlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from whence.core import Tree, Unsupported, WhenceError, eval_mode, map_tree, named_leaves, preserve_rng_state, suggest
from whence.sb3.base.gsde import use_fresh_noise


def make_pool(env: str, kwargs: Mapping[str, Any], n_envs: int, seed: int) -> Any:
    """Return an EnvPool pool with one thread, for Gymnasium's id of an environment, or module:Id, and for its settings.

    Raises:
        WhenceError: EnvPool is not installed, or does not have the environment or these settings.
    """
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
    name = env.rpartition(":")[2].replace("highway-v0", "Highway-v0")  # of module:Id, as EnvPool spells it
    known = envpool.list_all_envs()
    if name not in known:
        raise WhenceError(f"EnvPool has no environment {name!r}.{suggest(name, known)}")
    try:
        pool = envpool.make(name, env_type="gymnasium", num_envs=n_envs, num_threads=1, seed=seed, **kwargs)
    except (TypeError, ValueError, AssertionError) as wrong:
        raise WhenceError(f"EnvPool's {name} refuses {dict(kwargs)}: {wrong}") from wrong
    with warnings.catch_warnings():
        # EnvPool states bounds in double precision, which users cannot change. The pool caches the space.
        warnings.filterwarnings("ignore", ".*precision lowered by casting")
        assert pool.observation_space is not None
    return pool


def _select_part(observation: Any, key: str | None) -> Any:
    return observation if key is None else observation[key]


def _take_rows(observation: Tree, index: NDArray[Any] | int) -> Tree:
    return map_tree(lambda part: part[index], observation)


class EnvPoolVecEnv(VecEnv):
    """A pool as an SB3 `VecEnv`: when an episode ends, the next one begins in the same step, as in SB3.

    EnvPool returns the first observation of an episode one step late, which would lose a step. Here the pool is reset
    at once, and `info["terminal_observation"]` holds the last observation. `key` is the part of a dict observation that
    is observed; the other arguments are those of `make_pool`.
    """

    def __init__(self, env: str, kwargs: Mapping[str, Any], n_envs: int, seed: int, key: str | None = None) -> None:
        self._env, self._kwargs, self._key = env, dict(kwargs), key
        self._pool = make_pool(env, kwargs, n_envs, seed)
        self._actions: NDArray[Any] = np.zeros(0)
        self._returns, self._lengths = np.zeros(n_envs), np.zeros(n_envs, dtype=np.int64)
        self.spec = EnvSpec(env.rpartition(":")[2], kwargs=dict(kwargs))
        space = self._pool.observation_space
        super().__init__(n_envs, space if key is None else space[key], self._pool.action_space)

    def reset(self) -> VecEnvObs:
        """Begin a new episode in every environment."""
        observation, _ = self._pool.reset()
        self._returns[:], self._lengths[:] = 0, 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._reset_seeds()
        return map_tree(np.array, _select_part(observation, self._key))  # type: ignore[arg-type,no-any-return]

    def step_async(self, actions: NDArray[Any]) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments."""
        actions = _cast_actions(self._actions, self.action_space)
        whole_observations, rewards, terminated, truncated, _ = self._pool.step(actions)
        observations = map_tree(np.array, _select_part(whole_observations, self._key))  # type: ignore[arg-type]
        ended = terminated | truncated
        self._returns += rewards
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended_envs = np.flatnonzero(ended)
        if len(ended_envs):
            last = _take_rows(observations, ended_envs)  # a copy, before the next episodes' first ones replace them
            first, pool_info = self._pool.reset(ended_envs)
            first_parts = named_leaves(_select_part(first, self._key))
            for (_, part), (_, first_part) in zip(named_leaves(observations), first_parts, strict=True):
                part[pool_info["env_id"]] = first_part
            for row, env in enumerate(ended_envs):
                infos[env] = {
                    "terminal_observation": _take_rows(last, row),
                    "TimeLimit.truncated": bool(truncated[env] and not terminated[env]),
                    "episode": {"r": float(self._returns[env]), "l": int(self._lengths[env]), "t": 0.0},
                }
            self._returns[ended_envs], self._lengths[ended_envs] = 0, 0
        return observations, rewards.astype(np.float32), ended, infos

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Make a new pool with a seed, since EnvPool seeds a pool only when it is made."""
        if seed is not None:
            self.close()
            self._pool = make_pool(self._env, self._kwargs, self.num_envs, seed)
        return [seed] * self.num_envs

    def close(self) -> None:
        """Free the pool's memory."""
        self._pool.close()

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return False: pools take no wrappers."""
        return [False] * len(list(self._get_indices(indices)))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return `spec` or `render_mode` for each environment; pools have no other attributes."""
        if attr_name not in ("spec", "render_mode"):
            raise AttributeError(f"EnvPool's environments have no attribute {attr_name!r}.")
        return [self.spec if attr_name == "spec" else None for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refuse: pools have no attributes."""
        raise AttributeError(f"EnvPool's environments have no attribute {attr_name!r}.")

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Refuse: pools have no methods."""
        raise AttributeError(f"EnvPool's environments have no method {method_name!r}.")


def _cast_actions(actions: NDArray[Any], space: spaces.Space[Any]) -> NDArray[Any]:
    return actions.astype(space.dtype) if space.dtype is not None else actions


def evaluate_pool(
    model: BaseAlgorithm, env: str, kwargs: Mapping[str, Any], *, episodes: int, seed: int, key: str | None = None
) -> NDArray[np.float64]:
    """Return the returns of episodes with sampled actions, (episodes,); see `make_pool`.

    Every environment of a pool plays one episode and then stands still, so that short episodes are not counted more
    often than long ones. The same policy and seed give the same returns. Global generators and the policy's mode and
    noise are restored afterwards. `key` is the part of a dict observation that is observed; None: all of it.
    """
    pool = make_pool(env, kwargs, episodes, seed)
    returns = np.zeros(episodes)
    box = model.action_space if isinstance(model.action_space, spaces.Box) else None
    policy, noise = cast(ActorCriticPolicy, model.policy), use_fresh_noise(model, episodes)
    with preserve_rng_state(), eval_mode(policy.modules()), torch.no_grad(), noise as renew:
        torch.manual_seed(seed)
        whole_observations, pool_info = pool.reset()
        ids, observations, starts = pool_info["env_id"], _select_part(whole_observations, key), True
        while len(ids):
            renew(ids, np.full(len(ids), starts))
            inputs = _to_policy_input(observations, model.observation_space, model.device)
            # Not the policy's forward(), which computes values and log-probs too.
            actions = policy.get_distribution(inputs).get_actions().cpu().numpy()
            if box is not None:
                squashed = policy.squash_output
                actions = policy.unscale_action(actions) if squashed else np.clip(actions, box.low, box.high)
            actions = _cast_actions(actions, model.action_space)
            whole_observations, rewards, terminated, truncated, pool_info = pool.step(actions, ids)
            # A pool returns its environments in the order in which they are ready.
            order = np.argsort(pool_info["env_id"])
            ids, continues = pool_info["env_id"][order], ~(terminated | truncated)[order]
            returns[ids] += rewards[order]
            observations = _take_rows(_select_part(whole_observations, key), order[continues])
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
