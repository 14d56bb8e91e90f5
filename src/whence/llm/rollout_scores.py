"""Rollouts in files as trainers write them: read step by step in one form, and scored at a checkpoint."""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
import torch

from whence.core import Objective, RecordBatch, Target, Unit, WhenceError, library_versions, rows_of, suggest
from whence.llm.base import (
    average_rows,
    describe_rows_scored,
    list_infos,
    list_signals,
    list_tokens,
    make_table_rows,
    pad_rows,
)
from whence.llm.rollout_files import NAMES, Row, list_files, read_rows
from whence.llm.scores import GroupObjective, Scoring, SequenceReturn, add_reference, evaluate_rows, score
from whence.llm.text import (
    Tokens,
    check_tokenizer,
    context_length,
    encode_pair,
    join_messages,
    list_chats,
    list_vocabulary,
)
from whence.runs import RunDirectory, RunRecorder, digest_content, find_last_round, time_stage
from whence.scores import Influence
from whence.selection import ScoreAll, add_selection, summarise_selection

log = logging.getLogger("whence")

ROUND = 4096
"""Rows of a round at most where a file does not say steps; a step is one round."""


def read_steps(
    path: Path, columns: Mapping[str, str] = MappingProxyType({}), skipped: Counter[str] | None = None
) -> Iterator[pl.DataFrame]:
    """Yield the rows of each step as they stand in the files; steps that are interleaved come by their numbers.

    The columns are those of `NAMES`, as far as they are there, with `group_id` and `advantage` over the whole step,
    `reward.NAME` for each part of the reward and `info.NAME` for all others. A file that says no steps is one, and
    comes in parts of `ROUND` rows. All files are looked at before the first step comes.

    Args:
        path: a file, or a folder of them; see `whence.llm.rollout_files`.
        columns: names of columns that hold what `NAMES` lists, where they are others. That of the reward may be a sum,
            such as `accuracy + 0.1 * length`.
        skipped: counts rows that are left out, by the reason.

    Raises:
        WhenceError: there are no rollouts; or a file cannot be read, or lacks a column.
    """
    if unknown := sorted(columns.keys() - NAMES.keys()):
        raise WhenceError(f"columns has {unknown[0]!r}.{suggest(unknown[0], NAMES)}")
    skipped = Counter[str]() if skipped is None else skipped
    files = list_files(path, skipped)
    table = _survey(read_rows(file, columns, skipped) for file in files)
    if table.is_empty():
        raise WhenceError(f"{path} holds no rollouts: {_list_skipped(skipped) or 'its files are empty'}.")
    if not ("advantage" in table.columns or table["reward"].count()):
        raise WhenceError(f"{path} holds no reward that is a number. Name another column: --column reward=NAME.")
    table = add_advantages(_join_groups(table, named="group" in columns)).select("step", "group_id", "advantage")
    rows: Iterator[Row] = chain.from_iterable(read_rows(file, columns, Counter()) for file in files)
    if table["step"].rle_id().n_unique() > table["step"].n_unique():
        table = table.with_row_index("place").sort("step", maintain_order=True)
        everything = list(rows)
        rows = (everything[place] for place in table["place"])
    for step in table.partition_by("step", maintain_order=True):
        size = ROUND if step["step"][0] < 0 else len(step)
        for part in step.iter_slices(size):
            yield _make_table([next(rows) for _ in range(len(part))], part)


def _survey(files: Iterator[Iterator[Row]]) -> pl.DataFrame:
    """Return what advantages need of each row: its step, group, prompt, reward and advantage.

    A file without steps has a number below 0; these are in the files' order.
    """
    kinds = {"step": pl.Int64, "group": pl.String, "prompt": pl.Int64, "reward": pl.Float64, "advantage": pl.Float64}
    parts = []
    for number, rows in enumerate(files, -(2**53)):
        cells = [
            (
                number if row["step"] is None else row["step"],
                None if row.get("group") is None else str(row["group"]),
                hash(json.dumps(row.get("prompt") or row.get("prompt_ids"), default=str)),
                row.get("reward"),
                row.get("advantage"),
            )
            for row in rows
        ]
        parts.append(pl.DataFrame(cells, kinds, orient="row"))
    table = pl.concat(parts)
    return table if table["advantage"].count() else table.drop("advantage")


def _join_groups(table: pl.DataFrame, *, named: bool) -> pl.DataFrame:
    """Return a survey whose group is the files' id where that is one of a prompt's responses, and else the prompt.

    An id that each row has for itself, or that is of several prompts, is of something else. `named`: the user says
    that the column holds groups.
    """
    prompts = pl.col("prompt").n_unique().over("step", "group")
    groups, texts = (pl.struct("step", name).n_unique() for name in ("group", "prompt"))
    is_shared = (groups < pl.len()) | (texts == pl.len())
    if table["group"].null_count() or not (named or table.select(is_shared & (prompts.max() == 1)).item()):
        if table["group"].count():
            log.warning("The files' ids are not of the responses to one prompt: rows are grouped by their prompts.")
        return table.drop("group")
    return table


