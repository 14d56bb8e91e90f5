"""The episode that a record belongs to, and what is needed to play it again."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.records import UNKNOWN

STATE = "whence_generator_state"
"""The key of a reset's info under which `RecordResets` puts the generator's state."""

DIGEST = "whence_observation_digest"
"""The key of an info under which `RecordResets` puts the digest of the observation that came with it."""


@dataclass(frozen=True)
class Ongoing:
    """The ongoing episode of each environment, between two rollouts.

    Attributes:
        ids: (envs,) the number of each environment's episode, -1 where unknown.
        lengths: (envs,) the number of records it has so far, -1 where unknown.
        next_id: the number of the next episode to begin.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    next_id: int = 0

    @classmethod
    def unknown(cls, envs: int) -> "Ongoing":
        """Return ongoing episodes of which nothing is known."""
        return cls(np.full(envs, UNKNOWN), np.full(envs, UNKNOWN))


def number_episodes(
    starts: NDArray[np.bool_], before: Ongoing | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], Ongoing]:
    """Number the episodes of a rollout, environment by environment, and each record's step in its episode.

    Args:
        starts: (steps, envs) True where a record is the first of its episode.
        before: the episodes that were ongoing when the rollout began; None: unknown.

    Returns:
        Episode ids (steps, envs); each record's step in its episode (steps, envs), -1 if the episode's beginning was
        not seen; and the episodes that are ongoing at the end.
    """
    length, envs = starts.shape
    before = before or Ongoing.unknown(envs)
    ids, steps = np.empty(starts.shape, np.int64), np.empty(starts.shape, np.int64)
    rows, next_id = np.arange(length), before.next_id
    for env in range(envs):
        begun_so_far = starts[:, env].cumsum()
        current = int(before.ids[env])
        if begun_so_far[0] == 0 and current == UNKNOWN:
            current, next_id = next_id, next_id + 1
        ids[:, env] = np.where(begun_so_far == 0, current, next_id + begun_so_far - 1)
        next_id += int(begun_so_far[-1])
        first_row = np.maximum.accumulate(np.where(starts[:, env], rows, -1))
        continued = rows + before.lengths[env] if before.lengths[env] != UNKNOWN else UNKNOWN
        steps[:, env] = np.where(first_row >= 0, rows - first_row, continued)
    lengths = np.where(steps[-1] == UNKNOWN, UNKNOWN, steps[-1] + 1)
    return ids, steps, Ongoing(ids[-1], lengths, next_id)


class RecordResets(gym.Wrapper[Any, Any, Any, Any]):
    """Put into infos what is needed to play an episode again, and to check that the same was seen.

    A reset's info holds the state of the environment's generator before the reset, as JSON, and every info a digest of
    its observation. With the episode's actions that is enough to play it again, if the dynamics depend on nothing else.
    The environment's randomness is unchanged.

    Args:
        env: the environment.
        fresh_world: give a BipedalWalker a new Box2D world before each reset. It reuses its world, whose contacts then
            depend on the episodes before. Other environments are left as they are.
    """

    def __init__(self, env: gym.Env[Any, Any], *, fresh_world: bool = True) -> None:
        super().__init__(env)
        self._reuses_world = fresh_world and any(
            base.__module__ == "gymnasium.envs.box2d.bipedal_walker" for base in type(env.unwrapped).__mro__
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset; the info holds the generator's state before, or the seed if there is one."""
        if self._reuses_world:
            _renew_world(self.env.unwrapped)
        before = {"seed": seed} if seed is not None else self.env.unwrapped.np_random.bit_generator.state
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, STATE: json.dumps(before), DIGEST: self._digest(observation)}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the info holds the observation's digest."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, DIGEST: self._digest(observation)}

    def _digest(self, observation: Any) -> int:
        return digest_observation(observation, self.env.observation_space)


def _renew_world(env: Any) -> None:
    """Give a Box2D environment a new world, as its constructor does."""
    import Box2D

    env._destroy()  # the bodies of the old world, which must not be destroyed in the new one
    env.world = Box2D.b2World()


def digest_observation(observation: Any, space: gym.Space[Any]) -> int:
    """Return 64 bits of a hash of an observation's bytes; equal observations have equal digests.

    Args:
        observation: as the environment returned it.
        space: the environment's observation space, whose dtypes the numbers are cast to.
    """
    state = hashlib.blake2b(digest_size=8)
    _update_digest(state, observation, space)
    return int.from_bytes(state.digest(), "little")


