"""Whether the laboratory is there: the command works for runs without it."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from whence.core import WhenceError

if TYPE_CHECKING:
    from whence.runs import RunDirectory

HAS_LABORATORY = find_spec("whence.lab") is not None


def require_laboratory(what: str) -> None:
    """Refuse what only the laboratory can do.

    Raises:
        WhenceError: the laboratory is not there.
    """
    if not HAS_LABORATORY:
        raise WhenceError(f"{what} needs the laboratory, whence.lab, which this installation of whence lacks.")


def describe_training(run: "RunDirectory") -> str:
    """Return in a sentence how the laboratory trained a run; "" if it did not, or is not there."""
    if not HAS_LABORATORY:
        return ""
    from whence.lab import describe_arm

    return describe_arm(run)
