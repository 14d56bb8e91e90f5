"""The environments of a run, and the policy that suits what they show."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from whence.core import WhenceError, map_tree, named_leaves
from whence.lab.agents.run_config import RunConfig
from whence.sb3 import RecordResets
from whence.sb3.episodes import Pool, cast_actions, digest_environment
from whence.sb3.models import MiniGridCNN
from whence.stored.agents import make_env, renew_world

_READABLE = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
"""The spaces that SB3's policies observe; also as the parts of a Dict."""


def list_libraries(config: RunConfig) -> list[str]:
    """Return the libraries whose environments a run uses: the one it collects with, then another it evaluates with."""
    return list(dict.fromkeys([config.collect_with, *([config.evaluate_with] if config.eval_episodes else [])]))


def check_environment(config: RunConfig) -> gym.Space[Any]:
    """Make the environments of a run once and return the observation space.

    Raises:
        WhenceError: an id is not known (the nearest are listed), an environment cannot be made, or its observations
            lack the part to observe or are none that SB3 reads.
        Unsupported: EnvPool is not installed.
    """
    # EnvPool first: what it lacks needs no environment of Gymnasium's.
    spaces = {library: _read_space(config, library) for library in sorted(list_libraries(config))}
    return spaces[config.collect_with]


def _read_space(config: RunConfig, library: str) -> gym.Space[Any]:
    """Return the space of the observed part in one library's environment."""
    env = _pool_of(config).make(1, 0) if library == "envpool" else make_env(config.env, config.env_kwargs)
    space: gym.Space[Any] = env.observation_space
    env.close()
    parts = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {}
    if config.observe is not None:
        if config.observe not in parts:
            known = ", ".join(parts) or f"a {type(space).__name__}"
            raise WhenceError(f"{config.env} has no part {config.observe!r} to observe; its observations are {known}.")
        return parts[config.observe]
    readable = [name for name, part in parts.items() if isinstance(part, _READABLE)]
    if not isinstance(space, _READABLE) and (not parts or len(readable) < len(parts)):
        remedy = "Register the environment with a wrapper that converts it."
        if readable:
            images = [name for name in readable if len(parts[name].shape or ()) == 3]
            remedy = f"Observe one part: --observe {(images or readable)[0]} (of {', '.join(readable)})."
        raise WhenceError(f"{config.env} observes a {space}, which Stable-Baselines3 does not read. {remedy}")
    return space


def _pool_of(config: RunConfig) -> Pool:
    return Pool(config.env, config.pool_kwargs, config.observe)


def make_training_env(config: RunConfig) -> VecEnv:
    """Return the environments to collect from; Gymnasium's note what is needed to play their episodes again."""
    if config.collect_with == "envpool":
        return EnvPoolVecEnv(_pool_of(config), config.n_envs, config.seed)
    make = partial(make_env, config.env, config.env_kwargs, config.observe)
    return DummyVecEnv([lambda: Monitor(RecordResets(make()))] * config.n_envs)


def make_evaluation_env(config: RunConfig, episodes: int) -> VecEnv | Pool:
    """Return the environments to evaluate on, for `measure_return`."""
    if config.evaluate_with == "envpool":
        return _pool_of(config)
    make = partial(make_env, config.env, config.env_kwargs, config.observe, checked=False)
    return DummyVecEnv([lambda: Monitor(renew_world(make()))] * min(64, episodes))


def digest_sources(config: RunConfig) -> dict[str, str]:
    """Return a digest of a run's environment by "environment", if the code is the user's; see `digest_environment`."""
    if list_libraries(config) == ["envpool"]:
        return {}
    digest = digest_environment(partial(make_env, config.env, config.env_kwargs, config.observe, checked=False))
    return {} if digest is None else {"environment": digest}


_SMALLEST = {"NatureCNN": 36, "MiniGridCNN": 5}
"""The least height and width, in pixels, that the convolutions leave anything of."""


