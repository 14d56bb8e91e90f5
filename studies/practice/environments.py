"""The tables of single environments in `studies.practice.run`: returns, divergences, flat rounds, runs that fail."""

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from studies.practice.interquartile import LEAST_FOR_INTERVAL
from studies.practice.run import CAN_BE_FLAT, SETTINGS, TARGETS, USUAL, USUAL_TARGET, WORLDS
from studies.practice.runs import ARMS, RATE_STEPS, REWARDED, STEPS, TARGET_STEPS, pick
from studies.shared import cell, mean_cell, table
from whence.lab import KeptRun, Results
from whence.lab.efficiency import Curve, summarise, t_interval

OTHERS = tuple(dict.fromkeys(name for world in WORLDS.values() for name in world.others))

Environments = Iterator[tuple[str, pl.DataFrame]]


def split_environments(runs: pl.DataFrame) -> Environments:
    """Yield each environment with its runs."""
    for (env,), part in runs.group_by("env", maintain_order=True):
        yield str(env), part


def tabulate_world(runs: pl.DataFrame) -> str:
    """Return an environment's last returns by size of step and arm, with the seeds."""
    lines = [["step", *ARMS, "seeds of each"]]
    for steps in (*STEPS, *SETTINGS, *OTHERS):
        results = [pick(runs, arm, steps)["last"].to_list() for arm in ARMS]
        if results[0]:
            cells = [cell(t_interval(r), digits=_digits(runs), interval=len(r) >= LEAST_FOR_INTERVAL) for r in results]
            lines.append([steps, *cells, _count(results)])
    return table(lines)


def tabulate_differences(runs: pl.DataFrame, name: str) -> str:
    """Return `iif` less `ppo` in each environment and at each step, over the seeds that both have."""
    lines = [["environment", *STEPS, "seeds"]]
    runs = runs.filter(pl.col("steps").is_in(STEPS))  # LDA's script has seeds of its own
    for env, part in split_environments(runs):
        both = _pair(part, name).sort("seed").with_columns(difference=pl.col(name) - pl.col(f"{name}_ppo"))
        differences = (both.filter(pl.col("steps") == steps)["difference"].to_list() for steps in STEPS)
        cells = (mean_cell(each, digits=_digits(part)) for each in differences)
        lines.append([env, *cells, str(both["seed"].n_unique())])
    return table(lines)


