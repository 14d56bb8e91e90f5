"""Laboratories on disk: each is made once, complete or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STALE = 3600.0  # seconds; no laboratory takes an hour to make, so an older unfinished one is from a killed process


def make_once(
    name: str, description: Mapping[str, Any], make: Callable[[Path], None], cache: str | Path | None = None
) -> Path:
    """Return the directory of a laboratory; if it does not exist, make it.

    Args:
        name: the laboratory's name.
        description: all settings that it depends on, in JSON types; each description has its own directory.
        make: fills an empty directory.
        cache: directory of laboratories; None: `$XDG_CACHE_HOME/whence`, or `~/.cache/whence`.
    """
    text = json.dumps(description, indent=2, sort_keys=True)
    folder = _default_cache() if cache is None else Path(cache)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    # It is made under another name and then renamed, so that its directory is complete or does not exist.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=folder) as temporary:
        unfinished = Path(temporary) / path.name
        make(unfinished)
        (unfinished / "settings.json").write_text(text, encoding="utf-8")
        try:
            unfinished.rename(path)
        except OSError:
            if not path.exists():  # otherwise another process was faster, and made the same laboratory
                raise
    return path


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "whence"


def _remove_stale(path: Path) -> None:
    for leftover in path.parent.glob(f".{path.name}.*"):
        # Another process may be making the same laboratory, or may have just removed this directory.
        try:
            is_stale = time.time() - leftover.stat().st_mtime > _STALE
        except FileNotFoundError:
            continue
        if is_stale:
            shutil.rmtree(leftover, ignore_errors=True)