def default_policy(space: gym.Space[Any]) -> str:
    """Return SB3's name of the policy for an observation space."""
    if isinstance(space, gym.spaces.Dict):
        return "MultiInputPolicy"
    if isinstance(space, gym.spaces.Box) and is_image_space(space):
        return "CnnPolicy" if _read_image_size(space) >= _SMALLEST["MiniGridCNN"] else "MlpPolicy"
    return "MlpPolicy"


def default_policy_kwargs(policy: str, policy_kwargs: Mapping[str, Any], space: gym.Space[Any]) -> dict[str, Any]:
    """Return a policy's arguments, with LDA's MiniGrid network if the images are too small for SB3's NatureCNN.

    A features extractor that `policy_kwargs` names stays.
    """
    if policy == "CnnPolicy" and isinstance(space, gym.spaces.Box) and is_image_space(space):
        size = _read_image_size(space)
        if _SMALLEST["MiniGridCNN"] <= size < _SMALLEST["NatureCNN"]:
            return {"features_extractor_class": MiniGridCNN.__name__, **policy_kwargs}
    return dict(policy_kwargs)


def _read_image_size(space: gym.spaces.Box) -> int:
    """Return the smaller of an image's height and width."""
    height_and_width = space.shape[1:] if is_image_space_channels_first(space) else space.shape[:2]
    return min(height_and_width)


class EnvPoolVecEnv(VecEnv):
    """A pool as an SB3 `VecEnv`: when an episode ends, the next one begins in the same step, as in SB3.

    EnvPool returns the first observation of an episode one step late, which would lose a step. Here the pool is reset
    at once, and `info["terminal_observation"]` holds the last observation.
    """

    def __init__(self, environment: Pool, n_envs: int, seed: int) -> None:
        self._environment, self._pool = environment, environment.make(n_envs, seed)
        self._actions: NDArray[Any] = np.zeros(0)
        self._returns, self._lengths = np.zeros(n_envs), np.zeros(n_envs, dtype=np.int64)
        self.spec = EnvSpec(environment.env.rpartition(":")[2], kwargs=dict(environment.kwargs))
        super().__init__(n_envs, environment.observe(self._pool.observation_space), self._pool.action_space)

    def reset(self) -> VecEnvObs:
        """Begin a new episode in every environment."""
        observation, _ = self._pool.reset()
        self._returns[:], self._lengths[:] = 0, 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._reset_seeds()
        return map_tree(np.array, self._environment.observe(observation))  # type: ignore[arg-type,no-any-return]

    def step_async(self, actions: NDArray[Any]) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments."""
        actions = cast_actions(self._actions, self.action_space)
        whole_observations, rewards, terminated, truncated, _ = self._pool.step(actions)
        observations = map_tree(np.array, self._environment.observe(whole_observations))  # type: ignore[arg-type]
        ended = terminated | truncated
        self._returns += rewards
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended_envs = np.flatnonzero(ended)
        if len(ended_envs):
            # A copy, before the next episodes' first observations replace them.
            last = map_tree(itemgetter(ended_envs), observations)
            first, pool_info = self._pool.reset(ended_envs)
            first_parts = named_leaves(self._environment.observe(first))
            for (_, part), (_, first_part) in zip(named_leaves(observations), first_parts, strict=True):
                part[pool_info["env_id"]] = first_part
            for row, env in enumerate(ended_envs):
                infos[env] = {
                    "terminal_observation": map_tree(itemgetter(row), last),
                    "TimeLimit.truncated": bool(truncated[env] and not terminated[env]),
                    "episode": {"r": float(self._returns[env]), "l": int(self._lengths[env]), "t": 0.0},
                }
            self._returns[ended_envs], self._lengths[ended_envs] = 0, 0
        return observations, rewards.astype(np.float32), ended, infos

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Make a new pool with a seed, since EnvPool seeds a pool only when it is made."""
        if seed is not None:
            self.close()
            self._pool = self._environment.make(self.num_envs, seed)
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
