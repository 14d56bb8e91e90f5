"""The tables of `studies.practice.run`: tables.md and summary.json, from the runs that are there.

Run: `python -m studies.practice.tables results/practice`. A run's result is its last test return, or the mean of its
evaluations after the start. Each is scaled in its environment: 0 is the untrained policy, 1 the best mean of `ppo` or
`iif` at a rate or a target. Figures over environments are rliable's (Agarwal et al., 2021): the interquartile mean, and
the probability that a run of one arm is better than one of the other; intervals by 5,000 bootstraps of the seeds of
each environment, where each has three. The same target is not the same divergence, so each target's runs of `iif` are
also compared with those of `ppo` whose divergence was the nearest, in each environment.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from studies.markdown import cell, table
from studies.practice.environments import (
    OTHERS,
    tabulate_bounds,
    tabulate_control,
    tabulate_differences,
    tabulate_divergence,
    tabulate_failures,
    tabulate_first_rounds,
    tabulate_flat,
    tabulate_script,
    tabulate_world,
)
from studies.practice.interquartile import Scores, bootstrap, probability_of_improvement, subtract_means
from studies.practice.run import BEST_RATE, CONTROLS, DEFAULT, DROP, RATES, USUAL, WORLDS
from studies.practice.runs import (
    RATE_STEPS,
    RESULTS,
    REWARDED,
    TARGET_STEPS,
    pick,
    read_runs,
    scale_results,
)
from whence.core import write_atomically
from whence.lab import load_sweep

LAST = ("walker2d", "bipedalwalker", "minigrid-doorkey")
"""Environments that were trained when the others had been tabulated."""

LEAST = 2
"""The seeds that an environment needs to be compared."""

OWN_BEST = "own best rate"
"""The head of a column: each arm at its own."""

NEAR = 1.25
"""The largest ratio of two divergences that are compared as the same."""


def average_steps(runs: pl.DataFrame, arm: str, steps: Sequence[str]) -> pl.DataFrame:
    """Return each seed's mean result of an arm over several sizes of step; seeds that lack one are left out."""
    some = runs.filter(pl.col("arm") == arm, pl.col("steps").is_in(steps))
    means = some.group_by("env", "seed").agg(*(pl.col(name).mean() for name in RESULTS), count=pl.len())
    return means.filter(pl.col("count") == len(steps)).with_columns(steps=pl.lit("mean"))


def list_scores(one: pl.DataFrame, other: pl.DataFrame, name: str) -> tuple[Scores, Scores]:
    """Return the results of both, (steps, seeds) for each environment that has seeds enough, of those that both have.

    Where runs have several sizes of step, a seed counts that has all of them.
    """
    scores: tuple[Scores, Scores] = [], []
    for env in sorted({*one["env"]} & {*other["env"]}):
        parts = [_widen(runs.filter(pl.col("env") == env), name) for runs in (one, other)]
        seeds = {*parts[0]["seed"]} & {*parts[1]["seed"]}
        if len(seeds) >= LEAST:
            for each, part in zip(scores, parts, strict=True):
                each.append(part.filter(pl.col("seed").is_in(list(seeds))).drop("seed").to_numpy().T)
    return scores


