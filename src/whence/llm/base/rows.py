"""Prompts and responses as records, one a row, and as columns of a round's table."""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.core import Array, InvalidRecords, RecordBatch, Tree

log = logging.getLogger("whence")


class TokenRows(NamedTuple):
    """n prompts of up to P tokens, padded on the left, with responses of up to R, padded on the right; L = P + R."""

    input_ids: Int[Tensor, "n L"]
    attention_mask: Int[Tensor, "n L"]
    response_mask: Bool[Tensor, "n R"]


def pad_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad: int,
    device: Any = None,
    masks: Sequence[Sequence[bool]] | None = None,
) -> TokenRows:
    """Return the token ids of prompts and their responses as rows, filled up with `pad`, on a device; None: the CPU.

    Where `masks` are given, they say which tokens of a response count; those of a tool's answer do not.
    """
    width, length = max(map(len, prompts)), max(1, *map(len, responses))
    ids = torch.full((len(prompts), width + length), pad)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        place = slice(width - len(prompt), width + len(response))
        ids[row, place], mask[row, place] = torch.tensor([*prompt, *response]), 1
    counts = mask[:, width:].bool()
    for row, flags in enumerate(masks or ()):
        counts[row, : len(flags)] = torch.tensor(flags, dtype=torch.bool)
    return TokenRows(ids.to(device), mask.to(device), counts.to(device))


def read_tokens(table: pl.DataFrame, pad: int, device: Any = None) -> TokenRows:
    """Return the tokens of a stored round as rows; see `list_tokens`."""
    masks = table["response_mask"].to_list() if "response_mask" in table.columns else None
    return pad_rows(table["prompt_ids"].to_list(), table["response_ids"].to_list(), pad, device, masks)


