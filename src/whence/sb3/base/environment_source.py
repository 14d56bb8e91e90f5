"""The user's code that environments run: digests of its source, by which a changed one is noticed."""

import ast
import hashlib
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.core import WhenceError, strip_addresses
from whence.sb3.base.wrappers import describe_environments, find_object, iterate_vec_wrappers, iterate_wrappers

_VERSIONED = sys.stdlib_module_names | {
    *("gymnasium", "stable_baselines3", "sb3_contrib", "numpy", "torch", "whence"),
    *("envpool", "minigrid", "highway_env", "Box2D"),
}
"""Packages whose code is left out: a run notes their versions, see `LIBRARIES`."""

_DIGESTS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The first digest of each class or function: its file may be edited while a script that has imported it trains."""


def digest_sources(vec_env: VecEnv) -> dict[str, str]:
    """Return digests of the source of the environments' classes and of all wrappers', by their names.

    The classes' bases are among them, the functions that wrappers hold, and what these name of the user's functions and
    classes. Libraries whose versions a run notes are not. Of environments in other processes, those classes are read
    that this process finds by their names.
    """
    digests: defaultdict[str, set[str]] = defaultdict(set)
    pending, visited = [*_iterate_code(vec_env)], set[Any]()
    while pending:
        code = pending.pop()
        if code not in visited and _is_code(code) and _is_users(code.__module__):
            visited.add(code)
            digests[code.__qualname__].add(digest_source(code))
            pending += code.__bases__ if isinstance(code, type) else ()
            pending += (value for _, value in _iterate_globals(code) if _is_near(value, code))
    return {name: " ".join(sorted(each)) for name, each in sorted(digests.items())}


def _iterate_code(vec_env: VecEnv) -> Iterator[Any]:
    """Yield the classes of environments and wrappers, and the functions that wrappers hold."""
    base = vec_env.unwrapped
    yield from map(type, (*iterate_vec_wrappers(vec_env), base))
    if isinstance(base, DummyVecEnv):
        for env in base.envs:
            for part in (*iterate_wrappers(env), env.unwrapped):
                yield type(part)
                yield from filter(inspect.isfunction, vars(part).values())
        return
    for name in {part["class"] for parts in describe_environments(vec_env) for part in parts}:
        if _is_users(name):
            with suppress(ImportError, AttributeError):
                yield find_object(name)


def _is_code(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _is_users(module: str) -> bool:
    return module.partition(":")[0].partition(".")[0] not in _VERSIONED


def _is_near(value: Any, code: Any) -> bool:
    """Return whether what code names is the user's, too, or of the same package, not of some other library."""
    if not _is_code(value):
        return False
    is_same = value.__module__.partition(".")[0] == code.__module__.partition(".")[0]
    return is_same or "site-packages" not in str(getattr(sys.modules.get(value.__module__), "__file__", ""))


def digest_source(code: Any) -> str:
    """Return a digest of a class's or a function's source without comments and docstrings, and of constants it names.

    If the source cannot be read, as of a lambda or in a console, it is of the compiled code.
    """
    if code not in _DIGESTS:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
            text = ast.unparse(_strip_docstrings(tree))
        except (OSError, TypeError, SyntaxError):
            numbers = sorted((name, value) for name, value in vars(code).items() if _is_number(value))
            text = repr([*map(list_code, _list_functions(code)), numbers])
        text += repr(sorted({(name, repr(value)) for name, value in _iterate_globals(code) if _is_number(value)}))
        _DIGESTS[code] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return _DIGESTS[code]


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a list of numbers."""
    return isinstance(value, int | float) or (isinstance(value, list | tuple) and all(map(_is_number, value)))


def _strip_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _list_functions(code: Any) -> list[Any]:
    """Return a function itself, or the functions that a class defines."""
    values: Iterable[Any] = vars(code).values() if isinstance(code, type) else [code]
    values = (getattr(value, "fget", getattr(value, "__func__", value)) for value in values)
    return [value for value in values if inspect.isfunction(value)]


def _iterate_globals(code: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, or a class's functions, name of their module."""
    for function in _list_functions(code):
        names = {name for part in _iterate_parts(function.__code__) for name in part.co_names}
        yield from ((name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__)


def _iterate_parts(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's compiled code, and that of the functions and comprehensions inside of it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _iterate_parts(value)


def list_code(function: Any) -> Any:
    """Return what a function computes by: its code, defaults, and the plain values that it closes over."""
    code = getattr(function, "__code__", None)
    if code is None:
        return strip_addresses(repr(function))
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    values = [*cells, *(function.__defaults__ or ()), *code.co_consts]
    plain = [value for value in values if isinstance(value, int | float | str | tuple)]
    return code.co_code, code.co_names, [strip_addresses(repr(value)) for value in plain]


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


def describe_factory(name: str | None) -> dict[str, Any]:
    """Return what a run's configuration has of the function that makes its environment, with a digest of its source."""
    if name is None:
        return {}
    return {"env": name, "env_kwargs": {}, "factory_source": {name: digest_source(find_factory(name))}}
