"""Rounds of a language model's run, built again, and the score of a response taken apart by tokens and target rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from whence.core import (
    MeanObjective,
    Objective,
    RecordBatch,
    RunDirectoryError,
    Target,
    Unsupported,
    describe_part,
    preserve_rng_state,
    rows_of,
    show,
)
from whence.llm.base import (
    EXTRA_PADDING,
    PPOConfig,
    Reference,
    TokenRows,
    WithValueHead,
    list_tokens,
    make_table_rows,
    read_tokens,
)
from whence.llm.ppo import load_parameters, make_rollout
from whence.llm.rollout_scores import SCORED
from whence.llm.scores import (
    RESPONSE_TARGETS,
    GroupObjective,
    Scoring,
    SequenceReturn,
    TokenPPO,
    add_reference,
    evaluate_rows,
    make_group_objective,
    score_target_rows,
    score_tokens,
    split_mean,
)
from whence.llm.text import Responses, split_text
from whence.runs import RunDirectory
from whence.stored.language.language_config import LanguageConfig, knows_policies
from whence.stored.language.policies import (
    check_origin,
    check_trained,
    has_policy,
    load_run_task,
    read_settings,
    require_policy,
)
from whence.stored.language.tasks import (
    Task,
    hide_progress_bars,
    load_checkpoint,
    make_scored_target,
    make_validation_target,
    scoring_memory,
)


@dataclass(frozen=True, eq=False)
class RebuiltRound:
    """The policy that drew a round's responses, its records, a row for each, and what scores them.

    That is how the run scored them, or by the target that was asked for, which has rows.
    """

    model: Any
    tokenizer: Any
    table: pl.DataFrame
    rows: RecordBatch
    scoring: Scoring


@hide_progress_bars()
@preserve_rng_state()
def rebuild_round(
    run: RunDirectory, number: int, *, make_target: Callable[[Task], Target] | None = None
) -> RebuiltRound:
    """Return a round of a run, as it was scored.

    `make_target` makes a target with rows of its own from the run's task; None: the target of the run's scores, which
    is refused if its rows were drawn in the round and not kept.
    """
    if run.config.get("algorithm") == SCORED and make_target is None:
        return _rebuild_scored(run, number)
    check_origin(run)
    scored_by = str((run.config.get("target") or {}).get("target"))  # "None" of a run without scores
    make_mean = {make.__qualname__: make for make in RESPONSE_TARGETS.values()}.get(scored_by)
    if make_target is None:
        _check_kept_target(run, is_mean=make_mean is not None)
    policy, settings, table = require_policy(run, number), read_settings(run), run.round("records", number)
    if "trl" not in run.config:
        task, size = load_run_task(run), settings.mini_batch_size
        model, rows, objective = _rebuild_ppo(run, number, task, settings, table, policy)
    else:
        task, size = load_run_task(run, policy), settings.per_device_train_batch_size
        rows, objective = _rebuild_trl_rows(run, task, settings, table)
        model = task.model
    check_trained(run, model)
    _check_objective(run, objective)
    if make_target is None and make_mean is not None:
        target = make_mean(rows, batch_size=size)
    else:
        target = (make_target or make_validation_target)(task)
    memory = scoring_memory(LanguageConfig.from_json(run.experiment)) if run.experiment else None
    scoring = Scoring(target, objective, float(settings.temperature), "auto", memory, size)
    return RebuiltRound(model, task.tokenizer, table, rows, scoring)


def _check_kept_target(run: RunDirectory, *, is_mean: bool) -> None:
    """Refuse a run whose scores are of what each round had drawn or done, or of a script, and of what was not kept."""
    target = run.config.get("target") or {}
    what = None
    if target.get("target") == MeanObjective.__qualname__:
        what = "the objective of the steps that were taken in each round"
    elif run.config.get("held_out"):
        what = "over responses that were drawn in each round"
    elif not run.experiment and (not is_mean or target.get("rows") is not None):
        what = "of the script"
    if what is not None:
        raise Unsupported(f"The target of this run is {what} and not kept, so its scores cannot be taken apart.")


def _check_objective(run: RunDirectory, objective: Objective) -> None:
    """Refuse a script's run whose objective was not its trainer's, since what it named is not made again."""
    if not run.experiment and (stored := run.config.get("objective")) not in (
        None,
        describe_part("objective", objective),
    ):
        raise Unsupported(
            f"{run.path} was scored by an objective of the script's, {show(stored)}, which is not stored. Its "
            "texts can be compared: --by bm25."
        )


def _rebuild_scored(run: RunDirectory, number: int) -> RebuiltRound:
    """Return a round of rollouts that were scored from files, with the checkpoint that they were scored at."""
    config, table = run.trusted(run.config), run.round("records", number)
    model, tokenizer = load_checkpoint(config["model"], config["dtype"])
    rows = make_stored_rows(table, tokenizer, next(iter(model.parameters())).device)
    size, beta = config["batch_size"], config.get("beta", 0.0)
    if beta:
        reference, _ = load_checkpoint(config["reference"], config["dtype"])
        rows = add_reference(rows, reference, config["temperature"], size)
    target: Any = make_scored_target(config["target_kind"], config["demonstrations"], tokenizer, size)
    if rows_of(target) is None:
        target = replace(target, rows=rows)
    scoring = Scoring(target, GroupObjective("sum", beta, corrected=True), config["temperature"], "auto", None, size)
    return RebuiltRound(model, tokenizer, table, rows, scoring)


def make_stored_rows(table: pl.DataFrame, tokenizer: Any, device: Any) -> RecordBatch:
    """Return the stored responses of a round as rows; a response's advantage is that of each of its tokens."""
    return make_table_rows(table, read_tokens(table, tokenizer.pad_token_id, device))


