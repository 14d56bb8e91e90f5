"""Transformers' checkpoints of a training by TRL: which of them are whole, and what whence adds to each.

Transformers writes a checkpoint's files one by one, and some of them are pickles (optimizer.pt, rng_state.pth), which
Transformers itself loads as plain tensors and arrays (`weights_only=True`). whence loads none of them: it reads their
bytes for a checksum. Its own file comes last, so a checkpoint without it was being written when the process was killed.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whence.errors import RunDirectoryError
from whence.runs import load_tree, save_tree

log = logging.getLogger("whence")

_FILE = "whence.safetensors"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def _list_steps(output_dir: str | Path) -> dict[int, Path]:
    """Return the folders of Transformers' checkpoints, whole or not, by the optimiser's steps before each."""
    matches = ((_FOLDER.fullmatch(folder.name), folder) for folder in Path(output_dir).glob("checkpoint-*"))
    return dict(sorted((int(match[1]), folder) for match, folder in matches if match))


def seal_checkpoint(folder: Path, run_id: str, state: Mapping[str, Any]) -> None:
    """Add whence's file to a checkpoint that Transformers has written: all files' checksums, and a state.

    Args:
        folder: the checkpoint.
        run_id: the identity of the run, see `find_checkpoint`.
        state: what training needs besides Transformers' files, of plain values, arrays and tensors.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    save_tree(folder / _FILE, {"run": run_id, "files": _compute_checksums(folder), "state": state})


def find_checkpoint(output_dir: str | Path, run_id: str) -> Path | None:
    """Return a run's latest checkpoint that is whole; damaged ones are named in the log and passed over.

    Args:
        output_dir: where Transformers writes checkpoints.
        run_id: the run's identity; checkpoints of another run that was in the directory before are passed over.
    """
    return next((folder for folder in reversed(_list_steps(output_dir).values()) if _is_whole(folder, run_id)), None)


def _is_whole(folder: Path, run_id: str) -> bool:
    try:
        content = load_tree(folder / _FILE)
    except RunDirectoryError as damage:
        log.warning("%s is no whole checkpoint (%s). The one before it is taken, if there is one.", folder, damage)
        return False
    now = _compute_checksums(folder)
    changed = [name for name, checksum in content["files"].items() if now.get(name) != checksum]
    if changed and content["run"] == run_id:
        log.warning("%s is damaged. The checkpoint before it is taken, if there is one.", folder / changed[0])
    return content["run"] == run_id and not changed


def delete_later(output_dir: str | Path, step: int) -> None:
    """Delete the checkpoints after a step, damaged or not: training comes there again.

    Transformers counts damaged ones among those that it keeps.
    """
    for later, folder in _list_steps(output_dir).items():
        if later > step:
            shutil.rmtree(folder, ignore_errors=True)


def read_state(folder: str | Path) -> dict[str, Any]:
    """Return the state that `seal_checkpoint` was given; empty if whence did not write the checkpoint."""
    file = Path(folder) / _FILE
    return dict(load_tree(file)["state"]) if file.exists() else {}


def read_progress(folder: str | Path) -> Mapping[str, Any]:
    """Return Transformers' description of a checkpoint: `global_step`, `max_steps`, `epoch` and more."""
    progress: Mapping[str, Any] = json.loads((Path(folder) / "trainer_state.json").read_text(encoding="utf-8"))
    return progress


def _compute_checksums(folder: Path) -> dict[str, str]:
    checksums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _FILE and not path.name.endswith(".tmp"):
            with path.open("rb") as file:
                checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "blake2b").hexdigest()
    return checksums
