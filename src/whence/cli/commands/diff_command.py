"""`whence diff`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.terminal import errors, options, print_json, print_line
from whence.runs import RunDirectory
from whence.stored import compare_runs

_LISTED = 4
"""Settings that are printed with their values; of the others as many are named."""


def diff(
    a: Annotated[Path, typer.Argument(help="A run directory, finished or not.")],
    b: Annotated[Path, typer.Argument(help="The run to compare it with.")],
    json: options.AsJson = False,
) -> None:
    """Say where two runs part that should agree, and by what: settings, code, versions, then data.

    The first line names what most likely made the difference: what was changed, or that only seeds differ. Then come
    the first round and record at which the data part, in the order in which they are computed, how the first quantity
    differs there, and which others do. Runs without a difference are equal to the bit.

    Example: whence diff runs/before runs/after
    """
    with errors.status("Comparing …"):
        compared = compare_runs(RunDirectory.open(a), RunDirectory.open(b))
    if json:
        print_json({"a": str(a), "b": str(b), **asdict(compared)})
        return
    settings = [each for each in compared.differences if each.kind in ("setting", "version")]
    for each in compared.differences:
        if each not in settings[_LISTED:]:
            print_line(each.text)
    if rest := [each.subject for each in settings[_LISTED:]]:
        print_line(
            f"{len(rest)} more differ, which --json shows: {', '.join(rest[:_LISTED])}{', …' * (len(rest) > _LISTED)}."
        )
    counts = f"{compared.rounds:,} {'round' if compared.rounds == 1 else 'rounds'}, {compared.records:,} records"
    if not compared.differences:
        print_line(f"No difference: {counts} equal to the bit.")
    elif compared.records:
        print_line(f"Equal to the bit: the first {counts}.")
