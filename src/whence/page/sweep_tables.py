"""A sweep as Markdown and pictures, next to the figures that LDA reports."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from whence.experiments import STANDARD, KeptRun, Results, RunConfig, is_control, presets, reads
from whence.guards import write_atomically
from whence.metrics import CURVE_METRICS
from whence.page.comparison_summary import DEFINITIONS, HEADINGS, cell, column_heading
from whence.page.figures import arm_colours, learning_curves, stages_of, write_svg

Labels = Mapping[str, Mapping[int, KeptRun]]
"""An experiment's finished runs, by label and seed."""


def draw_pictures(labels: Labels, folder: Path) -> list[Path]:
    """Draw an experiment's pictures and return their files.

    Raises:
        Unsupported: there is no Kaleido, or no browser that it can drive.
    """
    pictures = []
    for name, chosen in plan_pictures(labels).items():
        pictures.append(folder / f"{name}.svg")
        write_svg(_draw_curves(labels, chosen), pictures[-1], "pass --no-pictures. The tables are written.")
    return pictures


def plan_pictures(labels: Labels) -> dict[str, list[str]]:
    """Return the labels in each picture.

    `arms`: every arm at its usual share to drop; `drop`: the arms that have several shares, at all of them;
    `controls`: the arms that change the size of the step and drop nothing.
    """
    by_arm: dict[str, list[str]] = {}
    for label, runs in labels.items():
        by_arm.setdefault(next(iter(runs.values())).config.arm, []).append(label)
    controls = [label for arm, arm_labels in by_arm.items() if is_control(arm) for label in arm_labels]
    selecting = {arm: arm_labels for arm, arm_labels in by_arm.items() if not is_control(arm) and arm != STANDARD}
    # The label of a run at its experiment's own share is its arm. If several shares lack it, none is usual.
    usual = {
        arm: [label for label in arm_labels if label == arm or len(arm_labels) == 1]
        for arm, arm_labels in selecting.items()
    }
    pictures = {
        "arms": [label for arm_labels in usual.values() for label in arm_labels],
        "drop": [label for arm_labels in selecting.values() if len(arm_labels) > 1 for label in arm_labels],
        "controls": [*usual.get("iif", []), *controls] if controls else [],
    }
    standard = by_arm.get(STANDARD, [])
    with_standard = {name: [*standard, *others] for name, others in pictures.items() if others}
    return with_standard or {"arms": standard}


def _draw_curves(labels: Labels, chosen: Sequence[str]) -> go.Figure:
    tables = [
        kept.tables["evaluations"].select("round", "test_return", arm=pl.lit(label))
        for label in chosen
        for kept in labels[label].values()
    ]
    return learning_curves(pl.concat(tables), arm_colours(chosen))


SAVED = tuple(metric for metric in HEADINGS if metric not in CURVE_METRICS)
"""The metrics of pairs of runs, in the table's order."""

_AGAINST_NULL = ("se_ave", "se_ave_literal")

_REFERENCES = (STANDARD, "random", "iif")
"""The arms that the others' mean returns are compared with."""

_ROUND_METRICS = {
    "dropped_share": ("records dropped", ".1%"),
    "negative_share": ("records below 0", ".1%"),
    "fell_back": ("rounds in which the guard fell back", ".1%"),
    "train/update_scale": ("update scaled by", ".3g"),
    "train/approx_kl": ("divergence (KL)", ".3g"),
    "train/clip_fraction": ("ratios clipped", ".1%"),
    "train/entropy_loss": ("entropy loss", ".3g"),
}
"""The headings of metrics of rounds, and how their means are written."""

