"""The tables of `studies.tuning.run`: what recorded rounds say of the settings, held against training with them.

Run: `python -m studies.tuning.tables results/tuning results/practice`. Writes tables.md and summary.json. What
training gave is the mean return of `studies.practice.run`'s runs over the same settings, less the one at the defaults,
over the seeds that have both. Both are held against plain rules without recorded rounds: a fixed divergence; the rate
that is best in the other environments; the sign that a setting's result has in most environments.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import typer

from studies.markdown import cell, table
from studies.practice.run import DEFAULT, DEFAULT_RATE, RATES, WORLDS
from studies.practice.runs import RATE_STEPS, TARGET_STEPS, pick, read_runs, scale_results
from studies.practice.tables import write_text
from studies.tuning.candidates import AS_RECORDED, bootstrap_mean, recommend_scale
from studies.tuning.run import read_trials
from whence.intervals import t_interval

TRAINED = {
    "5 epochs": ("epochs5", "ppo"),
    "20 epochs": ("epochs20", "ppo"),
    "lambda 0.9": ("lambda0.9", "ppo"),
    "lambda 1": ("lambda1", "ppo"),
    "drop 0.125": (DEFAULT, "iif"),
    "drop 0.5": (DEFAULT, "iif-drop0.5"),
}
"""The runs that trained with a candidate's settings: their steps and arm."""

JUDGES = {"gain": "as recorded", "gain_by_returns": "returns"}
RESULT = "mean"


def collect_trials(out: Path, env: str) -> pl.DataFrame:
    """Return the trials of all runs of an environment; rounds of different runs have different numbers."""
    lines = [line for line in read_trials(out) if line["env"] == env]
    return pl.concat(
        [
            pl.DataFrame(line["trials"]).with_columns(pl.col("round") + 1000 * line["seed"], seed=pl.lit(line["seed"]))
            for line in lines
        ]
    )


def describe_step(trials: pl.DataFrame, judge: str) -> dict[str, Any]:
    """Return the best factor of the step, whether it is measurably better than 1, and the divergence there."""
    recorded = trials.filter(pl.col("candidate") == AS_RECORDED.name)
    rows = recorded.with_columns(gain=pl.col(judge)).to_dicts()
    means = recorded.group_by("scale", maintain_order=True).agg(pl.col(judge, "kl").mean())
    best = means.sort(judge, descending=True).row(0, named=True)
    return {
        "judge": JUDGES[judge],
        "best": best["scale"],
        "kl": best["kl"],
        "recommended": recommend_scale(rows),
        "kl_as_recorded": means.filter(pl.col("scale") == 1)["kl"].item(),
    }


def find_others_rate(runs: pl.DataFrame, env: str) -> float:
    """Return the learning rate whose scaled result is the best on average over the other environments."""
    scaled = scale_results(runs).filter(pl.col("arm") == "ppo", pl.col("steps").is_in(RATE_STEPS), pl.col("env") != env)
    means = scaled.group_by("env", "steps").agg(pl.col(RESULT).mean()).group_by("steps").agg(pl.col(RESULT).mean())
    return float(means.sort(RESULT)["steps"][-1].removeprefix("lr"))


def compare_rates(runs: pl.DataFrame, factor: float | None, others_rate: float) -> dict[str, Any]:
    """Return PPO's mean results: at the default, the recommended rate, each target, and the best of the grid."""
    grid = {
        rate: results for rate in RATES if (results := pick(runs, "ppo", f"lr{rate:g}").sort("seed")[RESULT].to_list())
    }
    nearest = min(grid, key=lambda rate: abs(math.log(rate / (DEFAULT_RATE * (factor or 1)))))
    best = max(grid, key=lambda rate: float(np.mean(grid[rate])))
    return {
        "best_rate": best,
        "named_rate": DEFAULT_RATE * (factor or 1),
        "nearest_rate": nearest,
        "default": t_interval(grid[DEFAULT_RATE]),
        "named": t_interval(grid[nearest]),
        "others_rate": others_rate,
        "others": t_interval(grid[others_rate]),
        "grid": t_interval(grid[best]),
        **{steps: t_interval(pick(runs, "ppo", steps)[RESULT].to_list()) for steps in TARGET_STEPS},
    }


def compare_settings(trials: pl.DataFrame, runs: pl.DataFrame) -> list[dict[str, Any]]:
    """Return for each candidate that was trained with: the gain on recorded rounds and what training gave."""
    at_one = trials.filter(pl.col("scale") == 1)
    base = at_one.filter(pl.col("candidate") == AS_RECORDED.name).sort("round")
    default = pick(runs, "ppo", DEFAULT).select("seed", default=RESULT)
    rows = []
    for name, (steps, arm) in TRAINED.items():
        trial = at_one.filter(pl.col("candidate") == name).sort("round")
        both = pick(runs, arm, steps).join(default, on="seed").sort("seed")
        row: dict[str, Any] = {"candidate": name, "seeds": len(both)}
        for judge in JUDGES:
            row[judge] = bootstrap_mean((trial[judge] - base[judge]).to_numpy())
        row["trained"] = t_interval((both[RESULT] - both["default"]).to_list())
        rows.append(row)
    return rows


