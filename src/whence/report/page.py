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

from whence.experiments import STANDARD, AnyConfig, Comparison, LanguageConfig
from whence.guards import write_atomically
from whence.metrics import PAIR_METRICS
from whence.report.figures import arm_colours
from whence.report.records import Column, browsed, list_columns
from whence.report.sections import Drawn, Runs, advised, drawn, facts, latest, tables
from whence.runs import RunDirectory

HEADINGS: Mapping[str, str] = {
    "se_ave": "SE_ave",
    "se_peak": "SE_peak",
    "se_ave_literal": "SE_ave, every maximum",
    "se_peak_literal": "SE_peak, every maximum",
    "rt_peak": "RT_peak",
    "rt_peak_paper": "RT_peak (paper's)",
    "unreached": "levels never reached",
    "final_return": "final return",
    "peak_return": "peak return",
    "auc": "mean return",
}
"""What metrics are called."""

_SHOWN = ("se_ave", "se_peak", "rt_peak", "rt_peak_paper", "final_return", "peak_return", "auc")

METRICS: Mapping[str, str] = {metric: HEADINGS[metric] for metric in _SHOWN}
"""The metrics shown on a page, with their headings."""

DEFINITIONS: Mapping[str, str] = {
    "SE_ave": "the share of rounds saved until standard training's levels are reached, mean over levels.",
    "SE_peak": "the share of rounds saved until its highest level is reached.",
    "RT_peak": "the share of CPU time saved until that level (collection, scoring and optimisation; no evaluation).",
    "RT_peak (paper's)": "the same to the highest return, divided by standard training's whole time instead.",
    "Levels": "new highs of standard training's test return, each at least two standard errors above the one before.",
    "Values": "means over all pairs of method seed and standard seed, in brackets 95% t intervals over seeds.",
    f"{STANDARD} (null)": "standard seeds beside other standard seeds: the null, which the others have to beat.",
}
"""How the figures of the summary are meant."""

READING = " ".join(f"{term}: {meaning}" for term, meaning in DEFINITIONS.items())
"""The definitions in one paragraph."""


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the page of a finished comparison, atomically.

    Args:
        comparison: from `compare` or `load`.
        path: the file.
    """
    ((env, arms),) = comparison.summary.items()
    first, seeds = comparison.configs[0], sorted({config.seed for config in comparison.configs})
    configs = sorted(comparison.configs, key=lambda config: (list(arms).index(config.arm), config.seed))
    runs: Runs = {(config.arm, config.seed): comparison.run(config) for config in configs}
    shared = {name: value for name, value in first.to_json().items() if name not in ("arm", "seed")}
    _write(
        path,
        title=f"{env}: {', '.join(arms)}",
        subtitle=f"{_count(len(seeds), 'seed')}, {_count(first.rounds, 'round')}, {_evaluated(first)}.",
        summary=_summary(arms),
        definitions=DEFINITIONS,
        advice=advised(runs),
        drawn=drawn(tables(runs), list(arms), len(seeds)),
        # The records of all seeds would make the page heavy.
        runs=[browsed(run, f"{arm}, seed {seed}") for (arm, seed), run in runs.items() if seed == seeds[0]],
        columns=list_columns(runs.values()),
        facts=facts({**shared, "arms": ", ".join(arms), "seeds": ", ".join(map(str, seeds))}, runs.values()),
    )


def write_run_report(run: RunDirectory, path: Path) -> None:
    """Write the page of one run, atomically.

    Args:
        run: its directory; the run need not be finished, nor have any round.
        path: the file.
    """
    label, seed = _label(run)
    runs = {(label, seed): run}
    found = tables(runs)
    rounds, planned = found["metrics"].height, run.config.get("rounds")
    done = f"{rounds} of {_count(planned, 'round')}" if isinstance(planned, int) else _count(rounds, "round")
    _write(
        path,
        title=f"{run.config.get('env') or run.path.resolve().name}: {label}",
        subtitle=f"{done}." if seed is None else f"Seed {seed}, {done}.",
        unstarted=not run.rounds(),
        latest=latest(found),
        advice=advised(runs),
        drawn=drawn(found, [label]),
        runs=[browsed(run, label)],
        columns=list_columns([run]),
        facts=facts(run.config, [run]),
    )


def cell(metric: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return a metric's mean and interval as people read them; shares as percentages."""

    def text(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.1%}" if metric in PAIR_METRICS else f"{value:.3g}"

    interval = "" if entry["low"] is None else f"[{text(entry['low'])}, {text(entry['high'])}]"
    return text(entry["mean"]), interval


def column_heading(arm: str) -> str:
    """Return an arm's name as a column's heading; what stands under the standard arm is the null."""
    return f"{arm} (null)" if arm == STANDARD else arm


def embedded(value: Any) -> Markup:
    """Return JSON that may stand in a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so that no separator of lines is left
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _write(
    path: Path,
    *,
    drawn: Sequence[Drawn],
    runs: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    **content: Any,
) -> None:
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _file("template.html")
    )
    html = template.render(
        content,
        figures=[(title, about) for title, about, _ in drawn],
        figures_json=embedded([_plain(figure) for _, _, figure in drawn]),
        records=[run["label"] for run in runs if run["rounds"]],
        records_json=embedded(
            {"columns": [column._asdict() for column in columns], "runs": [run for run in runs if run["rounds"]]}
        ),
        style=Markup(_file("page.css")),
        plotly=Markup(get_plotlyjs()),
        figures_js=Markup(_file("figures.js")),
        records_js=Markup(_file("records.js")),
    )
    with write_atomically(path) as temporary:
        # Half of a pair of surrogates, which JSON may hold, is no character.
        temporary.write_text(html, encoding="utf-8", errors="replace")


def _file(name: str) -> str:
    return (files("whence.report") / name).read_text(encoding="utf-8")


def _plain(figure: go.Figure) -> Any:
    # Plotly's own encoder makes null of NaN. The page sets the colours that a template would.
    parts = json.loads(figure.to_json())
    parts["layout"].pop("template", None)
    return parts


def _summary(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    rows = [(heading, [cell(metric, entry[metric]) for entry in arms.values()]) for metric, heading in METRICS.items()]
    colours = arm_colours(arms)
    return {"arms": [(column_heading(arm), colours[arm]) for arm in arms], "rows": rows}


def _label(run: RunDirectory) -> tuple[str, int | None]:
    """Return what one run is called, and its seed where it is known."""
    config = run.config
    hyperparameters = config.get("hyperparameters")
    inner = hyperparameters.get("seed") if isinstance(hyperparameters, Mapping) else None
    return str(config.get("arm") or config.get("rule") or "run"), config.get("seed", inner)


def _evaluated(config: AnyConfig) -> str:
    if isinstance(config, LanguageConfig):
        return f"up to {_count(config.test_problems, 'prompt')} of the test"
    return f"{_count(config.eval_episodes, 'evaluation episode')} after each round"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
