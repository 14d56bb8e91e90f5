"""Plug-ins: what an installed package, whence itself among them, offers by name to code that does not import it."""

from functools import cache
from importlib.metadata import entry_points
from typing import Any


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
