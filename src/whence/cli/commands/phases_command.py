"""`whence phases`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whence.cli import options
from whence.cli.console import console, make_printable, make_table, print_json, print_line
from whence.cli.progress import RoundBar
from whence.errors import WhenceError
from whence.page.moment_view import format_number

if TYPE_CHECKING:
    from whence.diagnosis import Behaviour
    from whence.runs import RunDirectory


def phases(
    run: Annotated[
        Path, typer.Argument(help="A run directory: of `whence train`, `whence compare`, or of a callback.")
    ],
    record: Annotated[
        list[int] | None,
        typer.Option(
            help="The behaviour: what was done in this record; may be repeated for records of one round.",
            show_default=False,
        ),
    ] = None,
    observation: Annotated[
        str | None, typer.Option(help="The behaviour: in this observation …", metavar="JSON", show_default=False)
    ] = None,
    action: Annotated[
        str | None,
        typer.Option(help="… this action; with --record, in its state.", metavar="JSON", show_default=False),
    ] = None,
    find: Annotated[
        int | None,
        typer.Option(help="Find this many behaviours that training raised. (default: 1)", min=1, show_default=False),
    ] = None,
    neighbours: Annotated[
        int, typer.Option(help="Nearest neighbours that a record is compared with; LDA: 20 to 100.", min=1)
    ] = 50,
    out: Annotated[
        Path | None, typer.Option(help="Draw curves and moments into this .png file.", show_default=False)
    ] = None,
    env: options.ReplayEnv = None,
    engine: options.Engine = None,
    json: options.AsJson = False,
) -> None:
    """Tell when a behaviour arose and from which records: its probability, its scores' roughness, its phases.

    A behaviour is an action in a state. Each round's records are scored for it. Roughness is low where records in
    similar states score alike; it is compared with that of permuted scores. What was measured is also written into the
    run directory, where the run's page finds it.

    Example: whence phases runs/lander --record 8210 --out phases.png
    """
    from whence.cli.runs import open_agent_run
    from whence.diagnosis import summarise_history, trace_phases, write_history
    from whence.page.explored_run import ExploredRun

    if out is not None and out.suffix.lower() != ".png":
        raise WhenceError(f"--out is {out}; its name has to end in .png.")
    directory = open_agent_run(run)
    behaviours = _read_behaviours(directory, record, observation, action, find, env)
    with RoundBar("rounds", "scoring") as bar:
        histories = trace_phases(
            directory, behaviours, neighbours=neighbours, engine=engine or "auto", env=env, on_round=bar.update
        )
    labels = ExploredRun(directory, env=env).labels
    contents = [summarise_history(history, labels) for history in histories]
    files = [write_history(directory, history, content) for history, content in zip(histories, contents, strict=True)]
    pictures = [] if out is None else _draw(directory, contents, out, env)
    if json:
        print_json({"run": str(run), "histories": contents, "pictures": list(map(str, pictures))})
        return
    for content in contents:
        print_history(content)
    for name, paths in (("Numbers", files), ("Picture", pictures)):
        for path in paths:
            print_line(f"{name}: {path}")


def _read_behaviours(
    run: "RunDirectory",
    record: Sequence[int] | None,
    observation: str | None,
    action: str | None,
    find: int | None,
    env: str | None,
) -> "list[Behaviour]":
    """Return the behaviours that options name, or find some."""
    from whence.diagnosis import behaviour_by_hand, behaviour_of_records, find_behaviours

    settings = options.parse_action(observation, action)
    if find is not None and (record or settings):
        raise WhenceError(
            "--find looks for behaviours; --record, or --observation and --action, name one. Give either."
        )
    if record and observation is not None:
        raise WhenceError("Give --record, or --observation and --action; not both.")
    if record:
        return [behaviour_of_records(run, record, action=settings.get("action"), env=env)]
    if not settings:
        return find_behaviours(run, find or 1, env=env)
    if len(settings) == 1:
        raise WhenceError("A behaviour needs --observation and --action as JSON, or --record ID.")
    return [behaviour_by_hand(run, **settings, env=env)]


def _draw(run: "RunDirectory", contents: Sequence[dict[str, Any]], out: Path, env: str | None) -> list[Path]:
    """Draw a picture of each history: OUT, OUT-2 and so on."""
    from whence.cli.console import errors
    from whence.page.pictures.phase_picture import draw_picture

    paths = [out if place == 1 else out.with_stem(f"{out.stem}-{place}") for place in range(1, len(contents) + 1)]
    with errors.status("Playing the moments again …"):
        for content, path in zip(contents, paths, strict=True):
            draw_picture(run, content, path, env=env)
    return paths


def print_history(content: dict[str, Any]) -> None:
    """Print a summary of `summarise_history`: sentences, the phases, and the top moments of each."""
    for sentence in content["sentences"]:
        print_line(make_printable(sentence))
    kind = "log-density" if content["is_density"] else "π(a|s)"
    rows = [
        [
            *(_name_rounds(phase), f"{phase['roughness']:.3g}", format_number(phase["relative"])),
            f"{_rate(phase['log_prob'], content)} → {_rate(phase['log_prob_after'], content)}",
        ]
        for phase in content["phases"]
    ]
    headings = ["rounds", "roughness", "/ permuted", kind]
    console.print(make_table("Phases", headings, rows))
    moments = [
        [
            *(_name_rounds(phase), moment["round"], moment["record"], moment["episode_id"], _name_steps(moment)),
            *(make_printable(moment["action"]), f"{format_number(moment['advantage'])}, {moment['score']:.3g}"),
        ]
        for phase in content["phases"]
        for moment in phase["moments"]
    ]
    headings = ["phase", "round", "record", "episode", "steps", "action", "raw advantage, score"]
    console.print(make_table("Moments that raised the behaviour most, in each phase", headings, moments))


def _name_rounds(phase: dict[str, Any]) -> str:
    return f"{phase['first']}–{phase['last']}"


def _name_steps(moment: dict[str, Any]) -> str | None:
    if moment["records"] > 1:
        return f"{moment['first_step']}–{moment['last_step']}"
    return None if moment["step"] is None else str(moment["step"])


def _rate(log_prob: float | None, content: dict[str, Any]) -> str:
    from math import exp

    return "–" if log_prob is None else f"{log_prob if content['is_density'] else exp(log_prob):.3g}"
