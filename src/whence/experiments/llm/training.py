"""One post-training run of a language model, from its configuration to its directory."""

from pathlib import Path
from typing import Any

import torch

from whence.experiments.llm.config import LanguageConfig
from whence.experiments.llm.outputs import describe, is_finished, read_curve, save_atomically
from whence.experiments.llm.tasks import (
    Task,
    choose_sample_prompts,
    load_task,
    make_laboratory,
    make_validation_target,
    scoring_memory,
    split_held_out,
)
from whence.experiments.llm.trainer_config import check_settings, make_trainer_config
from whence.experiments.shared import OnRound, ignore_round
from whence.llm import PPOTrainer, SequenceReturn, TokenReturn
from whence.llm.base.progress_bars import hide_progress_bars

__all__ = ["check_settings", "is_finished", "make_trainer", "prepare", "read_curve", "run"]


def prepare(config: LanguageConfig) -> None:
    """Check a run's settings, and make its laboratory if it is not on disk; otherwise each worker would make it.

    Raises:
        WhenceError, Unsupported: see `make_trainer_config`.
    """
    check_settings(config)
    make_laboratory(config)


def run(config: LanguageConfig, path: Path, on_round: OnRound = ignore_round, *, overwrite: bool = False) -> None:
    """Train and evaluate as `config` says, and write the run's directory; a finished run is left as it is.

    An interrupted run goes on after its last checkpoint.

    Args:
        config: the run's configuration.
        path: the run's directory.
        on_round: called after every round.
        overwrite: delete the run that the directory holds, and start anew.

    Raises:
        RunDirectoryError: the directory holds another run.
        WhenceError, Unsupported: the settings, the model or the data are refused; nothing was trained.
    """
    if not overwrite and is_finished(config, path):
        on_round(config.rounds, {})
        return
    check_settings(config)
    torch.manual_seed(config.seed)  # for the weights of an adapter
    if config.algorithm != "ppo":
        from whence.experiments.llm.trl import run_trl  # TRL takes seconds to import

        run_trl(config, path, on_round, overwrite=overwrite)
        return
    with hide_progress_bars():
        trainer = make_trainer(config, load_task(config), path, on_round)
    on_round(0, {})
    trainer.train(overwrite=overwrite)
    with hide_progress_bars():
        # The model is saved last, since a run with its model counts as finished.
        save_atomically(path / "model", trainer.save_model)


def make_trainer(config: LanguageConfig, task: Task, path: Path, on_round: OnRound = ignore_round) -> PPOTrainer:
    """Return the trainer of a run, before its first round."""
    targets: dict[str, Any] = {"sequence": SequenceReturn, "token": TokenReturn, "held-out": SequenceReturn}
    make_target = targets.get(config.target or "sequence")
    prompts, held_out = split_held_out(config, task)
    return PPOTrainer(
        make_trainer_config(config, str(path)),
        task.model,
        task.tokenizer,
        task.reward,
        prompts,
        rule=config.make_rule(),
        target=make_validation_target(task) if make_target is None else make_target(),
        held_out=held_out,
        engine=config.engine,
        memory=scoring_memory(config),
        layers=config.layers,
        refresh_target_every=config.refresh_target_every,
        evaluate=task.evaluate,
        sample_prompts=choose_sample_prompts(task),
        about=describe(config),
        on_rollout=lambda rollout, influence, selection, row: on_round(row["round"], row),
    )
