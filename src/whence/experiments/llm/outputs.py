"""What a post-training run leaves in its directory: a description, the trained model, a learning curve."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whence.errors import RunDirectoryError
from whence.experiments.llm.config import LanguageConfig
from whence.metrics import Curve, make_curve
from whence.runs import RunDirectory


def save_atomically(folder: Path, save: Callable[[Path], object]) -> None:
    """Have a model saved beside its place and put there then: under its name there is a whole one or none."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for leftover in (temporary, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    save(temporary)
    temporary.rename(folder)


def describe(config: LanguageConfig) -> dict[str, Any]:
    """Return what a run's directory says of it, in JSON types; of a reward's file also what is in it."""
    files = {name: (getattr(config, name) or "").rpartition(":")[0] for name in ("reward", "test_reward")}
    contents = {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, file in files.items()
        if file.endswith(".py") and Path(file).exists()
    }
    return {"arm": config.arm, "env": config.env, "experiment": config.to_json(), "contents": contents}


def is_finished(config: LanguageConfig, path: Path) -> bool:
    """Tell whether a directory holds this very run, with its trained model.

    Raises:
        RunDirectoryError: it holds another run.
    """
    if not (path / "config.json").exists():
        return False
    directory = RunDirectory.open(path)
    asked = describe(config)
    RunDirectory(path, {name: directory.config.get(name) for name in asked}, {}).check_same(asked)
    return (path / "model").is_dir()


def read_curve(config: LanguageConfig, path: Path) -> Curve:
    """Read a finished run's curve of exact matches, or of test rewards, and its seconds a round.

    Seconds are the process's on a CPU, and wall time where another device computes.

    Raises:
        RunDirectoryError: the run is not finished, or was not evaluated.
    """
    if not is_finished(config, path):
        raise RunDirectoryError(f"{path} holds an unfinished run; run it again to finish it.")
    directory = RunDirectory.open(path)
    evaluations, timings = directory.table("evaluations"), directory.table("timings")
    if evaluations.is_empty():
        raise RunDirectoryError(f"{path} holds no evaluation; give a test data set, and eval_every of at least 1.")
    clock = "cpu" if directory.config.get("device", "cpu").startswith("cpu") else "wall"
    stages = [name.removesuffix(f"_{clock}") for name in timings.columns if name.endswith(f"_{clock}")]
    if config.arm.startswith("random"):  # a control that scores only to know how much to drop is not charged for it
        stages = [name for name in stages if name not in ("scoring", "held_out")]
    seconds = timings.select(f"{stage}_{clock}" for stage in stages).fill_null(0.0).sum_horizontal().to_numpy()
    return make_curve(config.rounds, evaluations, seconds)
