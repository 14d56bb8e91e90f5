"""Draw LDA's Figures 3, 4 and 8 from the first seed of plain PPO: four pictures.

Run: `python -m studies.diagnosis.figures results/diagnosis`. Needs a Chromium, which Kaleido drives.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import plotly.graph_objects as go
import polars as pl
import scipy
import torch
import typer
from plotly.io import write_images
from plotly.subplots import make_subplots

from studies.diagnosis.judgement import SHARE, judge_advantages, read_scored_round
from studies.diagnosis.run import SETUPS, policy_table, train
from studies.phases.phases import find_behaviour
from whence import RunDirectory, attribute
from whence.causes.grid_map import MOST, GridMap, map_extremes
from whence.sb3 import model_objective
from whence.stored.agents import action_labels, load_round

POSITIVE, NEGATIVE, MARK, INK = "#2f74e6", "#d1495b", "#d9a400", "#1f2328"
SIGNS = {"advantage above 0": POSITIVE, "advantage below 0": NEGATIVE}
FILLS = {"wall": "#9aa4af", "hole": "#3b4650", "goal": "#bfe5c8"}
LETTERS = {"start": ("S", INK, 0.12), "hole": ("H", "white", 0.5), "goal": ("G", INK, 0.5)}
SIDES = {"worst": f"the worst {MOST}", "best": f"the best {MOST}"}

STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Columns and rows that an action goes: right, down, left, up."""

MINIGRID_ROUND, WORST, ACROSS = 5, 20, 5
VIEW = 7
"""Cells that MiniGrid's agent sees ahead, and across."""

Marks = Sequence[dict[str, Any]]
"""Shapes, which have a type, and annotations of a map, in columns and rows of cells."""


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = Path("out/figures"),
) -> None:
    """Train what is not there yet, and write the pictures."""
    torch.set_num_threads(1)
    rounds = SETUPS["frozenlake"].rounds
    lake = train("frozenlake", 0, runs / "frozenlake", rounds[-1])
    figures = {
        "frozenlake.svg": draw_lake(lake, {number: read_scored_round(lake, number) for number in rounds}),
        "advantages.png": draw_advantages(lake, rounds),
        "behaviour.svg": draw_behaviour(lake, rounds),
        "minigrid.png": draw_minigrid(train("minigrid", 0, runs / "minigrid", MINIGRID_ROUND)),
    }
    heights = [figure.layout.height for figure in figures.values()]  # which Plotly leaves out here
    write_images([*figures.values()], [out / name for name in figures], width=LAYOUT["width"], height=heights)


def draw_lake(
    run: RunDirectory, rounds: Mapping[int, pl.DataFrame], sides: Mapping[str, str] = SIDES, marks: Marks = ()
) -> go.Figure:
    """Draw by state and action, on FrozenLake's map, the records that score lowest and highest (LDA Fig. 3a, 8)."""
    maps = {number: map_extremes(run, records) for number, records in rounds.items()}
    titles, panels = [], []
    for side, name in sides.items():
        for number, world in maps.items():
            assert world is not None
            arrows = (draw_arrow(world, arrow) for arrow in world.arrows.filter(side=side).iter_rows(named=True))
            titles.append(f"round {number}: {name}")
            panels.append([*draw_cells(world), *chain(*arrows), *marks])
    return draw_panels(titles, panels, len(rounds), 4)


