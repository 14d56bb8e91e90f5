"""The tables of GRPO on a pretrained model: `python -m studies.selection.tables results/selection` writes tables.md.

The code of the runs is in the history, at commit d475c1ee of 2026-11-28.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean

import numpy as np
import typer

from studies.shared import Out, Row, mean_cell, read_list, table, write_page

KEYS = ("part", "arm", "rewards", "seed")
STAGES = ("generation", "scoring", "optimisation")
COST = """\
CPU seconds a round of all runs above, without measurements. Ratios are to `none` of the same rewards and seed. An arm
that chooses inside the step has its scores in optimisation."""


def write_tables(out: Out) -> None:
    """Write tables.md: for each part and kind of rewards, a line for each arm."""
    runs = sorted(read_list(out / "pretrained.parquet", KEYS), key=lambda run: run["seed"])
    command = "`python -m studies.selection.tables results/selection`"
    parts = [f"# Choosing responses for a pretrained model: tables\n\nWritten by {command}."]
    for part, rewards in dict.fromkeys((run["part"], run["rewards"]) for run in runs):
        rows = [run for run in runs if (run["part"], run["rewards"]) == (part, rewards)]
        seeds = sorted({row["seed"] for row in rows})
        parts += [f"## Rewards {rewards}, seeds {', '.join(map(str, seeds))}", tabulate(rows)]
    write_page(out / "tables.md", *parts, "## What a round costs", COST, tabulate_costs(runs))


def tabulate(runs: Sequence[Row]) -> str:
    """Return a line for each arm: means over seeds with 95% t intervals; differences are between runs of a seed."""
    by_arm: dict[str, dict[int, Row]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], {})[run["seed"]] = run
    plain, control = by_arm.get("none", {}), by_arm.get("random", {})
    lines = [
        [
            *("", "reward at the end", "minus none", "minus random", "mean over rounds, minus none", "divergence"),
            *("minus none at as large a divergence", "minus none at as many seconds", "kept", "CPU s a round"),
        ]
    ]
    for arm, mine in by_arm.items():
        gain, over_control = (
            compare(mine, others, lambda run, other: read_end(run) - read_end(other)) for others in (plain, control)
        )
        rounds, far, late, kept = (
            compare(mine, plain, lambda run, other: mean(run["clean"]) - mean(other["clean"])),
            compare(mine, plain, lambda run, other: read_end(run) - read_at(other, "divergence", run)),
            compare(mine, plain, lambda run, other: read_end(run) - read_at(other, "seconds", run)),
            mean_cell([mean(run["kept"]) for run in mine.values() if run["kept"]]),
        )
        if arm == "none":
            gain = rounds = far = late = kept = ""
        lines.append(
            [
                f"{arm} ({len(mine)})" if len(mine) < 3 else arm,
                *(mean_cell([read_end(run) for run in mine.values()]), gain),
                *("" if arm == "random" else over_control, rounds),
                *(mean_cell([run["points"][-1]["divergence"] for run in mine.values()]), far, late, kept),
                mean_cell([run["points"][-1]["seconds"] / len(run["clean"]) for run in mine.values()], digits=1),
            ]
        )
    return table(lines)


def compare(runs: Mapping[int, Row], others: Mapping[int, Row], subtract: Callable[[Row, Row], float]) -> str:
    """Return the mean difference to the run of the same seed."""
    values = [subtract(run, others[seed]) for seed, run in runs.items() if seed in others]
    return mean_cell(values) if values else ""


def tabulate_costs(runs: Sequence[Row]) -> str:
    """Return a line for each arm: means over runs with 95% t intervals."""
    places = [tuple(run[key] for key in KEYS if key != "arm") for run in runs]
    plain = {place: run for place, run in zip(places, runs, strict=True) if run["arm"] == "none"}
    lines = [["", *STAGES, "round, to none", "optimisation and scoring, to none", "runs"]]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        mine = {place: run for place, run in zip(places, runs, strict=True) if run["arm"] == arm}
        cells = [mean_cell([read_seconds(run, [stage]) for run in mine.values()], digits=2) for stage in STAGES]
        for stages in (STAGES, STAGES[1:]):
            pairs = [(run, plain[place]) for place, run in mine.items() if place in plain and arm != "none"]
            ratios = [read_seconds(run, stages) / read_seconds(other, stages) for run, other in pairs]
            cells.append(mean_cell(ratios, digits=2) if ratios else "")
        lines.append([arm, *cells, str(len(mine))])
    return table(lines)


def read_seconds(run: Row, stages: Sequence[str]) -> float:
    """Return CPU seconds a round in these stages."""
    return float(sum(run["stages"].get(stage, 0.0) for stage in stages) / len(run["clean"]))


def read_end(run: Row) -> float:
    """Return the reward on puzzles that do not train, after the last round."""
    return float(run["points"][-1]["reward"])


def read_at(run: Row, name: str, other: Row) -> float:
    """Return a run's reward where a quantity that grows is what it is at the end of another run, between its points.

    Beyond the run's end it is the reward at the end.
    """
    points = sorted(run["points"], key=lambda point: point[name])
    return float(np.interp(other["points"][-1][name], [p[name] for p in points], [p["reward"] for p in points]))


if __name__ == "__main__":
    typer.run(write_tables)
