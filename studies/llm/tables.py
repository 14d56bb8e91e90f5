"""Save the results of `whence llm compare --task ...`, and compare them with the papers' claims.

Run: `python -m studies.llm.tables OUT RESULTS`, with OUT the directory of the comparison. RESULTS gets a row for each
run in `curves.parquet` and `timings.parquet`, and `tables.md`; without OUT, the tables are made from the rows there.
The code of the laboratory `civility`, whose results are in `results/llm`, is in the history.
Differences are between runs of the same seed, with 95% t intervals over seeds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import typer
from scipy import stats

from studies.stored import write_line
from whence import lab
from whence.core import write_atomically
from whence.lab import read_rows
from whence.lab.arms import STANDARD
from whence.lab.efficiency import Curve, summarise
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

Runs = dict[str, dict[int, Mapping[str, Any]]]
"""The results of each run, by arm and seed."""


def main(
    places: Annotated[list[Path], typer.Argument(help="[OUT] RESULTS", show_default=False)],
) -> None:
    """Save the results, and make the tables."""
    *comparison, results = places
    for out in comparison:
        save(out, results)
    runs = read(results)
    with write_atomically(results / "tables.md") as temporary:
        temporary.write_text(tables(make_summary(runs)), encoding="utf-8")


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
        write_line(results / "timings.parquet", timings, RUN)
        write_line(results / "curves.parquet", content, RUN)


def _rounds(run: RunDirectory) -> pl.DataFrame:
    """Return the rounds' metrics, with the number of responses that count, and of those with the fault."""
    metrics, counts = run.table("metrics"), []
    for number in run.rounds():
        row = {"round": number, "counted_kept": 0, "counted_dropped": 0, "fault_kept": 0, "fault_dropped": 0}
        for record in run.round("records", number).select("prompt", "response", "keep").iter_rows(named=True):
            counts_here, fault = _judge_sum(record["prompt"], record["response"])
            side = "kept" if record["keep"] else "dropped"
            row[f"counted_{side}"] += counts_here
            row[f"fault_{side}"] += counts_here and fault
        counts.append(row)
    return metrics.select(name for name in ROUND if name in metrics.columns).join(pl.DataFrame(counts), on="round")


def _judge_sum(prompt: str, response: str) -> tuple[bool, bool]:
    verdict = check(prompt, response)
    return verdict.right, not verdict.faithful


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


def make_summary(runs: Runs) -> dict[str, Any]:
    """Return the figures of the tables."""
    curves = {
        arm: {
            seed: Curve(
                returns=np.array(run["curve"]["returns"]),
                standard_errors=np.array(run["curve"]["standard_errors"]),
                seconds=np.array(run["seconds"]["round"]),
            )
            for seed, run in of_arm.items()
        }
        for arm, of_arm in runs.items()
    }
    efficiency, task = summarise(curves, standard=STANDARD), _task(runs)
    for arm, metrics in efficiency.items():
        metrics |= {
            name: _compare_with_standard(runs, arm, lambda run, name=name: run["evaluations"][name][-1])
            for name in FINAL[task]
        }
        metrics |= {
            f"seconds_{stage}": _compare_with_standard(runs, arm, lambda run, s=stage: _seconds(run, s))
            for stage in STAGES
        }
    return {task: efficiency, "claims": _claims(runs, curves)}


def _task(runs: Runs) -> str:
    return str(next(iter(runs[STANDARD].values()))["config"]["task"])


def _seconds(run: Mapping[str, Any], stage: str) -> float:
    """Return a stage's median CPU seconds a round."""
    seconds = run["seconds"].get(f"{stage}_cpu")
    return float("nan") if seconds is None else float(np.median(seconds))


def _compare_with_standard(runs: Runs, arm: str, value: Any) -> dict[str, Any]:
    """Return a figure's mean over seeds, with the difference from training on all responses."""
    values = {seed: value(run) for seed, run in runs[arm].items()}
    standard = {seed: value(run) for seed, run in runs[STANDARD].items()}
    shared = [seed for seed in values if seed in standard]
    return {
        **_interval(list(values.values())),
        "per_seed": [value if np.isfinite(value) else None for value in values.values()],
        "difference": _interval([values[s] - standard[s] for s in shared]),
    }


def _interval(values: Sequence[float]) -> dict[str, float | None]:
    values = [value for value in values if value is not None and np.isfinite(value)]
    mean = float(np.mean(values)) if len(values) else None
    if len(values) < 2 or np.ptp(values) == 0:
        return {"mean": mean, "low": None, "high": None}
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return {"mean": mean, "low": float(low), "high": float(high)}


