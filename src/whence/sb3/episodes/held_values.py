"""Values and code that environments and their wrappers hold, by which a continued training sees what was changed."""

import json
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dis import get_instructions
from enum import Enum
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import islice
from os import PathLike
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import Tensor

from whence.core import describe
from whence.sb3.episodes.wrappers import LEFT_ALONE, is_watcher, iterate_vec_wrappers, iterate_wrappers

_MOST_VALUES, _MOST_ENTRIES, _DEEPEST, _LONGEST = 2000, 64, 8, 200
"""How much is read: in all, of a list or dict, of what holds what; and the length of texts and arrays held in full."""

_STEPPED = frozenset(("reset", "step", "step_async", "step_wait", "__call__"))
"""The methods by which an environment runs: what these set, or what they call, is its state and no setting."""

_PLAIN = type(None), bool, int, float, str, np.generic, Enum, PathLike
_LEFT_ALONE = (*LEFT_ALONE, "class_attributes", "reset_infos", "_seeds", "_options", "_np_random_seed")
_NO_SETTINGS = "logging.", "threading.", "multiprocessing.", "random.", "weakref.", "pygame.", "numpy."
"""Packages whose objects hold no settings of an environment."""
_VEC_WATCHERS = "VecMonitor", "VecVideoRecorder", "VecCheckNan"
_CODE = "code of "


def read_vector_values(vec_env: VecEnv) -> dict[str, Any]:
    """Return what wrappers and environments hold; of those in other processes if `RecordResets` is around them.

    Those of the first environment have no number; of each other one there is what differs.
    """
    base = vec_env.unwrapped
    parts: list[Any] = [each for each in iterate_vec_wrappers(vec_env) if type(each).__name__ not in _VEC_WATCHERS]
    parts += [] if type(base).__module__.startswith("stable_baselines3.") else [base]
    chains: list[dict[str, Any]] = []
    if isinstance(base, DummyVecEnv):
        chains = [read_chain(env) for env in base.envs]
    else:
        with suppress(Exception):  # an environment vector of another library
            # A method that is not there would end the other process.
            chains = list(base.env_method("read_held_values")) if base.has_attr("read_held_values") else []
    first = chains[0] if chains else {}
    others = {
        f"environment {index}: {name}": value
        for index, each in enumerate(chains)
        for name, value in each.items()
        if name not in first or first[name] != value
    }
    return {**read_values(parts), **first, **others}


def read_chain(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return what an environment and its wrappers hold, but those that only watch."""
    return read_values([*(each for each in iterate_wrappers(env) if not is_watcher(each)), env.unwrapped])


def read_values(parts: Sequence[Any]) -> dict[str, Any]:
    """Return what objects hold, in JSON types: values such as `Scaled.gain`, and digests, `code of MODULE.NAME`.

    Read are attributes, and the arguments, closures, defaults and globals of functions, of lists, dicts and objects
    within. Left out are what a step or a reset assigns, and the code of installed libraries.
    """
    reader = _Reader(parts)
    for name, part in zip(number_names(type(part).__name__ for part in parts), parts, strict=True):
        reader.read_object(name, part, 0)
    return reader.values


def number_names(names: Iterable[str]) -> list[str]:
    """Return names of wrappers' classes, with a number from the second one of a class on."""
    names = [*names]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True)]


def digest_function(function: Any) -> str:
    """Return a digest of a function's or a callable object's code, and of the plain values that it holds itself."""
    reader = _Reader([])
    reader.read("function", function, 0)
    codes = [value for name, value in reader.values.items() if name.startswith(_CODE)]
    values = {name: value for name, value in reader.values.items() if name.count(".") <= 1 and value not in codes}
    return _digest(json.dumps([codes, values], sort_keys=True))


