"""What taught a decision, in the terminal and as JSON; and the steps of an episode to choose one from."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from whence.cli.console import console, make_printable, make_table, print_line
from whence.cli.moment_tables import describe_moment
from whence.moments import name_action

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table

    from whence.diagnosis.causes import RankedMoment
    from whence.diagnosis.decisions import PlayedEpisode
    from whence.page.cause_view import CauseView

BLOCKS = " ▁▂▃▄▅▆▇█"


def print_causes(view: "CauseView") -> None:
    """Print what taught a decision: two sentences, the strip over rounds, and the moments."""
    from whence.page.cause_view import tell_causes, tell_decision

    print_line(make_printable(tell_decision(view.decision)))
    print_line(make_printable(tell_causes(view)))
    print_strip(view.rounds)
    for entries, verb in ((view.raised, "raised"), (view.lowered, "lowered")):
        if entries:
            console.print(_make_moment_table(entries, verb, view.action_labels))


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


def _make_moment_table(entries: Sequence["RankedMoment"], verb: str, labels: Sequence[str] | None) -> "Table":
    rows = []
    for entry in entries:
        moment = entry.moment
        steps = f"{moment.first_step}–{moment.last_step}" if moment.records > 1 else moment.step
        advantage = "–" if moment.advantage is None else f"{moment.advantage:+.3g}"
        action = make_printable(name_action(moment.action, labels))
        rows.append(
            [entry.round, moment.record_id, moment.episode_id, steps, action, advantage, f"{moment.score:+.3g}"]
        )
    headings = ["round", "record", "episode", "steps", "action", "advantage", "score"]
    return make_table(f"The {len(rows)} moments that {verb} it most", headings, rows)


def describe_causes(view: "CauseView", by: str) -> dict[str, Any]:
    """Return what taught a decision in JSON types."""
    from whence.page.cause_view import describe_decision, tell_causes, tell_decision

    moments = {
        name: [{"round": entry.round, **describe_moment(entry.moment, view.action_labels)} for entry in entries]
        for name, entries in (("raised", view.raised), ("lowered", view.lowered))
    }
    return {
        "run": view.run,
        "decision": describe_decision(view.decision),
        "by": by,
        "text": f"{tell_decision(view.decision)} {tell_causes(view)}",
        "rounds": view.rounds.to_dicts(),
        **moments,
    }


def list_steps(episode: "PlayedEpisode", labels: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the steps of an episode in JSON types, with the action's probability then and now, or its log-density."""
    first, now = episode.first_log_probs, episode.records.log_probs
    if episode.is_discrete:
        first, now = first.exp(), now.exp()
    columns = zip(episode.records.actions.tolist(), first.tolist(), now.tolist(), episode.rewards.tolist(), strict=True)
    return [
        {"step": step, "action": name_action(action, labels), "first": before, "now": after, "reward": reward}
        for step, (action, before, after, reward) in enumerate(columns)
    ]


def print_steps(episode: "PlayedEpisode", rows: Sequence[dict[str, Any]], shown: Sequence[int], chosen: int) -> None:
    """Print steps of an episode, with the one chosen by the rule marked.

    Args:
        episode: the episode.
        rows: from `list_steps`.
        shown: the steps to print.
        chosen: the step to mark.
    """
    part = f"; {len(shown)} of them are listed." if len(shown) < len(episode) else "."
    total = f"return {episode.rewards.sum():.4g}"
    print_line(f"An episode with seed {episode.seed}: {len(episode)} steps, {total}{part}")
    cells = [
        [
            *("▶" if step == chosen else "", step, make_printable(rows[step]["action"])),
            *(f"{rows[step]['first']:.3f}", f"{rows[step]['now']:.3f}", f"{rows[step]['reward']:.3g}"),
        ]
        for step in shown
    ]
    what = "probability" if episode.is_discrete else "log-density"
    console.print(make_table(f"The action's {what}", ["", "step", "action", "first policy", "now", "reward"], cells))
    print_line("▶: it rose most since the first round.")