def _claims(runs: Runs, curves: Mapping[str, Mapping[int, Curve]]) -> dict[str, Any]:
    """Return the figures that decide the papers' claims."""

    def between(one: str, other: str, value: Any) -> dict[str, float | None]:
        shared = sorted(runs[one].keys() & runs[other].keys())
        return _interval([value(one, seed) - value(other, seed) for seed in shared])

    def final(arm: str, seed: int) -> float:
        return float(curves[arm][seed].returns[-1])

    def mean(arm: str, seed: int) -> float:
        returns = curves[arm][seed].returns
        return float(np.trapezoid(returns)) / (len(returns) - 1)

    fault = FAULT[_task(runs)]
    scored = [arm for arm in runs if arm not in (STANDARD, "random")]
    claims: dict[str, Any] = {}
    for name, one, other in (
        ("weights", "ippo", "ippo-unweighted"),
        ("sequence or token", "iif-sequence", "iif-token"),
        *((f"{arm} beside random", arm, "random") for arm in scored),
    ):
        if one in runs and other in runs:
            claims[name] = {"final": between(one, other, final), "mean": between(one, other, mean)}
    for arm in scored:
        of_arm = runs[arm].values()
        claims[f"{arm}: kept share, last quarter less first"] = _interval([_fall(run) for run in of_arm])
        claims[f"{arm}: kept share"] = _interval([1 - float(np.mean(run["rounds"]["dropped_share"])) for run in of_arm])
        for side in ("kept", "dropped"):
            claims[f"{arm}: {fault}, {side}"] = _interval([_faulty(run, side) for run in of_arm])
        differences = [_faulty(run, "dropped") - _faulty(run, "kept") for run in of_arm]
        claims[f"{arm}: {fault}, dropped less kept"] = _interval(differences)
        shares = [
            _seconds(run, "optimisation") / _seconds(runs[STANDARD][seed], "optimisation")
            for seed, run in runs[arm].items()
            if seed in runs[STANDARD]
        ]
        claims[f"{arm}: optimisation time, share of none's"] = _interval(shares)
        scoring = [
            _seconds(run, "scoring") / _seconds(runs[STANDARD][seed], "optimisation")
            for seed, run in runs[arm].items()
            if seed in runs[STANDARD]
        ]
        claims[f"{arm}: scoring time, share of none's optimisation"] = _interval(scoring)
    return claims


def _fall(run: Mapping[str, Any]) -> float:
    kept = 1 - np.array(run["rounds"]["dropped_share"])
    quarter = max(1, len(kept) // 4)
    return float(kept[-quarter:].mean() - kept[:quarter].mean())


def _faulty(run: Mapping[str, Any], side: str) -> float:
    counted = sum(run["rounds"][f"counted_{side}"])
    return sum(run["rounds"][f"fault_{side}"]) / counted if counted else float("nan")


def tables(summary: Mapping[str, Any]) -> str:
    """Return the tables in Markdown."""
    (task,) = summary.keys() - {"claims"}
    arms: Mapping[str, Any] = summary[task]

    def rows(names: Sequence[str], share: bool) -> list[str]:
        lines = [f"| | {' | '.join(_name(arm) for arm in arms)} |", f"| --- |{' --- |' * len(arms)}"]
        return lines + [f"| {name} | {' | '.join(_cell(of[name], share) for of in arms.values())} |" for name in names]

    def differences(names: Sequence[str], share: bool) -> list[str]:
        others = {arm: of for arm, of in arms.items() if arm != STANDARD}
        lines = [f"| | {' | '.join(others)} |", f"| --- |{' --- |' * len(others)}"]
        cells = {name: [_cell(of[name]["difference"], share) for of in others.values()] for name in names}
        return lines + [f"| {name} | {' | '.join(cells[name])} |" for name in names]

    claims = [
        f"| {name} | {_cell(entry, 'time' in name or 'share' in name or 'unfaithful' in name or 'rude' in name)} |"
        for name, entry in summary["claims"].items()
        if "mean" in entry and not isinstance(entry["mean"], dict)
    ]
    pairs = [
        f"| {name} | {_cell(entry['final'], True)} | {_cell(entry['mean'], True)} |"
        for name, entry in summary["claims"].items()
        if "final" in entry
    ]
    sections = {
        "Rounds and time saved": rows(["se_ave", "se_peak", "rt_peak"], True),
        "After the last round": rows(FINAL[task], task == "arithmetic"),
        "After the last round, less none's of the same seed": differences(FINAL[task], task == "arithmetic"),
        "CPU seconds of a round, median": rows(
            [
                name
                for name in map("seconds_{}".format, STAGES)
                if any(of[name]["mean"] is not None for of in arms.values())
            ],
            False,
        ),
        "One arm less another, test return": [*_make_header("after the last round", "mean over rounds"), *pairs],
        "Claims": [*_make_header(""), *claims],
    }
    head = "# Tables\n\nBy `python -m studies.llm.tables`; [README.md](README.md) says what they hold.\n\n"
    return head + "\n\n".join("\n".join([f"## {title}\n", *lines]) for title, lines in sections.items()) + "\n"


def _make_header(*headings: str) -> list[str]:
    return [f"| | {' | '.join(headings)} |", f"| --- |{' --- |' * len(headings)}"]


def _name(arm: str) -> str:
    return "none" if arm == STANDARD else arm


def _cell(entry: Mapping[str, Any], share: bool) -> str:
    def text(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.1%}" if share else f"{value:.3g}"

    interval = "" if entry.get("low") is None else f" [{text(entry['low'])}, {text(entry['high'])}]"
    return text(entry["mean"]) + interval


if __name__ == "__main__":
    typer.run(main)
