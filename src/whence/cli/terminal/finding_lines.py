"""Findings in the terminal, and what was looked at."""

from collections import defaultdict
from collections.abc import Sequence

import typer
from rich.table import Table
from rich.text import Text

from whence.cli.terminal.console import console, make_printable, print_line
from whence.findings import Check, Rank, choose_findings, count_outcomes, say_nothing_stands_out

_LISTED = 5
"""Records of a finding that are named."""

_STYLES = {"wrong": "bold red", "unusual": "yellow"}

_FAILED = 3
"""The exit code where a finding has the rank of --fail-on, or a worse one."""


def exit_on_findings(checks: Sequence[Check], rank: Rank | None) -> None:
    """End with exit code 3 if a check has a finding of this rank or a worse one, printed or not; None: do not."""
    if rank is not None and any(check.outcome in ("wrong", rank) for check in checks):
        raise typer.Exit(_FAILED)


def print_findings(checks: Sequence[Check], not_read: Sequence[str] = ()) -> None:
    """Print findings with their rank, evidence, advice and records; then what was looked at, and log names not read."""
    findings = choose_findings(checks)
    for number, one in enumerate(findings, start=1):
        title = Text.assemble((one.rank, _STYLES[one.rank]), make_printable(f": {one.title}."))
        _print_paragraph(title, f"{number}.")
        _print_paragraph(one.evidence)
        _print_paragraph(one.advice)
        if one.record_ids and one.next_command:
            listed = ", ".join(map(str, one.record_ids[:_LISTED]))
            # The command is to be copied, so its line is not broken.
            print_line(f"   Round {one.round}, records {listed}: {one.next_command}")
    if findings:
        console.print()
    else:
        console.print(say_nothing_stands_out(checks), soft_wrap=not console.is_terminal, highlight=False)
    print_line(f"What was looked at: {count_outcomes(checks) or 'nothing'}.")
    for heading, names in _group_names(checks, findings_above=len(findings)).items():
        _print_paragraph(f"{heading}: {', '.join(names)}.")
    if not_read:
        _print_paragraph(f"Not read: {', '.join(not_read)}.")


def _group_names(checks: Sequence[Check], findings_above: int) -> dict[str, list[str]]:
    """Return the names of checks by what came of them, without those whose findings stand above."""
    groups, above = defaultdict[str, list[str]](list), findings_above
    for check in checks:
        if check.finding is None:
            is_unknown = check.outcome == "could not be looked at"
            groups[f"Could not be looked at {check.text}" if is_unknown else "Fine"].append(check.name)
        elif above:
            above -= 1
        else:
            groups[f"Also {check.outcome}"].append(check.name)
    return groups


def _print_paragraph(text: str | Text, mark: str = "") -> None:
    """Print a paragraph behind a margin; in a terminal all of its lines have it, a file or a pipe gets one line."""
    text = Text(make_printable(text)) if isinstance(text, str) else text
    if console.is_terminal:
        grid = Table.grid()
        grid.add_column(width=3)
        grid.add_column(overflow="fold")
        grid.add_row(mark, text)
        console.print(grid)
    elif text:
        console.print(Text.assemble(f"{mark:<3}", text), soft_wrap=True, highlight=False)
