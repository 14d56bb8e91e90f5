"""A language model's responses: one opened, by turns and tokens, those to one prompt, and those of all checkpoints."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl

from whence.page.content.explored_run import ExploredRun, Round, attempt
from whence.page.content.short_json import cut_text, round_numbers, spread

LONGEST_TEXT = 20_000
"""Characters of a prompt or response at most."""

GROUP = 32
"""Responses to one prompt that are shown at most."""

PROMPTS = 500
"""Prompts of a round that are listed at most."""

MOST_TOKENS = 4000
"""Tokens of a response whose numbers are shown at most."""

CHECKPOINTS = 12
"""Rounds of a run whose answers a page holds at most; two where there are more than `FEW` runs."""

FEW = 4

_EXCERPT = 160

_BEGIN = r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>"
_END = r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>"
_TURN = re.compile(rf"(?:{_BEGIN})\s*(\w+)(?:<\|end_header_id\|>)?\s*(.*?)\s*(?={_END}|{_BEGIN}|\Z)", re.DOTALL)
"""A turn in the templates of ChatML, Llama 3 and Gemma: its role and its text."""

_SIGNALS = ("log_probs", "entropies", "ratios")


def describe_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response's texts and numbers in JSON types; `rewards` are those of the reward functions."""
    return {
        "record": row["record_id"],
        **{name: _cut(row.get(name)) for name in ("prompt", "response")},
        **{name: round_numbers(row.get(name)) for name in ("reward", "advantage", "score", "error", "weight")},
        "rewards": {name[7:]: round_numbers(value) for name, value in row.items() if name.startswith("reward.")},
        "ended": row.get("ended"),
        "tokens_count": row.get("tokens"),
        "dropped": row.get("keep") is False,
    }


def describe_text(row: Mapping[str, Any], vocabulary: Sequence[str], *, with_tokens: bool = True) -> dict[str, Any]:
    """Return the turns of a prompt and of a response in JSON types, and what the policy says of each token.

    Returns:
        `turns`, lists of `role`, `text` and `calls` for "prompt" and "response", None where a text has no turns; and
        `tokens`: `texts`, and columns of numbers, as far as they were stored; None without tokens.
    """
    turns = {side: list_turns(row, side, vocabulary) for side in ("prompt", "response")}
    ids = row.get("response_ids")
    if not (with_tokens and vocabulary and ids):
        return {"turns": turns, "tokens": None}
    texts = [vocabulary[each] if each < len(vocabulary) else f"<{each}>" for each in ids[:MOST_TOKENS]]
    columns = {name: row.get(f"token_{name}") for name in _SIGNALS}
    log_probs, reference = columns["log_probs"], row.get("token_ref_log_probs")
    if log_probs and reference:
        pairs = zip(log_probs, reference, strict=True)
        columns["divergence"] = [None if None in pair else pair[0] - pair[1] for pair in pairs]
    shown = {name: round_numbers(values[:MOST_TOKENS], 3) for name, values in columns.items() if values}
    return {"turns": turns, "tokens": {"texts": texts, **shown}}


def list_turns(row: Mapping[str, Any], side: str, vocabulary: Sequence[str] = ()) -> list[dict[str, Any]] | None:
    """Return the turns of a prompt or a response, from its messages, or from its text's or its tokens' template."""
    if (messages := row.get(f"chat.{side}")) is not None:
        return [message | {"text": _cut(message.get("text"))} for message in json.loads(messages)]
    whole = str(row.get(side) or "")
    ids = row.get(f"{side}_ids")
    for text in (whole, "".join(vocabulary[each] for each in ids if each < len(vocabulary)) if ids else ""):
        if re.search(_BEGIN, text):
            begun = text if side == "prompt" or re.match(_BEGIN, text) else f"<|im_start|>assistant\n{text}"
            turns = [{"role": role, "text": _cut(said)} for role, said in _TURN.findall(begun)]
            return [turn for turn in turns if turn["text"]] or None
    return None


