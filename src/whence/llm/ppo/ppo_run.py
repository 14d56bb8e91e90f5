"""The run directory of `PPOTrainer`: rounds, their tables, and checkpoints to go on from."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

from whence.core import RunDirectoryError, WhenceError
from whence.llm.base import Processes
from whence.llm.base.run_description import describe_run, read_versions
from whence.llm.text import list_vocabulary
from whence.runs import Checkpoint, RunDirectory, RunWriter, load_tree, read_latest, write_vocabulary

log = logging.getLogger("whence")

_LIBRARIES = ("whence", "torch", "transformers", "accelerate")

# Settings that may change when a training goes on.
_MAY_CHANGE = (
    "rounds",
    *(f"ppo.{name}" for name in ("save_every", "keep_checkpoints", "eval_every", "report_to", "disable_tqdm")),
    "ppo.generation_batch_size",
)


class TrainingRun:
    """The run directory of a training by `PPOTrainer` in one or several processes, of which the first one writes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._folder = trainer, Path(trainer.config.output_dir)
        self._processes: Processes = trainer.processes
        self.directory: RunDirectory | None = None

    def begin(self, *, overwrite: bool, trained: bool) -> Checkpoint | None:
        """Open the directory, and return the checkpoint to go on from, if there is one; call it in every process.

        Raises:
            RunDirectoryError: see `RunDirectory.begin`; or the run has more rounds, or belongs to another model.
            WhenceError: the training would start anew with a `trained` model.
        """
        settings, description = self._trainer.config, self._describe()
        checkpoint = None if overwrite else self._read_checkpoint(description)
        if checkpoint is None and trained:
            raise WhenceError(
                f"This trainer has trained its model already, and {self._folder} has no checkpoint to go on from. "
                "Build model and trainer anew."
            )
        self._processes.wait()  # until all have read what the first one may change
        self.writer = RunWriter(self._folder, save_every=settings.save_every, keep=settings.keep_checkpoints)
        if self._processes.rank == 0:
            versions = read_versions(_LIBRARIES)
            self.writer.begin(description, versions=versions, overwrite=overwrite, may_change=_MAY_CHANGE)
            self.directory = self.writer.directory
            self.directory.remove_later()
            write_vocabulary(self._folder, list_vocabulary(self._trainer.tokenizer))
            if checkpoint is not None:
                done, rounds = checkpoint.round, settings.rounds
                state = "finished: nothing is trained" if done == rounds else f"going on after round {done} of {rounds}"
                log.warning("%s: %s.", self._folder, state)
                self.writer.go_on(checkpoint)
                self.writer.note_resumption([], versions)
        return checkpoint

    def _read_checkpoint(self, description: Mapping[str, Any]) -> Checkpoint | None:
        if not (self._folder / "config.json").exists() or (checkpoint := read_latest(self._folder)) is None:
            return None
        RunDirectory.open(self._folder).check_same(description, but=_MAY_CHANGE)
        check_model(self._trainer.model, checkpoint.content, checkpoint.path)
        if checkpoint.round > description["rounds"]:
            raise RunDirectoryError(
                f"rounds is {description['rounds']}, and {checkpoint.path} has {checkpoint.round} rounds already. Ask "
                "for more rounds, or start the run over (overwrite=True, --overwrite)."
            )
        return checkpoint

    def read_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Return the rows of the first rounds; call it in any process."""
        table = RunDirectory.open(self._folder).table("metrics")
        return [] if table.is_empty() else table.filter(pl.col("round") <= rounds).to_dicts()

    def save_if_due(self, number: int, read: Callable[[], Mapping[str, Any]], *, last: bool) -> None:
        """Write the checkpoint after a round if one is due, after the last in any case; call it in every process."""
        # The first process's clock decides: others' clocks may differ, and all have to take part.
        if self._processes.agree(self.writer.is_due(number, last=last)):
            self.writer.save_checkpoint(number, read, writes=self._processes.rank == 0)

    def _describe(self) -> dict[str, Any]:
        """Return the run directory's description of the training, in JSON types."""
        trainer = self._trainer
        elsewhere = ("output_dir", "rounds", "seed")
        return describe_run(
            trainer,
            trainer.model,
            about=trainer.about,
            rewards=[trainer.reward],
            data={"prompts": trainer.prompts, "held_out": trainer.held_out},
            rounds=trainer.config.rounds,
            seed=trainer.config.seed,
            settings={
                "held_out": 0 if trainer.held_out is None else len(trainer.held_out),
                "select": None if trainer._chooser is None else "in_step",
                "ppo": {name: value for name, value in trainer.config.to_json().items() if name not in elsewhere},
            },
        )


def read_model(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the parameters that train and the optimiser's state of each, by name, for `save_tree`."""
    names = {id(parameter): name for name, parameter in _trained_parameters(model)}
    return {
        "model": dict(_trained_parameters(model)),
        "optimizer": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
    }


def restore_model(model: nn.Module, optimizer: Any, content: Mapping[str, Any]) -> None:
    """Put a model and its optimiser into the state that `read_model` returned; see `check_model`."""
    _copy_parameters(model, content)
    parameters = dict(_trained_parameters(model))
    optimizer.state.clear()
    for name, state in content["optimizer"].items():
        device = parameters[name].device
        # Adam counts its steps on the CPU.
        optimizer.state[parameters[name]] = {
            key: value.to(device) if isinstance(value, Tensor) and key != "step" else value
            for key, value in state.items()
        }


def load_parameters(path: Path, model: nn.Module) -> None:
    """Read the parameters of a checkpoint file into a model.

    Raises:
        RunDirectoryError: the file cannot be read as a checkpoint, or belongs to another model.
    """
    content = load_tree(path)
    check_model(model, content, path)
    _copy_parameters(model, content)


def check_model(model: nn.Module, content: Mapping[str, Any], path: Path) -> None:
    """Raise RunDirectoryError for a checkpoint whose parameters are not those of a model that train."""
    stored: Any = content.get("model")
    shapes = {name: parameter.shape for name, parameter in _trained_parameters(model)}
    if not isinstance(stored, dict) or shapes != {name: getattr(value, "shape", 0) for name, value in stored.items()}:
        raise RunDirectoryError(
            f"{path} belongs to another model: its parameters that train differ from this one's. Build the model as it "
            "was, with the same adapter, or choose another output_dir."
        )


def _copy_parameters(model: nn.Module, content: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in _trained_parameters(model):
            parameter.copy_(content["model"][name])


def _trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
