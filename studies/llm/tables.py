"""Save the results of `whence llm compare --task ...`, and compare them with the papers' claims.

Run: `python -m studies.llm.tables OUT RESULTS`, with OUT the directory of the comparison. RESULTS gets a row for each
run in `curves.parquet` and `timings.parquet`, and `tables.md`; without OUT, the tables are made from the rows there.
The code of the laboratory `civility`, whose results are in `results/llm`, is in the history.
Differences are between runs of the same seed, with 95% t intervals over seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import typer

from studies.shared import Row, grid, table, write_page
from whence import lab
from whence.lab import STANDARD, put_row, read_rows
from whence.lab.efficiency import Curve, summarise, t_interval
from whence.lab.language import check
from whence.lab.language.training import read_curve
from whence.runs import RunDirectory
from whence.stored.language import LanguageConfig

FINAL = {
    "arithmetic": ("exact_match", "majority_vote", "pass@1", "pass@4", "unfaithful", "well_formed"),
    "civility": ("test_return", "rude", "judged"),
}
FAULT = {"arithmetic": "unfaithful among right", "civility": "rude"}
"""The fault that is counted among each round's kept and dropped responses."""
STAGES = ("generation", "forward", "scoring", "optimisation")
ROUND = ("round", "reward", "reward_kept", "reward_dropped", "kl", "length", "dropped_share", "negative_share", "mean")

RUN = ("arm", "seed")
"""What tells the runs of a comparison apart."""

Runs = dict[str, dict[int, Row]]
"""The results of each run, by arm and seed."""

Show = Callable[[Mapping[str, Any]], str]


def main(places: Annotated[list[Path], typer.Argument(help="[OUT] RESULTS", show_default=False)]) -> None:
    """Save the results, and make the tables."""
    *comparison, results = places
    for out in comparison:
        save(out, results)
    write_tables(results)


def write_tables(results: Path) -> None:
    """Write tables.md from the rows of a directory."""
    runs = read(results)
    head = "# Tables\n\nBy `python -m studies.llm.tables`; [README.md](README.md) says what they hold."
    sections = (f"## {title}\n\n{text.replace('|  |', '| |', 1)}" for title, text in make_tables(runs).items())
    write_page(results / "tables.md", head, *sections)


def save(out: Path, results: Path) -> None:
    """Write a row for each finished run of a comparison, and one of its seconds."""
    comparison = lab.load_comparison(out)
    for config in comparison.configs:
        assert isinstance(config, LanguageConfig)
        run = comparison.run(config)
        curve = read_curve(config, run.path)
        name = {"arm": config.arm, "seed": config.seed}
        content = {
            **name,
            "config": config.to_json(),
            "evaluations": run.table("evaluations").to_dict(as_series=False),
            "rounds": _rounds(run).to_dict(as_series=False),
            "curve": {"returns": curve.returns.tolist(), "standard_errors": curve.standard_errors.tolist()},
        }
        seconds = {"round": curve.seconds.tolist()}
        for column in run.table("timings").select(pl.col(f"^({'|'.join(STAGES)})_cpu$")):
            seconds[column.name] = column.to_list()
        timings = {**name, "versions": dict(run.versions), "seconds": seconds}
        put_row(results / "timings.parquet", timings, RUN)
        put_row(results / "curves.parquet", content, RUN)


def _rounds(run: RunDirectory) -> pl.DataFrame:
    """Return the rounds' metrics, with the number of responses that count, and of those with the fault."""
    metrics, counts = run.table("metrics"), []
    for number in run.rounds():
        row = {"round": number, "counted_kept": 0, "counted_dropped": 0, "fault_kept": 0, "fault_dropped": 0}
        for record in run.round("records", number).select("prompt", "response", "keep").iter_rows(named=True):
            verdict, side = check(record["prompt"], record["response"]), "kept" if record["keep"] else "dropped"
            row[f"counted_{side}"] += verdict.right
            row[f"fault_{side}"] += verdict.right and not verdict.faithful
        counts.append(row)
    return metrics.select(name for name in ROUND if name in metrics.columns).join(pl.DataFrame(counts), on="round")


def read(results: Path) -> Runs:
    """Read what `save` wrote."""
    runs: Runs = {}
    timings = read_rows(results / "timings.parquet", RUN)
    for (arm, seed), content in read_rows(results / "curves.parquet", RUN).items():
        seconds = {stage: np.array(values) for stage, values in timings[arm, seed]["seconds"].items()}
        runs.setdefault(arm, {})[seed] = {**content, "seconds": seconds}
    first = [STANDARD, "random"]
    order = [*(arm for arm in first if arm in runs), *(arm for arm in runs if arm not in first)]
    return {arm: runs[arm] for arm in order}


