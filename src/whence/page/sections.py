"""Sections that the pages of a comparison and of one run share, from the runs' tables."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

import plotly.graph_objects as go
import polars as pl
import polars.selectors as cs
from markupsafe import Markup, escape

from whence.advice import Advice, give_advice
from whence.experiments import ARMS
from whence.page import figures
from whence.runs import RunDirectory, Table

Runs: TypeAlias = Mapping[tuple[str, int | None], RunDirectory]
"""Runs by their names and seeds; None: the seed is not known."""

Tables: TypeAlias = Mapping[Table, pl.DataFrame]
"""Tables of all runs below each other, with a column `arm`."""

Drawn: TypeAlias = tuple[str, str, go.Figure]
"""A figure with its title and what it shows."""


def read_tables(runs: Runs) -> Tables:
    """Return each table of all runs; without rows if no run has any."""
    return {name: _concatenate(name, runs) for name in get_args(Table)}


def draw_figures(tables: Tables, arms: Sequence[str], seeds: int = 1) -> list[Drawn]:
    """Return the figures whose columns are there, in the page's order.

    Args:
        tables: from `read_tables`.
        arms: in the order of their colours.
        seeds: of each arm.
    """
    evaluations, metrics, timings = tables["evaluations"], tables["metrics"], tables["timings"]
    colours = figures.arm_colours(arms)
    bands = "Here and below, lines are means over seeds; bands run from the lowest seed to the highest."
    bands = f" {bands}" if seeds > 1 else ""
    drawings: list[Drawn] = []

    def draw(title: str, text: str, table: pl.DataFrame, column: str, axis: str) -> None:
        if _has(table, column):
            drawings.append((title, text, figures.over_rounds(table, column, axis, colours)))

    if _has(evaluations, "test_return"):
        what = (
            "exact matches, civil answers or rewards on the test" if _has(metrics, "reward") else "evaluation episodes"
        )
        about = f"Mean return of the {what} after rounds; round 0 is the untrained policy.{bands}"
        drawings.append(("Learning curves", about, figures.learning_curves(evaluations, colours)))
    about = "Mean reward of the round's responses, those that were dropped among them."
    draw("Reward", about, metrics, "reward", "mean reward")
    if not drawings:
        about = f"Mean return of the last hundred training episodes.{bands}"
        draw("Learning curves", about, metrics, "episode_return", "mean return of training episodes")
    about = "Of the right answers to the test's problems, the share that came by other than the right steps."
    draw("Unfaithful answers", about, evaluations, "unfaithful", "share of right answers by wrong steps")
    about = "How far responses are from the start model, as the penalty estimates it."
    draw("Divergence from the start model", about, metrics, "kl", "divergence of a response (nats)")
    if _has(metrics, "dropped_share"):
        about = "The share of each rollout that trained; the rest, up to 100%, was dropped."
        drawings.append(("Records kept and dropped", about, figures.kept_share(metrics, colours)))
    if _has(metrics, "train/entropy_loss"):
        about = "How undecided the policy is. Where it falls early, the policy stops exploring."
        entropies = metrics.with_columns(entropy=-pl.col("train/entropy_loss"))
        draw("Policy entropy", about, entropies, "entropy", "policy entropy (nats)")
    about = "How far the round's optimisation took the policy from the one that collected it."
    draw("Approximate KL", about, metrics, "train/approx_kl", "approximate KL (nats)")
    if _has(metrics, "train/approx_kl"):
        drawings[-1][2].update_yaxes(rangemode="tozero")
    scored = _arms_with(metrics, "q50")
    clock = "cpu" if _has(timings, "collection_cpu") else "wall"
    if _has(timings, f"optimisation_{clock}"):
        seconds = "Process CPU seconds" if clock == "cpu" else "Seconds"
        about = f"{seconds} of a mean round; evaluation is left out. {_scoring_share(timings, scored, clock)}"
        drawings.append(("Time by stage", about, figures.seconds_by_stage(timings, clock)))
    about = "Quantiles of each round's scores. Above 0, training on the record raises the target."
    drawings += [(f"Influence, {arm}", about, figures.influence_distribution(metrics, arm, colours)) for arm in scored]
    return drawings


def gather_advice(runs: Runs) -> dict[str, list[tuple[Markup, list[str]]]]:
    """Return the advice on the runs, by its kind: each text once, with the places where it applies."""
    texts: dict[str, dict[str, dict[tuple[str, int], list[str]]]] = {}
    for (arm, seed), run in runs.items():
        for one in (*_list_resumptions(run), *give_advice(run.table("metrics"), run.config)):
            places = texts.setdefault(one.kind, {}).setdefault(one.text, {})
            places.setdefault((arm, one.round), []).extend([] if seed is None else [str(seed)])
    return {
        kind: [(mark_code(text), _list_places(places)) for text, places in by_text.items()]
        for kind, by_text in texts.items()
    }


def _list_resumptions(run: RunDirectory) -> list[Advice]:
    """Return where a run was interrupted and went on, but not as if nothing had happened."""
    notes = run.notes.get("resumed", [])
    return [
        Advice(
            "interrupted",
            note["after_round"],
            f"This run was interrupted after this round, and went on otherwise than without the interruption: "
            f"{note.get('reason')}.",
        )
        for note in (notes if isinstance(notes, list) else [])
        if isinstance(note, dict) and isinstance(note.get("after_round"), int)
    ]


def describe_arm(run: RunDirectory) -> str:
    """Return in a sentence what the arm of a run in an environment does; "" if it has none that is known."""
    name = str(run.experiment.get("arm"))
    if name not in ARMS or run.is_language:
        return ""
    drop = run.experiment.get("drop")
    share = f"{100 * drop:g}%" if isinstance(drop, int | float) else "a share"
    return f"{name}: {ARMS[name].about.replace('the share `drop`', share)}."


def list_latest(tables: Tables) -> list[tuple[str, str]]:
    """Return the main figures of one run after its last round; none if it has no round."""
    metrics = tables["metrics"]
    if metrics.is_empty():
        return []
    last = metrics.tail(1).to_dicts()[0]
    evaluations = tables["evaluations"]
    returns = evaluations["test_return"].drop_nulls().to_list() if _has(evaluations, "test_return") else []
    dropped, entropy = last.get("dropped_share"), last.get("train/entropy_loss")
    numbers = [
        ("steps", "{:,}", last.get("timestep")),
        ("test return", "{:.4g}", returns[-1] if returns else None),
        ("best test return", "{:.4g}", max(returns, default=None)),
        ("training return", "{:.4g}", last.get("episode_return")),
        ("reward", "{:.4g}", last.get("reward")),
        ("records kept", "{:.1%}", None if dropped is None else 1 - dropped),
        ("policy entropy", "{:.3g} nats", None if entropy is None else -entropy),
    ]
    return [(name, form.format(value).replace("-", "−")) for name, form, value in numbers if value is not None]


def list_facts(config: Mapping[str, Any], runs: Iterable[RunDirectory]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return what was run, in groups with headings: plain values, a group for each nested object, versions."""
    nested = {name: value for name, value in config.items() if isinstance(value, Mapping) and value}
    plain = {name: value for name, value in config.items() if name not in nested}
    groups = [("configuration", plain), *nested.items(), ("versions", _list_versions(runs))]
    return [
        (heading, [(name, _format_fact(value)) for name, value in group.items()]) for heading, group in groups if group
    ]


