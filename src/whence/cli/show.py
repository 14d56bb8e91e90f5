"""`whence show`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import polars as pl
import typer

from whence.cli.console import console, errors, make_table, print_error_line, print_json, print_line
from whence.cli.moment_tables import describe_moment, describe_view, make_group_table, print_language_moment, print_view
from whence.cli.options import AsJson, ReplayEnv
from whence.errors import WhenceError, suggest
from whence.moments import By, Moment, find_moment, find_moments, group_scores
from whence.runs import RunDirectory


def show(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    round: Annotated[
        int | None,
        typer.Option(
            help="The round, from 1. (default: that of --record or --episode, or the last)", show_default=False
        ),
    ] = None,
    record: Annotated[int | None, typer.Option(help="Show this record's moment.", show_default=False)] = None,
    episode: Annotated[int | None, typer.Option(help="Only moments of this episode.", show_default=False)] = None,
    top: Annotated[
        int | None,
        typer.Option(help="List this many most helpful moments, and show the first.", min=1, show_default=False),
    ] = None,
    bottom: Annotated[
        int | None,
        typer.Option(help="List this many most harmful moments, and show the first.", min=1, show_default=False),
    ] = None,
    by: Annotated[str, typer.Option(help="Group scores: action, episode, region, reward or step.")] = "action",
    changed: Annotated[
        bool, typer.Option("--changed", help="List the states in which the round changed most.")
    ] = False,
    continuations: Annotated[int, typer.Option(help="Fresh rollouts that measure the advantage; 0: none.", min=0)] = 16,
    out: Annotated[
        Path | None, typer.Option(help="Draw the moment: .png, or .gif to see it move.", show_default=False)
    ] = None,
    env: ReplayEnv = None,
    json: AsJson = False,
) -> None:
    """Show one moment of a run: what the agent saw and did, what it scored, and what the round changed.

    Without options, it is the most harmful moment of the last round. A moment is a stretch of an episode whose records
    score alike; its face is the record of the largest score.

    Example: whence show runs/lander --round 5 --out moment.png
    """
    _check_options(record, episode, top, bottom, by, continuations, out)
    directory = RunDirectory.open(run)
    number = find_round(directory, round, record, episode)
    records = _read_scored(directory, number, env)
    moments = list_moments(records, record, episode, top, bottom)
    if not moments:
        raise WhenceError(
            f"Round {number} of {run} has no such moment: its records were not scored, or none of them scores on that "
            "side of 0. Name a record with --record."
        )
    if directory.is_language:
        _show_response(directory, records, moments, number=number, out=out, json=json)
        return
    options = _Options(cast(By, by), changed, continuations, out, env, json, is_list=bool(top or bottom))
    _show_step(directory, number, records, moments, options)


def _check_options(
    record: int | None,
    episode: int | None,
    top: int | None,
    bottom: int | None,
    by: str,
    continuations: int,
    out: Path | None,
) -> None:
    flags = [name for name, value in (("--record", record), ("--top", top), ("--bottom", bottom)) if value is not None]
    if len(flags) > 1 or (record is not None and episode is not None):
        both = " and ".join(flags if len(flags) > 1 else ["--record", "--episode"])
        raise WhenceError(f"{both} exclude each other; give one of them.")
    if by not in get_args(By):
        raise WhenceError(f"--by is {by!r}.{suggest(by, get_args(By))}")
    if continuations == 1:
        raise WhenceError("--continuations is 1; an error needs at least 2, and 0 measures nothing.")
    if out is not None:
        from whence.page.pictures.moment_picture import check_picture_name

        check_picture_name(out)


def find_round(run: RunDirectory, number: int | None, record: int | None, episode: int | None) -> int:
    """Return the round asked for: by its number, by a record or an episode in it, or the last."""
    rounds = run.require_rounds()
    if number is not None or (record is None and episode is None):
        return rounds[-1] if number is None else number
    name, value = ("record_id", record) if record is not None else ("episode_id", episode)
    for candidate in reversed(rounds):
        table = run.round("records", candidate)
        if name in table.columns and not table.filter(pl.col(name) == value).is_empty():
            return candidate
    what = "record" if record is not None else "episode"
    raise WhenceError(
        f"No round of {run.path} holds {what} {value}; it holds rounds {rounds[0]} to {rounds[-1]}. See the moments "
        "of a round with --bottom 10."
    )


def _read_scored(run: RunDirectory, number: int, env: str | None) -> pl.DataFrame:
    """Return a round's records; an agent's are scored now if they were not, and what was done is said."""
    records = run.round("records", number)
    if "score" in records.columns or run.is_language:
        return records
    from whence.page.explorer.explored_run import ExploredRun

    with errors.status("Scoring the round …"):
        round = ExploredRun(run, env=env).round(number)
    for note in round.notes:
        print_error_line(note)
    return round.table


def list_moments(
    records: pl.DataFrame, record: int | None, episode: int | None, top: int | None, bottom: int | None
) -> list[Moment]:
    """Return the moments asked for; the first is the one to show."""
    if record is not None:
        return [find_moment(records, record)]
    if episode is not None:
        records = (
            records.filter(pl.col("episode_id") == episode) if "episode_id" in records.columns else records.head(0)
        )
    moments = find_moments(records, lowest=top is None, most=top or bottom or 1)
    if moments or episode is None or top or bottom:
        return moments
    return find_moments(records, lowest=False, most=1)  # nothing in this episode harmed


@dataclass(frozen=True)
class _Options:
    """What is shown of a moment besides itself; see the options of `show`."""

    by: By
    changed: bool
    continuations: int
    out: Path | None
    env: str | None
    json: bool
    is_list: bool


def _show_step(run: RunDirectory, number: int, records: pl.DataFrame, moments: list[Moment], options: _Options) -> None:
    """Show the first of some moments of an agent's run."""
    from whence.experiments.rl.labels import action_labels, state_names
    from whence.page.moment_view import choose_frames, find_env, gather_moment, read_changes, read_window

    out = options.out
    name = find_env(run, options.env)
    labels = action_labels(name)
    window = read_window(records, moments[0])
    steps = [] if out is None else choose_frames(window, moments[0])
    if out is not None and out.suffix.lower() == ".gif" and steps:
        steps = window["step"].to_list()
    with errors.status("Reading the moment …"):
        changes = read_changes(run, number, options.env)
        view = gather_moment(
            run,
            number,
            records,
            moments[0],
            env=options.env,
            changes=changes,
            continuations=options.continuations,
            steps=steps,
        )
        groups = group_scores(records, options.by, labels=labels, names=state_names(name))
        if out is not None:
            from whence.page.pictures.moment_picture import draw_moment

            draw_moment(view, out)
    rows = [] if changes.table is None or not options.changed else changes.table.head(10).to_dicts()
    if options.json:
        content = {"run": str(run.path), "round": number, "moment": describe_view(view)}
        content |= {"by": options.by, "groups": groups.to_dicts()}
        content |= {"moments": [describe_moment(moment, labels) for moment in moments]} if options.is_list else {}
        content |= {"changed": rows} if options.changed else {}
        print_json(content | ({} if out is None else {"picture": str(out)}))
        return
    if options.is_list:
        _print_list(moments, labels, lowest=moments[0].score < 0)
    print_view(view)
    if not groups.is_empty():
        console.print(make_group_table(groups, options.by))
    if options.changed:
        _print_changes(rows, records, changes.note, labels)
    if out is None:
        command = f"whence show {run.path} --round {number} --record {moments[0].record_id} --out moment.png"
        print_line(f"As a picture, or as a .gif: {command}")
    else:
        print_line(f"Picture: {out}")


