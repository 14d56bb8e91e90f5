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

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy
import torch
import typer
from rich.console import Console

from studies.faithfulness.lds import measure_agreement
from studies.faithfulness.outcomes import measure_outcomes
from studies.faithfulness.run import OPTIMIZERS, SEEDS, SETUPS
from studies.faithfulness.smoothed import SHARE, average_sides, draw_derivatives
from studies.markdown import table
from studies.stored import round_numbers, write_line
from whence import Return, attribute, lab, stored
from whence.core import eval_mode, preserve_rng_state, write_atomically
from whence.lab import read_rows
from whence.lab.rounds import check_target, compute_lds, draw_subsets, open_round, reshuffle, retrain
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


def rank_correlation(one: Any, other: Any) -> float:
    """Return Spearman's."""
    return float(scipy.stats.spearmanr(one, other).statistic)


def judge(policy: Any, recording: Any, objective: Any, seed: int) -> dict[str, Any]:
    """Return how the snapshot and each estimator predict the halves of a round, and how halves of its draws agree."""
    halves, shared, apart = measure_halves(policy, recording, seed)
    round = open_round(policy, recording)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())):
        target = check_target(Return(), round)
        values, sides = draw_derivatives(round, target, 2**31, max(COUNTS), SHARE, seed)
    snapshot = attribute(policy, recording.records, target=Return(), objective=objective).scores.double().numpy()
    rows = [{"estimator": "snapshot", "draws": 0, **compare(halves, shared, apart, snapshot)}]
    for name, trim in TRIMS.items():
        average = partial(average_parts, values.double(), sides, trim)
        for count in COUNTS:
            row = {"estimator": name, "draws": count, **compare(halves, shared, apart, average(slice(count)))}
            rows.append(
                row | {"agreement": rank_correlation(average(slice(TOGETHER)), average(slice(TOGETHER, 2 * TOGETHER)))}
            )
    return {"ceiling": measure_agreement(shared), "rows": rows}


def average_parts(values: Any, sides: Any, trim: float, part: slice) -> Any:
    """Return the scores of some draws."""
    return average_sides(values[part], sides[:, part], trim).numpy()


def compare(halves: Any, shared: Any, apart: Any, scores: Any) -> dict[str, Any]:
    """Return the LDS of scores, by orders that halves share and by others."""
    return {
        "lds": compute_lds(halves @ scores, shared.mean(axis=0))["lds"],
        "apart": rank_correlation(halves @ scores, apart),
    }


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
    lab.run(lab.configure(preset=preset, **settings), path, recordings=list(numbers))
    for number in missing:
        model, recording = stored.load_recording(RunDirectory.open(path), number)
        about = dict(zip(KEYS, (part, env, seed, number), strict=True))
        judged = judge(model.policy, recording, model_objective(model), 1000 * seed + number)
        write_line(out / "estimators.parquet", round_numbers({**about, **judged}), KEYS)
        Console(stderr=True).print(f"{part}, {env}, seed {seed}, round {number}")


def write_tables(out: Path) -> None:
    """Write estimators.md: means over the rounds of a seed, then over seeds with 95% t intervals; and each round."""
    rounds = list(read_rows(out / "estimators.parquet", KEYS).values())
    parts = [
        "# Which mean of the draws\n\nWritten by `python -m studies.faithfulness.estimators results/faithfulness`.\n"
    ]
    for part, env in ((part, env) for part, environments in PARTS.items() for env in environments):
        rows = [row for row in rounds if (row["part"], row["env"]) == (part, env)]
        if rows:
            parts += [f"## {part.capitalize()}: {env}\n", tabulate(rows), ""]
            parts += ["LDS in each round:\n", tabulate_rounds(rows), ""]
    with write_atomically(out / "estimators.md") as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


def tabulate(rows: Sequence[Any]) -> str:
    """Return the figures of every estimator and number of draws."""
    head = ["estimator", "draws", "LDS", "LDS, orders apart", "minus snapshot", "rounds below it"]
    lines = [[*head, "agreement of two halves of 128", "lowest", f"rounds below {AGREES}"]]
    for place, about in enumerate(rows[0]["rows"]):
        cells = [average_seeds([(row["seed"], row["rows"][place][name]) for row in rows]) for name in ("lds", "apart")]
        if about["draws"]:
            gains = [(row["seed"], row["rows"][place]["lds"] - row["rows"][0]["lds"]) for row in rows]
            cells += [average_seeds(gains), str(sum(gain < 0 for _, gain in gains))]
            agreements = [(row["seed"], row["rows"][place]["agreement"]) for row in rows]
            low = [value for _, value in agreements if value < AGREES]
            cells += [average_seeds(agreements), f"{min(value for _, value in agreements):.2f}", str(len(low))]
        lines.append([about["estimator"], str(about["draws"] or ""), *cells, *[""] * (len(lines[0]) - 2 - len(cells))])
    return table(lines)


def average_seeds(values: Sequence[tuple[int, float]]) -> str:
    """Return the mean of each seed's mean, with a 95% t interval."""
    means = np.array(
        [np.mean([value for one, value in values if one == seed]) for seed in sorted({s for s, _ in values})]
    )
    half = scipy.stats.t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / len(means) ** 0.5 if len(means) > 1 else None
    return f"{means.mean():.3f}" + ("" if half is None else f" [{means.mean() - half:.3f}, {means.mean() + half:.3f}]")


def tabulate_rounds(rows: Sequence[Any]) -> str:
    """Return the LDS of the snapshot, and of the estimators of 16 and of 64 draws, round by round."""
    places = [place for place, about in enumerate(rows[0]["rows"]) if about["draws"] in (0, 16, 64)]
    names = [
        f"{rows[0]['rows'][place]['estimator']} {rows[0]['rows'][place]['draws'] or ''}".strip() for place in places
    ]
    lines = [["seed", "round", "ceiling", *names]]
    for row in sorted(rows, key=lambda row: (row["seed"], row["round"])):
        cells = [f"{row['rows'][place]['lds']:.2f}" for place in places]
        lines.append([str(row["seed"]), str(row["round"]), f"{row['ceiling']:.2f}", *cells])
    return table(lines)


def list_jobs(only: str) -> list[tuple[str, str, int]]:
    """Return part, environment and seed of each run whose name begins so."""
    return [
        (part, env, seed)
        for part, environments in PARTS.items()
        for env, (seeds, _) in environments.items()
        for seed in seeds
        if f"{part}/{env}".startswith(only)
    ]


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = Path("out/estimators"),
    only: Annotated[str, typer.Option(help="Parts whose name begins so: environments/minigrid.")] = "",
    workers: Annotated[int, typer.Option(help="Processes at a time.")] = 1,
) -> None:
    """Study what is not there yet, and write estimators.md."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for begun in [pool.submit(study_seed, *job, out, runs) for job in list_jobs(only)]:
            begun.result()
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
