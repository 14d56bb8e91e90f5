"""`whence report`."""

from pathlib import Path
from typing import Annotated

import typer

from whence import experiments
from whence.cli.console import print_json, print_line
from whence.cli.options import AsJson
from whence.errors import WhenceError
from whence.report import write_report, write_run_report
from whence.report.page import describe_comparison, describe_run
from whence.runs import RunDirectory


def report(
    path: Annotated[Path, typer.Argument(help="A run directory, or the directory of a comparison.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. (default: report.html in PATH)", show_default=False)
    ] = None,
    json: AsJson = False,
) -> None:
    """Write the page of a run or a comparison: one HTML file that needs no network.

    It shows the rounds so far if a run is not finished.

    Example: whence report runs/lander
    """
    out = out or path / "report.html"
    if (path / "comparison.json").exists():
        comparison = experiments.load_comparison(path)
        write_report(comparison, out)
        content = describe_comparison(comparison)
    elif (path / "runs").is_dir() and not (path / "config.json").exists():
        raise WhenceError(
            f"{path} holds a comparison that is not finished. Run its `whence compare` again, or give one of the runs "
            f"in {path / 'runs'}."
        )
    else:
        run = RunDirectory.open(path)
        write_run_report(run, out)
        content = describe_run(run)
    if json:
        print_json({"path": str(out), **content})
    else:
        print_line(str(out))
