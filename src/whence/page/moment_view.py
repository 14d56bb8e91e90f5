"""Everything about one moment of a run: what the command shows and what pictures draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.errors import WhenceError
from whence.experiments.rl.labels import action_labels, box_action_labels, state_names
from whence.experiments.rl.rebuilding import AnyEnv
from whence.influence import is_significant
from whence.moments import Moment, name_action, read_axes, sort_by_time
from whence.runs import RunDirectory

AROUND = 24
"""Steps before and after a moment's face that strips show."""


@dataclass(frozen=True)
class MomentView:
    """One moment of a round, with what is known about it.

    Attributes:
        run: the run's directory.
        env: the environment's id, or "" if it is not known.
        round: the round's number, from 1.
        moment: the moment.
        row: its face's row of the records' table.
        window: the rows of the steps around the face in the same episode and round, in time order.
        action_labels: names of discrete actions, or None.
        axis_labels: names of the axes of continuous actions, or None.
        state: the face's observation as (name, value), at most 64 axes; empty if it was not stored.
        policy: the face's row of `compare_policies`, or None.
        policy_note: why there is none.
        estimate: the advantage by fresh rollouts and its standard error, or None.
        estimate_note: how it was estimated, or why not.
        frames: pictures (height, width, 3) by step.
        frames_note: why there are none, or what is wrong with them; None if nothing is.
    """

    run: str
    env: str
    round: int
    moment: Moment
    row: Mapping[str, Any]
    window: pl.DataFrame
    action_labels: Sequence[str] | None = None
    axis_labels: Sequence[str] | None = None
    state: Sequence[tuple[str, float]] = ()
    policy: Mapping[str, Any] | None = None
    policy_note: str | None = None
    estimate: tuple[float, float] | None = None
    estimate_note: str = ""
    frames: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    frames_note: str | None = None

    @property
    def action(self) -> str:
        """The face's action in words."""
        return name_action(self.moment.action, self.action_labels)

    @property
    def is_significant(self) -> bool | None:
        """Whether the score is more than two standard errors from 0; None if its error is not known."""
        return is_significant(self.moment.score, self.moment.error)


def find_env(run: RunDirectory, env: AnyEnv) -> str:
    """Return the environment's id for labels: the one asked for, or the run's; "" if neither is a name."""
    name = env if isinstance(env, str) else run.config.get("env")
    return name if isinstance(name, str) else ""


def read_window(records: pl.DataFrame, moment: Moment, around: int = AROUND) -> pl.DataFrame:
    """Return the records of the steps around a moment's face, in the same episode; at least the moment's face.

    Records without a step have no neighbours.
    """
    face = records.filter(pl.col("record_id") == moment.record_id)
    if moment.step is None or moment.episode_id is None:
        return face
    near = (pl.col("episode_id") == moment.episode_id) & ((pl.col("step") - moment.step).abs() <= around)
    if moment.env_index is not None:
        near &= pl.col("env_index") == moment.env_index
    return sort_by_time(records.filter(near))


def choose_frames(view_window: pl.DataFrame, moment: Moment, count: int = 5) -> list[int]:
    """Return steps to draw, evenly around a moment's face, as far as the round holds them.

    Args:
        view_window: see `read_window`.
        moment: the moment.
        count: how many at most; odd.
    """
    if moment.step is None or "step" not in view_window.columns:
        return []
    stored_steps = view_window["step"].drop_nulls().to_list()
    half = count // 2
    apart = min(max(ceil(moment.records / 2), 5), AROUND // half)
    wanted = {min(max(moment.step + apart * at, stored_steps[0]), stored_steps[-1]) for at in range(-half, half + 1)}
    return sorted(wanted)


def read_state(row: pl.DataFrame, env: str, most: int = 64) -> list[tuple[str, float]]:
    """Return the names and numbers of one record's observation; none if it was not stored."""
    names = state_names(env)
    axes = read_axes(row)
    if names is not None and list(axes) == [f"x{axis}" for axis in range(len(names))]:
        axes = dict(zip(names, axes.values(), strict=True))
    return [(name, float(values[0])) for name, values in list(axes.items())[:most]]


def gather_moment(
    run: RunDirectory,
    number: int,
    records: pl.DataFrame,
    moment: Moment,
    *,
    env: AnyEnv = None,
    changes: "Changes | None" = None,
    continuations: int = 0,
    steps: Sequence[int] = (),
) -> MomentView:
    """Return all that is known about a moment; what cannot be had is said in a note.

    Args:
        run: the run of an agent.
        number: the round, from 1.
        records: the round's table.
        moment: the moment.
        env: the environment if the run's configuration does not name it.
        changes: the round's changes of the policy; None: they are not shown.
        continuations: rollouts by which the advantage is estimated; 0: it is not.
        steps: the steps to draw.
    """
    name = find_env(run, env)
    window = read_window(records, moment)
    row = records.filter(pl.col("record_id") == moment.record_id)
    estimate, estimate_note = _estimate(run, number, moment, env, continuations)
    frames, frames_note = _replay(run, moment, env, steps)
    return MomentView(
        run=str(run.path),
        env=name,
        round=number,
        moment=moment,
        row=row.to_dicts()[0],
        window=window,
        action_labels=action_labels(name),
        axis_labels=box_action_labels(name),
        state=read_state(row, name),
        policy=None if changes is None else changes.row(moment.record_id),
        policy_note=None if changes is None else changes.note,
        estimate=estimate,
        estimate_note=estimate_note,
        frames=frames,
        frames_note=frames_note,
    )


@dataclass(frozen=True)
class Changes:
    """What a round changed in the policy.

    Attributes:
        table: see `compare_policies`; None if it cannot be computed.
        note: why not.
    """

    table: pl.DataFrame | None
    note: str | None = None

    def row(self, record_id: int) -> dict[str, Any] | None:
        """Return a record's row."""
        rows = [] if self.table is None else self.table.filter(pl.col("record_id") == record_id).to_dicts()
        return rows[0] if rows else None


def read_changes(run: RunDirectory, number: int, env: AnyEnv = None) -> Changes:
    """Return what a round changed in the policy, or why that is not known."""
    from whence.experiments.rl.changes import compare_policies

    try:
        return Changes(compare_policies(run, number, env=env))
    except WhenceError as missing:
        return Changes(None, f"The policy before and after the round is not known. {missing}")


def _estimate(
    run: RunDirectory, number: int, moment: Moment, env: AnyEnv, continuations: int
) -> tuple[tuple[float, float] | None, str]:
    if continuations == 0:
        return None, ""
    if moment.step is None or moment.episode_id is None:
        return None, "the record's episode or step is not known"
    from whence.experiments.rl.continuations import estimate_advantage

    try:
        estimate = estimate_advantage(run, number, moment.record_id, env=env, continuations=continuations)
    except WhenceError as missing:
        return None, str(missing)
    return estimate, f"{continuations} fresh rollouts each with this action and with the policy's"


def _replay(
    run: RunDirectory, moment: Moment, env: AnyEnv, steps: Sequence[int]
) -> tuple[Mapping[int, NDArray[np.uint8]], str | None]:
    if not steps:
        return {}, None
    if moment.episode_id is None:
        return {}, "No frames: the record's episode is not known."
    from whence.experiments.rl.stored import replay_episode

    try:
        replay = replay_episode(run, moment.episode_id, env=env, frames=list(steps), last_step=max(steps))
    except WhenceError as missing:
        return {}, f"No frames: {missing}"
    if replay.mismatch is not None:
        return {}, f"No frames: the replay differs from the run. {replay.mismatch}"
    return replay.frames, replay.frames_note
