"""An episode played again from its generator's state and its actions, and checked against what was stored."""

import copy
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import polars as pl
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from whence.core import ReplayError, WhenceError, preserve_rng_state
from whence.runs import RunDirectory
from whence.sb3.episodes.resets import DIGEST, RecordResets

MakeEnv: TypeAlias = Callable[[], gym.Env[Any, Any]]
"""Makes one environment like those that were trained in, with render_mode "rgb_array" if frames are wanted."""

E = TypeVar("E", bound="gym.Env[Any, Any] | VecEnv")

Frames: TypeAlias = Collection[int] | Literal["all"]


@dataclass(frozen=True)
class StoredEpisode:
    """What a run stores of an episode, from its first record on.

    Attributes:
        episode_id: its number in the run.
        records: the rows of its m records, in time order.
        generator_state: the state before its reset, as `RecordResets` noted it; None if it did not.
        env_index: the index of its environment among those that were trained in.
    """

    episode_id: int
    records: pl.DataFrame
    generator_state: Mapping[str, Any] | None
    env_index: int = 0


@dataclass(frozen=True)
class EpisodeReplay:
    """An episode that was played again.

    Attributes:
        episode_id: its number in the run.
        record_ids: (m,) the ids of its records, from the first step on.
        observations: the m observations before each action, as the environment returned them.
        actions: (m, ...) as the environment took them.
        rewards: (m,) as the environment gave them; NaN where it was not stepped.
        frames: (height, width, 3) uint8 by step, for the steps asked for.
        mismatch: None if every observation and every reward equals the stored one bit for bit; otherwise a sentence
            that says at which step they part and what to do. There are no frames from that step on.
        frames_note: why frames that were asked for are missing; None if none is.
        inspected: what `inspect` returned before each action, as far as the replay is the stored episode.
    """

    episode_id: int
    record_ids: NDArray[np.int64]
    observations: list[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float64]
    frames: dict[int, NDArray[np.uint8]]
    mismatch: str | None
    frames_note: str | None = None
    inspected: tuple[Any, ...] = ()


def read_episode(run: RunDirectory, episode: int, *, near: int | None = None) -> StoredEpisode:
    """Read an episode of a run from all rounds that hold a part of it.

    Its beginning is looked for from `near` on backwards, a round that holds a part of it. If that is not known, it is
    looked for by halves, since ids grow from round to round; then in all rounds.

    Raises:
        ReplayError: no round holds its beginning.
    """
    numbers = run.rounds()
    likely = _halve_rounds(run, episode, numbers) if near is None else []
    for number in [*likely, *numbers] if near is None else [each for each in reversed(numbers) if each <= near]:
        began = run.round("episodes", number).filter(pl.col("episode_id") == episode)
        if not began.is_empty():
            break
    else:
        raise ReplayError(
            f"Episode {episode} of {run.path} has no stored beginning: it began before the run's first round, or the "
            "run has no such episode. Take a later one."
        )
    parts: list[pl.DataFrame] = []
    for later in (each for each in numbers if each >= number):
        rows = run.round("records", later).filter(pl.col("episode_id") == episode)
        if rows.is_empty():
            break
        parts.append(rows)
        if "end" in rows.columns and (rows["end"].fill_null("") != "").any():
            break
    records = pl.concat(parts, how="diagonal_relaxed").sort("step")
    state = began["generator_state"][0]
    return StoredEpisode(episode, records, None if state is None else json.loads(state), int(began["env_index"][0]))


def _halve_rounds(run: RunDirectory, episode: int, numbers: Sequence[int]) -> list[int]:
    """Return the round, if any, in which an episode began if the ids of episodes grow from round to round."""
    low, high = 0, len(numbers)
    while low < high:
        at = middle = (low + high) // 2
        while (ids := run.round("episodes", numbers[at])["episode_id"]).is_empty() and at > low:
            at -= 1
        if episode in ids:
            return [numbers[at]]
        low, high = (low, at) if not ids.is_empty() and ids[0] > episode else (middle + 1, high)
    return []


