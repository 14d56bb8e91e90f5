"""The figures of a page, from the tables of one or more runs, each row with its `arm`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from itertools import cycle
from typing import Any, TypeAlias

import plotly.graph_objects as go
import polars as pl

from whence.runs import Table

Tables: TypeAlias = Mapping[Table, pl.DataFrame]
"""Tables of all runs below each other, with a column `arm`."""

Drawn: TypeAlias = tuple[str, str, go.Figure]
"""A figure with its title and what it shows."""

COLOURS = ("#7d8590", "#e27411", "#2f74e6", "#1ba764", "#c2245f", "#a04df0", "#b98900", "#14a0a0")
"""The colour of the arm that others are compared with, then one for each other arm in order. Their contrast is at least
3:1 on white and on the page's dark ground, and the first four differ for every kind of colour blindness. The later four
are drawn dashed as well; colours that are used again, dotted."""

STAGES: Mapping[str, str] = {
    **{"collection": "#a9acd4", "generation": "#a9acd4", "forward": "#8689bf", "optimisation": "#6266a8"},
    **{"scoring": "#d9a400", "held_out": "#f0d98c"},
}
"""The parts of a round's time, with colours that no early arm has."""

_HEIGHT = 340

Colours = Mapping[str, str]
"""A colour for each arm."""


def draw_figures(tables: Tables, colours: Colours, seeds: int = 1) -> list[Drawn]:
    """Return the figures whose columns are there, in the page's order."""
    evaluations, metrics, timings = tables["evaluations"], tables["metrics"], tables["timings"]
    bands = "Here and below, lines are means over seeds; bands run from the lowest seed to the highest."
    bands = f" {bands}" if seeds > 1 else ""
    drawings: list[Drawn] = []

    def draw(title: str, text: str, table: pl.DataFrame, column: str, axis: str) -> None:
        if has(table, column):
            drawings.append((title, text, over_rounds(table, column, axis, colours)))

    is_language = has(metrics, "reward")
    what = "Mean over the test's prompts" if is_language else "Mean return of the evaluation episodes"
    about = f"{what} after rounds; round 0 is the untrained policy.{bands}"
    draw(
        "Learning curves", about, evaluations, "test_return", "mean of the test" if is_language else "mean test return"
    )
    draw("Reward", "Mean reward of the round's responses, dropped ones included.", metrics, "reward", "mean reward")
    for name in (each for each in metrics.columns if each.startswith("reward.")):
        about = "Mean of this reward function over the round's responses."
        draw(f"Reward: {_escape(name[7:])}", about, metrics, name, "mean")
    draw("Length", "Tokens of a response, mean of the round.", metrics, "length", "tokens")
    about = f"Mean return of the episodes that ended in each round, as the environment paid it.{bands}"
    draw("Return of episodes", about, metrics, "round_return", "mean return of an episode")
    about = "Mean number of steps of the episodes that ended in each round."
    draw("Length of episodes", about, metrics, "round_length", "mean steps of an episode")
    if not drawings:
        about = f"Mean return of the last hundred training episodes.{bands}"
        draw("Learning curves", about, metrics, "episode_return", "mean return of training episodes")
    about = "Of the right answers to the test's problems, the share that came by other than the right steps."
    draw("Unfaithful answers", about, evaluations, "unfaithful", "share of right answers by wrong steps")
    about = "How far responses are from the start model, as the penalty estimates it."
    draw("Divergence from the start model", about, metrics, "kl", "divergence of a response (nats)")
    if has(metrics, "dropped_share") and metrics["dropped_share"].max():
        about = "The share of each rollout that trained; the rest, up to 100%, was dropped."
        drawings.append(("Records kept and dropped", about, kept_share(metrics, colours)))
    if has(metrics, "train/entropy_loss"):
        about = "How undecided the policy is. Where it falls early, the policy stops exploring."
        entropies = metrics.with_columns(entropy=-pl.col("train/entropy_loss"))
        draw("Policy entropy", about, entropies, "entropy", "policy entropy (nats)")
    about = "How far the round's optimisation took the policy from the one that collected it."
    draw("Approximate KL", about, metrics, "train/approx_kl", "approximate KL (nats)")
    clock = "cpu" if has(timings, "collection_cpu") else "wall"
    if has(timings, f"optimisation_{clock}"):
        seconds = "Process CPU seconds" if clock == "cpu" else "Seconds"
        about = f"{seconds} of a mean round; evaluation is left out."
        drawings.append(("Time by stage", about, seconds_by_stage(timings, clock)))
    record = "response" if is_language else "record"
    about = f"Quantiles of each round's scores. Above 0, training on the {record} raises the target."
    scored = _arms(metrics.drop_nulls("q50")) if has(metrics, "q50") else []
    return drawings + [(f"Influence, {arm}", about, influence_distribution(metrics, arm, colours)) for arm in scored]


