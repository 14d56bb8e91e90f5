"""The tables of single environments in `studies.practice.run`: returns, divergences, flat rounds, runs that fail."""

from collections.abc import Sequence, Sized

import numpy as np
import polars as pl

from studies.markdown import cell, table
from studies.practice.interquartile import LEAST_FOR_INTERVAL
from studies.practice.run import CAN_BE_FLAT, SETTINGS, TARGETS, USUAL, USUAL_TARGET, WORLDS
from studies.practice.runs import ARMS, RATE_STEPS, REWARDED, TARGET_STEPS, pick
from whence.lab import KeptRun, Results
from whence.lab.efficiency import Curve, summarise
from whence.statistics import t_interval

OTHERS = tuple(dict.fromkeys(name for world in WORLDS.values() for name in world.others))


def tabulate_world(runs: pl.DataFrame) -> str:
    """Return an environment's last returns by size of step and arm, with the seeds."""
    head = ["step", *ARMS, "seeds of each"]
    rows = []
    for steps in (*RATE_STEPS, *TARGET_STEPS, *SETTINGS, *OTHERS):
        results = [pick(runs, arm, steps)["last"].to_list() for arm in ARMS]
        if results[0]:
            cells = [cell(_average(each), digits=_digits(runs)) for each in results]
            rows.append([steps, *cells, _count(results)])
    return table([head, *rows])


def tabulate_differences(runs: pl.DataFrame, name: str) -> str:
    """Return `iif` less `ppo` in each environment and at each step, over the seeds that both have."""
    rows = []
    runs = runs.filter(pl.col("steps").is_in([*RATE_STEPS, *TARGET_STEPS]))  # LDA's script has seeds of its own
    for env in dict.fromkeys(runs["env"]):
        env_runs = runs.filter(pl.col("env") == env)
        ppo = env_runs.filter(pl.col("arm") == "ppo").select("steps", "seed", pl.col(name).alias("other"))
        both = env_runs.filter(pl.col("arm") == "iif").join(ppo, on=["steps", "seed"])
        both = both.with_columns(difference=pl.col(name) - pl.col("other"))
        intervals = [
            t_interval(both.filter(pl.col("steps") == steps).sort("seed")["difference"].to_list())
            for steps in (*RATE_STEPS, *TARGET_STEPS)
        ]
        seeds = str(both["seed"].n_unique())
        rows.append([env, *(cell(each, digits=_digits(env_runs)) for each in intervals), seeds])
    return table([["environment", *RATE_STEPS, *TARGET_STEPS, "seeds"], *rows])


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


def _count(results: Sequence[Sized]) -> str:
    """Return the numbers of results that there are, one for all if they are equal."""
    counts = [len(each) for each in results if len(each)]
    return str(counts[0]) if len({*counts}) == 1 else ", ".join(map(str, counts))


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
    head = ["environment", "arm", *RATE_STEPS, "seeds"]
    rows = []
    for env in dict.fromkeys(runs["env"]):
        for arm in ARMS:
            some = [pick(runs.filter(pl.col("env") == env), arm, steps) for steps in RATE_STEPS]
            cells = [f"{part['kl'].mean():.4f}" if len(part) else "–" for part in some]
            if any(len(part) for part in some):
                rows.append([env, arm, *cells, _count([part["kl"] for part in some])])
    return table([head, *rows])


def tabulate_script(sweep: Results) -> str:
    """Return what `iif` saves by LDA's script on LunarLander, by training's returns: few policies were evaluated."""
    runs = sweep.get("lunarlander-lda", {})
    if not {"ppo", "iif"} <= {*runs}:
        return "No runs."
    curves = {arm: {seed: _read_training_curve(run) for seed, run in by_seed.items()} for arm, by_seed in runs.items()}
    ppo, iif = (summarise(curves)[arm] for arm in ("ppo", "iif"))
    rows = [[f"{len(runs['iif'])} seeds", "ppo (null)", "iif", "iif, against the null or less ppo's"]]
    for head, name in {"SE_ave": "se_ave_literal", "SE_peak": "se_peak_literal", "RT_peak": "rt_peak_paper"}.items():
        rows.append([head, *(cell(each, percent=True) for each in (ppo[name], iif[name], iif[name]["against_null"]))])
    for head, name in {"mean return": "auc", "last return": "final_return"}.items():
        rows.append([head, *(cell(each, digits=0) for each in (ppo[name], iif[name], iif[name]["differences"]["ppo"]))])
    return table(rows)


def _read_training_curve(run: KeptRun) -> Curve:
    """Return the returns of each round's rollout, which the policy of the round before played."""
    returns = run.tables["rounds"]["episode_return"].to_numpy()
    seconds = run.tables["seconds"]
    kinds = ("collection_cpu", "optimisation_cpu", *(("scoring_cpu",) if run.config.arm == "iif" else ()))
    spent = seconds.select(pl.sum_horizontal(kinds)).to_series().to_numpy()
    return Curve(returns, np.zeros(len(returns)), spent[:-1])
