"""Files of runs that are cut off, as after a power cut: which they are, and that they are named."""

import json
import logging
import os
from pathlib import Path
from typing import get_args

from safetensors import SafetensorError, safe_open

from whence.core import require_file
from whence.runs.files import PerRound, RoundTensors, list_numbered

log = logging.getLogger("whence")


def is_whole(path: Path) -> bool:
    """Return whether a Parquet, safetensors or JSON file is not cut off; it may have other bytes nevertheless."""
    try:
        if require_file(path).suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                return True
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        if path.suffix == ".parquet":
            with path.open("rb") as file:
                file.seek(-4, os.SEEK_END)
                return file.read() == b"PAR1"
        return True
    except (OSError, RecursionError, SafetensorError, ValueError):
        return False


def list_damaged(path: Path, last: int) -> list[tuple[int, Path]]:
    """List the files of rounds up to `last` that are cut off, as after a power cut, each with its round."""
    folders = (*get_args(PerRound), *get_args(RoundTensors))
    files = [(number, path / folder / name) for folder in folders for name, number in list_numbered(path / folder)]
    return sorted((number, file) for number, file in files if number <= last and not is_whole(file))


def report_damage(path: Path, last: int) -> None:
    """Name, in the log, the files of a run's rounds up to `last`, and its tables, that are cut off."""
    damaged = [file for _, file in list_damaged(path, last)]
    for file in [*damaged, *(file for file in path.glob("*.parquet") if not is_whole(file))]:
        log.warning("%s is damaged, as after a power cut. Restore it from a copy.", file)
