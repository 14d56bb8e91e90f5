"""Everything about one moment of a run: what the terminal prints, pictures draw and the page opens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

import numpy as np
import polars as pl

from whence.core import show
from whence.page.content.explored_run import Estimate, ExploredRun, Frames
from whence.page.content.frames import encode_frames, read_picture, replay_moments
from whence.page.content.responses import describe_response
from whence.page.content.short_json import cut_text, round_numbers
from whence.scores import Moment, is_significant, list_observations, name_action, name_entries, sort_by_time
from whence.stored.agents import box_action_labels

AROUND = 24
"""Steps before and after a moment's face that strips show."""

CONTINUATIONS = 16
"""Fresh rollouts by which an advantage is measured, with the record's action and with the policy's."""

TARGETS = {
    "Return": "return",
    "ValidationLoss": "likelihood of the demonstrations",
    "SequenceReturn": "expected reward",
    "SequenceReward": "expected reward, without a baseline",
    "TokenReturn": "expected reward, token by token",
    "MeanObjective": "round's own objective",
}
"""What targets raise, in words, by their names in the configuration."""

NUMBERS = {
    "tokens": "tokens",
    "entropy": "entropy (nats a token)",
    "divergence": "divergence (nats)",
    "clip_share": "ratios clipped",
    "log_prob": "log-prob",
}
"""Numbers of a response that its page lists, in words."""

STATE = 64
"""Entries of a state that the page shows at most."""


@dataclass(frozen=True)
class PolicyChange:
    """What the policy does in one state, before and after a round.

    Attributes:
        names: the actions' or axes' names, (k,).
        before: probabilities of actions, or means of the axes of actions, (k,).
        after: the same after the round.
        spreads: standard deviations before and after, (k,) each; empty for probabilities.
        values: the value of the state before and after.
    """

    names: Sequence[str]
    before: Sequence[float]
    after: Sequence[float]
    spreads: Sequence[Sequence[float]]
    values: tuple[float, float]


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
        target: what was attributed, in words.
        action_labels: names of discrete actions, or None.
        state: the face's observation as (name, entry); empty if it was not stored.
        policy: what the round changed in the face's state, or None.
        policy_note: why that is not known.
        estimate: the advantage by fresh rollouts; None: it was not to be measured.
        frames: pictures (height, width, 3) by step.
        frames_note: why there are none, or what is wrong with them; None if nothing is.
    """

    run: str
    env: str
    round: int
    moment: Moment
    row: Mapping[str, Any]
    window: pl.DataFrame
    target: str = "return"
    action_labels: Sequence[str] | None = None
    state: Sequence[tuple[str, Any]] = ()
    policy: PolicyChange | None = None
    policy_note: str | None = None
    estimate: Estimate | None = None
    frames: Frames = field(default_factory=dict)
    frames_note: str | None = None

    @property
    def normalised(self) -> list[tuple[str, Any]]:
        """The face's observation as the policy saw it, if the environment returned another."""
        raw = [name for name in self.row if name.split(".")[0] == "raw_observation"]
        return list_state(self.row, [name for name, _ in self.state], "observation") if raw else []

    @property
    def place(self) -> str:
        """Where it is: the environment, the round, the episode and the step."""
        step = "" if self.moment.step is None else f", episode {self.moment.episode_id}, step {self.moment.step}"
        return f"{self.env or self.run}, round {self.round}{step}"

    @property
    def facts(self) -> dict[str, str]:
        """What is known about it in words, by name."""
        moment = self.moment
        facts = {"score": describe_score(moment.score, moment.error)}
        if moment.records > 1:
            counts = f"{moment.records} records, total {moment.total:.3g}, {moment.dropped} dropped"
            facts["moment"] = f"steps {moment.first_step} to {moment.last_step}: {counts}"
        action = name_action(moment.action, self.action_labels)
        facts |= describe_training(self.row) | {"action": action, "advantage": format_number(moment.advantage)}
        if (estimate := self.estimate) is not None:
            mean, error, text = estimate
            facts["fresh rollouts"] = text if mean is None else f"{mean:.3g} ± {error:.2g}. {text}"
        numbers = {"value": moment.value, "return": moment.return_, "reward": moment.reward}
        return facts | {name: format_number(number) for name, number in numbers.items() if number is not None}


