"""The run directory of `PPOTrainer`: rounds, their tables, and checkpoints to go on from."""

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

from whence.errors import RunDirectoryError, WhenceError
from whence.influence import Influence
from whence.llm.base.processes import Processes
from whence.llm.base.rows import list_tokens
from whence.llm.base.run_description import describe_run, read_versions
from whence.llm.ppo.rollout import Rollout
from whence.runs import Checkpoint, RunDirectory, RunWriter, load_tree, read_latest
from whence.selection import Selection, add_selection, summarise_selection

log = logging.getLogger("whence")

_LIBRARIES = ("whence", "torch", "transformers", "accelerate")

# Settings that may change when a training goes on.
_MAY_CHANGE = (
    "rounds",
    *(f"ppo.{name}" for name in ("save_every", "keep_checkpoints", "eval_every", "report_to", "disable_tqdm")),
    "ppo.generation_batch_size",
)


class TrainingRun:
    """The run directory of a training by one or several processes, of which the first one writes.

    Args:
        folder: its path.
        processes: the processes.
        save_every: rounds from one checkpoint to the next; see `CheckpointClock`.
        keep: the number of checkpoints that stay.

    Raises:
        WhenceError: `save_every` is not what it should be.
    """

    def __init__(self, folder: str | Path, processes: Processes, save_every: int | None, keep: int) -> None:
        self._folder, self._processes, self._saving = Path(folder), processes, (save_every, keep)
        self.directory: RunDirectory | None = None

    def begin(
        self,
        config: Mapping[str, Any],
        model: nn.Module,
        *,
        rounds: int,
        overwrite: bool,
        trained: bool,
    ) -> Checkpoint | None:
        """Open the directory, and return the checkpoint to go on from, if there is one; call it in every process.

        Args:
            config: the run's configuration, in JSON types.
            model: the model, which is not changed.
            rounds: the rounds of the training.
            overwrite: delete the run that the directory holds, and start anew.
            trained: whether the model has been trained already, so that it cannot start anew.

        Raises:
            RunDirectoryError: see `RunDirectory.begin`; or the run has more rounds, or belongs to another model.
            WhenceError: the training would start anew with a trained model.
        """
        checkpoint = None
        if not overwrite and (self._folder / "config.json").exists():
            checkpoint = self._read_checkpoint(config, model, rounds)
        if checkpoint is None and trained:
            raise WhenceError(
                f"This trainer has trained its model already, and {self._folder} has no checkpoint to go on from. "
                "Build model and trainer anew."
            )
        self._processes.wait()  # until all have read what the first one may change
        save_every, keep = self._saving
        self._writer = RunWriter(self._folder, save_every=save_every, keep=keep)
        if self._processes.rank == 0:
            versions = read_versions(_LIBRARIES)
            self._writer.begin(config, versions=versions, overwrite=overwrite, may_change=_MAY_CHANGE)
            self.directory = self._writer.directory
            if checkpoint is not None:
                done = checkpoint.round
                state = "finished: nothing is trained" if done == rounds else f"going on after round {done} of {rounds}"
                log.warning("%s: %s.", self._folder, state)
                self._writer.go_on(checkpoint)
                self._writer.note_resumption([], versions)
        return checkpoint

    def _read_checkpoint(self, config: Mapping[str, Any], model: nn.Module, rounds: int) -> Checkpoint | None:
        checkpoint = read_latest(self._folder)
        if checkpoint is None:
            return None
        RunDirectory.open(self._folder).check_same(config, but=_MAY_CHANGE)
        check_model(model, checkpoint.content, checkpoint.path)
        if checkpoint.round > rounds:
            raise RunDirectoryError(
                f"rounds is {rounds}, and {checkpoint.path} has {checkpoint.round} rounds already. Ask for more "
                "rounds, or start the run over (overwrite=True, --overwrite)."
            )
        return checkpoint

    def read_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Return the rows of the first rounds; call it in any process."""
        table = RunDirectory.open(self._folder).table("metrics")
        return [] if table.is_empty() else table.filter(pl.col("round") <= rounds).to_dicts()

    def write_round(
        self, table: pl.DataFrame, row: Mapping[str, Any], seconds: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Write a round: its records, its row of metrics, and its seconds by stage and clock."""
        self._writer.directory.write_round("records", row["round"], table)
        self._writer.write_rows(row, seconds)

    def save_if_due(self, number: int, read: Callable[[], Mapping[str, Any]], *, last: bool) -> None:
        """Write the checkpoint after a round if one is due; call it in every process.

        Args:
            number: the round.
            read: returns the state of the training; called in every process.
            last: whether it is the last round, whose checkpoint is written in any case.
        """
        # The first process's clock decides: others' clocks may differ, and all have to take part.
        if self._processes.agree(self._writer.is_due(number, last=last)):
            self._writer.save_checkpoint(number, read, writes=self._processes.rank == 0)

    def end(self) -> None:
        """Let others write the directory."""
        if self.directory is not None:
            self.directory.release()


