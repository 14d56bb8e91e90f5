"""EnvPool's environments: as SB3's vector environments to collect from, and for evaluations of many episodes."""

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

from whence.errors import Unsupported, WhenceError, suggest
from whence.guards import eval_mode, preserve_rng_state
from whence.records import Tree, map_tree, named_leaves
from whence.sb3.gsde import use_fresh_noise

# EnvPool spells some ids in its own way.
_NAMES = {"highway-v0": "Highway-v0"}


def make_pool(env: str, kwargs: Mapping[str, Any], n_envs: int, seed: int) -> Any:
    """Return a pool of EnvPool's, with one thread.

    Args:
        env: Gymnasium's id of the environment, or module:Id.
        kwargs: EnvPool's settings of it.
        n_envs: environments in the pool.
        seed: of the pool; its environments' seeds follow from it.

    Raises:
        Unsupported: EnvPool is not installed.
        WhenceError: EnvPool does not have the environment, or not these settings.
    """
    # Imported after EnvPool, Box2D crashes the interpreter (seen with EnvPool 1.2.5 and Box2D 2.3.10); before, it does
    # not. Gymnasium imports it when one of its environments is made.
    if "envpool" not in sys.modules:
        with contextlib.suppress(ImportError):
            import Box2D as _  # noqa: F401
    try:
        import envpool
    except ImportError:
        raise Unsupported("EnvPool is not installed: in whence's source tree, pip install '.[fast]'.") from None
    name = env.rpartition(":")[2]  # of module:Id
    name = _NAMES.get(name, name)
    known = envpool.list_all_envs()
    if name not in known:
        raise WhenceError(f"EnvPool has no environment {name!r}.{suggest(name, known)}")
    try:
        pool = envpool.make(name, env_type="gymnasium", num_envs=n_envs, num_threads=1, seed=seed, **kwargs)
    except (TypeError, ValueError, AssertionError) as wrong:
        raise WhenceError(f"EnvPool's {name} refuses {dict(kwargs)}: {wrong}") from wrong
    with warnings.catch_warnings():
        # EnvPool states bounds in double precision; nothing a user could mend. The space is kept from here on.
        warnings.filterwarnings("ignore", ".*precision lowered by casting")
        assert pool.observation_space is not None
    return pool


def picked(observation: Any, key: str | None) -> Any:
    """Return the part `key` of a dict observation; the observation where no key is given."""
    return observation if key is None else observation[key]


def _rows(observation: Tree, index: NDArray[Any] | int) -> Tree:
    return map_tree(lambda part: part[index], observation)


class EnvPoolVecEnv(VecEnv):
    """A pool as an SB3 `VecEnv`: episodes that end are begun anew in the same step, as SB3's own do.

    EnvPool returns a last observation as an ordinary one, and the next episode's first one step late; here the last
    one goes into `info["terminal_observation"]`, and the pool is told to reset at once, so that no step is lost.

    Args:
        env: see `make_pool`.
        kwargs: see `make_pool`.
        n_envs: see `make_pool`.
        seed: see `make_pool`.
        key: the part of a dict observation that is observed.
    """

    def __init__(self, env: str, kwargs: Mapping[str, Any], n_envs: int, seed: int, key: str | None = None) -> None:
        self._make = env, kwargs, n_envs
        self._key = key
        self._pool = make_pool(env, kwargs, n_envs, seed)
        self._actions: NDArray[Any] = np.zeros(0)
        self._returns, self._lengths = np.zeros(n_envs), np.zeros(n_envs, dtype=np.int64)
        self.spec = EnvSpec(env.rpartition(":")[2], kwargs=dict(kwargs))
        space = self._pool.observation_space
        super().__init__(n_envs, space if key is None else space[key], self._pool.action_space)

    def reset(self) -> VecEnvObs:
        """Begin all episodes anew."""
        observation, _ = self._pool.reset()
        self._returns[:], self._lengths[:] = 0, 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._reset_seeds()
        return map_tree(np.array, picked(observation, self._key))  # type: ignore[arg-type,no-any-return]

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take note of the actions."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments."""
        found, rewards, terminated, truncated, _ = self._pool.step(_as_pool_takes(self._actions, self.action_space))
        observations = map_tree(np.array, picked(found, self._key))  # type: ignore[arg-type]
        ended = terminated | truncated
        self._returns += rewards
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        over = np.flatnonzero(ended)
        if len(over):
            last = _rows(observations, over)  # a copy, before the next episodes' first ones take the place
            first, about = self._pool.reset(over)
            for (_, part), (_, fresh) in zip(
                named_leaves(observations), named_leaves(picked(first, self._key)), strict=True
            ):
                part[about["env_id"]] = fresh
            for row, env in enumerate(over):
                infos[env] = {
                    "terminal_observation": _rows(last, row),
                    "TimeLimit.truncated": bool(truncated[env] and not terminated[env]),
                    "episode": {"r": float(self._returns[env]), "l": int(self._lengths[env]), "t": 0.0},
                }
            self._returns[over], self._lengths[over] = 0, 0
        return observations, rewards.astype(np.float32), ended, infos

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Make the pool anew with a seed: EnvPool seeds a pool when it is made, and at no other time."""
        if seed is not None:
            self.close()
            env, kwargs, n_envs = self._make
            self._pool = make_pool(env, kwargs, n_envs, seed)
        return [seed] * self.num_envs

    def close(self) -> None:
        """Give the pool's memory back."""
        self._pool.close()

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Pools take no wrappers."""
        return [False] * len(list(self._get_indices(indices)))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of this object for each environment; pools have none of their own."""
        if attr_name not in ("spec", "render_mode"):
            raise AttributeError(f"EnvPool's environments have no attribute {attr_name!r}.")
        value = self.spec if attr_name == "spec" else None
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refuse: pools have no attributes."""
        raise AttributeError(f"EnvPool's environments have no attribute {attr_name!r}.")

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Refuse: pools have no methods."""
        raise AttributeError(f"EnvPool's environments have no method {method_name!r}.")


