"""Proofs in the terminal."""

from typing import Any

from whence.causes import Proof, format_outcome
from whence.cli.terminal.console import console, make_table, print_json, print_line

_TITLES = {"all": "with all", "without": "without these", "random": "without random", "placebo": "without a placebo's"}


def print_proof(proof: Proof, *, json: bool) -> None:
    """Print what came of the trainings: a table, and what it means in a sentence."""
    rows = proof.summarise()
    if json:
        outcomes = [row | {"apart": proof.is_apart(row["outcome"])} for row in rows]
        print_json({"text": proof.text, "left_out": proof.size, "run": dict(proof.stored), "outcomes": outcomes})
        return
    cells = [
        [outcome, "the run itself", format_outcome(outcome, value), "–"] for outcome, value in proof.stored.items()
    ]
    cells += [[row["outcome"], _TITLES[row["variant"]], *map(_format, [row] * 2, ("value", "change"))] for row in rows]
    cells.sort(key=lambda cell: list(proof.table["outcome"].unique(maintain_order=True)).index(cell[0]))
    title = f"{proof.size:,} {proof.records} left out, {proof.table['seed'].n_unique()} seeds, 95% intervals"
    console.print(make_table(title, ["outcome", "trained", "mean", "change"], cells))
    print_line(proof.text)
    for note in proof.notes:
        print_line(f"Note: {note}")
    print_line(f"Numbers: {proof.file}")


def _format(row: dict[str, Any], column: str) -> str:
    interval, outcome = row[column], row["outcome"]
    if column == "change" and row["variant"] == "all":
        return "–"
    sign = "+" if column == "change" else ""
    mean, *ends = (format_outcome(outcome, each, sign) for each in interval.values() if each is not None)
    return mean + (f" [{', '.join(ends)}]" if ends else "")
