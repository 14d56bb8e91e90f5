"""Scores of rollouts in files, at a checkpoint, as a run directory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

from whence.core import Objective, RecordBatch, Target, Unit, WhenceError, rows_of, target_name
from whence.llm.base import TokenRows, average_rows, list_infos, list_tokens, make_table_rows, pad_rows
from whence.llm.base.run_description import read_versions
from whence.llm.files.rollout_files import read_steps
from whence.llm.scores import GroupObjective, Scoring, SequenceReturn, add_reference, score
from whence.llm.text import check_tokenizer, context_length, encode_pair, join_messages, list_chats, list_vocabulary
from whence.runs import Checkpoint, RunDirectory, RunWriter, strip_addresses, time_stage, write_vocabulary
from whence.scores import Influence
from whence.selection import ScoreAll, add_selection, summarise_selection

SCORED = "scored"
"""The `algorithm` of a run whose rollouts come from files."""

_LIBRARIES = ("whence", "torch", "transformers")


def score_rollouts(
    path: str | Path,
    model: Any,
    tokenizer: Any,
    run: str | Path,
    *,
    target: Target | None = None,
    objective: Objective | None = None,
    reference: Any = None,
    beta: float = 0.0,
    leave_one_out: Unit | None = "row",
    columns: Mapping[str, str] = MappingProxyType({}),
    max_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    temperature: float = 1.0,
    batch_size: int = 16,
    memory: int | None = None,
    about: Mapping[str, Any] = MappingProxyType({}),
    overwrite: bool = False,
    on_round: Callable[[int, int], None] | None = None,
) -> RunDirectory:
    """Score the rollouts that a trainer wrote, at one checkpoint, and return them as a run directory.

    Each step becomes a round, or several of at most 4,096 rows. A score says what a step of training on the row, from
    the checkpoint, does to the target. Files are read piece by piece. If the directory holds a part of the same scores,
    the rest follows.

    Args:
        path: a file or a folder; see `read_steps`.
        model: a causal language model of Transformers; the parameters with `requires_grad` are scored.
        tokenizer: its tokenizer.
        run: the directory.
        target: what is raised; None: `SequenceReturn()`, over the rows of the round.
        objective: what training on a row raises; None: the sum over tokens of ratio times advantage, at ratios of 1,
            minus `beta` times the divergence from the reference, as TRL's default is. verl's is
            `GroupObjective("sum", beta)`, without TRL's correction of the divergence.
        reference: the model that the divergence is measured from, on the device of `model`; None: there is none.
        beta: weight of the divergence.
        leave_one_out: for a target over the scored rows: what a row's own unit leaves out of it, since else each row
            votes for itself; None: nothing.
        columns: see `read_steps`.
        max_tokens: the most tokens of a response in the training: shorter ones ended, and get an end-of-text token.
            None: all ended.
        chat_template_kwargs: further arguments of the chat template.
        temperature: the sampling temperature of the responses.
        batch_size: rows of a pass.
        memory: bytes that scoring may hold at a time; None: those of `batch_size` rows.
        about: a further description of the run, in JSON types.
        overwrite: delete the run that the directory holds, and start anew.
        on_round: called with the number of each round and of its rows.

    Raises:
        WhenceError: the files cannot be read, or lack something; see `read_steps`.
        RunDirectoryError: the directory holds another run.
    """
    check_tokenizer(tokenizer)
    target = SequenceReturn(batch_size=batch_size) if target is None else target
    objective = GroupObjective("sum", beta, corrected=True) if objective is None else objective
    if (reference is None) != (getattr(objective, "beta", 0.0) == 0.0):
        raise WhenceError(
            f"beta is {getattr(objective, 'beta', 0.0)}, and reference is {reference and 'a model'}: a divergence has "
            "a weight above 0 and a model that it is measured from (--beta and --reference), or neither."
        )
    leave_one_out = None if rows_of(target) is not None else leave_one_out
    scoring = Scoring(target, objective, temperature, "auto", memory, batch_size, leave_one_out=leave_one_out)
    description = {
        "kind": "language",
        "algorithm": SCORED,
        "rollouts": str(path),
        "model": getattr(model.config, "_name_or_path", "") or None,
        "rule": repr(ScoreAll()),
        "target": strip_addresses(target_name(target)),
        "leave_one_out": leave_one_out,
        "objective": strip_addresses(repr(objective)),
        "columns": dict(columns),
        "max_tokens": max_tokens,
        "temperature": temperature,
        **about,
    }
    directory, writer = _open(Path(run), description, overwrite=overwrite)
    write_vocabulary(directory.path, list_vocabulary(tokenizer))
    done, first_id = directory.table("metrics").height, 0
    try:
        for number, step in enumerate(read_steps(Path(path), columns), 1):
            if number > done:
                seconds: dict[str, dict[str, float]] = {}
                with time_stage(seconds, "scoring"):
                    table = add_advantages(step.with_row_index("record_id", first_id).cast({"record_id": pl.Int64}))
                    tokens = _read_tokens(table, model, tokenizer, max_tokens, chat_template_kwargs)
                    rows = make_table_rows(table, tokens)
                    if reference is not None:
                        rows = add_reference(rows, reference, temperature, batch_size)
                    influence = score(model, rows, scoring)
                table = _add_scores(table, rows, influence)
                directory.write_round("records", number, table)
                summary = summarise_selection(ScoreAll().select(rows), influence)
                writer.write_rows({"round": number, **average_rows(table), **summary}, seconds)
                if on_round is not None:
                    on_round(number, len(step))
            first_id += len(step)
    finally:
        directory.release()
    return RunDirectory.open(run)


def _open(run: Path, description: dict[str, Any], *, overwrite: bool) -> tuple[RunDirectory, RunWriter]:
    exists = (run / "config.json").exists() and not overwrite
    if exists and RunDirectory.open(run).count_rounds() is not None:
        directory = RunDirectory.resume(run, description, rounds=RunDirectory.open(run).table("metrics").height)
        directory.remove_later()
        writer = RunWriter(directory, save_every=0)
        writer.go_on(Checkpoint(directory.table("metrics").height, {}, run))
        return directory, writer
    directory = RunDirectory.create(run, description, versions=read_versions(_LIBRARIES), overwrite=overwrite)
    return directory, RunWriter(directory, save_every=0)


def _read_tokens(
    table: pl.DataFrame, model: Any, tokenizer: Any, most: int | None, settings: Mapping[str, Any] | None
) -> TokenRows:
    """Return the tokens of a round's prompts and responses, on the model's device; from texts at `most` tokens."""
    if {"prompt_ids", "response_ids"} <= set(table.columns):
        pairs = list(zip(table["prompt_ids"].to_list(), table["response_ids"].to_list(), strict=True))
    else:
        texts = table.select("prompt", completion="response").iter_rows(named=True)
        encoded = (encode_pair(number, row, tokenizer, settings) for number, row in enumerate(texts))
        pairs = [(prompt, response[:most]) for prompt, response in encoded]
    longest, context = max(len(prompt) + len(response) for prompt, response in pairs), context_length(model)
    if context is not None and longest > context:
        raise WhenceError(f"A rollout has {longest} tokens, and the model reads {context}. Leave such rows out.")
    device = next(iter(model.parameters())).device
    tokens = pad_rows([prompt for prompt, _ in pairs], [response for _, response in pairs], tokenizer.pad_token_id)
    return TokenRows(*(column.to(device) for column in tokens))


def add_advantages(step: pl.DataFrame) -> pl.DataFrame:
    """Return a step with `group_id`, a number for each group or prompt, and `advantage`, from rewards if it has none.

    That is verl's GRPO: the reward less the group's mean, over its standard deviation; where no group has several rows,
    the reward less the step's mean. A row without a reward has 0.
    """
    key = step["group"] if "group" in step.columns else step["prompt"]
    texts = pl.Series(list(map(str, key.to_list()))) if key.dtype.is_nested() else key
    step = step.with_columns((texts.rank("dense") - 1).cast(pl.Int64).alias("group_id"))
    if "advantage" in step.columns:
        return step.with_columns(pl.col("advantage").cast(pl.Float64).fill_nan(0.0).fill_null(0.0))
    reward = pl.col("reward").cast(pl.Float64).fill_nan(None)
    if step["group_id"].n_unique() == len(step):
        advantage = reward - reward.mean()
    else:
        advantage = (reward - reward.mean().over("group_id")) / (reward.std().over("group_id").fill_null(0.0) + 1e-6)
    return step.with_columns(advantage.fill_null(0.0).alias("advantage"))


def _add_scores(step: pl.DataFrame, rows: RecordBatch, influence: Influence) -> pl.DataFrame:
    """Return a round's table as trainers of whence write it."""
    numbers = [name for name in step.columns if name in ("reward", "advantage") or name.startswith("reward.")]
    infos = {name[5:]: step[name].to_list() for name in step.columns if name.startswith("info.")}
    if "step" in step.columns:
        infos = {"step": step["step"].to_list(), **{f"files_{n}" if n == "step" else n: v for n, v in infos.items()}}
    texts = {name: list(map(join_messages, step[name].to_list())) for name in ("prompt", "response")}
    tokens = list_tokens(rows)
    table = step.select("record_id", "group_id").with_columns(
        *(pl.Series(name, column) for name, column in texts.items()),
        *(step[name].cast(pl.Float64).fill_nan(None) for name in numbers),
        tokens[1].list.len().cast(pl.Int64).alias("tokens"),
        *list_infos(infos),
        *list_chats({name: step[name].to_list() for name in ("prompt", "response")}),
        *tokens,
    )
    return add_selection(table, ScoreAll().select(rows), influence)
