"""A round of a language model's run, built again: its policy, its rows, and what they were scored by."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from whence.errors import RunDirectoryError, Unsupported, WhenceError
from whence.experiments.llm.language_config import LanguageConfig
from whence.experiments.llm.loading import load_pretrained
from whence.experiments.llm.tasks import Task, load_task, make_validation_target, scoring_memory
from whence.experiments.llm.trainer_config import make_trainer_config
from whence.guards import preserve_rng_state
from whence.llm import SequenceReturn, TokenPPO, TokenReturn, WithValueHead, make_rows
from whence.llm.base.language_view import EXTRA_PADDING
from whence.llm.base.ppo_config import PPOConfig
from whence.llm.base.progress_bars import hide_progress_bars
from whence.llm.base.value_head import Reference
from whence.llm.ppo.ppo_run import load_parameters
from whence.llm.ppo.rollout import evaluate_rows, make_rollout
from whence.llm.text.generation import Responses
from whence.llm.trl.supported_settings import make_group_objective
from whence.objectives import Objective
from whence.records import RecordBatch
from whence.runs import RunDirectory, checkpoint_path, read_tensor_file
from whence.targets import Target


@dataclass(frozen=True, eq=False)
class RebuiltRound:
    """A round's policy and rows, with what `whence.llm.score_tokens` needs.

    Attributes:
        model: the policy that drew the round's responses.
        tokenizer: its tokenizer.
        table: the round's records.
        rows: a row for each of them.
        target: the target of the run's scores, or the one that was asked for, with rows.
        objective: the objective of a row's training.
        temperature: the sampling temperature.
        memory: bytes that scoring may hold; None: those of `chunk_size` rows.
        chunk_size: rows of a pass.
    """

    model: Any
    tokenizer: Any
    table: pl.DataFrame
    rows: RecordBatch
    target: Target
    objective: Objective
    temperature: float
    memory: int | None
    chunk_size: int


def rebuild_round(
    run: RunDirectory, number: int, *, make_target: Callable[[Task], Target] | None = None
) -> RebuiltRound:
    """Return a round of a run of `whence llm train`, as it was scored.

    Args:
        run: the run's directory.
        number: the round.
        make_target: makes a target with rows of its own from the run's task; None: the target of the run's scores.

    Raises:
        RunDirectoryError: the round or its policy is not there; the message says how to keep policies.
        WhenceError: the run was not made by the command, or its model or data are not there.
        Unsupported: the target's rows were drawn in the round and not kept.
    """
    config, table = _read_config(run), run.round("records", number)
    if missing := {"prompt_ids", "response_ids", "reward", "advantage"} - set(table.columns):
        raise RunDirectoryError(
            f"Round {number} of {run.path} has no column {min(missing)}, so its rows cannot be built again: an earlier "
            "version of whence wrote it. Train again."
        )
    if make_target is None and (config.held_out or config.target == "held-out"):
        raise Unsupported(
            "The target of this run is over responses that were drawn in each round and not kept, so its scores cannot "
            "be taken apart."
        )
    settings = make_trainer_config(config, str(run.path))
    policy = _locate_policy(run, config, settings, number)
    with preserve_rng_state(), hide_progress_bars():
        torch.manual_seed(config.seed)  # for the weights of an adapter, as `training.run` does
        task = load_task(config, rewards=False)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        responses = _read_responses(table, task.tokenizer, device)
        rebuild = _rebuild_ppo if config.algorithm == "ppo" else _rebuild_trl
        task.model.to(device)
        model, rows, objective = rebuild(run, number, task, settings, responses, table, policy)
        if make_target is None and config.target == "validation":
            make_target = make_validation_target
        target: Any = None if make_target is None else make_target(task)
    if target is None:
        target = TokenReturn(rows) if config.target == "token" else SequenceReturn(rows)
    is_ppo = config.algorithm == "ppo"
    size = settings.mini_batch_size if is_ppo else settings.per_device_train_batch_size
    return RebuiltRound(
        *(model, task.tokenizer, table, rows, replace(target, batch_size=size) if target.rows is rows else target),
        *(objective, float(settings.temperature), scoring_memory(config), size),
    )


_SCORE_TOKENS = "In the script, whence.llm.score_tokens returns what this command shows."
_COMPARE_TEXTS = (
    "Its texts can be compared nevertheless (--by bm25). Or score its rows in the script: whence.attribute, with "
    "ValidationLoss.of the prompt and the response as the target."
)


def _read_config(run: RunDirectory, remedy: str = _SCORE_TOKENS) -> LanguageConfig:
    experiment = run.config.get("experiment")
    if run.config.get("kind") != "language" or not isinstance(experiment, dict):
        raise WhenceError(f"{run.path} is no run of `whence llm train`, so its model and data are not known. {remedy}")
    return LanguageConfig.from_json(experiment)


def _locate_policy(run: RunDirectory, config: LanguageConfig, settings: Any, number: int) -> Path | None:
    """Return the checkpoint of the policy that drew a round's responses; None: it is the start model.

    Raises:
        RunDirectoryError: it is not there.
    """
    path = _name_checkpoint(run, config, settings, number)
    if path is not None and not path.exists():
        raise RunDirectoryError(
            f"The policy that drew the responses of round {number} was not kept: {path} is not there. Round 1 needs no "
            f"checkpoint; to keep all policies train with --settings '{_tell_how_to_keep(config)}'."
        )
    return path


def _name_checkpoint(run: RunDirectory, config: LanguageConfig, settings: Any, number: int) -> Path | None:
    """Return where the checkpoint of a round's policy is, or would be; None: it is the start model."""
    if number == 1:
        return None
    if config.algorithm == "ppo":
        return checkpoint_path(run.path, number - 1)
    return run.path / "trl" / f"checkpoint-{(number - 1) * settings.num_iterations}"


