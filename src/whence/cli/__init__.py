"""The command `whence`."""

from importlib.util import find_spec

from whence.core import Unsupported

if find_spec("rich") is None or find_spec("typer") is None:
    raise Unsupported("The command `whence` needs its extra: in its source tree, pip install '.[cli]'.")

from whence.cli.app import app, main

__all__ = ["app", "main"]
