"""The tables of `studies.faithfulness.judges`: judges.md and judges.json.

Run: `python -m studies.faithfulness.judge_tables results/faithfulness`. Each judge's selection is held against training
on everything, as it is and scaled to the same divergence, on 50,000 fresh steps, in percent of what training on
everything gains. Intervals are bootstraps over rounds and seeds, as in `studies.faithfulness.selection_tables`.
"""

import json
from pathlib import Path

import polars as pl
import typer

from studies.faithfulness.run import SETUPS, Out
from studies.faithfulness.selection_tables import compared, gain_means
from studies.markdown import cell, nested, table
from studies.stored import ROUND, read_rounds
from whence.guards import write_atomically

HEAD = ["records kept by", "kept", "less all's", "less all's, as far", "as far, by GAE", "as far, of each seed", "KL"]
RETURNS = "monte-carlo"


def read_judges(out: Path) -> pl.DataFrame:
    """Return a row for each round, selection, order and kind of advantages."""
    rows = [
        {**{name: line[name] for name in ROUND}, **row} for line in read_rounds(out, "judge") for row in line["judges"]
    ]
    return pl.DataFrame(rows, infer_schema_length=None).with_columns(group=pl.format("{}-{}", "env", "optimizer"))


def tabulate_group(means: pl.DataFrame) -> str:
    """Return a group's table, a line for each selection, from rows of `gain_means`."""
    rows = means.to_dicts()
    by_gae = {row["selection"]: row["less as far"] for row in rows if row["advantages"] == "gae"}
    by_returns = {row["selection"]: row for row in rows if row["advantages"] == RETURNS}
    records = by_returns["all"]["kept"]["mean"]
    lines = [HEAD]
    for name, row in by_returns.items():
        if name == "all":
            continue
        seeds = ", ".join(f"{share:.0%}" for share in row["less as far"]["seeds"]).replace("-", "−")
        cells = [cell(each, percent=True) for each in (row["less"], row["less as far"], by_gae[name])]
        lines.append([name, f"{row['kept']['mean'] / records:.0%}", *cells, seeds, cell(row["kl"], digits=2)])
    return table(lines)


def main(out: Out) -> None:
    """Write the tables of the rounds that are there."""
    rows = read_judges(out)
    means = gain_means(compared(rows))
    parts = [
        "# Judges\n\nBy `python -m studies.faithfulness.judge_tables`; [README.md](README.md) says what they hold."
    ]
    for env, optimizer in SETUPS:
        group = f"{env}-{optimizer}"
        some = [row for row in means if row["group"] == group]
        if some:
            count = rows.filter(group=group).select("seed", "round").n_unique()
            parts.append(
                f"## {group}, {count} rounds\n\n{tabulate_group(pl.DataFrame(some, infer_schema_length=None))}"
            )
    summary = nested(means, ["advantages", "group", "selection"])
    for name, text in (("judges.md", "\n\n".join(parts)), ("judges.json", json.dumps(summary, indent=1))):
        with write_atomically(out / name) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
