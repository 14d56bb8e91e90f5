"""The run of `PPOTrainer`: how it is described, opened, and put back where a checkpoint was written."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from whence.core import RunDirectoryError, WhenceError, library_versions
from whence.llm.base import describe_run
from whence.llm.text import list_vocabulary
from whence.runs import Checkpoint, RunRecorder, load_tree

log = logging.getLogger("whence")

_LIBRARIES = ("whence", "torch", "transformers", "accelerate")

# Settings that may change when a training continues.
_MAY_CHANGE = (
    "rounds",
    *(f"ppo.{name}" for name in ("save_every", "keep_checkpoints", "eval_every", "report_to", "disable_tqdm")),
    "ppo.generation_batch_size",
)


def open_run(trainer: Any, *, overwrite: bool, is_trained: bool) -> tuple[RunRecorder, Checkpoint | None]:
    """Open a trainer's run, in every process; return its recorder, and the checkpoint to continue from, if any.

    Raises:
        RunDirectoryError: see `RunDirectory.begin`; or the run has more rounds, or belongs to another model.
        WhenceError: the training would start anew with a model that `is_trained`.
    """
    config, processes, rounds = trainer.config, trainer.processes, trainer.config.rounds
    keep, writes = config.keep_checkpoints, processes.rank == 0
    recorder = RunRecorder(config.output_dir, save_every=config.save_every, keep=keep, writes=writes)

    def check(checkpoint: Checkpoint | None) -> None:
        if checkpoint is None and is_trained:
            raise WhenceError(
                f"This trainer has trained its model already, and {recorder.path} has no checkpoint to go on from. "
                "Build model and trainer anew."
            )
        if checkpoint is None:
            return
        check_model(trainer.model, checkpoint.content, checkpoint.path)
        if checkpoint.round > rounds:
            raise RunDirectoryError(
                f"rounds is {rounds}, and {checkpoint.path} has {checkpoint.round} rounds already. Ask for more "
                "rounds, or start the run over (overwrite=True, --overwrite)."
            )

    checkpoint = recorder.begin(
        _describe(trainer),
        versions=library_versions(_LIBRARIES),
        wait=processes.wait if processes.number > 1 else None,
        overwrite=overwrite,
        may_change=_MAY_CHANGE,
        check=check,
    )
    recorder.plan_vocabulary(lambda: list_vocabulary(trainer.tokenizer))
    if checkpoint is not None and recorder.writes:
        done = checkpoint.round
        state = "finished: nothing is trained" if done == rounds else f"going on after round {done} of {rounds}"
        log.warning("%s: %s.", recorder.path, state)
    return recorder, checkpoint


def _describe(trainer: Any) -> dict[str, Any]:
    """Return the run directory's description of a training, in JSON types."""
    config, data = trainer.config, {"prompts": trainer.prompts, "held_out": trainer.held_out}
    elsewhere = ("output_dir", "rounds", "seed")
    return {
        **trainer.about,
        **describe_run(trainer, trainer.model, [trainer.reward], **data),
        **{"rounds": config.rounds, "seed": config.seed},
        "held_out": 0 if trainer.held_out is None else len(trainer.held_out),
        "select": None if trainer._chooser is None else "in_step",
        "ppo": {name: value for name, value in config.to_json().items() if name not in elsewhere},
    }


def read_model(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the parameters that train and the optimiser's state of each, by name, for `save_tree`."""
    names = {id(parameter): name for name, parameter in _trained_parameters(model)}
    return {
        "model": dict(_trained_parameters(model)),
        "optimizer": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
    }


def restore_model(model: nn.Module, optimizer: Any, content: Mapping[str, Any]) -> None:
    """Put a model and its optimiser into the state that `read_model` returned; see `check_model`."""
    model.load_state_dict(content["model"], strict=False)  # of the parameters that train alone
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
    """Read the parameters of a checkpoint file into a model; those of another model are a `RunDirectoryError`."""
    content = load_tree(path)
    check_model(model, content, path)
    model.load_state_dict(content["model"], strict=False)


def check_model(model: nn.Module, content: Mapping[str, Any], path: Path) -> None:
    """Raise RunDirectoryError for a checkpoint whose parameters are not those of a model that train."""
    stored: Any = content.get("model")
    shapes = {name: parameter.shape for name, parameter in _trained_parameters(model)}
    if not isinstance(stored, dict) or shapes != {name: getattr(value, "shape", 0) for name, value in stored.items()}:
        raise RunDirectoryError(
            f"{path} belongs to another model: its parameters that train differ from this one's. Build the model as it "
            "was, with the same adapter, or choose another output_dir."
        )


def _trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