def gather_moment(
    run: ExploredRun,
    number: int,
    moment: Moment,
    *,
    rollouts: int = 0,
    steps: Sequence[int] = (),
    replay: tuple[Frames, str | None] | None = None,
) -> MomentView:
    """Return all that is known about a moment; what cannot be had is said in a note.

    An agent's advantage is measured by `rollouts` fresh rollouts, unless these are 0. `steps` are drawn, unless
    `replay` has their frames and their note already.
    """
    row, window = run.record(number, moment.record_id), read_window(run.round(number).table, moment)
    target = name_target(run.directory.config.get("target"))
    place = (str(run.directory.path), run.env_name, number, moment, row, window, target, run.labels)
    if run.is_language:
        return MomentView(*place)
    changes, policy_note = run.changes(number)
    place_of = None if changes is None else changes["record_id"].index_of(moment.record_id)
    change = None if changes is None or place_of is None else changes.row(place_of, named=True)
    frames, frames_note = replay or replay_moments(run, [(moment, steps)])[moment.record_id]
    if not frames and moment.step is not None:
        picture = read_picture(row, run.directory.config.get("observation_space"))
        frames = {} if picture is None else {moment.step: picture}
    return MomentView(
        *place,
        state=list_state(row, run.state_names),
        policy=None if change is None else read_change(run, change),
        policy_note=policy_note,
        estimate=run.measure(number, moment.record_id, rollouts) if rollouts else None,
        frames=frames,
        frames_note=frames_note,
    )


def read_window(records: pl.DataFrame, moment: Moment) -> pl.DataFrame:
    """Return the records of the steps around a moment's face, in the same episode; at least the moment's face.

    Records without a step have no neighbours.
    """
    if moment.step is None or moment.episode_id is None:
        return records.filter(pl.col("record_id") == moment.record_id)
    near = (pl.col("episode_id") == moment.episode_id) & ((pl.col("step") - moment.step).abs() <= AROUND)
    if moment.env_index is not None:
        near &= pl.col("env_index") == moment.env_index
    return sort_by_time(records.filter(near))


