"""Environments inside of their wrappers: described for a run's configuration, and made again from that.

And what wrappers hold while they step: read in plain kinds for a checkpoint, and set again.
"""

import importlib
import inspect
import os
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import (
    HumanRendering,
    OrderEnforcing,
    PassiveEnvChecker,
    RecordEpisodeStatistics,
    RecordVideo,
    RenderCollection,
)
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper

from whence.core import ReplayError, WhenceError, decode, encode

Part: TypeAlias = Mapping[str, Any]
"""An environment or a wrapper in JSON types: its `class` ("module:name"), `kwargs`, the names of arguments that are
`lost`, and the `id` of an environment that Gymnasium made."""

_WATCHERS = (
    *(Monitor, RecordEpisodeStatistics, RecordVideo, HumanRendering, RenderCollection, AtariWrapper),
    *(OrderEnforcing, PassiveEnvChecker),
)
"""Wrappers that change nothing of an episode; what AtariWrapper does, the wrappers inside of it do."""


def iterate_wrappers(env: gym.Env[Any, Any]) -> Iterator[gym.Wrapper[Any, Any, Any, Any]]:
    """Yield the wrappers of an environment, the outermost first."""
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env


def iterate_vec_wrappers(env: VecEnv) -> Iterator[VecEnvWrapper]:
    """Yield the wrappers around vectorised environments, the outermost first."""
    while isinstance(env, VecEnvWrapper):
        yield env
        env = env.venv


def is_watcher(wrapper: gym.Wrapper[Any, Any, Any, Any]) -> bool:
    """Return whether a wrapper changes nothing of an episode, as whence's own and monitors do not."""
    return isinstance(wrapper, _WATCHERS) or type(wrapper).__module__.startswith("whence.")


def describe_environments(vec_env: VecEnv) -> list[list[Part]]:
    """Return the parts of each environment; an empty list if they are not known, as of another library's."""
    base = vec_env.unwrapped
    if isinstance(base, DummyVecEnv):
        return [describe_parts(env) for env in base.envs]
    with suppress(Exception):
        # A method that is not there would end the other process.
        if base.has_attr("describe_parts"):
            return list(base.env_method("describe_parts"))
        return [_describe_spec(spec) for spec in base.get_attr("spec")]
    return []


def describe_parts(env: gym.Env[Any, Any]) -> list[Part]:
    """Return what makes an environment again: itself, then its wrappers, the innermost first.

    The arguments of a wrapper are those that Gymnasium stores, or else the attributes of their names.
    """
    chain = [*iterate_wrappers(env)][::-1]
    # What is inside of the wrappers that gymnasium.make() adds is made by the environment's entry point.
    ends = [place for place, each in enumerate(chain, 1) if isinstance(each, OrderEnforcing | PassiveEnvChecker)]
    outer = [_describe_part(each) for each in chain[max(ends, default=0) :] if not is_watcher(each)]
    spec = env.unwrapped.spec
    if spec is None:
        return [_describe_part(env.unwrapped), *outer]
    return [_describe_base(spec), *outer]


def _describe_spec(spec: EnvSpec) -> list[Part]:
    """Return the parts that a specification names, as far as it knows their arguments."""
    limit = {"class": "gymnasium.wrappers:TimeLimit", "kwargs": {"max_episode_steps": spec.max_episode_steps}}
    wrappers = [
        {"class": each.entry_point, "kwargs": {}, "lost": ["..."]}
        if each.kwargs is None
        else _describe_call(each.entry_point, each.kwargs)
        for each in spec.additional_wrappers
        if each.name not in {kind.__name__ for kind in _WATCHERS}
    ]
    return [_describe_base(spec), *([limit] if spec.max_episode_steps else []), *wrappers]


def _describe_base(spec: EnvSpec) -> Part:
    return {"id": spec.id, **_describe_call(spec.entry_point, select_settings(spec.kwargs))}


def select_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's arguments but how it is shown."""
    return {name: value for name, value in kwargs.items() if name != "render_mode"}


def _describe_part(part: Any) -> Part:
    if isinstance(part, RecordConstructorArgs):
        kwargs = {name: value for name, value in part._saved_kwargs.items() if name != "env"}
        return _describe_call(type(part), kwargs)
    first = 2 if isinstance(part, gym.Wrapper) else 1  # self, and what is wrapped
    parameters = list(inspect.signature(type(part).__init__).parameters.values())[first:]
    values = vars(part)
    names = [each.name for each in parameters if each.name != "render_mode"]
    attributes = {name: key for name in names for key in (name, f"_{name}") if key in values}
    kwargs = {name: values[key] for name, key in attributes.items()}
    return _describe_call(type(part), kwargs, [name for name in names if name not in attributes])


