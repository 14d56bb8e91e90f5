"""The config.json of run directories: read, and compared."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from whence.errors import RunDirectoryError
from whence.runs.contents import FORMAT, explain_no_run

VERSION = 2
"""Of a run's config.json."""

_MOST_CHANGES = 5
"""Changes that a message lists."""


def read_config_file(path: Path, *, any_version: bool = False) -> dict[str, dict[str, Any]]:
    """Read a config.json: its objects `config`, `versions` and `notes`.

    Args:
        path: the file.
        any_version: read that of another version, too, whose objects may be others.

    Raises:
        RunDirectoryError: it is missing, cannot be read, is none that whence wrote, or is of another version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise RunDirectoryError(explain_no_run(path.parent)) from None
    except (OSError, ValueError, RecursionError) as broken:
        raise RunDirectoryError(
            f"{path} cannot be read as JSON: {broken}. Restore it, or run again into a new directory."
        ) from None
    mark = document.get("format") if isinstance(document, dict) else None
    if mark != FORMAT:
        raise RunDirectoryError(
            f"{path} is marked {mark!r}, and a run's config.json {FORMAT!r}: {path.parent} is no run directory. Choose "
            "another one."
        )
    parts = {name: document.get(name, {}) for name in ("config", "versions", "notes")}
    if any_version:
        return parts
    if document.get("version") != VERSION or not all(isinstance(part, dict) for part in parts.values()):
        raise RunDirectoryError(
            f"{path} is marked as version {document.get('version')!r}; this version of whence reads {FORMAT!r}, "
            f"version {VERSION}. Read it with the version that wrote it, or run again into a new directory."
        )
    return parts


def to_plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as it comes back from JSON, which turns tuples into lists.

    Raises:
        RunDirectoryError: it is not JSON.
    """
    try:
        plain: dict[str, Any] = json.loads(json.dumps(config, allow_nan=False))
    except (TypeError, ValueError) as wrong:
        raise RunDirectoryError(
            f"The configuration is not JSON ({wrong}): {config}. Write numbers like inf as text."
        ) from None
    return plain


def list_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = ()) -> list[str]:
    """List, for people, the settings in which two configurations differ.

    An empty table of settings and a value of None are settings that are not there.

    Args:
        before: the configuration of the run that is there.
        now: the other.
        but: names of settings that may differ; `outer.inner` for nested settings.
    """
    old, new = _flatten_settings(before), _flatten_settings(now)
    return [
        f"{name} was {repr(old[name]) if name in old else 'not set'}, "
        f"now {repr(new[name]) if name in new else 'not set'}"
        for name in sorted((old.keys() | new.keys()) - set(but))
        if old.get(name) != new.get(name)
    ]


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = ()) -> str:
    """Say in one clause in what two configurations differ; "" if they do not. See `list_changes`."""
    changes = list_changes(before, now, but=but)
    rest = f"; and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
    return "; ".join(changes[:_MOST_CHANGES]) + rest


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `outer.inner`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, Mapping)
        flat |= _flatten_settings(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def strip_addresses(text: str) -> str:
    """Return an object's text without memory addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
