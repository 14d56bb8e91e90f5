"""A comparison, or one run, as one HTML file that needs no network; and the same page for a server."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from whence.experiments import AnyConfig, AnyEnv, Comparison, LanguageConfig
from whence.guards import write_atomically
from whence.page.comparison_summary import COMPARISON_DEFINITIONS, make_summary
from whence.page.explored_run import ExploredRun, attempt, identify_run
from whence.page.explorer.embedding import COMPARED_ROUNDS, OnRound, embed_rounds, spread
from whence.page.explorer.responses import ShownAnswers, read_answers
from whence.page.explorer.rounds import describe_runs
from whence.page.figures import arm_colours
from whence.page.histories import ShownHistory, read_histories
from whence.page.sections import (
    Drawn,
    Runs,
    describe_arm,
    draw_figures,
    gather_advice,
    list_facts,
    list_latest,
    mark_code,
    read_tables,
)
from whence.runs import RunDirectory

SCRIPTS = (
    "vendor/tabulator/tabulator.min.js",
    *("base.js", "source.js", "strip.js", "curves.js", "causes.js", "tokens.js"),
    *("moment.js", "lists.js", "map.js", "grid.js", "explorer.js"),
)
"""Scripts of the page's explorer, in page/assets, in the order in which they run."""

STYLES = ("vendor/tabulator/tabulator_simple.min.css", "explorer.css")
"""Style sheets of the page's explorer, in page/assets, after the page's own."""


def write_report(
    shown: Comparison | RunDirectory | ExploredRun,
    path: Path,
    *,
    env: AnyEnv = None,
    rounds: Sequence[int] | None = None,
    continuations: int = 0,
    on_round: OnRound | None = None,
) -> None:
    """Write the page of a run or of a finished comparison, atomically.

    Args:
        shown: a comparison; or a run, which need not be finished, nor have any round.
        path: the file.
        env: the environment, for frames; None: the runs' own.
        rounds: those to embed, of a comparison those of the first seed's runs; None: all, of a comparison at most 12
            of each run, evenly spread.
        continuations: rollouts by which the advantages of framed moments are measured; 0: they are not.
        on_round: called after each embedded round with the number of those that are done, and of all.
    """
    embedding: dict[str, Any] = {"mode": "file", "continuations": continuations, "on_round": on_round}
    if isinstance(shown, Comparison):
        html = _render_comparison(shown, env, rounds, embedding)
    else:
        run = shown if isinstance(shown, ExploredRun) else ExploredRun(shown, env=env)
        html = render_runs([run], rounds=[choose_rounds(run, rounds, None)], **embedding)
    with write_atomically(path) as temporary:
        # Half of a pair of surrogates, which JSON may hold, is no character.
        temporary.write_text(html, encoding="utf-8", errors="replace")


def _render_comparison(
    comparison: Comparison, env: AnyEnv, rounds: Sequence[int] | None, embedding: Mapping[str, Any]
) -> str:
    ((env_name, arms),) = comparison.summary.items()
    first, seeds = comparison.configs[0], sorted({config.seed for config in comparison.configs})
    configs = sorted(comparison.configs, key=lambda config: (list(arms).index(config.arm), config.seed))
    runs: Runs = {(config.arm, config.seed): comparison.run(config) for config in configs}
    summary = make_summary(comparison)
    shared = {name: value for name, value in first.to_json().items() if name not in ("arm", "seed")}
    # The rounds of all seeds would make the file heavy.
    explored = [ExploredRun(run, f"{arm}, seed {seed}", env) for (arm, seed), run in runs.items() if seed == seeds[0]]
    chosen = [choose_rounds(run, rounds, COMPARED_ROUNDS) for run in explored]
    notes: list[str] = []
    if any(len(numbers) < len(run.directory.rounds()) for run, numbers in zip(explored, chosen, strict=True)):
        notes.append(
            f"This file holds {len(chosen[0])} rounds of each run of the first seed. The command "
            f"`whence view {comparison.path}` shows all of them."
        )
    tables = read_tables(runs)
    return _render(
        title=f"{env_name}: {', '.join(arms)}",
        subtitle=f"{_count(len(seeds), 'seed')}, {_count(first.rounds, 'round')}, {_describe_evaluation(first)}.",
        summary=summary,
        headings=zip(summary.headings, arm_colours(arms).values(), strict=True),
        definitions=COMPARISON_DEFINITIONS,
        advice=attempt(lambda: gather_advice(runs), notes, "Advice cannot be given", {}),
        answers=_read_answers(explored, notes),
        drawings=attempt(lambda: draw_figures(tables, list(arms), len(seeds)), notes, "Figures cannot be drawn", []),
        explored=explored,
        rounds=chosen,
        **embedding,
        facts=list_facts({**shared, "arms": ", ".join(arms), "seeds": ", ".join(map(str, seeds))}, runs.values()),
        notes=notes,
    )


