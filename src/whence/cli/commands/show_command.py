"""`whence show`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import polars as pl
import typer

from whence.cli.console import console, errors, make_table, print_error_line, print_json, print_line
from whence.cli.moment_tables import list_cells, make_group_table, print_response, print_view
from whence.cli.options import AsJson, ReplayEnv
from whence.errors import WhenceError, suggest
from whence.moments import By, Moment, find_moment, find_moments, group_scores, name_action
from whence.runs import RunDirectory

if TYPE_CHECKING:
    from whence.page.explored_run import ExploredRun


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
    from whence.page.explored_run import ExploredRun

    explored = ExploredRun(run, env=env)
    number = find_round(explored.directory, round, record, episode)
    with errors.status("Reading the round …"):
        shown = explored.round(number)
    for note in shown.notes:
        print_error_line(note)
    moments = list_moments(shown.table, record, episode, top, bottom)
    if not moments:
        raise WhenceError(
            f"Round {number} of {run} has no such moment: its records were not scored, or none of them scores on that "
            "side of 0. Name a record with --record."
        )
    if explored.is_language:
        if out is not None:
            raise WhenceError("--out draws steps of an environment, and this is a language model's run. Leave it out.")
        rows = [explored.record(number, moment.record_id) for moment in moments]
        if json:
            print_json({"run": str(run), "round": number, "moments": rows})
        for row in () if json else rows:
            print_response(row, number)
        return
    content = _show_step(
        explored, number, moments, cast(By, by), changed, continuations, out, bool(top or bottom), json
    )
    if json:
        print_json(content)


def _check_options(
    record: int | None,
    episode: int | None,
    top: int | None,
    bottom: int | None,
    by: str,
    continuations: int,
    out: Path | None,
) -> None:
    chosen = {"--record": record, "--episode": episode, "--top": top, "--bottom": bottom}
    flags = [name for name, value in chosen.items() if value is not None]
    if len(flags) > 1 and (record is not None or None not in (top, bottom)):
        both = [flag for flag in flags if record is not None or flag != "--episode"][:2]
        raise WhenceError(f"{' and '.join(both)} exclude each other; give one of them.")
    if by not in get_args(By):
        raise WhenceError(f"--by is {by!r}.{suggest(by, get_args(By))}")
    if continuations == 1:
        raise WhenceError("--continuations is 1; an error needs at least 2, and 0 measures nothing.")
    if out is not None:
        from whence.page.pictures.canvas import check_picture_name

        check_picture_name(out, ".png", ".gif")


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


def _show_step(
    run: "ExploredRun",
    number: int,
    moments: list[Moment],
    by: By,
    changed: bool,
    continuations: int,
    out: Path | None,
    is_list: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Draw and print the first of some moments of an agent's run, and return it in JSON types."""
    from whence.page.explorer.detail import describe_view
    from whence.page.explorer.rounds import describe_moment
    from whence.page.moment_view import choose_frames, gather_moment, read_change, read_window
    from whence.page.pictures.moment_picture import draw_moment

    records = run.round(number).table
    face = moments[0]
    window = read_window(records, face)
    steps = [] if out is None else choose_frames(window, face)
    if out is not None and out.suffix.lower() == ".gif" and steps:
        steps = window["step"].to_list()
    with errors.status("Reading the moment …"):
        view = gather_moment(run, number, face, rollouts=continuations, steps=steps)
        groups = group_scores(records, by, labels=run.labels, names=run.state_names)
        if out is not None:
            draw_moment(view, out)
    changes = run.changes(number).head(10).to_dicts() if changed and view.policy is not None else []
    if not quiet:
        if is_list:
            _print_list(moments, run.labels)
        print_view(view)
        if not groups.is_empty():
            console.print(make_group_table(groups, by))
        if changed:
            texts = [read_change(run, row) for row in changes]
            told = ["" if text is None else text.describe_largest("{:.2f}".format, 2) for text in texts]
            _print_changes(changes, told, records, view.policy_note)
        command = f"whence show {run.directory.path} --round {number} --record {face.record_id} --out moment.png"
        print_line(f"As a picture, or as a .gif: {command}" if out is None else f"Picture: {out}")
    content = {"run": str(run.directory.path), "round": number, "by": by, "groups": groups.to_dicts()}
    content["moment"] = describe_moment(face, run.labels) | describe_view(view, run, with_window=True)
    content |= {"moments": [describe_moment(moment, run.labels) for moment in moments]} if is_list else {}
    content |= {"changed": changes} if changed else {}
    return content | ({} if out is None else {"picture": str(out)})


def _print_list(moments: list[Moment], labels: list[str] | None) -> None:
    rows = []
    for moment in moments:
        error = "" if moment.error is None else f" ± {moment.error:.2g}"
        score, action = f"{moment.score:.3g}{error}", name_action(moment.action, labels)
        rows.append([*list_cells(moment), action, score, moment.dropped])
    title = f"The {len(moments)} most {'harmful' if moments[0].score < 0 else 'helpful'} moments"
    console.print(make_table(title, ["record", "episode", "steps", "action", "score", "dropped"], rows))


def _print_changes(rows: list[dict[str, Any]], texts: list[str], records: pl.DataFrame, note: str | None) -> None:
    if not rows:
        print_line(note or "The round changed nothing.")
        return
    steps = {row["record_id"]: row for row in records.select("record_id", "^(step|episode_id)$").to_dicts()}
    cells = [
        [
            *(row["record_id"], steps[row["record_id"]].get("episode_id"), steps[row["record_id"]].get("step")),
            *(f"{row['divergence']:.3g}", text, f"{row['value_before']:.3g} → {row['value_after']:.3g}"),
        ]
        for row, text in zip(rows, texts, strict=True)
    ]
    headings = ["record", "episode", "step", "KL", "policy", "value"]
    console.print(make_table("The states in which the round changed the policy most", headings, cells))
