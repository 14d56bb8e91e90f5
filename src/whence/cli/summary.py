"""What commands print of runs: a comparison's verdicts and table, a round in words."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from whence.cli.console import console, make_printable, print_line
from whence.experiments import Comparison
from whence.page.summary import READING, make_summary


def print_comparison(comparison: Comparison) -> None:
    """Print a finished comparison: a verdict on each arm, the table of metrics, and how to read it."""
    ((env, _),) = comparison.summary.items()
    summary = make_summary(comparison)
    seeds = len({config.seed for config in comparison.configs})
    for verdict in summary.verdicts:
        print_line(verdict)
    table = Table(title=escape(make_printable(f"{env}, {seeds} seeds, {comparison.configs[0].rounds} rounds")))
    table.add_column("metric")
    for heading in summary.headings:
        table.add_column(escape(make_printable(heading)), justify="right")
    for metric, cells in summary.rows:
        table.add_row(metric, *(escape(make_printable(" ".join(cell).strip())) for cell in cells))
    console.print(table)
    console.print(READING, style="dim", markup=False)


def describe_round(metrics: Mapping[str, Any]) -> list[str]:
    """Return a round's results in words."""
    forms = {"test_return": "test return {:.4g}", "episode_return": "return {:.4g}", "reward": "reward {:.4g}"}
    words = [form.format(metrics[name]) for name, form in forms.items() if metrics.get(name) is not None]
    if metrics.get("dropped_share"):
        words.append(f"{1 - metrics['dropped_share']:.0%} kept")
    return words
