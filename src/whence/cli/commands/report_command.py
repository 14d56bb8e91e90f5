"""`whence report`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from whence import experiments
from whence.cli.console import print_json, print_line
from whence.cli.options import AsJson, ReplayEnv, parse_rounds
from whence.cli.progress import RoundBar
from whence.errors import WhenceError
from whence.page import write_report
from whence.page.explorer import ExploredRun
from whence.runs import find_content


def report(
    path: Annotated[Path, typer.Argument(help="A run directory, or the directory of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. (default: report.html in PATH)", show_default=False)
    ] = None,
    env: ReplayEnv = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            help="Rounds to embed, such as 1,5,10-50:10. (default: all; of a comparison, 12 of each run)",
            show_default=False,
        ),
    ] = None,
    continuations: Annotated[
        int,
        typer.Option(help="Fresh rollouts by which the advantages of framed moments are measured; 0: none.", min=0),
    ] = 0,
    json: AsJson = False,
) -> None:
    """Write the page of a run or a comparison: one HTML file that needs no network.

    It shows the rounds so far if a run is not finished. `whence view` serves the same page, live, with every record.

    Example: whence report runs/lander
    """
    out = out or path / "report.html"
    chosen = None if rounds is None else parse_rounds("--rounds", rounds)
    with RoundBar() as bar:
        settings: dict[str, Any] = {"rounds": chosen, "continuations": continuations, "on_round": bar.update}
        if (path / "comparison.json").exists():
            comparison = experiments.load_comparison(path)
            stored = {number for config in comparison.configs for number in comparison.run(config).rounds()}
            if missing := sorted(set(chosen or ()) - stored):
                raise WhenceError(
                    f"Round {missing[0]} is in no run of {path}. They hold {len(stored)} rounds, up to "
                    f"{max(stored, default=0)}. Name rounds that they hold."
                )
            write_report(comparison, out, env=env, **settings)
        else:
            if find_content(path) == "comparison":
                raise WhenceError(
                    f"{path} holds a comparison that is not finished. Run its `whence compare` again, or give one of "
                    f"the runs in {path / 'runs'}. `whence view {path}` shows the runs so far."
                )
            run = ExploredRun(path, env=env)
            if chosen:
                run.directory.require_rounds(chosen)
            write_report(run, out, **settings)
    if json:
        print_json({"path": str(out)})
    else:
        print_line(str(out))


def find_runs(path: Path, env: str | None) -> list[ExploredRun]:
    """Return the run in a directory, or the runs of the comparison there, finished or not.

    Raises:
        RunDirectoryError: there is neither.
    """
    if find_content(path) != "comparison":
        return [ExploredRun(path, env=env)]
    runs = [
        ExploredRun(directory, env=env)
        for directory in sorted((path / "runs").glob("*/seed_*"))
        if (directory / "config.json").exists()
    ]
    if not runs:
        raise WhenceError(f"{path} holds a comparison whose runs are gone. Run its `whence compare` again.")
    return runs
