"""The environments of a training: read for a checkpoint, and brought back to the same step of the same episodes."""

import json
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from whence.runs import TAG
from whence.sb3.episodes.resets import DIGEST, RecordResets, ResetTracker, reuses_world


def explain_inexact(env: VecEnv) -> str | None:
    """Return why environments, inside of `ResetTracker.wrapped`, cannot be brought back to where they were, or None."""
    base = env.unwrapped
    try:
        noted = base.env_is_wrapped(RecordResets)
    except Exception:  # an environment vector of another library
        noted = [False]
    if not all(noted):
        return (
            f"a {type(base).__name__} does not say how its episodes began. Wrap each environment in "
            "whence.sb3.RecordResets where it is made, if it is made by Gymnasium"
        )
    if not isinstance(base, DummyVecEnv):  # in other processes, which can say of which classes their wrappers are
        kinds = NormalizeObservation, NormalizeReward
        return next((_explain_statistics(kind) for kind in kinds if any(base.env_is_wrapped(kind))), None)
    for single in base.envs:
        renewed = any(isinstance(each, RecordResets) and each.renews_world for each in _iterate_wrappers(single))
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
        "vec_wrappers": [read_attributes(wrapper) for wrapper in _iterate_vec_wrappers(env)],
        "wrappers": [
            [[type(wrapper).__name__, read_attributes(wrapper)] for wrapper in _iterate_user_wrappers(single)]
            for single in _single_envs(env)
        ],
    }


def restore_environments(env: VecEnv, tracker: ResetTracker, content: Mapping[str, Any], *, masked: bool) -> str | None:
    """Bring environments to where `read_environments` found them: each plays its ongoing episode again.

    They are made as those were, inside of `ResetTracker.wrapped`. If `masked`, the policy asks for the masks of actions
    before each step. Returns None; or why an episode did not come out the same, and the environments are to be reset.
    """
    accept_resets(env)
    for index, noted in enumerate(content["episodes"]):
        if failure := _play_ongoing_episode(env.unwrapped, index, noted, masked=masked):
            return f"environment {index}: {failure}"
    for single, chain in zip(_single_envs(env), content["wrappers"], strict=True):
        wrappers, before = list(_iterate_user_wrappers(single)), [name for name, _ in chain]
        if (names := [type(wrapper).__name__ for wrapper in wrappers]) != before:
            return f"its environments are wrapped in {', '.join(names)}, and were in {', '.join(before)}"
        for wrapper, (_, attributes) in zip(wrappers, chain, strict=True):
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
    for vec_wrapper, attributes in zip(_iterate_vec_wrappers(env), content["vec_wrappers"], strict=True):
        load_attributes(vec_wrapper, attributes)


def accept_resets(env: VecEnv) -> None:
    """Let monitors that refuse to be reset inside of an episode (`allow_early_resets=False`) accept the next reset."""
    with suppress(Exception):  # an environment vector of another library
        if all(env.env_is_wrapped(Monitor)):
            env.env_method("set_wrapper_attr", "needs_reset", value=True)


def _play_ongoing_episode(base: VecEnv, index: int, noted: Mapping[str, Any], *, masked: bool) -> str | None:
    """Play an environment's ongoing episode up to the present step; return what went otherwise, or None."""
    if noted["generator"] is None or noted["digest"] is None:
        return "it is not known how its ongoing episode began"
    state = json.loads(noted["generator"])
    try:
        if "seed" not in state:
            base.env_method("set_generator", state, indices=index)
        ((observation, info),) = base.env_method("reset", indices=index, seed=state.get("seed"))
        for action in noted["actions"]:
            if masked:  # an environment may draw them
                base.env_method("action_masks", indices=index)
            ((observation, _, terminated, truncated, info),) = base.env_method("step", action, indices=index)
            if terminated or truncated:
                return "its ongoing episode ended when it was played again"
    except Exception as failure:  # an environment may raise anything
        return f"its ongoing episode fails when it is played again ({type(failure).__name__}: {failure})"
    if info.get(DIGEST) != noted["digest"]:
        return "its ongoing episode came out otherwise when it was played again"
    if isinstance(base, DummyVecEnv):
        base._save_obs(index, observation)
    return None


