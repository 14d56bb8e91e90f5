"""The figures of a comparison, from its tables."""

from itertools import cycle

import plotly.graph_objects as go
import polars as pl

from whence.experiments import STANDARD

COLOURS = ("#4c566a", "#d1495b", "#2a7f9e", "#e9a03b", "#6a994e", "#8e6c8a", "#b08968", "#577590")
"""The standard arm's, and then one per arm in their order."""


def learning_curves(evaluations: pl.DataFrame) -> go.Figure:
    """Draw the mean test return of each arm over rounds, with the band of its seeds' lowest and highest."""
    return _over_rounds(evaluations, "test_return", "test return")


def dropped_share(metrics: pl.DataFrame) -> go.Figure:
    """Draw the share of records that did not train."""
    return _over_rounds(metrics, "dropped_share", "share of records dropped")


def influence_distribution(metrics: pl.DataFrame, arm: str) -> go.Figure:
    """Draw, for one arm, the quantiles of the scores by round, each round's mean over seeds."""
    figure = _figure("influence")
    means = metrics.filter(pl.col("arm") == arm).group_by("round").agg(pl.col("^q\\d\\d$").mean()).sort("round")
    rounds = means["round"].to_list()
    for low, high, opacity in (("q05", "q95", 0.18), ("q25", "q75", 0.32)):
        figure.add_scatter(x=rounds, y=means[low].to_list(), line_width=0, hoverinfo="skip", showlegend=False)
        figure.add_scatter(
            x=rounds,
            y=means[high].to_list(),
            line_width=0,
            fill="tonexty",
            fillcolor=_faded(COLOURS[1], opacity),
            name=f"{low[1:].lstrip('0')} to {high[1:]}%",
        )
    figure.add_scatter(x=rounds, y=means["q50"].to_list(), line_color=COLOURS[1], name="median")
    return figure


def seconds_by_stage(timings: pl.DataFrame) -> go.Figure:
    """Draw the mean seconds of a round by stage, process CPU time."""
    figure = _figure("CPU seconds a round", rounds=False)
    arms = _arms(timings)
    for stage, colour in zip(
        ("collection", "scoring", "optimisation"), (COLOURS[2], COLOURS[1], COLOURS[3]), strict=True
    ):
        means = [timings.filter(pl.col("arm") == arm)[f"{stage}_cpu"].mean() for arm in arms]
        figure.add_bar(x=means, y=arms, orientation="h", name=stage, marker_color=colour)
    return figure.update_layout(barmode="stack", xaxis_title="CPU seconds a round", yaxis_title=None)


def _over_rounds(table: pl.DataFrame, column: str, title: str) -> go.Figure:
    figure = _figure(title)
    others = cycle(COLOURS[1:])
    for arm in _arms(table):
        colour = COLOURS[0] if arm == STANDARD else next(others)
        stated = (
            table.filter(pl.col("arm") == arm)
            .group_by("round")
            .agg(mean=pl.col(column).mean(), low=pl.col(column).min(), high=pl.col(column).max())
            .sort("round")
        )
        rounds = stated["round"].to_list()
        band = {"line_width": 0, "hoverinfo": "skip", "showlegend": False, "legendgroup": arm}
        figure.add_scatter(x=rounds, y=stated["low"].to_list(), **band)
        figure.add_scatter(x=rounds, y=stated["high"].to_list(), fill="tonexty", fillcolor=_faded(colour, 0.15), **band)
        figure.add_scatter(x=rounds, y=stated["mean"].to_list(), line_color=colour, name=arm, legendgroup=arm)
    return figure


def _figure(y_title: str, *, rounds: bool = True) -> go.Figure:
    layout = go.Layout(
        template="plotly_white",
        height=360,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        yaxis_title=y_title,
        xaxis_title="round" if rounds else None,
        legend={"orientation": "h", "y": 1.12},
        hovermode="x unified" if rounds else "closest",
    )
    return go.Figure(layout=layout)


def _arms(table: pl.DataFrame) -> list[str]:
    return table["arm"].unique(maintain_order=True).to_list()


def _faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
