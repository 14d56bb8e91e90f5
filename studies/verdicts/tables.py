"""The tables of `studies.verdicts.run`: tables.md, from verdicts.parquet."""

from pathlib import Path

import polars as pl
import scipy

from studies.shared import table, write_page

HEAD = "# Verdicts of proofs: tables\n\nWritten by `python -m studies.verdicts.run results/verdicts`."


def write_tables(out: Path) -> None:
    """Write tables.md."""
    rows = pl.read_parquet(out / "verdicts.parquet")
    parts = [HEAD]
    for title, is_null in (("Level: seen of random sets", True), ("Power: seen of what a finder names", False)):
        lines = [["world", "left out", "outcome", "seeds", "proofs", "seen", "against random sets alone", "before"]]
        chosen = rows.filter((pl.col("what") == "null") == is_null)
        for key, part in chosen.group_by("world", "what", "outcome", "seeds", maintain_order=True):
            lines.append(
                [*map(str, key), f"{len(part)}", *map(show_share, (part["seen"], part["by_random"], part["before"]))]
            )
        if is_null:
            for (kind, seeds), part in chosen.with_columns(
                kind=pl.when(outcome="decision").then(pl.lit("decision")).otherwise(pl.lit("tests"))
            ).group_by("kind", "seeds", maintain_order=True):
                shares = map(show_share, (part["seen"], part["by_random"], part["before"]))
                lines.append(["all", "null", str(kind), str(seeds), f"{len(part)}", *shares])
        parts += [f"## {title}", table(lines)]
    lines = [["world", "decision", "by advantages that trained", "by raw ones"]]
    causes = rows.filter(pl.col("what") != "null", pl.col("seeds") == rows["seeds"].max())
    for (world, number), part in causes.group_by("world", "number", maintain_order=True):
        changes = {what: f"{change:+.3f}" for what, change in part.select("what", "change").iter_rows()}
        lines.append([str(world), str(number), *(changes.get(what, "–") for what in ("nearest", "nearest, raw"))])
    write_page(
        out / "tables.md", *parts, "## The log-probability without what `nearest` names: its change", table(lines)
    )


def show_share(values: pl.Series) -> str:
    """Return how many hold, as a share with its 95% interval (Wilson)."""
    count, total = int(values.sum()), len(values)
    interval = scipy.stats.binomtest(count, total).proportion_ci(method="wilson")
    return f"{count} of {total}: {count / total:.1%} [{interval.low:.1%}, {interval.high:.1%}]"
