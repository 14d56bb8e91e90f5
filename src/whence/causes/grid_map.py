"""The records of a round that harm and help the most, on the map of a grid world (LDA Fig. 3, 8)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import polars as pl

from whence.core import WhenceError
from whence.runs import RunDirectory
from whence.sb3.episodes import open_env, read_episode
from whence.scores import name_action
from whence.stored.agents import AnyEnv, action_labels, make_replay_env, replay_exactly

MOST = 100
"""Records at either end of a round, as in LDA's figures."""

_LAKE_CELLS = {"S": "start", "F": "floor", "H": "hole", "G": "goal"}
_LAKE_DIRECTIONS = {0: 2, 1: 1, 2: 0, 3: 3}
_MINIGRID_TURNS = {0: -1, 1: 1, 2: 0}

_STATE = ("cell", "direction", "turn", "action")


class GridMap(NamedTuple):
    """A grid world, and what the agent did there in the records of the lowest and of the highest scores.

    Attributes:
        rows: the grid's rows.
        cols: the grid's columns.
        cells: what is in each cell, row by row: "floor", "wall", "goal", "start", "hole", or another word.
        arrows: a row for each `side` ("worst", "best"), cell and action: `cell` (its place in `cells`), `direction` in
            which the agent acts or looks (0: right, 1: down, 2: left, 3: up), `turn` (0: it goes there, -1: it turns
            left, 1: right, null: something else), `action` in words, the `count` of records, their mean `score`, and
            the share that was `praised` (its advantage is above 0).
    """

    rows: int
    cols: int
    cells: tuple[str, ...]
    arrows: pl.DataFrame

    def to_json(self) -> dict[str, Any]:
        """Return the map in JSON types."""
        return self._asdict() | {"cells": list(self.cells), "arrows": self.arrows.to_dicts()}


class _Layout(NamedTuple):
    rows: int
    cols: int
    cells: tuple[str, ...]


_Pose = tuple[int, int, _Layout]
"""The cell and the direction of a MiniGrid's agent, and the grid around it."""


def map_extremes(run: RunDirectory, records: pl.DataFrame, *, most: int = MOST, env: AnyEnv = None) -> GridMap | None:
    """Return the map of the records that harm and help the most; None if the environment has none.

    A map has FrozenLake, whose observations are cells, and MiniGrid, whose episodes are played again to see where the
    agent is, if all of them have the same walls.

    Args:
        run: the run.
        records: the records of a round, with `score`.
        most: how many records at either end, as far as their scores are below or above 0.
        env: the environment, if the run's configuration does not name it.

    Raises:
        ReplayError: an episode cannot be played again.
    """
    if not {"score", "action"} <= {*records.columns} or (world := _read_world(run, env)) is None:
        return None
    extremes = _choose_extremes(records, most)
    if isinstance(world, _Layout):
        layout = world
        placed = extremes.with_columns(
            cell=pl.col("observation").cast(pl.Int64), direction=_translate(_LAKE_DIRECTIONS), turn=pl.lit(0, pl.Int64)
        )
    else:
        poses = _replay_poses(run, extremes, env)
        layouts = {layout for _, _, layout in poses.values()}
        if len(layouts) != 1:
            return None
        layout = layouts.pop()
        places = pl.DataFrame(
            [(record, cell, direction) for record, (cell, direction, _) in poses.items()],
            schema=dict.fromkeys(("record_id", "cell", "direction"), pl.Int64),
            orient="row",
        )
        placed = extremes.with_columns(turn=_translate(_MINIGRID_TURNS)).join(places, on="record_id", how="inner")
    name = env if isinstance(env, str) else run.config.get("env")
    return GridMap(*layout, _count_arrows(placed, name if isinstance(name, str) else None, run.config))


def _translate(numbers: Mapping[int, int]) -> pl.Expr:
    return pl.col("action").replace_strict(numbers, default=None, return_dtype=pl.Int64)