def _tell_how_to_keep(config: LanguageConfig) -> str:
    if config.algorithm == "ppo":
        return f'{{"save_every": 1, "keep_checkpoints": {config.rounds}}}'
    return '{"save_strategy": "steps", "save_steps": 1}'


@dataclass(frozen=True)
class StoredPolicies:
    """Which rounds' policies are there.

    Attributes:
        rounds: the rounds whose policy is there.
        missing: the rounds whose policy was not kept.
        settings: the settings with which all policies are kept, as JSON.
    """

    rounds: list[int]
    missing: list[int]
    settings: str


def list_policies(run: RunDirectory) -> StoredPolicies:
    """Return which rounds' policies are there.

    Raises:
        WhenceError: the run was not made by `whence llm train`.
    """
    config = _read_config(run, _COMPARE_TEXTS)
    settings = make_trainer_config(config, str(run.path))
    paths = {number: _name_checkpoint(run, config, settings, number) for number in run.rounds()}
    missing = [number for number, path in paths.items() if path is not None and not path.exists()]
    return StoredPolicies([number for number in paths if number not in missing], missing, _tell_how_to_keep(config))


def load_trained_task(run: RunDirectory) -> tuple[Task, float] | None:
    """Return a run's task with the trained model, and the sampling temperature; None: no trained model is there.

    Raises:
        WhenceError: the run was not made by `whence llm train`, or its model or data are not there.
    """
    config, folder = _read_config(run, _COMPARE_TEXTS), run.path / "model"
    if not folder.is_dir():
        return None
    with preserve_rng_state(), hide_progress_bars():
        task = load_task(config, rewards=False)
        task = replace(task, model=_load_trained_model(task.model, folder))
    return task, float(make_trainer_config(config, str(run.path)).temperature)