def _make_table(rows: Sequence[Row], part: pl.DataFrame) -> pl.DataFrame:
    """Return rows as a table, with the group and the advantage of each."""
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name) for row in rows] for name in ("prompt", "response", *names)}
    chats = [name for name in ("prompt", "response") if any(isinstance(value, list) for value in values[name])]
    kinds: dict[str, Any] = {
        **{"prompt": pl.String, "response": pl.String, **dict.fromkeys(chats, pl.Object)},
        **{name: pl.Float64 for name in names if name == "reward" or name.startswith("reward.")},
        **{"prompt_ids": pl.List(pl.Int64), "response_ids": pl.List(pl.Int64), "response_mask": pl.List(pl.Boolean)},
        "log_probs": pl.List(pl.Float64),
    }
    series = [pl.Series(name, values[name], kind) for name, kind in kinds.items() if name in values]
    infos = list_infos({name[5:]: values[name] for name in names if name.startswith("info.")})
    steps = [part["step"]] if part["step"][0] >= 0 else []
    return pl.DataFrame([*series, *steps, *infos, part["group_id"], part["advantage"]])


def _list_skipped(skipped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in skipped.items())


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

    Each step becomes a round. A score says what a step of training on the row, from the checkpoint, does to the target.
    All files are looked at before the directory is touched; rows that are left out are counted in a warning. If the
    directory holds a part of the same scores, the rest follows.

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
        "contents": {**about.get("contents", {}), "rollouts": _digest_files(Path(path))},
    }
    skipped = Counter[str]()
    steps = _encode_steps(read_steps(Path(path), columns, skipped), model, tokenizer, max_tokens, skipped)
    if (first := next(steps, None)) is None:
        raise WhenceError(f"{path} holds no rollouts that can be scored: {_list_skipped(skipped)}.")
    recorder = RunRecorder(run)
    versions = library_versions(("whence", "torch", "transformers"))
    checkpoint = recorder.begin(description, versions=versions, overwrite=overwrite, find=find_last_round)
    if checkpoint is not None:
        recorder.continue_after(checkpoint)
    recorder.plan_vocabulary(lambda: list_vocabulary(tokenizer))
    done = 0 if checkpoint is None else checkpoint.round
    try:
        for number, (table, tokens) in enumerate(chain([first], steps), 1):
            if number <= done:
                continue
            seconds: dict[str, dict[str, float]] = {}
            with time_stage(seconds, "scoring"):
                prompts, responses, masks = zip(*tokens, strict=True)
                device = next(iter(model.parameters())).device
                rows = make_table_rows(table, pad_rows(prompts, responses, tokenizer.pad_token_id, device, masks))
                if reference is not None:
                    rows = add_reference(rows, reference, temperature, batch_size)
                influence = score(model, rows, scoring)
                signals = _compare_samplers(table, rows, model, temperature, batch_size)
            table = _add_scores(table, rows, influence, tokenizer).with_columns(signals)
            recorder.write_round(number, table)
            summary = summarise_selection(ScoreAll().select(rows), influence)
            recorder.write_rows({"round": number, **average_rows(table), **summary}, seconds)
            if on_round is not None:
                on_round(number, len(table))
        if skipped:
            log.warning("%s: left out were %s.", path, _list_skipped(skipped))
    finally:
        recorder.end()
    return RunDirectory.open(run)


def _digest_files(path: Path) -> dict[str, str | None]:
    """Return a digest of each file of rollouts; those of further steps may follow."""
    files = list_files(path, Counter())
    return {file.relative_to(path if path.is_dir() else path.parent).as_posix(): digest_content(file) for file in files}


def _encode_steps(
    steps: Iterator[pl.DataFrame], model: Any, tokenizer: Any, most: int | None, skipped: Counter[str]
) -> Iterator[tuple[pl.DataFrame, list[Tokens]]]:
    """Yield what `_encode` returns of each step, but of those without a row that the model can read."""
    first_id = 0
    for step in steps:
        table, tokens = _encode(step.with_row_index("record_id", first_id), model, tokenizer, most, skipped)
        first_id += len(step)
        if tokens:
            yield table, tokens


