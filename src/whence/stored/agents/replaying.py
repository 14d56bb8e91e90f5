"""Environments of a stored run, made again as they were trained in, alone or side by side, and its episodes, played."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import polars as pl
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecExtractDictObs,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
)
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

from whence.core import ReplayError, RunDirectoryError, read_numbers
from whence.runs import RunDirectory
from whence.sb3 import EpisodeReplay, RecordResets
from whence.sb3.episodes import (
    Frames,
    MakeEnv,
    Part,
    StoredEpisode,
    make_parts,
    play_again,
    read_episode,
    reset_to,
    to_env_actions,
)
from whence.sb3.models import make_space
from whence.sb3.rounds import load_statistics
from whence.stored.agents.environments import make_env, renew_world

AnyEnv: TypeAlias = str | Callable[[], gym.Env[Any, Any]] | None
"""An environment's id, module:Id, module:function, or a function that makes one in all of its wrappers; None: what the
run's configuration names."""


def make_replay_env(run: RunDirectory, env: AnyEnv = None, *, index: int = 0) -> MakeEnv:
    """Return a function that makes an environment as a run was trained in, in all wrappers, to play and to draw.

    That is the environment of `index` among those that were trained in.
    """
    if env is not None and not isinstance(env, str):
        return env
    if run.is_language:
        raise ReplayError(f"{run.path} is a language-model run: it has no episodes of an environment.")
    # The experiment of a command names the module of the environment, too.
    named: Mapping[str, Any] = {"env": env} if env is not None else run.experiment or run.config
    name = named.get("env")
    parts: Sequence[Part] = ()
    if env is None and not run.experiment and ":" not in str(name):
        parts = run.config.get("other_env_wrappers", {}).get(str(index), run.config.get("env_wrappers", []))
    if not parts and name is None:
        raise ReplayError(
            f"{run.path} was trained in environments that cannot be made from what it holds. Write a function without "
            "arguments that makes one in all of its wrappers, and pass --env module:function (env= in a script)."
        )
    if env is None:
        named, parts = run.trusted((named, parts))
    if parts:
        return partial(make_parts, parts, render_mode="rgb_array")
    kwargs, observe = named.get("env_kwargs", {}), named.get("observe")
    return partial(make_env, str(named["env"]), kwargs, observe, checked=False, render_mode="rgb_array")


def show_taken_actions(run: RunDirectory, table: pl.DataFrame) -> pl.DataFrame:
    """Return a round's records with continuous actions as the environment took them: within its bounds."""
    space = run.config.get("action_space") or {}
    if space.get("type") != "Box" or "action" not in table.columns or table.is_empty():
        return table
    actions = np.array(table["action"].to_list(), dtype=np.float32)
    clipped = to_env_actions(actions, make_space(space), squashed=is_squashed(run))
    return table.with_columns(pl.Series("action", clipped.astype(np.float32).reshape(actions.shape)))


def is_squashed(run: RunDirectory) -> bool:
    """Return whether training scaled a run's actions to the bounds of its environment; else it clipped them.

    sb3-contrib's RecurrentPPO clips them while it collects, even those of a policy that squashes.
    """
    has_squashing = bool(run.config.get("policy_kwargs", {}).get("squash_output", False))
    return has_squashing and run.config.get("algorithm") != "RecurrentPPO"


def make_lockstep(run: RunDirectory, env: AnyEnv, count: int, number: int, *, index: int = 0) -> VecEnv:
    """Return `LockstepEnvs` behind the wrappers that a round's policy was behind, or raise a `ReplayError`."""
    return wrap_as_trained(run, LockstepEnvs(make_replay_env(run, env, index=index), count), number)


def make_test_envs(run: RunDirectory, env: AnyEnv, count: int, number: int) -> VecEnv:
    """Return environments to test in, behind the wrappers that a round's policy was behind."""
    make = make_replay_env(run, env)
    return wrap_as_trained(run, DummyVecEnv([lambda: Monitor(renew_world(make()))] * count), number)


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


def make_training_envs(run: RunDirectory, env: AnyEnv, number: int) -> VecEnv:
    """Return environments to continue a training in after a round, behind the wrappers that it had."""
    makes = [make_replay_env(run, env, index=index) for index in range(int(run.config["n_envs"]))]
    copies = DummyVecEnv([partial(lambda make: Monitor(make()), make) for make in makes])
    return wrap_as_trained(run, copies, number, trains=True)


