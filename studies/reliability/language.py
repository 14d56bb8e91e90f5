"""Short trainings of a language model that `studies.reliability.kills` interrupts, and how two of them are compared.

Run: `python -m studies.reliability.language PATH KIND` trains one into a directory; started again, it goes on.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from whence.experiments import LanguageConfig
from whence.experiments.llm.training import run
from whence.llm.trl.trl_checkpoints import list_steps, read_state
from whence.runs.checkpoints import read_latest

Kind = Literal["ppo", "grpo", "rloo"]

ROUNDS = 6

_TRL = {"rounds": ROUNDS, "num_iterations": 2, "beta": 0.05}

SETTINGS: Mapping[Kind, Mapping[str, Any]] = {
    "ppo": {"rounds": ROUNDS, "init_kl_coef": 0.05, "adap_kl_ctrl": True},
    "grpo": _TRL,
    "rloo": _TRL,
}
"""Settings by algorithm; with a divergence from the start model, so that the reference counts."""


def start(path: Path, kind: Kind) -> None:
    """Train on the tiny laboratory `arithmetic` in a directory, or go on with it, to the end.

    Args:
        path: the run's directory.
        kind: the algorithm.
    """
    config = LanguageConfig(
        "iif", 7, size="tiny", test_problems=32, samples=2, algorithm=kind, settings=dict(SETTINGS[kind])
    )
    run(config, path)


def find_differences(path: Path, reference: Path) -> list[str]:
    """List in what a run differs from the uninterrupted one; timings and what holds clocks are left out.

    Tables and models are compared by their bytes, the last checkpoint by its tensors: parameters, optimiser, generators
    and the learning rate's schedule.
    """
    names = {name for root in (path, reference) for name in _list_files(root)}
    differences = [name for name in sorted(names) if _read(path / name) != _read(reference / name)]
    ours, theirs = (json.loads((root / "config.json").read_text()) for root in (path, reference))
    differences += _compare("config.json", ours["config"], theirs["config"])
    ours, theirs = _read_last_checkpoint(path), _read_last_checkpoint(reference)
    return differences + _compare("last checkpoint", ours, theirs)


_CLOCKED = {"timings.parquet", "report.html", "config.json", ".lock"}


def _list_files(root: Path) -> list[str]:
    files = (file.relative_to(root) for file in root.rglob("*") if file.is_file())
    return [
        file.as_posix() for file in files if file.name not in _CLOCKED and file.parts[0] not in ("checkpoints", "trl")
    ]


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _read_last_checkpoint(path: Path) -> dict[str, Any]:
    folders = list_steps(path / "trl")
    if not folders:
        checkpoint = read_latest(path)
        return {} if checkpoint is None else {"round": checkpoint.round, **checkpoint.content}
    step, folder = max(folders.items())
    # Files of Transformers' whose content are tensors and arrays; their bytes are the same for the same content.
    files = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    contents = {name: (folder / name).read_bytes() for name in files}
    return {"step": step, "state": read_state(folder), **contents}


def _compare(name: str, one: Any, other: Any) -> list[str]:
    """List the leaves in which two trees differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{name}: other keys"]
        return [difference for key in one for difference in _compare(f"{name}/{key}", one[key], other[key])]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{name}: other length"]
        pairs = enumerate(zip(one, other, strict=True))
        return [difference for place, (a, b) in pairs for difference in _compare(f"{name}/{place}", a, b)]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if torch.equal(one, other) else [name]
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return [] if one.tobytes() == other.tobytes() else [name]
    return [] if one == other else [name]


def main(
    path: Annotated[Path, typer.Argument(help="The run's directory.")],
    kind: Annotated[str, typer.Argument(help="ppo, grpo or rloo.")],
) -> None:
    """Train a short run, or go on with it."""
    start(path, kind)  # type: ignore[arg-type]


if __name__ == "__main__":
    typer.run(main)
