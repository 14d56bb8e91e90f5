"""The page's part on phases: what `whence phases` wrote into a run directory, as sentences, figures and moments."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from whence.diagnosis.phases import FORMAT, VERSION
from whence.page.explored_run import attempt
from whence.page.figures import COLOURS, make_figure, shade
from whence.page.moment_view import format_number
from whence.runs import RunDirectory

SHOWN = 4
"""Behaviours that a page shows at most, those that were measured last."""

_PROBABILITY, _ROUGHNESS, _PERMUTED, _RELATIVE = COLOURS[2], COLOURS[1], COLOURS[0], COLOURS[3]

Drawn = tuple[str, str, go.Figure]
"""A figure with its title and what it shows."""


class ShownHistory(NamedTuple):
    """A behaviour's history as the page shows it.

    Attributes:
        name: the behaviour.
        sentences: when it arose, and which phases its roughness has.
        figures: its probability, roughness, and roughness over that of permuted scores.
        moments: a row for each moment that raised it: cells in the order of `MOMENT_HEADINGS`.
    """

    name: str
    sentences: list[str]
    figures: list[Drawn]
    moments: list[dict[str, Any]]


def read_histories(run: RunDirectory, notes: list[str]) -> list[ShownHistory]:
    """Return the histories in a run directory, the latest first; a damaged file is left out, with a note."""
    files = sorted((run.path / "phases").glob("*.json"), key=lambda file: (-file.stat().st_mtime, file.name))
    histories = (attempt(partial(_read_history, file), notes, f"{file} is not shown", None) for file in files[:SHOWN])
    return [history for history in histories if history is not None]


def _read_history(file: Path) -> ShownHistory:
    content = json.loads(file.read_text(encoding="utf-8"))
    marks = content.get("format"), content.get("version")
    if marks != (FORMAT, VERSION):
        raise ValueError(f"it is marked {marks[0]!r}, version {marks[1]!r}. Run whence phases again.")
    return show_history(content)


def show_history(content: dict[str, Any]) -> ShownHistory:
    """Return a summary of `summarise_history` as the page shows it. Texts are escaped where they are put in."""
    name = str(content["behaviour"]["name"])
    moments = [
        {
            "phase": f"{int(phase['first'])}–{int(phase['last'])}",
            **{key: int(moment[key]) for key in ("round", "record")},
            **{key: "–" if moment[key] is None else str(moment[key]) for key in ("episode_id", "step", "action")},
            **{key: format_number(moment[key]) for key in ("advantage", "score")},
        }
        for phase in content["phases"]
        for moment in phase["moments"]
    ]
    sentences = [str(sentence) for sentence in content["sentences"]]
    return ShownHistory(name, sentences, draw_history(content), moments)


def draw_history(content: dict[str, Any]) -> list[Drawn]:
    """Return the figures of a summary: the behaviour's probability, its roughness, and that over permuted scores'."""
    rounds, numbers = content["rounds"], content["rounds"]["round"]
    kind = "log-density" if content["is_density"] else "π(a|s)"
    after = [numbers[-1] + 1] * (len(content["preference"]) - len(numbers))
    probability, roughness, relative = map(make_figure, (kind, "roughness", "roughness / permuted"))
    _add_line(probability, [*numbers, *after], content["preference"], kind, _PROBABILITY)
    if not content["is_density"]:
        probability.update_yaxes(range=[0, 1.03])
    edge = {"x": numbers, "mode": "lines", "line_width": 0, "hoverinfo": "skip", "showlegend": False}
    roughness.add_scatter(y=rounds["low"], **edge)
    roughness.add_scatter(y=rounds["high"], fill="tonexty", fillcolor=shade(_PERMUTED, 0.3), **edge)
    _add_line(roughness, numbers, rounds["expected"], "permuted scores", _PERMUTED, dash="dot")
    _add_line(roughness, numbers, rounds["roughness"], "roughness", _ROUGHNESS)
    _add_levels(roughness, content["phases"], "roughness", _ROUGHNESS)
    relative.add_hline(y=1, line={"color": _PERMUTED, "width": 1.5, "dash": "dot"})
    _add_line(relative, numbers, rounds["relative"], "roughness / permuted", _RELATIVE)
    _add_levels(relative, content["phases"], "relative", _RELATIVE)
    drawings = {
        "Probability": "Of the behaviour, by the policy of each round and by the last one. Dashed lines separate the "
        "phases.",
        "Roughness": "How much similar states' scores differ, as a share of the largest score. Dotted: permuted "
        "scores.",
        "Roughness next to chance": "At 1, similar states score no more alike than any. Below 1, they score alike.",
    }
    shown = []
    for (title, text), figure in zip(drawings.items(), (probability, roughness, relative), strict=True):
        for phase in content["phases"][:-1]:
            figure.add_vline(x=phase["last"] + 0.5, line={"color": _PERMUTED, "width": 1, "dash": "dash"})
        shown.append((f"{title}: {content['behaviour']['name']}", text, figure))
    return shown


def _add_line(
    figure: go.Figure, x: Sequence[int], y: Sequence[Any], name: str, colour: str, dash: str = "solid"
) -> None:
    values = [None if value is None or not math.isfinite(value) else float(value) for value in y]
    figure.add_scatter(x=list(x), y=values, name=name, mode="lines", line={"color": colour, "dash": dash})


def _add_levels(figure: go.Figure, phases: Sequence[dict[str, Any]], name: str, colour: str) -> None:
    """Draw the level of each phase as one line with gaps, from 0 on."""
    x = [number for phase in phases for number in (phase["first"] - 0.4, phase["last"] + 0.4, None)]
    y = [level for phase in phases for level in (phase[name], phase[name], None)]
    line = {"color": shade(colour, 0.45), "width": 5}
    figure.add_scatter(x=x, y=y, mode="lines", line=line, name="mean of a phase", hoverinfo="skip")
    figure.update_yaxes(rangemode="tozero")
