"""A comparison as one HTML file that needs no network."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import plotly.io

from whence.experiments import STANDARD, Comparison
from whence.guards import written_atomically
from whence.report import figures

METRICS: Mapping[str, str] = {
    "se_ave": "SE_ave",
    "se_peak": "SE_peak",
    "rt_peak": "RT_peak",
    "rt_peak_paper": "RT_peak (paper's)",
    "final_return": "final return",
    "peak_return": "peak return",
    "auc": "mean return",
}
"""The metrics shown, with their headings; the first four are shares."""

READING = (
    "SE_ave and SE_peak are the rounds saved until standard training's levels, and its highest level, are reached; "
    "RT_peak is the CPU time saved until that level (collection, scoring and optimisation; no evaluation). The "
    "paper's RT_peak divides by standard training's whole time instead of its time to the peak. Values are means "
    "over all pairs of method seed and standard seed, in brackets 95% bootstrap intervals over seeds. What stands "
    "under ppo compares standard seeds with other standard seeds: that is the null, which the others have to beat."
)


def cell(metric: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return a metric's mean and interval as people read them; shares as percentages."""

    def text(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.1%}" if metric.startswith(("se_", "rt_")) else f"{value:.3g}"

    interval = "" if entry["low"] is None else f"[{text(entry['low'])}, {text(entry['high'])}]"
    return text(entry["mean"]), interval


def column_heading(arm: str) -> str:
    """Return an arm's name as a column's heading; what stands under the standard arm is the null."""
    return f"{arm} (null)" if arm == STANDARD else arm


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the page, atomically."""
    with written_atomically(path) as temporary:
        temporary.write_text(_html(comparison), encoding="utf-8")


def _html(comparison: Comparison) -> str:
    ((env, arms),) = comparison.summary.items()
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        (files("whence.report") / "template.html").read_text(encoding="utf-8")
    )
    seeds = len({config.seed for config in comparison.configs})
    first = comparison.configs[0]
    return template.render(
        title=f"{env}: {', '.join(arms)}",
        subtitle=f"{seeds} seeds, {first.rounds} rounds, {first.eval_episodes} evaluation episodes after each round.",
        arms=[column_heading(arm) for arm in arms],
        rows=[
            {
                "metric": heading,
                "cells": [dict(zip(("mean", "range"), cell(m, e[m]), strict=True)) for e in arms.values()],
            }
            for m, heading in METRICS.items()
        ],
        reading=READING,
        figures=_figures(comparison),
        facts=_facts(comparison),
    )


def _figures(comparison: Comparison) -> list[dict[str, str]]:
    metrics = comparison.table("metrics")
    drawn = [
        (
            "Learning curves",
            "Mean over seeds of the mean test return; the band runs from the lowest seed to the highest.",
            figures.learning_curves(comparison.table("evaluations")),
        ),
        (
            "Records dropped",
            "The share of each rollout that did not train, mean over seeds and their range.",
            figures.dropped_share(metrics),
        ),
        (
            "Time by stage",
            "Process CPU seconds of a mean round; evaluation is left out.",
            figures.seconds_by_stage(comparison.table("timings")),
        ),
    ]
    if "q50" in metrics.columns:
        scored = metrics.drop_nulls("q50")["arm"].unique(maintain_order=True).to_list()
        drawn += [
            (
                f"Influence, {arm}",
                "Quantiles of each round's scores, mean over seeds. Above 0: training on the record raises the target.",
                figures.influence_distribution(metrics, arm),
            )
            for arm in scored
        ]
    # The library is put into the page once, with the first figure.
    return [
        {
            "title": title,
            "about": about,
            "html": plotly.io.to_html(
                figure, full_html=False, include_plotlyjs=number == 0, config={"displaylogo": False, "responsive": True}
            ),
        }
        for number, (title, about, figure) in enumerate(drawn)
    ]


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    first = comparison.configs[0].to_json()
    shared = {name: value for name, value in first.items() if name not in ("arm", "seed")}
    versions = dict(comparison.run(comparison.configs[0]).versions)
    facts = [*shared.items(), ("seeds", sorted({config.seed for config in comparison.configs})), ("versions", versions)]
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in facts]
