"""One record, opened: its surroundings, state, policy, advantage and frames."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

from whence.errors import RunDirectoryError, WhenceError, first_line
from whence.influence import is_significant
from whence.page.explorer import opening, parts
from whence.page.explorer.columns import name_action, round_number, round_numbers, short_text
from whence.page.explorer.explored_run import ExploredRun, Round
from whence.page.explorer.frames import choose_steps, encode_frames
from whence.page.explorer.responses import describe_response, list_group, name_target
from whence.page.explorer.rounds import changes_of
from whence.sb3.episodes.episode_replay import EpisodeReplay

WINDOW = 24
"""Records before and after the opened one that are shown, of the same episode and round."""

STATE = 64
"""Entries of a state that are shown at most."""

CONTINUATIONS = 16
"""Rollouts from the opened state by which its advantage is measured."""


class Frames(NamedTuple):
    """What a replay gave of a moment: the frames in JSON types, or why there are none."""

    frames: dict[str, Any] | None
    note: str | None


NOT_EMBEDDED = Frames(None, "This file has frames of the three worst and the three best moments of a round.")


def build_detail(
    run: ExploredRun,
    number: int,
    record: int,
    *,
    frames: bool | Frames = True,
    continuations: int = CONTINUATIONS,
    window: bool = True,
    group: bool = True,
) -> dict[str, Any]:
    """Return a record and what surrounds it in JSON types, as the page's contract has it.

    Args:
        run: the run.
        number: the round.
        record: the record's id.
        frames: whether to replay the episode; or the frames that a replay gave before.
        continuations: rollouts for the measured advantage; 0: it is not measured.
        window: whether the surrounding records are included.
        group: of a language model's run, whether the other responses to the same prompt are included.

    Raises:
        RunDirectoryError: the round or the record is not there.
    """
    records = run.round(number)
    row = _find_row(records, record, run)
    labels = run.labels()
    notes: list[str] = []
    detail = {
        "record": record,
        "round": number,
        "episode": row.get("episode_id"),
        "env": row.get("env_index"),
        "step": row.get("step"),
        "action": name_action(row.get("action"), labels) or "–",
        "dropped": row.get("keep") is False,
        "weight": round_number(row.get("weight")),
        "reason": None if row.get("reason") is None else short_text(row["reason"]),
        "window": _build_window(run, records, row) if window else None,
        "advantage": round_number(row.get("advantage")),
        "targets": _list_targets(run, row),
    }
    if run.is_language:
        return detail | _describe_language(records, row, group=group)
    state = opening.attempt(lambda: _list_state(run, row), notes, "", [])
    detail |= {"state": state[:STATE], "state_size": len(state)}
    detail |= _describe_policy(run, number, row)
    detail |= measure_advantage(run, number, record, continuations)
    if isinstance(frames, Frames):
        shown = frames
    elif frames:
        shown = replay_frames(run, row)
    else:
        shown = NOT_EMBEDDED
    return detail | {"frames": shown.frames, "frames_note": shown.note}


def _describe_language(records: Round, row: Mapping[str, Any], *, group: bool) -> dict[str, Any]:
    """Return what a response has, and nothing of what only steps in an environment have."""
    steps: dict[str, Any] = {"state": [], "policy": None, "value_before": None, "value_after": None}
    steps |= {"frames": None, "frames_note": None, "mc_advantage": None, "mc_error": None, "mc_text": None}
    others = {"group": list_group(records, row.get("prompt"))} if group else {}
    return steps | describe_response(row) | others


def measure_advantage(run: ExploredRun, number: int, record: int, continuations: int) -> dict[str, Any]:
    """Return the advantage that fresh rollouts measure, its error, and how it was had or why not."""
    if continuations < 1:
        text = f"`whence view {run.directory.path}` measures it by fresh rollouts when a record is opened."
        return {"mc_advantage": None, "mc_error": None, "mc_text": text}
    key = ("advantage", number, record, continuations)
    try:
        mean, error = run.remember(
            key,
            (opening.locate_records(run.directory, number),),
            lambda: parts.estimate_advantage(
                run.directory, number, record, env=run.env, continuations=continuations, seed=0
            ),
        )
    except (WhenceError, *opening.FOREIGN) as refusal:
        return describe_unmeasured(first_line(refusal))
    return describe_advantage(mean, error, continuations)


def describe_unmeasured(reason: str) -> dict[str, Any]:
    """Return in JSON types why fresh rollouts did not measure an advantage."""
    return {"mc_advantage": None, "mc_error": None, "mc_text": f"Not measured by fresh rollouts: {reason}"}


def describe_advantage(mean: float, error: float, continuations: int) -> dict[str, Any]:
    """Return in JSON types the advantage that fresh rollouts measured."""
    text = (
        f"Mean of {continuations} fresh rollouts that take this action, minus that of {continuations} that follow the "
        "policy, from the same state."
    )
    return {"mc_advantage": round_number(mean), "mc_error": round_number(error), "mc_text": text}


def replay_frames(run: ExploredRun, row: Mapping[str, Any], **encoding: Any) -> Frames:
    """Replay an episode and return its frames around one record.

    Args:
        run: the run.
        row: the record, with `episode_id` and `step`.
        encoding: passed to `encode_frames`.
    """
    episode, step = row.get("episode_id"), row.get("step")
    if episode is None or step is None:
        return Frames(None, "The record's episode or its position there is not known, so it cannot be replayed.")
    steps = choose_steps(step)
    replay, note = replay_steps(run, episode, steps)
    if replay is None:
        return Frames(None, note)
    return pick_frames(replay, step, steps, **encoding)


def replay_steps(run: ExploredRun, episode: int, steps: list[int]) -> tuple[EpisodeReplay | None, str | None]:
    """Return an episode's replay with the frames of some steps; or None, and why there is none."""
    try:
        with run.lock:
            replay = parts.replay_episode(run.directory, episode, env=run.env, frames=steps, last_step=max(steps))
    except (WhenceError, *opening.FOREIGN) as refusal:
        return None, f"No frames: {first_line(refusal)}"
    return replay, None