def wrap_as_trained(run: RunDirectory, env: VecEnv, number: int, *, trains: bool = False) -> VecEnv:
    """Return environments inside of the wrappers that a run had around its vectorised environments.

    VecNormalize has the statistics after the collection of round `number`, or of the last one before it. It leaves
    them, and rewards, as they are, unless the run is to be trained on (`trains`).
    """
    wrappers = run.config.get("vec_wrappers", ())
    if sum(each.get("class") == "VecNormalize" for each in wrappers) > 1:
        raise ReplayError(
            f"{run.path} was trained behind several VecNormalize wrappers, and holds the statistics of one. Use one."
        )
    for wrapper in reversed(wrappers):
        match wrapper:
            case {"class": "VecFrameStack", "n_stack": frames}:
                env = VecFrameStack(env, frames)
            case {"class": "VecTransposeImage"}:
                env = VecTransposeImage(env)
            case {"class": "VecExtractDictObs", "key": key}:
                env = VecExtractDictObs(env, key)
            case {"class": "VecNormalize"}:
                env = _normalise(run, env, number, {} if trains else {"training": False, "norm_reward": False})
            case {"class": kind} if kind not in _WATCHERS:
                raise ReplayError(
                    f"The policy of {run.path} was trained behind {kind}, which cannot be made again around new "
                    "environments. Put what it does into a gymnasium.Wrapper around each environment."
                )
    return env


def _normalise(run: RunDirectory, env: VecEnv, number: int, changes: Mapping[str, bool]) -> VecNormalize:
    normalised = VecNormalize(env, **{**read_numbers(run.config["VecNormalize"]), **changes})
    stored = [each for each in run.rounds("statistics") if each <= number]
    if not stored:
        raise ReplayError(
            f"{run.path} does not hold VecNormalize's statistics of round {number}. Train a round again, on with "
            "whence.sb3.resume(run, env)."
        )
    load_statistics(normalised, run.policy(stored[-1], name="statistics"))
    return normalised


def replay_episode(
    run: RunDirectory | str | Path,
    episode: int,
    *,
    env: AnyEnv = None,
    frames: Frames = (),
    last_step: int | None = None,
) -> EpisodeReplay:
    """Play an episode of a run again, check it bit for bit against what was stored, and draw steps of it.

    The episode begins from its environment's stored generator state, and takes the stored actions. Episodes without
    such a state, as EnvPool's, cannot be played again. Global random generators are left as they are.

    Args:
        run: the run, or its directory.
        episode: the episode's id, as in the records.
        env: an id, module:Id, module:function, or a function that makes an environment like those that were trained in,
            in all of its wrappers; None: what the run's configuration names.
        frames: the steps to draw, or "all".
        last_step: the last step to play; None: all that are stored.

    Raises:
        ReplayError: the episode cannot be played again; the message says what is missing.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    return _play(run, read_episode(run, episode), env, frames=frames, last_step=last_step)


def replay_exactly(
    run: RunDirectory,
    stored: StoredEpisode,
    last_step: int,
    *,
    env: AnyEnv = None,
    inspect: Callable[[gym.Env[Any, Any]], Any] | None = None,
) -> EpisodeReplay:
    """Play an episode again up to a step; one that differs from what was stored is refused. See `replay_episode`."""
    replay = _play(run, stored, env, last_step=last_step, inspect=inspect)
    if replay.mismatch is not None:
        raise ReplayError(replay.mismatch)
    return replay


def _play(run: RunDirectory, stored: StoredEpisode, env: AnyEnv, **options: Any) -> EpisodeReplay:
    make = make_replay_env(run, env, index=stored.env_index)
    return play_again(make, stored, squashed=is_squashed(run), **options)


def observe_again(run: RunDirectory, table: pl.DataFrame, env: AnyEnv, space: spaces.Space[Any]) -> pl.DataFrame:
    """Return a round's table with observations too large to store, played again; raises as `replay_episode` does."""
    if run.config.get("VecNormalize", {}).get("norm_obs"):
        raise RunDirectoryError(
            f"The policy of {run.path} read observations that VecNormalize normalised by statistics that changed with "
            "each step, and that were too large to store."
        )
    count = next((each["n_stack"] for each in run.config.get("vec_wrappers", ()) if "n_stack" in each), 1)
    observed: dict[int, Any] = {}
    for (episode,), rows in table.group_by("episode_id", maintain_order=True):
        stored = read_episode(run, int(episode))
        replay = replay_exactly(run, stored, int(rows["step"].to_numpy().max()), env=env)
        observed |= dict(zip(replay.record_ids.tolist(), _stack_frames(replay.observations, count), strict=False))
    images = np.stack([observed[record] for record in table["record_id"].to_list()])
    if is_image_space(space) and images.shape[1:] != space.shape:
        images = images.transpose(0, 3, 1, 2)  # as SB3 turns them
    return table.with_columns(pl.Series("observation", images.reshape(len(images), -1)))


def _stack_frames(frames: list[Any], count: int) -> list[NDArray[Any]]:
    """Return an episode's observations, each with those before it, as SB3's VecFrameStack shows them."""
    images = [np.asarray(frame) for frame in frames]
    if count == 1:
        return images
    is_image = images[0].dtype == np.uint8
    space = spaces.Box(0 if is_image else -np.inf, 255 if is_image else np.inf, images[0].shape, images[0].dtype.type)
    stacked = StackedObservations[Any](1, count, space)
    first = stacked.reset(images[0][None])[0].copy()
    ends = np.zeros(1, dtype=bool)
    return [first, *(stacked.update(image[None], ends, [{}])[0][0].copy() for image in images[1:])]
