"""The tables of `benchmarks.practice`: tables.md and summary.json, from the runs that are there.

Run: `python -m benchmarks.practice_tables results/practice`. A run's result is its last test return, or the mean of its
evaluations after the start. Each is scaled in its environment: 0 is the untrained policy, 1 the best mean of an arm at
a rate or a target. Figures over environments are rliable's (Agarwal et al., 2021): the interquartile mean, and the
probability that a run of one arm is better than one of the other; intervals by 5,000 bootstraps of the seeds of each
environment, where each has three. The same target is not the same divergence, so each target's runs of `iif` are also
compared with those of `ppo` whose divergence was the nearest, in each environment.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from benchmarks.interquartile import LEAST_FOR_INTERVAL, Scores, bootstrap, probability_of_improvement, subtract_means
from benchmarks.markdown import cell, table
from benchmarks.practice import CAN_BE_FLAT, DEFAULT, RATES, SETTINGS, TARGETS, USUAL, USUAL_TARGET, WORLDS
from benchmarks.practice_runs import RATE_STEPS, RESULTS, TARGET_STEPS, pick, read_runs, scale_results
from whence.guards import write_atomically
from whence.intervals import t_interval

ARMS = ("ppo", "iif", "iif-drop0.5", "random")
REWARDED = "iif-rewarded"
OTHERS = tuple(dict.fromkeys(name for world in WORLDS.values() for name in world.others))

LAST = ("walker2d", "bipedalwalker", "minigrid-doorkey")
"""Environments that were trained when the others had been tabulated."""

LEAST = 2
"""The seeds that an environment needs to be compared."""

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
        "improves": bootstrap(a, b, probability_of_improvement),
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


def list_rates(runs: pl.DataFrame, arm: str) -> pl.DataFrame:
    """Return the runs of an arm at all learning rates, the default first."""
    return pl.concat([pick(runs, arm, f"lr{rate:g}") for rate in RATES])


def list_omissions(scaled: pl.DataFrame, name: str) -> dict[str, dict[str, Any] | None]:
    """Return what is left of the difference at the best rates without each environment."""
    parts = {env: scaled.filter(pl.col("env") != env) for env in dict.fromkeys(scaled["env"])}
    return {
        f"iif less ppo, each at its own best rate, without {env}": compare(
            list_rates(part, "iif"), list_rates(part, "ppo"), name
        )
        for env, part in parts.items()
    }


def list_questions(scaled: pl.DataFrame, name: str) -> dict[str, dict[str, Any] | None]:
    """Return the comparisons that answer the study's questions, for one kind of result."""
    answers: dict[str, dict[str, Any] | None] = {}
    for arm in ARMS[2:]:
        for steps in (DEFAULT, USUAL):
            answers[f"{arm} less ppo, {steps}"] = compare(pick(scaled, arm, steps), pick(scaled, "ppo", steps), name)
    for steps in (DEFAULT, USUAL):
        answers[f"iif less random, {steps}"] = compare(pick(scaled, "iif", steps), pick(scaled, "random", steps), name)
    for steps in (*RATE_STEPS, *TARGET_STEPS):
        answers[f"iif less ppo, {steps}"] = compare(pick(scaled, "iif", steps), pick(scaled, "ppo", steps), name)
    for steps in TARGET_STEPS:
        nearest = match_divergence(scaled, steps)
        answers[f"iif at {steps} less ppo of the nearest divergence"] = compare(
            pick(scaled, "iif", steps), nearest, name
        )
    for steps in (DEFAULT, USUAL):
        for arm in ("iif", "ppo"):
            answers[f"{REWARDED} less {arm}, {steps}"] = compare(
                pick(scaled, REWARDED, steps), pick(scaled, arm, steps), name
            )
    best = {arm: list_rates(scaled, arm) for arm in ("ppo", "iif")}
    answers["iif less ppo, each at its own best rate"] = compare(best["iif"], best["ppo"], name)
    for other in OTHERS:
        answers[f"iif less ppo, {other}"] = compare(pick(scaled, "iif", other), pick(scaled, "ppo", other), name)
    for about, steps_list in (("mean of the rates", RATE_STEPS), ("mean of the targets", TARGET_STEPS)):
        parts = [average_steps(scaled, arm, steps_list) for arm in ("iif", "ppo")]
        answers[f"iif less ppo, {about}"] = compare(parts[0], parts[1], name)
    for steps in TARGET_STEPS:
        answers[f"ppo at {steps} less ppo at its own best rate"] = compare(
            pick(scaled, "ppo", steps), best["ppo"], name
        )
    for arm in ("ppo", "iif"):
        default = pick(scaled, arm, DEFAULT)
        for steps in (*RATE_STEPS, *TARGET_STEPS):
            if steps != DEFAULT:
                answers[f"{arm} at {steps} less {arm} at the default rate"] = compare(
                    pick(scaled, arm, steps), default, name
                )
        usual = pick(scaled, arm, USUAL)
        answers[f"{arm} at kl0.04 less {arm} at {USUAL}"] = compare(pick(scaled, arm, "kl0.04"), usual, name)
    answers[f"ppo at {USUAL} less ppo with SB3's target_kl"] = compare(
        pick(scaled, "ppo", USUAL), pick(scaled, "ppo", "early0.02"), name
    )
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


