"""Causes of a decision or a response in the terminal: the strip over rounds and the moments."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from whence.cli.console import console, make_table, print_line
from whence.cli.moment_tables import list_cells
from whence.moments import name_action

if TYPE_CHECKING:
    import polars as pl

    from whence.page.cause_view import CauseView

BLOCKS = " ▁▂▃▄▅▆▇█"


def print_causes(view: "CauseView") -> None:
    """Print what taught a decision: two sentences, the strip over rounds, and the moments."""
    from whence.page.cause_view import tell_causes, tell_decision

    print_line(tell_decision(view.decision))
    print_line(tell_causes(view))
    print_strip(view.rounds)
    headings = ["round", "record", "episode", "steps", "action", "advantage", "score"]
    for entries, verb in ((view.raised, "raised"), (view.lowered, "lowered")):
        rows = [
            [
                *(entry.round, *list_cells(entry.moment), name_action(entry.moment.action, view.action_labels)),
                "–" if entry.moment.advantage is None else f"{entry.moment.advantage:+.3g}",
                f"{entry.moment.score:+.3g}",
            ]
            for entry in entries
        ]
        if rows:
            console.print(make_table(f"The {len(rows)} moments that {verb} it most", headings, rows))


def print_strip(rounds: "pl.DataFrame") -> None:
    """Print the sums of each round, from `sum_rounds`, as two lines of blocks."""
    numbers = rounds["round"].to_list()
    gaps = numbers[-1] - numbers[0] + 1 - len(numbers)
    span = f"rounds {numbers[0]} to {numbers[-1]}"
    print_line(f"\nSums of scores in {f'{len(numbers)} of {span}' if gaps else span}:")
    for line in draw_strip(rounds["raised"].to_list(), rounds["lowered"].to_list()):
        print_line(line)


def draw_strip(raised: Sequence[float], lowered: Sequence[float], width: int = 100) -> list[str]:
    """Return two lines of blocks: what raised a decision, and what lowered it.

    A column is a round, or the mean of neighbouring rounds where there are many; both lines have one scale.

    Args:
        raised: each round's sum of scores above 0.
        lowered: each round's sum of scores below 0.
        width: the most columns.
    """
    columns = min(width, len(raised))
    edges = [round(place * len(raised) / columns) for place in range(columns + 1)]
    means = [
        [abs(sum(values[first:last])) / (last - first) for first, last in pairwise(edges)]
        for values in (raised, lowered)
    ]
    largest = max(max(means[0]), max(means[1])) or 1.0
    return [
        f"{name:<8} {''.join(BLOCKS[ceil(8 * value / largest)] for value in values)}"
        for name, values in zip(("raised", "lowered"), means, strict=True)
    ]
