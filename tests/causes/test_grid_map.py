"""The records that harm and help on the map of a grid world."""

import polars as pl
import pytest

from helpers.episodes import train
from whence.causes import map_extremes


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """Two rounds of FrozenLake by plain PPO, without scores."""
    path = tmp_path_factory.mktemp("lake") / "run"
    return train(path, preset="lda-code/frozenlake", n_steps=64, arm="ppo")


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """Two rounds of MiniGrid."""
    return train(tmp_path_factory.mktemp("room") / "run", preset="lda-code/minigrid", n_steps=300)


class TestMap:
    def test_arrows_of_a_lake_by_hand(self, lake):
        table = lake.round("records", 1).head(8)
        changes = {
            "observation": [0, 0, 0, 14, 14, 5, 1, 2],
            "action": [2, 2, 1, 2, 2, 0, 3, 1],
            "score": [-1.0, -2.0, -0.5, 3.0, 1.0, 0.0, 2.0, -0.1],
            "advantage": [1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0],
        }
        grid = map_extremes(lake, table.with_columns(**{name: pl.Series(v) for name, v in changes.items()}), most=3)
        assert (grid.rows, grid.cols) == (4, 4)
        assert [grid.cells[at] for at in (0, 1, 5, 15)] == ["start", "floor", "hole", "goal"]
        columns = ["side", "cell", "direction", "turn", "action", "count", "score", "praised"]
        assert grid.arrows.select(columns).rows() == [
            ("worst", 0, 0, 0, "right", 2, -1.5, 0.5),
            ("worst", 0, 1, 0, "down", 1, -0.5, 1.0),
            ("best", 14, 0, 0, "right", 2, 2.0, 1.0),
            ("best", 1, 3, 0, "up", 1, 2.0, 0.0),
        ]

    def test_a_minigrid_s_poses_follow_from_its_actions(self, room):
        records = room.round("records", 1)
        grid = map_extremes(room, records, most=40)
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