def list_group(records: Round, prompt: Any, details: Collection[int] = ()) -> dict[str, Any]:
    """Return the responses of a round to one prompt in JSON types, the highest reward first.

    Returns:
        `responses`, and `total`, their number before some are left out for want of room.
    """
    table = records.table
    if "prompt" not in table.columns:
        return {"responses": [], "total": 0}
    by = [pl.col(name) for name in ("reward", "score") if name in table.columns]
    rows = table.filter(pl.col("prompt") == prompt).sort(*by, "record_id", descending=[*[True] * len(by), False])
    responses = [describe_response(row) for row in rows.head(GROUP).iter_rows(named=True)]
    for response in responses:
        del response["prompt"]
        if response["record"] in details:
            del response["response"]
    return {"responses": responses, "total": len(rows)}


def list_groups(records: Round, details: Sequence[int]) -> list[dict[str, Any]]:
    """Return the groups of some records' prompts, those of more than one response; see `list_group`."""
    rows = records.table.filter(pl.col("record_id").is_in(list(details)))
    prompts = rows["prompt"].unique(maintain_order=True).to_list() if "prompt" in rows.columns else []
    groups = [list_group(records, prompt, details) for prompt in prompts]
    return [group for group in groups if group["total"] > 1]


def list_prompts(records: Round) -> list[dict[str, Any]]:
    """Return the prompts of a round in JSON types: means over their responses; the widest spread of rewards first."""
    table = records.table
    if "prompt" not in table.columns or table.is_empty():
        return []
    rewards = [name for name in table.columns if name.startswith("reward.")]
    named = [name for name in ("reward", "score", "tokens", "ended") if name in table.columns]
    deviation = pl.col("reward").cast(pl.Float64).std() if "reward" in named else pl.lit(None, pl.Float64)
    groups = table.group_by("prompt", maintain_order=True).agg(
        *([pl.col("chat.prompt").first()] if "chat.prompt" in table.columns else []),
        pl.col(*named, *rewards).cast(pl.Float64).mean(),
        records=pl.col("record_id"),
        responses=pl.len(),
        spread=deviation.fill_nan(None),
    )
    shown = []
    for row in groups.sort("spread", descending=True, nulls_last=True).head(PROMPTS).iter_rows(named=True):
        turns = list_turns(row, "prompt") or [{"text": row["prompt"]}]
        texts = {"prompt": cut_text(turns[-1]["text"], _EXCERPT), "records": row.pop("records")[:GROUP]}
        numbers = {name: round_numbers(value) for name, value in row.items() if not isinstance(value, str)}
        shown.append(texts | numbers)
    return shown


def read_answers(runs: Sequence[ExploredRun], notes: list[str]) -> dict[str, Any] | None:
    """Return the answers that runs stored of their checkpoints, in JSON types; None of fewer than two checkpoints.

    Returns:
        `prompts`, and `sources`: the `run`, the `round` (0: before training), and its `answers`, a `text` and a
        `reward` for each prompt; null where the model was not asked.
    """
    sources, prompts = list[tuple[str, int, dict[str, Any]]](), dict[str, None]()
    for run in runs:
        for number in spread(run.directory.rounds("answers"), CHECKPOINTS if len(runs) <= FEW else 2):
            failure = f"Answers of {run.label} cannot be shown"
            if answers := attempt(partial(_read_answers, run, number), notes, failure):
                sources.append((run.label, number, answers))
                prompts |= dict.fromkeys(answers)
    if len(sources) < 2:
        return None
    return {
        "prompts": [cut_text(prompt, LONGEST_TEXT) for prompt in prompts],
        "sources": [
            {"run": label, "round": number, "answers": [answers.get(prompt) for prompt in prompts]}
            for label, number, answers in sources
        ],
    }


def _read_answers(run: ExploredRun, number: int) -> dict[str, Any]:
    """Return a checkpoint's answers by their prompts, the first to each."""
    kinds = {"prompt": pl.String, "response": pl.String, "reward": pl.Float64}
    table = run.directory.round("answers", number).select(pl.col(name).cast(kind) for name, kind in kinds.items())
    rows = table.unique("prompt", keep="first", maintain_order=True).iter_rows()
    return {prompt: {"text": _cut(text), "reward": round_numbers(reward)} for prompt, text, reward in rows}


def _cut(text: Any) -> str:
    return cut_text(str(text or ""), LONGEST_TEXT)
