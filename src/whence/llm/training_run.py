"""What `PPOTrainer` keeps on disk: the rounds of a training, and checkpoints to go on from."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
from torch import nn

from whence.errors import RunDirectoryError, WhenceError
from whence.llm.checkpoints import check_model
from whence.llm.processes import Processes
from whence.llm.training_inputs import describe_rewards, describe_rows
from whence.llm.versions import note_changed_versions, read_versions
from whence.runs import RunDirectory
from whence.runs.checkpoints import Checkpoint, CheckpointClock, read_latest, save_checkpoint
from whence.runs.config_file import strip_addresses
from whence.stopwatch import flatten_seconds
from whence.targets import target_name

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
        self._folder, self._processes, self._keep = Path(folder), processes, keep
        self._clock = CheckpointClock(save_every)
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
        if self._processes.rank == 0:
            if checkpoint is not None:
                done = checkpoint.round
                state = "finished: nothing is trained" if done == rounds else f"going on after round {done} of {rounds}"
                log.warning("%s: %s.", self._folder, state)
            self.directory = self._open_directory(config, checkpoint, overwrite)
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

    def _open_directory(
        self, config: Mapping[str, Any], checkpoint: Checkpoint | None, overwrite: bool
    ) -> RunDirectory:
        save_every = self._clock.save_every
        if checkpoint is None:
            versions = read_versions(_LIBRARIES)
            return RunDirectory.begin(
                self._folder, config, versions=versions, save_every=save_every, overwrite=overwrite
            )
        run = RunDirectory.resume(self._folder, config, rounds=checkpoint.round, may_change=_MAY_CHANGE)
        run.note(save_every=save_every)
        note_changed_versions(run, _LIBRARIES, checkpoint.round)
        return run

    def read_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Return the rows of the first rounds; call it in any process."""
        table = RunDirectory.open(self._folder).table("metrics")
        return [] if table.is_empty() else table.filter(pl.col("round") <= rounds).to_dicts()

    def write_round(
        self, table: pl.DataFrame, row: Mapping[str, Any], seconds: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Write a round: its records, its row of metrics, and its seconds by stage and clock."""
        assert self.directory is not None
        self.directory.write_round("records", row["round"], table)
        self.directory.append("metrics", row)
        self.directory.append("timings", {"round": row["round"], **flatten_seconds(seconds)})

    def save_if_due(self, number: int, read: Callable[[], Mapping[str, Any]], *, last: bool) -> None:
        """Write the checkpoint after a round if one is due; call it in every process.

        Args:
            number: the round.
            read: returns the state of the training; called in every process.
            last: whether it is the last round, whose checkpoint is written in any case.
        """
        # The first process's clock decides: others' clocks may differ, and all have to take part.
        due = self._clock.is_due(number) or (last and self._clock.is_behind(number))
        if not self._processes.agree(due):
            return
        with self._clock.time_checkpoint(number):
            content = read()
            if self._processes.rank == 0:
                save_checkpoint(self._folder, number, content, keep=self._keep)

    def end(self) -> None:
        """Let others write the directory."""
        if self.directory is not None:
            self.directory.release()


def describe_training(trainer: Any) -> dict[str, Any]:
    """Return the run directory's description of a training by `PPOTrainer`, in JSON types.

    Args:
        trainer: the trainer.
    """
    ppo = {name: value for name, value in trainer.config.to_json().items() if name not in _ELSEWHERE}
    return {
        "kind": "language",
        **trainer.about,
        "model": getattr(trainer.model.language_model.config, "_name_or_path", "") or None,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "trained_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "rule": strip_addresses(repr(trainer.rule)),
        "target": strip_addresses(target_name(trainer.target)),
        **describe_rewards(trainer.rewards, trainer.reward_weights),
        "held_out": 0 if trainer.held_out is None else len(trainer.held_out),
        "data": {"prompts": describe_rows(trainer.prompts), "held_out": describe_rows(trainer.held_out)},
        "objective": strip_addresses(repr(trainer.objective)),
        "engine": trainer.engine,
        **trainer.scorer.describe(),
        "processes": trainer.processes.number,
        "device": str(trainer.accelerator.device),
        "rounds": trainer.config.rounds,
        "seed": trainer.config.seed,
        "ppo": ppo,
    }


_ELSEWHERE = ("output_dir", "rounds", "seed")  # settings that the description has outside "ppo"
