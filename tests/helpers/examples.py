"""The examples as modules."""

import importlib.util
from pathlib import Path
from typing import Any


def script(name: str) -> Any:
    """Return an example as a module."""
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