def tabulate_world(runs: pl.DataFrame) -> str:
    """Return an environment's last returns by size of step and arm, with the seeds."""
    head = ["step", *ARMS, "seeds"]
    rows = []
    for steps in (*RATE_STEPS, *TARGET_STEPS, *SETTINGS, *OTHERS):
        cells = [_average(pick(runs, arm, steps)["last"].to_list()) for arm in ARMS]
        seeds = len(pick(runs, "ppo", steps))
        if seeds:
            rows.append([steps, *(cell(each, digits=_digits(runs)) for each in cells), str(seeds)])
    return table([head, *rows])


def tabulate_differences(runs: pl.DataFrame, name: str) -> str:
    """Return `iif` less `ppo` in each environment and at each step, over the seeds that both have."""
    rows = []
    for env in dict.fromkeys(runs["env"]):
        env_runs = runs.filter(pl.col("env") == env)
        ppo = env_runs.filter(pl.col("arm") == "ppo").select("steps", "seed", pl.col(name).alias("other"))
        both = env_runs.filter(pl.col("arm") == "iif").join(ppo, on=["steps", "seed"])
        both = both.with_columns(difference=pl.col(name) - pl.col("other"))
        intervals = [
            t_interval(both.filter(pl.col("steps") == steps).sort("seed")["difference"].to_list())
            for steps in (*RATE_STEPS, *TARGET_STEPS)
        ]
        rows.append([env, *(cell(each, digits=_digits(env_runs)) for each in intervals)])
    return table([["environment", *RATE_STEPS, *TARGET_STEPS], *rows])


def tabulate_flat(runs: pl.DataFrame) -> str:
    """Return what becomes of `iif` if it leaves flat rounds whole: last returns over the seeds that all arms have."""
    arms = ("ppo", "iif", REWARDED)
    rows = []
    for env in CAN_BE_FLAT:
        for steps in (*RATE_STEPS, *TARGET_STEPS):
            some = runs.filter(pl.col("env") == env, pl.col("steps") == steps, pl.col("arm").is_in(arms))
            seeds = [set(pick(some, arm, steps)["seed"]) for arm in arms]
            both = some.filter(pl.col("seed").is_in(list(set.intersection(*seeds)))).sort("seed")
            if both.is_empty():
                continue
            parts = [pick(both, arm, steps) for arm in arms]
            gains = (parts[2]["last"] - parts[1]["last"]).to_list()
            cells = [f"{part['last'].mean():.{_digits(both)}f}".replace("-", "−") for part in parts]
            gain = cell(t_interval(gains), digits=_digits(both))
            rows.append([env, steps, *cells, gain, f"{parts[2]['whole'].mean():.0%}", str(len(parts[0]))])
    return table([["environment", "step", *arms, f"{REWARDED} less iif", "rounds kept whole", "seeds"], *rows])


def tabulate_first_rounds(runs: pl.DataFrame) -> str:
    """Return how far the first round takes the policy, apart for the seeds where it is flat.

    Of the runs at the usual target, which measure it over all records; the rate is not steered yet.
    """
    arms = ("ppo", "iif", "random")
    rows = []
    for env in CAN_BE_FLAT:
        some = runs.filter(pl.col("env") == env)
        # All arms collect the same first round, and of a flat one this arm drops nothing.
        firsts = pick(some, REWARDED, USUAL).select("seed", flat="first_whole")
        for arm in arms:
            firsts = firsts.join(pick(some, arm, USUAL).select("seed", pl.col("first_kl").alias(arm)), on="seed")
        for (is_flat,), part in firsts.sort("flat", "seed", descending=[True, False]).group_by(
            "flat", maintain_order=True
        ):
            ratios = [part[arm] / part["ppo"] for arm in arms[1:]]
            cells = [f"{part[arm].mean():.4f}" for arm in arms] + [f"{r.min():.1f} to {r.max():.1f}" for r in ratios]
            rows.append([env, "yes" if is_flat else "no", *cells, str(len(part))])
    return table([["environment", "flat", *arms, "iif / ppo", "random / ppo", "seeds"], *rows])