def keep_constant(start: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for a checkpoint, the values at the start that are still so, and the names of those that varied."""
    held = {name: value for name, value in start.items() if name in now and now[name] == value}
    return {"held": held, "varied": sorted((start.keys() | now.keys()) - held.keys())}


def is_constant(constants: Mapping[str, Any], name: str, index: int = 0) -> bool:
    """Return whether a value of an environment, or all that it holds, is among those that `keep_constant` kept."""

    def is_in(group: str, name: str) -> bool:
        return any(each == name or each.startswith(f"{name}.") for each in constants.get(group, ()))

    return is_in("held", name) and not (is_in("varied", name) or is_in("varied", f"environment {index}: {name}"))


def list_held_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List, for people, in what values differ from those that `keep_constant` returned; before, there may be none."""
    held, changes = before.get("held", now), []
    for name in sorted((held.keys() | now.keys()) - {*before.get("varied", ())}):
        old, new = (repr(each[name]) if name in each else "not set" for each in (held, now))
        if name.startswith(_CODE):
            changes += [f"the {name} differs"] if old != new and name in held and name in now else []
        elif old != new:
            changes.append(f"{name} was {old}, now {new}")
    return [*changes[:8], *([f"and {len(changes) - 8} more"] if len(changes) > 8 else [])]


class _Reader:
    """Reads what objects hold into `values`, each object once."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.values: dict[str, Any] = {}
        self._seen = {id(part): part for part in parts}  # which keeps them, so that no id is used again
        self._state, self._called = _find_state([type(part) for part in self._seen.values()], _STEPPED)

    def read_object(self, name: str, thing: Any, depth: int) -> None:
        """Read an object's attributes, and its class, if that is the user's."""
        state = self._state | _find_state([type(thing)], self._called)[0]
        with suppress(TypeError):  # it has none that can be read
            held: Any = object.__getstate__(thing)  # a dict, or a pair with one of slots
            for part in held if isinstance(held, tuple) else [held]:
                for key, value in (part or {}).items():
                    if key not in state and key not in _LEFT_ALONE:
                        self.read(f"{name}.{key}", value, depth)
        self._read_class(type(thing), depth)

    def _read_all(self, name: str, entries: Mapping[Any, Any], depth: int) -> None:
        for key, value in islice(entries.items(), _MOST_ENTRIES):
            self.read(f"{name}.{key}", value, depth)

    def read(self, name: str, value: Any, depth: int) -> None:
        """Read a value that is held under a name."""
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy()
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            value = value.tolist()
        is_list = isinstance(value, list | tuple) and len(value) <= _MOST_ENTRIES
        if isinstance(value, (*_PLAIN, np.ndarray)) or (is_list and all(isinstance(each, _PLAIN) for each in value)):
            self.values[name] = _describe(value)
        elif len(self.values) < _MOST_VALUES and depth < _DEEPEST and id(value) not in self._seen:
            self._seen[id(value)] = value
            with suppress(Exception):  # a user's object may raise anything when it is looked into
                self._read_inside(name, value, depth + 1)

    def _read_inside(self, name: str, value: Any, depth: int) -> None:
        match value:
            case list() | tuple():
                self._read_all(name, dict(enumerate(value[:_MOST_ENTRIES])), depth)
            case Mapping():
                self._read_all(name, value, depth)
            case partial():
                self._read_all(name, {**dict(enumerate(value.args)), **value.keywords}, depth)
                self.read(name, value.func, depth)
            case MethodType():
                self.read(name, value.__self__, depth)
                self.read(name, value.__func__, depth)
            case FunctionType():
                self._read_function(name, value, f"{value.__module__}.{value.__qualname__}", depth)
            case type():
                self._read_class(value, depth)
            case set() | frozenset() if len(value) <= _MOST_ENTRIES:
                self.values[name] = _describe(value)
            case _ if not isinstance(value, ModuleType | gym.Space) and not _name(type(value)).startswith(_NO_SETTINGS):
                self.values[name] = _name(type(value))
                self.read_object(name, value, depth)

    def _read_class(self, kind: type, depth: int) -> None:
        """Read the code of a class, and what its methods and the class itself hold."""
        for base in kind.__mro__:
            name = _name(base)
            if f"{_CODE}{name}" in self.values or not _is_users(getattr(base, "__module__", None)):
                continue
            self.values[f"{_CODE}{name}"] = ""
            for key, member in vars(base).items():
                if isinstance(function := _unwrap(member), FunctionType):
                    self._read_function(f"{base.__qualname__}.{key}", function, name, depth)
                elif not (key.startswith("__") or key in self._state or key in _LEFT_ALONE):
                    self.read(f"{base.__qualname__}.{key}", member, depth)

    def _read_function(self, name: str, function: FunctionType, owner: str, depth: int) -> None:
        """Read a function's code, as a part of that of its owner, itself or its class, and what the function holds."""
        code, defaults = function.__code__, function.__defaults__ or ()
        optional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        held = {**dict(zip(optional, defaults, strict=True)), **(function.__kwdefaults__ or {})}
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                held[variable] = cell.cell_contents
        self._read_all(name, held, depth)
        if _is_users(function.__module__):
            self.values[f"{_CODE}{owner}"] = _digest(self.values.get(f"{_CODE}{owner}", "") + _digest_code(code))
            for key, value in _find_globals(function):
                self.read(key, value, depth)


def _find_globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads of its module and, through that, of the user's other modules, by names."""
    names = dict.fromkeys(name for code in _iterate_codes(function.__code__) for name in code.co_names)
    for name in names:
        value = function.__globals__.get(name, sys)
        if isinstance(value, ModuleType):
            inside = vars(value) if _is_users(value.__name__) else {}
            yield from ((f"{value.__name__}.{each}", inside[each]) for each in names if each in inside)
        else:
            yield f"{function.__module__}.{name}", value


def _find_state(kinds: Iterable[type], names: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the attributes that methods of these names set, and those that they call; and all names that they use."""
    methods = [method for kind in kinds for method in _list_methods(kind)]
    called, state, count = {*names}, set[str](), 0
    while count < len(called):
        count = len(called)
        for name, stored, used in methods:
            if name in called and name != "__init__":
                state |= stored
                called |= used
    return state, called


@lru_cache(maxsize=1024)
def _list_methods(kind: type) -> list[tuple[str, set[str], set[str]]]:
    """List a class's methods, with the names of the attributes that each sets, and all names that it uses."""
    methods = []
    for name, member in [entry for base in kind.__mro__ for entry in vars(base).items()]:
        if isinstance(function := _unwrap(member), FunctionType):
            codes = [*_iterate_codes(function.__code__)]
            stored = {each.argval for code in codes for each in get_instructions(code) if each.opname == "STORE_ATTR"}
            methods.append((name, stored, {used for code in codes for used in code.co_names}))
    return methods


def _unwrap(member: Any) -> Any:
    """Return the function of a method, a property, or a class's or static method."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def _iterate_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions within."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iterate_codes(constant)


@lru_cache(maxsize=4096)
def _digest_code(code: CodeType) -> str:
    """Return a digest of what code does; lines, comments and what is written next to it leave it the same."""
    parts = [(each.co_code, each.co_names) for each in _iterate_codes(code)]
    # A set's order differs from process to process.
    plain = [each for part in _iterate_codes(code) for each in part.co_consts if not isinstance(each, CodeType)]
    return _digest(repr((parts, [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in plain])))


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="replace"), digest_size=6).hexdigest()


@lru_cache(maxsize=1024)
def _is_users(module: str | None) -> bool:
    """Return whether a module is neither an installed library's nor Python's."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    is_installed = file is None or "-packages" in file or file.startswith(sysconfig.get_path("stdlib"))
    return module == "__main__" or not (is_installed or str(module).startswith("whence."))


def _name(kind: type) -> str:
    return f"{getattr(kind, '__module__', None)}.{kind.__qualname__}"  # a class in C may have no module


def _describe(value: Any) -> Any:
    """Return a plain value or an array in JSON types; a digest stands for a long one."""
    if isinstance(value, np.ndarray) and value.size > _LONGEST:
        return f"{value.dtype} {value.shape} {blake2b(value.tobytes(), digest_size=6).hexdigest()}"
    described = describe(value)
    is_long = isinstance(described, str) and len(described) > _LONGEST
    return f"{described[:40]}... {_digest(described)}" if is_long else described
