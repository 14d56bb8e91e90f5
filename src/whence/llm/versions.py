"""The versions of the libraries that a run was trained with."""

import logging
from collections.abc import Iterable
from importlib.metadata import version

from whence.runs import RunDirectory
from whence.runs.config_file import list_changes

log = logging.getLogger("whence")


def read_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each library."""
    return {name: version(name) for name in libraries}


def note_changed_versions(run: RunDirectory, libraries: Iterable[str], number: int) -> None:
    """Say, in the log and in the run's note "resumed", that training goes on after a round with other versions."""
    changes = list_changes(run.versions, read_versions(libraries))
    if not changes:
        return
    reason = "; ".join(changes)
    log.warning("The training goes on after round %d with other versions: %s.", number, reason)
    run.note(resumed=[*run.notes.get("resumed", []), {"after_round": number, "reason": reason}])