def render_runs(runs: Sequence[ExploredRun], *, mode: str, notes: Sequence[str] = (), **embedding: Any) -> str:
    """Return the page of one run, or of several next to each other.

    Args:
        runs: at least one.
        mode: "file": the rounds are embedded; "served": a server is asked for them.
        notes: shown on top.
        embedding: `rounds`, `continuations` and `on_round`, if the rounds are embedded; see `write_report`.
    """
    notes = [*notes]
    directories = _name_runs(runs)
    tables = read_tables(directories)
    first = runs[0].directory
    label, seed = identify_run(first)
    labels = [name for name, _ in directories]
    done, planned = tables["metrics"].height, runs[0].planned
    counted = f"{done} of {_count(planned, 'round')}" if planned is not None else _count(done, "round")
    subtitle = f"{counted}. " if seed is None else f"Seed {seed}, {counted}. "
    name = first.config.get("env") or first.path.resolve().name
    is_traceable = len(runs) == 1 and not runs[0].is_language and bool(first.rounds())
    return _render(
        title=f"{name}: {label if len(runs) == 1 else ', '.join(labels)}",
        subtitle=(subtitle + describe_arm(first)).strip() if len(runs) == 1 else f"{_count(len(runs), 'run')}.",
        unstarted=not any(run.directory.rounds() for run in runs),
        latest=list_latest(tables) if len(runs) == 1 else [],
        advice=attempt(lambda: gather_advice(directories), notes, "Advice cannot be given", {}),
        drawings=attempt(lambda: draw_figures(tables, labels), notes, "Figures cannot be drawn", []),
        answers=_read_answers(runs, notes),
        histories=read_histories(first, notes) if is_traceable else None,
        run_path=str(first.path),
        explored=runs,
        mode=mode,
        facts=list_facts(first.config, directories.values()),
        notes=notes,
        **embedding,
    )


def list_figures(runs: Sequence[ExploredRun]) -> list[dict[str, Any]]:
    """Return the page's figures with titles and explanations, as Plotly's JSON."""
    directories = _name_runs(runs)
    drawings = attempt(
        lambda: draw_figures(read_tables(directories), [name for name, _ in directories]), [], "Figures", []
    )
    histories = read_histories(runs[0].directory, []) if len(runs) == 1 else []
    drawings += [figure for history in histories for figure in history.figures]
    return [{"title": title, "about": about, "figure": _plot_as_json(figure)} for title, about, figure in drawings]


def _read_answers(runs: Sequence[ExploredRun], notes: list[str]) -> ShownAnswers | None:
    """Return what language models answered before and after training."""
    return read_answers({run.label: run.directory for run in runs}, notes) if runs[0].is_language else None


def choose_rounds(run: ExploredRun, wanted: Sequence[int] | None, most: int | None) -> list[int]:
    """Return the rounds of a run to embed: those wanted that are there, or at most `most`, evenly spread."""
    numbers = run.directory.rounds()
    if wanted is not None:
        return [number for number in numbers if number in wanted]
    return numbers if most is None else spread(numbers, most)


def _name_runs(runs: Sequence[ExploredRun]) -> Runs:
    if len(runs) == 1:
        return {identify_run(runs[0].directory): runs[0].directory}
    return {(run.label, None): run.directory for run in runs}


def embed(value: Any) -> Markup:
    """Return JSON for a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so that there is no separator of lines
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _render(
    *,
    drawings: Sequence[Drawn],
    explored: Sequence[ExploredRun],
    mode: str,
    rounds: Sequence[Sequence[int]] = (),
    continuations: int = 0,
    on_round: OnRound | None = None,
    histories: Sequence[ShownHistory] | None = None,
    notes: Sequence[str] = (),
    **content: Any,
) -> str:
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _read_file("template.html")
    )
    is_file = mode == "file"
    page = describe_runs(explored, mode="file" if is_file else "served", rounds=rounds if is_file else None)
    embedded = embed_rounds(explored, rounds, continuations=continuations, on_round=on_round) if is_file else iter(())
    places = count(len(drawings))  # of the histories' figures, after the page's
    sections = [
        {**history._asdict(), "figures": [(next(places), title, about) for title, about, _ in history.figures]}
        for history in histories or ()
    ]
    history_figures = [figure for history in histories or () for figure in history.figures]
    return template.render(
        content,
        notes=[mark_code(note) for note in notes],
        mode=mode,
        figures=[(title, about) for title, about, _ in drawings],
        figures_json=embed([_plot_as_json(figure) for _, _, figure in [*drawings, *history_figures]]),
        histories=None if histories is None else sections,
        explored=not is_file or any(rounds),
        page_json=embed(page),
        round_scripts=list(embedded),
        style=Markup("\n".join(_read_file(name) for name in ("page.css", *STYLES))),
        plotly=Markup(get_plotlyjs()),
        figures_js=Markup(_read_file("figures.js")),
        scripts=[Markup(_read_file(name)) for name in SCRIPTS],
    )


def _read_file(name: str) -> str:
    return (files("whence.page") / "assets" / name).read_text(encoding="utf-8")


def _plot_as_json(figure: go.Figure) -> Any:
    # Plotly's own encoder turns NaN into null. The page sets the colours that a template would set.
    parts = json.loads(figure.to_json())
    parts["layout"].pop("template", None)
    return parts


def _describe_evaluation(config: AnyConfig) -> str:
    if isinstance(config, LanguageConfig):
        return f"up to {_count(config.test_problems, 'prompt')} of the test"
    return f"{_count(config.eval_episodes, 'evaluation episode')} after each round"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
