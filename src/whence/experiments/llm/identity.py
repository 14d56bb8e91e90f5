"""What a function of the user's is: a digest of its code and of the code of its file that it depends on."""

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path

from whence.experiments.llm.loading import search_first


def identify_function(name: str) -> str | None:
    """Return a text that changes with the code of a function, as far as its own file and its package's version tell.

    Args:
        name: "path/to/file.py:function" or "package.module:function".

    Returns:
        The digest of `select_code`; for a module of an installed package with its version. None: there is no such file
        or module.
    """
    source, _, attribute = name.rpartition(":")
    if source.endswith(".py"):
        return digest_code(Path(source), attribute) if Path(source).is_file() else None
    try:
        with search_first(Path.cwd()):
            spec = importlib.util.find_spec(source)
    except Exception:  # a parent package that cannot be imported, which loading the function will report
        return None
    if spec is None or spec.origin is None:
        return None
    packages = packages_distributions().get(source.partition(".")[0], [])
    versions = [f"{package} {version(package)}" for package in sorted(set(packages))]
    digest = [digest_code(Path(spec.origin), attribute)] if spec.origin.endswith(".py") else []
    return ", ".join([*digest, *versions]) or None


def digest_code(file: Path, name: str) -> str:
    """Return a digest of what `select_code` returns; of the whole file if it cannot be parsed."""
    content = file.read_bytes()
    try:
        code = select_code(ast.parse(content), name)
    except (SyntaxError, ValueError):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha256("\n".join(code).encode()).hexdigest()


def select_code(module: ast.Module, name: str) -> list[str]:
    """Return the code of a file that a name depends on, without comments, docstrings and formatting.

    That is what defines the name; what defines, changes or calls at the file's top level the names that this code uses;
    and so on. Of another module only the name of the import counts. Where the name, or a name that is used, may come
    from anywhere (`import *`, `globals()`, `eval`), the code is the whole file.

    Args:
        module: the parsed file.
        name: a name at its top level.

    Returns:
        Functions and classes by their names, then other statements in their order.
    """
    body = [_strip_docstrings(statement) for statement in module.body if not _is_script(statement)]
    statements = [part for statement in body for part in _split_import(statement)]
    uses = _list_uses(statements)
    touched = [_touched_names(statement) | _reached_names(statement, uses) for statement in statements]
    needed, chosen = {name}, set[int]()
    if not any(name in names for names in touched):
        needed.add("globals")
    while True:
        if needed & _REACH_ANYTHING:
            chosen = set(range(len(statements)))
            break
        new = {place for place, names in enumerate(touched) if place not in chosen and not needed.isdisjoint(names)}
        if not new:
            break
        chosen |= new
        needed |= {used for place in new for used in _names(statements[place])}
    selected = [statements[place] for place in sorted(chosen)]
    definitions = sorted((s for s in selected if isinstance(s, _Definition)), key=lambda statement: statement.name)
    others = [s for s in selected if not isinstance(s, _Definition)]
    return [ast.unparse(statement) for statement in (*definitions, *others)]


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_REACH_ANYTHING = {"globals", "vars", "locals", "eval", "exec", "*"}


def _is_script(statement: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`, which does not run where a reward is loaded."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"


def _strip_docstrings(statement: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        if isinstance(node, _Definition) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return statement


def _split_import(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield an import of several names as one import each."""
    if isinstance(statement, ast.Import):
        yield from (ast.Import([alias]) for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (ast.ImportFrom(statement.module, [alias], statement.level) for alias in statement.names)
    else:
        yield statement


def _names(statement: ast.AST) -> set[str]:
    """Return the names that code uses or binds."""
    return set(_list_names(ast.walk(statement)))


def _list_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Global):
            yield from node.names


def _list_uses(statements: Iterable[ast.stmt]) -> dict[str, set[str]]:
    """Return the names that a file defines, without imported ones, each with the names that its function uses."""
    uses: dict[str, set[str]] = {}
    for statement in statements:
        if isinstance(statement, _Definition):
            uses[statement.name] = _names(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            uses |= {name: set() for target in targets for name in _names(target)}
    return uses


def _reached_names(statement: ast.stmt, uses: Mapping[str, set[str]]) -> set[str]:
    """Return the file's names that a decorator, or a call whose value is not kept, may change by the file's functions.

    So does a decorator that enters functions into a table.
    """
    if isinstance(statement, _Definition):
        pending = {name for decorator in statement.decorator_list for name in _names(decorator)}
    else:
        pending = set() if isinstance(statement, ast.Assign | ast.AnnAssign) else _names(statement)
    reached: set[str] = set()
    while pending := (pending & uses.keys()) - reached:
        reached |= pending
        pending = {name for user in pending for name in uses[user]}
    return reached


def _touched_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a file's top level may define or change."""
    if isinstance(statement, _Definition):
        changed = {name for node in ast.walk(statement) if isinstance(node, ast.Global) for name in node.names}
        return {statement.name, *changed}
    touched = _names(statement)  # a call may change what it is given: numbers.update(...), seed(...)
    inner = {node.name for node in ast.walk(statement) if isinstance(node, _Definition)}
    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        touched = {name for target in targets for name in _names(target)}
    return touched | inner
