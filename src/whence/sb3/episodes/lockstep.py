"""Environments that play stored episodes side by side, inside of the wrappers that a policy was trained behind."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecExtractDictObs,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
)
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from whence.core import ReplayError, read_numbers
from whence.runs import RunDirectory
from whence.sb3.base.environment_steps import load_statistics
from whence.sb3.episodes.episode_replay import MakeEnv, reset_to
from whence.sb3.episodes.resets import RecordResets

_WATCHERS = "VecMonitor", "VecCheckNan", "VecVideoRecorder"


class LockstepEnvs(DummyVecEnv):
    """Environments that all begin in one stored state, each of which stands still once its episode has ended.

    Wrappers around them never see an episode end, so that what they show of its last state is of its own frames.

    Attributes:
        state: the state to be reset to, as `RecordResets` notes it; or {"seed": 0}.
        terminated, truncated: (envs,) whether and how each episode has ended.
    """

    def __init__(self, make_env: MakeEnv, count: int) -> None:
        super().__init__([lambda: RecordResets(make_env())] * count)
        self.state: Mapping[str, Any] = {}
        self.terminated, self.truncated = np.zeros((2, count), np.bool_)

    @property
    def worlds(self) -> list[gym.Env[Any, Any]]:
        """The environments in the wrappers that they were trained in."""
        return [env.env for env in self.envs if isinstance(env, RecordResets)]

    @property
    def alive(self) -> NDArray[np.int64]:
        """The indices of the environments with an unfinished episode."""
        return np.flatnonzero(~(self.terminated | self.truncated))

    def read_masks(self, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return the masks of the actions that some environments allow."""
        return np.stack([self.worlds[index].get_wrapper_attr("action_masks")() for index in indices])

    def reset(self) -> VecEnvObs:
        """Reset all to `state`."""
        self.terminated[:] = self.truncated[:] = False
        for index, env in enumerate(self.envs):
            assert isinstance(env, RecordResets)
            observation, self.reset_infos[index] = reset_to(env, self.state)
            self._save_obs(index, observation)
        return self._obs_from_buf()

    def step_wait(self) -> VecEnvStepReturn:
        """Step the environments with an unfinished episode; the rewards of the others are 0."""
        rewards = np.zeros(self.num_envs)
        for index in self.alive:
            observation, reward, ends, is_cut, _ = self.worlds[index].step(self.actions[index])
            rewards[index], self.terminated[index], self.truncated[index] = float(reward), ends, is_cut
            self._save_obs(index, observation)
        return self._obs_from_buf(), rewards, np.zeros(self.num_envs, np.bool_), [{} for _ in range(self.num_envs)]


def wrap_as_trained(run: RunDirectory, env: VecEnv, number: int) -> VecEnv:
    """Return environments inside of the wrappers that a run had around its vectorised environments.

    VecNormalize has the statistics after the collection of round `number`, or of the last one before it, and leaves
    rewards as they are.

    Raises:
        ReplayError: a wrapper cannot be made again; the message names it.
    """
    for wrapper in reversed(run.config.get("vec_wrappers", ())):
        match wrapper:
            case {"class": "VecFrameStack", "n_stack": frames}:
                env = VecFrameStack(env, frames)
            case {"class": "VecTransposeImage"}:
                env = VecTransposeImage(env)
            case {"class": "VecExtractDictObs", "key": key}:
                env = VecExtractDictObs(env, key)
            case {"class": "VecNormalize"}:
                env = _normalise(run, env, number)
            case {"class": kind} if kind not in _WATCHERS:
                raise ReplayError(
                    f"The policy of {run.path} was trained behind {kind}, which cannot be made again around new "
                    "environments. Put what it does into a gymnasium.Wrapper around each environment."
                )
    return env


def _normalise(run: RunDirectory, env: VecEnv, number: int) -> VecNormalize:
    settings = read_numbers(run.config["VecNormalize"])
    normalised = VecNormalize(env, **{**settings, "training": False, "norm_reward": False})
    stored = [each for each in run.rounds("statistics") if each <= number]
    if not stored:
        raise ReplayError(
            f"{run.path} does not hold VecNormalize's statistics of round {number}: an older version made it. Train a "
            "round again, on with whence.sb3.resume(run, env)."
        )
    load_statistics(normalised, run.policy(stored[-1], name="statistics"))
    return normalised
