"""Tables of `studies.faithfulness.ablations`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from studies.faithfulness.means import means_of
from studies.markdown import cell, table

OUTSIDE = ("outside", "outside, halves")


def ablation_means(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the LDS of each variant by group, share and truth, over seeds."""
    return [] if rows.is_empty() else means_of(rows, ["group", "share", "truth", "score"], ["lds"])


def clipping_means(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return what the clip range does by group, phase ("all": the mean of a seed's) and whether there is one."""
    if rows.is_empty():
        return []
    rows = rows.with_columns(clipped=pl.when("clipped").then(pl.lit("clipped")).otherwise(pl.lit("not clipped")))
    both = pl.concat([rows, rows.with_columns(phase=pl.lit("all"))])
    return means_of(both, ["group", "phase", "clipped"], ["lds", *OUTSIDE])


def sections(variants: Sequence[Mapping[str, Any]], clipped: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield the tables; `variants` and `clipped` are those of `ablation_means` and `clipping_means`."""
    rows_by_key = {tuple(row[name] for name in ("group", "share", "truth", "score")): row for row in variants}
    places = list(dict.fromkeys(key[1:3] for key in rows_by_key))
    for group in dict.fromkeys(key[0] for key in rows_by_key):
        lines = [["score", *(f"{share:.0%}, {truth}" for share, truth in places)]]
        for score in dict.fromkeys(key[3] for key in rows_by_key if key[0] == group):
            cells = (cell(rows_by_key.get((group, *place, score), {}).get("lds")) for place in places)
            lines.append([score, *cells])
        yield f"## What the smoothed score is made of, and others like it: LDS of the target, {group}\n\n{table(lines)}"
    if clipped:
        heads = ["", "rounds", "LDS of unrolled", "ratios outside after the round", "after training on a half"]
        lines = [heads]
        for row in clipped:
            figures = (cell(row[name]) for name in ("lds", *OUTSIDE))
            lines.append([f"{row['group']}, {row['clipped']}", row["phase"], *figures])
        yield (
            "## The derivative, with the clip range and without\n\nLDS of the target, halves along the recorded "
            "minibatches, of the same rounds trained again with their clip range and with none; and the share of all "
            f"records' ratios that end outside of it.\n\n{table(lines)}"
        )