def draw_behaviour(run: RunDirectory, rounds: Sequence[int]) -> go.Figure:
    """Draw the behaviour that training raised most, and what raised and lowered it most (LDA Fig. 4)."""
    behaviour, scored, chances = find_behaviour(run), {}, []
    state, action = (int(torch.as_tensor(value).item()) for value in (behaviour.observation, behaviour.action))
    for number in rounds:
        model, records = load_round(run, number)
        influence = attribute(model.policy, records, target=behaviour, objective=model_objective(model))
        table = run.round("records", number).select(pl.exclude("score", "error"))
        scored[number] = table.join(influence.to_polars().select("record_id", "score"), on="record_id")
        chances.append(f"{policy_table(model)[state, action]:.2f}")
    sides = {"best": f"the {MOST} that raise it most", "worst": f"the {MOST} that lower it most"}
    corner = {"x0": state % 4, "y0": state // 4, "x1": state % 4 + 1, "y1": state // 4 + 1}
    figure = draw_lake(run, scored, sides, [{"type": "rect", **corner, "line": {"color": MARK, "width": 3}}])
    name = (action_labels(run.config["env"], run.config) or {})[action]
    return add_legend(figure, {f"the behaviour: “{name}” here; its probability: {', '.join(chances)}": MARK})


def draw_minigrid(run: RunDirectory) -> go.Figure:
    """Draw the worst records of a round of MiniGrid, each with what its agent sees and does (LDA Fig. 3b)."""
    records = read_scored_round(run, MINIGRID_ROUND).sort("score", "record_id").head(WORST)
    titles, panels = [], []
    for place, advantage in enumerate(records["advantage"]):
        world = map_extremes(run, records[place : place + 1])
        assert world is not None
        arrow = world.arrows.row(0, named=True)
        titles.append(f"{arrow['action']}, Â {advantage:+.3f}".replace("-", "−"))
        panels.append([draw_view(world, arrow), *draw_cells(world), *draw_agent(world, arrow)])
    return draw_panels(titles, panels, ACROSS, 8)


def draw_advantages(run: RunDirectory, rounds: Sequence[int]) -> go.Figure:
    """Draw measured against trained advantages over the rank of influence (LDA Fig. 3c, d)."""
    names = {"distance": "|Ā − Â|", "product": "Ā · Â"}
    figure = make_subplots(2, len(rounds), shared_xaxes=True, horizontal_spacing=0.06, vertical_spacing=0.06)
    for column, number in enumerate(rounds, 1):
        measured, trained = pl.col("mc_advantage"), pl.col("advantage")
        judged = judge_advantages(run, number, "visits").sort("position").with_row_index("rank", 1)
        judged = judged.with_columns(distance=(measured - trained).abs(), product=measured * trained)
        for mismatch, colour in ((False, POSITIVE), (True, NEGATIVE)):
            points = judged.filter(mismatch=mismatch)
            for row, name in enumerate(names, 1):
                dots = {"mode": "markers", "marker": {"size": 3, "color": colour}, "showlegend": False}
                figure.add_scatter(x=points["rank"], y=points[name], **dots, row=row, col=column)
        for low, high, colour in ((0, SHARE, POSITIVE), (1 - SHARE, 1, NEGATIVE)):
            ends = low * len(judged), high * len(judged)
            figure.add_vrect(*ends, fillcolor=colour, opacity=0.1, line_width=0, row="all", col=column)
        spearman = scipy.stats.spearmanr(judged["score"], judged["product"]).statistic
        title = f"round {number}: Spearman {spearman:.2f}, by rank {-spearman:.2f}".replace("-", "−")
        figure.update_xaxes(title=title, side="top", row=1, col=column)
        figure.update_xaxes(title="rank by influence (1: highest)", row=2, col=column)
    figure.update_xaxes(title_font_size=12)
    for row, title in enumerate(names.values(), 1):
        figure.update_yaxes(title=title, row=row, col=1)
    signs = {"Ā and Â have the same sign": POSITIVE, "opposite signs": NEGATIVE}
    return add_legend(figure.update_layout(**LAYOUT, height=520).update_layout(legend_y=1.1), signs)


LAYOUT: dict[str, Any] = {
    **{"template": "plotly_white", "width": 900, "margin": {"l": 12, "r": 12, "t": 60, "b": 12}},
    "font": {"family": "sans-serif", "size": 12, "color": INK},
    "legend": {"orientation": "h", "x": 0.5, "xanchor": "center", "y": 1.06, "yanchor": "bottom"},
}


def draw_panels(titles: Sequence[str], panels: Sequence[Marks], across: int, size: int) -> go.Figure:
    """Return a figure of square maps of so many cells, with a legend of signs."""
    rows = len(titles) // across
    spaces = {"horizontal_spacing": 0.02, "vertical_spacing": 0.14 / rows}
    figure = make_subplots(rows, across, subplot_titles=titles, **spaces).update_annotations(font_size=12)
    # All marks are handed over at once: Plotly copies what it has with each one that is added.
    shapes, notes = [], [*figure.layout.annotations]
    for place, marks in enumerate(panels):
        axes = {f"{axis}ref": axis + (str(place + 1) if place else "") for axis in "xy"}
        for mark in marks:
            (shapes if "type" in mark else notes).append({**mark, **axes})
        figure.update_yaxes(scaleanchor=axes["xref"], row=place // across + 1, col=place % across + 1)
    for note in notes[len(titles) :]:
        note |= {"axref": note["xref"], "ayref": note["yref"]} if "ax" in note else {"showarrow": False}
    figure.update_xaxes(visible=False, range=[0, size]).update_yaxes(visible=False, range=[size, 0])
    figure.update_layout(**LAYOUT, shapes=shapes, annotations=notes, height=100 + rows * 870 // across)
    return add_legend(figure, SIGNS)


def add_legend(figure: go.Figure, colours: Mapping[str, str]) -> go.Figure:
    """Add names of colours above a figure."""
    for name, colour in colours.items():
        figure.add_scatter(x=[None], y=[None], name=name, mode="markers", marker={"size": 10, "color": colour})
    return figure


def draw_cells(world: GridMap) -> Iterator[dict[str, Any]]:
    """Draw a map's grid, its walls, holes and goal."""
    places = [(kind, *divmod(index, world.cols)) for index, kind in enumerate(world.cells)]
    for kind in dict.fromkeys(world.cells):
        path = "".join(f"M{x},{y}H{x + 1}V{y + 1}H{x}Z" for name, y, x in places if name == kind)
        yield {"type": "path", "path": path, "fillcolor": FILLS.get(kind), "line": {"color": "#d0d7de", "width": 1}}
    for kind, y, x in places:
        if kind in LETTERS:
            text, colour, middle = LETTERS[kind]
            yield {"x": x + middle, "y": y + middle, "text": text, "font": {"color": colour}}


def draw_view(world: GridMap, arrow: Mapping[str, Any]) -> dict[str, Any]:
    """Shade what MiniGrid's agent sees: a square ahead of it, as far as the grid goes."""
    corners = {}
    for axis, at, step in zip("yx", divmod(arrow["cell"], world.cols), STEPS[arrow["direction"]][::-1], strict=True):
        low = at - (VIEW // 2 if step == 0 else (VIEW - 1) * (step < 0))
        corners |= {f"{axis}0": max(low, 0), f"{axis}1": min(low + VIEW, world.cols)}
    return {"type": "rect", **corners, "fillcolor": "#e7e3d0", "line": {"width": 0}}


def draw_arrow(world: GridMap, arrow: Mapping[str, Any]) -> Marks:
    """Draw where an agent goes, from the middle of its cell, next to the number of records."""
    (row, column), (right, down) = divmod(arrow["cell"], world.cols), STEPS[arrow["direction"]]
    x, y, colour = column + 0.5, row + 0.5, POSITIVE if arrow["praised"] > 0.5 else NEGATIVE
    count = {"text": str(arrow["count"]), "font": {"size": 10, "color": colour}}
    beside = {"x": x + 0.27 * right - 0.2 * down, "y": y + 0.27 * down + 0.2 * right}
    ends = (x + 0.12 * right, y + 0.12 * down), (x + 0.45 * right, y + 0.45 * down)
    return [point(*ends, colour), {**beside, **count}]


def draw_agent(world: GridMap, arrow: Mapping[str, Any]) -> Marks:
    """Draw MiniGrid's agent, a triangle that looks ahead, and an arrow of where it goes or turns, if it does."""
    (row, column), (right, down) = divmod(arrow["cell"], world.cols), STEPS[arrow["direction"]]

    def at(ahead: float, side: float = 0.0) -> tuple[float, float]:
        return column + 0.5 + ahead * right - side * down, row + 0.5 + ahead * down + side * right

    corners = "L".join(f"{x:g},{y:g}" for x, y in (at(0.4), at(-0.35, 0.35), at(-0.35, -0.35)))
    agent = {"type": "path", "path": f"M{corners}Z", "fillcolor": INK, "line": {"width": 0}}
    if arrow["turn"] is None:
        return [agent]
    end = at(0.6, 1.3 * arrow["turn"]) if arrow["turn"] else at(1.7)
    return [agent, point(at(0.6), end, POSITIVE if arrow["praised"] > 0.5 else NEGATIVE)]


def point(start: tuple[float, float], end: tuple[float, float], colour: str) -> dict[str, Any]:
    """Draw an arrow."""
    ends = {"ax": start[0], "ay": start[1], "x": end[0], "y": end[1]}
    return {**ends, "arrowhead": 2, "arrowwidth": 2, "arrowcolor": colour, "text": ""}


if __name__ == "__main__":
    typer.run(main)
