"""What a policy says of each response token, as columns of a round's records."""

from typing import Any

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Column = Float[Tensor, "n R"]


def list_signals(
    mask: Bool[Tensor, "n R"],
    lengths: list[int],
    *,
    log_probs: Column,
    entropies: Column | None = None,
    ref_log_probs: Column | None = None,
    ratios: Column | None = None,
    clip: tuple[float, float] | None = None,
) -> list[pl.Series]:
    """Return numbers of tokens as columns of lists, and of each response as numbers; NaN is unknown.

    The numbers are `entropy`, the mean over tokens; `divergence` from the reference, the sum of differences of
    log-probs; and `clip_share`, the share of ratios outside of `clip`.

    Args:
        mask: the tokens that count; others, such as a tool's, have null.
        lengths: the tokens of each response in its column of ids.
        log_probs: under the policy that drew the response.
        entropies: of the same policy, in nats.
        ref_log_probs: under the reference model.
        ratios: of the probabilities after the last step on the response to those before the first.
        clip: the bounds of ratios.
    """
    columns = {"log_probs": log_probs, "entropies": entropies, "ref_log_probs": ref_log_probs, "ratios": ratios}
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
    if ratios is not None and clip is not None:
        outside = ((present["ratios"] < clip[0]) | (present["ratios"] > clip[1])).float()
        numbers["clip_share"] = torch.where(present["ratios"].isnan(), torch.nan, outside).nanmean(dim=1)
    return series + [pl.Series(name, v.tolist(), dtype=pl.Float64).fill_nan(None) for name, v in numbers.items()]


_MEANS = {"tokens": "length", "ended": "ended_share", "divergence": "kl", "clip_share": "train/clip_fraction"}
"""Metrics of rounds that are means of columns of other names."""


def average_rows(table: pl.DataFrame) -> dict[str, Any]:
    """Return a round's means for its metrics: of rewards, numbers of the data set, and what tokens have."""
    wanted = [name for name in table.columns if name in _MEANS or name.split(".")[0] in ("reward", "info")]
    numbers = [n for n in wanted if table.schema[n].is_numeric() or table.schema[n] == pl.Boolean]
    means = {_MEANS.get(n, n): table[n].cast(pl.Float64).fill_nan(None).mean() for n in numbers}
    if "token_entropies" in table.columns:
        means["train/entropy_loss"] = table.select(-pl.col("token_entropies").explode().mean()).item()
    return means
