"""Proofs of a cause: trainings without the records in question, without as many random ones, without a placebo's."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from whence.core import NonFinite, WhenceError, write_json
from whence.selection import read_weights
from whence.statistics import t_interval

FOLDER = "proofs"
"""The folder of a run that holds what was measured: a file for each question."""

VARIANTS = ("all", "without", "random", "placebo")
"""What each training leaves out: nothing, the records in question, as many others at random, and a placebo's."""

Measure = Callable[[pl.DataFrame, int], Mapping[str, float]]
"""`measure(left_out, seed)` trains without records, `round` and `record_id`, and returns what it measures, by name."""

FindPlacebo = Callable[[np.random.Generator], pl.DataFrame]
"""Returns the records, `round` and `record_id`, that a placebo leaves out."""

_KEYS = ("round", "record_id")


@dataclass(frozen=True, eq=False)
class Proof:
    """What came of the trainings.

    Attributes:
        behaviour: what was asked about, in words.
        records: what a record is called: "records" or "rollouts".
        size: the number of records that were left out.
        table: a row for each seed, variant and outcome: `seed`, `variant`, `outcome`, `value`.
        stored: the outcomes of the policy that the run itself came to; empty if it is not there.
        notes: what a reader has to know of how it was done.
        file: where the numbers are.
    """

    behaviour: str
    records: str
    size: int
    table: pl.DataFrame
    stored: Mapping[str, float]
    notes: Sequence[str]
    file: Path

    def summarise(self) -> list[dict[str, Any]]:
        """Return a row for each outcome and variant: `mean` and `change` from "all", as 95% t intervals over seeds."""
        rows = []
        for (outcome,), part in self.table.group_by("outcome", maintain_order=True):
            values = part.pivot("variant", index="seed", values="value")
            for variant in VARIANTS:
                change = t_interval((values[variant] - values["all"]).to_list())
                about = {"outcome": outcome, "variant": variant}
                rows.append(about | {"value": t_interval(values[variant].to_list()), "change": change})
        return rows

    def is_apart(self, outcome: str) -> bool:
        """Return whether the change without the records lies apart from 0 and from those of both controls."""
        changes = {row["variant"]: row["change"] for row in self.summarise() if row["outcome"] == outcome}
        without = changes["without"]
        if without["low"] is None:
            return False
        ends = [(0.0, 0.0), *((changes[name]["low"], changes[name]["high"]) for name in ("random", "placebo"))]
        return all(without["high"] < low or without["low"] > high for low, high in ends)

    @property
    def text(self) -> str:
        """One sentence of the first outcome."""
        outcome = self.table["outcome"][0]
        means = {row["variant"]: row["value"]["mean"] for row in self.summarise() if row["outcome"] == outcome}
        shown = {variant: format_outcome(outcome, mean) for variant, mean in means.items()}
        subject = f"{outcome} of {self.behaviour}"
        count, seeds = f"{self.size:,}", self.table["seed"].n_unique()
        if self.is_apart(outcome):
            verb = "falls" if means["without"] < means["all"] else "rises"
            return (
                f"Without these {count} {self.records} the {subject} {verb} from {shown['all']} to "
                f"{shown['without']}; without {count} random ones it is {shown['random']}, without a placebo's "
                f"{shown['placebo']}."
            )
        reason = "one seed has no interval" if seeds < 2 else "the intervals of the changes overlap"
        return (
            f"No difference is seen: the {subject} is {shown['all']} with all, {shown['without']} without these "
            f"{count} {self.records}, {shown['random']} without random ones, {shown['placebo']} without a placebo's; "
            f"{reason}."
        )


def format_outcome(outcome: str, value: float, sign: str = "") -> str:
    """Return an outcome as text: probabilities and shares in percent; of a change with the sign "+"."""
    form = ".1%" if outcome.startswith(("probability", "share")) else ".4g"
    return f"{value:{sign}{form}}"


