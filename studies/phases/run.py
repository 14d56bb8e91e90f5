"""In which phases does the roughness of a behaviour's influence fall, next to permuted scores?

Run: `python -m studies.phases.run RUN [--record 8210]`. It prints a table of one run and writes it beside the run, as
RUN.phases.md. The behaviour is what was done in a record, or else what training raised most.
"""

from math import exp
from pathlib import Path
from typing import Annotated

import typer

from studies.markdown import table
from studies.phases.phases import History, describe_history, find_behaviour, read_behaviour, trace_phases
from studies.phases.roughness import NEIGHBOURS
from whence import RunDirectory
from whence.core import write_atomically


def make_text(history: History) -> str:
    """Return the sentences and the table of a history."""
    lines = [["rounds", "roughness", "/ permuted", "π(a\\|s) before", "after"]]
    for phase in history.phases:
        relative = "–" if phase.relative is None else f"{phase.relative:.2f}"
        after = "–" if phase.log_prob_after is None else f"{exp(phase.log_prob_after):.3g}"
        name = f"{phase.first}–{phase.last}"
        lines.append([name, f"{phase.roughness:.3g}", relative, f"{exp(phase.log_prob):.3g}", after])
    return "\n".join([*describe_history(history), "", table(lines), ""])


def main(
    run: Annotated[Path, typer.Argument(help="A run directory of an agent.")],
    record: Annotated[int | None, typer.Option(help="The behaviour is what was done in this record.")] = None,
    neighbours: Annotated[
        int, typer.Option(help="Nearest neighbours of a record; LDA: 20 to 100.", min=1)
    ] = NEIGHBOURS,
    env: Annotated[str | None, typer.Option(help="The environment, if the run does not name it.")] = None,
) -> None:
    """Trace one behaviour of a run, print the table, and write it beside the run."""
    directory = RunDirectory.open(run)
    behaviour = find_behaviour(directory, env=env) if record is None else read_behaviour(directory, record, env=env)
    text = make_text(trace_phases(directory, behaviour, neighbours=neighbours, env=env))
    file = run.resolve().with_name(f"{run.resolve().name}.phases.md")
    with write_atomically(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    typer.echo(f"{text}\n{file}")


if __name__ == "__main__":
    typer.run(main)
