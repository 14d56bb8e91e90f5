"""A post-training run by GRPO or RLOO, with TRL's trainers."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback

from whence.experiments.llm.config import LanguageConfig
from whence.experiments.llm.loading import ignore_old_names
from whence.experiments.llm.outputs import describe, save_atomically
from whence.experiments.llm.tasks import (
    Task,
    check_lengths,
    choose_sample_prompts,
    load_task,
    make_sampling_config,
    make_validation_target,
    scoring_memory,
)
from whence.experiments.llm.trainer_config import make_trainer_config
from whence.experiments.shared import OnRound
from whence.guards import preserve_rng_state
from whence.llm import SequenceReturn, TokenReturn
from whence.llm.base.ppo_config import PPOConfig
from whence.llm.base.progress_bars import hide_progress_bars
from whence.llm.text.generation import answer_prompts, read_sample_prompts
from whence.llm.text.prompts import context_length, join_messages, list_columns
from whence.llm.text.rewards import Reward, compute_rewards, find_columns
from whence.llm.trl.trainers import InfluenceGRPOTrainer, InfluenceRLOOTrainer
from whence.runs import RunDirectory
from whence.runs.checkpoints import CheckpointClock

TRAINERS: Mapping[str, Any] = MappingProxyType({"grpo": InfluenceGRPOTrainer, "rloo": InfluenceRLOOTrainer})
"""Trainers by the algorithm's name."""


def run_trl(config: LanguageConfig, path: Path, on_round: OnRound, *, overwrite: bool = False) -> None:
    """Train and evaluate as `config` says, and write the run's directory; an unfinished run goes on.

    The results are those of a training that was not interrupted, to the same bits.

    Args:
        config: the run's configuration.
        path: the run's directory.
        on_round: called after every round.
        overwrite: delete the run that the directory holds, and start anew.
    """
    with hide_progress_bars():
        task = load_task(config)
    check_lengths(config, task)
    trainer_class = TRAINERS[config.algorithm]
    sampling = make_sampling_config(config)  # before the trainer: TRL's configuration resets Accelerate's state
    args = make_trainer_config(config, str(path / "trl"))
    make_target: Any = {"sequence": SequenceReturn, "token": TokenReturn}.get(config.target or "sequence")
    trainer = trainer_class(
        model=task.model,
        reward_funcs=_adapt_reward(task.reward),
        args=args,
        train_dataset=_make_trl_dataset(task.prompts, task.reward),
        processing_class=task.tokenizer,
        rule=config.make_rule(),
        target=make_validation_target(task) if make_target is None else make_target(),
        engine=config.engine,
        memory=scoring_memory(config),
        layers=config.layers,
        refresh_target_every=config.refresh_target_every,
        run=path,
        about=describe(config),
        overwrite=overwrite or _has_no_checkpoint_yet(path, args),
    )
    resumes = not overwrite and trainer.find_checkpoint() is not None
    trainer.add_callback(_Observer(config, task, sampling, trainer, path, on_round))
    with ignore_old_names():
        trainer.train(resume_from_checkpoint=resumes or None)

    def save(folder: Path) -> None:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        task.tokenizer.save_pretrained(folder)

    with hide_progress_bars():
        save_atomically(path / "model", save)


def _has_no_checkpoint_yet(path: Path, args: Any) -> bool:
    """Return whether a run has no more rounds than come before its first checkpoint."""
    rounds = int(args.save_steps) // args.num_iterations if args.save_strategy == "steps" else 1
    return (path / "config.json").exists() and RunDirectory.open(path).table("metrics").height <= max(1, rounds)


_PREFIX = "of_data_set_"
"""Prefix of a data set's columns for TRL, to which some column names have a meaning."""


def _make_trl_dataset(prompts: Any, reward: Reward) -> Any:
    """Return a data set of the prompts and the columns that the reward asks for."""
    names = find_columns(reward, list_columns(prompts))
    return prompts.select_columns(["prompt", *names]).rename_columns({name: _PREFIX + name for name in names})


def _adapt_reward(reward: Reward) -> Callable[..., list[float]]:
    """Return a reward as a function with the arguments of TRL's rewards."""

    def compute(prompts: Any, completions: Any, **further: Any) -> list[float]:
        columns = {name.removeprefix(_PREFIX): column for name, column in further.items() if name.startswith(_PREFIX)}
        texts = [join_messages(completion) for completion in completions]
        return compute_rewards(reward, [join_messages(prompt) for prompt in prompts], texts, columns).tolist()

    for method in ("state_dict", "load_state_dict"):  # a reward with a state keeps it in checkpoints
        if hasattr(reward, method):
            setattr(compute, method, getattr(reward, method))
    return compute


class _Observer(TrainerCallback):  # type: ignore[misc]
    """Evaluates the model, and reports each round that was written."""

    def __init__(
        self, config: LanguageConfig, task: Task, sampling: PPOConfig, trainer: Any, path: Path, on_round: OnRound
    ) -> None:
        self._config, self._task, self._trainer, self._path, self._on_round = config, task, trainer, path, on_round
        self._directory: RunDirectory | None = None
        self._sampling, context = sampling, context_length(task.model)
        sample = choose_sample_prompts(task)
        self._prompts = read_sample_prompts(sample, task.tokenizer, sampling, context, [task.reward])
        # With settings of Transformers' for checkpoints, those hold.
        own_clock = not {"save_strategy", "save_steps"} & config.settings.keys()
        self._clock, self._saving = CheckpointClock(None if own_clock else 0), ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Evaluate the model before the first round."""
        self._directory = RunDirectory.open(self._path)
        if self._config.all_settings.get("eval_every", 1) and not state.global_step:
            self._evaluate(0)
        self._on_round(0, {})

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Evaluate and report a generation batch after its last step, and ask for a checkpoint if one is due."""
        if state.global_step % args.num_iterations:
            return
        assert self._directory is not None
        number, every = state.global_step // args.num_iterations, self._config.all_settings.get("eval_every", 1)
        if every and (number % every == 0 or number == self._config.rounds):
            self._evaluate(number)
        self._on_round(number, self._directory.table("metrics").row(-1, named=True))
        last = number == self._config.rounds and self._clock.is_behind(number)
        # The first process's clock decides, since all have to take part.
        if self._trainer._processes.agree(self._clock.is_due(number) or last):
            control.should_save = True
            self._saving.enter_context(self._clock.time_checkpoint(number))

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Note how long the checkpoint took."""
        self._saving.close()

    def _evaluate(self, number: int) -> None:
        """Answer the sample prompts and measure the model, without changing the draws of training."""
        if self._directory is None:
            return
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        answers = answer_prompts(model, self._task.tokenizer, self._prompts, self._task.reward, self._sampling)
        self._directory.write_round("answers", number, answers)
        if self._task.evaluate is None:
            return
        with preserve_rng_state():
            measures = dict(self._task.evaluate(model, self._task.tokenizer))
        self._directory.append("evaluations", {"round": number, **measures})