def _describe_call(create: Any, kwargs: Mapping[str, Any], lost: Sequence[str] = ()) -> Part:
    """Return a call of a class or a function in JSON types."""
    encoded, lost = {}, [*lost]
    for name, value in kwargs.items():
        try:
            encoded[name] = encode(value, _name_object)
        except TypeError:
            lost.append(name)
    name = create if isinstance(create, str) else f"{create.__module__}:{create.__qualname__}"
    return {"class": name, "kwargs": encoded, **({"lost": lost} if lost else {})}


def _name_object(value: Any) -> dict[str, str] | None:
    """Return the name of a class or function that a module holds by it; None: it is none."""
    with suppress(Exception):  # an object may raise anything where it lacks a name
        name = f"{value.__module__}:{getattr(value, '__qualname__', None) or value.__name__}"
        return {"object": name} if find_object(name) is value else None
    return None


def _find_named(stored: Mapping[str, Any]) -> Any:
    return find_object(stored["object"]) if "object" in stored else None


def find_object(name: str) -> Any:
    """Return what "module:name" names, or the module that "module" names, also one of the working directory.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such name.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that nothing installed is hidden
    module, _, path = name.partition(":")
    return reduce(getattr, filter(None, path.split(".")), sys.modules.get(module) or importlib.import_module(module))


def check_factory(name: str | None) -> str | None:
    """Return the name "module:function" of a function that makes an environment, or None; refuse any other."""
    if name is None:
        return None
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    script = getattr(sys.modules["__main__"], "__file__", None)
    failure = "that is no function"
    try:
        # The script that trains would begin anew if it were imported.
        is_script = script is not None and Path(script).stem == module
        if path and inspect.isroutine(find_object(f"{'__main__' if is_script else module}:{path}")):
            return name
    except (ImportError, AttributeError, ValueError) as error:
        failure = str(error)
    raise WhenceError(
        f"env is {name!r}: {failure}. Pass the name of a function without arguments that makes one environment in all "
        "of its wrappers, as 'module:function'. Modules of the working directory are found."
    )


def select_options(create: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a class or a function takes."""
    parameters = inspect.signature(create).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return {name: value for name, value in options.items() if takes_any or name in {each.name for each in parameters}}


def make_parts(parts: Sequence[Part], **options: Any) -> gym.Env[Any, Any]:
    """Make an environment from what `describe_parts` returned, with the options it takes; else a `ReplayError`."""
    env: Any = None
    for part in parts:
        name = part["class"].rpartition(":")[2]
        if part.get("lost"):
            reason = f"its argument {part['lost'][0]} is in no attribute of that name, or nothing that can be stored"
        else:
            try:
                create = find_object(part["class"])
                kwargs = {key: decode(each, _find_named) for key, each in part["kwargs"].items()}
                env = create(env, **kwargs) if env is not None else _make_base(part.get("id"), create, kwargs, options)
                continue
            except Exception as failure:  # a constructor may raise anything
                reason = f"{type(failure).__name__}: {failure}"
        raise ReplayError(
            f"The run was trained in {'an environment' if env is None else 'the wrapper'} {name} of "
            f"{part['class'].partition(':')[0]}, which cannot be made again ({reason}). Write a function without "
            "arguments that makes the environment in all of its wrappers, and pass --env module:function (env= in a "
            "script)."
        )
    assert isinstance(env, gym.Env)
    return env


def _make_base(
    name: str | None, create: Callable[..., gym.Env[Any, Any]], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> gym.Env[Any, Any]:
    kwargs = {**kwargs, **select_options(create, options)}
    if name is None:
        return create(**kwargs)
    return gym.make(EnvSpec(name, entry_point=create, kwargs=kwargs), disable_env_checker=True)


_PLAIN = bool, int, float, str, type(None)
_PACKAGES = "stable_baselines3.", "gymnasium.", "sb3_contrib."
LEFT_ALONE = (
    *("env", "venv", "envs", "spec", "metadata", "render_mode", "results_writer", "t_start"),
    *("_saved_kwargs", "_cached_spec", "_metadata", "_action_space", "_observation_space", "class_attributes"),
)
"""Attributes that are no settings of a wrapper: what is wrapped, how it was made, and how it is shown."""


def read_attributes(thing: Any) -> dict[str, Any]:
    """Return a wrapper's attributes of plain kinds, for a checkpoint: numbers, texts, arrays, generators.

    Lists, tuples, dicts, counters and deques of these are read, too, and so are the attributes of small objects of SB3
    and Gymnasium, such as running statistics. What is wrapped, spaces and other objects are left out.
    """
    attributes = {name: _read(value) for name, value in vars(thing).items() if name not in LEFT_ALONE}
    return {name: entry for name, entry in attributes.items() if entry is not None}


def load_attributes(thing: Any, attributes: Mapping[str, Any]) -> list[str]:
    """Set what `read_attributes` returned; return the names of those that hold something of another kind."""
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
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return type(value) in _PLAIN


def _is_readable_object(value: Any) -> bool:
    kind = type(value)
    is_small = kind.__module__.startswith(_PACKAGES) and not any(hasattr(kind, name) for name in ("step", "contains"))
    return is_small and hasattr(value, "__dict__")
