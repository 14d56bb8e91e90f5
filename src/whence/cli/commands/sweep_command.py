"""`whence sweep` and `whence table`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from whence import lab
from whence.cli import terminal
from whence.cli.terminal import options
from whence.core import WhenceError, suggest


def sweep(
    file: Annotated[
        Path, typer.Argument(help="A TOML file of [[experiment]] tables; docs/reference/command.md shows one.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory for curves and timings. (default: out/NAME-OF-FILE)")
    ] = None,
    workers: options.Workers = None,
    only: Annotated[
        str | None,
        options.optional(
            help="These experiments, arms or runs alone, separated by commas: lake,pond/iif,sea/iif/seed_3."
        ),
    ] = None,
    on: options.On = "local",
    json: options.AsJson = False,
) -> None:
    """Run many comparisons from one file: environments, arms, shares to drop and seeds.

    The whole file is checked before anything runs. Finished runs are skipped when the command is given again; a run
    that fails is reported, and the others go on. Ends with exit code 1 where a run failed.

    Example: whence sweep results/paper/sweep.toml --out results/paper
    """
    runs = lab.read_sweep(file)
    if only is not None:
        runs = _choose_runs(runs, [name.strip() for name in only.split(",")], file)
    path = out or Path("out") / file.stem
    with terminal.resumable(), terminal.PlannedBars(runs) as bars:
        failures = lab.run_sweep(runs, path, bars, workers=workers, on=on)
    if json:
        terminal.print_json({"out": str(path), "runs": [run.name for run in runs], "failures": failures})
    else:
        terminal.print_line(f"{len(runs) - len(failures)} of {len(runs)} runs are in {path}: whence table {path}")
    for name, failure in failures.items():
        terminal.print_line(f"{name} failed: {failure}", terminal.errors)
    if failures:
        raise typer.Exit(1)


def _choose_runs(runs: Sequence[lab.Planned], names: Sequence[str], file: Path) -> list[lab.Planned]:
    """Return the runs that a name stands for: an experiment, one of its arms, or a run."""
    known = dict.fromkeys("/".join(run.name.split("/")[:parts]) for run in runs for parts in (1, 2, 3))
    for name in names:
        if name not in known:
            raise WhenceError(f"{file} has no experiment, arm or run {name!r}.{suggest(name, known)}")
    return [run for run in runs if any(f"{run.name}/".startswith(f"{name}/") for name in names)]


def table(
    out: Annotated[Path, typer.Argument(help="The directory of a sweep.")],
    json: options.AsJson = False,
) -> None:
    """Tabulate what a sweep has finished: tables.md and summary.json.

    Example: whence table results/paper
    """
    results = lab.load_sweep(out)
    summary = lab.summarise_sweep(results)
    text = lab.write_tables(results, summary, out)
    if json:
        terminal.print_json({"experiments": summary})
        return
    terminal.console.print(terminal.make_printable(text), markup=False, highlight=False, soft_wrap=True)
    for name, what in (("Text", "tables.md"), ("Numbers", "summary.json")):
        terminal.print_line(f"{name}: {out / what}")