def make_tables(runs: Runs) -> dict[str, str]:
    """Return the tables by their titles."""
    curves = {
        arm: {
            seed: Curve(
                *(np.array(run["curve"][name]) for name in ("returns", "standard_errors")), run["seconds"]["round"]
            )
            for seed, run in of_arm.items()
        }
        for arm, of_arm in runs.items()
    }
    efficiency, task = summarise(curves, standard=STANDARD), next(iter(runs[STANDARD].values()))["config"]["task"]
    names = {"none" if arm == STANDARD else arm: arm for arm in runs}
    others = [arm for arm in runs if arm != STANDARD]
    show = show_share if task == "arithmetic" else show_number

    def read_last(arm: str, name: str) -> dict[int, float]:
        return {seed: run["evaluations"][name][-1] for seed, run in runs[arm].items()}

    def read_stage(arm: str, name: str) -> list[float]:
        return [_seconds(run, name.removeprefix("seconds_")) for run in runs[arm].values()]

    stages = [f"seconds_{stage}" for stage in STAGES]
    stages = [name for name in stages if any(np.isfinite(read_stage(arm, name)).any() for arm in runs)]
    return {
        "Rounds and time saved": grid(
            "", ("se_ave", "se_peak", "rt_peak"), [*names], lambda name, arm: show_share(efficiency[names[arm]][name])
        ),
        "After the last round": grid(
            "", FINAL[task], [*names], lambda name, arm: show(_interval([*read_last(names[arm], name).values()]))
        ),
        "After the last round, less none's of the same seed": grid(
            "", FINAL[task], others, lambda name, arm: show(_subtract(read_last(arm, name), read_last(STANDARD, name)))
        ),
        "CPU seconds of a round, median": grid(
            "", stages, [*names], lambda name, arm: show_number(_interval(read_stage(names[arm], name)))
        ),
        "One arm less another, test return": tabulate_pairs(curves),
        "Claims": table([["", ""], *list_claims(runs, FAULT[task])]),
    }


def _seconds(run: Row, stage: str) -> float:
    """Return a stage's median CPU seconds a round."""
    seconds = run["seconds"].get(f"{stage}_cpu")
    return float("nan") if seconds is None else float(np.median(seconds))


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean of the values that there are, and its interval, if they differ."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    return t_interval(known) if len({*known}) > 1 else {**t_interval(known[:1]), "low": None, "high": None}


def _subtract(one: Mapping[int, float], other: Mapping[int, float]) -> dict[str, float | None]:
    return _interval([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def tabulate_pairs(curves: Mapping[str, Mapping[int, Curve]]) -> str:
    """Return the differences that decide the papers' claims, of the test return."""

    def read_final(arm: str) -> dict[int, float]:
        return {seed: float(curve.returns[-1]) for seed, curve in curves[arm].items()}

    def average(arm: str) -> dict[int, float]:
        return {seed: float(np.trapezoid(curve.returns)) / curve.rounds for seed, curve in curves[arm].items()}

    pairs = {"weights": ("ippo", "ippo-unweighted"), "sequence or token": ("iif-sequence", "iif-token")}
    pairs |= {f"{arm} beside random": (arm, "random") for arm in curves if arm not in (STANDARD, "random")}
    lines = [["", "after the last round", "mean over rounds"]]
    for name, pair in pairs.items():
        if {*pair} <= {*curves}:
            lines.append([name, *(show_share(_subtract(*map(read, pair))) for read in (read_final, average))])
    return table(lines)


def list_claims(runs: Runs, fault: str) -> list[list[str]]:
    """Return the other figures that decide the papers' claims."""
    claims = {}
    for arm, of_arm in runs.items():
        if arm in (STANDARD, "random"):
            continue
        kept = [1 - np.array(run["rounds"]["dropped_share"]) for run in of_arm.values()]
        quarters = [max(1, len(each) // 4) for each in kept]
        falls = [float(one[-q:].mean() - one[:q].mean()) for one, q in zip(kept, quarters, strict=True)]
        claims[f"{arm}: kept share, last quarter less first"] = falls
        claims[f"{arm}: kept share"] = [float(each.mean()) for each in kept]
        faulty = {side: [_count_faulty(run, side) for run in of_arm.values()] for side in ("kept", "dropped")}
        claims |= {f"{arm}: {fault}, {side}": shares for side, shares in faulty.items()}
        differences = [dropped - kept for kept, dropped in zip(*faulty.values(), strict=True)]
        claims[f"{arm}: {fault}, dropped less kept"] = differences
        plain = {seed: _seconds(run, "optimisation") for seed, run in runs[STANDARD].items()}
        for stage, name in (
            ("optimisation", "time, share of none's"),
            ("scoring", "time, share of none's optimisation"),
        ):
            claims[f"{arm}: {stage} {name}"] = [
                _seconds(run, stage) / plain[seed] for seed, run in of_arm.items() if seed in plain
            ]
    return [[name, show_share(_interval(values))] for name, values in claims.items()]


def _count_faulty(run: Row, side: str) -> float:
    """Return the share of the responses that have the fault, among those that count on a side."""
    counted = sum(run["rounds"][f"counted_{side}"])
    return sum(run["rounds"][f"fault_{side}"]) / counted if counted else float("nan")


def show_share(entry: Mapping[str, Any]) -> str:
    """Return a mean with its interval in percent."""
    return _show(entry, ".1%")


def show_number(entry: Mapping[str, Any]) -> str:
    """Return a mean with its interval at three digits."""
    return _show(entry, ".3g")


def _show(entry: Mapping[str, Any], form: str) -> str:
    if entry["mean"] is None:
        return "–"
    interval = "" if entry["low"] is None else f" [{entry['low']:{form}}, {entry['high']:{form}}]"
    return f"{entry['mean']:{form}}{interval}"


if __name__ == "__main__":
    typer.run(main)
