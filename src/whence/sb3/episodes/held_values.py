"""Values and code that environments and their wrappers hold, by which a continued training sees what was changed."""

import inspect
import json
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dis import get_instructions
from enum import Enum
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from os import PathLike
from reprlib import repr as shorten
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import Tensor

from whence.core import describe, preserve_rng_state
from whence.sb3.episodes.wrappers import LEFT_ALONE, is_watcher, iterate_vec_wrappers, iterate_wrappers

_MOST, _MOST_ENTRIES, _LARGEST = 2000, 64, 200
"""How many things are read in all, how many of a list or dict, and the size of arrays that are held in full."""
_PLAIN = type(None), bool, int, float, complex, str, bytes, np.generic, np.ndarray, Enum, PathLike, CodeType
_WRAPPED = {partial: ("func", "args", "keywords"), property: ("fget",), MethodType: ("__self__", "__func__")}
_WRAPPED |= dict.fromkeys((staticmethod, classmethod), ("__func__",))
_WRAPPED |= dict.fromkeys((BuiltinFunctionType, ModuleType, np.ufunc), ("__name__",))
"""What is read of objects that are around a function, or whose name says all of them."""
_NO_SETTINGS = "logging.", "threading.", "multiprocessing.", "subprocess.", "gymnasium.spaces."
_CODE = ".__code__"


def read_vector_values(vec_env: VecEnv) -> dict[str, Any]:
    """Return what wrappers and environments hold; of those in other processes if `RecordResets` is around them.

    Those of the first environment have no number; of each other one there is what differs.
    """
    base = vec_env.unwrapped
    chains = [read_chain(env) for env in base.envs] if isinstance(base, DummyVecEnv) else []
    with suppress(Exception):  # an environment vector of another library
        # A method that is not there would end the other process.
        chains = chains or (base.env_method("read_held_values") if base.has_attr("read_held_values") else [])
    is_sb3s = type(base).__module__.startswith("stable_baselines3.")
    values = read_values([*iterate_vec_wrappers(vec_env), *([] if is_sb3s else [base])])
    for index, chain in enumerate(chains):
        differing = [name for name in chain if not index or name not in chains[0] or chain[name] != chains[0][name]]
        values |= {f"environment {index}: {name}" if index else name: chain[name] for name in differing}
    return values


def read_chain(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return what an environment and its wrappers hold, but those that only watch."""
    return read_values([*(each for each in iterate_wrappers(env) if not is_watcher(each)), env.unwrapped])


def read_values(parts: Sequence[Any]) -> dict[str, Any]:
    """Return plain values that objects hold, and digests of code, by paths: `Scaled.gain`, `Scaled.func.__code__`.

    Read are attributes, but those that methods other than `__init__` assign; what is in lists, dicts, functions and
    objects that they hold; and the code of the user's own functions and classes, with the globals that it reads.
    """
    kinds = tuple(map(type, parts))
    things = [*zip(number_names(kind.__name__ for kind in kinds), parts, strict=True)]
    values, seen = dict[str, Any](), set[int]()
    for name, thing in things:  # to which is added what each holds, so that what is nearer comes first
        with suppress(Exception):  # a user's object may raise anything when it is looked into
            if isinstance(thing, _PLAIN):
                values[name] = _describe(thing)
            elif id(thing) not in seen and len(things) < _MOST:
                seen.add(id(thing))
                things += [(f"{name}.{key}", inner) for key, inner in _look_inside(thing, kinds).items()]
    return values


def number_names(names: Iterable[str]) -> list[str]:
    """Return names of wrappers' classes, with a number from the second one of a class on."""
    names = [*names]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True)]


def digest_function(function: Any) -> str:
    """Return a digest of a function's or a callable object's code, and of the plain values that it holds itself."""
    values = [each for each in read_values([function]).items() if each[0].count(".") == 1 or each[0].endswith(_CODE)]
    return _digest(json.dumps(values).encode())


def digest_environment(make: Callable[[], gym.Env[Any, Any]], *, whole: bool = False) -> str | None:
    """Return a digest of the user's classes of an environment and its wrappers, with the constants that they read.

    What differs between two that are made is left out, as counters are; and what only objects hold, as seeds are,
    unless the `whole` is to be digested. It is None if no code is the user's.
    """
    chains = []
    with preserve_rng_state():
        for env in (make() for _ in range(2)):  # the second after the first was read
            chains.append(read_chain(env))
            env.close()
    values = keep_constant(*chains)["held"].items()
    constants = {name: value for name, value in values if whole or ".__class__." in name}
    has_code = whole or any(name.endswith(_CODE) for name in constants)
    return _digest(json.dumps(constants).encode()) if has_code else None


def digest_code(env: Any) -> dict[str, str]:
    """Return digests of the user's code of environments and wrappers, with its constants, as {"Cart.step": ...}."""
    if isinstance(env, VecEnv):
        values = read_vector_values(env)
    else:
        base = getattr(env, "unwrapped", env)
        first = env if isinstance(env, gym.Env) else next(iter(getattr(base, "envs", [])), base)
        values = read_chain(first) if isinstance(first, gym.Env) else read_values([base])
    members = defaultdict[str, list[Any]](list)
    for name, value in values.items():
        part, is_class, inner = name.partition(".__class__.")
        if (is_class and not inner.endswith("__name__")) or name.endswith(_CODE):
            place = f"{part}.{inner.partition('.')[0]}" if is_class else part.removesuffix(_CODE)
            members[place].append((name, value))
    return {name: _digest(json.dumps(entries).encode()) for name, entries in members.items()}


