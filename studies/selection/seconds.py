"""Tabulate the seconds of results/paper next to those of LDA's Table 3: seconds.md.

Run: `python -m studies.selection.seconds results/paper`. It reads stored timings, and trains nothing.
"""

import numpy as np
import polars as pl
import typer

from studies.shared import Out, mean_cell, table, write_page
from whence.lab import STANDARD, load_sweep
from whence.lab.efficiency import literal_levels, seconds_to

LDA = {
    "frozenlake": ("0.11", "1.51 / 2.01", "82.2 / 93.9", "64.6"),
    "acrobot": ("0.25", "1.42 / 2.02", "70.0 / 79.9", "35.8"),
    "minigrid": ("0.25", "4.52 / 5.02", "365.2 / 378.4", "107.4"),
    "highway": ("0.13", "2.39 / 3.29", "214.4 / 233.7", "93.7"),
    "lunarlander": ("0.13", "1.85 / 2.05", "318.7 / 328.8", "183.6"),
    "bipedalwalker": ("0.12", "3.09 / 3.30", "676.8 / 691.3", "489.6"),
}
"""Table 3: scoring a round; optimisation a round, and all rounds, of IIF and PPO; IIF to PPO's peak."""

TEXT = """\
# Seconds, next to LDA's Table 3

By `python -m studies.selection.seconds results/paper`, from `timings.parquet`. Ours are process CPU
seconds with one torch thread ({machine}), of runs that shared two cores.
LDA's are wall-clock seconds on a machine that its paper does not name: compare ratios, not seconds.
Means over seeds with 95% t intervals; LDA has three seeds, we have
{seeds}.

A mean round:

{rounds}

The whole training, and IIF until PPO's highest return, which is the mean over PPO's seeds:

{whole}"""


def write_tables(out: Out) -> None:
    """Write the tables."""
    results = load_sweep(out)
    rounds = [["", "scoring: IIF", "LDA", "optimisation: IIF", "PPO", "LDA: IIF / PPO"]]
    whole = [["", "all rounds: IIF", "PPO", "LDA: IIF / PPO", "IIF to PPO's peak", "LDA"]]
    for name, (scoring, optimisation, total, to_peak) in LDA.items():
        iif, ppo = ([*results[name][arm].values()] for arm in ("iif", STANDARD))
        scored, *trained = (
            mean_cell([run.tables["seconds"][f"{stage}_cpu"].mean() for run in runs])
            for stage, runs in (("scoring", iif), ("optimisation", iif), ("optimisation", ppo))
        )
        rounds.append([name, scored, scoring, *trained, optimisation])
        peaks = [literal_levels(run.curve)[-1] for run in ppo]
        reached = [float(np.mean([seconds_to(run.curve, peak) for peak in peaks])) for run in iif]
        sums = ([float(run.curve.seconds.sum()) for run in runs] for runs in (iif, ppo))
        *totals, matched = (mean_cell(values, digits=1) for values in (*sums, reached))
        whole.append([name, *totals, total, matched, to_peak])
    about = {
        "machine": "; ".join(pl.read_parquet(out / "timings.parquet")["machine"].unique().sort()),
        "seeds": ", ".join(f"{len(results[name]['iif'])} of {name}" for name in LDA),
    }
    write_page(out / "seconds.md", TEXT.format(**about, rounds=table(rounds), whole=table(whole)))


if __name__ == "__main__":
    typer.run(write_tables)
