"""A post-training run by GRPO or RLOO, with TRL's trainers."""

import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
import torch
from transformers import TrainerCallback

from whence.experiments.llm.config import LanguageConfig
from whence.experiments.llm.outputs import describe, save_atomically
from whence.experiments.llm.tasks import Task, check_lengths, load_task, make_validation_target, scoring_memory
from whence.experiments.llm.trainer_config import make_trainer_config
from whence.experiments.shared import OnRound
from whence.guards import preserve_rng_state
from whence.llm import SequenceReturn, TokenReturn
from whence.llm.progress_bars import hide_progress_bars
from whence.llm.prompts import list_columns
from whence.llm.rewards import Reward, compute_rewards, find_columns
from whence.llm.trl import InfluenceGRPOTrainer, InfluenceRLOOTrainer
from whence.runs import RunDirectory
from whence.selection import Selection
from whence.tables import add_selection, summarise_selection

TRAINERS: Mapping[str, Any] = MappingProxyType({"grpo": InfluenceGRPOTrainer, "rloo": InfluenceRLOOTrainer})
"""Trainers by the algorithm's name."""


def run_trl(config: LanguageConfig, path: Path, on_round: OnRound) -> None:
    """Train and evaluate as `config` says, and write the run's directory; an unfinished run is started over."""
    with hide_progress_bars():
        task = load_task(config)
    check_lengths(config, task)
    trainer_class = TRAINERS[config.algorithm]
    settings = make_trainer_config(config, str(path / "trl"))
    versions = {name: version(name) for name in ("whence", "torch", "transformers", "trl")}
    directory = RunDirectory.create(path, _describe_run(config, task), versions=versions)
    make_target: Any = {"sequence": SequenceReturn, "token": TokenReturn}.get(config.target or "sequence")
    writer = _RunWriter(config, task, directory, on_round)
    trainer = trainer_class(
        model=task.model,
        reward_funcs=_adapt_reward(task.reward),
        args=settings,
        train_dataset=_make_trl_dataset(task.prompts, task.reward),
        processing_class=task.tokenizer,
        callbacks=[writer],
        rule=config.make_rule(),
        target=make_validation_target(task) if make_target is None else make_target(),
        engine=config.engine,
        memory=scoring_memory(config),
    )
    writer.trainer = trainer
    if config.all_settings.get("eval_every", 1):
        writer.evaluate(0)
    on_round(0, {})
    with warnings.catch_warnings():
        # TRL uses deprecated names of Transformers.
        warnings.filterwarnings("ignore", ".*checkpointing.* is deprecated", FutureWarning)
        trainer.train()

    def save(folder: Path) -> None:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        task.tokenizer.save_pretrained(folder)

    with hide_progress_bars():
        save_atomically(path / "model", save)


def _describe_run(config: LanguageConfig, task: Task) -> dict[str, Any]:
    return {
        **describe(config),
        "kind": "language",
        "rounds": config.rounds,
        "seed": config.seed,
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


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
        texts = [_join_messages(completion) for completion in completions]
        return compute_rewards(reward, [_join_messages(prompt) for prompt in prompts], texts, columns).tolist()

    return compute


def _join_messages(text: Any) -> str:
    """Return a text, or the content of a chat's messages as one text."""
    return text if isinstance(text, str) else "".join(message["content"] for message in text)


class _RunWriter(TrainerCallback):  # type: ignore[misc]
    """Writes each generation batch to the run directory after its last step, and evaluates the model."""

    def __init__(self, config: LanguageConfig, task: Task, directory: RunDirectory, on_round: OnRound) -> None:
        self._config, self._task, self._directory, self._on_round = config, task, directory, on_round
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the generation batch after the last of its steps."""
        if state.global_step % args.num_iterations:
            return
        number, trainer = state.global_step // args.num_iterations, self.trainer
        logs, size = trainer._logs, args.generation_batch_size
        columns = {name: list(logs[name])[-size:] for name in ("prompt", "completion", "advantages")}
        rewards = [list(values)[-size:] for values in logs["rewards"].values()]
        table = pl.DataFrame(
            {
                "record_id": range((number - 1) * size, number * size),
                "prompt": list(map(_join_messages, columns["prompt"])),
                "response": list(map(_join_messages, columns["completion"])),
                "reward": [sum(row) for row in zip(*rewards, strict=True)],
                "advantage": columns["advantages"],
            }
        )
        everything = Selection.dropping(torch.ones(size, dtype=torch.bool), "")
        selection, influence = trainer.selection or everything, trainer.influence
        self._directory.write_round("records", number, add_selection(table, selection, influence))
        kept = table.filter(pl.Series(selection.keep.numpy()))["reward"]
        row = {
            "round": number,
            "reward": table["reward"].mean(),
            "reward_kept": kept.mean(),
            "length": sum(len(self._task.tokenizer(text)["input_ids"]) for text in table["response"]) / size,
            **summarise_selection(selection, influence),
        }
        self._directory.append("metrics", row)
        flat = {f"{stage}_{clock}": s for stage, clocks in trainer.seconds.items() for clock, s in clocks.items()}
        self._directory.append("timings", {"round": number, **flat})
        trainer.seconds = {}
        every = self._config.all_settings.get("eval_every", 1)
        if every and (number % every == 0 or number == self._config.rounds):
            self.evaluate(number)
        self._on_round(number, row)

    def evaluate(self, number: int) -> None:
        """Measure the model, without changing the draws of training."""
        if self._task.evaluate is None:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with preserve_rng_state():
            measures = dict(self._task.evaluate(model, self._task.tokenizer))
        self._directory.append("evaluations", {"round": number, **measures})
