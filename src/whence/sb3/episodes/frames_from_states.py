"""Frames of environments whose state follows from what is observed, for episodes that cannot be played again."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import ReplayError
from whence.sb3.episodes.episode_replay import (
    EpisodeReplay,
    Frames,
    MakeEnv,
    StoredEpisode,
    explain_no_frames,
    open_env,
    read_actions,
    render,
)

TOLERANCE = 1e-4
"""How far an observation may be from the stored one, in each number: its angles went through a sine and back."""


def _set_state(env: Any, observation: NDArray[Any]) -> None:
    env.state = np.asarray(observation, dtype=np.float64)


def _set_acrobot(env: Any, observation: NDArray[Any]) -> None:
    cos1, sin1, cos2, sin2, speed1, speed2 = (float(number) for number in observation)
    env.state = np.array([math.atan2(sin1, cos1), math.atan2(sin2, cos2), speed1, speed2])


def _set_pendulum(env: Any, observation: NDArray[Any]) -> None:
    cosine, sine, speed = (float(number) for number in observation)
    env.state, env.last_u = np.array([math.atan2(sine, cosine), speed]), None


def _set_cell(env: Any, observation: NDArray[Any]) -> None:
    env.s, env.lastaction = int(np.asarray(observation).reshape(-1)[0]), None


_SETTERS: Mapping[str, tuple[Callable[[Any, NDArray[Any]], None], Callable[[Any], Any]]] = MappingProxyType(
    {
        "CartPoleEnv": (_set_state, lambda env: env.state),
        "AcrobotEnv": (_set_acrobot, lambda env: env._get_ob()),
        "MountainCarEnv": (_set_state, lambda env: env.state),
        "Continuous_MountainCarEnv": (_set_state, lambda env: env.state),
        "PendulumEnv": (_set_pendulum, lambda env: env._get_obs()),
        "FrozenLakeEnv": (_set_cell, lambda env: [env.s]),
        "CliffWalkingEnv": (_set_cell, lambda env: [env.s]),
        "TaxiEnv": (_set_cell, lambda env: [env.s]),
    }
)
"""For classes of Gymnasium's environments: what sets the state that an observation shows, and reads it back."""


def draw_episode(
    make_env: MakeEnv, stored: StoredEpisode, *, frames: Frames = (), last_step: int | None = None
) -> EpisodeReplay:
    """Draw an episode of environments that note no generator states, such as EnvPool's, from its observations.

    Nothing is played, so nothing is compared bit for bit: each state is set to what was observed, and its own
    observation has to be the stored one within `TOLERANCE`.

    Raises:
        ReplayError: the environment's state does not follow from its observation, or observations are not stored.
    """
    records = stored.records if last_step is None else stored.records.head(last_step + 1)
    wanted = set(range(len(records))) if frames == "all" else set(frames)
    if "observation" not in records.columns:
        raise ReplayError("The observations of this run were too large to store, so nothing can be drawn from them.")
    with open_env(make_env) as env:
        name = next((base.__name__ for base in type(env.unwrapped).__mro__ if base.__name__ in _SETTERS), None)
        if name is None:
            raise ReplayError(
                f"This run notes no generator states, as none of EnvPool's does, and the state of "
                f"{type(env.unwrapped).__name__} does not follow from what is observed. Collect with Gymnasium to see "
                "frames: --set collect_with=gymnasium."
            )
        set_state, observe = _SETTERS[name]
        note = explain_no_frames(env) if wanted else None
        env.reset(seed=0)
        observations = [np.asarray(value) for value in records["observation"].to_list()]
        pictures: dict[int, NDArray[np.uint8]] = {}
        mismatch = None
        for step in sorted(wanted & set(range(len(records)))):
            set_state(env.unwrapped, observations[step])
            shown = np.asarray(observe(env.unwrapped), dtype=np.float64).reshape(-1)
            if not np.allclose(shown, observations[step].reshape(-1), atol=TOLERANCE, rtol=0):
                mismatch = f"At step {step} the drawn state is not the one that was observed: nothing is shown."
                break
            if note is None:
                pictures[step] = render(env)
        actions = read_actions(records, env.action_space, squashed=False)
    unknown = np.full(len(records), np.nan)
    ids = records["record_id"].to_numpy()
    drawn = "drawn from the observation"
    return EpisodeReplay(
        stored.episode_id, ids, observations, actions, unknown, pictures, mismatch, drawn, False, False, note
    )
