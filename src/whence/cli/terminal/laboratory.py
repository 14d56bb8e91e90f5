"""Whether the laboratory is there: the command works for runs without it."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from whence.core import WhenceError

if TYPE_CHECKING:
    from whence.runs import RunDirectory

HAS_LABORATORY = find_spec("whence.lab") is not None


def require_laboratory(what: str) -> None:
    """Refuse what only the laboratory can do, if it is not there."""
    if not HAS_LABORATORY:
        raise WhenceError(f"{what} needs the laboratory, whence.lab, which this installation of whence lacks.")


def describe_training(run: "RunDirectory") -> str:
    """Return in a sentence what the arm of an agent's run does; "" if it has none that is known."""
    if not HAS_LABORATORY or run.is_language:
        return ""
    from whence.lab import ARMS

    name, drop = str(run.experiment.get("arm")), run.experiment.get("drop")
    share = f"{100 * drop:g}%" if isinstance(drop, int | float) else "a share"
    return f"{name}: {ARMS[name].about.replace('the share `drop`', share)}." if name in ARMS else ""
