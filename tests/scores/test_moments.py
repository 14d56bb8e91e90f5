"""Moments and groups of records, on tables made by hand and at random."""

import numpy as np
import polars as pl
import pytest
import scipy.stats as stats
from hypothesis import given, settings
from hypothesis import strategies as st

from whence.scores.moments import ALIKE, find_moments, name_action, name_entries
from whence.scores.pivots import find_common_groups, group_scores, list_groupings

SCORES = [-1.0, -6.0, -10.0, -5.0, 2.0, -9.0, 4.0, 3.0, 1.0, -0.5]


def make_table(scores=SCORES, episodes=(0, 0, 0, 0, 0, 0, 1, 1, 1, 1), **more) -> pl.DataFrame:
    n = len(scores)
    columns = {
        "record_id": np.arange(100, 100 + n),
        "env_index": [0] * n,
        "episode_id": list(episodes),
        "step": [int(np.sum(np.asarray(episodes[:at]) == episodes[at])) for at in range(n)],
        "action": [at % 2 for at in range(n)],
        "advantage": [float(at) for at in range(n)],
        "score": list(scores),
        "keep": [score > -6 for score in scores],
    }
    return pl.DataFrame(columns | more)


class TestMoments:
    def test_neighbours_of_at_least_half_the_score_belong_to_the_moment(self):
        worst, second, *others = find_moments(make_table(), lowest=True, most=10)
        assert worst.record_ids == (101, 102, 103)
        assert (worst.record_id, worst.step, worst.first_step, worst.last_step) == (102, 2, 1, 3)
        assert (worst.score, worst.total, worst.records, worst.dropped) == (-10, -21, 3, 2)
        assert second.record_ids == (105,)
        assert [other.record_ids for other in others] == [(100,), (109,)]

    def test_the_most_helpful_are_above_zero_and_end_with_their_episode(self):
        best = find_moments(make_table(), lowest=False, most=10)
        assert [moment.record_ids for moment in best] == [(106, 107), (104,), (108,)]

    def test_environments_are_apart(self):
        table = make_table([-4.0, -4.0, -4.0], (-1, -1, -1)).with_columns(
            env_index=pl.Series([0, 1, 0]), episode_id=pl.Series([7, 8, 7])
        )
        assert [moment.record_ids for moment in find_moments(table, lowest=True, most=9)] == [(100, 102), (101,)]

    @pytest.mark.parametrize("unknown", [-1, None])
    def test_records_of_unknown_episodes_are_a_moment_each(self, unknown):
        table = make_table([-4.0, -4.0, -4.0], (0, 0, 0))
        table = table.with_columns(episode_id=pl.Series([unknown, unknown, 5], dtype=pl.Int64))
        assert [moment.record_ids for moment in find_moments(table, lowest=True, most=9)] == [(100,), (101,), (102,)]

    def test_responses_of_a_language_model_are_a_moment_each(self):
        table = pl.DataFrame({"record_id": [0, 1], "score": [-1.0, -2.0]})
        moments = find_moments(table, lowest=True, most=9)
        assert [moment.record_ids for moment in moments] == [(1,), (0,)]
        assert moments[0].step is None

    @settings(max_examples=60, deadline=None)
    @given(
        scores=st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=40),
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40),
        seed=st.integers(0, 99),
        lowest=st.booleans(),
    )
    def test_properties(self, scores, lengths, seed, lowest):
        episodes = np.repeat(np.arange(len(lengths)), lengths)
        episodes = np.resize(episodes, len(scores))
        episodes.sort()
        table = make_table(scores, episodes.tolist())
        moments = find_moments(table, lowest=lowest, most=100)
        ids = [record for moment in moments for record in moment.record_ids]
        sign = -1 if lowest else 1
        assert len(ids) == len(set(ids))
        assert set(ids) == {100 + at for at, score in enumerate(scores) if sign * score > 0}
        faces = [sign * moment.score for moment in moments]
        assert faces == sorted(faces, reverse=True)
        for moment in moments:
            rows = table.filter(pl.col("record_id").is_in(moment.record_ids))
            assert rows["episode_id"].n_unique() == 1
            assert moment.last_step - moment.first_step + 1 == moment.records
            assert (sign * rows["score"] >= ALIKE * sign * moment.score).all()
        shuffled = table.sample(fraction=1, shuffle=True, seed=seed)
        assert find_moments(shuffled, lowest=lowest, most=100) == moments