def has(table: pl.DataFrame, column: str) -> bool:
    """Return whether a table has values in a column."""
    return column in table.columns and table[column].count() > 0


def arm_colours(arms: Iterable[str], standard: str | None) -> dict[str, str]:
    """Return a colour for each arm; that of `standard`, which others are compared with, is the same on every page."""
    others = cycle(COLOURS[1:])
    return {arm: COLOURS[0] if arm == standard else next(others) for arm in dict.fromkeys(arms)}


def kept_share(metrics: pl.DataFrame, colours: Colours) -> go.Figure:
    """Draw the share of records that trained; the rest was dropped."""
    shares = metrics.with_columns(kept=1 - pl.col("dropped_share"))
    figure = over_rounds(shares, "kept", "share of records kept", colours)
    return figure.update_yaxes(range=[0, 1.03], tickformat=".0%")


def influence_distribution(metrics: pl.DataFrame, arm: str, colours: Colours) -> go.Figure:
    """Draw, for one arm, the quantiles of the scores by round, each round's mean over seeds."""
    figure = make_figure("influence (score)").update_yaxes(zeroline=True)
    colour = colours[arm]
    scored = metrics.filter(pl.col("arm") == arm).drop_nulls("q50")
    means = scored.group_by("round").agg(pl.col("^q\\d\\d$").mean()).sort("round")
    rounds = means["round"].to_list()
    for low, high, opacity in (("q05", "q95", 0.18), ("q25", "q75", 0.32)):
        edge = {"line_width": 0, "mode": "lines", "hoverinfo": "skip"}
        name = f"{low[1:].lstrip('0')} to {high[1:]}%"
        figure.add_scatter(x=rounds, y=means[low].to_list(), **edge, showlegend=False)
        figure.add_scatter(
            x=rounds, y=means[high].to_list(), **edge, fill="tonexty", fillcolor=shade(colour, opacity), name=name
        )
    figure.add_scatter(x=rounds, y=means["q50"].to_list(), line_color=colour, mode=_mode(rounds), name="median")
    return _mark_whole_rounds(figure, means)


def stages_of(timings: pl.DataFrame, clock: str) -> list[str]:
    """Return the stages that a table of timings has seconds of, by a clock: "cpu" or "wall"."""
    return [stage for stage in STAGES if f"{stage}_{clock}" in timings.columns]


def seconds_by_stage(timings: pl.DataFrame, clock: str = "cpu") -> go.Figure:
    """Draw the mean seconds of a round by stage, by a clock: "cpu", the process's, or "wall"."""
    figure = make_figure("")
    arms = _arms(timings)
    for stage in stages_of(timings, clock):
        means = [timings.filter(pl.col("arm") == arm)[f"{stage}_{clock}"].mean() for arm in arms]
        figure.add_bar(
            **{"x": means, "y": [_escape(arm) for arm in arms], "orientation": "h", "width": 0.55},
            **{"name": stage.replace("_", "-"), "marker_color": STAGES[stage], "hovertemplate": "%{x:.3g} s"},
        )
    figure.update_yaxes(type="category", autorange="reversed", showspikes=False)
    title = f"{'CPU seconds' if clock == 'cpu' else 'seconds'} a round, mean"
    return figure.update_layout(barmode="stack", legend_traceorder="normal", xaxis_title=title, hovermode="y unified")


