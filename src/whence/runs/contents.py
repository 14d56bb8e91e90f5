"""What a directory holds: a run, a comparison, a sweep or several runs."""

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
    if any((path / "curves").glob("*.jsonl")) or any(map(_is_run, runs.glob("*/*/seed_*"))):
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
    content, runs = find_content(path), _list_runs(path)
    remedy = "Give the directory that was passed as `run` (--run)."
    if runs:
        remedy = f"Give one of the runs in it: {', '.join(runs[:4])}{', ...' if len(runs) > 4 else '.'}"
    elif content == "sweep":
        remedy = f"Finished runs of a sweep are curves: see whence table {path}, or sweep with --keep-runs."
    if content is not None:
        return f"{path} holds a {content}, and one run is needed. {remedy}"
    if runs:
        return f"{path} is a folder of runs, and one run is needed. {remedy}"
    if _is_run(path.parent):
        return f"{path} is no run directory, and {path.parent} is one. Give that."
    if path.is_dir():
        return f"{path} holds no config.json, so it is no run directory. {remedy}"
    if names := _list_runs(path.parent):
        remedy = suggest(str(path), names).strip()
    return f"{path} is {'a file, and a run is a directory' if path.exists() else 'not there'}. {remedy}"


def _list_runs(folder: Path) -> list[str]:
    """List the runs directly in a folder, or in the comparison or the sweep that it holds."""
    patterns = "*", "runs/*", "runs/*/seed_*", "runs/*/*/seed_*"
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")]
    return [str(path) for path in paths if _is_run(path)]


def _is_run(path: Path) -> bool:
    """Return whether a directory's config.json is marked as a run's, be it damaged or not."""
    try:
        return f'"{FORMAT}"' in (path / "config.json").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError:  # it may not be read; whoever wrote it does not want it replaced
        return True
