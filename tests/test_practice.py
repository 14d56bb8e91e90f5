"""The study of practice: what it trains, in which order, and what is made of its results."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from scipy import stats

from whence.experiments.rl.config import RunConfig
from whence.experiments.sweepfile import make_label

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "practice"


@pytest.fixture
def study(monkeypatch):
    """The modules of the study: what it plans, its runs, its tables."""
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.practice import environments as practice_environments
    from studies.practice import run as practice
    from studies.practice import runs as practice_runs
    from studies.practice import tables as practice_tables

    return SimpleNamespace(
        plan=practice, runs=practice_runs, tables=practice_tables, environments=practice_environments
    )


@pytest.fixture
def interquartile(monkeypatch):
    """The module of the figures over environments."""
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.practice import interquartile

    return interquartile


def test_rates_and_targets_of_all_seeds_come_before_the_other_settings(study, monkeypatch):
    practice = study.plan
    # Settings are checked against a live environment, which takes long for so many.
    monkeypatch.setattr(practice, "configure_world", lambda name, **settings: RunConfig(name, "ppo", 0))
    planned = practice.plan_study(["cartpole", "acrobot"], [0, 1, practice.FEW])
    main = {f"{env}-{steps.name}" for env in ("cartpole", "acrobot") for steps in practice.list_steps()}
    is_main = [run.group in main for run in planned]
    assert is_main == sorted(is_main, reverse=True)
    assert [run.config.seed for run, first in zip(planned, is_main, strict=True) if first] == sorted(
        run.config.seed for run, first in zip(planned, is_main, strict=True) if first
    )
    others = [run for run in planned if run.group not in main]
    assert planned[-len(others) :] == others
    assert {run.config.seed for run in others} == {0, 1}
    late = practice.plan_study(["lunarlander"], [practice.FEW])
    assert [run.group for run in late if run.group not in {f"lunarlander-{s.name}" for s in practice.list_steps()}] == [
        "lunarlander-lda",
        "lunarlander-lda",
    ]


def test_the_probability_of_improvement_is_mann_whitneys_over_the_pairs(interquartile):
    rng = np.random.default_rng(0)
    one = [rng.integers(5, size=size).astype(float) for size in (4, 7)]
    other = [rng.integers(5, size=size).astype(float) for size in (4, 7)]
    expected = [stats.mannwhitneyu(a, b).statistic / (a.size * b.size) for a, b in zip(one, other, strict=True)]
    assert interquartile.probability_of_improvement(one, other) == pytest.approx(np.mean(expected), abs=1e-12)
    assert interquartile.probability_of_improvement([np.ones(2)], [np.ones(3)]) == 0.5
    assert interquartile.probability_of_improvement([np.ones(2)], [np.zeros(3)]) == 1


def test_each_seed_of_a_draw_has_the_choice_that_is_best_for_the_others(interquartile):
    rng = np.random.default_rng(0)
    scores = rng.integers(3, size=(4, 6)) / 7  # many are equal
    places = np.vstack([np.arange(6), rng.integers(6, size=(200, 6)), [[3, 3, 3, 3, 3, 2]]])

    def choose_plainly(seed, draw):
        others = [scores[:, other] for other in draw if other != seed]
        sums = np.sum(others, axis=0).round(9).tolist()
        return scores[sums.index(max(sums)), seed]

    expected = [[choose_plainly(seed, draw) for seed in draw] for draw in places]
    assert interquartile.choose_best(scores, places).tolist() == expected


def test_equal_choices_go_to_the_first(interquartile):
    # By its own result seed 0 would take the second choice; the others are the same for both.
    scores = np.array([[1.0, 2.0, 2.0], [9.0, 2.0, 2.0]])
    assert interquartile.choose_best(scores, np.array([[0, 1, 2]])).tolist() == [[1.0, 2.0, 2.0]]
    assert interquartile.choose_best(scores, np.array([[0, 0, 0]])).tolist() == [[1.0, 1.0, 1.0]]


def test_a_draw_chooses_anew(interquartile):
    # The first choice is the better one for all seeds; a draw that has the last one often takes the second.
    scores = np.array([[1.0, 1.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, 0.9, 1.2]])
    zeros = [np.zeros((1, 5))]
    chosen = interquartile.bootstrap([scores], zeros, interquartile.subtract_means)
    assert chosen["mean"] == 1.0
    # Draws choose worse, never better; what they lose is added.
    assert chosen["low"] == 1.0
    assert 1.05 < chosen["high"] < 1.2
    limited = interquartile.bootstrap([scores], zeros, interquartile.subtract_means, limits=(0, 1.02))
    assert limited == {"mean": 1.0, "low": 1.0, "high": 1.02}
    fixed = interquartile.bootstrap([scores[:1]], zeros, interquartile.subtract_means)
    assert fixed == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_a_seed_counts_that_has_all_sizes_of_step(study):
    low, high = study.runs.RATE_STEPS[:2]
    rows = [(0, low, 1.0), (0, high, 2.0), (1, high, 4.0), (1, low, 3.0), (2, low, 5.0), (2, high, 6.0), (3, low, 9.0)]
    runs = pl.DataFrame(rows, ["seed", "steps", "last"], orient="row").with_columns(env=pl.lit("a"))
    other = runs.filter(pl.col("steps") == low, pl.col("seed") > 0).with_columns(last=-pl.col("last"))
    one, others = study.tables.list_scores(runs, other, "last")
    assert [each.tolist() for each in one] == [[[3.0, 5.0], [4.0, 6.0]]]
    assert [each.tolist() for each in others] == [[[-3.0, -5.0]]]


def test_results_are_scaled_by_the_main_runs(study):
    rows = [("lr0.0003", "ppo", 15.0), ("lr0.0003", "ppo", 25.0), ("kl0.02", "iif", 30.0), ("zoo", "ppo", 90.0)]
    rows.append(("kl0.02", "random", 50.0))  # it does not run at all of them
    runs = pl.DataFrame(
        [{"env": "a", "steps": steps, "arm": arm, "first": 10.0, "last": r, "mean": r} for steps, arm, r in rows]
    )
    # 0 is the untrained policy's 10, 1 the best mean of a main group, 30.
    assert study.runs.scale_results(runs)["last"].to_list() == [0.25, 0.75, 1.0, 4.0, 2.0]


def test_the_middle_half_is_averaged(interquartile):
    assert interquartile.interquartile_mean([np.array([0.0, 3.0, 4.0]), np.array([5.0, -9.0, 2.0, 99.0, 7.0])]) == 3.5
    both = np.array([[0.0, 1.0, 3.0, 9.0], [8.0, 2.0, 4.0, 0.0]])
    assert interquartile.interquartile_mean([both]).tolist() == [2.0, 3.0]


def test_seeds_are_drawn_within_their_environment_and_in_pairs(interquartile):
    # Constant in each environment: a draw across environments would have an interval.
    levels = [np.zeros((1, 3)), np.ones((1, 3))]
    zeros = [np.zeros((1, 3)), np.zeros((1, 3))]
    assert interquartile.bootstrap(levels, zeros, interquartile.subtract_means) == {
        "mean": 0.5,
        "low": 0.5,
        "high": 0.5,
    }
    spread = [np.array([[0.0, 5.0, 9.0, 2.0, 4.0]])]
    shifted = [spread[0] - 1]
    answer = interquartile.bootstrap(spread, shifted, interquartile.subtract_means)
    assert answer == pytest.approx({"mean": 1.0, "low": 1.0, "high": 1.0})
    answer = interquartile.bootstrap(spread, [np.zeros((1, 5))], interquartile.subtract_means)
    assert 0 < answer["low"] < answer["mean"] < answer["high"] < 9
    two = [np.array([[0.0, 5.0]])]
    assert interquartile.bootstrap(two, two, interquartile.subtract_means) == {"mean": 0.0, "low": None, "high": None}


def test_means_over_steps_are_of_seeds_that_have_all(study):
    tables = study.tables
    rows = [(0, "lr0.0001", 1.0), (0, "lr0.001", 3.0), (1, "lr0.0001", 5.0), (0, "kl0.02", 99.0)]
    runs = pl.DataFrame(
        [{"env": "a", "arm": "iif", "seed": seed, "steps": steps, "last": r, "mean": r} for seed, steps, r in rows]
    )
    means = tables.average_steps(runs, "iif", ["lr0.0001", "lr0.001"])
    assert means.select("seed", "last").to_dicts() == [{"seed": 0, "last": 2.0}]


def test_a_divergence_is_the_median_of_the_last_nine_tenths(study):
    kl = [9.0] * 2 + [0.004] * 4 + [0.02] * 12 + [0.5] * 2
    rates = [3e-5] * 5 + [1e-3] * 5 + [3e-3] * 10
    rounds = pl.DataFrame({"train/kl": kl, "train/learning_rate": rates, "dropped_share": [0.0] * 4 + [0.1] * 16})
    evaluations = pl.DataFrame({"test_return": [1.0, 2.0, 6.0]})
    run = SimpleNamespace(tables={"rounds": rounds, "evaluations": evaluations})
    measures = study.runs._measure(run, "kl0.02")
    assert (measures["first"], measures["last"], measures["mean"]) == (1.0, 6.0, 4.0)
    assert measures["kl"] == 0.02
    assert measures["within"] == pytest.approx(12 / 18)
    assert (measures["lowest"], measures["highest"]) == (0.25, 0.5)
    assert (measures["whole"], measures["first_whole"], measures["first_kl"]) == (0.2, True, 9.0)


def test_runs_of_the_nearest_divergence_are_compared(study):
    tables = study.tables
    divergences = {("a", "iif", "kl0.01"): 0.02, ("a", "ppo", "kl0.01"): 0.01, ("a", "ppo", "kl0.02"): 0.018}
    divergences |= {("b", "iif", "kl0.01"): 0.03, ("b", "ppo", "kl0.04"): 0.04, ("a", "ppo", "lr0.001"): 0.02}
    runs = pl.DataFrame(
        [
            {"env": env, "arm": arm, "steps": steps, "seed": seed, "kl": kl * (1 + 0.1 * seed)}
            for (env, arm, steps), kl in divergences.items()
            for seed in (-1, 1)
        ]
    )
    nearest = tables.match_divergence(runs, "kl0.01")
    # In b the nearest is a third further.
    assert nearest.select("env", "steps").unique().to_dicts() == [{"env": "a", "steps": "kl0.02"}]
    assert len(nearest) == 2


def test_differences_are_told_without_each_environment(study, interquartile, monkeypatch):
    monkeypatch.setattr(interquartile, "REPEATS", 20)
    rng = np.random.default_rng(0)
    steps = (*study.runs.RATE_STEPS, *study.runs.TARGET_STEPS)
    keys = itertools.product("abc", ("ppo", "iif"), steps, range(4))
    runs = pl.DataFrame([(*key, rng.normal()) for key in keys], ["env", "arm", "steps", "seed", "last"], orient="row")
    answers = study.tables.list_omissions(runs, "last")
    assert list(answers) == ["none", "a", "b", "c"]
    for omitted, row in answers.items():
        part = runs.filter(pl.col("env") != omitted)
        expected = study.tables.list_questions(part.with_columns(kl=pl.lit(0.02), mean="last"), "last")
        for name in steps:
            assert row[name] == expected[f"iif less ppo, {name}"]["difference"]
        best = expected["iif less ppo, each at its own best rate"]["difference"]
        assert row[study.tables.OWN_BEST] == best
    assert len({row["kl0.04"]["mean"] for row in answers.values()}) == 4
    lines = study.tables.tabulate_omissions(answers).splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.strip()][2:] == list(answers)


def test_the_seeds_of_differences_are_those_at_the_rates_and_targets(study):
    rows = [("iif", "lr0.001", 0), ("ppo", "lr0.001", 0), ("iif", "lr0.001", 1), ("ppo", "lr0.001", 1)]
    rows += [(arm, "lda", seed) for arm in ("iif", "ppo") for seed in range(5)]
    runs = pl.DataFrame(rows, ["arm", "steps", "seed"], orient="row").with_columns(env=pl.lit("a"), last="seed")
    line = study.environments.tabulate_differences(runs, "last").splitlines()[-1]
    assert line.strip("|").split("|")[-1].strip() == "2"


def test_matched_environments_are_compared_at_the_same_target_too(study):
    rows = [("a", "iif", "kl0.01", 0.02, 1.0), ("a", "ppo", "kl0.01", 0.01, 2.0), ("a", "ppo", "kl0.02", 0.02, 4.0)]
    rows += [("b", "iif", "kl0.01", 0.09, 9.0), ("b", "ppo", "kl0.01", 0.01, 0.0)]
    runs = pl.DataFrame(
        [(*row[:3], seed, *row[3:]) for row in rows for seed in range(3)],
        ["env", "arm", "steps", "seed", "kl", "last"],
        orient="row",
    ).with_columns(mean="last")
    answers = study.tables.list_questions(runs, "last")
    assert answers["iif at kl0.01 less ppo of the nearest divergence"]["difference"]["mean"] == -3
    assert answers["iif less ppo, kl0.01, in these environments"]["difference"]["mean"] == -1
    assert answers["iif less ppo, kl0.01"]["difference"]["mean"] == 4
    lines = study.tables.tabulate_matches(runs).splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in lines if line.strip()}
    assert (cells["a"], cells["b"]) == ("kl0.02", "–")


def test_environments_of_one_seed_are_left_out(study, interquartile, monkeypatch):
    tables = study.tables
    monkeypatch.setattr(interquartile, "REPEATS", 20)
    runs = pl.DataFrame({"env": ["a", "a", "b"], "seed": [0, 1, 0], "last": [1.0, 2.0, 3.0], "steps": "lr0.001"})
    assert tables.compare(runs.filter(pl.col("env") == "b"), runs) is None
    answer = tables.compare(runs, runs)
    assert (answer["environments"], answer["runs"], answer["difference"]["mean"]) == (1, 2, 0)


def test_flat_rounds_kept_whole_are_compared_over_the_seeds_that_all_arms_have(study):
    results = {"ppo": [1.0, 2.0, 9.0], "iif": [1.0, 1.0, 9.0, 9.0], "iif-rewarded": [2.0, 4.0]}
    runs = pl.DataFrame(
        [
            {"env": "acrobot", "steps": "kl0.02", "arm": arm, "seed": seed, "last": last, "whole": 0.25 + 0.5 * seed}
            for arm, lasts in results.items()
            for seed, last in enumerate(lasts)
        ]
    )
    (row,) = [line for line in study.environments.tabulate_flat(runs).splitlines() if "acrobot" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["acrobot", "kl0.02", "1.50", "1.00", "3.00"]
    assert cells[5].startswith("2.00 [")
    assert cells[6:] == ["50%", "2"]


@pytest.fixture
def sweep(study, monkeypatch):
    """All runs of two environments that are planned at rates and targets: two seeds of the first, four of LunarLander.

    Nothing was measured of them.
    """
    monkeypatch.setattr(study.runs, "_measure", lambda run, steps: {})
    monkeypatch.setattr(study.runs, "WORLDS", ("acrobot", "lunarlander"))
    monkeypatch.setattr(study.runs, "SEEDS", {"acrobot": 2, "lunarlander": 4})
    monkeypatch.setattr(study.plan, "SEEDS", study.runs.SEEDS)
    runs = {}
    for name, seeds in study.runs.SEEDS.items():
        for steps, seed in itertools.product(study.plan.list_steps(), range(seeds)):
            for arm, drop in study.plan.list_arms(name, seed, steps):
                config = RunConfig(name, arm, seed, drop=drop)
                arms = runs.setdefault(f"{name}-{steps.name}", {})
                arms.setdefault(make_label(config, study.plan.DROP), {})[seed] = SimpleNamespace(config=config)
    monkeypatch.setattr(study.runs, "load_sweep", lambda out: runs)
    return runs


def test_seeds_are_read_that_are_complete_and_pooled_that_are_complete_everywhere(study, sweep):
    def list_seeds():
        runs = study.runs.read_runs(RESULTS).filter(pl.col("arm") == "ppo", pl.col("steps") == "lr0.001")
        return {
            env: [(seed, pooled) for _, seed, pooled in part.select("env", "seed", "pooled").sort("seed").iter_rows()]
            for (env,), part in runs.group_by("env")
        }

    both, only = [(0, True), (1, True)], [(2, False), (3, False)]
    assert list_seeds() == {"acrobot": both, "lunarlander": both + only}
    del sweep["acrobot-kl0.02"]["random"][1]
    assert list_seeds() == {"acrobot": both[:1], "lunarlander": [both[0], (1, False), *only]}
    del sweep["lunarlander-lr0.003"]["ppo"][0]
    assert list_seeds() == {"acrobot": [(0, False)]}


def test_an_arm_of_fewer_seeds_holds_up_none(study, sweep, monkeypatch):
    seeds = {("iif", 0.5): 1}
    monkeypatch.setattr(study.plan, "ARM_SEEDS", seeds)
    monkeypatch.setattr(study.runs, "ARM_SEEDS", seeds)
    del sweep["acrobot-kl0.02"]["iif-drop0.5"][1]
    assert study.runs.count_seeds(sweep, "acrobot") == 2
    half = study.runs.read_runs(RESULTS).filter(pl.col("arm") == "iif-drop0.5")
    assert set(half["seed"]) == {0}  # the second seeds, which some environments have, are left out
    assert study.plan.list_arms("acrobot", 1, study.plan.list_steps()[0]) == [
        ("ppo", 0.125),
        ("iif", 0.125),
        ("random", 0.125),
    ]


def test_ldas_script_has_more_seeds_than_the_rest(study, sweep):
    sweep["lunarlander-lda"] = {"iif": {seed: SimpleNamespace(config=RunConfig("", "iif", 0)) for seed in (0, 3, 4)}}
    del sweep["lunarlander-lr0.003"]["ppo"][1]
    runs = study.runs.read_runs(RESULTS)
    assert runs.filter(pl.col("steps") == "lda").select("seed", "pooled").rows() == [(0, True), (3, True)]
    assert set(runs.filter(pl.col("steps") != "lda", pl.col("env") == "lunarlander")["seed"]) == {0}


def test_first_rounds_are_compared_apart_where_they_are_flat(study):
    divergences = {"ppo": [0.01, 0.01, 0.02, 0.5], "iif": [0.02, 0.05, 0.03, 0.5], "random": [0.01, 0.008, 0.02, 0.5]}
    whole = [True, True, False]
    rows = [("iif-rewarded", seed, 9.0, first_whole) for seed, first_whole in enumerate(whole)]
    # PPO drops nothing of any round: it tells no flat one.
    rows += [(arm, seed, kl, arm == "ppo") for arm, kls in divergences.items() for seed, kl in enumerate(kls)]
    runs = pl.DataFrame(rows, ["arm", "seed", "first_kl", "first_whole"], orient="row").with_columns(
        env=pl.lit("acrobot"), steps=pl.lit("kl0.02")
    )
    lines = [line for line in study.environments.tabulate_first_rounds(runs).splitlines() if "acrobot" in line]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["acrobot", "yes", "0.0100", "0.0350", "0.0090", "2.0 to 5.0", "0.8 to 1.0", "2"],
        ["acrobot", "no", "0.0200", "0.0300", "0.0200", "1.5 to 1.5", "1.0 to 1.0", "1"],
    ]


def test_runs_that_end_no_better_than_they_began_are_counted(study):
    rows = [
        ("a", "ppo", 0, 1.0),
        ("a", "ppo", 1, 0.0),
        ("a", "ppo", 2, -1.0),
        ("a", "iif", 0, -1.0),
        ("a", "iif", 1, 2.0),
    ]
    rows += [("b", "ppo", 0, 1.0), ("b", "iif", 0, 0.0), ("b", "random", 0, 0.0)]
    runs = pl.DataFrame(rows, ["env", "arm", "seed", "last"], orient="row").with_columns(
        first=pl.lit(0.0), steps=pl.lit("lr0.001")
    )
    lines = study.environments.tabulate_failures(runs).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.strip()]
    rate = cells[0].index("lr0.001")
    # Seed 2 of the first has no partner.
    assert {row[0]: (row[rate], row[-1]) for row in cells[2:]} == {
        "a": ("1 / 1", "2"),
        "b": ("0 / 1", "1"),
        "all": ("1 / 2", "3"),
    }


@pytest.fixture
def written(study, monkeypatch):
    """The texts that the module of tables would write, by the name of their file."""
    texts = {}
    monkeypatch.setattr(study.tables, "write_text", lambda path, text: texts.update({path.name: text}))
    return texts


def test_the_tables_are_those_of_the_runs(study, written):
    study.tables.write_tables(RESULTS)
    assert written == {name: (RESULTS / name).read_text(encoding="utf-8") for name in ("tables.md", "summary.json")}


@pytest.mark.parametrize("page", ["README.md", "results/practice/README.md", "docs/guide/tuning.md"])
def test_every_interval_of_the_texts_is_in_the_tables(page):
    tables = re.sub(r"\b0\.", ".", (RESULTS / "tables.md").read_text(encoding="utf-8"))
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    if page == "README.md":
        lines = [line for line in lines if "results/practice" in line]
    text = " ".join(" ".join(lines).split())
    intervals = re.findall(r"−?\d*\.?\d+ \[−?\d*\.?\d+, −?\d*\.?\d+\]", text)
    assert intervals
    assert [interval for interval in intervals if interval not in tables] == []