def over_rounds(table: pl.DataFrame, column: str, title: str, colours: Colours) -> go.Figure:
    """Draw each arm's mean of a column over rounds, with the band of its seeds' lowest and highest.

    Rows without a value are left out; `title` is the axis's.
    """
    figure = make_figure(title)
    dashes = _dashes(colours)
    values, known = pl.col(column), table.drop_nulls(column)
    for arm in _arms(known):
        by_round = known.filter(pl.col("arm") == arm).group_by("round")
        statistics = by_round.agg(mean=values.mean(), low=values.min(), high=values.max()).sort("round")
        rounds = statistics["round"].to_list()
        colour, dash = colours[arm], dashes[arm]
        band = {"line_width": 0, "mode": "lines", "hoverinfo": "skip", "showlegend": False, "legendgroup": _escape(arm)}
        if not statistics["low"].equals(statistics["high"]):
            figure.add_scatter(x=rounds, y=statistics["low"].to_list(), **band)
            figure.add_scatter(
                x=rounds, y=statistics["high"].to_list(), fill="tonexty", fillcolor=shade(colour, 0.16), **band
            )
        figure.add_scatter(
            **{"x": rounds, "y": statistics["mean"].to_list(), "mode": _mode(rounds), "name": _escape(arm)},
            **{"line": {"color": colour, "dash": dash}, "legendgroup": _escape(arm)},
        )
    # On a narrow screen the legend of many arms takes several rows; the figure grows by them.
    figure.update_layout(height=_HEIGHT + 24 * max(0, len(_arms(table)) - 6))
    return _mark_whole_rounds(figure, table)


def _dashes(colours: Colours) -> dict[str, str]:
    """Return a dash for each arm; up to four arms that share a colour have different ones."""
    used: Counter[str] = Counter()
    dashes = {}
    for arm, colour in colours.items():
        dashes[arm] = ("dash" if colour in COLOURS[4:] else "solid", "dot", "dashdot", "longdash")[used[colour] % 4]
        used[colour] += 1
    return dashes


def make_figure(y_title: str) -> go.Figure:
    """Return an empty figure over rounds, with the title of its vertical axis."""
    # Plotly takes text in the place of numbers for names of categories, in which it reads tags.
    axis: dict[str, Any] = {"automargin": True, "zeroline": False, "hoverformat": ".4~g", "type": "linear"}
    layout = {
        "template": "none",  # the page sets the colours, and a figure copies and checks all of its template
        "height": _HEIGHT,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
        "yaxis": {**axis, "title": {"text": y_title, "standoff": 10}},
        "xaxis": {**axis, "title": {"text": "round", "standoff": 8}},
        # Above the plot; the margin grows with the rows of the legend.
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hovermode": "x unified",
    }
    return go.Figure(layout=layout)


def _mark_whole_rounds(figure: go.Figure, table: pl.DataFrame) -> go.Figure:
    # By default, Plotly marks halves of few rounds.
    return figure.update_xaxes(dtick=1) if table["round"].n_unique() <= 5 else figure


def _arms(table: pl.DataFrame) -> list[str]:
    return table["arm"].unique(maintain_order=True).to_list()


def _mode(rounds: list[int]) -> str:
    # A single round makes a point and no line.
    return "lines+markers" if len(rounds) <= 20 else "lines"


def _escape(text: str) -> str:
    # Plotly reads tags in text as formatting.
    return escape(text, quote=False)


def shade(colour: str, opacity: float) -> str:
    """Return a colour such as #2f74e6 with an opacity from 0 to 1, as CSS has it."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
