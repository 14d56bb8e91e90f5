"""The description of a run in its directory: settings, reward functions and data, in JSON types."""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from whence.core import describe, describe_scoring
from whence.selection import SelectionRule

_SECRET = re.compile(r"(^|_)(token|password|secret|credentials?)$|(api|access|private)_?key|auth_token", re.IGNORECASE)
_NO_SECRETS = ("bos_token", "eos_token", "pad_token", "unk_token")
_USER_OF_URL = re.compile(r"//[^/@\s]+@")

_MOST_ROWS = 1000
"""Rows of a data set that are read for its digest."""


def describe_settings(value: Any) -> Any:
    """Return a setting as data, see `describe`, without its secrets.

    These are entries whose names say that they are secret, and users and passwords in addresses.
    """
    return _hide_secrets(describe(value))


def _hide_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _hide_secrets(one) for name, one in value.items() if not is_secret(name)}
    if isinstance(value, list):
        return [*map(_hide_secrets, value)]
    return _USER_OF_URL.sub("//", value) if isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """Tell whether the name of a setting says that it is secret."""
    return name not in _NO_SECRETS and _SECRET.search(name) is not None


def describe_reward(reward: Any) -> Any:
    """Return a reward function as data; another object by its class's name, and a model also by where it is from."""
    if isinstance(reward, partial) or hasattr(reward, "__qualname__"):
        return describe_settings(reward)
    source = getattr(getattr(reward, "config", None), "_name_or_path", "")
    return describe(type(reward)) + (f" of {source}" if source else "")


def describe_rows(rows: Any) -> dict[str, Any] | None:
    """Return the number of rows of data, and a digest of up to `_MOST_ROWS` of them; None if they cannot be counted."""
    if not hasattr(rows, "__len__"):
        return None
    count = len(rows)
    places = range(0, count, max(1, -(-count // _MOST_ROWS)))
    digest = hashlib.blake2b(digest_size=16)
    for place in places:
        digest.update(json.dumps(describe_settings(rows[place]), sort_keys=True).encode() + b"\n")
    return {"rows": count, "digest": digest.hexdigest()}


def describe_rows_scored(model: Any, rule: SelectionRule, scoring: Any) -> dict[str, Any]:
    """Return which model's rows are scored, and how, in JSON types."""
    network = getattr(model, "language_model", model)
    return {
        "kind": "language",
        "model": getattr(network.config, "_name_or_path", "") or None,
        **describe_scoring(rule, scoring.target, scoring.objective),
        "leave_one_out": scoring.leave_one_out,
    }


def describe_run(trainer: Any, model: Any, rewards: Iterable[Any], **data: Any) -> dict[str, Any]:
    """Return the run directory's description of a training, in JSON types; `data` are the data sets by their names."""
    return {
        **describe_rows_scored(model, trainer.rule, trainer.scoring),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rewards": [*map(describe_reward, rewards)],
        "data": {name: describe_rows(rows) for name, rows in data.items()},
        "engine": trainer.scoring.engine,
        "processes": trainer.accelerator.num_processes,
        "device": str(trainer.accelerator.device),
    }
