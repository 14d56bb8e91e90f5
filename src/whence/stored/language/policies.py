"""The policies of a language model's run: where each round's is, which are there, and what loads them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from whence.core import RunDirectoryError, Unsupported, WhenceError, preserve_rng_state
from whence.llm.base import PPOConfig, has_adapter
from whence.llm.ppo import read_trl_settings
from whence.llm.text import read_chat
from whence.llm.trl.trl_run import RUN_ID, count_steps, read_run_id
from whence.runs import RunDirectory, checkpoint_path, digest_content
from whence.stored.language.language_config import LanguageConfig, knows_policies
from whence.stored.language.tasks import (
    Task,
    hide_progress_bars,
    load_checkpoint,
    load_task,
    load_trained_model,
    refuse_reward,
)


class StoredPolicies(NamedTuple):
    """The rounds whose policy is there, those whose policy is not, the checkpoints' folder, and how to keep all."""

    rounds: list[int]
    missing: list[int]
    folder: Path
    remedy: str


def check_origin(run: RunDirectory) -> None:
    """Refuse a run that does not say where its policies are, or is not trusted."""
    if not knows_policies(run):
        raise WhenceError(
            f"{run.path} does not say where its model and checkpoints are: no training by whence's trainers made it, "
            "or an older version. Its texts can be compared nevertheless (--by bm25); in a script, "
            "whence.llm.score_tokens takes scores apart."
        )
    run.trusted(run.config)


def read_settings(run: RunDirectory) -> Any:
    """Return the settings of a run's trainer: a `PPOConfig`, or what has the attributes of TRL's configuration."""
    if "trl" not in run.config:
        return PPOConfig(str(run.path), **run.config.get("ppo", {}))
    return SimpleNamespace(**read_trl_settings(run.config))


def locate_checkpoints(run: RunDirectory) -> Path:
    """Return the folder that a run's checkpoints are in, or would be; a script's may be anywhere."""
    check_origin(run)
    return run.path / (str(run.config.get("output_dir", "trl")) if "trl" in run.config else "checkpoints")


def locate_policy(run: RunDirectory, number: int) -> Path | None:
    """Return where the checkpoint of a round's policy is, or would be; None: it is the start model."""
    folder = locate_checkpoints(run)
    if number == 1:
        return None
    if "trl" not in run.config:
        return checkpoint_path(run.path, number - 1)
    return folder / f"checkpoint-{(number - 1) * count_steps(read_settings(run))}"


def has_policy(run: RunDirectory, number: int) -> bool:
    """Return whether a round's policy is there; of a script's training it may have begun with a model of no name."""
    path = locate_policy(run, number)
    if run.experiment:
        return path is None or path.exists()
    trains_all = run.config["trained_parameters"] == run.config["parameters"]  # else an adapter, which is not stored
    has_start = run.config["model"] is not None and trains_all
    return has_start if path is None else path.exists() and (has_start or "trl" in run.config)


def list_policies(run: RunDirectory) -> StoredPolicies:
    """Return which rounds' policies are there."""
    rounds = run.rounds()
    stored = [number for number in rounds if has_policy(run, number)]
    missing = [number for number in rounds if number not in stored]
    return StoredPolicies(stored, missing, locate_checkpoints(run), tell_how_to_keep(run))


def tell_how_to_keep(run: RunDirectory) -> str:
    """Return the settings by which a training keeps all policies."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    if "trl" not in run.config:
        settings = {"save_every": 1, "keep_checkpoints": run.config["rounds"]}
    elif not run.experiment:
        settings["save_steps"] = count_steps(read_settings(run))
    if run.experiment:
        return f"--settings '{json.dumps(settings)}'"
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def require_policy(run: RunDirectory, number: int) -> Path | None:
    """Return where a round's policy is, see `locate_policy`; if it is not there, the error says how to keep all."""
    path = locate_policy(run, number)
    if not has_policy(run, number):
        reason = f"{path} is not there"
        if path is None or path.exists():
            reason = "the script began with a model that was in no folder, or with a new adapter"
        start = "Round 1 needs no checkpoint; to" if run.experiment else "To"
        raise RunDirectoryError(
            f"The policy that drew the responses of round {number} was not kept: {reason}. {start} keep all policies "
            f"train with {tell_how_to_keep(run)}."
        )
    if path is not None and "trl" in run.config and read_run_id(path) not in (None, run.notes.get(RUN_ID)):
        raise RunDirectoryError(f"{path} is of another run than {run.path}: a later training wrote into its folder.")
    return path


@hide_progress_bars()
def load_run_task(run: RunDirectory, folder: Path | None = None) -> Task:
    """Return a run's task, without its reward, with the start model, or the one in a folder in Transformers' format."""
    check_origin(run)
    if run.experiment:
        config = LanguageConfig.from_json(run.experiment)
        torch.manual_seed(config.seed)  # for the weights of an adapter, as `language_training.run` does
        task = load_task(config, rewards=False)
        task.model.to("cuda" if torch.cuda.is_available() else "cpu")
        return task if folder is None else replace(task, model=load_trained_model(task.model, folder))
    if folder is None and digest_content(Path(run.config["model"])) != run.config["weights"]:
        raise RunDirectoryError(f"{run.config['model']} has changed since {run.path} began with it. Restore it.")
    model, tokenizer = load_checkpoint(str(folder or run.config["model"]), "float32")
    prompts = [{"prompt": read_chat(run.round("records", run.rounds()[0]).row(0, named=True), "prompt")}]
    return Task(model, tokenizer, prompts, refuse_reward, None, None, None)


def check_trained(run: RunDirectory, model: Any) -> None:
    """Refuse a model of which other parameters would get gradients than a script trained."""
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not run.experiment and count != run.config["trained_parameters"]:
        raise Unsupported(
            f"{run.config['trained_parameters']} parameters trained in {run.path}, and {count} would get gradients in "
            f"{'the adapter' if has_adapter(model) else 'the model'} as stored: the script froze or changed some."
        )


@preserve_rng_state()
def load_trained_task(run: RunDirectory) -> tuple[Task, float] | None:
    """Return a run's task with the trained model, and the sampling temperature; None: no trained model is there."""
    check_origin(run)
    folder: Path | None = run.path / "model"
    if not run.path.joinpath("model").is_dir():
        last = run.rounds()[-1] + 1
        if run.experiment or "trl" not in run.config or not has_policy(run, last):
            return None
        folder = require_policy(run, last)
    return load_run_task(run, folder), float(read_settings(run).temperature)
