"""What commands print of runs: a comparison's make_table, a round in words."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from whence.report.page import METRICS, cell, column_heading


def summary_table(title: str, summary: Mapping[str, Any]) -> Table:
    """Return a comparison's summary as a make_table, a column for each arm."""
    made = Table(title=title.replace("[", r"\["))
    made.add_column("metric")
    for arm in summary:
        made.add_column(column_heading(arm), justify="right")
    for metric, heading in METRICS.items():
        made.add_row(heading, *(" ".join(cell(metric, entry[metric])).strip() for entry in summary.values()))
    return made


def describe_round(metrics: Mapping[str, Any]) -> list[str]:
    """Return what a round came to, in words."""
    said = []
    words_of = {"test_return": "test return {:.4g}", "episode_return": "return {:.4g}", "reward": "reward {:.4g}"}
    for name, words in words_of.items():
        if metrics.get(name) is not None:
            said.append(words.format(metrics[name]))
    if metrics.get("dropped_share"):
        said.append(f"{1 - metrics['dropped_share']:.0%} kept")
    return said
