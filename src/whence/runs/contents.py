"""The contents of a directory: a run, a comparison, a sweep or several runs."""

from pathlib import Path
from typing import Literal, TypeAlias

from whence.errors import RunDirectoryError, suggest

FORMAT = "whence-run"
"""The mark of a run's config.json."""

Content: TypeAlias = Literal["run", "comparison", "sweep"]


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
