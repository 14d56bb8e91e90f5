"""A sweep as Markdown and pictures, beside the figures that LDA reports."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from whence.errors import Unsupported
from whence.experiments import STANDARD, Kept, Results, RunConfig, presets
from whence.guards import written_atomically
from whence.report.figures import arm_colours, learning_curves
from whence.report.page import cell, column_heading

SAVED: Mapping[str, str] = {
    "se_ave": "SE_ave",
    "se_peak": "SE_peak",
    "se_ave_literal": "SE_ave, every maximum",
    "se_peak_literal": "SE_peak, every maximum",
    "rt_peak": "RT_peak",
    "rt_peak_paper": "RT_peak as LDA computes it",
    "unreached": "levels never reached",
}
"""Metrics of pairs of runs, with their headings."""

RETURNS: Mapping[str, str] = {"final_return": "final", "peak_return": "peak", "auc": "mean over training"}
"""Metrics of one run, with their headings."""

STAGES = ("collection", "scoring", "optimisation")


def write_tables(results: Results, summary: Mapping[str, Any], out: Path, *, pictures: bool = True) -> str:
    """Write `tables.md`, `summary.json` and, for each experiment, learning curves as SVG; return the Markdown.

    Args:
        results: from `load_sweep`.
        summary: from `summarise_sweep`.
        out: the directory.
        pictures: whether to draw.

    Raises:
        Unsupported: pictures are asked for, and there is no Kaleido or no browser that it can drive.
    """
    parts = []
    for group, labels in results.items():
        drawn = _draw(group, labels, out / "figures") if pictures else []
        parts.append(_section(group, labels, summary.get(group), drawn))
    text = "\n\n".join(parts) + "\n"
    for name, content in (
        ("tables.md", text),
        ("summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n"),
    ):
        with written_atomically(out / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return text


@cache
def _lda() -> Mapping[str, Any]:
    return tomllib.loads((files("whence.report") / "lda.toml").read_text(encoding="utf-8"))


def _lda_of(config: RunConfig) -> Mapping[str, Any]:
    """Return what LDA reports of a run's setting: nothing where environment, optimiser or rounds are not LDA's."""
    for name, figures in _lda().items():
        theirs = presets()[f"lda-code/{name}"]
        if all(getattr(config, key) == theirs[key] for key in ("env", "env_kwargs", "optimizer", "rounds")):
            return figures  # type: ignore[no-any-return]
    return {}


def _section(
    group: str, labels: Mapping[str, Mapping[int, Kept]], summary: Mapping[str, Any] | None, drawn: Sequence[str]
) -> str:
    first = next(iter(next(iter(labels.values())).values())).config
    parts = [f"## {group}", _set_up(first)]
    if summary is None:
        parts.append(f"No run of {STANDARD} is finished, so there is nothing to measure the others against.")
    else:
        parts += ["Rounds and time saved:", _saved(labels, summary), "Test returns:", _returns(summary)]
    parts += ["CPU seconds of a mean round:", _seconds(labels, first)]
    parts += [f"![{name}](figures/{name}.svg)" for name in drawn]
    return "\n\n".join(parts)


def _set_up(config: RunConfig) -> str:
    own = config.hyperparameters
    every = "" if config.eval_every == 1 else f" every {config.eval_every} rounds"
    return (
        f"{config.env}: {config.rounds} rounds; {config.eval_episodes} evaluation episodes{every}; {config.optimizer}, "
        f"{', '.join(f'{name} {value}' for name, value in own.items())}; drop {config.drop:g} unless the arm's name "
        "says another."
    )


def _saved(labels: Mapping[str, Mapping[int, Kept]], summary: Mapping[str, Any]) -> str:
    rows = []
    for label, metrics in summary.items():
        config = next(iter(labels[label].values())).config
        cells = [_cell(metric, metrics[metric]) for metric in SAVED]
        rows.append([column_heading(label), str(len(labels[label])), *cells])
        if theirs := _theirs(config):
            told = [f"{theirs[metric]:.1%}" if metric in theirs else "" for metric in SAVED]
            rows.append([f"*LDA's {label}*", "3", *told])
    return _table(["arm", "seeds", *SAVED.values()], rows)


def _theirs(config: RunConfig) -> Mapping[str, float] | None:
    if config.arm != "iif":
        return None
    return next((row for row in _lda_of(config).get("iif", []) if row["drop"] == config.drop), None)


def _returns(summary: Mapping[str, Any]) -> str:
    rows = []
    for label, metrics in summary.items():
        cells = [_cell(metric, metrics[metric]) for metric in RETURNS]
        differences = [_cell(metric, metrics[metric]["difference"]) for metric in ("final_return", "auc")]
        rows.append([label, *cells, f"{metrics['auc']['iqm']:.3g}", *(["", ""] if label == STANDARD else differences)])
    headings = (*RETURNS.values(), "its IQM", f"final less {STANDARD}'s", f"mean less {STANDARD}'s")
    return _table(["arm", *headings], rows)


def _seconds(labels: Mapping[str, Mapping[int, Kept]], config: RunConfig) -> str:
    rows = []
    for label, runs in labels.items():
        table = pl.concat([kept.tables["seconds"] for kept in runs.values()], how="diagonal")
        rows.append([label, *(f"{np.mean(table[f'{stage}_cpu'].to_numpy()):.3f}" for stage in STAGES)])
    for arm, seconds in _lda_of(config).get("seconds", {}).items():
        rows.append([f"*LDA's {arm}*", *(f"{seconds[stage]:.2f}" if stage in seconds else "" for stage in STAGES)])
    return _table(["arm", *STAGES], rows)


def _cell(metric: str, entry: Mapping[str, Any]) -> str:
    return " ".join(cell("se_" if metric == "unreached" else metric, entry)).strip()


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _draw(group: str, labels: Mapping[str, Mapping[int, Kept]], folder: Path) -> list[str]:
    """Draw the arms in one picture and the shares to drop in another; return the pictures' names."""
    shares = [label for label in labels if "-drop" in label]
    arms = [label for label in labels if label not in shares]
    pictures = {group: arms} | ({f"{group}-drop": [STANDARD, "iif", *shares]} if shares else {})
    for name, chosen in pictures.items():
        tables = [
            kept.tables["evaluations"].with_columns(arm=pl.lit(label), seed=pl.lit(seed))
            for label in chosen
            for seed, kept in labels.get(label, {}).items()
        ]
        figure = learning_curves(pl.concat(tables), arm_colours(chosen))
        figure.update_layout(width=760, height=340, font_family="sans-serif")
        with written_atomically(folder / f"{name}.svg") as temporary:
            try:
                figure.write_image(temporary, format="svg")
            except Exception as missing:  # Kaleido raises errors of many kinds, of its own and of its browser's driver
                raise Unsupported(
                    f"The picture {name}.svg cannot be drawn: {missing} Install Kaleido and a Chrome or Chromium, or "
                    "pass --no-pictures."
                ) from missing
    return list(pictures)
