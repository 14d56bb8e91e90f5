"""Contracts with host libraries: tables of private names, each with a check of what whence relies on."""

import inspect
from typing import Any

import pytest


def check_each(table: dict[str, Any]) -> Any:
    """Return a test with a case for each name of a table, whose functions return whether it is as whence needs it."""

    @pytest.mark.parametrize("name", table)
    def test(name: str) -> None:
        assert table[name]()

    return test


def takes(function: Any, names: str) -> bool:
    """Return whether a function's first parameters, after `self`, have these names."""
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    return parameters[: len(names.split())] == names.split()