def has_map(run: RunDirectory, *, env: AnyEnv = None) -> bool:
    """Return whether `map_extremes` knows a run's environment."""
    return _read_world(run, env) is not None


def _read_world(run: RunDirectory, env: AnyEnv) -> _Layout | bool | None:
    """Return the layout of a lake, True of a MiniGrid; None of anything else, or what cannot be made."""
    try:
        make_env = make_replay_env(run, env)
        with open_env(make_env) as world:
            is_minigrid = all(hasattr(world.unwrapped, name) for name in ("agent_pos", "agent_dir", "grid"))
            return _read_lake(world) or is_minigrid or None
    except WhenceError:
        return None


def _choose_extremes(records: pl.DataFrame, most: int) -> pl.DataFrame:
    """Return the records of the lowest scores below 0 and of the highest above 0, with their `side`."""
    ends = [
        records.filter(sign * pl.col("score") > 0).sort(sign * pl.col("score"), "record_id", descending=[True, False])
        for sign in (-1, 1)
    ]
    sides = zip(ends, ("worst", "best"), strict=True)
    return pl.concat([end.head(most).with_columns(side=pl.lit(side)) for end, side in sides])


def _read_lake(env: gym.Env[Any, Any]) -> _Layout | None:
    """Return the map of an environment whose observations are the cells of its `desc`, as FrozenLake's are."""
    desc: Any = getattr(env.unwrapped, "desc", None)
    space = env.observation_space
    if getattr(desc, "ndim", 0) != 2 or not isinstance(space, gym.spaces.Discrete) or desc.size != space.n:
        return None
    texts = [cell.decode("ascii", "replace") if isinstance(cell, bytes) else str(cell) for cell in desc.flat]
    rows, cols = desc.shape
    return _Layout(rows, cols, tuple(_LAKE_CELLS.get(text, text) for text in texts))


def _read_pose(env: gym.Env[Any, Any], layouts: list[_Layout]) -> _Pose:
    """Return a MiniGrid's pose; its layout is read before the first action, since the agent may open doors."""
    base: Any = env.unwrapped
    if not layouts:
        grid = base.grid
        objects = [grid.get(column, row) for row in range(grid.height) for column in range(grid.width)]
        cells = tuple("floor" if each is None else str(each.type) for each in objects)
        layouts.append(_Layout(grid.height, grid.width, cells))
    column, row = map(int, base.agent_pos)
    return row * layouts[0].cols + column, int(base.agent_dir), layouts[0]


def _replay_poses(run: RunDirectory, extremes: pl.DataFrame, env: AnyEnv) -> dict[int, _Pose]:
    """Return where the agent was in each record, by the record's id."""
    poses: dict[int, _Pose] = {}
    known = extremes.drop_nulls(["episode_id", "step"])
    for (episode,), rows in known.group_by("episode_id", maintain_order=True):
        stored = read_episode(run, int(episode))
        inspect = partial(_read_pose, layouts=[])
        replay = replay_exactly(run, stored, int(rows["step"].to_numpy().max()), env=env, inspect=inspect)
        poses |= {record: replay.inspected[step] for record, step in rows.select("record_id", "step").iter_rows()}
    return poses


def _count_arrows(placed: pl.DataFrame, env_id: str | None, config: Mapping[str, Any]) -> pl.DataFrame:
    """Return the records by side, cell and action, those of most records first."""
    counted = placed.group_by("side", *_STATE).agg(
        count=pl.len().cast(pl.Int64),
        score=pl.col("score").cast(pl.Float64).mean(),
        praised=(pl.col("advantage") > 0).mean(),
    )
    labels = action_labels(env_id, config)
    names = [name_action(action, labels) for action in counted["action"].to_list()]
    ordered = counted.with_columns(pl.Series("action", names, dtype=pl.String))
    return ordered.sort("side", "count", *_STATE, descending=[True, True, False, False, False, False])
