"""The page's part on phases: what `whence phases` wrote into a run directory, as sentences, figures and moments."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from whence.diagnosis.phase_summary import FORMAT, VERSION
from whence.page.explored_run import attempt
from whence.page.figures import COLOURS, make_figure, shade
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
    marks = (content.get("format"), content.get("version")) if isinstance(content, dict) else (None, None)
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
            **{key: _format(moment[key]) for key in ("advantage", "score")},
        }
        for phase in content["phases"]
        for moment in phase["moments"]
    ]
    sentences = [str(sentence) for sentence in content["sentences"]]
    return ShownHistory(name, sentences, draw_history(content), moments)


def draw_history(content: dict[str, Any]) -> list[Drawn]:
    """Return the figures of a summary: the behaviour's probability, its roughness, and that over permuted scores'."""
    name = str(content["behaviour"]["name"])
    drawings = [
        (
            "Probability",
            "Of the behaviour, by the policy of each round and by the last one. Dashed lines separate the phases.",
            _draw_preference(content),
        ),
        (
            "Roughness",
            "How much similar states' scores differ, as a share of the largest score. Dotted: permuted scores.",
            _draw_roughness(content),
        ),
        (
            "Roughness next to chance",
            "At 1, similar states score no more alike than any. Below 1, they score alike.",
            _draw_relative(content),
        ),
    ]
    for _, _, figure in drawings:
        for _, last, _ in _read_levels(content["phases"], "roughness")[:-1]:
            figure.add_vline(x=last + 0.5, line={"color": _PERMUTED, "width": 1, "dash": "dash"})
    return [(f"{title}: {name}", text, figure) for title, text, figure in drawings]


def _draw_preference(content: dict[str, Any]) -> go.Figure:
    kind = "log-density" if content["is_density"] else "π(a|s)"
    numbers = _read_numbers(content)
    after = [numbers[-1] + 1] * (len(content["preference"]) - len(numbers))
    figure = make_figure(kind)
    _add_line(figure, [*numbers, *after], content["preference"], kind, _PROBABILITY)
    return figure if content["is_density"] else figure.update_yaxes(range=[0, 1.03])


def _draw_roughness(content: dict[str, Any]) -> go.Figure:
    numbers, rounds = _read_numbers(content), content["rounds"]
    figure = make_figure("roughness")
    _add_band(figure, numbers, rounds["low"], rounds["high"])
    _add_line(figure, numbers, rounds["expected"], "permuted scores", _PERMUTED, dash="dot")
    _add_line(figure, numbers, rounds["roughness"], "roughness", _ROUGHNESS)
    _add_levels(figure, _read_levels(content["phases"], "roughness"), _ROUGHNESS)
    return figure.update_yaxes(rangemode="tozero")


def _draw_relative(content: dict[str, Any]) -> go.Figure:
    figure = make_figure("roughness / permuted")
    figure.add_hline(y=1, line={"color": _PERMUTED, "width": 1.5, "dash": "dot"})
    _add_line(figure, _read_numbers(content), content["rounds"]["relative"], "roughness / permuted", _RELATIVE)
    _add_levels(figure, _read_levels(content["relative_phases"], "relative"), _RELATIVE)
    return figure.update_yaxes(rangemode="tozero")


def _read_numbers(content: dict[str, Any]) -> list[int]:
    return [int(number) for number in content["rounds"]["round"]]


def _read_levels(phases: Sequence[dict[str, Any]], name: str) -> list[tuple[int, int, float]]:
    """Return the first round, the last round and the level of each phase."""
    return [(int(phase["first"]), int(phase["last"]), float(phase[name])) for phase in phases]


def _add_line(
    figure: go.Figure, x: Sequence[int], y: Sequence[Any], name: str, colour: str, dash: str = "solid"
) -> None:
    values = [None if value is None or not math.isfinite(value) else float(value) for value in y]
    figure.add_scatter(x=list(x), y=values, name=name, mode="lines", line={"color": colour, "dash": dash})


def _add_levels(figure: go.Figure, levels: Sequence[tuple[int, int, float]], colour: str) -> None:
    """Draw the level of each phase as one line with gaps."""
    x = [number for first, last, _ in levels for number in (first - 0.4, last + 0.4, None)]
    y = [value for *_, level in levels for value in (level, level, None)]
    line = {"color": shade(colour, 0.45), "width": 5}
    figure.add_scatter(x=x, y=y, mode="lines", line=line, name="mean of a phase", hoverinfo="skip")


def _add_band(figure: go.Figure, x: Sequence[int], low: Sequence[Any], high: Sequence[Any]) -> None:
    edge = {"x": list(x), "mode": "lines", "line_width": 0, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(y=list(low), **edge)
    figure.add_scatter(y=list(high), fill="tonexty", fillcolor=shade(_PERMUTED, 0.3), **edge)


def _format(number: Any) -> str:
    return "–" if number is None else f"{float(number):.3g}"
