"""A sweep as Markdown and pictures, beside the figures that LDA reports."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.experiments import STANDARD, Results, RunConfig
from whence.experiments.rl.plan import reads
from whence.guards import write_atomically
from whence.metrics import CURVE_METRICS
from whence.report import lda
from whence.report.figures import stages_of
from whence.report.page import DEFINITIONS, HEADINGS, cell, column_heading
from whence.report.pictures import Labels, draw

SAVED = tuple(metric for metric in HEADINGS if metric not in CURVE_METRICS)
"""The metrics of pairs of runs, in the table's order."""

_AGAINST_NULL = ("se_ave", "se_ave_literal")

_REFERENCES = (STANDARD, "random", "iif")
"""The arms that others' mean returns are held against."""

_OF_ROUNDS = {
    "dropped_share": ("records dropped", ".1%"),
    "negative_share": ("records below 0", ".1%"),
    "fell_back": ("rounds in which the guard fell back", ".1%"),
    "train/update_scale": ("update scaled by", ".3g"),
    "train/approx_kl": ("divergence (KL)", ".3g"),
    "train/clip_fraction": ("ratios clipped", ".1%"),
    "train/entropy_loss": ("entropy loss", ".3g"),
}
"""What is said of rounds, by its name in the metrics, and how it is written."""

KEY: Mapping[str, str] = {
    **DEFINITIONS,
    "Every maximum": "over the levels of LDA's paper: every strictly larger maximum, however little larger.",
    HEADINGS["unreached"].capitalize(): "their share; such a level counts as one round more than there are.",
    "Against the null": "the share saved of the rounds that other standard seeds take; pairs of one seed are left out.",
    "Returns": "means over an arm's seeds; the IQM leaves out a quarter of the seeds at either end.",
    "Less another arm's": "the mean difference over the seeds that both have, with a 95% t interval; its null is 0.",
    "Divergence": "as SB3 logs it, of the last epoch; of arms that scale it over the whole rollout, after scaling.",
    "Ratios clipped": "over all epochs; none of arms that scale the update, for which SB3 tells them of before.",
    "Records dropped": "in a mean round; of arms that scale the update, which drop none, those whose step they match.",
    "One seed": f"no interval; nor is there one of rounds and time saved where {STANDARD} has one seed.",
}
"""How the tables are meant."""


