"""The built-in presets of presets.toml."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def read_presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the built-in presets by name; a preset's values override those of its `base`."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(
        (files("whence.lab.agents") / "presets.toml").read_text(encoding="utf-8")
    )
    for name, values in tables.items():
        if "base" in values:
            base = tables[values.pop("base")]
            hyperparameters = {**base["hyperparameters"], **values.get("hyperparameters", {})}
            tables[name] = {**base, **values, "hyperparameters": hyperparameters}
    return tables