def tabulate_failures(runs: pl.DataFrame) -> str:
    """Return how many runs end no better than they began, of `ppo` and `iif`, over the seeds that both have."""
    ended = runs.with_columns(failed=pl.col("last") <= pl.col("first")).select("env", "steps", "arm", "seed", "failed")
    both = ended.filter(pl.col("arm") == "ppo").join(
        ended.filter(pl.col("arm") == "iif"), on=["env", "steps", "seed"], suffix="_iif"
    )
    rows = []
    for env in (*dict.fromkeys(runs["env"]), "all"):
        some = both if env == "all" else both.filter(pl.col("env") == env)
        parts = [some.filter(pl.col("steps") == steps) for steps in (*RATE_STEPS, *TARGET_STEPS)]
        cells = [f"{part['failed'].sum()} / {part['failed_iif'].sum()}" for part in parts]
        rows.append([env, *cells, str(max(map(len, parts)))])
    return table([["environment", *RATE_STEPS, *TARGET_STEPS, "pairs at each step"], *rows])


def _average(results: Sequence[float]) -> dict[str, float | None]:
    """Return the mean with its t interval, without the interval where seeds are few."""
    interval = t_interval(results)
    return interval if len(results) >= LEAST_FOR_INTERVAL else {**interval, "low": None, "high": None}


def _digits(runs: pl.DataFrame) -> int:
    return 2 if float(runs["last"].abs().max() or 0) < 5 else 0


def tabulate_control(runs: pl.DataFrame) -> str:
    """Return how well the controller holds its target: medians over the last nine tenths of each run's rounds."""
    head = [
        "environment",
        "arm",
        *(f"KL at {target:g}" for target in sorted(TARGETS)),
        f"median rate at {USUAL_TARGET:g}",
        "rounds within 1.5, all targets",
    ]
    rows = []
    for env in dict.fromkeys(runs["env"]):
        for arm in ("ppo", "iif"):
            some = [pick(runs.filter(pl.col("env") == env), arm, steps) for steps in TARGET_STEPS]
            if any(part.is_empty() for part in some):
                continue
            usual = pick(runs.filter(pl.col("env") == env), arm, USUAL)
            within = pl.concat(some)["within"].mean()
            divergences = [f"{part['kl'].mean():.4f}" for part in some]
            rows.append([env, arm, *divergences, f"{usual['rate'].mean():.2g}", f"{within:.0%}"])
    return table([head, *rows])


def tabulate_bounds(runs: pl.DataFrame) -> str:
    """Return the share of rounds in which the controller's rate was at its lowest and at its highest."""
    head = ["environment", "arm", *(f"at {target:g}: lowest / highest" for target in sorted(TARGETS))]
    rows = []
    for env in dict.fromkeys(runs["env"]):
        for arm in ("ppo", "iif"):
            some = [pick(runs.filter(pl.col("env") == env), arm, steps) for steps in TARGET_STEPS]
            cells = [
                f"{part['lowest'].mean():.0%} / {part['highest'].mean():.0%}" if len(part) else "–" for part in some
            ]
            rows.append([env, arm, *cells])
    return table([head, *rows])


def tabulate_divergence(runs: pl.DataFrame) -> str:
    """Return each arm's divergence a round at fixed learning rates: medians over rounds, means over seeds."""
    head = ["environment", "arm", *RATE_STEPS]
    rows = []
    for env in dict.fromkeys(runs["env"]):
        for arm in ARMS:
            some = [pick(runs.filter(pl.col("env") == env), arm, steps) for steps in RATE_STEPS]
            cells = [f"{part['kl'].mean():.4f}" if len(part) else "–" for part in some]
            if any(len(part) for part in some):
                rows.append([env, arm, *cells])
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
    parts = ["# Practice: tables\n\nWritten by `python -m benchmarks.practice_tables results/practice`.\n"]
    summary: dict[str, Any] = {"runs": len(runs)}
    for group, (which, some) in groups.items():
        summary[group] = {name: list_questions(some, name) for name in RESULTS}
        if group == "all":
            summary[group] = {name: each | list_omissions(some, name) for name, each in summary[group].items()}
        for name, about in RESULTS.items():
            parts += [f"## By the {about}{which}\n", tabulate_questions(summary[group][name]), ""]
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