def last_token(mask: Bool[Tensor, "n R"]) -> Tensor:
    """Return the position of each row's last response token, (n,) int64; 0 for a row without any."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, 0).amax(dim=1)


def make_rows(
    *,
    input_ids: Int[Tensor, "n L"],
    attention_mask: Int[Tensor, "n L"],
    response_mask: Bool[Tensor, "n R"],
    log_probs: Float[Tensor, "n R"] | None = None,
    advantages: Float[Tensor, "n R"] | None = None,
    values: Float[Tensor, "n R"] | None = None,
    returns: Float[Tensor, "n R"] | None = None,
    record_ids: Int[Tensor, " n"] | None = None,
    rewards: Float[Tensor, " n"] | None = None,
    group_ids: Int[Tensor, " n"] | None = None,
) -> RecordBatch:
    """Return rows of a language model as records: L = P + R, prompts of P tokens and responses of R, with padding.

    The columns of tokens are in `observations`, under the names of the arguments; they are 0 where there is no response
    token. The record's own columns are summaries: `actions`, (n, R), the response's token ids; `log_probs`, (n,), of
    the whole response; `advantages`, (n,), of its last token, 0 for an empty response.

    Args:
        input_ids: prompt, padded on the left or on the right, then response, padded on the right.
        attention_mask: 1 at tokens, 0 at padding. It gives the positions, so padding does not matter.
        response_mask: True at the tokens of the response that are scored, including its end-of-text token.
        log_probs: log-probs of the response tokens under the policy that drew them, at the sampling temperature; None:
            0, for rows whose log-probs are not read.
        advantages: advantages of the response tokens, normalised as for training: objectives do not do it again. None:
            0.
        values: values of the states before the response tokens.
        returns: the regression targets of the values.
        record_ids: see `RecordBatch`.
        rewards: the reward of each whole response.
        group_ids: a number for each prompt: responses of one number are to one prompt.

    Raises:
        InvalidRecords: shapes do not fit together, a response token is padding or follows padding, or a number is not
            finite.
    """
    mask = torch.as_tensor(response_mask).bool()
    ids, attended = torch.as_tensor(input_ids), torch.as_tensor(attention_mask)
    _check_rows(ids, attended, mask)
    zeros = torch.zeros(mask.shape, device=mask.device)
    columns = {
        "log_probs": zeros if log_probs is None else log_probs,
        "advantages": zeros if advantages is None else advantages,
        "values": values,
        "returns": returns,
    }
    tokens = {name: _mask_column(name, column, mask) for name, column in columns.items() if column is not None}
    observations: dict[str, Tree] = {"input_ids": ids, "attention_mask": attended, "response_mask": mask, **tokens}
    return RecordBatch(
        observations=observations,
        actions=ids[:, -mask.shape[1] :],
        log_probs=tokens["log_probs"].sum(dim=1),
        advantages=tokens["advantages"].gather(1, last_token(mask)[:, None]).squeeze(1),
        record_ids=record_ids,
        rewards=None if rewards is None else torch.as_tensor(rewards).to(mask.device),
        group_ids=None if group_ids is None else torch.as_tensor(group_ids).to(mask.device),
        # Each row is an episode; cross-fitting assigns folds by episode.
        episode_ids=torch.arange(len(mask)),
    )


def _check_rows(ids: Int[Tensor, "n L"], attended: Tensor, mask: Bool[Tensor, "n R"]) -> None:
    """Refuse rows with a response token that is padding, or that has no token before it."""
    shapes = [tuple(tensor.shape) for tensor in (ids, attended, mask)]
    fits = ids.ndim == mask.ndim == 2 and attended.shape == ids.shape and len(mask) == len(ids)
    if not fits or ids.is_floating_point() or not 0 < mask.shape[1] < ids.shape[1]:
        raise InvalidRecords(
            f"input_ids came as {shapes[0]} {str(ids.dtype)[6:]}, attention_mask as {shapes[1]} and response_mask as "
            f"{shapes[2]}; token ids (n, P + R), (n, P + R) and (n, R) are needed, with a prompt token at least. Of a "
            "mask over all tokens pass mask[:, 1:]."
        )
    width, attended = mask.shape[1], attended.bool()
    before = attended[:, -width - 1 : -1].clone()
    before[:, 0] = attended[:, :-width].any(dim=1)  # a prompt may be padded on either side
    invalid = (mask & ~(attended[:, -width:] & before)).any(dim=1)
    if invalid.any():
        raise InvalidRecords(
            f"Row {int(invalid.nonzero()[0])} has a response token that is padding, or that follows padding: "
            "response_mask is True where attention_mask is 0, or the prompt is empty, or there is a gap in the "
            "response. Pad responses on the right."
        )


def _mask_column(name: str, column: Array, mask: Bool[Tensor, "n R"]) -> Float[Tensor, "n R"]:
    """Return a column of response tokens, 0 where there is no token."""
    numbers = torch.as_tensor(column).detach().to(mask.device)
    if numbers.shape != mask.shape:
        raise InvalidRecords(
            f"`{name}` has shape {tuple(numbers.shape)}; one number for each response token is needed, shape "
            f"{tuple(mask.shape)}, as response_mask has."
        )
    if not numbers.is_floating_point():
        numbers = numbers.to(torch.get_default_dtype())
    return torch.where(mask, numbers, 0.0)


def list_tokens(rows: RecordBatch) -> list[pl.Series]:
    """Return columns with a list for each row, from which a round is built again.

    They are `prompt_ids`, `response_ids` and `response_mask`: which tokens of the response count.
    """
    columns: Any = rows.observations
    ids, attended = columns["input_ids"].cpu(), columns["attention_mask"].cpu().bool()
    mask, width = columns["response_mask"].cpu(), columns["response_mask"].shape[1]
    before, after = attended[:, :-width], attended[:, -width:]
    lists = {
        "prompt_ids": (ids[:, :-width], before, pl.Int32),
        "response_ids": (ids[:, -width:], after, pl.Int32),
        "response_mask": (mask, after, pl.Boolean),
    }
    return [
        pl.Series(name, [row[there].tolist() for row, there in zip(tokens, places, strict=True)], dtype=pl.List(kind))
        for name, (tokens, places, kind) in lists.items()
    ]


def make_table_rows(table: pl.DataFrame, tokens: TokenRows) -> RecordBatch:
    """Return a round's records as rows of these tokens, each with its advantage, and its reward if all have one."""
    mask = tokens.response_mask
    advantages = torch.tensor(table["advantage"].to_list(), device=mask.device, dtype=torch.float32)
    rewards = table["reward"].cast(pl.Float64).fill_nan(None) if "reward" in table.columns else None
    return make_rows(
        **tokens._asdict(),
        advantages=torch.where(mask, advantages[:, None], 0.0),
        record_ids=table["record_id"].to_torch(),
        rewards=None if rewards is None or rewards.null_count() else rewards.to_torch(),
        group_ids=table["group_id"].to_torch() if "group_id" in table.columns else None,
    )


MOST_INFOS = 32
"""Columns of a data set that are stored at most."""


def list_infos(columns: Mapping[str, Sequence[Any]]) -> list[pl.Series]:
    """Return a data set's columns as `info.NAME`: numbers, truth values or texts, and anything else as JSON."""
    names = list(columns)
    _warn_of_infos(tuple(names[MOST_INFOS:]))
    return [_make_info(f"info.{name}", list(columns[name])) for name in names[:MOST_INFOS]]


