"""Which mean of the derivatives: plain, trimmed, or the median, and of how many draws.

Run: `python -m studies.faithfulness.estimators results/faithfulness [--only tuned/lunarlander] [--workers 1]`.
`smoothed` averages derivatives over random trainings, and under Adam these have heavy tails. LunarLander is trained by
plain PPO with Adam 3e-4, and in some of its rounds the draws are made once; each estimator averages the first 16, 32,
64 or all 128 of them. It is judged by

- LDS: the rank correlation with 100 trainings on random halves, in two orders that all halves share;
- LDS, orders apart: the same where each half has an order that no other half has;
- agreement: the rank correlation between the scores of the first 64 draws and those of the last 64.

The mean is chosen on the part `tuned`, and reported on `tested`. On `tuned` 16 draws do; that 64 are taken was chosen
on `tested`. `environments` are the rounds under Adam of `studies.faithfulness.run`, trained anew: which records a round
has depends on the processor. A finished round is not studied again.
Training runs are kept in `--runs`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import typer
from scipy.stats import spearmanr

from studies.faithfulness.means import over_seeds
from studies.faithfulness.retraining import measure_agreement, measure_outcomes
from studies.faithfulness.run import OPTIMIZERS, SEEDS, SETUPS
from studies.faithfulness.smoothed import SHARE, average_sides, draw_derivatives
from studies.shared import (
    Only,
    Out,
    Row,
    Runs,
    Workers,
    cell,
    read_list,
    report,
    run_jobs,
    table,
    write_line,
    write_page,
)
from whence import Return, attribute, experiments
from whence.core import eval_mode, preserve_rng_state
from whence.counterfactual import compute_lds, draw_subsets, reshuffle, retrain
from whence.experiments import read_rows
from whence.rounds import check_target, open_round
from whence.runs import RunDirectory
from whence.sb3 import model_objective

PARTS: dict[str, dict[str, tuple[Sequence[int], Sequence[int]]]] = {
    "tuned": {"lunarlander": (range(100, 102), (3, 15, 30))},
    "tested": {"lunarlander": (range(110, 115), (5, 10, 20, 40))},
    "environments": {env: (SEEDS, SETUPS[env, optimizer].studied) for env, optimizer in SETUPS if optimizer == "adam"},
}
"""The seeds and rounds of each part, by environment."""

TRIMS = {"mean": 0.0, "trimmed 10%": 0.1, "trimmed 25%": 0.25, "trimmed 40%": 0.4, "median": 0.5}
COUNTS = (16, 32, 64, 128)
HALVES, ORDERS = 100, 2
TOGETHER = 64
"""Draws of each of two halves that should agree."""

AGREES = 0.6
KEYS = ("part", "env", "seed", "round")


def measure_halves(policy: Any, recording: Any, seed: int) -> tuple[Any, Any, Any]:
    """Return random halves, their outcomes in shared orders, and in one order each."""
    n, update = len(recording.records), recording.update
    generator = torch.Generator().manual_seed(seed)
    halves = draw_subsets(n, SHARE, HALVES, generator)
    orders = [reshuffle(halves, update.batch_size, update.n_epochs, generator) for _ in range(ORDERS)]
    each = [reshuffle(half[None], update.batch_size, update.n_epochs, generator) for half in halves]
    # All halves are of one size, so that their steps can be stacked.
    apart = [torch.cat(step) for step in zip(*each, strict=True)]
    outcomes = []
    for minibatches in (*orders, apart):
        trained = retrain(policy, recording, halves, orders=minibatches)
        outcomes.append(measure_outcomes(policy, recording, trained, Return(), None)["target"])
    return halves.double().numpy(), np.stack(outcomes[:ORDERS]), outcomes[-1]


def judge(policy: Any, recording: Any, objective: Any, seed: int) -> Row:
    """Return how the snapshot and each estimator predict the halves of a round, and how halves of its draws agree."""
    halves, shared, apart = measure_halves(policy, recording, seed)
    round = open_round(policy, recording)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())):
        values, sides = draw_derivatives(round, check_target(Return(), round), max(COUNTS), seed)

    def average(trim: float, part: slice) -> Any:
        return average_sides(values[part].double(), sides[:, part], trim).numpy()

    def compare(scores: Any) -> Row:
        lds = compute_lds(halves @ scores, shared.mean(axis=0))["lds"]
        return {"lds": lds, "apart": float(spearmanr(halves @ scores, apart).statistic)}

    snapshot = attribute(policy, recording.records, target=Return(), objective=objective).scores.double().numpy()
    rows = [{"estimator": "snapshot", "draws": 0, **compare(snapshot)}]
    for name, trim in TRIMS.items():
        parts = (average(trim, part) for part in (slice(TOGETHER), slice(TOGETHER, 2 * TOGETHER)))
        agreement = float(spearmanr(*parts).statistic)
        rows += [
            {"estimator": name, "draws": count, **compare(average(trim, slice(count))), "agreement": agreement}
            for count in COUNTS
        ]
    return {"ceiling": measure_agreement(shared), "rows": rows}


def study_seed(part: str, env: str, seed: int, out: Path, runs: Path) -> None:
    """Train a run where that is not done, and study its rounds."""
    torch.set_num_threads(1)
    numbers, path = PARTS[part][env][1], runs / env / f"seed_{seed}"
    done = read_rows(out / "estimators.parquet", KEYS)
    missing = [number for number in numbers if (part, env, seed, number) not in done]
    if not missing:
        return
    settings = {**OPTIMIZERS["adam"], "seed": seed, "rounds": numbers[-1], "eval_episodes": 0}
    preset = SETUPS[env, "adam"].preset
    experiments.run(experiments.configure(preset=preset, **settings), path, recordings=list(numbers))
    for number in missing:
        model, recording = experiments.load_recording(RunDirectory.open(path), number)
        about = dict(zip(KEYS, (part, env, seed, number), strict=True))
        judged = judge(model.policy, recording, model_objective(model), 1000 * seed + number)
        write_line(out / "estimators.parquet", {**about, **judged}, KEYS)
        report(f"{part}, {env}, seed {seed}, round {number}")


def write_tables(out: Path) -> None:
    """Write estimators.md: means over the rounds of a seed, then over seeds with 95% t intervals; and each round."""
    head = "# Which mean of the draws\n\nWritten by `python -m studies.faithfulness.estimators results/faithfulness`."
    rounds, parts = read_list(out / "estimators.parquet", KEYS), [head]
    for part, env in ((part, env) for part, environments in PARTS.items() for env in environments):
        if rows := [row for row in rounds if (row["part"], row["env"]) == (part, env)]:
            parts += [f"## {part.capitalize()}: {env}", tabulate(rows), "LDS in each round:", tabulate_rounds(rows)]
    write_page(out / "estimators.md", *(part.replace("−", "-") for part in parts))


def tabulate(rounds: Sequence[Row]) -> str:
    """Return the figures of every estimator and number of draws."""
    head = ["estimator", "draws", "LDS", "LDS, orders apart", "minus snapshot", "rounds below it"]
    lines = [[*head, "agreement of two halves of 128", "lowest", f"rounds below {AGREES}"]]
    for place, about in enumerate(rounds[0]["rows"]):
        rows = pl.DataFrame([{"seed": row["seed"], **row["rows"][place]} for row in rounds])
        cells = [cell(over_seeds(rows, name)) for name in ("lds", "apart")]
        if about["draws"]:
            rows = rows.with_columns(gain=pl.col("lds") - pl.Series([row["rows"][0]["lds"] for row in rounds]))
            cells += [
                cell(over_seeds(rows, "gain")),
                str((rows["gain"] < 0).sum()),
                cell(over_seeds(rows, "agreement")),
            ]
            cells += [cell(rows["agreement"].min(), digits=2), str((rows["agreement"] < AGREES).sum())]
        lines.append([about["estimator"], str(about["draws"] or ""), *cells, *[""] * (len(lines[0]) - 2 - len(cells))])
    return table(lines)


def tabulate_rounds(rounds: Sequence[Row]) -> str:
    """Return the LDS of the snapshot, and of the estimators of 16 and of 64 draws, round by round."""
    places = {
        place: f"{about['estimator']} {about['draws'] or ''}".strip()
        for place, about in enumerate(rounds[0]["rows"])
        if about["draws"] in (0, 16, 64)
    }
    lines = [["seed", "round", "ceiling", *places.values()]]
    for row in rounds:
        cells = [cell(row["rows"][place]["lds"], digits=2) for place in places]
        lines.append([str(row["seed"]), str(row["round"]), cell(row["ceiling"], digits=2), *cells])
    return table(lines)


def list_jobs(only: str) -> list[tuple[str, str, int]]:
    """Return part, environment and seed of each run whose name begins so."""
    places = [(part, env) for part, environments in PARTS.items() for env in environments]
    return [
        (*place, seed) for place in places if "/".join(place).startswith(only) for seed in PARTS[place[0]][place[1]][0]
    ]


def main(out: Out, runs: Runs = Path("out/estimators"), only: Only = "", workers: Workers = 1) -> None:
    """Study what is not there yet, and write estimators.md."""
    run_jobs(study_seed, list_jobs(only), out, runs, workers=workers)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