def _encode(
    table: pl.DataFrame, model: Any, tokenizer: Any, most: int | None, skipped: Counter[str]
) -> tuple[pl.DataFrame, list[Tokens]]:
    """Return the rows that the model can read, and the tokens of their prompts and responses, and which of these count.

    Tokens that a file does not say come from its texts; a text's response has `most` at most.
    """
    context, encoded, places = context_length(model), list[Tokens](), []
    vocabulary = model.get_input_embeddings().num_embeddings
    for place, row in enumerate(table.iter_rows(named=True)):
        prompt, response = row.get("prompt_ids"), row.get("response_ids")
        texts = {
            "prompt": row["prompt"] if prompt is None else "",
            "completion": row["response"] if response is None else "",
        }
        try:
            tokens = encode_pair(place, texts, tokenizer, None)
        except WhenceError:
            skipped["rows whose messages the chat template does not write as they are"] += 1
            continue
        tokens = Tokens(tokens.prompt if prompt is None else prompt, tokens.response[:most], tokens.mask[:most])
        if response is not None:
            tokens = Tokens(tokens.prompt, response, row.get("response_mask") or [True] * len(response))
        if context is not None and len(tokens.prompt) + len(tokens.response) > context:
            skipped[f"rows of more than the {context:,} tokens that the model reads"] += 1
        elif max([*tokens.prompt, *tokens.response], default=0) >= vocabulary:
            skipped["rows with token ids that the model does not have"] += 1
        elif not tokens.prompt or not any(tokens.mask):
            skipped["rows without a prompt, or a token that the model wrote"] += 1
        else:
            places.append(place)
            encoded.append(tokens)
    return table[places].cast({"record_id": pl.Int64}), encoded


def add_advantages(table: pl.DataFrame) -> pl.DataFrame:
    """Return rows with `group_id`, a number for each group or prompt of a step, and `advantage`, if they have none.

    That is verl's GRPO: the reward less the group's mean, over its standard deviation; where no group of a step has
    several rows, the reward less the step's mean. A row without a reward has 0. Without a column `step` it is one step.
    """
    key = table["group"] if "group" in table.columns else table["prompt"]
    order = pl.DataFrame({"key": list(map(str, key.to_list()))}).with_row_index("first")
    order = order.with_columns(table["step"] if "step" in table.columns else pl.lit(0).alias("step"))
    first = pl.col("first").min().over("step", "key")
    table = table.with_columns(order.select(group_id=first.rank("dense").over("step").cast(pl.Int64) - 1))
    if "advantage" in table.columns:
        return table.with_columns(pl.col("advantage").cast(pl.Float64).fill_nan(0.0).fill_null(0.0))
    reward, group, step = pl.col("reward").cast(pl.Float64).fill_nan(None), pl.col("group_id"), pl.col("step")
    numbers = table.select(order["step"], group, reward)
    mean, spread = reward.mean(), reward.std().over(step, group).fill_null(0.0)
    shared, single = (reward - mean.over(step, group)) / (spread + 1e-6), reward - mean.over(step)
    is_single = group.n_unique().over(step) == pl.len().over(step)
    advantage = pl.when(is_single).then(single).otherwise(shared).fill_null(0.0)
    return table.with_columns(numbers.select(advantage=advantage))


def _compare_samplers(
    table: pl.DataFrame, rows: RecordBatch, model: Any, temperature: float, batch_size: int
) -> list[pl.Series]:
    """Return the rows' log-probs at the checkpoint, and those of the sampler, as columns; none if files have none."""
    if "log_probs" not in table.columns:
        return []
    columns: Any = rows.observations
    log_probs = evaluate_rows(model, rows, temperature, batch_size).log_prob
    mask, lengths = columns["response_mask"].cpu(), list_tokens(rows)[1].list.len().to_list()
    known = [[math.nan if each is None else each for each in values or ()] for values in table["log_probs"].to_list()]
    sampler = torch.tensor([values + [math.nan] * (mask.shape[1] - len(values)) for values in known])
    sampler = sampler.masked_fill(sampler.isinf(), math.nan)
    return list_signals(mask, lengths, log_probs=log_probs, sampler_log_probs=sampler)


def _add_scores(step: pl.DataFrame, rows: RecordBatch, influence: Influence, tokenizer: Any) -> pl.DataFrame:
    """Return a round's table as trainers of whence write it."""
    if "step" in step.columns:
        step = step.rename({"info.step": "info.files_step", "step": "info.step"}, strict=False)
    infos = [series for series in step if series.name.startswith("info.")]
    tokens = list_tokens(rows)
    chats = {name: step[name].to_list() for name in ("prompt", "response")}
    for (name, values), ids in zip(chats.items(), tokens[:2], strict=True):
        decoded = (tokenizer.decode(each, skip_special_tokens=True) if None in values else "" for each in ids)
        chats[name] = [text if value is None else value for value, text in zip(values, decoded, strict=True)]
    table = step.select("record_id", "group_id").with_columns(
        *(pl.Series(name, list(map(join_messages, column))) for name, column in chats.items()),
        *(series for series in step if series.name in ("reward", "advantage") or series.name.startswith("reward.")),
        tokens[2].list.sum().cast(pl.Int64).alias("tokens"),
        *infos,
        *list_chats(chats),
        *tokens,
    )
    return add_selection(table, ScoreAll().select(rows), influence)
