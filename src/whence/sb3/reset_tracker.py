"""What a callback notes of its environments while they collect."""

import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.sb3.episodes import DIGEST, STATE, RecordResets, digest_observation


class ResetTracker:
    """What is needed to play each environment's episodes again, and to check that the same was seen.

    That is the generator's state before each reset, the actions since the last one, and digests of the observations.

    Args:
        vec_env: the environments of a model. Those of a `DummyVecEnv` are wrapped in `RecordResets` until `unwrap`.
            Others have to be wrapped where they are made; otherwise nothing is known of them.

    Attributes:
        has_started: whether `start` or `load_state` was called.
    """

    def __init__(self, vec_env: VecEnv) -> None:
        self.vec_env, self._base = vec_env, vec_env.unwrapped
        self.has_started = False
        self._digests: list[list[int | None]] = []
        self._current: list[int | None] = [None] * vec_env.num_envs
        self._states: list[list[str | None]] = [[] for _ in range(vec_env.num_envs)]
        self._open: list[tuple[str | None, list[NDArray[Any]]]] = [(None, []) for _ in range(vec_env.num_envs)]

    def wrap(self) -> None:
        """Wrap the environments that are not yet, if they can be reached."""
        if isinstance(self._base, DummyVecEnv):
            envs = self._base.envs
            envs[:] = [env if _records_resets(env) else _AddedRecordResets(env) for env in envs]

    def unwrap(self) -> None:
        """Take away the wrappers that `wrap` added."""
        if isinstance(self._base, DummyVecEnv):
            self._base.envs[:] = [env.env if isinstance(env, _AddedRecordResets) else env for env in self._base.envs]

    def start(self, starts: NDArray[np.bool_]) -> None:
        """Read the present observations, and the states before the resets of environments that have just been reset.

        Args:
            starts: (envs,) True where an episode is about to begin.
        """
        self.has_started, self._digests = True, []
        infos = self._base.reset_infos
        self._current = [info.get(DIGEST) if start else None for start, info in zip(starts, infos, strict=True)]
        states = [info.get(STATE) for info in infos]
        if isinstance(self._base, DummyVecEnv):
            # learn() resets before its callbacks can wrap anything. A first reset follows from the generator's seed;
            # whether it was the first is seen when the episode is played again.
            self._current = [self._digest_buffer(env) for env in range(self._base.num_envs)]
            states = [state or _read_seed(env) for state, env in zip(states, self._base.envs, strict=True)]
        self._states = [[state] if start else [] for state, start in zip(states, starts, strict=True)]
        self._open = [(state if start else None, []) for state, start in zip(states, starts, strict=True)]

    def step(self, actions: NDArray[Any], dones: NDArray[np.bool_], infos: list[dict[str, Any]]) -> None:
        """Follow one step: `_on_step` of a callback calls it.

        Args:
            actions: (envs, ...) as the environments took them.
            dones: (envs,) True where the step ended an episode.
            infos: an info for each environment.
        """
        self._digests.append(self._current)
        resets = self._base.reset_infos
        self._current = [(resets[env] if done else infos[env]).get(DIGEST) for env, done in enumerate(dones)]
        for env, done in enumerate(dones):
            if done:
                state = resets[env].get(STATE)
                self._states[env].append(state)
                self._open[env] = state, []
            else:
                self._open[env][1].append(actions[env])

    def take_digests(self) -> list[int | None]:
        """Return the digests of a rollout's observations, in the order of the flattened buffer, and forget them."""
        digests, self._digests = self._digests, []
        return [step[env] for env in range(self._base.num_envs) for step in digests]

    def take_state(self, env: int) -> str | None:
        """Return the generator state before the next reset of an environment that was not taken yet."""
        return self._states[env].pop(0) if self._states[env] else None

    def read_state(self) -> list[dict[str, Any]]:
        """Return what is noted of each environment between two rollouts, for a checkpoint.

        Returns:
            For each environment `pending`, the states before resets that were not taken yet; `digest` of its present
            observation; and of its ongoing episode `generator`, the state before its reset, and its `actions`.
        """
        return [
            {"pending": pending, "digest": digest, "generator": state, "actions": np.array(actions)}
            for pending, digest, (state, actions) in zip(self._states, self._current, self._open, strict=True)
        ]

    def load_state(self, noted: list[Mapping[str, Any]]) -> None:
        """Take over what `read_state` returned."""
        self.has_started, self._digests = True, []
        self._states = [list(each["pending"]) for each in noted]
        self._current = [each["digest"] for each in noted]
        self._open = [(each["generator"], list(each["actions"])) for each in noted]

    def _digest_buffer(self, env: int) -> int:
        assert isinstance(self._base, DummyVecEnv)
        buffers, space = self._base.buf_obs, self._base.envs[env].observation_space
        observation = {name: buffers[name][env] for name in buffers} if None not in buffers else buffers[None][env]  # type: ignore[index]
        return digest_observation(observation, space)


class _AddedRecordResets(RecordResets):
    """The wrapper that whence adds to a user's environments while it trains in them.

    It is outermost, where `VecEnv.set_attr` sets attributes, so all but its own are read and set in the user's
    environment, as if the wrapper were not there.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env, fresh_world=False)
        vars(self)["_names"] = frozenset(vars(self))

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        names = vars(self).get("_names")
        if names is None or name in names:
            super().__setattr__(name, value)
        else:
            setattr(self.env, name, value)


def _records_resets(env: gym.Env[Any, Any]) -> bool:
    """Return whether the outermost wrapper, monitors left aside, is `RecordResets`."""
    while isinstance(env, Monitor):
        env = env.env
    return isinstance(env, RecordResets)


def _read_seed(env: gym.Env[Any, Any]) -> str | None:
    """Return the seed of an environment's generator as a state; None if it has none."""
    seed = env.unwrapped.np_random_seed
    return None if seed is None or seed < 0 else json.dumps({"seed": seed})
