"""`whence export`."""

from pathlib import Path
from typing import Annotated, cast

import typer

from whence.cli.console import errors, print_error_line, print_json, print_line
from whence.cli.options import AsJson, ReplayEnv, parse_rounds
from whence.errors import WhenceError, suggest
from whence.runs import RunDirectory


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    to: Annotated[str, typer.Option("--to", help="The format: parquet, jsonl or rerun.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The file to write.", show_default=False)],
    rounds: Annotated[
        str | None, typer.Option(help="Rounds to write: 5,20 or 10-50 or 10-150:10. (default: all)", show_default=False)
    ] = None,
    moments: Annotated[
        int, typer.Option(help="For rerun: moments with frames at either end of each round.", min=0)
    ] = 1,
    env: ReplayEnv = None,
    json: AsJson = False,
) -> None:
    """Write a run's records as Parquet, JSON lines or a Rerun recording.

    Parquet and JSON lines hold one row for each record of every round: round, ids, action, advantage, score, its error,
    whether it trained and why not. A Rerun recording (.rrd) has the time lines `round` and `step`, and frames of the
    most harmful and the most helpful moments.

    Example: whence export runs/lander --to parquet --out lander.parquet
    """
    from whence.report.exports import FORMATS, Format, export_rerun, export_table

    if to not in FORMATS:
        raise WhenceError(f"--to is {to!r}.{suggest(to, FORMATS)}")
    if out.is_dir():
        raise WhenceError(f"--out is {out}, which is a directory. Name a file in it, such as {out / 'records'}.{to}.")
    directory = RunDirectory.open(run)
    numbers = parse_rounds("--rounds", rounds)
    with errors.status(f"Writing {out} …"):
        if to == "rerun":
            exported = export_rerun(directory, out, rounds=numbers, moments=moments, env=env)
        else:
            exported = export_table(directory, out, cast(Format, to), rounds=numbers)
    if json:
        content = {"path": str(out), "records": exported.records, "rounds": list(exported.rounds)}
        print_json(content | {"notes": list(exported.notes)})
        return
    for note in exported.notes:
        print_error_line(note)
    print_line(f"{exported.records:,} records of {len(exported.rounds)} rounds: {out}")
    if to == "rerun":
        print_line(f"See it: rerun {out}")
