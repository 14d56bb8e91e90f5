"""What a directory holds: a run, a comparison or a sweep."""

from pathlib import Path
from typing import Literal, TypeAlias

from whence.errors import RunDirectoryError

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


def _is_run(path: Path) -> bool:
    """Return whether a directory's config.json is marked as a run's, be it damaged or not."""
    try:
        return f'"{FORMAT}"' in (path / "config.json").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    except OSError:  # it may not be read; whoever wrote it does not want it replaced
        return True