def prove(
    trained: pl.DataFrame,
    left_out: pl.DataFrame,
    measure: Measure,
    *,
    find_placebo: FindPlacebo | None = None,
    seeds: int = 5,
    folder: Path,
    about: Mapping[str, Any],
    on_stage: Callable[[str], None] = lambda stage: None,
) -> tuple[pl.DataFrame, Path]:
    """Train with all records, without some, without as many at random, and without a placebo's; in each seed anew.

    Random records are of the same rounds. After each training its outcomes are written; the same question goes on from
    there.

    Args:
        trained: the records that trained: `round`, `record_id` and `advantage`.
        left_out: those in question, from `check_left_out`.
        measure: trains and measures.
        find_placebo: names a placebo's records; None: those of the nearest advantages, in the same rounds.
        seeds: the number of seeds.
        folder: where the outcomes are written.
        about: what tells the question from others, in JSON types.
        on_stage: called with the name of each training as it begins.

    Returns:
        The table of a `Proof`, and the file.

    Raises:
        NonFinite: an outcome is not finite.
    """
    question = json.dumps([about, left_out.rows()], sort_keys=True)
    file = folder / f"{sha256(question.encode()).hexdigest()[:12]}.json"
    rows = _read_rows(file)
    others = trained.join(left_out, on=_KEYS, how="anti")
    for seed in range(seeds):
        for place, variant in enumerate(VARIANTS):
            if any((row["seed"], row["variant"]) == (seed, variant) for row in rows):
                continue
            on_stage(f"seed {seed + 1} of {seeds}: {variant}")
            generator = np.random.default_rng([seed, place])
            if variant == "all":
                group = left_out.clear()
            elif variant == "without":
                group = left_out
            elif variant == "random":
                group = _draw_matched(others, left_out, generator)
            else:
                group = _match_advantages(trained, left_out) if find_placebo is None else find_placebo(generator)
            outcomes = dict(measure(group.select(_KEYS), seed))
            if lost := [name for name, value in outcomes.items() if not math.isfinite(value)]:
                raise NonFinite(f"{lost[0]} is {outcomes[lost[0]]} in seed {seed}, trained on {variant}: it diverged.")
            rows.append({"seed": seed, "variant": variant, "outcomes": outcomes})
            write_json(file, {**about, "left_out": left_out.to_dict(as_series=False), "rows": rows})
    cells = [
        (row["seed"], row["variant"], outcome, value)
        for row in rows
        if row["seed"] < seeds
        for outcome, value in row["outcomes"].items()
    ]
    return pl.DataFrame(cells, schema=["seed", "variant", "outcome", "value"], orient="row"), file


def list_trained(tables: Mapping[int, pl.DataFrame]) -> pl.DataFrame:
    """Return `round`, `record_id` and `advantage` of the records that trained, from the tables of rounds."""
    columns = "record_id", pl.col("advantage").cast(pl.Float64)
    return pl.concat(
        table.filter(pl.Series(read_weights(table) > 0)).select(pl.lit(number, dtype=pl.Int64).alias("round"), *columns)
        for number, table in tables.items()
    )


def check_left_out(trained: pl.DataFrame, left_out: pl.DataFrame) -> pl.DataFrame:
    """Return the records to leave out, in order, without those that did not train.

    Raises:
        WhenceError: none is left, or more of a round than there are others to compare with.
    """
    chosen = left_out.select(_KEYS).unique().join(trained.select(_KEYS), on=_KEYS, how="semi").sort(_KEYS)
    if chosen.is_empty():
        raise WhenceError(
            f"None of the {len(left_out)} records to leave out trained in these rounds, in which {len(trained)} did. "
            "Flag records on the run's page (whence view), or name other rounds."
        )
    counts = chosen.group_by("round").len().join(trained.group_by("round").len("all"), on="round").sort("round")
    for number, count, total in counts.iter_rows():
        if 2 * count > total:
            raise WhenceError(
                f"{count} of the {total} records that trained in round {number} are to be left out, and as many others "
                "are needed to compare with. Leave out fewer: --top."
            )
    return chosen


def name_top(causes: pl.DataFrame, trained: pl.DataFrame, top: int) -> pl.DataFrame:
    """Return the records that a finder scores highest, among those that trained.

    Raises:
        WhenceError: fewer score above 0.
    """
    ranked = causes.join(trained.select(_KEYS), on=_KEYS, how="semi").filter(pl.col("score") > 0)
    if len(ranked) < top:
        raise WhenceError(f"Of {len(trained)} records that trained, {len(ranked)} score above 0, and top is {top}.")
    return ranked.sort("score", *_KEYS, descending=[True, False, False]).head(top).select(_KEYS)


def _draw_matched(others: pl.DataFrame, left_out: pl.DataFrame, generator: np.random.Generator) -> pl.DataFrame:
    """Return other records at random, of each round as many as are left out."""
    parts = []
    for (number,), group in left_out.group_by("round", maintain_order=True):
        pool = others.filter(pl.col("round") == number)
        parts.append(pool[np.sort(generator.choice(len(pool), len(group), replace=False))])
    return pl.concat(parts)


def _match_advantages(trained: pl.DataFrame, left_out: pl.DataFrame) -> pl.DataFrame:
    """Return other records, each of the same round and with the nearest advantage that is free."""
    parts = []
    for (number,), group in left_out.group_by("round", maintain_order=True):
        table = trained.filter(pl.col("round") == number)
        chosen = table.join(group, on=_KEYS, how="semi")["advantage"].to_list()
        pool = table.join(group, on=_KEYS, how="anti")
        distances = pool["advantage"].to_numpy().copy()
        places = []
        for advantage in chosen:
            places.append(int(np.argmin(np.abs(distances - advantage))))
            distances[places[-1]] = np.inf
        parts.append(pool[sorted(places)])
    return pl.concat(parts)


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the trainings that a file holds; a damaged file holds none."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["rows"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return []
