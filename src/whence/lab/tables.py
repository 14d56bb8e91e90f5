"""The metrics of a comparison and of a sweep as tables, and a verdict on each arm."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from whence.core import write_atomically, write_json
from whence.lab.agents import RunConfig
from whence.lab.arms import STANDARD
from whence.lab.comparison import Comparison
from whence.lab.efficiency import CURVE_METRICS, PAIR_METRICS
from whence.lab.kept_runs import KeptRun, Results
from whence.page.figures import has, stages_of
from whence.statistics import t_interval
from whence.stored.language import LanguageConfig

LEAST_SEEDS = 3
"""Seeds below which there is no verdict, and no interval worth showing."""


def give_verdict(arm: str, returns: Mapping[int, float], standard_returns: Mapping[int, float]) -> str:
    """Say whether an arm ends higher than the standard arm, by a paired t test of their final returns by seed."""
    seeds = sorted(returns.keys() & standard_returns.keys())
    if len(seeds) < LEAST_SEEDS:
        both = (returns, standard_returns)
        ends, standard_ends = (", ".join(f"{values[seed]:.3g}" for seed in seeds) for values in both)
        values = f"{arm} ends at {ends} and {STANDARD} at {standard_ends}" if seeds else "they share none"
        return f"Too few seeds to compare {arm} with {STANDARD}: {values}."
    interval = t_interval([returns[seed] - standard_returns[seed] for seed in seeds])
    mean, low, high = (interval[name] or 0.0 for name in ("mean", "low", "high"))
    difference = f"difference {mean:.3g} [{low:.3g}, {high:.3g}], {len(seeds)} seeds"
    if low > 0 or high < 0:
        return f"{arm} ends {'higher' if low > 0 else 'lower'} than {STANDARD} ({difference})."
    return f"No evidence that {arm} ends higher than {STANDARD} ({difference})."


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
"""The headings of metrics."""

METRICS: Mapping[str, str] = {
    metric: HEADINGS[metric]
    for metric in ("se_ave", "se_peak", "rt_peak", "rt_peak_paper", "final_return", "peak_return", "auc")
}
"""The metrics that a comparison shows, with their headings."""

DEFINITIONS: Mapping[str, str] = {
    "SE_ave": f"the share of the rounds to a level that an arm saves, compared with {STANDARD}; mean over levels.",
    "SE_peak": "the same at the highest level.",
    "RT_peak": "the share of CPU time saved at the highest level: collecting, scoring, optimising, not evaluating.",
    "RT_peak (paper's)": f"the time saved until {STANDARD}'s highest return, as a share of {STANDARD}'s whole time.",
    "Levels": f"test returns that {STANDARD} reaches, each at least two standard errors above the one before.",
    "Values": f"means over all pairs of a seed of the arm and a seed of {STANDARD}; in brackets 95% t intervals.",
    f"{STANDARD} (null)": f"seeds of {STANDARD} compared with its other seeds: what chance gives. Compare with it.",
}
"""How the metrics are meant."""

COMPARISON_DEFINITIONS: Mapping[str, str] = {
    "Ends higher": "a paired t test of final returns, for each arm by itself.",
    **DEFINITIONS,
    "Fewer than three seeds": "there is no interval; round brackets hold each seed's value.",
    "Divergence": "approximate KL from the policy that collected a round, mean over rounds; for language models, from "
    "the start model.",
}
"""How a comparison's verdicts and table are meant."""

READING = "\n".join(f"{term}: {meaning}" for term, meaning in COMPARISON_DEFINITIONS.items())
"""The definitions, one a line."""

Cell = tuple[str, str]
"""A mean, and its interval or each seed's value; "" if there is none."""


