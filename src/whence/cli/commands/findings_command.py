"""`whence findings`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.terminal import AsJson, errors, print_json, print_line
from whence.findings import find
from whence.runs import RunDirectory

_LISTED = 5


def findings(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    json: AsJson = False,
) -> None:
    """Say what is wrong with a run: at most five statements, the surest first, each with what to do.

    A statement names what, where and how much: a reward of the wrong sign for one action in one region, swapped
    actions in one environment, an observation that is stale, frozen or clipped, a time limit taken as an end, a critic
    that is off, records that harm, settings that do not fit. Below it stand how sure that is, what to do, and records
    to open. Where nothing stands out, it says so; that is not yet proof that all is well. Of a language model's run it
    looks at the reward functions, of which one may rise while another falls or stays low, and at whether the model
    collapses.

    It takes seconds: it searches up to 40,000 records, reads the metrics of all rounds, and plays nothing.

    Example: whence findings runs/lander
    """
    directory = RunDirectory.open(run)
    directory.require_rounds()
    with errors.status("Looking for what stands out …"):
        statements = find(directory)
    if json:
        print_json({"run": str(run), "findings": [asdict(one) for one in statements]})
        return
    if not statements:
        print_line(
            "No reward rises while another falls or stays low, and the responses do not collapse."
            if directory.is_language
            else "Nothing stands out among rewards, actions, observations, ends of episodes, the critic, scores and "
            "settings."
        )
    for number, one in enumerate(statements, start=1):
        print_line(f"{number}. {one.title}.")
        print_line(f"   {one.evidence}")
        print_line(f"   {one.advice}")
        if one.record_ids:
            listed = ", ".join(map(str, one.record_ids[:_LISTED]))
            look = f"whence view {run}" if directory.is_language else f"whence show {run} --record {one.record_ids[0]}"
            print_line(f"   Round {one.round}, records {listed}: {look}")
