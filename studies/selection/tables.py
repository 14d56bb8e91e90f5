"""The tables of `studies.selection.pretrained`: tables.md, from what it has written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from studies.markdown import cell, table
from whence.core import write_atomically
from whence.lab import read_rows
from whence.statistics import t_interval

KEYS = ("part", "arm", "rewards", "seed")
HEADS = {
    "arm": "",
    "end": "reward at the end",
    "gain": "minus none",
    "control": "minus random",
    "rounds": "mean over rounds, minus none",
    "divergence": "divergence",
    "far": "minus none at as large a divergence",
    "late": "minus none at as many seconds",
    "kept": "kept",
    "seconds": "CPU s a round",
}

STAGES = ("generation", "scoring", "optimisation")
COST = """\
CPU seconds a round of all runs above, without measurements. Ratios are to `none` of the same rewards and seed. An arm
that chooses inside the step has its scores in optimisation.
"""


def write_tables(out: Path) -> None:
    """Write tables.md: for each part and kind of rewards, a line for each arm."""
    runs = sorted(read_rows(out / "pretrained.parquet", KEYS).values(), key=lambda run: run["seed"])
    command = "`python -m studies.selection.pretrained results/selection`"
    parts = [f"# Choosing responses for a pretrained model: tables\n\nWritten by {command}.\n"]
    for part, rewards in dict.fromkeys((run["part"], run["rewards"]) for run in runs):
        rows = [run for run in runs if (run["part"], run["rewards"]) == (part, rewards)]
        seeds = sorted({row["seed"] for row in rows})
        parts += [f"## Rewards {rewards}, seeds {', '.join(map(str, seeds))}\n", tabulate(rows), ""]
    parts += ["## What a round costs\n", COST, tabulate_costs(runs), ""]
    with write_atomically(out / "tables.md") as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


def tabulate(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each arm: means over seeds with 95% t intervals; differences are between runs of a seed."""
    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], {})[run["seed"]] = run
    lines = [list(HEADS.values())]
    for arm, mine in by_arm.items():
        plain, control = by_arm.get("none", {}), by_arm.get("random", {})
        cells = {
            "end": summarise(mine, read_end),
            "gain": compare(mine, plain, lambda run, other: read_end(run) - read_end(other)),
            "control": compare(mine, control, lambda run, other: read_end(run) - read_end(other)),
            "rounds": compare(mine, plain, lambda run, other: mean(run["clean"]) - mean(other["clean"])),
            "divergence": summarise(mine, lambda run: run["points"][-1]["divergence"]),
            "far": compare(mine, plain, lambda run, other: read_end(run) - read_at(other, "divergence", run)),
            "late": compare(mine, plain, lambda run, other: read_end(run) - read_at(other, "seconds", run)),
            "kept": summarise({seed: run for seed, run in mine.items() if run["kept"]}, lambda run: mean(run["kept"])),
            "seconds": summarise(mine, lambda run: run["points"][-1]["seconds"] / len(run["clean"]), digits=1),
        }
        if arm == "none":
            cells |= dict.fromkeys(("gain", "rounds", "far", "late", "kept"), "")
        if arm == "random":
            cells["control"] = ""
        lines.append([f"{arm} ({len(mine)})" if len(mine) < 3 else arm, *cells.values()])
    return table(lines)


def tabulate_costs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each arm: means over runs with 95% t intervals."""
    others = [key for key in KEYS if key != "arm"]
    plain = {tuple(run[key] for key in others): run for run in runs if run["arm"] == "none"}
    lines = [["", *STAGES, "round, to none", "optimisation and scoring, to none", "runs"]]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in runs if run["arm"] == arm]
        pairs = [(run, plain.get(tuple(run[key] for key in others))) for run in mine]

        def ratio(stages: Sequence[str], pairs: Sequence[Any] = pairs) -> str:
            values = [read_seconds(run, stages) / read_seconds(other, stages) for run, other in pairs if other]
            return cell(t_interval(values), digits=2) if values else ""

        seconds = [cell(t_interval([read_seconds(run, [stage]) for run in mine]), digits=2) for stage in STAGES]
        ratios = ["", ""] if arm == "none" else [ratio(STAGES), ratio(STAGES[1:])]
        lines.append([arm, *seconds, *ratios, str(len(mine))])
    return table(lines)


def read_seconds(run: Mapping[str, Any], stages: Sequence[str]) -> float:
    """Return CPU seconds a round in these stages."""
    return float(sum(run["stages"].get(stage, 0.0) for stage in stages) / len(run["clean"]))


def read_end(run: Mapping[str, Any]) -> float:
    """Return the reward on puzzles that do not train, after the last round."""
    return float(run["points"][-1]["reward"])


def read_at(run: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> float:
    """Return a run's reward where a quantity that grows is what it is at the end of another run, between its points.

    Beyond the run's end it is the reward at the end.
    """
    points = sorted(run["points"], key=lambda point: point[name])
    return float(np.interp(other["points"][-1][name], [p[name] for p in points], [p["reward"] for p in points]))


def summarise(runs: Mapping[int, Any], read: Callable[[Any], float], digits: int = 3) -> str:
    """Return a mean over seeds."""
    return cell(t_interval([read(run) for run in runs.values()]), digits=digits) if runs else ""


def compare(runs: Mapping[int, Any], others: Mapping[int, Any], subtract: Callable[[Any, Any], float]) -> str:
    """Return the mean difference to the run of the same seed."""
    values = [subtract(run, others[seed]) for seed, run in runs.items() if seed in others]
    return cell(t_interval(values)) if values else ""
