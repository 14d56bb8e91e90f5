"""The config.json of run directories: read, and compared."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from whence.errors import RunDirectoryError
from whence.runs.contents import FORMAT, explain_no_run
from whence.runs.files import system_reason

VERSION = 1
"""Of a run's config.json."""


def read_document(path: Path) -> dict[str, Any]:
    """Read a config.json that whence wrote, in any version.

    Raises:
        RunDirectoryError: it is missing, cannot be read, or is none that whence wrote.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise RunDirectoryError(explain_no_run(path.parent)) from None
    except OSError as refusal:
        raise RunDirectoryError(
            f"{path} cannot be read: {system_reason(refusal)}. Give yourself the right to read it."
        ) from refusal
    except (ValueError, RecursionError) as broken:
        raise RunDirectoryError(
            f"{path} is not readable as JSON: {broken}. whence writes this file whole, so something else changed it: "
            "restore it, or run again into a new directory."
        ) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        mark = document.get("format") if isinstance(document, dict) else None
        raise RunDirectoryError(
            f"{path} is marked {mark!r}, and a run's config.json {FORMAT!r}: {path.parent} is no run directory. Choose "
            "another one."
        )
    return document


def read_parts(path: Path) -> dict[str, dict[str, Any]]:
    """Read a config.json of this version: the objects `config`, `versions` and `notes`.

    Raises:
        RunDirectoryError: see `read_document`; or it is of another version, or lacks an object.
    """
    document = read_document(path)
    if document.get("version") != VERSION:
        raise RunDirectoryError(
            f"{path} is marked as version {document.get('version')!r}; this version of whence reads {FORMAT!r}, "
            f"version {VERSION}. Read it with the version that wrote it, or run again into a new directory."
        )
    parts = {"config": document.get("config"), "versions": document.get("versions"), "notes": document.get("notes", {})}
    if not all(isinstance(part, dict) for part in parts.values()):
        raise RunDirectoryError(
            f"{path} needs the objects `config` and `versions`. whence writes both, so something else changed the "
            "file: restore it, or run again into a new directory."
        )
    for name in ("save_every", "policies_every"):
        if type(count := parts["notes"].get(name, 1)) is not int or count < 0:
            raise RunDirectoryError(
                f"{path} notes {count!r} as {name}; a number of rounds is needed. Restore the file."
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
    """List, for people, the settings in which two configurations differ, except those in `but`.

    An empty table of settings and a value of None are settings that are not there.
    """
    old, new = _flatten_settings(before), _flatten_settings(now)
    names = sorted((old.keys() | new.keys()) - set(but))
    return [
        f"{name} was {_describe_setting(old, name)}, now {_describe_setting(new, name)}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `outer.inner`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(value, Mapping)
        flat |= _flatten_settings(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _describe_setting(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


def describe_change(
    before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = (), only: Collection[str] | None = None
) -> str | None:
    """Say in one clause what differs between two runs' configurations; None: nothing.

    Args:
        before: the configuration of the run that is there.
        now: the configuration of the run that is to be written there.
        but: names of settings that may differ.
        only: names of those to compare, without the names inside them; None: all.
    """
    shared = {name: value for name, value in before.items() if only is None or name in only}
    changes = list_changes(shared, now, but=but)
    if not changes:
        return None
    kinds = _name_kind(before), _name_kind(now)
    if kinds[0] != kinds[1] and None not in kinds:  # they share few settings, so that a list would say nothing
        return f"it is {kinds[0]}, and this is {kinds[1]}"
    rest = f"; and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
    return "; ".join(changes[:_MOST_CHANGES]) + rest


_MOST_CHANGES = 5
"""That a message lists."""


def _name_kind(config: Mapping[str, Any]) -> str | None:
    """Return what wrote a run, by its configuration."""
    if config.get("kind") == "language" or "experiment" in config:
        return "a language model's run"
    if "arm" in config:
        return "an agent's run of the command whence"
    return "an agent's run of a script" if "algorithm" in config else None


def strip_addresses(text: str) -> str:
    """Return an object's text without memory addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
