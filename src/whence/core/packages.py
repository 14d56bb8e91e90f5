"""Packages: the faces of whence's own, the plug-ins that installed ones offer, and their versions."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import lazy_loader

_REST = "# isort: split"
"""The line of a stub below which names stand that only whence imports."""


def attach_face(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package by its stub, whose upper half is for users."""
    get, _, names = lazy_loader.attach_stub(package, file)
    _, _, rest = Path(file).with_suffix(".pyi").read_text(encoding="utf-8").partition(_REST)
    inner = {line.rpartition(" ")[2] for line in rest.splitlines() if line.startswith("from ")}
    public = [name for name in names if name not in inner]
    return get, lambda: public, public


@cache
def load_plugin(group: str, name: str) -> Any | None:
    """Return the object that an entry point of a group names; None: no installed package has such an entry point.

    So a lower floor reaches what stands above it: views of a library's policies, a laboratory's tasks, advice.

    Raises:
        ImportError: its module cannot be imported.
    """
    entries = entry_points(group=group, name=name)
    return next(iter(entries)).load() if entries else None


def call_plugin(group: str, name: str, *arguments: Any) -> Any:
    """Call the function that an entry point names, see `load_plugin`; without such an entry point do nothing."""
    function = load_plugin(group, name)
    return None if function is None else function(*arguments)


def library_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the version of each library that is installed, by its name on the package index; "whence" is itself."""
    versions = {name: _read_version(name) for name in libraries}
    return {name: number for name, number in versions.items() if number is not None}


@cache
def _read_version(library: str) -> str | None:
    # The name "whence" on the package index is another project's.
    for name in ("whence-rl", "whence") if library == "whence" else (library,):
        with suppress(PackageNotFoundError):
            return version(name)
    return None
