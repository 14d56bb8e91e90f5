"""`whence phases`."""

from math import exp
from pathlib import Path
from typing import Annotated, Any

import typer

from whence.cli.terminal import (
    RoundBar,
    console,
    make_printable,
    make_table,
    open_agent_run,
    options,
    print_json,
    print_line,
    print_paths,
)
from whence.core import WhenceError
from whence.diagnosis import (
    Behaviour,
    behaviour_by_hand,
    behaviour_of_records,
    find_behaviour,
    summarise_history,
    trace_phases,
    write_history,
)
from whence.page import ExploredRun, format_number
from whence.runs import RunDirectory


def phases(
    run: Annotated[
        Path, typer.Argument(help="A run directory: of `whence train`, `whence compare`, or of a callback.")
    ],
    record: Annotated[
        list[int] | None,
        typer.Option(
            help="The behaviour: what was done in this record; may be repeated for records of one round. (default: "
            "one that training raised)",
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
    neighbours: Annotated[
        int, typer.Option(help="Nearest neighbours that a record is compared with; LDA: 20 to 100.", min=1)
    ] = 50,
    env: options.ReplayEnv = None,
    trust: options.Trust = False,
    json: options.AsJson = False,
) -> None:
    """Tell when a behaviour arose and from which records: its probability, its scores' roughness, its phases.

    A behaviour is an action in a state. Each round's records are scored for it. Roughness is low where records in
    similar states score alike; it is compared with that of permuted scores. What was measured is also written into the
    run directory, where the run's page draws it: see `whence view`.

    Example: whence phases runs/lander --record 8210
    """
    directory = open_agent_run(run, trust=trust)
    behaviour = _read_behaviour(directory, record or [], options.parse_action(observation, action), env)
    with RoundBar("rounds", "scoring") as bar:
        history = trace_phases(directory, behaviour, neighbours=neighbours, env=env, on_round=bar.update)
    content = summarise_history(history, ExploredRun(directory, env=env).labels)
    file = write_history(directory, history, content)
    if json:
        print_json({"run": str(run), "history": content})
        return
    _print_history(content)
    print_paths({"Numbers": file})


def _read_behaviour(run: RunDirectory, record: list[int], settings: dict[str, Any], env: str | None) -> Behaviour:
    """Return the behaviour that options name, or the one that training raised most."""
    if record and "observation" in settings:
        raise WhenceError("Give --record, or --observation and --action; not both.")
    if record:
        return behaviour_of_records(run, record, action=settings.get("action"), env=env)
    if not settings:
        return find_behaviour(run, env=env)
    if len(settings) == 1:
        raise WhenceError("A behaviour needs --observation and --action as JSON, or --record ID.")
    return behaviour_by_hand(run, **settings, env=env)


def _print_history(content: dict[str, Any]) -> None:
    """Print a summary of `summarise_history`: sentences, the phases, and the top moments of each."""
    for sentence in content["sentences"]:
        print_line(sentence)

    def rate(log_prob: float | None) -> str:
        return "–" if log_prob is None else f"{log_prob if content['is_density'] else exp(log_prob):.3g}"

    rows, moments = [], []
    for phase in content["phases"]:
        name = f"{phase['first']}–{phase['last']}"
        change = f"{rate(phase['log_prob'])} → {rate(phase['log_prob_after'])}"
        rows.append([name, f"{phase['roughness']:.3g}", format_number(phase["relative"]), change])
        for moment in phase["moments"]:
            steps = f"{moment['first_step']}–{moment['last_step']}" if moment["records"] > 1 else moment["step"]
            what = make_printable(moment["action"]), f"{format_number(moment['advantage'])}, {moment['score']:.3g}"
            moments.append([name, moment["round"], moment["record"], moment["episode_id"], steps, *what])
    kind = "log-density" if content["is_density"] else "π(a|s)"
    console.print(make_table("Phases", ["rounds", "roughness", "/ permuted", kind], rows))
    headings = ["phase", "round", "record", "episode", "steps", "action", "raw advantage, score"]
    console.print(make_table("Moments that raised the behaviour most, in each phase", headings, moments))
