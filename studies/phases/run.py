"""In which phases does the roughness of a behaviour's influence fall, next to permuted scores?

Run: `python -m studies.phases.run RUN [--record 8210]`. It prints a table of one run and writes it beside the run, as
RUN.phases.md. The behaviour is what was done in a record, or else what training raised most.
"""

from math import exp
from pathlib import Path
from typing import Annotated

import typer

from studies.phases.phases import History, describe_history, find_behaviour, read_behaviour, trace_phases
from studies.phases.roughness import NEIGHBOURS
from studies.shared import cell, table, write_page
from whence import RunDirectory


def make_text(history: History) -> str:
    """Return the sentences and the table of a history."""
    lines = [["rounds", "roughness", "/ permuted", "π(a\\|s) before", "after"]]
    for phase in history.phases:
        after = "–" if phase.log_prob_after is None else f"{exp(phase.log_prob_after):.3g}"
        name = f"{phase.first}–{phase.last}"
        lines.append(
            [name, f"{phase.roughness:.3g}", cell(phase.relative, digits=2), f"{exp(phase.log_prob):.3g}", after]
        )
    return "\n".join([*describe_history(history), "", table(lines)])


def main(
    run: Annotated[Path, typer.Argument(help="A run directory of an agent.")],
    record: Annotated[int | None, typer.Option(help="The behaviour is what was done in this record.")] = None,
    neighbours: Annotated[
        int, typer.Option(help="Nearest neighbours of a record; LDA: 20 to 100.", min=1)
    ] = NEIGHBOURS,
) -> None:
    """Trace one behaviour of a run, print the table, and write it beside the run."""
    directory = RunDirectory.open(run)
    behaviour = find_behaviour(directory) if record is None else read_behaviour(directory, record)
    text = make_text(trace_phases(directory, behaviour, neighbours=neighbours))
    file = run.resolve().with_name(f"{run.resolve().name}.phases.md")
    write_page(file, text)
    typer.echo(f"{text}\n\n{file}")


if __name__ == "__main__":
    typer.run(main)
