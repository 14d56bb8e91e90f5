"""The episode that a record belongs to, and what is needed to play it again."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from whence.errors import ReplayError
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


def begin_episodes(model: Any) -> None:
    """Reset a model's environments, as `learn()` does."""
    model._last_obs = model.env.reset()
    model._last_episode_starts = np.ones(model.env.num_envs, dtype=bool)
    if model._vec_normalize_env is not None:
        model._last_original_obs = model._vec_normalize_env.get_original_obs()


def mean_episode_return(model: Any) -> float | None:
    """Return SB3's running mean over the last hundred episodes, unshaped; None without a Monitor."""
    returns = [float(episode["r"]) for episode in model.ep_info_buffer or ()]
    return float(np.mean(returns)) if returns else None


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
        self.renews_world = fresh_world and reuses_world(env.unwrapped)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset; the info holds the generator's state before, or the seed if there is one."""
        if self.renews_world:
            _renew_world(self.env.unwrapped)
        before = {"seed": seed} if seed is not None else read_generator(self.env.unwrapped.np_random)
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, STATE: json.dumps(before, default=to_plain), DIGEST: self._digest(observation)}

    def set_generator(self, state: Mapping[str, Any]) -> None:
        """Put the environment's generator into a state that a reset's info held; not for one that is a seed.

        Raises:
            ReplayError: NumPy does not have this kind of generator.
        """
        set_generator(self.env, state)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the info holds the observation's digest."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, DIGEST: self._digest(observation)}

    def _digest(self, observation: Any) -> int:
        return digest_observation(observation, self.env.observation_space)


def to_plain(value: Any) -> Any:
    """Return an array or a number of NumPy as Python's, for JSON."""
    return value.tolist()


def read_generator(generator: Any) -> dict[str, Any]:
    """Return the state of an environment's generator: a `numpy.random.Generator`, or an older `RandomState`."""
    if isinstance(generator, np.random.RandomState):
        return {**generator.get_state(legacy=False), "legacy": True}
    return dict(generator.bit_generator.state)


def set_generator(env: gym.Env[Any, Any], state: Mapping[str, Any]) -> None:
    """Put an environment's generator into a state that a reset's info held; not for one that is a seed.

    Raises:
        ReplayError: NumPy does not have this kind of generator.
    """
    kind = getattr(np.random, str(state.get("bit_generator")), None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise ReplayError(f"The stored generator is a {state.get('bit_generator')!r}, which NumPy does not have.")
    bits = kind()
    if state.get("legacy"):
        generator: Any = np.random.RandomState(bits)
        generator.set_state(dict(state))
    else:
        bits.state = dict(state)
        generator = np.random.Generator(bits)
    env.unwrapped.np_random = generator


def reuses_world(env: Any) -> bool:
    """Return whether an environment, without wrappers, is a BipedalWalker, which keeps its Box2D world."""
    return any(base.__module__ == "gymnasium.envs.box2d.bipedal_walker" for base in type(env).__mro__)


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