def _single_envs(env: VecEnv) -> list[gym.Env[Any, Any]]:
    """Return the environments that are in this process."""
    return list(env.unwrapped.envs) if isinstance(env.unwrapped, DummyVecEnv) else []


def _iterate_vec_wrappers(env: VecEnv) -> Iterator[VecEnvWrapper]:
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv


def _iterate_wrappers(env: gym.Env[Any, Any]) -> Iterator[gym.Wrapper[Any, Any, Any, Any]]:
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env


def _iterate_user_wrappers(env: gym.Env[Any, Any]) -> Iterator[gym.Wrapper[Any, Any, Any, Any]]:
    """Yield the wrappers of an environment, the outermost first, but whence's own: they have no state."""
    return (wrapper for wrapper in _iterate_wrappers(env) if not type(wrapper).__module__.startswith("whence."))


_PLAIN = bool, int, float, str, type(None)
_PACKAGES = "stable_baselines3.", "gymnasium.", "sb3_contrib."
_LEFT_ALONE = frozenset({"env", "venv", "envs", "spec", "metadata", "render_mode", "results_writer", "t_start"})


def read_attributes(thing: Any) -> dict[str, Any]:
    """Return a wrapper's attributes of plain kinds, for a checkpoint: numbers, texts, arrays, generators.

    Lists, tuples, dicts, counters and deques of these are read, too, and so are the attributes of small objects of SB3
    and Gymnasium, such as running statistics. What is wrapped, spaces and other objects are left out.
    """
    attributes = {name: _read(value) for name, value in vars(thing).items() if name not in _LEFT_ALONE}
    return {name: entry for name, entry in attributes.items() if entry is not None}


def load_attributes(thing: Any, attributes: Mapping[str, Any]) -> list[str]:
    """Set the attributes that `read_attributes` returned, as far as the wrapper has them.

    Returns:
        The names of those that could not be set: each holds something of another kind.
    """
    # VecNormalize declares its last observation, and sets it at the first reset only.
    names = {*vars(thing), *getattr(type(thing), "__annotations__", ())}
    return [name for name, entry in attributes.items() if name in names and not _load(thing, name, entry)]


def _read(value: Any) -> dict[str, Any] | None:
    """Return a value with its kind; None if it is of no plain kind."""
    if is_plain(value):
        return {"plain": value}
    if isinstance(value, deque):
        return {"deque": list(value), "maxlen": value.maxlen} if is_plain(list(value)) else None
    if isinstance(value, Counter | defaultdict):
        return {"counts": dict(value)} if is_plain(dict(value)) else None
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if _is_readable_object(value):
        return {"object": read_attributes(value)}
    if isinstance(value, Mapping) and value and all(map(_is_readable_object, value.values())):
        return {"objects": {key: read_attributes(part) for key, part in value.items()}}
    return None


def _load(thing: Any, name: str, entry: Mapping[str, Any]) -> bool:
    """Set an attribute; return whether it could be."""
    if "deque" in entry or "plain" in entry:
        setattr(thing, name, entry["plain"] if "plain" in entry else deque(entry["deque"], maxlen=entry["maxlen"]))
        return True
    # The others are loaded into what the wrapper holds.
    present = vars(thing).get(name)
    (kind,) = entry
    if kind not in (_read(present) or {}):
        return False
    if kind == "object":
        return not load_attributes(present, entry["object"])
    if kind == "objects":
        return all(key in present and not load_attributes(present[key], part) for key, part in entry["objects"].items())
    if kind == "generator":
        present.bit_generator.state = entry["generator"]
    else:
        present.clear()
        present.update(entry["counts"])
    return True


def is_plain(value: Any) -> bool:
    """Return whether a checkpoint holds a value and gives it back in the same type, which no subclass would be."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.dtype.isnative
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str and key != TAG for key in value) and all(map(is_plain, value.values()))
    return type(value) in _PLAIN


def _is_readable_object(value: Any) -> bool:
    kind = type(value)
    is_small = kind.__module__.startswith(_PACKAGES) and not any(hasattr(kind, name) for name in ("step", "contains"))
    return is_small and hasattr(value, "__dict__")
