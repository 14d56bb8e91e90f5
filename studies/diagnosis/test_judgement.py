"""Judged advantages: which records, by what, and what is said of them."""

import numpy as np
import polars as pl
import pytest

from helpers.episodes import train
from studies.diagnosis.agreement import compare_bands, partial_spearman, summarise_judgement
from studies.diagnosis.judgement import draw_by_score, judge_advantages, place_in_bands
from studies.diagnosis.visits import compare_signs, measure_visits
from whence.stored.agents import estimate_advantages, score_round


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """Two rounds of FrozenLake by plain PPO, without scores."""
    path = tmp_path_factory.mktemp("lake") / "run"
    return train(path, preset="lda-code/frozenlake", n_steps=256, arm="ppo")


def scored(n=100, **columns):
    table = {"record_id": np.arange(n), "score": np.linspace(1, -1, n), "advantage": np.ones(n)}
    return pl.DataFrame(table | columns)


def judged_table(n=200, seed=0):
    """A judgement in which the sign is wrong exactly in the bottom band."""
    generator = np.random.default_rng(seed)
    table = place_in_bands(scored(n, episode_id=np.arange(n) // 4, value=np.arange(n) / n))
    measured = np.where(table["band"].to_numpy() == "bottom", -1.0, 1.0) * generator.uniform(1, 2, n)
    table = table.with_columns(
        pl.Series("mc_advantage", measured),
        pl.Series("mc_value", np.arange(n) / n + 0.5),
        mc_error=pl.lit(0.6),
        measured=pl.lit("rollouts"),
    )
    return compare_signs(table)


class TestChoice:
    def test_bands_are_fifths_of_the_round_and_the_highest_score_is_first(self):
        table = place_in_bands(scored())
        assert table["position"].to_list() == pytest.approx(np.arange(100) / 100)
        assert table["band"].to_list() == ["top"] * 20 + ["middle"] * 60 + ["bottom"] * 20
        tied = place_in_bands(scored(10, score=np.zeros(10)))
        # Of equal scores the lower id is the first to be dropped, so it stands last.
        assert tied["band"].to_list() == ["bottom"] * 2 + ["middle"] * 6 + ["top"] * 2

    def test_a_sample_has_one_record_of_each_equal_band_of_scores(self):
        table = place_in_bands(scored(1000).sample(1000, shuffle=True, seed=3))
        sample = draw_by_score(table, 50, seed=1)
        assert sorted((sample["position"] * 50).floor().to_list()) == list(range(50))
        assert not sample.equals(draw_by_score(table, 50, seed=2))
        assert sample.equals(draw_by_score(table, 50, seed=1))
        assert draw_by_score(table, 5000, seed=1).equals(table)
        # Each record of a band is as likely: the first and the last of it are drawn, too.
        places = [draw_by_score(table, 50, seed)["position"].to_numpy() * 1000 % 20 for seed in range(60)]
        assert {0, 19} <= {round(place) for sample in places for place in sample}


class TestJudgement:
    def test_a_round_without_scores_is_scored_for_the_return(self, lake):
        assert "score" not in lake.round("records", 2).columns
        scores = score_round(lake, 2).to_polars()
        judged = judge_advantages(lake, 2, "visits")
        assert judged["measured"].unique().to_list() == ["visits"]
        assert judged["score"].to_list() == scores["score"].to_list()

    def test_rollouts_judge_a_sample_over_all_scores(self, lake):
        settings = {"measure": "rollouts", "records": 8, "continuations": 3}
        judged = judge_advantages(lake, 2, seed=4, **settings)
        assert judged["measured"].unique().to_list() == ["rollouts"]
        assert sorted((judged["position"] * 8).floor().to_list()) == list(range(8))
        assert judged.equals(judge_advantages(lake, 2, seed=4, **settings))
        ids = judged["record_id"].to_list()
        direct = estimate_advantages(lake, 2, ids, continuations=3, seed=4)
        assert judged["mc_value"].to_list() == direct["mc_value"].to_list()


class TestAgreement:
    def test_bands_by_hand(self):
        bands = {row["band"]: row for row in compare_bands(judged_table()).to_dicts()}
        assert {name: (row["records"], row["mismatch"]) for name, row in bands.items()} == {
            "top": (40, 0),
            "middle": (120, 0),
            "bottom": (40, 1),
        }
        # All trained advantages are 1, so their size says nothing: the expected share is that of all records.
        assert bands["bottom"]["expected"] == pytest.approx(0.2)
        assert bands["bottom"]["size"] == 1
        assert 0.3 < bands["bottom"]["certain"] < 1
        assert (bands["bottom"]["certain_mismatch"], bands["top"]["certain_mismatch"]) == (1, 0)

    def test_intervals_resample_episodes(self):
        summary = summarise_judgement(judged_table(), resamples=200)
        assert summary["difference"] == {"mean": 1, "low": 1, "high": 1}
        generator = np.random.default_rng(1)
        noisy = judged_table(400).with_columns(pl.Series("mismatch", generator.random(100).repeat(4) < 0.5))
        by_episode = summarise_judgement(noisy, resamples=400)["bands"][0]
        alone = noisy.with_columns(episode_id=pl.col("record_id"))
        by_record = summarise_judgement(alone, resamples=400)["bands"][0]
        wide, narrow = (row["high"] - row["low"] for row in (by_episode, by_record))
        assert wide > 1.5 * narrow  # the four records of an episode say one thing
        single = noisy.with_columns(episode_id=pl.lit(3))
        assert summarise_judgement(single)["difference"]["low"] is None

    def test_a_partial_correlation_by_hand(self):
        generator = np.random.default_rng(0)
        fixed = generator.normal(size=3000)
        one, other = fixed + generator.normal(size=3000), fixed + generator.normal(size=3000)
        assert abs(partial_spearman(one, other, fixed)) < 0.06
        assert partial_spearman(one, one, fixed) == pytest.approx(1)
        assert np.isnan(partial_spearman(one, other, np.ones(3000)))
        assert np.isnan(partial_spearman(one[:1], other[:1], fixed[:1]))


class TestVisits:
    def test_visits_are_lda_s_estimate(self, lake):
        measured = measure_visits(lake, 2)
        records = lake.round("records", 2)
        assert measured["record_id"].to_list() == records["record_id"].to_list()
        # By hand: returns to go within episodes; the last episode is completed by the critic.
        returns = np.zeros(len(records))
        rows = records.to_dicts()
        for at in range(len(rows) - 1, -1, -1):
            goes_on = at + 1 < len(rows) and rows[at + 1]["episode_id"] == rows[at]["episode_id"]
            if at == len(rows) - 1:
                returns[at] = rows[at]["advantage"] + rows[at]["value"]
            else:
                returns[at] = rows[at]["reward"] + (0.99 * returns[at + 1] if goes_on else 0.0)
        states, actions = records["observation"].to_numpy(), records["action"].to_numpy()
        for at in (0, 77, 128, 255):
            same = states == states[at]
            expected = returns[same & (actions == actions[at])].mean() - returns[same].mean()
            assert measured["mc_advantage"][at] == pytest.approx(expected, abs=1e-9)
            assert measured["mc_value"][at] == pytest.approx(returns[same].mean(), abs=1e-9)
        assert measure_visits(lake, 2, least=1e6) is None

    def test_signs_and_certainty(self):
        rows = pl.DataFrame(
            {
                "advantage": [1.0, 1.0, -1.0, 0.0, 1.0],
                "mc_advantage": [2.0, -2.0, -0.1, 0.0, 0.0],
                "mc_error": [0.9, 1.1, None, 0.0, 0.0],
            }
        )
        compared = compare_signs(rows)
        assert compared["mismatch"].to_list() == [False, True, False, False, True]
        assert compared["certain"].to_list() == [True, False, None, False, False]
