"""The config.json of run directories: read and compared; and by it, what a directory holds."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from whence.core import RunDirectoryError, parse_document, show, suggest
from whence.runs.files import check_links, is_empty

FORMAT = "whence-run"
"""The mark of a run's config.json."""

VERSION = 3
"""Of a run's config.json."""

Content: TypeAlias = Literal["run", "comparison", "sweep"]


def check_config_file(path: Path) -> dict[str, Any]:
    """Return the document of a config.json, of any version.

    Raises:
        RunDirectoryError: it is missing, cannot be read, or is none that whence wrote.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise RunDirectoryError(explain_no_run(path.parent)) from None
    except OSError as broken:
        raise RunDirectoryError(f"{path} cannot be read: {broken}. Restore it, or run into a new directory.") from None
    document = parse_document(path, text, RunDirectoryError)
    if (mark := document.get("format")) != FORMAT:
        raise RunDirectoryError(
            f"{path} is marked {mark!r}, and a run's config.json {FORMAT!r}: {path.parent} is no run directory. Choose "
            "another one."
        )
    return document


def read_config_file(path: Path) -> dict[str, dict[str, Any]]:
    """Read a config.json: its objects `config`, `versions` and `notes`.

    Raises:
        RunDirectoryError: see `check_config_file`; or it is of another version.
    """
    document = check_config_file(path)
    parts = {name: document.get(name, {}) for name in ("config", "versions", "notes")}
    if document.get("version") != VERSION or not all(isinstance(part, dict) for part in parts.values()):
        raise RunDirectoryError(
            f"{path} is marked as version {document.get('version')!r}; this version of whence reads {FORMAT!r}, "
            f"version {VERSION}. Read it with the version that wrote it, or run again into a new directory."
        )
    return parts


def list_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = ()) -> list[str]:
    """List, for people, the settings in which two configurations differ, but those named `outer.inner` in `but`.

    An empty table of settings and a value of None are settings that are not there.
    """
    old, new = _flatten_settings(before), _flatten_settings(now)
    return [
        f"{name} was {repr(show(old[name])) if name in old else 'not set'}, "
        f"now {repr(show(new[name])) if name in new else 'not set'}"
        for name in sorted((old.keys() | new.keys()) - set(but))
        if old.get(name) != new.get(name)
    ]


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str]) -> None:
    """Refuse to continue the run in a directory in another configuration; see `list_changes`."""
    if changes := list_changes(before, now, but=but):
        rest = [f"and {len(changes) - 5} more"] if len(changes) > 5 else []
        shown = "; ".join([*changes[:5], *rest])
        raise RunDirectoryError(
            f"{path} holds a run of another configuration ({shown}). Choose another directory, or pass overwrite=True "
            "(--overwrite) to replace the run."
        )


def _flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under names such as `outer.inner`; a rule, a schedule and their like are one setting."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        nested = isinstance(show(value), Mapping)
        flat |= _flatten_settings(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def find_content(path: Path) -> Content | None:
    """Return what a directory holds, finished or not; None if it is none of them, or is not there."""
    if _is_run(path):
        return "run"
    runs = path / "runs"
    if (path / "comparison.json").exists() or any(map(_is_run, runs.glob("*/seed_*"))):
        return "comparison"
    if (path / "curves.parquet").exists() or any(map(_is_run, runs.glob("*/*/seed_*"))):
        return "sweep"
    return None


def check_content(path: Path, content: Content) -> None:
    """Refuse a directory that holds something else than what is to be written there.

    Raises:
        RunDirectoryError: names what the directory holds.
    """
    if (other := find_content(path)) not in (content, None):
        raise RunDirectoryError(
            f"{path} holds a {other}, and a {content} needs a directory of its own. Choose a new or empty directory."
        )


def check_place(path: Path, *, shared: bool) -> None:
    """Refuse to write a run into a directory that holds something else; a `shared` one may hold other files, too."""
    if (path / "config.json").exists():
        check_config_file(path / "config.json")
        check_links(path)
    elif path.exists() and (not path.is_dir() or not (shared or is_empty(path))):
        raise RunDirectoryError(
            f"{path} exists and holds no config.json, so it is no run of whence's. Choose a new or empty directory."
        )
    check_content(path, "run")


def explain_no_run(path: Path) -> str:
    """Say why a path is no run's directory, and what to give in its place."""
    content = find_content(path) or ("folder of runs" if _list_runs(path) else None)
    if content is not None:
        runs = ", ".join(_list_runs(path)[:4]) or f"none of them is kept: whence table {path}"
        return f"{path} holds a {content}, and one run is needed. Give one of the runs in it: {runs}."
    if _is_run(path.parent):
        return f"{path} is no run directory, and {path.parent} is one. Give that."
    reason = "holds no config.json, so it is no run directory" if path.is_dir() else "is not there"
    if not path.is_dir() and path.exists():
        reason = "is a file, and a run is a directory"
    names = [] if path.exists() else _list_runs(path.parent)
    return f"{path} {reason}.{suggest(str(path), names) if names else ' Give the directory that was passed as --run.'}"


def _list_runs(folder: Path) -> list[str]:
    """List the runs directly in a folder, or in the comparison or the sweep that it holds."""
    patterns = "*", "runs/*", "runs/*/seed_*", "runs/*/*/seed_*"
    return [str(path) for pattern in patterns for path in sorted(folder.glob(pattern)) if _is_run(path)]


def _is_run(path: Path) -> bool:
    """Return whether a directory's config.json is marked as a run's, be it damaged or not."""
    try:
        return f'"{FORMAT}"' in (path / "config.json").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError:  # it may not be read; whoever wrote it does not want it replaced
        return True
