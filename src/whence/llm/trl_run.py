"""The run directory of a training by TRL's trainers."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl
import torch
from transformers import TrainerCallback

from whence.errors import WhenceError
from whence.llm.tables import list_tokens
from whence.runs import RunDirectory, strip_addresses
from whence.selection import Selection
from whence.tables import add_selection, summarise_selection
from whence.targets import target_name

_LIBRARIES = ("whence", "torch", "transformers", "trl", "accelerate")
_ELSEWHERE = ("output_dir", "logging_dir", "run_name", "max_steps", "seed")


def count_steps(args: Any) -> int:
    """Return the optimiser steps that TRL takes on a generation batch.

    Args:
        args: TRL's GRPOConfig or RLOOConfig.

    Raises:
        WhenceError: a step would be on parts of two generation batches.
    """
    batches, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    if batches % accumulation:
        raise WhenceError(
            f"steps_per_generation is {batches} and gradient_accumulation_steps {accumulation}; a round of a run "
            "directory is a generation batch, so the first has to be a multiple of the second."
        )
    steps: int = args.num_iterations * (batches // accumulation)
    return steps


class RunWriter(TrainerCallback):  # type: ignore[misc]
    """Writes each generation batch to a run directory, after the last step on it.

    A training that Transformers resumes from its checkpoint goes on in its directory; another one starts it over.

    Args:
        trainer: a trainer of `whence.llm.trl`.
        folder: the run directory.
        about: a further description of the run, in JSON types.

    Raises:
        WhenceError: see `count_steps`; or two reward functions have the same name, under which TRL logs their rewards.
    """

    def __init__(self, trainer: Any, folder: str | Path, about: Mapping[str, Any] | None = None) -> None:
        self._trainer, self._folder, self._about = trainer, Path(folder), dict(about or {})
        self._steps = count_steps(trainer.args)
        _check_reward_names(trainer.reward_func_names)
        self._batch: tuple[pl.DataFrame, dict[str, Any]] | None = None
        self._directory: RunDirectory | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Open the directory."""
        if not state.is_world_process_zero:
            return
        done, description = state.global_step // self._steps, self._describe(-(-state.max_steps // self._steps))
        if done and (self._folder / "config.json").exists():
            self._directory = RunDirectory.resume(self._folder, description, rounds=done, may_change=("rounds",))
        else:
            versions = {name: version(name) for name in _LIBRARIES}
            shared = Path(args.output_dir).resolve().is_relative_to(self._folder.resolve())
            self._directory = RunDirectory.create(self._folder, description, versions=versions, shared=shared)

    def note_batch(self) -> None:
        """Take a generation batch from TRL's table of completions, of which an evaluation would soon leave nothing."""
        trainer, size = self._trainer, self._trainer.args.generation_batch_size
        if self._directory is None:
            return
        logs = {name: list(trainer._logs[name])[-size:] for name in ("prompt", "completion", "advantages")}
        texts = {name: list(map(join_messages, logs[name])) for name in ("prompt", "completion")}
        by_function = torch.tensor([list(values)[-size:] for values in trainer._logs["rewards"].values()])
        rewards = (by_function.double() * trainer.reward_weights.double().cpu()[:, None]).nansum(dim=0)
        table = pl.DataFrame({"prompt": texts["prompt"], "response": texts["completion"], "reward": rewards.tolist()})
        table = table.with_columns(pl.Series("advantage", logs["advantages"], dtype=pl.Float64))
        if trainer.rows is not None:
            lengths = trainer.rows.observations["response_mask"].sum(dim=1)
            tokens = list_tokens(trainer.rows, trainer.processing_class, trainer.influence_parts)
            table = table.with_columns(pl.Series("tokens", lengths.tolist()), *tokens)
        everything = Selection.dropping(torch.ones(len(table), dtype=torch.bool), "")
        selection, influence = trainer.selection or everything, trainer.influence
        keep = pl.Series(selection.keep.numpy())
        metrics = {
            "reward": table["reward"].mean(),
            "reward_kept": table.filter(keep)["reward"].mean(),
            "reward_dropped": table.filter(~keep)["reward"].mean(),
            **({} if trainer.rows is None else {"length": table["tokens"].mean()}),
            **summarise_selection(selection, influence),
        }
        self._batch = add_selection(table, selection, influence), metrics

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Write the generation batch after the last of its steps."""
        if self._directory is None or self._batch is None or state.global_step % self._steps:
            return
        number, (table, metrics) = state.global_step // self._steps, self._batch
        first, self._batch = (number - 1) * len(table), None
        ids = pl.Series("record_id", range(first, first + len(table)), dtype=pl.Int64)
        self._directory.write_round("records", number, table.select(ids, pl.all()))
        self._directory.append("metrics", {"round": number, **metrics})
        seconds = self._trainer.seconds
        flat = {f"{stage}_{clock}": value for stage, clocks in seconds.items() for clock, value in clocks.items()}
        self._directory.append("timings", {"round": number, **flat})
        seconds.clear()

    def _describe(self, rounds: int) -> dict[str, Any]:
        trainer = self._trainer
        model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
        return {
            "kind": "language",
            "algorithm": "rloo" if "RLOO" in type(args).__name__ else "grpo",
            **self._about,
            "model": getattr(model.config, "_name_or_path", "") or None,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "rule": strip_addresses(repr(trainer.rule)),
            "target": strip_addresses(target_name(trainer.target)),
            "objective": strip_addresses(repr(trainer.influence_objective)),
            "engine": trainer.influence_engine,
            "processes": trainer.accelerator.num_processes,
            "device": str(trainer.accelerator.device),
            "rounds": rounds,
            "seed": args.seed,
            "trl": _list_settings(args),
        }


def _check_reward_names(names: Sequence[str]) -> None:
    """Refuse reward functions of the same name: TRL's table holds the rewards of one of them only."""
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise WhenceError(
            f"Several reward functions are called {repeated[0]!r}, so that TRL logs the rewards of one of them only, "
            "and a run directory would hold wrong ones. Set another __name__ on each."
        )


def _list_settings(args: Any) -> dict[str, Any]:
    """Return TRL's settings that differ from their defaults, those of JSON types."""
    settings = {}
    for one in fields(args):
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        value = getattr(args, one.name)
        if one.name not in _ELSEWHERE and type(value) in (bool, int, float, str) and value != default:
            settings[one.name] = value
    return settings


def join_messages(text: Any) -> str:
    """Return a text, or the content of a chat's messages as one text."""
    return text if isinstance(text, str) else "".join(str(message["content"]) for message in text)
