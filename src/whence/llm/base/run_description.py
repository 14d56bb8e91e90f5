"""The description of a run in its directory: settings, reward functions and data, in JSON types, and versions."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from importlib.metadata import version
from typing import Any

from whence.core import target_name
from whence.runs import strip_addresses

_SECRET = re.compile(r"(^|_)(token|password|secret|credentials?)$|(api|access|private)_?key|auth_token", re.IGNORECASE)
_NO_SECRETS = ("bos_token", "eos_token", "pad_token", "unk_token")
_USER_OF_URL = re.compile(r"//[^/@\s]+@")

_MOST_ROWS = 1000
"""Rows of a data set that are read for its digest."""


def to_json(value: Any) -> Any:
    """Return a setting in JSON types: enums by their values, other objects by their names.

    Secrets are left out: entries whose names say that they are, and users and passwords in addresses.
    """
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, str):
        return _USER_OF_URL.sub("//", value)
    if value is None or isinstance(value, bool | int | float):
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items() if not is_secret(str(name))}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "tolist"):  # arrays, tensors, and their numbers
        return to_json(value.tolist())
    return name_object(value)


def is_secret(name: str) -> bool:
    """Tell whether the name of a setting says that it is secret."""
    return name not in _NO_SECRETS and _SECRET.search(name) is not None


def name_object(value: Any) -> str:
    """Return the qualified name of a function or class, or of another object's class; of a model also where it is from.

    A `partial` is named by its function and its arguments.
    """
    if isinstance(value, partial):
        arguments = json.dumps(to_json([value.args, value.keywords]), sort_keys=True)
        return f"{name_object(value.func)} with {arguments}"
    named = value if hasattr(value, "__qualname__") else type(value)
    source = getattr(getattr(value, "config", None), "_name_or_path", "")
    return f"{named.__module__}.{named.__qualname__}" + (f" of {source}" if source else "")


def describe_rows(rows: Any) -> dict[str, Any] | None:
    """Return the number of rows of data, and a digest of up to `_MOST_ROWS` of them; None if they cannot be counted."""
    if not hasattr(rows, "__len__"):
        return None
    count = len(rows)
    places = range(0, count, max(1, -(-count // _MOST_ROWS)))
    digest = hashlib.blake2b(digest_size=16)
    for place in places:
        digest.update(json.dumps(to_json(rows[place]), sort_keys=True).encode() + b"\n")
    return {"rows": count, "digest": digest.hexdigest()}


def read_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each library."""
    return {name: version("whence-rl" if name == "whence" else name) for name in libraries}


def describe_run(
    trainer: Any,
    model: Any,
    *,
    about: Mapping[str, Any],
    rewards: Sequence[Any],
    data: Mapping[str, Any],
    rounds: int,
    seed: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the run directory's description of a training, in JSON types, with further settings of the trainer."""
    network = getattr(model, "language_model", model)
    return {
        "kind": "language",
        **about,
        "model": getattr(network.config, "_name_or_path", "") or None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rule": strip_addresses(repr(trainer.rule)),
        "target": strip_addresses(target_name(trainer.scoring.target)),
        "leave_one_out": trainer.scoring.leave_one_out,
        "rewards": [name_object(reward) for reward in rewards],
        "data": {name: describe_rows(rows) for name, rows in data.items()},
        "objective": strip_addresses(repr(trainer.scoring.objective)),
        "engine": trainer.scoring.engine,
        "processes": trainer.accelerator.num_processes,
        "device": str(trainer.accelerator.device),
        "rounds": rounds,
        "seed": seed,
        **settings,
    }
