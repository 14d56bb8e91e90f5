"""Signatures of configurations, by which the runs are known that this user made on this machine."""

import hmac
import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from platformdirs import user_state_path

from whence.core import write_atomically

SIGNATURE = ".signature"
"""The file of a run's signature, which is no part of what the run is."""

_REFUSED: set[Path] = set()
"""Keys that could not be had, which is said once of each."""

log = logging.getLogger("whence")

_BYTES = 32
"""The length of the key, and of what HMAC-SHA256 returns."""


def sign_config(path: Path, config: Mapping[str, Any]) -> None:
    """Sign the configuration, in JSON types, of the run in a directory, if this user can have a key.

    The signature holds for this directory alone: not for a copy, nor for a run that was moved.
    """
    if (key := _read_key(is_needed=True)) is not None:
        with write_atomically(path / SIGNATURE) as temporary:
            temporary.write_text(_sign(key, path, config), encoding="ascii")


def is_signed(path: Path, config: Mapping[str, Any]) -> bool:
    """Return whether this user signed a configuration in this directory, on this machine."""
    with suppress(OSError):
        signature, key = (path / SIGNATURE).read_bytes(), _read_key()
        return key is not None and hmac.compare_digest(_sign(key, path, config).encode(), signature)
    return False


def explain_distrust(path: Path, *, is_language: bool = False) -> str:
    """Return why nothing runs that a run's configuration names, and how to let it, in one line."""
    what = "model and data are not loaded: they" if is_language else "environment is not made: it"
    name = "" if is_language else ", or name the environment by --env or env="
    reason = f"{path} is not signed as a run that you made in this place, so its {what} may run code"
    return f"{reason}. Trust it by --trust or RunDirectory.open(path, trust=True){name}."


def _sign(key: bytes, path: Path, config: Mapping[str, Any]) -> str:
    return hmac.digest(key, json.dumps([str(path.resolve()), config]).encode(), "sha256").hex()


def _read_key(*, is_needed: bool = False) -> bytes | None:
    """Return this user's key; None, which is said once, if it cannot be had. A missing key is made if it is needed."""
    file = user_state_path("whence") / "key"
    try:
        if is_needed and not file.exists():
            _make_key(file)
        status, key = file.stat(), file.read_bytes()
        is_private = os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o077)
        if is_private and len(key) == _BYTES:
            return key
        reason = f"{file} has to hold {_BYTES} bytes and be yours alone, with mode 0600; deleted, it is made anew"
    except OSError as refusal:
        if isinstance(refusal, FileNotFoundError) and not is_needed:
            return None
        reason = str(refusal)
    if file not in _REFUSED:
        _REFUSED.add(file)
        log.warning("No run is signed as yours, so each needs --trust or trust=True: %s.", reason)
    return None


def _make_key(file: Path) -> None:
    """Write a random key that no one else can read, unless another process is first."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent) as temporary, suppress(FileExistsError):
        temporary.write(secrets.token_bytes(_BYTES))
        temporary.flush()
        os.fsync(temporary.fileno())
        os.link(temporary.name, file)