def choose_frames(window: pl.DataFrame, moment: Moment) -> list[int]:
    """Return up to five steps to draw, evenly around a moment's face, of those in its window."""
    if moment.step is None or "step" not in window.columns:
        return []
    steps = window["step"].drop_nulls().to_list()
    apart = min(max(ceil(moment.records / 2), 5), AROUND // 2)
    return sorted({min(max(moment.step + apart * at, steps[0]), steps[-1]) for at in range(-2, 3)})


def list_state(row: Mapping[str, Any], names: Sequence[str] | None, root: str | None = None) -> list[tuple[str, Any]]:
    """Return the stored observation's entries by name; the one of a Discrete space is the state.

    It is the environment's own, or that of a `root`, the policy's "observation".
    """
    state: list[tuple[str, Any]] = []
    for column in list_observations(list(row), root):
        if row[column] is not None:
            entries = np.asarray(row[column]).ravel().tolist()
            state += zip(name_entries(column.partition(".")[2], len(entries), names or ["state"]), entries, strict=True)
    return state


def read_change(run: ExploredRun, row: Mapping[str, Any]) -> PolicyChange | None:
    """Return what a row of `compare_policies` says; None of a kind of action that it does not describe."""
    is_discrete = row.get("before") is not None
    if not is_discrete and row.get("mean_before") is None:
        return None
    names = run.labels if is_discrete else box_action_labels(run.env_name, run.directory.config)
    columns = ("before", "after") if is_discrete else ("mean_before", "mean_after", "std_before", "std_after")
    before, after, *spreads = (np.atleast_1d(np.asarray(row[name], float)).tolist() for name in columns)
    names = names if names and len(names) == len(before) else [f"action {at}" for at in range(len(before))]
    return PolicyChange(names, before, after, spreads, (row["value_before"], row["value_after"]))


def describe_moment(moment: Moment, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return a moment in JSON types, as lists show it; without frames, for the caller to add."""
    names = ("step", "first_step", "last_step", "records", "dropped", "score", "error", "total", "advantage", "value")
    about = {
        "record": moment.record_id,
        "episode": moment.episode_id,
        "env": moment.env_index,
        **{name: getattr(moment, name) for name in names},
        "return": moment.return_,
        "reward": moment.reward,
        "action": cut_text(name_action(moment.action, labels)),
        "significant": is_significant(moment.score, moment.error),
    }
    return {**round_numbers(about), "thumb": None, "text": None}


def describe_view(view: MomentView) -> dict[str, Any]:
    """Return all about a moment in JSON types."""
    moment, row, change = view.moment, view.row, view.policy
    shown = describe_moment(moment, view.action_labels)
    scores = {name: shown[name] for name in ("score", "error", "significant")}
    shown |= {
        "round": view.round,
        "dropped": row.get("keep") is False,
        "weight": row.get("weight"),
        "reason": None if row.get("reason") is None else cut_text(row["reason"]),
        "targets": [] if row.get("score") is None else [{"name": view.target, **scores}],
    }
    infos = [(name[5:], value) for name, value in row.items() if name.startswith("info.") and value is not None]
    if "response" in row:
        infos = [(words, row[name]) for name, words in NUMBERS.items() if row.get(name) is not None] + infos
        shown |= describe_response(row) | {"metrics": _list_entries(infos)}
    else:
        shown |= {
            "metrics": _list_entries(infos),
            **{name: row.get(name) for name in ("end", "trained_reward", "bootstrap")},
            "state": _list_entries(view.state[:STATE]),
            "normalised": _list_entries(view.normalised[:STATE]),
            "state_size": len(view.state),
            "policy": None if change is None else _describe_policy(change),
            "value_before": row.get("value") if change is None else change.values[0],
            "value_after": None if change is None else change.values[1],
            **(view.estimate or Estimate())._asdict(),
            "frames": encode_frames(view.frames, moment.step or 0),
            "frames_note": view.frames_note,
        }
    return dict(round_numbers(shown))


def _list_entries(entries: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, "value": cut_text(entry) if isinstance(entry, str) else entry} for name, entry in entries]


def list_curves(table: pl.DataFrame, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return records' numbers as arrays in the table's order; a column that is not there holds nulls."""
    names = {"steps": "step", "rewards": "reward", "values": "value", "advantages": "advantage", "scores": "score"}
    names = {"record_ids": "record_id"} | names | {"errors": "error"}
    columns = choose_columns(table, [*names.values(), "keep", "action"])
    return {
        **{key: round_numbers(columns[name]) for key, name in names.items()},
        "dropped": [int(keep is False) for keep in columns["keep"]],
        "actions": [cut_text(name_action(action, labels)) for action in columns["action"]],
    }


def choose_columns(table: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Return some columns of a table; one that is not there holds nulls."""
    missing = {name: pl.lit(None, pl.Float64) for name in names if name not in table.columns}
    return table.with_columns(**missing).select(names)


def _describe_policy(change: PolicyChange) -> dict[str, Any]:
    columns = [round_numbers(numbers, 4) for numbers in (change.before, change.after, *change.spreads)]
    names = ("mean_before", "mean_after", "std_before", "std_after") if change.spreads else ("before", "after")
    kind = "box" if change.spreads else "discrete"
    return {"kind": kind, "labels": list(change.names), **dict(zip(names, columns, strict=True))}


def name_target(target: Any) -> str:
    """Return what a target of a run's configuration raises, in words; another target's own name."""
    name = target.get("target") if isinstance(target, Mapping) else target
    return TARGETS.get(str(name or "Return"), cut_text(str(show(target)), 80))


def format_number(number: float | None) -> str:
    """Return a number at three digits; a dash if there is none."""
    return "–" if number is None or not isfinite(number) else f"{number:.3g}"


def describe_score(score: float, error: float | None) -> str:
    """Return a score with its error and whether it can be told from 0, in words."""
    if not isfinite(score):
        return "not computed"
    effect = "training on it lowers the target" if score < 0 else "training on it raises the target"
    if error is None:
        return f"{score:.3g} (error not known), {effect}"
    return f"{score:.3g} ± {error:.2g}, {effect if is_significant(score, error) else 'cannot be told from 0'}"


def describe_training(row: Mapping[str, Any]) -> dict[str, str]:
    """Return whether a record trained, in words under its name; nothing where that is not known."""
    if row.get("keep") is None:
        return {}
    return {"trained": "yes" if row["keep"] else ": ".join(["no, dropped", *filter(None, [row.get("reason")])])}
