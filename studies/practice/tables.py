"""The tables of `studies.practice.run`: tables.md, from the runs that are there.

Run: `python -m studies.practice.tables results/practice`. A run's result is its last test return, or the mean of its
evaluations after the start. Each is scaled in its environment: 0 is the untrained policy, 1 the best mean of `ppo` or
`iif` at a rate or a target. Figures over environments are rliable's (Agarwal et al., 2021): the interquartile mean, and
the probability that a run of one arm is better than one of the other; intervals by 5,000 bootstraps of the seeds of
each environment, where each has three. The same target is not the same divergence, so each target's runs of `iif` are
also compared with those of `ppo` whose divergence was the nearest, in each environment.
"""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl
import typer

from studies.practice import environments
from studies.practice.interquartile import Scores, bootstrap, probability_of_improvement, subtract_means
from studies.practice.run import BEST_RATE, CONTROLS, DEFAULT, DROP, RATES, USUAL, WORLDS
from studies.practice.runs import RATE_STEPS, RESULTS, REWARDED, STEPS, TARGET_STEPS, pick, read_runs, scale_results
from studies.shared import Out, cell, grid, table, write_page
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
    targets = {f"iif at {steps}": match_divergence(scaled, steps).select("env", "steps") for steps in TARGET_STEPS}
    nearest = {head: dict(each.unique().iter_rows()) for head, each in targets.items()}
    envs = dict.fromkeys(scaled["env"])
    return grid("environment", envs, [*nearest], lambda env, head: nearest[head].get(env, "–"))


def list_rates(runs: pl.DataFrame, arm: str) -> pl.DataFrame:
    """Return the runs of an arm at all learning rates, the default first."""
    return pl.concat([pick(runs, arm, f"lr{rate:g}") for rate in RATES])


def tabulate_omissions(scaled: pl.DataFrame, name: str) -> str:
    """Return `iif` less `ppo` at each size of step, over all environments and without each of them."""

    def show(omitted: str, steps: str) -> str:
        part = scaled.filter(pl.col("env") != omitted)
        pair = [list_rates(part, arm) if steps == OWN_BEST else pick(part, arm, steps) for arm in ("iif", "ppo")]
        return cell(bootstrap(*list_scores(*pair, name), subtract_means), digits=2)

    return grid("without", ("none", *dict.fromkeys(scaled["env"])), [*STEPS, OWN_BEST], show)


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
    for steps in STEPS:
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
    for steps in environments.OTHERS:
        add("iif", "ppo", steps)
    for about, some in (("mean of the rates", RATE_STEPS), ("mean of the targets", TARGET_STEPS)):
        parts = [average_steps(scaled, arm, some) for arm in ("iif", "ppo")]
        answers[f"iif less ppo, {about}"] = compare(parts[0], parts[1], name)
    ppo = {steps: pick(scaled, "ppo", steps) for steps in STEPS}
    for steps in TARGET_STEPS:
        answers[f"ppo at {steps} less ppo at its own best rate"] = compare(ppo[steps], rates["ppo"], name)
    targets = pl.concat([ppo[steps] for steps in TARGET_STEPS])
    answers["ppo at its own best target less ppo at its own best rate"] = compare(targets, rates["ppo"], name)
    answers[f"ppo at kl0.04 less ppo at {BEST_RATE}"] = compare(ppo["kl0.04"], ppo[BEST_RATE], name)
    for arm in ("ppo", "iif"):
        default, usual = pick(scaled, arm, DEFAULT), pick(scaled, arm, USUAL)
        for steps in STEPS:
            if steps != DEFAULT:
                about = f"{arm} at {steps} less {arm} at the default rate"
                answers[about] = compare(pick(scaled, arm, steps), default, name)
        answers[f"{arm} at kl0.04 less {arm} at {USUAL}"] = compare(pick(scaled, arm, "kl0.04"), usual, name)
    early = pick(scaled, "ppo", "early0.02")
    answers[f"ppo at {USUAL} less ppo with SB3's target_kl"] = compare(ppo[USUAL], early, name)
    return answers


def tabulate_questions(scaled: pl.DataFrame, name: str) -> str:
    """Return the comparisons as a table."""
    lines = [["compared", "environments", "runs", "difference of IQM", "P(improvement)"]]
    for what, each in list_questions(scaled, name).items():
        if each is not None:
            cells = (cell(each[key], digits=2) for key in ("difference", "improves"))
            lines.append([what, str(each["environments"]), str(each["runs"]), *cells])
    return table(lines)


def write_tables(out: Out) -> None:
    """Write tables.md."""
    runs = read_runs(out)
    order = {name: place for place, name in enumerate(WORLDS)}
    runs = runs.sort(pl.col("env").replace_strict(order, return_dtype=pl.Int64), "steps", "arm", "seed")
    scaled = scale_results(runs)
    groups = {"": scaled, ", the last three environments alone": scaled.filter(pl.col("env").is_in(LAST))}
    tables = {
        f"By the {about}{which}": tabulate_questions(some, name)
        for which, some in groups.items()
        for name, about in RESULTS.items()
    }
    for name, about in RESULTS.items():
        tables[f"iif less ppo by the {about}, without an environment"] = tabulate_omissions(scaled, name)
    tables["The runs of ppo of the nearest divergence"] = tabulate_matches(scaled)
    for name, about in RESULTS.items():
        tables[f"iif less ppo by the {about}, by environment"] = environments.tabulate_differences(runs, name)
    tables |= {
        "Flat rounds kept whole: last test return": environments.tabulate_flat(runs),
        "How far the first round goes: runs that are steered to .02": environments.tabulate_first_rounds(runs),
        "Runs that end no better than they began: ppo / iif": environments.tabulate_failures(runs),
        "Does the controller hold its target?": environments.tabulate_control(runs),
        "How often is its rate at a bound?": environments.tabulate_bounds(runs),
        "Divergence a round at fixed learning rates": environments.tabulate_divergence(runs),
    }
    for env, part in environments.split_environments(runs):
        tables[f"{env}: last test return"] = environments.tabulate_world(part)
    tables["LDA's script on LunarLander, by training's returns"] = environments.tabulate_script(load_sweep(out))
    head = "# Practice: tables\n\nWritten by `python -m studies.practice.tables results/practice`."
    write_page(out / "tables.md", head, *(f"## {title}\n\n{text}" for title, text in tables.items()))


if __name__ == "__main__":
    typer.run(write_tables)
