"""One post-training run of a language model, from its configuration to its directory."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback

from whence.core import MeanObjective, RunDirectoryError, WhenceError, flush_to_disk
from whence.lab.arms import counts_scoring
from whence.lab.efficiency import Curve, make_curve, read_timings
from whence.lab.language.laboratory_tasks import make_laboratory
from whence.lab.language.selections import configure_trainer, make_rule, read_arm
from whence.llm.base import PPOConfig, ignore_old_names
from whence.llm.ppo import PPOTrainer
from whence.llm.scores import RESPONSE_TARGETS
from whence.llm.text import (
    Reward,
    compute_rewards,
    context_length,
    find_columns,
    join_messages,
    list_columns,
    read_prompts,
    write_evaluation,
)
from whence.runs import CheckpointClock, RunDirectory
from whence.stored.language import (
    LanguageConfig,
    Task,
    describe,
    hide_progress_bars,
    load_task,
    make_sampling_config,
    make_trainer_config,
    make_validation_target,
    scoring_memory,
)

OnRound: TypeAlias = Callable[[int, Mapping[str, Any]], None]
"""Called with the number of rounds done, from 0, and the last one's metrics."""


def prepare(config: LanguageConfig) -> None:
    """Check a run's settings, and make its laboratory if it is not on disk; otherwise each worker would make it."""
    configure_trainer(config)
    if config.task:
        make_laboratory(config)


def check(config: LanguageConfig) -> None:
    """Load a run's model, data and rewards once, so that what they refuse is known before a run is deleted."""
    task = load_task(config)
    split_held_out(config, task)
    _make_target(config, task)


def is_finished(config: LanguageConfig, path: Path) -> bool:
    """Tell whether a directory holds this run, with all rounds and its trained model; refuse another run."""
    if not (path / "config.json").exists():
        return False
    directory = RunDirectory.open(path)
    if rounds := directory.count_rounds() or 0:
        directory.check_same({**directory.config, **describe(config)})
        directory.check_signed()
    # A damaged model is saved again, from the last checkpoint.
    return 0 < config.rounds <= rounds and (path / "model").is_dir() and all(map(_is_whole, (path / "model").iterdir()))


