"""What whence raises: every message says what came, what is needed and how to fix it."""

import difflib
from collections.abc import Iterable


class WhenceError(ValueError):
    """Base of every error that whence raises on purpose."""


class InvalidRecords(WhenceError):
    """Records that cannot be scored: lengths that differ, a value that is not finite, a buffer not full."""


class Unsupported(WhenceError):
    """An algorithm, policy, space or layer that whence does not cover; the message names it and says why."""


class NonFinite(WhenceError):
    """A gradient or a score that is NaN or infinite; the message names the record and the parameter."""


class InvalidInfluence(WhenceError):
    """Scores used with records, or with other scores, that they do not belong to."""


class RunDirectoryError(WhenceError):
    """A run directory that cannot be read, or that holds a run of another configuration."""


def suggest(name: str, known: Iterable[str], *, limit: int = 3, otherwise: str | None = None) -> str:
    """Return ' Did you mean ...?' with the known names nearest to `name`.

    Where none is near: `otherwise`, or where that is None the known names.
    """
    names = sorted(known)
    by_lower = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.5)
    if close:
        return f" Did you mean {', '.join(by_lower[lower] for lower in close)}?"
    if otherwise is not None:
        return otherwise
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f" Known: {shown}."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class's name if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]