def _as_pool_takes(actions: NDArray[Any], space: spaces.Space[Any]) -> NDArray[Any]:
    return actions.astype(space.dtype) if space.dtype is not None else actions


def evaluate_pool(
    model: BaseAlgorithm, env: str, kwargs: Mapping[str, Any], *, episodes: int, seed: int, key: str | None = None
) -> NDArray[np.float64]:
    """Return the returns of so many episodes of sampled actions, (episodes,).

    Every environment of a pool plays one episode and then stands still, so that short episodes are not counted more
    often than long ones. The same policy and seed give the same returns; global generators and the policy's mode and
    noise are as before afterwards.

    Args:
        model: an SB3 model whose policy is an actor and a critic.
        env: see `make_pool`.
        kwargs: see `make_pool`.
        episodes: environments in the pool.
        seed: of the pool and of the actions.
        key: the part of a dict observation that is observed.
    """
    pool = make_pool(env, kwargs, episodes, seed)
    returns = np.zeros(episodes)
    box = model.action_space if isinstance(model.action_space, spaces.Box) else None
    policy, noise = cast(ActorCriticPolicy, model.policy), use_fresh_noise(model, episodes)
    with preserve_rng_state(), eval_mode(policy.modules()), torch.no_grad(), noise as renew:
        torch.manual_seed(seed)
        found, about = pool.reset()
        ids, observations, begins = about["env_id"], picked(found, key), True
        while len(ids):
            renew(ids, np.full(len(ids), begins))
            inputs = _as_policy_reads(observations, model.observation_space, model.device)
            # Not the policy's forward(), which asks for values and log-probs too.
            actions = policy.get_distribution(inputs).get_actions().cpu().numpy()
            if box is not None:
                squashed = policy.squash_output
                actions = policy.unscale_action(actions) if squashed else np.clip(actions, box.low, box.high)
            found, rewards, terminated, truncated, about = pool.step(_as_pool_takes(actions, model.action_space), ids)
            # A pool answers in the order in which its environments are ready.
            order = np.argsort(about["env_id"])
            ids, goes_on = about["env_id"][order], ~(terminated | truncated)[order]
            returns[ids] += rewards[order]
            ids, observations, begins = ids[goes_on], _rows(picked(found, key), order[goes_on]), False
    pool.close()
    return returns


def _as_policy_reads(observation: Tree, space: spaces.Space[Any], device: torch.device) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _as_policy_reads(observation[key], part, device) for key, part in space.items()}
    # What SB3's VecTransposeImage does to channels in training.
    if observation.ndim == 4 and observation.shape[1:] != space.shape:
        observation = observation.transpose(0, 3, 1, 2)
    return torch.as_tensor(np.ascontiguousarray(observation), device=device)