def write_tables(results: Results, summary: Mapping[str, Any], out: Path, *, pictures: bool = True) -> str:
    """Write `tables.md`, `summary.json` and each experiment's learning curves as SVG; return the Markdown.

    Args:
        results: from `load_sweep`.
        summary: from `summarise_sweep`.
        out: the directory; pictures are `figures/NAME/*.svg`.
        pictures: whether to draw.

    Raises:
        Unsupported: pictures are asked for, and there is no Kaleido or no browser that it can drive. The rest is
            written then.
    """
    text = _text(results, summary, {})
    _write(out / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    _write(out / "tables.md", text)
    if pictures:
        drawn = {group: draw(labels, out / "figures" / group) for group, labels in results.items()}
        links = {group: [file.relative_to(out).as_posix() for file in found] for group, found in drawn.items()}
        text = _text(results, summary, links)
        _write(out / "tables.md", text)
    return text


def _write(path: Path, text: str) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _text(results: Results, summary: Mapping[str, Any], links: Mapping[str, Sequence[str]]) -> str:
    key = "\n".join(f"- {term}: {meaning}" for term, meaning in KEY.items())
    sections = [_section(group, labels, summary.get(group), links.get(group, ())) for group, labels in results.items()]
    return "\n\n".join([key, *sections]) + "\n"


def _section(group: str, labels: Labels, summary: Mapping[str, Any] | None, links: Iterable[str]) -> str:
    parts = [f"## {group}", _set_up(labels), _runs(labels)]
    if (note := lda.note(_config(labels))) is not None:
        parts.append(note)
    if summary is None:
        parts.append(f"No run of {STANDARD} is finished, so there is nothing to measure the others against.")
    else:
        parts += ["Rounds and time saved:", _saved(labels, summary), "Test returns:", _returns(labels, summary)]
    if (of_rounds := _of_rounds(labels)) is not None:
        parts += ["A mean round:", of_rounds]
    parts += ["Seconds of a median round, of the process (CPU) and of the clock (wall):", _seconds(labels)]
    parts += [f"![{group}: {Path(link).stem}]({link})" for link in links]
    return "\n\n".join(parts)


def _config(labels: Labels) -> RunConfig:
    return next(iter(next(iter(labels.values())).values())).config


def _set_up(labels: Labels) -> str:
    """Say what the runs have in common, and what of it is no default."""
    config = _config(labels)
    said = {"env", "arm", "seed", "drop", "rounds", "eval_episodes", "eval_every", "optimizer", "hyperparameters"}
    stated = config.to_json()
    others = [
        f"{field.name} {json.dumps(stated[field.name])}"
        for field in fields(config)
        if field.name not in said and getattr(config, field.name) != _default(field)
    ]
    every = "" if config.eval_every == 1 else f" every {config.eval_every} rounds"
    own = [f"{name} {value}" for name, value in config.hyperparameters.items()] or ["SB3's hyper-parameters"]
    # A run at its experiment's own share is labelled by its arm alone.
    alone = [kept.config for label, runs in labels.items() for kept in runs.values() if kept.config.arm == label]
    usual = [one.drop for one in alone if reads(one, "drop")]
    drop = [f"drop {usual[0]:g} unless the arm's name says another"] if usual else []
    parts = [
        f"{config.rounds} rounds",
        f"{config.eval_episodes} evaluation episodes{every}",
        ", ".join([config.optimizer, *own]),
        *others,
        *drop,
    ]
    return f"{config.env}: {'; '.join(parts)}."


def _default(field: Any) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _runs(labels: Labels) -> str:
    found = [f"{label} {len(runs)} (seed{_listed(sorted(runs))})" for label, runs in labels.items()]
    return f"Finished runs: {', '.join(found)}."


def _listed(seeds: Sequence[int]) -> str:
    """Return seeds as people read them."""
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"s {seeds[0]} to {seeds[-1]}"
    return ("s " if len(seeds) > 1 else " ") + ", ".join(map(str, seeds))


def _saved(labels: Labels, summary: Mapping[str, Any]) -> str:
    rows = []
    for label, metrics in summary.items():
        cells = [_cell(metric, metrics[metric]) for metric in SAVED]
        against = [
            _cell(metric, metrics[metric]["against_null"]) if label != STANDARD else "" for metric in _AGAINST_NULL
        ]
        rows.append([column_heading(label), str(len(labels[label])), *cells, *against])
        if theirs := lda.row_of(next(iter(labels[label].values())).config):
            name, shares = theirs
            told = [_theirs(shares.get(metric)) for metric in SAVED]
            rows.append([f"*{name}*", "3", *told, *("" for _ in _AGAINST_NULL)])
    against = [f"{HEADINGS[metric]}, against the null" for metric in _AGAINST_NULL]
    return _table(["arm", "seeds", *(HEADINGS[metric] for metric in SAVED), *against], rows)


def _theirs(figure: Sequence[float] | None) -> str:
    return "" if figure is None else f"{figure[0]:.1%} ± {figure[1]:.1%}"


def _returns(labels: Labels, summary: Mapping[str, Any]) -> str:
    references = [arm for arm in _REFERENCES if arm in summary]
    compared = [("final_return", STANDARD), *(("auc", arm) for arm in references)]
    rows = []
    for label, metrics in summary.items():
        cells = [_cell(metric, metrics[metric]) for metric in CURVE_METRICS]
        shared = str(len(labels[label].keys() & labels[STANDARD].keys())) if label != STANDARD else ""
        less = [
            _cell(metric, metrics[metric]["differences"][other]) if label != other else "" for metric, other in compared
        ]
        rows.append([label, str(len(labels[label])), *cells, f"{metrics['auc']['iqm']:.3g}", shared, *less])
    headings = [*(HEADINGS[metric] for metric in CURVE_METRICS), "its IQM", f"seeds shared with {STANDARD}"]
    return _table(
        ["arm", "seeds", *headings, *(f"{HEADINGS[metric]} less {other}'s" for metric, other in compared)], rows
    )


def _of_rounds(labels: Labels) -> str | None:
    """Return the table of means over rounds and seeds; None where nothing of rounds was kept."""
    tables = {
        label: pl.concat([kept.tables["rounds"] for kept in runs.values()], how="diagonal_relaxed")
        for label, runs in labels.items()
    }
    there = [name for name in _OF_ROUNDS if any(name in table.columns for table in tables.values())]
    if not there:
        return None
    rows = [[label, *(_mean_of(table, name) for name in there)] for label, table in tables.items()]
    return _table(["arm", *(_OF_ROUNDS[name][0] for name in there)], rows)


def _mean_of(table: pl.DataFrame, name: str) -> str:
    if name == "train/clip_fraction" and _known(table, "train/update_scale").size:
        return ""
    known = _known(table, name)
    return f"{known.mean():{_OF_ROUNDS[name][1]}}" if len(known) else ""


def _known(table: pl.DataFrame, name: str) -> NDArray[np.float64]:
    known = table[name].drop_nulls() if name in table.columns else pl.Series([])
    return known.cast(pl.Float64).to_numpy()


def _seconds(labels: Labels) -> str:
    tables = {
        label: pl.concat([kept.tables["seconds"] for kept in runs.values()], how="diagonal_relaxed")
        for label, runs in labels.items()
    }
    stages = stages_of(next(iter(tables.values())), "cpu")
    columns = [f"{stage}_{clock}" for stage in stages for clock in ("cpu", "wall")]
    rows = []
    for label, table in tables.items():
        rows.append([label, *(f"{np.median(table[column].to_numpy()):.3f}" for column in columns)])
    for arm, seconds in lda.figures_of(_config(labels)).get("seconds", {}).items():
        theirs = {f"{stage}_wall": f"{mean:.2f}" for stage, mean in seconds.items() if stage in stages}
        rows.append([f"*LDA's {arm}*", *(theirs.get(column, "") for column in columns)])
    headings = [f"{stage}, {clock}" for stage in stages for clock in ("CPU", "wall")]
    return _table(["arm", *headings], rows)


def _cell(metric: str, entry: Mapping[str, Any]) -> str:
    return " ".join(cell(metric, entry)).strip()


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
