"""`whence diff`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from whence import experiments
from whence.cli.console import console, make_table, print_json, print_line
from whence.cli.options import AsJson
from whence.experiments.differences import find_run_differences

WHEN_BITS_REPEAT = (
    "Bits repeat on the same kind of processor with the same versions of all libraries. On another kind, numbers are "
    "rounded otherwise, and a long run drifts away after some rounds: an Acrobot run after 31, a FrozenLake run never."
)


def diff(
    first: Annotated[Path, typer.Argument(help="The directory of a sweep, or of some of its runs made again.")],
    second: Annotated[Path, typer.Argument(help="The directory of a sweep that has the same runs, and maybe others.")],
    json: AsJson = False,
) -> None:
    """Compare a sweep's runs with those of another directory, value by value, and tell which differ and from when on.

    Evaluations and what happened each round are compared, and not seconds. Ends with exit code 1 if a run of the
    first directory differs or is missing in the second.

    Bits repeat on the same kind of processor with the same versions of all libraries. On another kind, numbers are
    rounded otherwise, and a long run drifts away after some rounds: an Acrobot run, repeated so, equalled the committed
    one for 31 rounds, and a FrozenLake run to its end.

    Example: whence diff out/again results/paper
    """
    results, others = experiments.load_sweep(first), experiments.load_sweep(second)
    differences = find_run_differences(results, others)
    runs = sum(len(seeds) for labels in results.values() for seeds in labels.values())
    equal = runs - len({difference.run for difference in differences})
    if json:
        print_json({"runs": runs, "equal": equal, "differences": [asdict(difference) for difference in differences]})
    else:
        if differences:
            headings = ("run", "differs in", "first round", "largest difference")
            rows = [
                (
                    difference.run,
                    "missing there" if difference.what == "run" else difference.what,
                    difference.first_round,
                    None if difference.largest is None else f"{difference.largest:.3g}",
                )
                for difference in differences
            ]
            console.print(make_table(f"{first} and {second}", headings, rows))
            print_line(WHEN_BITS_REPEAT)
        print_line(f"{equal} of {runs} runs are the same to the bit.")
    if differences:
        raise typer.Exit(1)
