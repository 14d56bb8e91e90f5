"""The statistics of the study of practice, held against plainer ones and against figures by hand."""

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from scipy import stats

from studies.practice import doorkey, environments, interquartile, runs, tables


def test_the_probability_of_improvement_is_mann_whitneys_over_the_pairs() -> None:
    rng = np.random.default_rng(0)
    one, other = ([rng.integers(5, size=size).astype(float) for size in (4, 7)] for _ in range(2))
    expected = [stats.mannwhitneyu(a, b).statistic / (a.size * b.size) for a, b in zip(one, other, strict=True)]
    assert interquartile.probability_of_improvement(one, other) == pytest.approx(np.mean(expected), abs=1e-12)


def test_each_seed_of_a_draw_has_the_choice_that_is_best_for_the_others() -> None:
    rng = np.random.default_rng(0)
    scores = rng.integers(3, size=(4, 6)) / 7  # many are equal
    places = np.vstack([np.arange(6), rng.integers(6, size=(200, 6)), [[3, 3, 3, 3, 3, 2]]])

    def choose_plainly(seed: int, draw: list[int]) -> float:
        sums = np.sum([scores[:, other] for other in draw if other != seed], axis=0).round(9).tolist()
        return float(scores[sums.index(max(sums)), seed])

    expected = [[choose_plainly(seed, draw) for seed in draw] for draw in places]
    assert interquartile.choose_best(scores, places).tolist() == expected


def test_seeds_are_drawn_within_their_environment_and_in_pairs() -> None:
    levels, zeros = [np.zeros((1, 3)), np.ones((1, 3))], [np.zeros((1, 3))] * 2
    # These are constant in each environment: a draw across environments would have an interval.
    bounds = {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert interquartile.bootstrap(levels, zeros, interquartile.subtract_means) == bounds
    spread = [np.array([[0.0, 5.0, 9.0, 2.0, 4.0]])]
    answer = interquartile.bootstrap(spread, [spread[0] - 1], interquartile.subtract_means)
    assert answer == pytest.approx({"mean": 1.0, "low": 1.0, "high": 1.0})


def test_results_are_scaled_by_the_main_runs() -> None:
    rows = [("lr0.0003", "ppo", 15.0), ("lr0.0003", "ppo", 25.0), ("kl0.02", "iif", 30.0), ("zoo", "ppo", 90.0)]
    results = [{"env": "a", "steps": steps, "arm": arm, "first": 10.0, "last": r, "mean": r} for steps, arm, r in rows]
    # 0 is the untrained policy's 10, 1 the best mean of a main group, 30.
    assert runs.scale_results(pl.DataFrame(results))["last"].to_list() == [0.25, 0.75, 1.0, 4.0]


def test_a_divergence_is_the_median_of_the_last_nine_tenths() -> None:
    kl = [9.0] * 2 + [0.004] * 4 + [0.02] * 12 + [0.5] * 2
    rates = [3e-5] * 5 + [1e-3] * 5 + [3e-3] * 10
    rounds = pl.DataFrame({"train/kl": kl, "train/learning_rate": rates, "dropped_share": [0.0] * 4 + [0.1] * 16})
    run = SimpleNamespace(tables={"rounds": rounds, "evaluations": pl.DataFrame({"test_return": [1.0, 2.0, 6.0]})})
    measures = runs._measure(run, "kl0.02")
    assert (measures["first"], measures["last"], measures["mean"], measures["kl"]) == (1.0, 6.0, 4.0, 0.02)
    assert (measures["whole"], measures["first_whole"], measures["first_kl"]) == (0.2, True, 9.0)


def test_runs_of_the_nearest_divergence_are_compared() -> None:
    divergences = {("a", "iif", "kl0.01"): 0.02, ("a", "ppo", "kl0.01"): 0.01, ("a", "ppo", "kl0.02"): 0.018}
    divergences |= {("b", "iif", "kl0.01"): 0.03, ("b", "ppo", "kl0.04"): 0.04, ("a", "ppo", "lr0.001"): 0.02}
    rows = [
        {"env": env, "arm": arm, "steps": steps, "seed": seed, "kl": kl * (1 + 0.1 * seed)}
        for (env, arm, steps), kl in divergences.items()
        for seed in (-1, 1)
    ]
    nearest = tables.match_divergence(pl.DataFrame(rows), "kl0.01")
    # In b the nearest is a third further.
    assert nearest.select("env", "steps").unique().to_dicts() == [{"env": "a", "steps": "kl0.02"}]


def test_savings_by_training_are_of_the_rollouts_returns() -> None:
    def make_run(arm: str, returns: list[float]) -> SimpleNamespace:
        seconds = {"collection_cpu": [1.0] * 4, "optimisation_cpu": [2.0] * 4, "scoring_cpu": [3.0] * 4}
        made = {"rounds": pl.DataFrame({"episode_return": returns}), "seconds": pl.DataFrame(seconds)}
        return SimpleNamespace(config=SimpleNamespace(arm=arm), tables=made)

    ppo = {seed: make_run("ppo", [0.0, 1.0, 2.0, 4.0]) for seed in range(3)}
    iif = {seed: make_run("iif", [0.0, 4.0, 4.0, 5.0]) for seed in range(3)}
    lines = environments.tabulate_script({"lunarlander-lda": {"ppo": ppo, "iif": iif}}).splitlines()
    # PPO reaches 1, 2 and 4 after 1, 2 and 3 rounds of 3 seconds, IIF each after one of 6: 0, 1/2 and 2/3 saved.
    assert lines[2].startswith("| SE_ave | 0% [0%, 0%] | 39% [39%, 39%] |")
    assert lines[4].startswith("| RT_peak | 0% [0%, 0%] | 33% [33%, 33%] |")
    assert lines[6].endswith("| 4 [4, 4] | 5 [5, 5] | 1 [1, 1] |")


def test_arms_of_doorkey_are_compared_over_the_seeds_of_all() -> None:
    def make_run(mean: float, dropped: float) -> SimpleNamespace:
        rounds = {"episode_return": [0.0, None, 2 * mean], "dropped_share": [0.0, dropped, dropped]}
        evaluations = {"test_return": [9.0, mean + 5]}
        made = {"rounds": pl.DataFrame(rounds), "evaluations": pl.DataFrame(evaluations)}
        return SimpleNamespace(config=SimpleNamespace(warmup=1), tables=made)

    means = {"ppo": (0.1, 0.2, 7.0), "dtv-loo": (0.4, 0.5), "random-dtv-loo": (0.3, 0.4, 8.0)}
    made = {arm: {seed: make_run(mean, 0.25) for seed, mean in enumerate(each)} for arm, each in means.items()}
    lines = doorkey.tabulate_arms(made, doorkey.MEASURES["training return"]).splitlines()
    # The third seed lacks an arm. Half the difference of two seeds, times 12.706, is the half-width.
    assert lines[2] == "| ppo | 2 | 0.150 [−0.485, 0.785] | – | – | 75% [75%, 75%] |"
    assert lines[3].startswith("| dtv-loo | 2 | 0.450 [−0.185, 1.085] | 0.300 [0.300, 0.300] | 0.100 [0.100, 0.100] |")
    assert (
        doorkey.tabulate_arms(made, doorkey.MEASURES["final return"]).splitlines()[2].startswith("| ppo | 2 | 5.150 [")
    )
    assert doorkey.tabulate_runs(made).splitlines()[-1] == "| 2 | random-dtv-loo | 8.000 | 13.000 | 75% |"