def describe_training(trainer: Any) -> dict[str, Any]:
    """Return the run directory's description of a training by `PPOTrainer`, in JSON types."""
    ppo = {name: value for name, value in trainer.config.to_json().items() if name not in _ELSEWHERE}
    return describe_run(
        about=trainer.about,
        model=trainer.model,
        rule=trainer.rule,
        target=trainer.target,
        objective=trainer.objective,
        engine=trainer.engine,
        rewards=trainer.rewards,
        reward_weights=trainer.reward_weights,
        data={"prompts": trainer.prompts, "held_out": trainer.held_out},
        accelerator=trainer.accelerator,
        rounds=trainer.config.rounds,
        seed=trainer.config.seed,
        settings={
            "held_out": 0 if trainer.held_out is None else len(trainer.held_out),
            **trainer.scorer.describe(),
            "ppo": ppo,
        },
    )


_ELSEWHERE = ("output_dir", "rounds", "seed")  # settings that the description has outside "ppo"


def read_model(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the parameters that train and the optimiser's state of each, by name, for `save_tree`."""
    names = {id(parameter): name for name, parameter in _trained_parameters(model)}
    return {
        "model": dict(_trained_parameters(model)),
        "optimizer": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
    }


def load_model(model: nn.Module, optimizer: Any, content: Mapping[str, Any]) -> None:
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
    """Refuse the content of a checkpoint whose parameters are not those of a model that train.

    Raises:
        RunDirectoryError: see above.
    """
    parameters = dict(_trained_parameters(model))
    if _list_shapes(parameters) != _list_shapes(content.get("model", {})):
        raise RunDirectoryError(
            f"{path} belongs to another model: its parameters that train differ from this one's. Build the model as it "
            "was, with the same adapter, or choose another output_dir."
        )


def _copy_parameters(model: nn.Module, content: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in _trained_parameters(model):
            parameter.copy_(content["model"][name])


def _list_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def make_response_table(rollout: Rollout, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Return a row for each response: texts, reward, divergence, advantage of its last token, score and selection.

    Args:
        rollout: the round's rollout.
        selection: the responses that train.
        influence: the responses' scores; None if the rule needs none.
    """
    responses, rows = rollout.responses, rollout.rows
    table = pl.DataFrame(
        {
            "record_id": rows.ids.tolist(),
            "prompt": list(responses.prompts),
            "response": list(responses.texts),
            "tokens": responses.response_mask.sum(dim=1).tolist(),
            "ended": responses.ended.tolist(),
            "reward": rollout.rewards.tolist(),
            "divergence": rollout.divergence.double().tolist(),
            "advantage": rows.advantages.double().tolist(),
            "log_prob": rows.log_probs.double().tolist(),
        }
    )
    return add_selection(table.with_columns(list_tokens(rows)), selection, influence)


def make_metrics_row(
    number: int, rollout: Rollout, selection: Selection, influence: Influence | None
) -> dict[str, Any]:
    """Return a round's row of metrics, without those of the optimisation."""
    rewards, keep = rollout.rewards, selection.keep
    return {
        "round": number,
        "reward": float(rewards.mean()),
        "reward_kept": float(rewards[keep].mean()) if keep.any() else None,
        "reward_dropped": float(rewards[~keep].mean()) if (~keep).any() else None,
        "kl": float(rollout.divergence.mean()),
        "train/entropy_loss": -rollout.entropy,
        "length": float(rollout.responses.response_mask.sum(dim=1).double().mean()),
        "ended_share": float(rollout.responses.ended.to(torch.float64).mean()),
        **summarise_selection(selection, influence),
    }
