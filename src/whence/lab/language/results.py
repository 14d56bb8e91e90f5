"""Whether a run of a language model is finished, and its learning curve; read without Transformers."""

from pathlib import Path

from whence.core import RunDirectoryError
from whence.lab.arms import counts_scoring
from whence.lab.efficiency import Curve, make_curve
from whence.runs import RunDirectory
from whence.stored.language import LanguageConfig, describe


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
    if not counts_scoring(config.arm):
        stages = [name for name in stages if name not in ("scoring", "held_out")]
    seconds = timings.select(f"{stage}_{clock}" for stage in stages).fill_null(0.0).sum_horizontal().to_numpy()
    return make_curve(config.rounds, evaluations, seconds)
