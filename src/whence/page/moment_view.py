"""Everything about one moment of a run: what the terminal prints, pictures draw and the page opens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from typing import Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.errors import WhenceError, first_line
from whence.influence import is_significant
from whence.moments import Moment, name_action, sort_by_time
from whence.page.explored_run import ExploredRun
from whence.sb3 import EpisodeReplay

Frames: TypeAlias = Mapping[int, NDArray[np.uint8]]
"""Pictures (height, width, 3) by step."""

AROUND = 24
"""Steps before and after a moment's face that strips show."""

CONTINUATIONS = 16
"""Fresh rollouts by which an advantage is measured, with the record's action and with the policy's."""

PROBABILITIES, GAUSSIANS = "discrete", "box"


@dataclass(frozen=True)
class PolicyChange:
    """What the policy does in one state, before and after a round.

    Attributes:
        kind: "discrete": probabilities of actions; "box": means and standard deviations of the axes of actions.
        names: the actions' or axes' names, (k,).
        before: probabilities or means, (k,).
        after: the same after the round.
        spreads: standard deviations before and after, (k,) each; empty for probabilities.
        values: the value of the state before and after.
    """

    kind: str
    names: Sequence[str]
    before: Sequence[float]
    after: Sequence[float]
    spreads: tuple[Sequence[float], Sequence[float]]
    values: tuple[float, float]

    def describe_largest(self, form: Callable[[float], str], most: int) -> str:
        """Return the actions whose probabilities, or means, changed most, before and after."""
        order = sorted(range(len(self.before)), key=lambda at: -abs(self.after[at] - self.before[at]))[:most]
        return ", ".join(f"{self.names[at]} {form(self.before[at])} → {form(self.after[at])}" for at in order)


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
        state: the face's observation as (name, entry); empty if it was not stored.
        policy: what the round changed in the face's state, or None.
        policy_note: why that is not known.
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
    state: Sequence[tuple[str, Any]] = ()
    policy: PolicyChange | None = None
    policy_note: str | None = None
    estimate: tuple[float, float] | None = None
    estimate_note: str = ""
    frames: Frames = field(default_factory=dict)
    frames_note: str | None = None

    @property
    def action(self) -> str:
        """The face's action in words."""
        return name_action(self.moment.action, self.action_labels)

    @property
    def is_significant(self) -> bool | None:
        """Whether the score is more than two standard errors from 0; None if its error is not known."""
        return is_significant(self.moment.score, self.moment.error)


def gather_moment(
    run: ExploredRun, number: int, moment: Moment, *, rollouts: int = 0, steps: Sequence[int] = ()
) -> MomentView:
    """Return all that is known about a moment; what cannot be had is said in a note.

    Args:
        run: the run.
        number: the round, from 1.
        moment: the moment.
        rollouts: fresh rollouts by which an agent's advantage is measured; 0: it is not.
        steps: the steps to draw.
    """
    table = run.round(number).table
    row = table.row(int((table["record_id"] == moment.record_id).arg_true()[0]), named=True)
    view = MomentView(
        run=str(run.directory.path),
        env=run.env_name,
        round=number,
        moment=moment,
        row=row,
        window=read_window(table, moment),
        action_labels=run.labels,
    )
    if run.is_language:
        return view
    policy, policy_note = _read_policy(run, number, moment.record_id)
    estimate, estimate_note = measure_advantage(run, number, moment.record_id, rollouts)
    frames, frames_note = replay_frames(run, moment, steps)
    return replace(
        view,
        state=list_state(row, run.state_names),
        policy=policy,
        policy_note=policy_note,
        estimate=estimate,
        estimate_note=estimate_note,
        frames=frames,
        frames_note=frames_note,
    )


def read_window(records: pl.DataFrame, moment: Moment, around: int = AROUND) -> pl.DataFrame:
    """Return the records of the steps around a moment's face, in the same episode; at least the moment's face.

    Records without a step have no neighbours.
    """
    if moment.step is None or moment.episode_id is None:
        return records.filter(pl.col("record_id") == moment.record_id)
    near = (pl.col("episode_id") == moment.episode_id) & ((pl.col("step") - moment.step).abs() <= around)
    if moment.env_index is not None:
        near &= pl.col("env_index") == moment.env_index
    return sort_by_time(records.filter(near))