def _read_responses(table: pl.DataFrame, tokenizer: Any, device: str) -> Responses:
    """Return a round's prompts and responses, padded on the left and on the right."""
    prompts, responses = table["prompt_ids"].to_list(), table["response_ids"].to_list()
    pads = max(map(len, prompts)), max(1, *map(len, responses))
    ids = torch.full((len(table), sum(pads)), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        place = slice(pads[0] - len(prompt), pads[0] + len(response))
        ids[row, place], mask[row, place] = torch.tensor([*prompt, *response]), 1
    ended = table["ended"].to_list() if "ended" in table.columns else [True] * len(table)
    return Responses(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        response_mask=mask[:, pads[0] :].bool().to(device),
        ended=torch.tensor(ended, device=device),
        prompts=table["prompt"].to_list(),
        texts=table["response"].to_list(),
    )


def _rebuild_ppo(
    run: RunDirectory,
    number: int,
    task: Task,
    settings: PPOConfig,
    responses: Responses,
    table: pl.DataFrame,
    policy: Path | None,
) -> tuple[Any, RecordBatch, Objective]:
    """Return the policy with its value head, the rows with advantages computed again, and the objective."""
    model = WithValueHead(task.model)
    reference = Reference(model)
    if policy is not None:
        load_parameters(policy, model)
    metrics = run.table("metrics").filter(pl.col("round") == number)
    rewards = table["reward"].to_list()
    rollout = make_rollout(
        model,
        reference,
        responses,
        lambda prompts, texts: rewards,
        metrics["kl_coef"][0],
        settings,
        first_id=table["record_id"][0],
    )
    return model, rollout.rows, TokenPPO(clip_range=settings.cliprange)


def _rebuild_trl(
    run: RunDirectory,
    number: int,
    task: Task,
    settings: Any,
    responses: Responses,
    table: pl.DataFrame,
    policy: Path | None,
) -> tuple[Any, RecordBatch, Objective]:
    """Return the policy, the rows with the advantages that TRL gave, and the objective."""
    objective, mask = make_group_objective(settings), responses.response_mask
    advantages = torch.tensor(table["advantage"].to_list(), device=mask.device, dtype=torch.float32)
    multiple = getattr(settings, "pad_to_multiple_of", None)
    widths = _list_prompt_widths(table, run.config.get("processes", 1), multiple).to(mask.device)
    missing = int(widths.max()) + mask.shape[1] - responses.input_ids.shape[1]
    rows = make_rows(
        input_ids=pad(responses.input_ids, (missing, 0)),
        attention_mask=pad(responses.attention_mask, (missing, 0)),
        response_mask=mask,
        log_probs=torch.zeros(mask.shape, device=mask.device),
        advantages=torch.where(mask, advantages[:, None], 0.0),
        record_ids=torch.tensor(table["record_id"].to_list()),
    )
    columns: Any = {**rows.observations, EXTRA_PADDING: widths.max() - widths}
    rows = rows.with_columns({"observations": columns})
    if objective.beta:
        reference = _evaluate_start_model(task.model, rows, settings)
        rows = rows.with_columns({"observations": {**columns, "ref_log_probs": torch.where(mask, reference, 0.0)}})
    model = task.model if policy is None else _load_trained_model(task.model, policy)
    return model, rows, objective


def _list_prompt_widths(table: pl.DataFrame, processes: int, multiple: int | None) -> Int[Tensor, " n"]:
    """Return, for each row, the width of the prompts in TRL's batch: that of its process's longest one."""
    lengths = torch.tensor(table["prompt_ids"].list.len().to_list())
    widths = lengths.reshape(processes, -1).amax(dim=1)
    if multiple is not None:
        widths = -(-widths // multiple) * multiple
    return widths.repeat_interleave(len(lengths) // processes)


def _evaluate_start_model(model: Any, rows: RecordBatch, settings: Any) -> Tensor:
    sampling = PPOConfig("runs/evaluated", temperature=settings.temperature, generation_batch_size=64)
    return evaluate_rows(model, rows, sampling).log_prob


def _load_trained_model(model: Any, folder: Path) -> Any:
    """Return the model in a folder in Transformers' format; where it is an adapter, the model with this adapter."""
    if not hasattr(model, "disable_adapter"):
        return load_pretrained(AutoModelForCausalLM, str(folder), dtype=model.dtype).to(model.device)
    from peft import set_peft_model_state_dict

    _, tensors = read_tensor_file(folder / "adapter_model.safetensors", RunDirectoryError)
    set_peft_model_state_dict(model, tensors)
    return model