def _pair(runs: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return the runs of `iif` with what those of `ppo` at the same step and seed have by a name."""
    ppo, iif = (runs.filter(pl.col("arm") == arm).select("env", "steps", "seed", name) for arm in ("ppo", "iif"))
    return iif.join(ppo, on=["env", "steps", "seed"], suffix="_ppo")


def tabulate_flat(runs: pl.DataFrame) -> str:
    """Return what becomes of `iif` if it leaves flat rounds whole: last returns over the seeds that all arms have."""
    arms = ("ppo", "iif", REWARDED)
    lines = [["environment", "step", *arms, f"{REWARDED} less iif", "rounds kept whole", "seeds"]]
    for env, steps in ((env, steps) for env in CAN_BE_FLAT for steps in STEPS):
        some = runs.filter(pl.col("env") == env)
        parts = [pick(some, arm, steps).sort("seed") for arm in arms]
        seeds = set.intersection(*({*part["seed"]} for part in parts))
        parts = [part.filter(pl.col("seed").is_in([*seeds])) for part in parts]
        if not seeds:
            continue
        digits = {"digits": _digits(pl.concat(parts))}
        gains = (parts[2]["last"] - parts[1]["last"]).to_list()
        cells = [*(cell(part["last"].mean(), **digits) for part in parts), mean_cell(gains, **digits)]
        lines.append([env, steps, *cells, f"{parts[2]['whole'].mean():.0%}", str(len(seeds))])
    return table(lines)


def tabulate_first_rounds(runs: pl.DataFrame) -> str:
    """Return how far the first round takes the policy, apart for the seeds where it is flat.

    Of the runs at the usual target, which measure it over all records; the rate is not steered yet.
    """
    arms = ("ppo", "iif", "random")
    lines = [["environment", "flat", *arms, "iif / ppo", "random / ppo", "seeds"]]
    for env in CAN_BE_FLAT:
        some = runs.filter(pl.col("env") == env)
        # All arms collect the same first round, and of a flat one this arm drops nothing.
        firsts = pick(some, REWARDED, USUAL).select("seed", flat="first_whole")
        for arm in arms:
            firsts = firsts.join(pick(some, arm, USUAL).select("seed", pl.col("first_kl").alias(arm)), on="seed")
        for is_flat in (True, False):
            part = firsts.filter(pl.col("flat") == is_flat)
            if len(part):
                ratios = [part[arm] / part["ppo"] for arm in arms[1:]]
                cells = [*(f"{part[a].mean():.4f}" for a in arms), *(f"{r.min():.1f} to {r.max():.1f}" for r in ratios)]
                lines.append([env, "yes" if is_flat else "no", *cells, str(len(part))])
    return table(lines)


def tabulate_failures(runs: pl.DataFrame) -> str:
    """Return how many runs end no better than they began, of `ppo` and `iif`, over the seeds that both have."""
    both = _pair(runs.with_columns(failed=pl.col("last") <= pl.col("first")), "failed")
    lines = [["environment", *STEPS, "pairs at each step"]]
    for env in (*dict.fromkeys(runs["env"]), "all"):
        some = both if env == "all" else both.filter(pl.col("env") == env)
        parts = [some.filter(pl.col("steps") == steps) for steps in STEPS]
        cells = [f"{part['failed_ppo'].sum()} / {part['failed'].sum()}" for part in parts]
        lines.append([env, *cells, str(max(map(len, parts)))])
    return table(lines)


def _count(results: Sequence[Sequence[float]]) -> str:
    """Return the numbers of results that there are, one for all if they are equal."""
    counts = [len(each) for each in results if len(each)]
    return str(counts[0]) if len({*counts}) == 1 else ", ".join(map(str, counts))


def _digits(runs: pl.DataFrame) -> int:
    return 2 if float(runs["last"].abs().max() or 0) < 5 else 0


def tabulate_control(runs: pl.DataFrame) -> str:
    """Return how well the controller holds its target: medians over the last nine tenths of each run's rounds."""
    heads = (f"KL at {target:g}" for target in sorted(TARGETS))
    rate = f"median rate at {USUAL_TARGET:g}"
    lines = [["environment", "arm", *heads, rate, "rounds within 1.5, all targets"]]
    for env, part in split_environments(runs):
        for arm in ("ppo", "iif"):
            some = [pick(part, arm, steps) for steps in TARGET_STEPS]
            if all(len(each) for each in some):
                cells = [f"{each['kl'].mean():.4f}" for each in some]
                cells.append(f"{pick(part, arm, USUAL)['rate'].mean():.2g}")
                lines.append([env, arm, *cells, f"{pl.concat(some)['within'].mean():.0%}"])
    return table(lines)


def tabulate_bounds(runs: pl.DataFrame) -> str:
    """Return the share of rounds in which the controller's rate was at its lowest and at its highest."""

    def show(part: pl.DataFrame) -> str:
        return f"{part['lowest'].mean():.0%} / {part['highest'].mean():.0%}" if len(part) else "–"

    lines = [["environment", "arm", *(f"at {target:g}: lowest / highest" for target in sorted(TARGETS))]]
    for env, part in split_environments(runs):
        lines += [[env, arm, *(show(pick(part, arm, steps)) for steps in TARGET_STEPS)] for arm in ("ppo", "iif")]
    return table(lines)


def tabulate_divergence(runs: pl.DataFrame) -> str:
    """Return each arm's divergence a round at fixed learning rates: medians over rounds, means over seeds."""
    lines = [["environment", "arm", *RATE_STEPS, "seeds"]]
    for env, part in split_environments(runs):
        for arm in ARMS:
            some = [pick(part, arm, steps)["kl"].to_list() for steps in RATE_STEPS]
            if any(some):
                lines.append(
                    [env, arm, *(cell(t_interval(each), interval=False, digits=4) for each in some), _count(some)]
                )
    return table(lines)


def tabulate_script(sweep: Results) -> str:
    """Return what `iif` saves by LDA's script on LunarLander, by training's returns: few policies were evaluated."""
    runs = sweep["lunarlander-lda"]
    curves = {arm: {seed: _read_training_curve(run) for seed, run in by_seed.items()} for arm, by_seed in runs.items()}
    ppo, iif = (summarise(curves)[arm] for arm in ("ppo", "iif"))
    lines = [[f"{len(runs['iif'])} seeds", "ppo (null)", "iif", "iif, against the null or less ppo's"]]
    for head, name in {"SE_ave": "se_ave_literal", "SE_peak": "se_peak_literal", "RT_peak": "rt_peak_paper"}.items():
        lines.append([head, *(cell(each, percent=True) for each in (ppo[name], iif[name], iif[name]["against_null"]))])
    for head, name in {"mean return": "auc", "last return": "final_return"}.items():
        lines.append(
            [head, *(cell(each, digits=0) for each in (ppo[name], iif[name], iif[name]["differences"]["ppo"]))]
        )
    return table(lines)


def _read_training_curve(run: KeptRun) -> Curve:
    """Return the returns of each round's rollout, which the policy of the round before played."""
    returns = run.tables["rounds"]["episode_return"].to_numpy()
    kinds = ("collection_cpu", "optimisation_cpu", *(("scoring_cpu",) if run.config.arm == "iif" else ()))
    spent = run.tables["seconds"].select(pl.sum_horizontal(kinds)).to_series().to_numpy()
    return Curve(returns, np.zeros(len(returns)), spent[:-1])