def keep_constant(start: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for a checkpoint, the values at the start that are still so, and the names of those that varied."""
    constants = {name: value for name, value in start.items() if name in now and now[name] == value}
    return {"held": constants, "varied": sorted((start.keys() | now.keys()) - constants.keys())}


def is_constant(constants: Mapping[str, Any], name: str, index: int = 0) -> bool:
    """Return whether a value of an environment, or all that it holds, is among those that `keep_constant` kept."""

    def is_in(group: str, name: str) -> bool:
        return any(f"{each}.".startswith(f"{name}.") for each in constants.get(group, ()))

    return is_in("held", name) and not (is_in("varied", name) or is_in("varied", f"environment {index}: {name}"))


def list_held_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List, for people, in what values differ from those that `keep_constant` returned; before, there may be none."""
    constants, changes = before.get("held", now), []
    for name in sorted((constants.keys() | now.keys()) - {*before.get("varied", ())}):
        old, new = (shorten(each[name]) if name in each else "not set" for each in (constants, now))
        if old != new:
            what, is_code = name.replace(".__class__", "").removesuffix(_CODE), name.endswith(_CODE)
            changes.append(f"the code of {what} differs" if is_code else f"{what} was {old}, now {new}")
    return [*changes[:8], *([f"and {len(changes) - 8} more"] if len(changes) > 8 else [])]


def _look_inside(thing: Any, kinds: tuple[type, ...]) -> dict[Any, Any]:
    """Return what something holds that is no plain value, by names; `kinds` are the classes of the parts."""
    kind = type(thing)
    if kind in _WRAPPED:
        return {name: getattr(thing, name) for name in _WRAPPED[kind]}
    if isinstance(thing, set | frozenset):  # its order differs from process to process
        thing = sorted((each for each in thing if isinstance(each, _PLAIN)), key=repr)
    if isinstance(thing, list | tuple | Mapping):
        return dict(islice(thing.items() if isinstance(thing, Mapping) else enumerate(thing), _MOST_ENTRIES))
    if isinstance(thing, Tensor):
        return {} if thing.requires_grad else {"values": thing.cpu().numpy()}
    if isinstance(thing, FunctionType):
        parameters, variables = inspect.signature(thing).parameters.items(), inspect.getclosurevars(thing).nonlocals
        defaults = {name: each.default for name, each in parameters if each.default is not each.empty}
        code: dict[str, Any] = {}
        if _is_users(thing):
            # Not `getclosurevars().globals`, which takes names of attributes for those of globals.
            names = [name for name in _list_names(thing.__code__, "LOAD_GLOBAL") if name in thing.__globals__]
            code = {"__code__": thing.__code__, **{name: thing.__globals__[name] for name in names}}
        return {**code, **defaults, **variables}
    if isinstance(thing, type):
        members = {name: each for name, each in vars(thing).items() if name[:2] != "__" or inspect.isfunction(each)}
        bases = {base.__name__: base for base in thing.__bases__}
        return {"__name__": thing.__name__, **(members | bases if _is_users(thing) else {})}
    if f"{kind.__module__}.".startswith(_NO_SETTINGS):
        return {}
    stored: Any = object.__getstate__(thing)  # a dict, or a pair with one of slots
    if stored is None and kind.__module__ in sys.stdlib_module_names:  # such as a range, an itemgetter, a pattern
        stored = dict(enumerate(thing.__reduce_ex__(2)[1]))
    parts = [{"__class__": kind}, *(stored if isinstance(stored, tuple) else [stored])]
    left_out = {*LEFT_ALONE, *_find_state((*kinds, kind))}
    return {name: each for part in parts for name, each in (part or {}).items() if name not in left_out}


@lru_cache(maxsize=1024)
def _find_state(kinds: tuple[type, ...]) -> set[str]:
    """Return the attributes that methods other than `__init__` assign: they are state, and no settings."""
    members = [each for kind in kinds for base in kind.__mro__ for each in vars(base).items()]
    methods = [each for name, each in members if inspect.isfunction(each) and not name.endswith("init__")]
    return {name for each in methods for name in _list_names(each.__code__, "STORE_ATTR")}


def _list_names(code: CodeType, kind: str) -> list[str]:
    """Return the names that a kind of instruction has in some code, and in the functions that it makes."""
    inner = [name for each in code.co_consts if isinstance(each, CodeType) for name in _list_names(each, kind)]
    return [*(use.argval for use in get_instructions(code) if use.opname == kind), *inner]


def _is_users(thing: Any) -> bool:
    """Return whether a function or class is of a module that is neither an installed library's nor Python's."""
    file = getattr(sys.modules.get(thing.__module__), "__file__", None) or "-packages"
    is_installed = "-packages" in file or file.startswith(sysconfig.get_path("stdlib"))
    return thing.__module__ == "__main__" or not (is_installed or thing.__module__.startswith("whence."))


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=6).hexdigest()


def _describe(value: Any) -> Any:
    """Return a plain value in JSON types; a digest stands for a long array and for code."""
    if isinstance(value, CodeType):  # lines, comments and what is written next to it leave it the same
        # A set's order differs from process to process.
        constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in value.co_consts]
        plain = [_describe(each) if isinstance(each, CodeType) else repr(each) for each in constants]
        return _digest(repr((value.co_code, value.co_names, plain)).encode())
    if isinstance(value, np.ndarray) and value.size > _LARGEST and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {_digest(value.tobytes())}"
    return describe(value)
