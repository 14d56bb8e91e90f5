"""Spaces of observations and actions as a run's configuration holds them, from which its policy is built again."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces


def describe_space(space: spaces.Space[Any]) -> dict[str, Any] | None:
    """Return a space as a table of numbers, texts and arrays; None for one that SB3's policies do not read."""
    match space:
        case spaces.Dict():
            return {"type": "Dict", "spaces": {name: describe_space(part) for name, part in space.items()}}
        case spaces.Box():
            bounds = {"low": _shorten(space.low), "high": _shorten(space.high)}
            return {"type": "Box", **bounds, "shape": space.shape, "dtype": str(space.dtype)}
        case spaces.Discrete():
            return {"type": "Discrete", "n": space.n, "start": space.start}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n}
    return None


def _shorten(bounds: Any) -> Any:
    """Return the bounds of a box, as one number if they are equal."""
    return bounds.flat[0] if bounds.size and (bounds == bounds.flat[0]).all() else bounds


def make_space(stored: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space that `describe_space` described."""
    values = {name: value for name, value in stored.items() if name != "type"}
    match stored["type"]:
        case "Dict":  # pairs keep their order, which is that of the extractor's features
            return spaces.Dict([(name, make_space(part)) for name, part in values["spaces"].items()])
        case "Box":
            shape, dtype = tuple(values["shape"]), np.dtype(values["dtype"])
            low, high = (np.broadcast_to(np.array(values[end], dtype), shape).copy() for end in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "MultiDiscrete":
            return spaces.MultiDiscrete(np.array(values["nvec"]), start=np.array(values["start"]))
        case "Discrete":
            return spaces.Discrete(**values)
        case "MultiBinary":
            return spaces.MultiBinary(values["n"])
    raise ValueError(f"{stored['type']!r} is no space of Stable-Baselines3's.")