class Summary(NamedTuple):
    """What a comparison shows.

    Attributes:
        verdicts: for each arm but the standard one, the rounds it saved, if known, and whether it ends higher.
        headings: the table's, one for each arm.
        rows: a heading, and a cell for each arm.
    """

    verdicts: Sequence[str]
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def make_summary(comparison: Comparison) -> Summary:
    """Return the verdicts and the table of a finished comparison."""
    ((_, arms),) = comparison.summary.items()
    rows = [(heading, [format_seeds(metric, arms[arm][metric]) for arm in arms]) for metric, heading in METRICS.items()]
    divergences = _measure_divergence(comparison)
    if any(divergences.values()):
        cells = [
            format_seeds("divergence", t_interval(divergences[arm]) | {"per_seed": divergences[arm]}) for arm in arms
        ]
        rows.append(("divergence (KL)", cells))
    return Summary(_give_verdicts(comparison, arms), [column_heading(arm) for arm in arms], rows)


def cell(metric: str, entry: Mapping[str, Any]) -> Cell:
    """Return a metric's mean and interval as text; shares as percentages."""
    interval = "" if entry["low"] is None else f"[{_format(metric, entry['low'])}, {_format(metric, entry['high'])}]"
    return _format(metric, entry["mean"]), interval


def format_seeds(metric: str, entry: Mapping[str, Any]) -> Cell:
    """Return a metric's cell; of two seeds each one's value in place of an interval."""
    values = entry.get("per_seed", ())
    if 1 < len(values) < LEAST_SEEDS:
        return _format(metric, entry["mean"]), f"({', '.join(_format(metric, value) for value in values)})"
    return cell(metric, entry)


def column_heading(arm: str) -> str:
    """Return the heading of an arm's column; the standard arm's holds the null."""
    return f"{arm} (null)" if arm == STANDARD else arm


