"""Rollouts in files as trainers write them: read step by step in one form, and scored at a checkpoint.

- TRL (`log_completions=True`): `completions_00012.parquet` with step, prompt, completion, a column for each reward
  function, and advantage.
- verl (`trainer.rollout_data_dir`): `12.jsonl` with input, output, score, step, and what the reward function returned.
- Any other: Parquet or JSON lines with a prompt, a response and a reward, and if there are: step, group, advantage.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
from pyarrow import ArrowException, parquet

from whence.core import Objective, RecordBatch, Target, Unit, WhenceError, first_line, library_versions, rows_of
from whence.llm.base import (
    TokenRows,
    average_rows,
    describe_rows_scored,
    list_infos,
    list_tokens,
    make_table_rows,
    pad_rows,
)
from whence.llm.scores import GroupObjective, Scoring, SequenceReturn, add_reference, score
from whence.llm.text import check_tokenizer, context_length, encode_pair, join_messages, list_chats, list_vocabulary
from whence.runs import Checkpoint, RunDirectory, RunRecorder, time_stage
from whence.scores import Influence
from whence.selection import ScoreAll, add_selection, summarise_selection

ROUND = 4096
"""Rows of a round at most: a longer step becomes several."""

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": ("prompt", "input"),
        "response": ("response", "completion", "output"),
        "reward": ("reward", "score"),
        "step": ("step", "global_step"),
        "group": ("group", "group_id", "uid"),
        "advantage": ("advantage",),
        "prompt_ids": ("prompt_ids",),
        "response_ids": ("response_ids",),
    }
)
"""What is read of a row, and the columns that hold it by the names of trainers, the first one that is there."""

_NEEDED = "prompt", "response"
_SUFFIXES = ".parquet", ".jsonl", ".json", ".ndjson"


def read_steps(path: Path, columns: Mapping[str, str] = MappingProxyType({})) -> Iterator[pl.DataFrame]:
    """Yield the rows of each step, in the order of the files' numbers and of their rows; a long step in parts.

    The columns are those of `NAMES`, as far as they are there, with `reward.NAME` for each of several reward functions
    and `info.NAME` for all others. No part of a step divides consecutive rows of one group, or of one prompt.

    Args:
        path: a file, or a folder of them.
        columns: names of columns that hold what `NAMES` lists, where they are others.

    Raises:
        WhenceError: there are no rollouts; or a file cannot be read, or lacks a column.
    """
    rest: pl.DataFrame | None = None
    for file in list_files(path):
        for batch in _read_batches(file):
            table = _rename(batch, columns, file)
            rest = table if rest is None else pl.concat([rest, table], how="diagonal_relaxed")
            *steps, rest = _split(rest)
            yield from steps
        if rest is not None and "step" not in rest.columns:  # a file is a step
            yield rest
            rest = None
    if rest is not None and not rest.is_empty():
        yield rest


def list_files(path: Path) -> list[Path]:
    """Return a file, or the files of rollouts in a folder, in the order of the numbers in their names."""
    if path.is_file() and path.suffix in _SUFFIXES:
        return [path]
    files = [file for file in path.glob("*") if file.suffix in _SUFFIXES] if path.is_dir() else []
    if not files:
        raise WhenceError(
            f"{path} holds no rollouts: a Parquet file or one of JSON lines is needed, or a folder of them "
            f"({', '.join(f'*{suffix}' for suffix in _SUFFIXES)})."
        )
    return sorted(files, key=lambda file: ([int(number) for number in re.findall(r"\d+", file.stem)], file.name))


def _read_batches(file: Path) -> Iterator[pl.DataFrame]:
    """Yield a file's rows, some thousands at a time, so that a large file is never in memory as a whole."""
    try:
        if file.suffix == ".parquet":
            for batch in parquet.ParquetFile(file).iter_batches(ROUND):  # Polars would read whole groups of rows
                yield pl.DataFrame(pl.from_arrow(batch))
            return
        with file.open("rb") as lines:
            while chunk := b"".join(islice(lines, ROUND)):
                yield pl.read_ndjson(io.BytesIO(chunk), infer_schema_length=None)
    except (OSError, ArrowException, pl.exceptions.PanicException, pl.exceptions.PolarsError) as broken:
        kind = "Parquet" if file.suffix == ".parquet" else "JSON lines"
        raise WhenceError(f"{file} cannot be read as {kind}: {first_line(broken)}") from None


