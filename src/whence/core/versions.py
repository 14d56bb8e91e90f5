"""The versions of installed libraries, which runs, recordings and scores note."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version


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
