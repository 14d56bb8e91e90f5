"""`whence show`."""

from pathlib import Path
from typing import Annotated

import typer

from whence.cli.terminal import (
    AsJson,
    ReplayEnv,
    Trust,
    errors,
    find_round,
    print_json,
    print_line,
    print_moments,
    print_response,
    print_view,
)
from whence.core import WhenceError
from whence.page import (
    ExploredRun,
    choose_frames,
    describe_moment,
    describe_view,
    gather_moment,
    list_curves,
    pictures,
    read_window,
)
from whence.runs import RunDirectory
from whence.scores import find_moment, find_moments


def show(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    round: Annotated[
        int | None, typer.Option(help="The round, from 1. (default: that of --record, or the last)", show_default=False)
    ] = None,
    record: Annotated[int | None, typer.Option(help="Show this record's moment.", show_default=False)] = None,
    top: Annotated[
        int | None,
        typer.Option(help="List this many most helpful moments, and show the first.", min=1, show_default=False),
    ] = None,
    bottom: Annotated[
        int | None,
        typer.Option(help="List this many most harmful moments, and show the first.", min=1, show_default=False),
    ] = None,
    continuations: Annotated[int, typer.Option(help="Fresh rollouts that measure the advantage; 0: none.", min=0)] = 16,
    out: Annotated[
        Path | None, typer.Option(help="Draw the moment: .png, or .gif to see it move.", show_default=False)
    ] = None,
    env: ReplayEnv = None,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Show one moment of a run: what the agent saw and did, what it scored, and what the round changed.

    Without options, it is the most harmful moment of the last round. A moment is a stretch of an episode whose records
    score alike; its face is the record of the largest score.

    Example: whence show runs/lander --round 5 --out moment.png
    """
    if [record, top, bottom].count(None) < 2:
        raise WhenceError("--record, --top and --bottom exclude each other; give one of them.")
    if out is not None:
        pictures.check_picture_name(out, ".png", ".gif")
    explored = ExploredRun(RunDirectory.open(run, trust=trust), env=env)
    if out is not None and explored.is_language:
        raise WhenceError(f"{run} is a language model's run, and responses have no picture. Leave out --out.")
    number = find_round(explored.directory, round, record)
    with errors.status("Reading the round …"):
        table = explored.round(number).table
    for note in explored.round(number).notes:
        print_line(note, errors)
    if record is not None:
        moments = [find_moment(table, record)]
    else:
        moments = find_moments(table, lowest=top is None, most=top or bottom or 1)
    if not moments:
        raise WhenceError(
            f"Round {number} of {run} has no such moment: its records were not scored, or none of them scores on that "
            "side of 0. Name a record with --record."
        )
    if explored.is_language:
        rows = [explored.record(number, moment.record_id) for moment in moments]
        if json:
            print_json({"run": str(run), "round": number, "moments": rows})
        for row in () if json else rows:
            print_response(row, number)
        return
    face, window = moments[0], read_window(table, moments[0])
    steps = [] if out is None else choose_frames(window, face)
    if out is not None and out.suffix.lower() == ".gif" and steps:
        steps = window["step"].to_list()
    with errors.status("Reading the moment …"):
        view = gather_moment(explored, number, face, rollouts=continuations, steps=steps)
        if out is not None:
            pictures.draw_moment(view, out)
    if json:
        moment = describe_view(view) | {"window": list_curves(view.window, explored.labels)}
        listed = [describe_moment(each, explored.labels) for each in moments]
        content = {"run": str(run), "round": number, "moment": moment, "moments": listed}
        print_json(content | ({} if out is None else {"picture": str(out)}))
        return
    if top or bottom:
        print_moments(moments, explored.labels)
    print_view(view)
    if out is not None:
        print_line(f"Picture: {out}")
