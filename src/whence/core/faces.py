"""Faces of packages: what they hand on loads at first use, and `__all__` names what users use."""

from collections.abc import Callable
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