def _widen(runs: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return a row for each seed with a column for each size of step, in the order of the runs."""
    return runs.pivot(on="steps", index="seed", values=name).drop_nulls().sort("seed")


def compare(one: pl.DataFrame, other: pl.DataFrame, name: str = "last") -> dict[str, Any] | None:
    """Return the difference of interquartile means and the probability of improvement; None without runs.

    Of runs at several sizes of step each seed's is taken that is the best for the other seeds.
    """
    a, b = list_scores(one, other, name)
    if not a:
        return None
    return {
        "environments": len(a),
        "runs": sum(scores.shape[1] for scores in a),
        "difference": bootstrap(a, b, subtract_means),
        "improves": bootstrap(a, b, probability_of_improvement, limits=(0, 1)),
    }


def match_divergence(runs: pl.DataFrame, steps: str) -> pl.DataFrame:
    """Return the runs of `ppo` at the target whose divergence is the nearest to that of `iif` at a target.

    Each environment has its own; one whose nearest divergence is further than `NEAR` has none.
    """
    controlled = runs.filter(pl.col("steps").is_in(TARGET_STEPS))
    means = controlled.group_by("env", "arm", "steps", maintain_order=True).agg(pl.col("kl").mean())
    parts = []
    for env, kl in pick(means, "iif", steps).select("env", "kl").iter_rows():
        others = means.filter(pl.col("env") == env, pl.col("arm") == "ppo")
        ratios = {target: abs(math.log(other / kl)) for target, other in others.select("steps", "kl").iter_rows()}
        nearest = min(ratios, key=lambda target: ratios[target], default=None)
        if nearest is not None and ratios[nearest] <= math.log(NEAR):
            parts.append(pick(runs.filter(pl.col("env") == env), "ppo", nearest))
    return pl.concat(parts) if parts else runs.clear()


def tabulate_matches(scaled: pl.DataFrame) -> str:
    """Return the target of the runs of `ppo` that got nearest to each target's runs of `iif`, by environment."""
    matches = [match_divergence(scaled, steps).select("env", "steps").unique() for steps in TARGET_STEPS]
    targets = [dict(each.iter_rows()) for each in matches]
    rows = [[env, *(each.get(env, "–") for each in targets)] for env in dict.fromkeys(scaled["env"])]
    return table([["environment", *(f"iif at {steps}" for steps in TARGET_STEPS)], *rows])


def list_rates(runs: pl.DataFrame, arm: str) -> pl.DataFrame:
    """Return the runs of an arm at all learning rates, the default first."""
    return pl.concat([pick(runs, arm, f"lr{rate:g}") for rate in RATES])


def list_omissions(scaled: pl.DataFrame, name: str) -> dict[str, dict[str, Any]]:
    """Return `iif` less `ppo` at each size of step, over all environments and without each of them."""
    answers: dict[str, dict[str, Any]] = {}
    for omitted in ("none", *dict.fromkeys(scaled["env"])):
        part = scaled.filter(pl.col("env") != omitted)
        pairs = {steps: (pick(part, "iif", steps), pick(part, "ppo", steps)) for steps in (*RATE_STEPS, *TARGET_STEPS)}
        pairs[OWN_BEST] = list_rates(part, "iif"), list_rates(part, "ppo")
        scores = {steps: list_scores(*pair, name) for steps, pair in pairs.items()}
        answers[omitted] = {steps: bootstrap(*pair, subtract_means) for steps, pair in scores.items()}
    return answers


def tabulate_omissions(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the differences without each environment as a table."""
    head = ["without", *RATE_STEPS, *TARGET_STEPS, OWN_BEST]
    return table([head, *([env, *(cell(row[steps], digits=2) for steps in head[1:])] for env, row in answers.items())])


def list_questions(scaled: pl.DataFrame, name: str) -> dict[str, dict[str, Any] | None]:
    """Return the comparisons that answer the study's questions, for one kind of result."""
    answers: dict[str, dict[str, Any] | None] = {}

    def add(one: str, other: str, steps: str) -> None:
        answers[f"{one} less {other}, {steps}"] = compare(pick(scaled, one, steps), pick(scaled, other, steps), name)

    controls = {"random": CONTROLS["random", DROP], "iif-drop0.5": CONTROLS["iif", 0.5]}
    for arm, steps_list in controls.items():
        for steps in steps_list:
            add(arm, "ppo", steps)
    for steps in controls["random"]:
        add("iif", "random", steps)
    for steps in controls["iif-drop0.5"]:
        add("iif-drop0.5", "iif", steps)
    for steps in (*RATE_STEPS, *TARGET_STEPS):
        add("iif", "ppo", steps)
    for steps in TARGET_STEPS:
        iif, nearest = pick(scaled, "iif", steps), match_divergence(scaled, steps)
        answers[f"iif at {steps} less ppo of the nearest divergence"] = compare(iif, nearest, name)
        same = pick(scaled, "ppo", steps).filter(pl.col("env").is_in(nearest["env"].unique().to_list()))
        answers[f"iif less ppo, {steps}, in these environments"] = compare(iif, same, name)
    for steps in (DEFAULT, USUAL):
        for other in ("iif", "ppo"):
            add(REWARDED, other, steps)
    rates = {arm: list_rates(scaled, arm) for arm in ("ppo", "iif")}
    answers["iif less ppo, each at its own best rate"] = compare(rates["iif"], rates["ppo"], name)
    for steps in OTHERS:
        add("iif", "ppo", steps)
    for about, some in (("mean of the rates", RATE_STEPS), ("mean of the targets", TARGET_STEPS)):
        parts = [average_steps(scaled, arm, some) for arm in ("iif", "ppo")]
        answers[f"iif less ppo, {about}"] = compare(parts[0], parts[1], name)
    ppo = {steps: pick(scaled, "ppo", steps) for steps in (*RATE_STEPS, *TARGET_STEPS)}
    for steps in TARGET_STEPS:
        answers[f"ppo at {steps} less ppo at its own best rate"] = compare(ppo[steps], rates["ppo"], name)
    targets = pl.concat([ppo[steps] for steps in TARGET_STEPS])
    answers["ppo at its own best target less ppo at its own best rate"] = compare(targets, rates["ppo"], name)
    answers[f"ppo at kl0.04 less ppo at {BEST_RATE}"] = compare(ppo["kl0.04"], ppo[BEST_RATE], name)
    for arm in ("ppo", "iif"):
        default, usual = pick(scaled, arm, DEFAULT), pick(scaled, arm, USUAL)
        for steps in (*RATE_STEPS, *TARGET_STEPS):
            if steps != DEFAULT:
                about = f"{arm} at {steps} less {arm} at the default rate"
                answers[about] = compare(pick(scaled, arm, steps), default, name)
        answers[f"{arm} at kl0.04 less {arm} at {USUAL}"] = compare(pick(scaled, arm, "kl0.04"), usual, name)
    early = pick(scaled, "ppo", "early0.02")
    answers[f"ppo at {USUAL} less ppo with SB3's target_kl"] = compare(ppo[USUAL], early, name)
    return answers


def tabulate_questions(answers: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return the comparisons as a table."""
    head = ["compared", "environments", "runs", "difference of IQM", "P(improvement)"]
    rows = [
        [
            what,
            str(each["environments"]),
            str(each["runs"]),
            cell(each["difference"], digits=2),
            cell(each["improves"], digits=2),
        ]
        for what, each in answers.items()
        if each is not None
    ]
    return table([head, *rows])


def write_tables(out: Path) -> None:
    """Write tables.md and summary.json."""
    runs = read_runs(out)
    order = {name: place for place, name in enumerate(WORLDS)}
    runs = runs.sort(pl.col("env").replace_strict(order, return_dtype=pl.Int64), "steps", "arm", "seed")
    pooled = runs.filter("pooled")
    scaled = scale_results(pooled)
    groups = {
        "all": ("", scaled),
        "last": (", the last three environments alone", scaled.filter(pl.col("env").is_in(LAST))),
    }
    parts = ["# Practice: tables\n\nWritten by `python -m studies.practice.tables results/practice`.\n"]
    summary: dict[str, Any] = {"runs": len(runs)}
    for group, (which, some) in groups.items():
        summary[group] = {name: list_questions(some, name) for name in RESULTS}
        for name, about in RESULTS.items():
            parts += [f"## By the {about}{which}\n", tabulate_questions(summary[group][name]), ""]
    summary["omissions"] = {name: list_omissions(scaled, name) for name in RESULTS}
    for name, about in RESULTS.items():
        table_of_omissions = tabulate_omissions(summary["omissions"][name])
        parts += [f"## iif less ppo by the {about}, without an environment\n", table_of_omissions, ""]
    parts += ["## The runs of ppo of the nearest divergence\n", tabulate_matches(scaled), ""]
    for name, about in RESULTS.items():
        parts += [f"## iif less ppo by the {about}, by environment\n", tabulate_differences(runs, name), ""]
    parts += ["## Flat rounds kept whole: last test return\n", tabulate_flat(pooled), ""]
    parts += ["## How far the first round goes: runs that are steered to .02\n", tabulate_first_rounds(pooled), ""]
    parts += ["## Runs that end no better than they began: ppo / iif\n", tabulate_failures(pooled), ""]
    parts += ["## Does the controller hold its target?\n", tabulate_control(runs), ""]
    parts += ["## How often is its rate at a bound?\n", tabulate_bounds(runs), ""]
    parts += ["## Divergence a round at fixed learning rates\n", tabulate_divergence(runs), ""]
    for env in dict.fromkeys(runs["env"]):
        parts += [f"## {env}: last test return\n", tabulate_world(runs.filter(pl.col("env") == env)), ""]
    parts += ["## LDA's script on LunarLander, by training's returns\n", tabulate_script(load_sweep(out)), ""]
    write_text(out / "tables.md", "\n".join(parts))
    write_text(out / "summary.json", json.dumps(summary, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, complete or not at all."""
    with write_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main(out: Annotated[Path, typer.Argument(help="Directory of the runs.")] = Path("results/practice")) -> None:
    """Write the tables of the runs that are there."""
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