def choose_frames(window: pl.DataFrame, moment: Moment, count: int = 5) -> list[int]:
    """Return steps to draw, evenly around a moment's face, as far as the round holds them.

    Args:
        window: see `read_window`.
        moment: the moment.
        count: how many at most; odd.
    """
    if moment.step is None or "step" not in window.columns:
        return []
    stored_steps = window["step"].drop_nulls().to_list()
    half = count // 2
    apart = min(max(ceil(moment.records / 2), 5), AROUND // half)
    wanted = {min(max(moment.step + apart * at, stored_steps[0]), stored_steps[-1]) for at in range(-half, half + 1)}
    return sorted(wanted)


def list_state(row: Mapping[str, Any], names: Sequence[str] | None) -> list[tuple[str, Any]]:
    """Return the stored observation's entries by name, as `read_axes` names those that have none."""
    state: list[tuple[str, Any]] = []
    for column, value in row.items():
        if column.split(".")[0] != "observation" or value is None:
            continue
        prefix = column.removeprefix("observation").removeprefix(".")
        entries = _flatten(value)
        named = names if names and not prefix and len(names) == len(entries) else None
        for index, entry in enumerate(entries):
            many = f"{prefix}[{index}]" if prefix else f"x{index}"
            state.append((named[index] if named else many if len(entries) > 1 else prefix or "state", entry))
    return state


def _flatten(value: Any) -> list[Any]:
    return [entry for part in value for entry in _flatten(part)] if isinstance(value, list) else [value]


def _read_policy(run: ExploredRun, number: int, record: int) -> tuple[PolicyChange | None, str | None]:
    try:
        rows = run.changes(number).filter(pl.col("record_id") == record).to_dicts()
    except WhenceError as missing:
        return None, f"The policy before and after the round is not known. {missing}"
    return (read_change(run, rows[0]) if rows else None), None


def read_change(run: ExploredRun, row: Mapping[str, Any]) -> PolicyChange | None:
    """Return what a row of `compare_policies` says; None of a kind of action that it does not describe."""
    is_discrete = row.get("before") is not None
    if not is_discrete and row.get("mean_before") is None:
        return None
    names = run.labels if is_discrete else run.axis_labels
    columns = ("before", "after") if is_discrete else ("mean_before", "mean_after", "std_before", "std_after")
    before, after, *spreads = (np.atleast_1d(np.asarray(row[name], float)).tolist() for name in columns)
    return PolicyChange(
        kind=PROBABILITIES if is_discrete else GAUSSIANS,
        names=names if names and len(names) == len(before) else [f"action {at}" for at in range(len(before))],
        before=before,
        after=after,
        spreads=(spreads[0], spreads[1]) if spreads else ((), ()),
        values=(row["value_before"], row["value_after"]),
    )


def measure_advantage(
    run: ExploredRun, number: int, record: int, rollouts: int, on_step: Callable[[], None] | None = None
) -> tuple[tuple[float, float] | None, str]:
    """Return the advantage that fresh rollouts measure with its error, and how it was had; or None, and why not.

    Args:
        run: the run of an agent.
        number: the round.
        record: the record's id.
        rollouts: with the record's action, and with the policy's; 0: nothing is measured.
        on_step: called between steps; what it raises ends the measurement.
    """
    if rollouts < 1:
        return None, ""
    try:
        estimate = run.measure(number, record, rollouts, on_step)
    except Exception as refusal:  # an environment's own code may raise anything
        return None, first_line(refusal)
    return estimate, f"{rollouts} fresh rollouts each with this action and with the policy's"


def replay_frames(run: ExploredRun, moment: Moment, steps: Sequence[int]) -> tuple[Frames, str | None]:
    """Return pictures of a moment's steps, and why some are missing or how they were drawn."""
    if not steps:
        return {}, None
    episode = moment.episode_id
    return pick_frames({} if episode is None else {episode: run.replay(episode, steps)}, moment, steps)


def pick_frames(
    replays: Mapping[int, tuple[EpisodeReplay | None, str | None]], moment: Moment, steps: Sequence[int]
) -> tuple[Frames, str | None]:
    """Return the frames of a moment's steps from replays by episode, with their reservations; see `replay_frames`."""
    if moment.episode_id is None or moment.step is None:
        return {}, "The record's episode or its position there is not known, so it cannot be replayed."
    replay, note = replays[moment.episode_id]
    if replay is None:
        return {}, note
    note = replay.mismatch or replay.frames_note
    if moment.step not in replay.frames:
        return {}, note or "The replay ended before this step."
    return {step: replay.frames[step] for step in steps if step in replay.frames}, note


def format_number(number: float | None) -> str:
    """Return a number at three digits; a dash if there is none."""
    return "–" if number is None or not isfinite(number) else f"{number:.3g}"