def load_start_policy(run: RunDirectory, number: int, model: str | None = None) -> tuple[Any, Any]:
    """Return the policy that drew a round's responses, without a value head, and its tokenizer.

    `model` is the checkpoint, a folder or an id; None: the run's own.
    """
    if model is None and run.config.get("algorithm") == SCORED:
        model = run.trusted(run.config["model"])
    if model is not None:
        return load_checkpoint(model, run.config.get("dtype", "float32"))
    if not knows_policies(run) or (run.is_trusted and not has_policy(run, number)):
        raise RunDirectoryError(
            f"The policy before round {number} of {run.path} was not kept, or it is not known where it is. Name its "
            "checkpoint: --model FOLDER."
        )
    rebuilt = rebuild_round(run, number, make_target=lambda task: SequenceReturn())
    return getattr(rebuilt.model, "language_model", rebuilt.model), rebuilt.tokenizer


def rebuild_rows(run: RunDirectory, number: int) -> RecordBatch:
    """Return the rows of a round as it trained on them, with the advantage of each token, by its policy."""
    return rebuild_round(run, number, make_target=lambda task: SequenceReturn()).rows


def _rebuild_ppo(
    run: RunDirectory, number: int, task: Task, settings: PPOConfig, table: pl.DataFrame, policy: Path | None
) -> tuple[Any, RecordBatch, Objective]:
    """Return the policy with its value head, the rows with advantages computed again, and the objective."""
    model, tokens = WithValueHead(task.model), read_tokens(table, task.tokenizer.pad_token_id, task.model.device)
    reference = Reference(model.language_model)
    if policy is not None:
        load_parameters(policy, model)
    kl_coef = run.table("metrics").filter(pl.col("round") == number)["kl_coef"][0]
    rewards, first_id = table["reward"].to_list(), table["record_id"][0]
    ended = torch.tensor(table["ended"].to_list(), device=tokens.input_ids.device)
    responses = Responses(*tokens, ended, table["prompt"].to_list(), table["response"].to_list())
    rollout = make_rollout(model, reference, responses, lambda prompts, texts: rewards, kl_coef, settings, first_id)
    return model, rollout.rows, TokenPPO(clip_range=settings.cliprange)


def _rebuild_trl_rows(
    run: RunDirectory, task: Task, settings: Any, table: pl.DataFrame
) -> tuple[RecordBatch, Objective]:
    """Return the rows with the advantages that TRL gave, and the objective."""
    objective, multiple = make_group_objective(settings), getattr(settings, "pad_to_multiple_of", None)
    ids, attended, mask = read_tokens(table, task.tokenizer.pad_token_id, task.model.device)
    widths = _list_prompt_widths(table, run.config.get("processes", 1), multiple).to(mask.device)
    missing = int(widths.max()) + mask.shape[1] - ids.shape[1]
    rows = make_table_rows(table, TokenRows(pad(ids, (missing, 0)), pad(attended, (missing, 0)), mask))
    columns: Any = {**rows.observations, EXTRA_PADDING: widths.max() - widths}
    rows = rows.with_columns({"observations": columns})
    if objective.beta:
        rows = add_reference(rows, load_run_task(run).model, settings.temperature, 64)
    return rows, objective


