"""Laboratories on disk: made once, whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STALE = 3600.0  # seconds; no laboratory takes an hour to make, so an older half-made one was left by a killed process


def made_once(
    name: str, described: Mapping[str, Any], make: Callable[[Path], None], cache: str | Path | None = None
) -> Path:
    """Return the directory of a laboratory, which is made where it is not there.

    Args:
        name: of the laboratory.
        described: everything it depends on, in JSON types; another description is another directory.
        make: fills a directory.
        cache: directory of made laboratories; None: `$XDG_CACHE_HOME/whence`, or `~/.cache/whence`.
    """
    text = json.dumps(described, indent=2, sort_keys=True)
    place = _home() if cache is None else Path(cache)
    path = place / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if path.exists():
        return path
    place.mkdir(parents=True, exist_ok=True)
    _remove_stale(path)
    # Made beside its place and then renamed: under its name there is a whole one or none.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=place) as temporary:
        made = Path(temporary) / path.name
        make(made)
        (made / "settings.json").write_text(text, encoding="utf-8")
        try:
            made.rename(path)
        except OSError:
            if not path.exists():  # else another process was quicker, and its laboratory is the same
                raise
    return path


def _home() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "whence"


def _remove_stale(path: Path) -> None:
    for left in path.parent.glob(f".{path.name}.*"):
        # Another process may be making the same one now, or have just tidied up.
        try:
            old = time.time() - left.stat().st_mtime > _STALE
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)
