"""Cheap scores under Adam: is one that costs two snapshots at most truer than the snapshot?

Run: `python -m studies.faithfulness.adam results/faithfulness [--only lunarlander] [--workers 1]`. Plain PPO with
Stable-Baselines3's default Adam trains environments on seeds that no other part of the study has. The scores of an
early, a middle and a later round are held against 100 trainings on random halves, in two orders that all halves share.
A finished round is not studied again; `--again` holds its cheap scores anew against the trainings that are stored.
Training runs are kept in `--runs`. The page is adam.md.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from torch import Tensor

from studies.faithfulness.means import over_seeds
from studies.faithfulness.retraining import measure_agreement, study
from studies.faithfulness.run import OPTIMIZERS, SETUPS, Job
from studies.faithfulness.scores import list_cheap_scores
from studies.faithfulness.smoothed import score_smoothed
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
from whence import Return, lab, stored
from whence.lab import read_rows
from whence.lab.rounds import attribute_round, compute_lds, draw_subsets
from whence.runs import RunDirectory

ROUNDS = {"lunarlander": (5, 15, 40), "frozenlake": (2, 5, 9), "acrobot": (3, 15, 40), "minigrid": (3, 12, 30)}
"""The rounds of each environment; FrozenLake's, Acrobot's and MiniGrid's are those of `studies.faithfulness.run`."""

SEEDS = range(120, 125)
SHARE, HALVES, ORDERS = 0.5, 100, 2
DRAWS = (4, 16)
REPEATS = 3
"""How often a cheap score is timed; the shortest counts."""

KEYS = ("env", "seed", "round")


def main(
    out: Out,
    runs: Runs = Path("out/adam"),
    only: Only = "",
    workers: Workers = 1,
    again: Annotated[bool, typer.Option(help="Score finished rounds again.")] = False,
) -> None:
    """Study the rounds that are not there yet, and write adam.md."""
    jobs = [(env, seed) for env in ROUNDS for seed in SEEDS if f"{env}/{seed}".startswith(only)]
    run_jobs(study_seed, jobs, out, runs, again, workers=workers)
    write_tables(out)


def study_seed(env: str, seed: int, out: Path, runs: Path, again: bool) -> None:
    """Train a run where that is not done, and study its rounds, those that are there only `again`."""
    torch.set_num_threads(1)
    numbers, rows, path = ROUNDS[env], out / "adam.parquet", runs / env / f"seed_{seed}"
    known = {number: read_rows(rows, KEYS).get((env, seed, number)) for number in numbers}
    chosen = [number for number, row in known.items() if bool(row) == again]
    if not chosen:
        return
    settings = {"seed": seed, "rounds": numbers[-1], "eval_episodes": 0, **OPTIMIZERS["adam"]}
    lab.run(lab.configure(preset=SETUPS[env, "adam"].preset, **settings), path, recordings=list(numbers))
    for number in chosen:
        model, recording = stored.load_recording(RunDirectory.open(path), number)
        judged = judge(model.policy, recording, Job(env, "adam", seed).chance(number), known[number])
        write_line(rows, {"env": env, "seed": seed, "round": number, **judged}, KEYS)
        report(f"{env}, seed {seed}, round {number}")


def judge(policy: Any, recording: Any, seed: int, known: Row | None = None) -> dict[str, Any]:
    """Return how each score of a round predicts halves of it, the CPU seconds that it takes, and the ceiling.

    Of a `known` row the outcomes of trainings stay, and the costly scores.
    """
    target, chance = Return(), torch.Generator().manual_seed(seed)
    halves = draw_subsets(len(recording.records), SHARE, HALVES, chance).double().numpy()
    settings = {"share": SHARE, "count": HALVES, "orders": ORDERS, "recorded": False, "seed": seed}
    if known is None:
        result = study(policy, recording, {}, target=target, **settings)
        outcomes = result.outcomes["reshuffled"]["target"]
    else:
        outcomes = np.array(known["outcomes"])

    def compare(name: str, function: Callable[[], Tensor], repeats: int) -> Row:
        values, seconds = measure(function, repeats)
        lds = compute_lds(halves @ values.double().cpu().numpy(), outcomes.mean(axis=0))["lds"]
        return {"score": name, "lds": lds, "seconds": seconds}

    cheap = list_cheap_scores(policy, recording, target=target, seed=seed)
    rows = [compare(name, function, REPEATS) for name, function in cheap.items()]
    costly: dict[str, Callable[[], Tensor]] = {
        "unrolled": lambda: attribute_round(policy, recording, target=target, method="unrolled").scores
    }
    for draws in DRAWS:
        smooth = partial(score_smoothed, policy, recording, target=target, draws=draws, seed=seed)
        costly[f"smoothed, {draws} draws"] = smooth
    stored_rows = {} if known is None else {row["score"]: row for row in known["scores"]}
    rows += [stored_rows.get(name) or compare(name, function, 1) for name, function in costly.items()]
    return {"ceiling": measure_agreement(outcomes), "scores": rows, "outcomes": outcomes.tolist()}


def measure(function: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    """Return what a function returns, and the CPU seconds that its shortest call took."""
    seconds = []
    for _ in range(repeats):
        began = process_time()
        values = function()
        seconds.append(process_time() - began)
    return values, min(seconds)


def write_tables(out: Path) -> None:
    """Write adam.md: means over the rounds of a seed, then over seeds with 95% t intervals; and each round."""
    rows = read_list(out / "adam.parquet", KEYS)
    parts = []
    for env in ROUNDS:
        if chosen := [row for row in rows if row["env"] == env]:
            parts += [f"## {env}", tabulate(chosen), "LDS in each round:", tabulate_rounds(chosen)]
    write_page(out / "adam.md", "# Cheap scores under Adam\n\nBy `python -m studies.faithfulness.adam`.", *parts)


def tabulate(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of every score."""
    lines = [["score", "cost, snapshots", "LDS", "minus snapshot", "rounds below it"]]
    for place, name in enumerate(list_names(rows)):
        entries = [
            {
                "seed": row["seed"],
                "lds": row["scores"][place]["lds"],
                "gain": row["scores"][place]["lds"] - row["scores"][0]["lds"],
                "cost": row["scores"][place]["seconds"] / row["scores"][0]["seconds"],
            }
            for row in rows
        ]
        frame = pl.DataFrame(entries)
        gains = [cell(over_seeds(frame, "gain")), f"{sum(frame['gain'] < 0)} of {len(rows)}"] if place else ["", ""]
        cost = median(frame["cost"])
        lines.append([name, f"{cost:.1f}" if cost < 10 else f"{cost:.0f}", cell(over_seeds(frame, "lds")), *gains])
    ceiling = over_seeds(pl.DataFrame([{"seed": row["seed"], "ceiling": row["ceiling"]} for row in rows]), "ceiling")
    return table([*lines, ["*ceiling*", "", cell(ceiling), "", ""]])


def tabulate_rounds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the LDS of every score, a line for each, round by round."""
    head = ["seed, round", *(f"{row['seed']}, {row['round']}" for row in rows)]
    lines = [
        [name, *(cell(row["scores"][place]["lds"], digits=2) for row in rows)]
        for place, name in enumerate(list_names(rows))
    ]
    return table([head, *lines, ["*ceiling*", *(cell(row["ceiling"], digits=2) for row in rows)]])


def list_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the scores, the snapshot's first; every round has the same."""
    return [score["score"] for score in rows[0]["scores"]]


if __name__ == "__main__":
    typer.run(main)