@cache
def _warn_of_infos(names: tuple[str, ...]) -> None:
    """Say once which columns are not stored."""
    if names:
        log.warning("Of a data set's columns the first %d are stored; left out are %s.", MOST_INFOS, ", ".join(names))


def _make_info(name: str, values: list[Any]) -> pl.Series:
    kinds = {type(value) for value in values} - {type(None)}
    is_large = any(isinstance(value, int) and abs(value) >= 2**127 for value in values)  # no column holds it
    if kinds == {int, float} and not is_large:
        return pl.Series(name, values, dtype=pl.Float64, strict=False)
    if is_large or len(kinds) > 1 or not kinds <= {bool, int, float, str}:
        values = [v if v is None or isinstance(v, str) else json.dumps(v, default=str) for v in values]
    return pl.Series(name, values)


def list_signals(
    mask: Bool[Tensor, "n R"],
    lengths: list[int],
    *,
    log_probs: Float[Tensor, "n R"],
    entropies: Float[Tensor, "n R"] | None = None,
    ref_log_probs: Float[Tensor, "n R"] | None = None,
    ratios: Float[Tensor, "n R"] | None = None,
    clip: tuple[float, float] | None = None,
    sampler_log_probs: Float[Tensor, "n R"] | None = None,
) -> list[pl.Series]:
    """Return numbers of tokens as columns of lists, and of each response as numbers; NaN is unknown.

    The numbers are `entropy`, the mean over tokens; `divergence` from the reference, the sum of differences of
    log-probs; `clip_share`, the share of ratios outside of `clip`; and `sampler_difference`, the mean |difference| of
    the sampler's log-probs from `log_probs`.

    Args:
        mask: the tokens that count; others, such as a tool's, have null.
        lengths: the tokens of each response in its column of ids.
        log_probs: under the policy that drew the response.
        entropies: of the same policy, in nats.
        ref_log_probs: under the reference model.
        ratios: of the probabilities after the last step on the response to those before the first.
        clip: the bounds of ratios.
        sampler_log_probs: as the program that drew the response computed them.
    """
    columns = {"log_probs": log_probs, "entropies": entropies, "ref_log_probs": ref_log_probs, "ratios": ratios}
    columns["sampler_log_probs"] = sampler_log_probs
    present = {n: torch.where(mask, c.float().cpu(), torch.nan) for n, c in columns.items() if c is not None}
    series = []
    for name, column in present.items():
        rows = [row[:length].tolist() for row, length in zip(column, lengths, strict=True)]
        lists = pl.Series(f"token_{name}", rows, dtype=pl.List(pl.Float32))
        series.append(lists.list.eval(pl.element().fill_nan(None)))
    numbers = {}
    if entropies is not None:
        numbers["entropy"] = present["entropies"].nanmean(dim=1)
    if ref_log_probs is not None:
        known = (present["log_probs"] - present["ref_log_probs"]).double()
        numbers["divergence"] = torch.where(known.isnan().all(dim=1), torch.nan, known.nansum(dim=1))
    if sampler_log_probs is not None:
        numbers["sampler_difference"] = (present["log_probs"] - present["sampler_log_probs"]).abs().nanmean(dim=1)
    if ratios is not None and clip is not None:
        outside = ((present["ratios"] < clip[0]) | (present["ratios"] > clip[1])).float()
        numbers["clip_share"] = torch.where(present["ratios"].isnan(), torch.nan, outside).nanmean(dim=1)
    return series + [pl.Series(name, v.tolist(), dtype=pl.Float64).fill_nan(None) for name, v in numbers.items()]


_MEANS = {
    **{"tokens": "length", "ended": "ended_share", "divergence": "kl", "clip_share": "train/clip_fraction"},
    "sampler_difference": "sampler_difference",
}
"""Metrics of rounds that are means of columns of other names."""


def average_rows(table: pl.DataFrame) -> dict[str, Any]:
    """Return a round's means for its metrics: of rewards, numbers of the data set, and what tokens have."""
    wanted = [name for name in table.columns if name in _MEANS or name.split(".")[0] in ("reward", "info")]
    numbers = [n for n in wanted if table.schema[n].is_numeric() or table.schema[n] == pl.Boolean]
    means = {_MEANS.get(n, n): table[n].cast(pl.Float64).fill_nan(None).mean() for n in numbers}
    if "token_entropies" in table.columns:
        means["train/entropy_loss"] = table.select(-pl.col("token_entropies").explode().mean()).item()
    return means
