"""The contents of a post-training run's directory: a description and a learning curve, read without Transformers."""

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whence.errors import RunDirectoryError
from whence.experiments.llm.language_config import LanguageConfig
from whence.metrics import Curve, make_curve
from whence.runs import RunDirectory


@contextmanager
def search_first(folder: Path) -> Iterator[None]:
    """Look for modules in a folder first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def describe(config: LanguageConfig) -> dict[str, Any]:
    """Return the description of a run for its directory, in JSON types, with digests of its rewards' source files."""
    digests = {name: digest_source(getattr(config, name)) for name in ("reward", "test_reward")}
    contents = {name: digest for name, digest in digests.items() if digest is not None}
    return {"arm": config.arm, "env": config.env, "experiment": config.to_json(), "contents": contents}


def digest_source(name: str | None) -> str | None:
    """Return a digest of the file of a function, see `load_function`; None: there is no such file or module."""
    source, _, _ = (name or "").rpartition(":")
    path = Path(source)
    if source and not source.endswith(".py"):
        try:
            with search_first(Path.cwd()):
                spec = importlib.util.find_spec(source)
        except Exception:  # A parent package cannot be imported, which loading the function will report.
            return None
        path = Path("" if spec is None or spec.origin is None else spec.origin)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def is_finished(config: LanguageConfig, path: Path) -> bool:
    """Tell whether a directory holds this run, with all rounds and its trained model.

    Raises:
        RunDirectoryError: it holds another run, with finished rounds.
    """
    if not (path / "config.json").exists():
        return False
    directory = RunDirectory.open(path)
    rounds = directory.table("metrics").height
    if rounds:
        directory.check_same({**directory.config, **describe(config)})
    return 0 < config.rounds <= rounds and (path / "model").is_dir()


def read_curve(config: LanguageConfig, path: Path) -> Curve:
    """Read a finished run's curve of exact matches, or of test rewards, and its seconds per round.

    Seconds are process time for a run on a CPU, and wall time for one on another device.

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
    if config.arm.startswith("random"):  # a control scores only to know how many to drop, which is not part of its cost
        stages = [name for name in stages if name not in ("scoring", "held_out")]
    seconds = timings.select(f"{stage}_{clock}" for stage in stages).fill_null(0.0).sum_horizontal().to_numpy()
    return make_curve(config.rounds, evaluations, seconds)
