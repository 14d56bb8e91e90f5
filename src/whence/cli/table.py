"""`whence table`."""

from pathlib import Path
from typing import Annotated

import typer

from whence import experiments
from whence.cli.console import console, make_printable, print_json, print_line
from whence.cli.options import AsJson
from whence.page import write_tables


def table(
    out: Annotated[Path, typer.Argument(help="The directory of a sweep.")],
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", help="Draw no curves: these need Kaleido and a Chrome or Chromium.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Tabulate what a sweep has finished, next to LDA's figures: tables.md, summary.json and curves as SVG.

    Example: whence table results/paper
    """
    results = experiments.load_sweep(out)
    summary = experiments.summarise_sweep(results)
    text = write_tables(results, summary, out, pictures=not no_pictures)
    if json:
        print_json(summary)
        return
    console.print(make_printable(text), markup=False, highlight=False, soft_wrap=True)
    for name, what in (("Text", "tables.md"), ("Numbers", "summary.json")):
        print_line(f"{name}: {out / what}")
