"""The user's code that environments run: digests of its source, by which a changed one is noticed."""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.core import WhenceError
from whence.sb3.base.wrappers import describe_environments, find_object, iterate_wrappers

_VERSIONED = {"builtins", "abc", "typing", "gymnasium", "stable_baselines3", "sb3_contrib", "minigrid", "whence"}
"""Packages whose code is left out: a run notes their versions, see `library_versions`."""

_DIGESTS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The first digest of each class or function: its file may be edited while a script that has imported it trains."""


def digest_sources(vec_env: VecEnv) -> dict[str, str]:
    """Return a digest of the source of each class of the environments and of their wrappers, by its name.

    The classes' own bases are among them, and functions that a wrapper holds. Those of libraries whose versions a run
    notes are not; nor, in other processes, those that are not to be found by their names.
    """
    base = vec_env.unwrapped
    sources: dict[str, str] = {}
    for each in _iterate_code(base) if isinstance(base, DummyVecEnv) else _iterate_named(vec_env):
        for code in inspect.getmro(each) if isinstance(each, type) else (each,):
            if code.__module__.partition(".")[0] not in _VERSIONED:
                sources[code.__qualname__] = digest_source(code)
    return dict(sorted(sources.items()))


def _iterate_code(base: DummyVecEnv) -> Iterator[Any]:
    """Yield the classes of environments and wrappers, and the functions that wrappers hold."""
    for env in base.envs:
        for part in (*iterate_wrappers(env), env.unwrapped):
            yield type(part)
            yield from (value for value in vars(part).values() if inspect.isfunction(value))


def _iterate_named(vec_env: VecEnv) -> Iterator[Any]:
    """Yield the classes and functions that environments of other processes say they were made by."""
    for part in (part for parts in describe_environments(vec_env) for part in parts):
        with suppress(ImportError, AttributeError):
            code = find_object(part["class"])
            if inspect.isclass(code) or inspect.isfunction(code):
                yield code


def digest_source(code: Any) -> str:
    """Return a digest of the source of a class or a function; of its compiled code if there is no source."""
    if code not in _DIGESTS:
        try:
            text = inspect.getsource(code)
        except (OSError, TypeError):  # as of a class that was typed into a console
            functions = [code] if inspect.isfunction(code) else [*vars(code).values()]
            text = repr([each.__code__.co_code for each in functions if inspect.isfunction(each)])
        _DIGESTS[code] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return _DIGESTS[code]


def find_factory(name: str) -> Any:
    """Return the function "module:function" that makes a training's environment.

    Raises:
        WhenceError: there is none.
    """
    module, _, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        # The script that trains would begin anew if it were imported.
        factory = find_object(f"{'__main__' if script and Path(script).stem == module else module}:{path}")
        failure = "that is no function"
    except (ImportError, AttributeError, ValueError) as error:
        factory, failure = None, str(error)
    if not path or not inspect.isroutine(factory):
        raise WhenceError(
            f"env is {name!r}: {failure}. Pass the name of a function without arguments that makes one environment in "
            "all of its wrappers, as 'module:function'. Modules of the working directory are found."
        )
    return factory