def _is_whole(file: Path) -> bool:
    """Return whether a file of a model is not cut off."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return True
        return file.suffix != ".json" or json.loads(file.read_bytes()) is not None
    except (SafetensorError, ValueError):
        return False


def read_curve(config: LanguageConfig, path: Path) -> Curve:
    """Read a finished run's curve of exact matches, or of test rewards, and its seconds per round.

    Seconds are process time for a run on a CPU, and wall time for one on another device.

    Raises:
        RunDirectoryError: the run is not finished, or was not evaluated.
    """
    if not is_finished(config, path):
        raise RunDirectoryError(f"{path} holds an unfinished run; run it again to finish it.")
    directory = RunDirectory.open(path)
    evaluations, timings = directory.table("evaluations"), read_timings(directory, config.rounds)
    if evaluations.is_empty():
        raise RunDirectoryError(f"{path} holds no evaluation; give a test data set, and eval_every of at least 1.")
    clock = "cpu" if directory.config.get("device", "cpu").startswith("cpu") else "wall"
    stages = [name.removesuffix(f"_{clock}") for name in timings.columns if name.endswith(f"_{clock}")]
    if not counts_scoring(config.arm):
        stages = [name for name in stages if name not in ("scoring", "held_out")]
    seconds = timings.select(f"{stage}_{clock}" for stage in stages).fill_null(0.0).sum_horizontal().to_numpy()
    return make_curve(config.rounds, evaluations, seconds)


@hide_progress_bars()
def run(
    config: LanguageConfig, path: Path, on_round: OnRound = lambda number, metrics: None, *, overwrite: bool = False
) -> None:
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
    settings = configure_trainer(config, str(path))
    torch.manual_seed(config.seed)  # for the weights of an adapter
    task = load_task(config)
    if config.algorithm != "ppo":
        _run_trl(config, task, path, on_round, overwrite=overwrite)
        return
    prompts, held_out = split_held_out(config, task)
    trainer = PPOTrainer(
        *(settings, task.model, task.tokenizer, task.reward, prompts),
        rule=make_rule(config),
        target=_make_target(config, task),
        select=config.select,
        held_out=held_out,
        engine=config.engine,
        memory=scoring_memory(config),
        evaluate=task.evaluate,
        sample_prompts=choose_sample_prompts(task),
        about=describe(config),
        on_rollout=lambda rollout, influence, selection, row: on_round(row["round"], row),
    )
    on_round(0, {})
    trainer.train(overwrite=overwrite)
    _save_atomically(path / "model", trainer.save_model)


def _make_target(config: LanguageConfig, task: Task) -> Any:
    _, target = read_arm(config.arm)
    if target == "validation":
        return make_validation_target(task)
    if target == "objective":
        return MeanObjective()
    return None if target is None else RESPONSE_TARGETS[target]()


def _run_trl(config: LanguageConfig, task: Task, path: Path, on_round: OnRound, *, overwrite: bool) -> None:
    """Train by GRPO or RLOO, with TRL's trainers; an unfinished run goes on, to the same bits."""
    from whence.llm.trl.trainers import InfluenceGRPOTrainer, InfluenceRLOOTrainer  # TRL takes seconds to import

    sampling = make_sampling_config(config)  # before the trainer: TRL's configuration resets Accelerate's state
    context = context_length(task.model)
    read_prompts(task.prompts, task.tokenizer, sampling, context, task.reward)  # refuses those that are too long
    args = make_trainer_config(config, str(path / "trl"))
    trainer = (InfluenceGRPOTrainer if config.algorithm == "grpo" else InfluenceRLOOTrainer)(
        model=task.model,
        reward_funcs=_adapt_reward(task.reward),
        args=args,
        train_dataset=_make_trl_dataset(task.prompts, task.reward),
        processing_class=task.tokenizer,
        rule=make_rule(config),
        target=_make_target(config, task),
        select=config.select,
        engine=config.engine,
        memory=scoring_memory(config),
        run=path,
        about=describe(config),
        overwrite=overwrite,
    )
    resumes = not overwrite and trainer.find_checkpoint() is not None
    trainer.add_callback(_Observer(config, task, sampling, trainer, path, on_round))
    with ignore_old_names():
        trainer.train(resume_from_checkpoint=resumes or None)

    def save(folder: Path) -> None:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        task.tokenizer.save_pretrained(folder)

    _save_atomically(path / "model", save)


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
        self._sampling, context = sampling, context_length(task.model)
        self._prompts = read_prompts(choose_sample_prompts(task), task.tokenizer, sampling, context, task.reward)
        # With settings of Transformers' for checkpoints, those hold.
        own_clock = not {"save_strategy", "save_steps"} & config.settings.keys()
        self._clock, self._saving = CheckpointClock(None if own_clock else 0), ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Evaluate the model before the first round."""
        self._directory = self._trainer._run.recorder.directory  # begun, and not yet written where it replaces another
        if state.is_world_process_zero:
            rounds = int(args.save_steps) // args.num_iterations if args.save_strategy == "steps" else 1
            self._directory.note(save_every=max(1, rounds))
        if not state.global_step:
            self._evaluate(0)
        self._on_round(0, {})

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Evaluate and report a generation batch after its last step, and ask for a checkpoint if one is due."""
        number, rest_of_round = divmod(state.global_step, args.num_iterations)
        if rest_of_round:
            return
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
        """Answer the sample prompts and measure the model if it is due."""
        every = self._config.eval_every
        if not every or (number % every and number != self._config.rounds):
            return
        write_evaluation(
            *(self._directory, number, self._trainer.accelerator.unwrap_model(self._trainer.model)),
            self._task.tokenizer,
            prompts=self._prompts,
            reward=self._task.reward,
            config=self._sampling,
            evaluate=self._task.evaluate,
        )


def _save_atomically(folder: Path, save: Callable[[Path], object]) -> None:
    """Save a model under a temporary name, flush it, then rename it: a run with its model counts as finished."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    for leftover in (temporary, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    save(temporary)
    flush_to_disk(*temporary.rglob("*"), temporary)
    temporary.rename(folder)


def split_held_out(config: LanguageConfig, task: Task) -> tuple[Any, Any | None]:
    """Return the prompts that train, at least one, and those of the target's responses; None: it needs none."""
    if not config.held_out:
        return task.prompts, None
    cut = len(task.prompts) - config.held_out
    if cut < 1:
        raise WhenceError(
            f"held_out is {config.held_out}, and there are {len(task.prompts)} prompts; at least one has to train."
        )
    return task.prompts.select(range(cut)), task.prompts.select(range(cut, len(task.prompts)))


_SAMPLE = 16  # prompts that are answered at each evaluation


def choose_sample_prompts(task: Task) -> Any:
    """Return the prompts whose answers are stored: the first of the test, or of the training if there is no test.

    The reward has to find its columns there, too; the test of a user has those that its own reward asks for.
    """
    needed = set(find_columns(task.reward, list_columns(task.prompts)))
    source = task.prompts if task.test is None or not needed <= set(list_columns(task.test)) else task.test
    return source.select(range(min(_SAMPLE, len(source))))