def _format(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if metric in PAIR_METRICS else f"{value:.3g}"


def _give_verdicts(comparison: Comparison, arms: Mapping[str, Any]) -> list[str]:
    seeds = sorted({config.seed for config in comparison.configs})
    returns = {arm: dict(zip(seeds, arms[arm]["final_return"]["per_seed"], strict=True)) for arm in arms}
    sentences: list[str] = []
    for arm in arms:
        if arm != STANDARD:
            sentences += _describe_saving(arm, arms)
            sentences.append(give_verdict(arm, returns[arm], returns[STANDARD]))
    return sentences


def _describe_saving(arm: str, arms: Mapping[str, Any]) -> list[str]:
    """Return which share of the rounds an arm saves, compared with the null; nothing if there are too few seeds."""
    (saved, interval), (null, null_interval) = (cell("se_ave", arms[name]["se_ave"]) for name in (arm, STANDARD))
    if not interval or len(arms[arm]["final_return"]["per_seed"]) < LEAST_SEEDS:
        return []
    compared = f"; other seeds of {STANDARD}: {null} {null_interval}" if null_interval else ""
    return [f"{arm} saves {saved} {interval} of the rounds that {STANDARD} takes (SE_ave){compared}."]


def _measure_divergence(comparison: Comparison) -> dict[str, list[float]]:
    """Return each arm's mean divergence of a round, for each seed that has one."""
    divergences: dict[str, list[float]] = {config.arm: [] for config in comparison.configs}
    for config in sorted(comparison.configs, key=lambda config: config.seed):
        column = "kl" if isinstance(config, LanguageConfig) else "train/approx_kl"
        metrics = comparison.run(config).table("metrics")
        rounds = metrics[column].drop_nulls().to_list() if column in metrics.columns else []
        if rounds:
            divergences[config.arm].append(sum(rounds) / len(rounds))
    return divergences


Labels = Mapping[str, Mapping[int, KeptRun]]
"""An experiment's finished runs, by label and seed."""


SAVED = tuple(metric for metric in HEADINGS if metric not in CURVE_METRICS)
"""The metrics of pairs of runs, in the table's order."""

_AGAINST_NULL = ("se_ave", "se_ave_literal")

_REFERENCES = (STANDARD, "random", "iif")
"""The arms that the others' mean returns are compared with."""

_ROUND_METRICS = {
    "dropped_share": ("records dropped", ".1%"),
    "negative_share": ("records below 0", ".1%"),
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


def write_tables(results: Results, summary: Mapping[str, Any], out: Path) -> str:
    """Write `tables.md` and `summary.json` of a sweep's results into a directory; return the Markdown."""
    key = "\n".join(f"- {term}: {meaning}" for term, meaning in KEY.items())
    sections = [_write_section(group, labels, summary.get(group)) for group, labels in results.items()]
    text = "\n\n".join([key, *sections]) + "\n"
    write_json(out / "summary.json", summary)
    with write_atomically(out / "tables.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    return text


def _write_section(group: str, labels: Labels, summary: Mapping[str, Any] | None) -> str:
    parts = [f"## {group}", _describe_set_up(labels)]
    seeds = (f"{label} {', '.join(map(str, sorted(runs)))}" for label, runs in labels.items())
    parts.append(f"Seeds of the finished runs: {'; '.join(seeds)}.")
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
    return "\n\n".join(parts)


def _describe_set_up(labels: Labels) -> str:
    """Describe the settings that the runs share, as far as they are no defaults."""
    config = next(iter(next(iter(labels.values())).values())).config
    default = RunConfig(env=config.env, arm=config.arm, seed=config.seed).to_json()
    values = {name: value for name, value in config.to_json().items() if value != default[name] and name != "drop"}
    values |= {"rounds": config.rounds, "eval_episodes": config.eval_episodes, "optimizer": config.optimizer}
    settings = [f"{name} {json.dumps(value)}" for name, value in values.items()]
    # The label of a run at its experiment's own share is its arm.
    configs = [run.config for label, runs in labels.items() for run in runs.values() if label == run.config.arm]
    usual = [f"drop {config.drop:g} unless the arm's name says another" for config in configs if config.reads("drop")]
    return f"{config.env}: {'; '.join([*settings, *usual[:1]])}."


def _tabulate_savings(labels: Labels, summary: Mapping[str, Any]) -> str:
    rows = []
    for label, metrics in summary.items():
        cells = [_join_cell(metric, metrics[metric]) for metric in SAVED]
        against = [
            _join_cell(metric, metrics[metric]["against_null"]) if label != STANDARD else "" for metric in _AGAINST_NULL
        ]
        rows.append([column_heading(label), str(len(labels[label])), *cells, *against])
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


def _concatenate(labels: Labels, name: str) -> dict[str, pl.DataFrame]:
    return {
        label: pl.concat([run.tables[name] for run in runs.values()], how="diagonal_relaxed")
        for label, runs in labels.items()
    }


def _tabulate_rounds(labels: Labels) -> str | None:
    """Return the table of means over rounds and seeds; None if there are no metrics of rounds."""
    tables = _concatenate(labels, "rounds")
    present = [name for name in _ROUND_METRICS if any(name in table.columns for table in tables.values())]
    if not present:
        return None
    rows = [[label, *(_format_mean(table, name) for name in present)] for label, table in tables.items()]
    return _make_table(["arm", *(_ROUND_METRICS[name][0] for name in present)], rows)


def _format_mean(table: pl.DataFrame, name: str) -> str:
    # Stable-Baselines3 counts clipped ratios before an update is scaled.
    is_before = name == "train/clip_fraction" and has(table, "train/update_scale")
    if is_before or not has(table, name):
        return ""
    return f"{np.mean(table[name].drop_nulls().to_numpy()):{_ROUND_METRICS[name][1]}}"


def _tabulate_seconds(labels: Labels) -> str:
    tables = _concatenate(labels, "seconds")
    stages = stages_of(next(iter(tables.values())), "cpu")
    columns = [f"{stage}_{clock}" for stage in stages for clock in ("cpu", "wall")]
    rows = [
        [label, *(f"{np.median(table[column].to_numpy()):.3f}" for column in columns)]
        for label, table in tables.items()
    ]
    return _make_table(["arm", *(f"{stage}, {clock}" for stage in stages for clock in ("CPU", "wall"))], rows)


def _join_cell(metric: str, entry: Mapping[str, Any]) -> str:
    return " ".join(cell(metric, entry)).strip()


def _make_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
