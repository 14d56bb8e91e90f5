"""Tables of what selections gain on fresh steps, whose code is in the history, for `studies.faithfulness.tables`.

Means are over rounds and seeds, with 95% percentile bootstrap intervals; a round of a seed is one unit, which makes
them too narrow as far as rounds of a seed are alike. So beside the main figures stands what each seed came to.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
from scipy import stats

from studies.markdown import cell, table

ALL, ONCE = "all", ", normalised once"
"""The name of the selection of all records, and the ending of those whose advantages are normalised over all."""

STEPS = 100_000
"""Fresh steps of a round: one half judges selections, and the other is a fresh target."""

SHARES_OF_ALL = {
    "less": "less all's",
    "less as long": "less all's, as long",
    "less as far": "less all's, as far",
}
GAINS = SHARES_OF_ALL | {
    "kl": "divergence, over all's",
    "entropy": "entropy, less all's",
}
ROUND = ["env", "optimizer", "seed", "round"]


def compared(rows: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each round, selection and kind of advantages: means over orders, held against training on all.

    A selection whose advantages are normalised once is held against training on everything so; and that against
    training on everything as it is, where no update of its is known that goes as far.
    """
    by = [*ROUND, "group", "advantages"]
    of_orders = rows.group_by(*by, "selection", maintain_order=True).agg(
        pl.col("gain", "all_as_long", "all_as_far", "kl", "entropy", "kept").mean()
    )
    whole = pl.col("selection") == ALL + ONCE
    once = pl.col("selection").str.ends_with(ONCE) & ~whole
    named = of_orders.with_columns(
        pl.when(whole).then(None).otherwise(pl.col("all_as_long", "all_as_far")).name.keep(),
        base=pl.when(once).then(pl.lit(ALL + ONCE)).otherwise(pl.lit(ALL)),
    )
    base = of_orders.select(*by, base="selection", gain_all="gain", kl_all="kl", entropy_all="entropy")
    return named.join(base, on=[*by, "base"], how="left", maintain_order="left").with_columns(
        (pl.col("gain") - pl.col("gain_all")).alias("less"),
        (pl.col("gain") - pl.col("all_as_long")).alias("less as long"),
        (pl.col("gain") - pl.col("all_as_far")).alias("less as far"),
        (pl.col("kl") / pl.col("kl_all")).alias("kl"),
        (pl.col("entropy") - pl.col("entropy_all")).alias("entropy"),
    )


def gain_means(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the means of each kind of advantages, group and selection, from what `compared` returns."""
    by = ["advantages", "group", "selection"]
    summaries = []
    for key, group in rows.group_by(by, maintain_order=True):
        row = dict(zip(by, key, strict=True))
        row |= {name: mean_over(group[name].to_list()) for name in ("gain", "kl", "entropy", "kept")}
        for name in SHARES_OF_ALL:
            share = ratio_over(group[name].to_list(), group["gain_all"].to_list())
            row[name] = share | {"seeds": [] if share["mean"] is None else shares_of_seeds(group, name)}
        summaries.append(row)
    return summaries


def shares_of_seeds(group: pl.DataFrame, name: str) -> list[float]:
    """Return what each seed gains, in what all gains in the mean over all seeds: in its own it would be wild."""
    known = group.drop_nulls(name)
    whole = known["gain_all"].mean()
    return [float(seed[name].mean() / whole) for _, seed in known.group_by("seed", maintain_order=True)]


def mean_over(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the mean over rounds and seeds and its 95% bootstrap interval; nulls are rounds without the figure."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if len(known) < 2 or np.ptp(known) == 0:
        mean = float(known.mean()) if len(known) else None
        return {"mean": mean, "low": None, "high": None, "rounds": len(known)}
    bootstrap = stats.bootstrap((known,), np.mean, method="percentile", random_state=np.random.default_rng(0))
    interval = bootstrap.confidence_interval
    return {"mean": float(known.mean()), "low": interval.low, "high": interval.high, "rounds": len(known)}


def ratio_over(values: Sequence[float | None], wholes: Sequence[float]) -> dict[str, Any]:
    """Return the sum of values over the sum of wholes, and its 95% bootstrap interval over rounds and seeds.

    There is none of rounds without a value, nor where the interval of the wholes' mean holds 0.
    """
    known = np.array([(v, w) for v, w in zip(values, wholes, strict=True) if v is not None], dtype=np.float64)
    entry: dict[str, Any] = {"mean": None, "low": None, "high": None, "rounds": len(known)}
    whole = mean_over(known[:, 1].tolist()) if len(known) else entry
    if whole["mean"] is None or (whole["low"] or whole["mean"]) <= 0:
        return entry

    def ratio(values: Any, wholes: Any, axis: int = -1) -> Any:
        return values.sum(axis) / wholes.sum(axis)

    entry["mean"] = float(ratio(*known.T))
    if len(known) > 1 and np.ptp(known[:, 0]) > 0:
        bootstrap = stats.bootstrap(
            known.T, ratio, paired=True, method="percentile", random_state=np.random.default_rng(0)
        )
        entry |= {"low": bootstrap.confidence_interval.low, "high": bootstrap.confidence_interval.high}
    return entry


def gain_sections(rows: pl.DataFrame, groups: Sequence[str]) -> Iterable[str]:
    """Yield the sections of a page, from what `compared` returns."""
    yield (
        "## What selections gain on fresh steps\n\n"
        f"The rise of mean(ρÂ) over {STEPS // 2:,} steps that no training saw, in standard deviations of Â (returns "
        "less values); means over rounds and seeds, differences from all's in percent of all's mean. *As long*: all's "
        "update, made as long as the selection's. *As far*: all's, made longer or shorter until the policy diverges "
        "as much. What is normalised once is held against all, normalised once."
    )
    means = {tuple(row[k] for k in ("advantages", "group", "selection")): row for row in gain_means(rows)}
    for group in groups:
        by_selection = {key[2]: row for key, row in means.items() if key[:2] == ("monte-carlo", group)}
        by_gae = {key[2]: row["less as far"] for key, row in means.items() if key[:2] == ("gae", group)}
        headings = [*GAINS.values(), "less all's, as far, Â by GAE", "less all's, of each seed", "as far, of each seed"]
        lines = [["records kept", "share", "gain", *headings]]
        for selection, row in by_selection.items():
            less = [cell(row[name], percent=True) for name in SHARES_OF_ALL]
            others = [*less, cell(row["kl"], digits=2), cell(row["entropy"]), cell(by_gae[selection], percent=True)]
            others += [_shares(row[name]["seeds"]) for name in ("less", "less as far")]
            shown = others if selection != ALL else [""] * len(others)
            share = f"{row['kept']['mean'] / by_selection[ALL]['kept']['mean']:.0%}"
            lines.append([selection, share, cell(row["gain"], interval=selection == ALL, digits=4), *shown])
        rounds = by_selection[ALL]["gain"]["rounds"]
        yield f"### {group}, {rounds} rounds\n\n{table(lines)}"


def _shares(shares: Iterable[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares).replace("-", "−")