def _rename(table: pl.DataFrame, columns: Mapping[str, str], file: Path) -> pl.DataFrame:
    """Return a file's table with the columns of `NAMES`, `reward.NAME` and `info.NAME`."""
    sources = {}
    for name, usual in NAMES.items():
        source = columns.get(name) or next((each for each in usual if each in table.columns), None)
        if (source is not None and source not in table.columns) or (source is None and name in _NEEDED):
            raise WhenceError(
                f"{file} has no column {source or ' or '.join(usual)!r} for the {name}; it has: "
                f"{', '.join(table.columns)}. Name the right one: --column {name}=NAME."
            )
        if source is not None:
            sources[name] = source
    others = [name for name in table.columns if name not in sources.values()]
    parts: list[str] = []
    if "reward" not in sources:  # TRL's: a column for each function
        parts = [name for name in others if table.schema[name].is_numeric()]
        if not parts and "advantage" not in sources:
            raise WhenceError(f"{file} has no reward among its columns: {', '.join(table.columns)}. See --column.")
    renamed = [pl.col(source).alias(name) for name, source in sources.items()]
    if parts:
        renamed.append(pl.sum_horizontal(pl.col(name).fill_nan(None) for name in parts).alias("reward"))
    renamed += [pl.col(name).alias(f"reward.{name}") for name in parts if len(parts) > 1]
    renamed += [pl.col(name).alias(f"info.{name}") for name in others if name not in parts]
    return table.select(renamed)


def _split(table: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the steps of a table in parts of at most `ROUND` rows, if groups allow; more rows may follow the last."""
    runs = table.with_columns(_run=pl.col("step").rle_id() if "step" in table.columns else 0)
    parts: list[pl.DataFrame] = []
    for step in runs.partition_by("_run", include_key=False, maintain_order=True):
        while len(step) > ROUND:
            place = _find_cut(step)
            parts.append(step.head(place))
            step = step.slice(place)
        parts.append(step)
    return parts


def _find_cut(step: pl.DataFrame) -> int:
    """Return the last place up to `ROUND` at which a group, or a prompt, ends; `ROUND` where there is none."""
    column = step["group" if "group" in step.columns else "prompt"].head(ROUND + 1)
    runs: Any = column.rle_id()
    place = int((runs == runs[-1]).arg_max() or 0)
    return place or ROUND


SCORED = "scored"
"""The `algorithm` of a run whose rollouts come from files."""


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
    temperature: float = 1.0,
    batch_size: int = 16,
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
        temperature: the sampling temperature of the responses.
        batch_size: rows of a pass.
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
    scoring = Scoring(target, objective, temperature, "auto", None, batch_size, leave_one_out=leave_one_out)
    description = {
        **describe_rows_scored(model, ScoreAll(), scoring),
        "algorithm": SCORED,
        "rollouts": str(path),
        "columns": dict(columns),
        "max_tokens": max_tokens,
        "temperature": temperature,
        **about,
    }
    recorder = RunRecorder(run)
    versions = library_versions(("whence", "torch", "transformers"))
    checkpoint = recorder.begin(description, versions=versions, overwrite=overwrite, find=_find_last_round)
    if checkpoint is not None:
        recorder.continue_after(checkpoint)
    recorder.write_vocabulary(lambda: list_vocabulary(tokenizer))
    done, first_id = 0 if checkpoint is None else checkpoint.round, 0
    try:
        for number, step in enumerate(read_steps(Path(path), columns), 1):
            if number > done:
                seconds: dict[str, dict[str, float]] = {}
                with time_stage(seconds, "scoring"):
                    table = add_advantages(step.with_row_index("record_id", first_id).cast({"record_id": pl.Int64}))
                    rows = make_table_rows(table, _read_tokens(table, model, tokenizer, max_tokens))
                    if reference is not None:
                        rows = add_reference(rows, reference, temperature, batch_size)
                    influence = score(model, rows, scoring)
                table = _add_scores(table, rows, influence)
                recorder.write_round(number, table)
                summary = summarise_selection(ScoreAll().select(rows), influence)
                recorder.write_rows({"round": number, **average_rows(table), **summary}, seconds)
                if on_round is not None:
                    on_round(number, len(step))
            first_id += len(step)
    finally:
        recorder.end()
    return RunDirectory.open(run)


def _find_last_round(run: Path) -> Checkpoint:
    """Return where scoring stopped: after the last round that has its rows. It needs nothing else to continue."""
    return Checkpoint(RunDirectory.open(run).table("metrics").height, {}, run)


def _read_tokens(table: pl.DataFrame, model: Any, tokenizer: Any, most: int | None) -> TokenRows:
    """Return the tokens of a round's prompts and responses, on the model's device; from texts at `most` tokens."""
    if {"prompt_ids", "response_ids"} <= set(table.columns):
        pairs = list(zip(table["prompt_ids"].to_list(), table["response_ids"].to_list(), strict=True))
    else:
        texts = table.select("prompt", completion="response").iter_rows(named=True)
        encoded = (encode_pair(number, row, tokenizer, None) for number, row in enumerate(texts))
        pairs = [(prompt, response[:most]) for prompt, response in encoded]
    longest, context = max(len(prompt) + len(response) for prompt, response in pairs), context_length(model)
    if context is not None and longest > context:
        raise WhenceError(f"A rollout has {longest} tokens, and the model reads {context}. Leave such rows out.")
    prompts, responses = zip(*pairs, strict=True)
    return pad_rows(prompts, responses, tokenizer.pad_token_id, next(iter(model.parameters())).device)


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