def play_again(
    make_env: MakeEnv,
    stored: StoredEpisode,
    *,
    frames: Frames = (),
    last_step: int | None = None,
    squashed: bool = False,
    inspect: Callable[[gym.Env[Any, Any]], Any] | None = None,
) -> EpisodeReplay:
    """Play a stored episode again from its generator's state, and check what is observed.

    Global random generators are left as they are. `frames` are the steps to draw, and `last_step` is the last one to
    play. Actions that the policy has `squashed` are scaled to the bounds. `inspect` is called with the environment
    before each action.

    Raises:
        ReplayError: the run noted no generator state, or the environment fails.
    """
    if stored.generator_state is None:
        raise ReplayError(
            f"No generator state was noted before episode {stored.episode_id} was reset, so it cannot be played again. "
            "EnvPool tells none: collect with Gymnasium (--collect-with gymnasium). In a script, wrap each "
            "environment in whence.sb3.RecordResets where it is made; a DummyVecEnv needs nothing."
        )
    records = stored.records if last_step is None else stored.records.head(last_step + 1)
    wanted = set(range(len(records))) if frames == "all" else set(frames)
    with open_env(lambda: RecordResets(make_env())) as env:
        actions = to_env_actions(records["action"].to_numpy(), env.action_space, squashed=squashed)
        note = explain_no_frames(env) if wanted else None
        observation, info = reset_to(env, stored.generator_state)
        observations: list[Any] = []
        inspected: list[Any] = []
        rewards = np.full(len(records), np.nan)
        pictures: dict[int, NDArray[np.uint8]] = {}
        mismatch = None
        for step, row in enumerate(records.iter_rows(named=True)):
            if mismatch is None:
                mismatch = _find_mismatch(step, row, info)
            observations.append(copy.deepcopy(observation))  # the environment may use its array again
            if step in wanted and mismatch is None and note is None:
                pictures[step] = render(env)
            if inspect is not None and mismatch is None:
                inspected.append(inspect(env))
            observation, reward, terminated, truncated, info = env.step(actions[step])
            rewards[step] = float(reward)
            mismatch = mismatch or _compare_rewards(step, row, rewards[step])
            if (terminated or truncated) and step + 1 < len(records):
                mismatch = mismatch or _explain(step + 1, "the replayed episode has ended, and the stored one goes on")
                break
    record_ids, parts = records["record_id"].to_numpy(), (observations, actions, rewards, pictures)
    return EpisodeReplay(stored.episode_id, record_ids, *parts, mismatch, note, tuple(inspected))


@contextmanager
def open_env(make_env: Callable[[], E]) -> Iterator[E]:
    """Yield an environment, or several as one, and close it; global generators are as before on exit.

    What fails in it, or in what is done with it, is raised as a `ReplayError`.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames are arrays, and no window is to open
    with preserve_rng_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of environments' own code, and of methods that are called unchecked
        what, env = "cannot be made", None
        try:
            env = make_env()
            what = "fails when it is played again"
            yield env
        except WhenceError:  # of what is done with it, which may be ended on purpose
            raise
        except Exception as failure:
            raise ReplayError(f"The environment {what}: {type(failure).__name__}: {failure}") from failure
        finally:
            if env is not None:
                env.close()


def reset_to(env: RecordResets, state: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Reset an environment as it was from a stored state."""
    env.restore(state)
    return env.reset(seed=state.get("seed"))


def to_env_actions(actions: NDArray[Any], space: gym.Space[Any], *, squashed: bool) -> NDArray[Any]:
    """Return a policy's actions (m, ...) as the environment takes them: clipped to a box's bounds, or scaled to them.

    A policy that squashes its actions has them scaled.
    """
    if not isinstance(space, gym.spaces.Box):
        return actions.reshape(len(actions), *(space.shape or ())).astype(space.dtype)
    actions = actions.reshape(len(actions), *space.shape)
    clipped: NDArray[Any] = np.clip(actions, space.low, space.high)
    if squashed:
        clipped = space.low + 0.5 * (actions + 1.0) * (space.high - space.low)
    return clipped


def explain_no_frames(env: gym.Env[Any, Any]) -> str | None:
    """Return why an environment draws no frames; None if it does."""
    if env.render_mode == "rgb_array":
        return None
    return f"The environment has render_mode {env.render_mode!r}; make it with render_mode='rgb_array' to see frames."


def render(env: gym.Env[Any, Any]) -> NDArray[np.uint8]:
    """Return a frame, (height, width, 3)."""
    return np.asarray(env.render())[..., :3].astype(np.uint8)


def _find_mismatch(step: int, row: Mapping[str, Any], info: Mapping[str, Any]) -> str | None:
    """Return what differs between an observation and the stored one; None if they are equal bit for bit."""
    if row.get("observation_digest") is None:
        return "The run stores no digest of this observation, so a replay could not be checked and is not shown."
    return None if row["observation_digest"] == info[DIGEST] else _explain(step, "the observation differs")


def _compare_rewards(step: int, row: Mapping[str, Any], reward: float) -> str | None:
    """Return what differs between a reward and the stored one; None if they are equal in single precision."""
    stored = row.get("reward")
    if stored is None or np.float32(reward) == np.float32(stored):
        return None
    return (
        f"At step {step} the reward is {reward:.6g}, and {stored:.6g} was stored, though the episode went the same way "
        "until then. A wrapper that changes rewards is missing, or works otherwise than in training. Pass --env "
        "module:function (env= in a script), a function that makes the environment in all of its wrappers."
    )


def _explain(step: int, what: str) -> str:
    return (
        f"At step {step} {what}, so nothing is shown from there on. The environment was built in another way, or it "
        "has randomness that its own generator does not hold, such as a wrapper with a generator of its own, or it "
        "reads an array that it has returned, and that others may change, or a wrapper around the vector steps it "
        "several times for one action."
    )