def _concatenate(name: Table, runs: Runs) -> pl.DataFrame:
    tables = [(arm, run.table(name)) for (arm, _), run in runs.items()]
    # Adding an arm to a table without columns would make a row.
    parts = [
        table.select(cs.numeric() | cs.boolean() | cs.string() | cs.by_dtype(pl.Null), arm=pl.lit(arm))
        for arm, table in tables
        if table.height
    ]
    return pl.concat(parts, how="diagonal_relaxed") if parts else pl.DataFrame()


def _has(table: pl.DataFrame, column: str) -> bool:
    return column in table.columns and table[column].count() > 0


def _arms_with(table: pl.DataFrame, column: str) -> list[str]:
    return table.drop_nulls(column)["arm"].unique(maintain_order=True).to_list() if _has(table, column) else []


def _scoring_share(timings: pl.DataFrame, scored: Sequence[str], clock: str) -> str:
    """Return a sentence on the share of their time that arms spend on scoring; "" if none scores."""
    stages = [f"{stage}_{clock}" for stage in figures.stages_of(timings, clock)]
    sums = {row["arm"]: row for row in timings.group_by("arm").agg(pl.col(stages).sum()).to_dicts()}
    totals = {arm: sum(sums[arm][stage] for stage in stages) for arm in scored if arm in sums}
    shares = [f"{sums[arm][f'scoring_{clock}'] / total:.1%} of {arm}’s" for arm, total in totals.items() if total > 0]
    return f"Scoring takes {', '.join(shares)} time." if shares else ""


def _list_places(places: Mapping[tuple[str, int], Sequence[str]]) -> list[str]:
    return [
        f"{arm}, round {number}" + (f", seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}" if seeds else "")
        for (arm, number), seeds in places.items()
    ]


def mark_code(text: str) -> Markup:
    """Return text with the parts in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _format_fact(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "–" if value in (None, {}, []) else json.dumps(value, ensure_ascii=False)


def _list_versions(runs: Iterable[RunDirectory]) -> dict[str, str]:
    """Return the versions of the runs' libraries, all of them if runs differ."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for package, version in run.versions.items():
            versions.setdefault(package, []).append(str(version))
    return {package: ", ".join(dict.fromkeys(numbers)) for package, numbers in versions.items()}
