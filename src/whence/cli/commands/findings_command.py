"""`whence findings`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.terminal import AsJson, errors, open_agent_run, print_json, print_line
from whence.findings import find

_LISTED = 5


def findings(
    run: Annotated[Path, typer.Argument(help="A run directory of an agent, finished or not.")],
    json: AsJson = False,
) -> None:
    """Say what is wrong with a run: at most five statements, the surest first, each with what to do.

    It reads up to 40,000 records and the metrics of all rounds, and plays nothing. It says nothing where nothing stands
    out.

    Example: whence findings runs/lander
    """
    directory = open_agent_run(run, trust=False)
    directory.require_rounds()
    with errors.status("Looking for what stands out …"):
        statements = find(directory)
    if json:
        print_json({"run": str(run), "findings": [asdict(one) for one in statements]})
        return
    if not statements:
        print_line("Nothing stands out.")
    for number, one in enumerate(statements, start=1):
        print_line(f"{number}. {one.title}.")
        print_line(f"   {one.evidence}")
        print_line(f"   {one.advice}")
        if one.record_ids:
            listed = ", ".join(map(str, one.record_ids[:_LISTED]))
            print_line(f"   Round {one.round}, records {listed}: whence show {run} --record {one.record_ids[0]}")
