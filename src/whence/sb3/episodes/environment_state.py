"""The environments of a training: read for a checkpoint, and brought back to the same step of the same episodes."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.sb3.episodes.digests import digest_observation
from whence.sb3.episodes.held_values import is_constant, number_names
from whence.sb3.episodes.resets import RecordResets, ResetTracker, reuses_world
from whence.sb3.episodes.wrappers import iterate_vec_wrappers, iterate_wrappers, load_attributes, read_attributes


def explain_inexact(env: VecEnv) -> str | None:
    """Return why environments, inside of `ResetTracker.wrapped`, cannot be brought back to where they were, or None."""
    base = env.unwrapped
    noted = [False]
    with suppress(Exception):  # an environment vector of another library
        noted = base.env_is_wrapped(RecordResets)
    if not all(noted):
        return (
            f"a {type(base).__name__} does not say how its episodes began. Wrap each environment in "
            "whence.sb3.RecordResets where it is made, if it is made by Gymnasium"
        )
    if not isinstance(base, DummyVecEnv):  # in other processes, which can say of which classes their wrappers are
        kinds = NormalizeObservation, NormalizeReward
        return next((_explain_statistics(kind) for kind in kinds if any(base.env_is_wrapped(kind))), None)
    for single in base.envs:
        renewed = any(isinstance(each, RecordResets) and each.renews_world for each in iterate_wrappers(single))
        if reuses_world(single.unwrapped) and not renewed:
            return (
                "BipedalWalker reuses its Box2D world from episode to episode. Wrap it in whence.sb3.RecordResets "
                "where it is made, which gives it a new one"
            )
        for part in (*_iterate_user_wrappers(single), single.unwrapped):
            for name, value in vars(part).items():
                if isinstance(value, _GENERATORS) and name != "_np_random":
                    return (
                        f"{type(part).__name__} has a random generator of its own, {name}. Let it draw from "
                        "self.np_random, the environment's"
                    )
                if name in ("obs_rms", "return_rms"):
                    return _explain_statistics(type(part))
    return None


_GENERATORS = np.random.Generator, np.random.RandomState, random.Random


def _explain_statistics(kind: type) -> str:
    return f"{kind.__name__} keeps statistics from episode to episode inside an environment. Use VecNormalize around it"


def read_environments(env: VecEnv, tracker: ResetTracker) -> dict[str, Any]:
    """Return the state of environments between two rollouts, for a checkpoint."""
    return {
        "episodes": tracker.read_state(),
        "vec_wrappers": [read_attributes(wrapper) for wrapper in iterate_vec_wrappers(env)],
        "wrappers": [
            [[type(wrapper).__name__, read_attributes(wrapper)] for wrapper in _iterate_user_wrappers(single)]
            for single in _single_envs(env)
        ],
        "constants": tracker.read_constants(),
    }


def restore_environments(env: VecEnv, tracker: ResetTracker, content: Mapping[str, Any], *, masked: bool) -> str | None:
    """Bring environments to where `read_environments` found them: each plays its ongoing episode again.

    They are made as those were, inside of `ResetTracker.wrapped`. If `masked`, the policy asks for the masks of actions
    before each step. Returns None; or why an episode did not come out the same, and the environments are to be reset.
    """
    accept_resets(env)
    for index in range(len(content["episodes"])):
        if failure := _play_ongoing_episode(env.unwrapped, index, content, masked=masked):
            return f"environment {index}: {failure}"
    for index, (single, chain) in enumerate(zip(_single_envs(env), content["wrappers"], strict=True)):
        wrappers, before = list(_iterate_user_wrappers(single)), [name for name, _ in chain]
        if (names := [type(wrapper).__name__ for wrapper in wrappers]) != before:
            return f"its environments are wrapped in {', '.join(names)}, and were in {', '.join(before)}"
        for wrapper, (_, attributes) in zip(wrappers, _select_varied(chain, content, index), strict=True):
            if misfits := load_attributes(wrapper, attributes):
                return (
                    f"{type(wrapper).__name__}.{misfits[0]} is of another kind in a new wrapper than in one that has "
                    "stepped. Set it to the same kind of object in __init__"
                )
    restore_vec_wrappers(env, content)
    tracker.load_state(content["episodes"])
    return None


def restore_vec_wrappers(env: VecEnv, content: Mapping[str, Any]) -> None:
    """Set what the wrappers around vectorised environments had gathered, such as statistics of normalisation."""
    wrappers = [*iterate_vec_wrappers(env)]
    names = [type(wrapper).__name__ for wrapper in wrappers]
    chain = _select_varied(zip(names, content["vec_wrappers"], strict=True), content)
    for wrapper, (_, attributes) in zip(wrappers, chain, strict=True):
        load_attributes(wrapper, attributes)


def _select_varied(
    chain: Iterable[Sequence[Any]], content: Mapping[str, Any], index: int = 0
) -> list[tuple[str, dict[str, Any]]]:
    """Return wrappers' names and attributes without settings: these stay as the wrapper was made, and are compared."""
    pairs, constants = [*chain], content.get("constants", {})

    def varied(name: str, key: str, entry: Mapping[str, Any]) -> bool:
        return "plain" not in entry.get("dict", entry) or not is_constant(constants, f"{name}.{key}", index)

    return [
        (name, {key: entry for key, entry in attributes.items() if varied(numbered, key, entry)})
        for numbered, (name, attributes) in zip(number_names(name for name, _ in pairs), pairs, strict=True)
    ]


def accept_resets(env: VecEnv) -> None:
    """Let monitors that refuse to be reset inside of an episode (`allow_early_resets=False`) accept the next reset."""
    with suppress(Exception):  # an environment vector of another library
        if all(env.env_is_wrapped(Monitor)):
            env.env_method("set_wrapper_attr", "needs_reset", value=True)


def _play_ongoing_episode(base: VecEnv, index: int, content: Mapping[str, Any], *, masked: bool) -> str | None:
    """Play an environment's ongoing episode up to the present step; return what went otherwise, or None."""
    noted = content["episodes"][index]
    if noted["generator"] is None or noted["digest"] is None:
        return "it is not known how its ongoing episode began"
    state = json.loads(noted["generator"])
    if "wrappers" in state:
        state["wrappers"] = _select_varied(state["wrappers"], content, index)
    try:
        base.env_method("restore", state, indices=index)
        ((observation, _),) = base.env_method("reset", indices=index, seed=state.get("seed"))
        for action in noted["actions"]:
            if masked:  # an environment may draw them
                base.env_method("action_masks", indices=index)
            ((observation, _, terminated, truncated, _),) = base.env_method("step", action, indices=index)
            if terminated or truncated:
                return "its ongoing episode ended when it was played again"
    except Exception as failure:  # an environment may raise anything
        return f"its ongoing episode fails when it is played again ({type(failure).__name__}: {failure})"
    if digest_observation(observation, base.observation_space) != noted["digest"]:
        return "its ongoing episode came out otherwise when it was played again"
    if isinstance(base, DummyVecEnv):
        base._save_obs(index, observation)
    return None


def _single_envs(env: VecEnv) -> list[gym.Env[Any, Any]]:
    """Return the environments that are in this process."""
    return list(env.unwrapped.envs) if isinstance(env.unwrapped, DummyVecEnv) else []


def _iterate_user_wrappers(env: gym.Env[Any, Any]) -> Iterator[gym.Wrapper[Any, Any, Any, Any]]:
    """Yield the wrappers of an environment, the outermost first, but whence's own: they have no state."""
    return (wrapper for wrapper in iterate_wrappers(env) if not type(wrapper).__module__.startswith("whence."))
