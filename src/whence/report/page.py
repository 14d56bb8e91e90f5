"""A comparison, or one run, as one HTML file that needs no network."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from whence.experiments import Comparison, LanguageConfig
from whence.experiments.kinds import AnyConfig
from whence.guards import write_atomically
from whence.report.figures import arm_colours
from whence.report.records import Column, browse_run, list_columns
from whence.report.sections import Drawn, Runs, draw_figures, gather_advice, list_facts, list_latest, read_tables
from whence.report.summary import COMPARISON_DEFINITIONS, make_summary
from whence.runs import RunDirectory


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the page of a finished comparison, atomically.

    Args:
        comparison: from `compare` or `load_comparison`.
        path: the file.
    """
    ((env, arms),) = comparison.summary.items()
    first, seeds = comparison.configs[0], sorted({config.seed for config in comparison.configs})
    configs = sorted(comparison.configs, key=lambda config: (list(arms).index(config.arm), config.seed))
    runs: Runs = {(config.arm, config.seed): comparison.run(config) for config in configs}
    summary = make_summary(comparison)
    shared = {name: value for name, value in first.to_json().items() if name not in ("arm", "seed")}
    _write_page(
        path,
        title=f"{env}: {', '.join(arms)}",
        subtitle=f"{_count(len(seeds), 'seed')}, {_count(first.rounds, 'round')}, {_describe_evaluation(first)}.",
        summary=summary,
        headings=zip(summary.headings, arm_colours(arms).values(), strict=True),
        definitions=COMPARISON_DEFINITIONS,
        advice=gather_advice(runs),
        drawings=draw_figures(read_tables(runs), list(arms), len(seeds)),
        # The records of all seeds would make the page heavy.
        runs=[browse_run(run, f"{arm}, seed {seed}") for (arm, seed), run in runs.items() if seed == seeds[0]],
        columns=list_columns(runs.values()),
        facts=list_facts({**shared, "arms": ", ".join(arms), "seeds": ", ".join(map(str, seeds))}, runs.values()),
    )


def write_run_report(run: RunDirectory, path: Path) -> None:
    """Write the page of one run, atomically.

    Args:
        run: its directory; the run need not be finished, nor have any round.
        path: the file.
    """
    label, seed = _label(run)
    runs = {(label, seed): run}
    tables = read_tables(runs)
    rounds, planned = tables["metrics"].height, run.config.get("rounds")
    done = f"{rounds} of {_count(planned, 'round')}" if isinstance(planned, int) else _count(rounds, "round")
    _write_page(
        path,
        title=f"{run.config.get('env') or run.path.resolve().name}: {label}",
        subtitle=f"{done}." if seed is None else f"Seed {seed}, {done}.",
        unstarted=not run.rounds(),
        latest=list_latest(tables),
        advice=gather_advice(runs),
        drawings=draw_figures(tables, [label]),
        runs=[browse_run(run, label)],
        columns=list_columns([run]),
        facts=list_facts(run.config, [run]),
    )


def embed(value: Any) -> Markup:
    """Return JSON for a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so that there is no separator of lines
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _write_page(
    path: Path,
    *,
    drawings: Sequence[Drawn],
    runs: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    **content: Any,
) -> None:
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _read_file("template.html")
    )
    html = template.render(
        content,
        figures=[(title, about) for title, about, _ in drawings],
        figures_json=embed([_plot_as_json(figure) for _, _, figure in drawings]),
        records=[run["label"] for run in runs if run["rounds"]],
        records_json=embed(
            {"columns": [column._asdict() for column in columns], "runs": [run for run in runs if run["rounds"]]}
        ),
        style=Markup(_read_file("page.css")),
        plotly=Markup(get_plotlyjs()),
        figures_js=Markup(_read_file("figures.js")),
        records_js=Markup(_read_file("records.js")),
    )
    with write_atomically(path) as temporary:
        # Half of a pair of surrogates, which JSON may hold, is no character.
        temporary.write_text(html, encoding="utf-8", errors="replace")


def _read_file(name: str) -> str:
    return (files("whence.report") / name).read_text(encoding="utf-8")


def _plot_as_json(figure: go.Figure) -> Any:
    # Plotly's own encoder turns NaN into null. The page sets the colours that a template would set.
    parts = json.loads(figure.to_json())
    parts["layout"].pop("template", None)
    return parts


def describe_comparison(comparison: Comparison) -> dict[str, Any]:
    """Return what the page of a comparison shows: its kind, arms, seeds, and rounds of a run."""
    arms, seeds = ({getattr(config, name): None for config in comparison.configs} for name in ("arm", "seed"))
    return {"kind": "comparison", "arms": list(arms), "seeds": sorted(seeds), "rounds": comparison.configs[0].rounds}


def describe_run(run: RunDirectory) -> dict[str, Any]:
    """Return what the page of a run shows: its kind, arms, seeds as far as they are known, and rounds that are done."""
    label, seed = _label(run)
    rounds = run.table("metrics").height
    return {"kind": "run", "arms": [label], "seeds": [] if seed is None else [seed], "rounds": rounds}


def _label(run: RunDirectory) -> tuple[str, int | None]:
    """Return one run's name, and its seed; None if it is not known."""
    config = run.config
    hyperparameters = config.get("hyperparameters")
    inner = hyperparameters.get("seed") if isinstance(hyperparameters, Mapping) else None
    return str(config.get("arm") or config.get("rule") or "run"), config.get("seed", inner)


def _describe_evaluation(config: AnyConfig) -> str:
    if isinstance(config, LanguageConfig):
        return f"up to {_count(config.test_problems, 'prompt')} of the test"
    return f"{_count(config.eval_episodes, 'evaluation episode')} after each round"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
