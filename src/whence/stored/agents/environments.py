"""Environments by name, tests in them, what their spaces contain, and the names of actions and observations' axes."""

import re
import reprlib
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator
from gymnasium.wrappers import TransformObservation
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv

from whence.core import Action, WhenceError, eval_mode, preserve_rng_state, suggest
from whence.sb3 import RecordResets
from whence.sb3.episodes import Pool, evaluate_pool, find_object, reuses_world, select_options, use_fresh_noise


def make_env(
    name: str, kwargs: Mapping[str, Any], observe: str | None = None, *, checked: bool = True, **options: Any
) -> gym.Env[Any, Any]:
    """Return an environment by its name: an id of Gymnasium's, module:Id, or module:function, of what makes one.

    Of dict observations it shows the part `observe`. Gymnasium warns of its first steps if they are `checked`.
    `options` are further arguments, for an environment that takes them.
    """
    module, _, attribute = name.rpartition(":")
    try:
        definitions = find_object(module) if module else None
        create = None if attribute in gym.registry else getattr(definitions, attribute, None)
        if create is not None:
            env = create(**kwargs, **select_options(create, options))
        else:
            entry = gym.spec(attribute).entry_point
            create = load_env_creator(entry) if isinstance(entry, str) else entry
            arguments = select_options(create, options) | dict(kwargs)
            env = gym.make(attribute, disable_env_checker=None if checked else True, **arguments)
    except gym.error.UnregisteredEnv:
        names = {each for each in gym.registry if ":" not in each and "/" not in each}
        dotted = name.rpartition(".")
        meant = f" Did you mean '{dotted[0]}:{dotted[2]}'?" if all(dotted) and not module else suggest(name, names)
        raise WhenceError(
            f"No environment {name!r} is registered in Gymnasium; one of a package of its own is module:Id, and one "
            f"that a class or a function makes is module:name.{meant}"
        ) from None
    except Exception as failure:
        raise WhenceError(
            f"The environment {name!r} cannot be made{f' with {dict(kwargs)}' if kwargs else ''}: "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    if not isinstance(env, gym.Env):
        raise WhenceError(
            f"{name} returns a {type(env).__name__}; one environment of Gymnasium's in its wrappers is needed."
        )
    if observe is None:
        return env
    space: Any = env.observation_space
    observed: gym.Env[Any, Any] = TransformObservation(env, itemgetter(observe), space[observe])
    return observed


def renew_world(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return an environment to evaluate on, in which no episode depends on those before it.

    A BipedalWalker keeps its Box2D world from episode to episode, so it gets a new one for each.
    """
    return RecordResets(env) if reuses_world(env.unwrapped) else env


def measure_return(model: BaseAlgorithm, env: VecEnv | Pool, *, episodes: int, seed: int) -> tuple[float, float]:
    """Return the mean return over episodes of sampled actions, and its standard error.

    Environments and torch's generator are seeded, so the same policy gives the same figures. The global generators and
    the policy's mode and noise are restored afterwards. The environments are Gymnasium's, or EnvPool's.
    """
    if isinstance(env, Pool):
        returns = evaluate_pool(model, env, episodes=episodes, seed=seed >> 1)  # EnvPool's seeds have 31 bits
    else:
        returns = _evaluate(model, env, episodes, seed)
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(len(returns)))


def _evaluate(model: BaseAlgorithm, env: VecEnv, episodes: int, seed: int) -> NDArray[np.float64]:
    envs, masked = np.arange(env.num_envs), isinstance(model.policy, MaskableActorCriticPolicy)
    with preserve_rng_state(), eval_mode(model.policy.modules()), use_fresh_noise(model, len(envs)) as renew:

        def predict(observation: Any, state: Any, episode_start: Any, deterministic: bool) -> Any:
            renew(envs, episode_start)
            masks = {"action_masks": np.stack(env.env_method("action_masks"))} if masked else {}
            return model.predict(observation, state, episode_start, deterministic, **masks)

        torch.manual_seed(seed)
        env.seed(seed)
        playing: Any = SimpleNamespace(predict=predict)
        returns, _ = evaluate_policy(playing, env, episodes, deterministic=False, return_episode_rewards=True)
    return np.asarray(returns)


def check_action(target: Action, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
    """Refuse an observation or an action that a policy's spaces do not contain, or different numbers of both."""
    if isinstance(actions, spaces.Box):
        # A policy's actions exceed the bounds, too: SB3 clips them only on their way to the environment.
        actions = spaces.Box(-np.inf, np.inf, actions.shape, np.float64)
    counts = _count_elements("observation", target.observation, observations)
    counts |= _count_elements("action", target.action, actions)
    if len(counts) > 1:
        raise WhenceError("The target has not as many actions as observations: give one of each, or m of each.")


def _count_elements(name: str, value: Any, space: spaces.Space[Any]) -> set[int]:
    """Return how many elements of a space a target's `name` holds, of a Dict those of its parts; refuse others."""
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping) and value.keys() == space.keys():
        return set().union(*(_count_elements(f"{name}.{key}", value[key], part) for key, part in space.items()))
    with suppress(TypeError, ValueError):  # of rows of different lengths, or text
        array = np.asarray(value)
        rows = list(array.astype(space.dtype).reshape(-1, *(space.shape or ())))
        # In a dtype of whole numbers, 0.7 would have become 0.
        is_exact = np.issubdtype(space.dtype, np.floating) or np.array_equal(array, array.astype(space.dtype))
        if rows and is_exact and array.dtype.kind in "biuf" and all(space.contains(row) for row in rows):
            return {len(rows)}
    raise WhenceError(f"The {name} of the target is {reprlib.repr(value)}; one of {space}, or several, are needed.")


def action_labels(env_id: str | None, config: Mapping[str, Any] | None = None) -> list[str] | None:
    """Return the names of an environment's discrete actions, in their order; None if they are not known.

    The id is Gymnasium's, also as module:Id. A run's configuration may hold names of its own, which come first.
    """
    return _find_names(env_id, "actions", config or {})


def box_action_labels(env_id: str | None, config: Mapping[str, Any] | None = None) -> list[str] | None:
    """Return the names of the axes of an environment's continuous actions; None if they are not known."""
    return _find_names(env_id, "box_actions", config or {})


def state_names(env_id: str | None, config: Mapping[str, Any] | None = None) -> list[str] | None:
    """Return the names of the axes of an environment's observations; None if they are not known.

    They hold for the environment's own observations: check their number before using them.
    """
    return _find_names(env_id, "state", config or {})


def _find_names(env_id: object, kind: str, config: Mapping[str, Any]) -> list[str] | None:
    names, is_box = config.get("names") or {}, (config.get("action_space") or {}).get("type") == "Box"
    stored = names.get("observations" if kind == "state" else "actions")
    if stored and (kind == "state" or is_box == (kind == "box_actions")):
        return list(stored)
    if not isinstance(env_id, str):
        return None
    # "gymnasium.envs.box2d:LunarLander-v3", "ALE/Pong-v5" and "LunarLander-v3" all name an environment by their end.
    name = re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])
    table, family = _read_labels(), name.partition("-")[0]  # of MiniGrid-DoorKey-8x8
    entry = table.get(name) or (table.get(family) if family in ("MiniGrid", "BabyAI") else None) or {}
    return list(entry[kind]) if entry.get(kind) else None


@cache
def _read_labels() -> Mapping[str, Mapping[str, list[str]]]:
    table = tomllib.loads((files("whence.stored.agents") / "labels.toml").read_text(encoding="utf-8"))
    return {name: table[entry["like"]] if "like" in entry else entry for name, entry in table.items()}