class TestGroups:
    def test_actions_by_hand(self):
        first, second = group_scores(make_table(), "action", labels=["left", "right"]).to_dicts()
        assert (first["group"], second["group"]) == ("right", "left")
        right = [-6.0, -5.0, -9.0, 3.0, -0.5]
        assert first["error"] is None  # without the scores by folds
        by_hand = {"mean": np.mean(right), "share_negative": 0.8, "dropped_share": 0.4, "total": sum(right)}
        assert {name: first[name] for name in by_hand} == pytest.approx(by_hand)

    def test_what_some_records_have_in_common(self):
        table = make_table(env_index=[0, 0, 0, 3, 3, 1, 1, 2, 2, 2])
        assert find_common_groups(table, [103]) == [("env_index", "environment 3"), ("step", "step = 3")]
        assert find_common_groups(table, [103, 104]) == [("env_index", "environment 3")]
        assert find_common_groups(table, [101, 105, 107], ["left", "right"]) == [("action", "right")]
        assert find_common_groups(table, []) == []

    def test_errors_leave_a_fold_out_of_the_target_and_of_the_group(self):
        generator = np.random.default_rng(0)
        episodes, fold = np.repeat(np.arange(10), 6), np.repeat([0, 1, 2, 3, 3, 2, 1, 0, 4, 5], 6)
        fold[54:57] = 4  # episode 9 lies in folds 4 and 5, which count as one
        scores = generator.normal(size=(60, 6)).astype(np.float32)
        actions = generator.integers(2, size=60)
        shares = np.bincount(fold) / 60
        more = {"score_folds": scores, "fold": fold, "action": actions}
        groups = group_scores(make_table(scores @ shares, episodes, **more), "action")
        cluster = np.minimum(fold, 4)
        for group in groups.to_dicts():
            inside, means = actions == int(group["group"]), []
            for left_out in range(5):
                weights = shares * (np.minimum(np.arange(6), 4) != left_out)
                means.append((scores[inside & (cluster != left_out)] @ weights / weights.sum()).mean())
            sizes = np.bincount(cluster[inside])
            widened = stats.t.ppf(0.975, sizes.sum() ** 2 / (sizes**2).sum() - 1) / 2
            assert group["error"] == pytest.approx(np.sqrt(4 * np.var(means)) * widened)
        # Two episodes alone do not tell how the next would differ.
        assert group_scores(make_table(scores @ shares, episodes // 5, **more), "action")["error"].null_count() == 2

    def test_few_rewards_stand_for_themselves_and_many_are_binned_by_size(self):
        few = make_table(reward=[0.0] * 9 + [1.0])
        assert set(group_scores(few, "reward")["group"]) == {"reward 0", "reward 1"}
        rewards = np.concatenate([np.linspace(-1, -0.1, 19), [-100.0], np.linspace(0.1, 1, 19), [50.0], [0.0]])
        many = make_table(np.arange(41.0) - 20, [0] * 41, reward=rewards)
        sizes = dict(group_scores(many, "reward").select("group", "records").iter_rows())
        assert sizes["nothing"] == 1
        assert sum(count for name, count in sizes.items() if name.startswith("large loss")) == 2
        assert sum(count for name, count in sizes.items() if name.startswith("small gain")) == 18

    def test_regions_are_cut_along_the_axes_that_tell_scores_apart(self):
        generator = np.random.default_rng(0)
        observation = generator.normal(size=(600, 4))
        scores = np.where(observation[:, 2] < -0.4, -3.0, 1.0) + np.where(observation[:, 0] > 0.4, 2.0, 0.0)
        table = make_table(scores, [0] * 600, observation=observation)
        groups = group_scores(table, "region", names=["x", "y", "tilt", "z"])
        assert len(groups) == 9
        assert all("x" in name and "tilt" in name and "y" not in name for name in groups["group"])
        assert groups["group"][0].startswith("x < -0.481 and tilt < ")

    def test_discrete_states_stand_for_themselves(self):
        table = make_table(observation=[3, 3, 3, 3, 3, 4, 4, 4, 4, 4])
        assert set(group_scores(table, "region")["group"]) == {"state 3", "state 4"}

    def test_two_columns_cross(self):
        end = [None] * 5 + ["terminated"] + [None] * 3 + ["truncated"]
        table = make_table(end=end, **{"info.fuel": [0.5] * 4 + [None] * 6, "info.x": np.arange(10)})
        assert list_groupings(table) == ["action", "step", "keep", "end", "info.fuel", "info.x"]
        cells = group_scores(table, ("action", "end"), labels=["left", "right"])
        assert cells.select("group", "across", "records", "mean").rows() == [
            ("right", "terminated", 1, -9.0),
            ("right", "not the last step", 3, pytest.approx(-8 / 3)),
            ("left", "not the last step", 5, -0.8),
            ("right", "truncated", 1, -0.5),
        ]
        sizes = dict(group_scores(table, "info.x").select("group", "records").iter_rows())
        assert sizes == {"x 0–1": 2, "x 2–3": 2, "x 4–5": 2, "x 6–7": 2, "x 8–9": 2}
        assert set(group_scores(table, "info.fuel")["group"]) == {"fuel = 0.5", "unknown"}

    def test_what_the_table_lacks_gives_no_groups(self):
        assert group_scores(make_table(), "reward").is_empty()
        assert group_scores(make_table().drop("score"), "action").is_empty()


def test_a_score_of_nothing_with_a_small_error_does_not_lead():
    records = pl.DataFrame({"record_id": [0, 1, 2], "score": [-1e-3, -1.0, -0.8], "error": [1e-4, 0.3, 0.4]})
    assert [moment.record_id for moment in find_moments(records, lowest=True, most=3)] == [1, 2, 0]


def test_actions_and_entries_in_words() -> None:
    assert name_action(1, ["left", "right"]) == "right"
    assert name_action(7, ["left", "right"]) == "7"
    assert name_action([0.12345, -1.0]) == "0.123, -1"
    # By their key, where names do not fit.
    assert name_entries("", 2, ["speed", "angle"]) == ["speed", "angle"]
    assert name_entries("", 2, ["speed"]) == name_entries("", 2) == ["x0", "x1"]
    assert name_entries("wind", 1, ["speed"]) == ["wind"]
    assert name_entries("wind", 2, ["speed", "angle"]) == ["wind[0]", "wind[1]"]