def agree(row: dict[str, Any], judge: str) -> bool | None:
    """Return whether both say the same direction; None if either's interval holds 0."""
    foreseen, trained = row[judge], row["trained"]
    if not _is_clear(foreseen) or not _is_clear(trained):
        return None
    return bool(foreseen["mean"] * trained["mean"] > 0)


def count_signs(settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return for each setting in how many environments training had the sign that recorded rounds or a rule foresaw.

    The rule is the sign of most environments, which is chosen with hindsight.
    """
    counts = []
    for name in TRAINED:
        rows = [row for each in settings.values() for row in each if row["candidate"] == name]
        signs = np.array([np.sign(row["trained"]["mean"]) for row in rows])
        row = {"candidate": name, "environments": len(rows)}
        for judge in JUDGES:
            row[judge] = float(np.sum(signs == [np.sign(each[judge]["mean"]) for each in rows]))
        row["rule"] = float(max(np.sum(signs > 0), np.sum(signs < 0)))
        counts.append(row)
    return counts


def _is_clear(interval: dict[str, Any]) -> bool:
    return interval["low"] is not None and interval["low"] * interval["high"] > 0


def write_tables(out: Path, practice: Path) -> None:
    """Write tables.md and summary.json."""
    runs = read_runs(practice).filter("pooled")
    done = {line["env"] for line in read_trials(out)}
    trained = set(pick(runs, "ppo", DEFAULT)["env"])
    envs = [env for env in WORLDS if env in done & trained]
    steps_rows, rates_rows, settings_rows, summary = [], [], [], {}
    for env in envs:
        trials, env_runs = collect_trials(out, env), runs.filter(pl.col("env") == env)
        steps = [describe_step(trials, judge) for judge in JUDGES]
        rates = compare_rates(env_runs, steps[0]["recommended"], find_others_rate(runs, env))
        settings = compare_settings(trials, env_runs)
        summary[env] = {"steps": steps, "rates": rates, "settings": settings}
        for each in steps:
            words = "cannot tell" if each["recommended"] is None else f"× {each['recommended']:g}"
            steps_rows.append(
                [env, each["judge"], f"{each['best']:g}", f"{each['kl']:.4f}", words, f"{each['kl_as_recorded']:.4f}"]
            )
        digits = 2 if abs(rates["grid"]["mean"]) < 5 else 0
        named = f"{rates['named_rate']:.2g} ({rates['nearest_rate']:g}): {cell(rates['named'], digits=digits)}"
        best = f"{rates['best_rate']:g}: {cell(rates['grid'], digits=digits)}"
        targets = [cell(rates[f"kl{target:g}"], digits=digits) for target in (0.01, 0.02)]
        others = f"{rates['others_rate']:g}: {cell(rates['others'], digits=digits)}"
        rates_rows.append([env, cell(rates["default"], digits=digits), named, *targets, others, best])
        for row in settings:
            gains = [cell({k: 1000 * v for k, v in row[judge].items()}, digits=1) for judge in JUDGES]
            words = ["–" if (same := agree(row, judge)) is None else "yes" if same else "no" for judge in JUDGES]
            trained = cell(row["trained"], digits=digits)
            settings_rows.append([env, row["candidate"], *gains, trained, str(row["seeds"]), ", ".join(words)])
    head = {
        "How long a step should have been": [
            "environment",
            "advantages",
            "best × step",
            "KL there",
            "says",
            "KL at ×1",
        ],
        "Mean return at the rate it names": [
            "environment",
            "default",
            "named (nearest run)",
            "kl0.01",
            "kl0.02",
            "best rate of the other environments",
            "best of the grid, in hindsight",
        ],
        "Other settings, less those recorded": [
            "environment",
            "setting",
            "gain × 1,000",
            "by returns",
            "mean return",
            "seeds",
            "agree",
        ],
        "Environments where training had the sign that was foreseen": [
            "setting",
            "gain",
            "by returns",
            "sign of most",
            "environments",
        ],
    }
    signs = count_signs({env: each["settings"] for env, each in summary.items()})
    keys = (*JUDGES, "rule", "environments")
    signs_rows = [[each["candidate"], *(f"{each[key]:g}" for key in keys)] for each in signs]
    signs_rows.append(["together", *(f"{sum(each[key] for each in signs):g}" for key in keys)])
    parts = ["# Tuning: tables\n\nWritten by `python -m studies.tuning.tables results/tuning results/practice`.\n"]
    for (title, names), rows in zip(head.items(), (steps_rows, rates_rows, settings_rows, signs_rows), strict=True):
        parts += [f"## {title}\n", table([names, *rows]), ""]
    write_text(out / "tables.md", "\n".join(parts))
    write_text(out / "summary.json", json.dumps(summary | {"signs": signs}, indent=2) + "\n")


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the trials.")] = Path("results/tuning"),
    practice: Annotated[Path, typer.Argument(help="Directory of the training runs.")] = Path("results/practice"),
) -> None:
    """Write the tables of what is there."""
    write_tables(out, practice)


if __name__ == "__main__":
    typer.run(main)