def _update_digest(state: Any, observation: Any, space: gym.Space[Any]) -> None:
    if isinstance(space, gym.spaces.Dict):
        for name in sorted(space.spaces):
            state.update(repr(name).encode())
            _update_digest(state, observation[name], space[name])
        return
    array = np.ascontiguousarray(np.asarray(observation, dtype=space.dtype))
    state.update(repr(array.shape).encode())
    state.update(array.tobytes())


class ResetTracker:
    """What `InfluenceCallback` stores of each environment: generator states before resets, digests of observations.

    Args:
        vec_env: the environments of a model. Those of a `DummyVecEnv` are wrapped in `RecordResets` until `unwrap`.
            Others have to be wrapped where they are made; otherwise nothing is known of them.
    """

    def __init__(self, vec_env: VecEnv) -> None:
        self._base = vec_env.unwrapped
        self._digests: list[list[int | None]] = []
        self._current: list[int | None] = [None] * vec_env.num_envs
        self._states: list[list[str | None]] = [[] for _ in range(vec_env.num_envs)]

    def wrap(self) -> None:
        """Wrap the environments that are not yet, if they can be reached."""
        if isinstance(self._base, DummyVecEnv):
            envs = self._base.envs
            envs[:] = [env if _records_resets(env) else _AddedRecordResets(env, fresh_world=False) for env in envs]

    def unwrap(self) -> None:
        """Take away the wrappers that `wrap` added."""
        if isinstance(self._base, DummyVecEnv):
            self._base.envs[:] = [env.env if isinstance(env, _AddedRecordResets) else env for env in self._base.envs]

    def start(self, starts: NDArray[np.bool_]) -> None:
        """Read the present observations, and the states before the resets of environments that have just been reset.

        Args:
            starts: (envs,) True where an episode is about to begin.
        """
        self._digests = []
        infos = self._base.reset_infos
        self._current = [info.get(DIGEST) if start else None for start, info in zip(starts, infos, strict=True)]
        states = [info.get(STATE) for info in infos]
        if isinstance(self._base, DummyVecEnv):
            # learn() resets before its callbacks can wrap anything. A first reset follows from the generator's seed;
            # whether it was the first is seen when the episode is played again.
            self._current = [self._digest_buffer(env) for env in range(self._base.num_envs)]
            states = [state or _read_seed(env) for state, env in zip(states, self._base.envs, strict=True)]
        self._states = [[state] if start else [] for state, start in zip(states, starts, strict=True)]

    def step(self, dones: NDArray[np.bool_], infos: list[dict[str, Any]]) -> None:
        """Follow one step: `_on_step` of a callback calls it."""
        self._digests.append(self._current)
        resets = self._base.reset_infos
        self._current = [(resets[env] if done else infos[env]).get(DIGEST) for env, done in enumerate(dones)]
        for env in np.flatnonzero(dones):
            self._states[env].append(resets[env].get(STATE))

    def take_digests(self) -> list[int | None]:
        """Return the digests of a rollout's observations, in the order of the flattened buffer, and forget them."""
        digests, self._digests = self._digests, []
        return [step[env] for env in range(self._base.num_envs) for step in digests]

    def take_state(self, env: int) -> str | None:
        """Return the generator state before the next reset of an environment that was not taken yet."""
        return self._states[env].pop(0) if self._states[env] else None

    def _digest_buffer(self, env: int) -> int:
        assert isinstance(self._base, DummyVecEnv)
        buffers, space = self._base.buf_obs, self._base.envs[env].observation_space
        observation = {name: buffers[name][env] for name in buffers} if None not in buffers else buffers[None][env]  # type: ignore[index]
        return digest_observation(observation, space)


class _AddedRecordResets(RecordResets):
    """The wrapper that whence adds to a user's environments while it trains in them."""


def _records_resets(env: gym.Env[Any, Any]) -> bool:
    """Return whether the outermost wrapper, monitors left aside, is `RecordResets`."""
    while isinstance(env, Monitor):
        env = env.env
    return isinstance(env, RecordResets)


def _read_seed(env: gym.Env[Any, Any]) -> str | None:
    """Return the seed of an environment's generator as a state; None if it has none."""
    seed = env.unwrapped.np_random_seed
    return None if seed is None or seed < 0 else json.dumps({"seed": seed})
