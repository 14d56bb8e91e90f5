"""`whence show`."""

from pathlib import Path
from typing import Annotated

import typer

from whence import page
from whence.causes import check_kind
from whence.cli import terminal
from whence.cli.terminal import options
from whence.core import WhenceError
from whence.page import pictures
from whence.runs import RunDirectory
from whence.scores import find_moment, find_moments


def show(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    round: options.Round = None,
    record: Annotated[int | None, options.optional(help="Show this record's moment.")] = None,
    top: Annotated[
        int | None, options.optional(help="List this many most helpful moments, and show the first.", min=1)
    ] = None,
    bottom: Annotated[
        int | None, options.optional(help="List this many most harmful moments, and show the first.", min=1)
    ] = None,
    trust: options.Trust = False,
    json: options.AsJson = False,
    out: Annotated[Path | None, options.agents_option(help="Draw the moment: .png, or .gif to see it move.")] = None,
    continuations: Annotated[
        int, options.agents_option(help="Fresh rollouts that measure the advantage; 0: none. (default: 16)", min=0)
    ] = 16,
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
) -> None:
    """Show one moment of a run: what the agent saw and did, what it scored, and what the round changed.

    Without options, it is the most harmful moment of the last round: the one that is surest to harm, by its score over
    its error, as on the run's page. A moment is a stretch of an episode whose records score alike; its face is the
    record of the surest score.

    Example: whence show runs/lander --round 5 --out moment.png
    """
    if [record, top, bottom].count(None) < 2:
        raise WhenceError("--record, --top and --bottom exclude each other; give one of them.")
    if out is not None:
        pictures.check_picture_name(out, ".png", ".gif")
    explored = page.ExploredRun(RunDirectory.open(run, trust=trust), env=env)
    check_kind(explored.directory, agents={"--out": out, "--env": env})
    number = terminal.find_round(explored.directory, round, record)
    with terminal.errors.status("Reading the round …"):
        table = explored.round(number).table
    for note in explored.round(number).notes:
        terminal.print_line(note, terminal.errors)
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
            terminal.print_json({"run": str(run), "round": number, "moments": rows})
        for row in () if json else rows:
            terminal.print_response(row, number)
        return
    face, window = moments[0], page.read_window(table, moments[0])
    steps = [] if out is None else page.choose_frames(window, face)
    if out is not None and out.suffix.lower() == ".gif" and steps:
        steps = window["step"].to_list()
    with terminal.errors.status("Reading the moment …"):
        view = page.gather_moment(explored, number, face, rollouts=continuations, steps=steps)
        if out is not None:
            pictures.draw_moment(view, out)
    if json:
        moment = page.describe_view(view) | {"window": page.list_curves(view.window, explored.labels)}
        listed = [page.describe_moment(each, explored.labels) for each in moments]
        content = {"run": str(run), "round": number, "moment": moment, "moments": listed}
        terminal.print_json(content | ({} if out is None else {"picture": str(out)}))
        return
    if top or bottom:
        terminal.print_moments(moments, explored.labels)
    terminal.print_view(view)
    if out is not None:
        terminal.print_line(f"Picture: {out}")