def pick_frames(replay: EpisodeReplay, step: int, steps: list[int], **encoding: Any) -> Frames:
    """Return the frames of a replay around a step, in JSON types, with the replay's own reservations."""
    shown = [at for at in steps if at in replay.frames]
    note = replay.mismatch or replay.frames_note
    if step not in shown:
        return Frames(None, note or "The replay ended before this step.")
    images, width, height = encode_frames([replay.frames[at] for at in shown], **encoding)
    frames = {"steps": shown, "face": shown.index(step), "width": width, "height": height, "images": images}
    return Frames(frames, note)


def _find_row(records: Round, record: int, run: ExploredRun) -> dict[str, Any]:
    """Return a record's row of the round's table."""
    ids = records.table["record_id"]
    places = (ids == record).arg_true()
    if not len(places):
        raise RunDirectoryError(f"Round {records.number} of {run.directory.path} has no record {record}.")
    return records.table.row(int(places[0]), named=True)


def _build_window(run: ExploredRun, records: Round, row: Mapping[str, Any]) -> dict[str, Any]:
    table = records.table
    episode, step = row.get("episode_id"), row.get("step")
    if episode is None or step is None:
        around = table.filter(pl.col("record_id") == row["record_id"])
    else:
        same = (pl.col("episode_id") == episode) & pl.col("step").is_between(step - WINDOW, step + WINDOW)
        if row.get("env_index") is not None:
            same = same & (pl.col("env_index") == row["env_index"])
        around = table.filter(same).sort("step").head(2 * WINDOW + 1)
    return {"record_ids": around["record_id"].to_list(), **list_curves(around, run, digits=6)}


def list_curves(table: pl.DataFrame, run: ExploredRun, digits: int) -> dict[str, Any]:
    """Return records' numbers as arrays in the table's order; a column that is not there holds nulls."""

    def numbers(name: str) -> list[Any]:
        return round_numbers(table[name].to_list(), digits) if name in table.columns else [None] * len(table)

    keep = table["keep"].to_list() if "keep" in table.columns else [None] * len(table)
    actions = table["action"].to_list() if "action" in table.columns else [None] * len(table)
    return {
        "steps": numbers("step"),
        "rewards": numbers("reward"),
        "values": numbers("value"),
        "advantages": numbers("advantage"),
        "scores": numbers("score"),
        "errors": numbers("error"),
        "dropped": [int(kept is False) for kept in keep],
        "actions": [name_action(action, run.labels()) or "–" for action in actions],
    }


def _list_targets(run: ExploredRun, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if row.get("score") is None:
        return []
    score, error = row["score"], row.get("error")
    target = run.directory.config.get("target")
    name = short_text(
        name_target(target) if run.is_language else "return" if target in (None, "Return()") else target, 80
    )
    numbers = {"score": round_number(score), "error": round_number(error)}
    return [{"name": name, **numbers, "significant": is_significant(score, error)}]


def _list_state(run: ExploredRun, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stored observation's entries by name, as `read_axes` names those that have none."""
    state: list[dict[str, Any]] = []
    names = run.state_names()
    for column, value in row.items():
        if column.split(".")[0] != "observation" or value is None:
            continue
        prefix = column.removeprefix("observation").removeprefix(".")
        entries = _flatten(value)
        for index, entry in enumerate(entries):
            named = names[index] if names and not prefix and len(names) == len(entries) else None
            many = f"{prefix}[{index}]" if prefix else f"x{index}"
            name = named or (many if len(entries) > 1 else prefix or "state")
            state.append({"name": name, "value": short_text(entry) if isinstance(entry, str) else round_number(entry)})
    return state


def _flatten(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    return [entry for part in value for entry in _flatten(part)]


def _describe_policy(run: ExploredRun, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy and the value in a record's state, before and after the round."""
    nothing = {"policy": None, "value_before": round_number(row.get("value")), "value_after": None}
    try:
        rows = changes_of(run, number).filter(pl.col("record_id") == row["record_id"]).to_dicts()
    except (WhenceError, *opening.FOREIGN):
        return nothing
    if not rows:
        return nothing
    change = rows[0]
    values = {name: round_number(change.get(name)) for name in ("value_before", "value_after")}
    before, after = change.get("before"), change.get("after")
    if before is not None:
        labels = run.labels()
        labels = labels if labels and len(labels) == len(before) else [str(k) for k in range(len(before))]
        policy: dict[str, Any] = {"kind": "discrete", "labels": labels, "before": round_numbers(before, 4)}
        return values | {"policy": policy | {"after": None if after is None else round_numbers(after, 4)}}
    if change.get("mean_before") is not None:
        names = ("mean_before", "std_before", "mean_after", "std_after")
        numbers = {name: None if change.get(name) is None else round_numbers(change[name], 4) for name in names}
        count = len(change["mean_before"])
        labels = run.box_labels()
        labels = labels if labels and len(labels) == count else [f"action[{k}]" for k in range(count)]
        return values | {"policy": {"kind": "box", "labels": labels, **numbers}}
    return nothing | values
