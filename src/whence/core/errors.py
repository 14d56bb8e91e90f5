"""The errors that whence raises. Every message says what came, what is needed and how to fix it."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path


class WhenceError(ValueError):
    """Base class of every error that whence raises on purpose."""


class InvalidRecords(WhenceError):
    """Records that cannot be scored: lengths differ, a value is not finite, a buffer is not full."""


class Unsupported(WhenceError):
    """whence does not cover this algorithm, policy, space or layer; the message names it and says why."""


class NonFinite(WhenceError):
    """A number is NaN or infinite; the message names the record, and the parameter if it is a gradient.

    Args:
        message: what came, what is needed and how to fix it.
        record_ids: ids of the record, or of the minibatch, that it was found in; empty: of none.
        parameter: the first parameter whose gradient is not finite, or None.
        round: the number of the round that it was found in, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        record_ids: Iterable[int] = (),
        parameter: str | None = None,
        round: int | None = None,
    ) -> None:
        super().__init__(message if round is None else f"Round {round}: {message}")
        self.record_ids, self.parameter, self.round = tuple(record_ids), parameter, round


class InvalidInfluence(WhenceError):
    """Scores are used with records, or with other scores, that they do not belong to."""


class ReplayError(WhenceError):
    """An episode cannot be played again; the message says what is missing."""


class RunDirectoryError(WhenceError):
    """A run directory cannot be read or written, or holds a run of another configuration."""


@contextmanager
def explain_damage(path: Path, kind: str, package: str, remedy: str) -> Iterator[None]:
    """Raise a `WhenceError` in place of whatever reading a damaged file may raise, or a package that is missing.

    `kind` is what the file is read as, `package` what reads it, as pip calls it, and `remedy` a sentence of what to do.
    """
    try:
        yield
    except WhenceError:
        raise
    except ImportError as error:
        raise WhenceError(f"{path} needs {package} to be read: pip install {package}.") from error
    except Exception as error:
        raise WhenceError(f"{path} cannot be read as {kind}: {first_line(error).rstrip('.')}. {remedy}") from error


def check_flag(name: str, value: object) -> None:
    """Refuse, with a `WhenceError`, a flag that is neither True nor False, as "no", which Python takes for True."""
    if not isinstance(value, bool):
        raise WhenceError(f"{name} is {value!r}; True or False is needed.")


def suggest(name: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """Return ' Did you mean ...?' with at most three known names, those most similar to `name`.

    If none is similar, it is `otherwise`; or if that is None, a list of the known names, in alphabetical order.
    """
    names = sorted(known)
    by_lower = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    if close:
        return f" Did you mean {', '.join(by_lower[lower] for lower in close)}?"
    if otherwise is not None:
        return otherwise
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f" Known: {shown}."


def require_names(package: str, thing: object, names: Iterable[str]) -> None:
    """Raise an `Unsupported` if `thing`, of the installed release of `package`, lacks a name that whence needs."""
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise Unsupported(
            f"{package} {version(package)} has no `{missing[0]}`, which whence needs. Install an earlier release of "
            "it, or a later one of whence."
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class's name if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]
