"""Advantages measured by repeated visits, and the records that harm and help on the map."""

import numpy as np
import polars as pl
import pytest

from helpers.episodes import train
from whence.causes import map_extremes
from whence.causes.judgement import compare_signs, measure_visits


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """Two rounds of FrozenLake by plain PPO, without scores."""
    path = tmp_path_factory.mktemp("lake") / "run"
    return train(path, preset="lda-code/frozenlake", n_steps=1024, arm="ppo")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Two rounds of MiniGrid."""
    return train(tmp_path_factory.mktemp("room") / "run", preset="lda-code/minigrid", n_steps=300)


class TestJudgement:
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
        for at in (0, 77, 500, 1023):
            same = states == states[at]
            expected = returns[same & (actions == actions[at])].mean() - returns[same].mean()
            assert measured["mc_advantage"][at] == pytest.approx(expected, abs=1e-9)
            assert measured["mc_value"][at] == pytest.approx(returns[same].mean(), abs=1e-9)
        assert measure_visits(lake, 2, least=1e6) is None

    def test_signs_and_certainty(self):
        rows = {"advantage": [1.0, 1.0, -1.0, 0.0, 1.0], "mc_advantage": [2.0, -2.0, -0.1, 0.0, 0.0]}
        compared = compare_signs(pl.DataFrame(rows | {"mc_error": [0.9, 1.1, None, 0.0, 0.0]}))
        assert compared["mismatch"].to_list() == [False, True, False, False, True]
        assert compared["certain"].to_list() == [True, False, None, False, False]


class TestMap:
    def test_arrows_of_a_lake_by_hand(self, lake):
        table = lake.round("records", 1).head(8)
        changes = {
            "observation": [0, 0, 0, 14, 14, 5, 1, 2],
            "action": [2, 2, 1, 2, 2, 0, 3, 1],
            "score": [-1.0, -2.0, -0.5, 3.0, 1.0, 0.0, 2.0, -0.1],
            "advantage": [1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0],
            "mismatch": [True, False, True, False, False, False, True, False],
        }
        grid = map_extremes(lake, 1, table.with_columns(**{name: pl.Series(v) for name, v in changes.items()}), most=3)
        assert (grid.rows, grid.cols) == (4, 4)
        assert [grid.cells[at] for at in (0, 1, 5, 15)] == ["start", "floor", "hole", "goal"]
        columns = ["side", "cell", "direction", "turn", "action", "count", "score", "praised", "wrong"]
        assert grid.arrows.select(columns).rows() == [
            ("worst", 0, 0, 0, "right", 2, -1.5, 0.5, 0.5),
            ("worst", 0, 1, 0, "down", 1, -0.5, 1.0, 1.0),
            ("best", 14, 0, 0, "right", 2, 2.0, 1.0, 0.0),
            ("best", 1, 3, 0, "up", 1, 2.0, 0.0, 1.0),
        ]

    def test_a_minigrid_s_poses_follow_from_its_actions(self, room):
        records = room.round("records", 1)
        grid = map_extremes(room, 1, records.with_columns(mismatch=pl.lit(True)), most=40)
        assert (grid.rows, grid.cols, grid.cells[0], grid.cells[9], grid.cells[54]) == (8, 8, "wall", "floor", "goal")
        assert grid.arrows["count"].sum() == 80
        # The agent starts in the upper left corner and looks right; walls stop it.
        expected, poses = {}, {}
        for row in records.sort("record_id").to_dicts():
            x, y, facing = poses.get(row["episode_id"], (1, 1, 0))
            expected[row["record_id"]] = (8 * y + x, facing)
            if row["action"] == 0:
                facing = (facing - 1) % 4
            elif row["action"] == 1:
                facing = (facing + 1) % 4
            elif row["action"] == 2:
                dx, dy = [(1, 0), (0, 1), (-1, 0), (0, -1)][facing]
                x, y = min(6, max(1, x + dx)), min(6, max(1, y + dy))
            poses[row["episode_id"]] = (x, y, facing)
        worst = records.sort("score", "record_id").head(40)
        found = sorted(
            (row["cell"], row["direction"])
            for row in grid.arrows.filter(side="worst").to_dicts()
            for _ in range(row["count"])
        )
        assert found == sorted(expected[record] for record in worst["record_id"])
        turns = dict(grid.arrows.select("action", "turn").unique().rows())
        assert [turns[name] for name in ("left", "right", "forward", "drop")] == [-1, 1, 0, None]