KEY: Mapping[str, str] = {
    **DEFINITIONS,
    "Every maximum": "over every strictly larger maximum, however small the rise, as in LDA's paper.",
    HEADINGS["unreached"].capitalize(): "their share; such a level counts as one round more than there are.",
    "Against the null": f"the share saved of the rounds that other seeds of {STANDARD} take; no seed meets itself.",
    "Returns": "means over an arm's seeds; the IQM leaves out the lowest and the highest quarter.",
    "Less another arm's": "the mean difference over the seeds that both have, with a 95% t interval.",
    "Divergence": "SB3's estimate in the last epoch; of arms that scale the update, after scaling, over all records.",
    "Ratios clipped": "over all epochs; missing for arms that scale the update, since SB3 logs it before they do.",
    "Records dropped": "in a mean round; for arms that scale the update, by the selection whose step they match.",
    "One seed": f"no interval. Rounds and time saved have none either if {STANDARD} has one seed.",
}
"""How to read the tables."""


def write_tables(results: Results, summary: Mapping[str, Any], out: Path, *, pictures: bool = True) -> str:
    """Write `tables.md`, `summary.json` and each experiment's learning curves as SVG; return the Markdown.

    Args:
        results: from `load_sweep`.
        summary: from `summarise_sweep`.
        out: the directory; pictures are `figures/NAME/*.svg` in it.
        pictures: whether to draw.

    Raises:
        Unsupported: pictures are to be drawn, and there is no Kaleido or no browser that it can drive. The rest is
            written.
    """
    text = _write_text(results, summary, {})
    _write_file(out / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    _write_file(out / "tables.md", text)
    if pictures:
        files_by_group = {group: draw_pictures(labels, out / "figures" / group) for group, labels in results.items()}
        links = {group: [file.relative_to(out).as_posix() for file in files] for group, files in files_by_group.items()}
        text = _write_text(results, summary, links)
        _write_file(out / "tables.md", text)
    return text


def _write_file(path: Path, text: str) -> None:
    with write_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _write_text(results: Results, summary: Mapping[str, Any], links: Mapping[str, Sequence[str]]) -> str:
    key = "\n".join(f"- {term}: {meaning}" for term, meaning in KEY.items())
    sections = [
        _write_section(group, labels, summary.get(group), links.get(group, ())) for group, labels in results.items()
    ]
    return "\n\n".join([key, *sections]) + "\n"


def _write_section(group: str, labels: Labels, summary: Mapping[str, Any] | None, links: Iterable[str]) -> str:
    parts = [f"## {group}", _describe_set_up(labels), _list_runs(labels)]
    if (note := write_note(_first_config(labels))) is not None:
        parts.append(note)
    if summary is None:
        parts.append(f"No run of {STANDARD} is finished, so there is nothing to measure the others against.")
    else:
        parts += [
            "Rounds and time saved:",
            _tabulate_savings(labels, summary),
            "Test returns:",
            _tabulate_returns(labels, summary),
        ]
    if (rounds := _tabulate_rounds(labels)) is not None:
        parts += ["A mean round:", rounds]
    parts += ["Seconds of a median round, of the process (CPU) and of the clock (wall):", _tabulate_seconds(labels)]
    parts += [f"![{group}: {Path(link).stem}]({link})" for link in links]
    return "\n\n".join(parts)


def _first_config(labels: Labels) -> RunConfig:
    return next(iter(next(iter(labels.values())).values())).config


def _describe_set_up(labels: Labels) -> str:
    """Describe the settings that the runs share, as far as they are no defaults."""
    config = _first_config(labels)
    default = RunConfig(env=config.env, arm=config.arm, seed=config.seed)
    described = {"env", "arm", "seed", "drop", "rounds", "eval_episodes", "eval_every", "optimizer", "hyperparameters"}
    values = config.to_json()
    others = [
        f"{field.name} {json.dumps(values[field.name])}"
        for field in fields(config)
        if field.name not in described and getattr(config, field.name) != getattr(default, field.name)
    ]
    every = "" if config.eval_every == 1 else f" every {config.eval_every} rounds"
    hyperparameters = [f"{name} {value}" for name, value in config.hyperparameters.items()] or [
        "SB3's hyper-parameters"
    ]
    # The label of a run at its experiment's own share is its arm.
    usual_configs = [
        kept.config for label, runs in labels.items() for kept in runs.values() if kept.config.arm == label
    ]
    usual = [config.drop for config in usual_configs if reads(config, "drop")]
    drop = [f"drop {usual[0]:g} unless the arm's name says another"] if usual else []
    parts = [
        f"{config.rounds} rounds",
        f"{config.eval_episodes} evaluation episodes{every}",
        ", ".join([config.optimizer, *hyperparameters]),
        *others,
        *drop,
    ]
    return f"{config.env}: {'; '.join(parts)}."


def _list_runs(labels: Labels) -> str:
    counts = [f"{label} {len(runs)} (seed{_format_seeds(sorted(runs))})" for label, runs in labels.items()]
    return f"Finished runs: {', '.join(counts)}."


def _format_seeds(seeds: Sequence[int]) -> str:
    """Return seeds as text that follows "seed"."""
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"s {seeds[0]} to {seeds[-1]}"
    return ("s " if len(seeds) > 1 else " ") + ", ".join(map(str, seeds))


def _tabulate_savings(labels: Labels, summary: Mapping[str, Any]) -> str:
    rows = []
    for label, metrics in summary.items():
        cells = [_join_cell(metric, metrics[metric]) for metric in SAVED]
        against = [
            _join_cell(metric, metrics[metric]["against_null"]) if label != STANDARD else "" for metric in _AGAINST_NULL
        ]
        rows.append([column_heading(label), str(len(labels[label])), *cells, *against])
        if lda_row := find_row(next(iter(labels[label].values())).config):
            name, shares = lda_row
            lda_cells = [
                f"{shares[metric][0]:.1%} ± {shares[metric][1]:.1%}" if metric in shares else "" for metric in SAVED
            ]
            rows.append([f"*{name}*", "3", *lda_cells, *("" for _ in _AGAINST_NULL)])
    against = [f"{HEADINGS[metric]}, against the null" for metric in _AGAINST_NULL]
    return _make_table(["arm", "seeds", *(HEADINGS[metric] for metric in SAVED), *against], rows)


def _tabulate_returns(labels: Labels, summary: Mapping[str, Any]) -> str:
    references = [arm for arm in _REFERENCES if arm in summary]
    compared = [("final_return", STANDARD), *(("auc", arm) for arm in references)]
    rows = []
    for label, metrics in summary.items():
        cells = [_join_cell(metric, metrics[metric]) for metric in CURVE_METRICS]
        shared = str(len(labels[label].keys() & labels[STANDARD].keys())) if label != STANDARD else ""
        differences = [
            _join_cell(metric, metrics[metric]["differences"][other]) if label != other else ""
            for metric, other in compared
        ]
        rows.append([label, str(len(labels[label])), *cells, f"{metrics['auc']['iqm']:.3g}", shared, *differences])
    headings = [*(HEADINGS[metric] for metric in CURVE_METRICS), "its IQM", f"seeds shared with {STANDARD}"]
    return _make_table(
        ["arm", "seeds", *headings, *(f"{HEADINGS[metric]} less {other}'s" for metric, other in compared)], rows
    )


def _tabulate_rounds(labels: Labels) -> str | None:
    """Return the table of means over rounds and seeds; None if there are no metrics of rounds."""
    tables = {
        label: pl.concat([kept.tables["rounds"] for kept in runs.values()], how="diagonal_relaxed")
        for label, runs in labels.items()
    }
    present = [name for name in _ROUND_METRICS if any(name in table.columns for table in tables.values())]
    if not present:
        return None
    rows = [[label, *(_format_mean(table, name) for name in present)] for label, table in tables.items()]
    return _make_table(["arm", *(_ROUND_METRICS[name][0] for name in present)], rows)


def _format_mean(table: pl.DataFrame, name: str) -> str:
    is_scaled = "train/update_scale" in table.columns and table["train/update_scale"].count() > 0
    if name not in table.columns or table[name].is_null().all() or (name == "train/clip_fraction" and is_scaled):
        return ""
    return f"{np.mean(table[name].drop_nulls().to_numpy()):{_ROUND_METRICS[name][1]}}"


def _tabulate_seconds(labels: Labels) -> str:
    tables = {
        label: pl.concat([kept.tables["seconds"] for kept in runs.values()], how="diagonal_relaxed")
        for label, runs in labels.items()
    }
    stages = stages_of(next(iter(tables.values())), "cpu")
    columns = [f"{stage}_{clock}" for stage in stages for clock in ("cpu", "wall")]
    rows = []
    for label, table in tables.items():
        rows.append([label, *(f"{np.median(table[column].to_numpy()):.3f}" for column in columns)])
    for arm, seconds in find_figures(_first_config(labels)).get("seconds", {}).items():
        lda_cells = {f"{stage}_wall": f"{mean:.2f}" for stage, mean in seconds.items() if stage in stages}
        rows.append([f"*LDA's {arm}*", *(lda_cells.get(column, "") for column in columns)])
    headings = [f"{stage}, {clock}" for stage in stages for clock in ("CPU", "wall")]
    return _make_table(["arm", *headings], rows)


def _join_cell(metric: str, entry: Mapping[str, Any]) -> str:
    return " ".join(cell(metric, entry)).strip()


def _make_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_EVALUATION = {"eval_episodes", "eval_every"}


@cache
def _read_figures() -> Mapping[str, Any]:
    return tomllib.loads((files("whence.page") / "lda.toml").read_text(encoding="utf-8"))


def find_preset(config: RunConfig) -> str | None:
    """Return the name of LDA's preset that a run has, with any arm, seed, share to drop and evaluations; else None."""
    fields = {name: getattr(config, name) for name in ("arm", "seed", "drop")}
    for name in (f"{family}/{env}" for env in _read_figures() for family in ("lda-code", "paper")):
        preset = RunConfig(**{**presets()[name], **fields})
        if {key for key, value in vars(preset).items() if value != getattr(config, key)} <= _EVALUATION:
            return name
    return None


def find_figures(config: RunConfig) -> Mapping[str, Any]:
    """Return LDA's figures for a run's setting: none unless it is that of LDA's code, which does not clip."""
    family, _, env = (find_preset(config) or "").partition("/")
    return _read_figures()[env] if family == "lda-code" else {}


def find_row(config: RunConfig) -> tuple[str, Mapping[str, Sequence[float]]] | None:
    """Return the name of LDA's row for a run, and its shares, each with its "±"; None if LDA has none."""
    figures = next((row for row in find_figures(config).get("iif", []) if row["drop"] == config.drop), None)
    if figures is None or config.arm != "iif":
        return None
    row = {name: figure for name, figure in figures.items() if name != "drop"}
    preset = RunConfig(**{**presets()[str(find_preset(config))], "arm": "iif", "seed": 0})
    if all(getattr(preset, key) == getattr(config, key) for key in _EVALUATION):
        return "LDA's iif", row
    return f"LDA's iif (its evaluations: every round, {preset.eval_episodes} episodes)", row


def write_note(config: RunConfig) -> str | None:
    """Say how LDA's figures relate to a run's setting; None if it is not one of LDA's."""
    family, _, env = (find_preset(config) or "").partition("/")
    if family == "lda-code":
        iif, ppo = find_figures(config)["seconds"]["iif"], find_figures(config)["seconds"]["ppo"]
        return (
            "LDA's rows are means over its three runs; of what its ± is it says nothing. Its levels are every maximum, "
            "and its RT_peak is the paper's. Its seconds are wall-clock, on another machine: "
            f"{ppo['all_rounds']:.2f} s of ppo and {iif['all_rounds']:.2f} s of iif for all rounds, "
            f"{iif['to_peak']:.2f} s of iif until ppo's peak. They do not add up everywhere: {config.rounds} rounds of "
            f"ppo's optimisation alone would take {config.rounds * ppo['optimisation']:.0f} s."
        )
    if family == "paper":
        return (
            f"Gradients are clipped to a norm of {config.hyperparameters['max_grad_norm']:g}, as LDA's paper prints. "
            f"LDA's code does not clip, so LDA's figures stand beside lda-code/{env} only."
        )
    return None