def _print_list(moments: list[Moment], labels: list[str] | None, *, lowest: bool) -> None:
    rows = []
    for moment in moments:
        about = describe_moment(moment, labels)
        steps = f"{moment.first_step}–{moment.last_step}" if moment.records > 1 else moment.step
        error = "" if moment.error is None else f" ± {moment.error:.2g}"
        rows.append(
            [moment.record_id, moment.episode_id, steps, about["action"], f"{moment.score:.3g}{error}", moment.dropped]
        )
    title = f"The {len(moments)} most {'harmful' if lowest else 'helpful'} moments"
    console.print(make_table(title, ["record", "episode", "steps", "action", "score", "dropped"], rows))


def _print_changes(
    rows: list[dict[str, Any]], records: pl.DataFrame, note: str | None, labels: list[str] | None
) -> None:
    from whence.cli.moment_tables import describe_change

    if not rows:
        print_line(note or "The round changed nothing.")
        return
    table = records.select("record_id", *(name for name in ("step", "episode_id") if name in records.columns))
    steps = {row["record_id"]: row for row in table.to_dicts()}
    cells = [
        [
            *(row["record_id"], steps[row["record_id"]].get("episode_id"), steps[row["record_id"]].get("step")),
            *(f"{row['divergence']:.3g}", describe_change(row, labels)),
            f"{row['value_before']:.3g} → {row['value_after']:.3g}",
        ]
        for row in rows
    ]
    headings = ["record", "episode", "step", "KL", "policy", "value"]
    console.print(make_table("The states in which the round changed the policy most", headings, cells))


def _show_response(
    run: RunDirectory, records: pl.DataFrame, moments: list[Moment], *, number: int, out: Path | None, json: bool
) -> None:
    """Show a language model's response: it has neither steps nor frames."""
    if out is not None:
        raise WhenceError("--out draws steps of an environment, and this is a language model's run. Leave it out.")
    rows = [records.filter(pl.col("record_id") == moment.record_id).to_dicts()[0] for moment in moments]
    if json:
        print_json({"run": str(run.path), "round": number, "moments": rows})
        return
    for row in rows:
        print_language_moment(row, number)