def _list_prompt_widths(table: pl.DataFrame, processes: int, multiple: int | None) -> Int[Tensor, " n"]:
    """Return, for each row, the width of the prompts in TRL's batch: that of its process's longest one."""
    lengths = torch.tensor(table["prompt_ids"].list.len().to_list())
    widths = lengths.reshape(processes, -1).amax(dim=1)
    if multiple is not None:
        widths = -(-widths // multiple) * multiple
    return widths.repeat_interleave(len(lengths) // processes)


NEARLY = 0.01
"""Of a round's largest score: a score that is computed again and differs by more is said to differ."""


@dataclass(frozen=True)
class Explanation:
    """A response's score, taken apart.

    Attributes:
        row: the response's row of the round's records.
        tokens: the text that each token of the response adds.
        parts: the part of the score that each token contributes.
        log_probs: of each token, under the round's policy.
        entropies: of what could have stood there, in nats.
        pulls: the target's rows, the largest part first, with `part`, `prompt` and `response`, and for rows of the
            round their `record` and `advantage`. Above 0, training on the response raises the row's term.
        note: how a score that was computed again differs from the stored one; None: it does not.
    """

    row: Mapping[str, Any]
    tokens: list[str]
    parts: list[float]
    log_probs: list[float]
    entropies: list[float]
    pulls: pl.DataFrame
    note: str | None


def explain_response(run: RunDirectory, number: int, record: int) -> Explanation:
    """Return a response's tokens with their parts of its score, and the target's rows that it pulls at.

    They are computed by the round's policy, which is built again.
    """
    table = run.round("records", number)
    places = (table["record_id"] == record).arg_true()
    if not len(places):
        raise RunDirectoryError(f"Round {number} of {run.path} has no record {record}.")
    position = int(places[0])
    row, rebuilt = table.row(position, named=True), rebuild_round(run, number)
    alone = rebuilt.rows.take(slice(position, position + 1))
    if run.config.get("leave_one_out") == "row" and rebuilt.scoring.target.rows is rebuilt.rows:  # type: ignore[attr-defined]
        rebuilt = _leave_out(rebuilt, position)
    scoring = rebuilt.scoring
    settings: Any = {name: getattr(scoring, name) for name in ("objective", "temperature", "chunk_size")}
    parts = score_tokens(rebuilt.model, alone, target=scoring.target, **settings)
    products = score_target_rows(rebuilt.model, alone, 0, target=scoring.target, **settings)
    pulls = _describe_target_rows(rebuilt).with_columns(part=pl.Series(products.tolist())).sort("part", descending=True)
    tokens = split_text(rebuilt.tokenizer, row["response_ids"])
    note = _compare(run, table, row, float(products.sum()))
    outputs = evaluate_rows(rebuilt.model, alone, scoring.temperature, 1, with_entropy=True)
    assert outputs.entropy is not None
    columns = (parts, outputs.log_prob, outputs.entropy)
    part, log_prob, entropy = (column[0, : len(tokens)].tolist() for column in columns)
    return Explanation(row, tokens, part, log_prob, entropy, pulls, note)


def _leave_out(rebuilt: RebuiltRound, position: int) -> RebuiltRound:
    """Return a round, and its target, without one of the rows."""
    others = torch.arange(len(rebuilt.rows)) != position
    rows, target = rebuilt.rows.take(others), rebuilt.scoring.target
    scoring = replace(rebuilt.scoring, target=replace(target, rows=rows))  # type: ignore[type-var]
    return replace(rebuilt, table=rebuilt.table.filter(pl.Series(others.numpy())), rows=rows, scoring=scoring)


def _describe_target_rows(rebuilt: RebuiltRound) -> pl.DataFrame:
    """Return record, prompt, response and advantage of the target's rows; of demonstrations the texts alone."""
    rows, _ = split_mean(rebuilt.scoring.target, rebuilt.rows)
    if rows is rebuilt.rows:
        return rebuilt.table.select(pl.col("record_id").alias("record"), "prompt", "response", "advantage")
    texts = {
        name: [rebuilt.tokenizer.decode(ids, skip_special_tokens=True) for ids in column.to_list()]
        for name, column in zip(("prompt", "response"), list_tokens(rows)[:2], strict=True)
    }
    return pl.DataFrame(texts).with_columns(record=pl.lit(None, pl.Int64), advantage=pl.lit(None, pl.Float64))


def _compare(run: RunDirectory, table: pl.DataFrame, row: Mapping[str, Any], score: float) -> str | None:
    if row.get("score") is None or abs(score - row["score"]) <= NEARLY * table["score"].abs().max():  # type: ignore[operator]
        return None
    if run.config.get("select") == "in_step":
        return (
            f"Before the round's steps the score is {score:.4g}. {row['score']:.4g} was stored: the run scored each "
            "response in its own first step, by a gradient of the target that was known before."
        )
    return (
        f"Computed again, the score is {score:.4g}, and {row['score']:.4g} was stored: the run had another precision, "
        "device or version, or its model or data have changed since."
    )
