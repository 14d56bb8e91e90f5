"""Names of actions and of observations' axes in environments that many use, from labels.toml."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


def action_labels(env_id: str | None, config: Mapping[str, Any] | None = None) -> list[str] | None:
    """Return the names of an environment's discrete actions, in their order; None if they are not known.

    Args:
        env_id: a Gymnasium id such as LunarLander-v3, also as module:Id; None: not known.
        config: a run's configuration, whose own `names` come first.
    """
    return _find_names(env_id, "actions", config or {})


def box_action_labels(env_id: str | None, config: Mapping[str, Any] | None = None) -> list[str] | None:
    """Return the names of the axes of an environment's continuous actions; None if they are not known."""
    return _find_names(env_id, "box_actions", config or {})


def state_names(env_id: str | None, config: Mapping[str, Any] | None = None) -> list[str] | None:
    """Return the names of the axes of an environment's observations; None if they are not known.

    They hold for the environment's own observations: check their number before using them.
    """
    return _find_names(env_id, "state", config or {})


def _find_names(env_id: object, kind: str, config: Mapping[str, Any]) -> list[str] | None:
    names, is_box = config.get("names") or {}, (config.get("action_space") or {}).get("type") == "Box"
    stored = names.get("observations" if kind == "state" else "actions")
    if stored and (kind == "state" or is_box == (kind == "box_actions")):
        return list(stored)
    if not isinstance(env_id, str):
        return None
    # "gymnasium.envs.box2d:LunarLander-v3", "ALE/Pong-v5" and "LunarLander-v3" all name an environment by their end.
    name = re.sub(r"-v\d+$", "", env_id.rpartition(":")[2])
    table, family = _read_labels(), name.partition("-")[0]  # of MiniGrid-DoorKey-8x8
    entry = table.get(name) or (table.get(family) if family in ("MiniGrid", "BabyAI") else None) or {}
    return list(entry[kind]) if entry.get(kind) else None


@cache
def _read_labels() -> Mapping[str, Mapping[str, list[str]]]:
    table = tomllib.loads((files("whence.stored.agents") / "labels.toml").read_text(encoding="utf-8"))
    return {name: table[entry["like"]] if "like" in entry else entry for name, entry in table.items()}
