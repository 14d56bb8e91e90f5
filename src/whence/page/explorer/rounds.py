"""Runs and rounds as the page shows them: curves; strip, moments, groups, what changed, how far to trust scores."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import polars as pl

from whence.diagnosis import has_map, map_extremes
from whence.influence import SIGNIFICANT, is_significant
from whence.moments import By, Moment, find_moments, group_scores, read_axes
from whence.page.explored_run import ExploredRun, Round, attempt
from whence.page.explorer.grid import (
    RESPONSES,
    STEPS,
    Labels,
    list_columns,
    make_row,
    name_action,
    round_number,
    round_numbers,
    short_text,
)
from whence.page.explorer.responses import EXCERPT
from whence.page.moment_view import read_change
from whence.runs import RunDirectory

SERIES = ("episode_return", "test_return", "reward", "dropped_share", "negative_share", "significant_share")
"""Curves over rounds that a page shows below the slider, where they exist."""

Mode = Literal["file", "served"]


def describe_runs(
    runs: Sequence[ExploredRun], *, mode: Mode, rounds: Sequence[Sequence[int]] | None = None
) -> dict[str, Any]:
    """Return the page's object in JSON types.

    Args:
        runs: the runs, in the order of their numbers on the page.
        mode: "file": the rounds are embedded; "served": a server is asked for them.
        rounds: the rounds of each run that are embedded; None: all.
    """
    kind = "responses" if runs and runs[0].is_language else "steps"
    numbers = [run.directory.rounds() for run in runs] if rounds is None else rounds
    return {
        "mode": mode,
        "kind": kind,
        "runs": [describe_run(run, chosen) for run, chosen in zip(runs, numbers, strict=True)],
    }


def describe_run(run: ExploredRun, rounds: Sequence[int]) -> dict[str, Any]:
    """Return one run's part of the page's object.

    Args:
        run: the run.
        rounds: those that the page can open.
    """
    return {
        "label": run.label,
        "planned": run.planned,
        "finished": run.is_finished(),
        "rounds": [*rounds],
        "series": _read_series(run, rounds),
        "columns": [column._asdict() for column in _list_run_columns(run, rounds)],
        "actions": run.labels,
    }


def _read_series(run: ExploredRun, rounds: Sequence[int]) -> dict[str, list[Any]]:
    by_round: dict[str, Mapping[int, Any]] = {}
    for table in (run.directory.table("metrics"), run.directory.table("evaluations")):
        for name in SERIES:
            if name in table.columns and table.schema[name].is_numeric() and table[name].count():
                by_round[name] = dict(zip(table["round"].to_list(), table[name].to_list(), strict=True))
    return {name: [round_number(values.get(number)) for number in rounds] for name, values in by_round.items()}


def _list_run_columns(run: ExploredRun, rounds: Sequence[int]) -> list[Any]:
    """Return the grid's columns, by the last round that can be read."""
    for number in reversed(rounds):
        try:
            names = pl.read_parquet_schema(run.directory.round_path("records", number))
        except (OSError, pl.exceptions.PanicException, pl.exceptions.PolarsError):
            continue
        # An agent's scores are computed when a round is opened.
        computed = ("score", "error") if "score" not in names and not run.is_language else ()
        return list_columns([*names, *computed], is_language=run.is_language)
    return list(RESPONSES if run.is_language else STEPS)


GOOD_LDS, FAIR_LDS = 0.7, 0.4
"""From these LDS on, scores are good or fair: at .7 they explain half of the variance of ranks, at .4 a sixth."""

GOOD_SHARE, FAIR_SHARE = 0.3, 0.1
"""From these shares of scores beyond two errors on. By chance, 5% of scores of no influence are beyond them."""

_ADAPTIVE = ("Adam", "AdamW", "RMSprop")


def describe_trust(run: RunDirectory, number: int, records: pl.DataFrame) -> list[dict[str, str]]:
    """Return sentences on how far to trust a round's scores, each with a level: good, fair, poor or unknown.

    Args:
        run: the run.
        number: the round.
        records: its records; without a column `score` nothing is said.
    """
    if "score" not in records.columns:
        return []
    lines = [_describe_lds(run, number), _describe_errors(records)]
    optimizer = run.config.get("optimizer")
    if optimizer in _ADAPTIVE:
        text = (
            f"The run trains with {optimizer}, which rescales every parameter. On LunarLander, the rank correlation of "
            "such scores with training again (LDS) was measured as .60 under Adam and .77 under SGD; 1 is perfect."
        )
        lines.append(("fair", text))
    return [{"level": level, "text": text} for level, text in lines]


def _describe_lds(run: RunDirectory, number: int) -> tuple[str, str]:
    file = run.path / "counterfactual" / f"round_{number:05d}.json"
    if not file.exists():
        is_recorded = run.round_path("recordings", number).exists()
        how = "Measure it" if is_recorded else f"Train with `--record-rounds {number}`, then measure it"
        command = f"`whence counterfactual {run.path} --round {number}`"
        return "unknown", f"How well these scores predict retraining was not measured. {how}: {command}"
    # The row of the stored score: the snapshot's, on the recorded minibatches, on the target if there.
    rows = [row for row in json.loads(file.read_text(encoding="utf-8"))["rows"] if row["score"] == "snapshot"]
    row = min(rows, key=lambda row: (row["truth"] != "recorded", row["outcome"] != "target"))
    lds, low, high, outcome = (row[name] for name in ("lds", "low", "high", "outcome"))
    if lds is None or not math.isfinite(lds):
        return "unknown", f"Trained again on subsets of this round, the {outcome} did not vary, so there is no LDS."
    level = "good" if lds >= GOOD_LDS else "fair" if lds >= FAIR_LDS else "poor"
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    text = (
        f"Trained again on subsets of this round's records, the {outcome} follows these scores with a rank correlation "
        f"(LDS) of {lds:.2f}{interval}; 1 would be perfect, 0 chance."
    )
    return level, text


def _describe_errors(records: pl.DataFrame) -> tuple[str, str]:
    if "error" not in records.columns or not records["error"].count():
        return "unknown", "The scores have no errors, so that it is not known which differ from 0."
    pairs = records.select("score", "error").drop_nulls()
    share = float((pairs["score"].abs() > SIGNIFICANT * pairs["error"]).mean() or 0.0)  # type: ignore[arg-type]
    level = "good" if share >= GOOD_SHARE else "fair" if share >= FAIR_SHARE else "poor"
    shown = "<1%" if 0 < share < 0.005 else f"{share:.0%}"
    return level, f"{shown} of the scores are beyond two of their standard errors. By chance alone, 5% would be."


MOMENTS = 100
"""Moments at either end of a round that a page lists at most."""

CHANGES = 30
"""States that a page lists at most, of those whose policy a round changed the most."""

ROWS = 250
"""Rows of a round's grid in the offline file at most."""

STRIP = 50_000
"""Records up to which the strip shows the whole round; of larger rounds it shows the moments' episodes."""

GROUPINGS: tuple[By, ...] = ("action", "region", "reward", "episode")


def build_round(run: ExploredRun, number: int, *, rows: bool = False, most: int = MOMENTS) -> dict[str, Any]:
    """Return a round in JSON types, as the page's contract has it.

    Args:
        run: the run.
        number: the round.
        rows: whether the grid's rows of the moments' records are included; the server is asked for them instead.
        most: the most moments at either end.

    Raises:
        RunDirectoryError: the round is not there. A damaged round is a round without records, and a note.
    """
    records = run.round(number)
    table, notes = records.table, [*records.notes]
    worst, best = (list_moments(records, notes, lowest=lowest, most=most) for lowest in (True, False))
    shown = order_strip(table, [*worst, *best])
    if len(shown) < len(table):
        notes.append(f"The strip shows {len(shown):,} of {len(table):,} records: the episodes of the listed moments.")
    texts = _list_excerpts(table, [*worst, *best]) if run.is_language else {}
    trust = attempt(lambda: describe_trust(run.directory, number, table), notes, "Trust is not known", [])
    return {
        "round": number,
        "records": len(table),
        "scored": records.scored,
        "trust": trust,
        "strip": build_strip(shown),
        "worst": [describe_moment(moment, run.labels, texts) for moment in worst],
        "best": [describe_moment(moment, run.labels, texts) for moment in best],
        "groups": _build_groups(run, records),
        "map": _build_map(run, records, notes),
        "changed": [] if run.is_language or table.is_empty() else _build_changes(run, records, notes),
        "rows": _make_rows(run, table, [*worst, *best]) if rows else None,
        "notes": notes,
    }


def list_moments(records: Round, notes: list[str], *, lowest: bool, most: int = MOMENTS) -> list[Moment]:
    """Return the moments at one end of a round; none if nothing was scored or a column is not what it should be."""
    if not records.scored or records.table.is_empty():
        return []
    moments: list[Moment] = attempt(
        lambda: find_moments(records.table, lowest=lowest, most=most), notes, "Moments cannot be listed", []
    )
    return moments


def describe_moment(moment: Moment, labels: Labels, texts: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return a moment in JSON types; whether it has frames is for the caller to say.

    Args:
        moment: the moment.
        labels: names of discrete actions.
        texts: of a language model's run, beginnings of responses by record.
    """
    numbers = {name: round_number(getattr(moment, name)) for name in ("score", "error", "total", "advantage", "value")}
    return {
        "record": moment.record_id,
        "episode": moment.episode_id,
        "env": moment.env_index,
        "step": moment.step,
        "first_step": moment.first_step,
        "last_step": moment.last_step,
        "records": moment.records,
        "dropped": moment.dropped,
        **numbers,
        "return": round_number(moment.return_),
        "reward": round_number(moment.reward),
        "action": name_action(moment.action, labels) or "–",
        "significant": is_significant(moment.score, moment.error),
        "framed": False,
        "thumb": None,
        "text": (texts or {}).get(moment.record_id),
    }


def _list_excerpts(table: pl.DataFrame, moments: Sequence[Moment]) -> dict[int, str]:
    """Return the beginnings of the moments' responses, by record."""
    if "response" not in table.columns:
        return {}
    rows = table.filter(pl.col("record_id").is_in([moment.record_id for moment in moments]))
    pairs = rows.select("record_id", pl.col("response").str.slice(0, EXCERPT + 1)).iter_rows()
    return {record: short_text(text or "", EXCERPT) for record, text in pairs}


def order_strip(table: pl.DataFrame, moments: Sequence[Moment] = ()) -> pl.DataFrame:
    """Return the records of the strip in time order, episode after episode.

    Args:
        table: a round's records.
        moments: of a round of more than `STRIP` records, only these moments' episodes are taken.
    """
    keys = [name for name in ("env_index", "episode_id", "step") if name in table.columns]
    if len(table) > STRIP:
        episodes = {moment.episode_id for moment in moments if moment.episode_id is not None}
        if "episode_id" in keys and episodes:
            table = table.filter(pl.col("episode_id").is_in(list(episodes)))
        table = table.head(STRIP)
    return table.sort(*keys, "record_id", nulls_last=True) if keys else table.sort("record_id")


def build_strip(table: pl.DataFrame) -> dict[str, Any]:
    """Return the strip of records in the order of `order_strip`, as arrays."""

    def read(name: str) -> pl.Expr:
        return pl.col(name) if name in table.columns else pl.lit(None, dtype=pl.Int64)

    starts = table.with_row_index("start").group_by(env=read("env_index"), id=read("episode_id"), maintain_order=True)
    total = pl.col("reward").sum() if "reward" in table.columns else pl.lit(None)
    episodes = starts.agg(pl.col("start").first(), length=pl.len(), first_step=read("step").first(), total=total)
    kept = table["keep"] if "keep" in table.columns else [None] * len(table)
    return {
        "episodes": [
            {name: row[name] for name in ("id", "env", "start", "length", "first_step")}
            | {"return": round_number(row["total"])}
            for row in episodes.iter_rows(named=True)
        ],
        "record_ids": table["record_id"].to_list(),
        "scores": round_numbers(table["score"]) if "score" in table.columns else [None] * len(table),
        "dropped": [int(keep is False) for keep in kept],
    }


def _build_groups(run: ExploredRun, records: Round) -> dict[str, list[dict[str, Any]]]:
    if not records.scored or run.is_language or records.table.is_empty():
        return {}
    names = run.state_names if len(run.state_names or ()) == len(read_axes(records.table)) else None
    groups = {by: group_scores(records.table, by, labels=run.labels, names=names).to_dicts() for by in GROUPINGS}
    numbers = ("mean", "error", "share_negative", "dropped_share")
    return {
        by: [
            {"group": str(row["group"]), "records": int(row["records"])}
            | {name: round_number(row.get(name)) for name in numbers}
            for row in rows
        ]
        for by, rows in groups.items()
        if rows
    }


def _build_map(run: ExploredRun, records: Round, notes: list[str]) -> dict[str, Any] | None:
    """Return the round's most harmful and helpful records on the map of a grid world; None elsewhere."""
    if run.is_language or not records.scored or records.table.is_empty():
        return None
    number = records.number
    files = [run.directory.round_path("records", number), run.directory.round_path("policies", number)]

    def draw() -> dict[str, Any] | None:
        if not run.remember("grid", (), lambda: has_map(run.directory, env=run.env)):
            return None
        extremes = map_extremes(run.directory, number, records.table, env=run.env)
        return None if extremes is None else extremes.to_json()

    grid: dict[str, Any] | None = attempt(
        lambda: run.remember(("map", number), files, draw), notes, "The map of this round is not known"
    )
    return grid


def _build_changes(run: ExploredRun, records: Round, notes: list[str]) -> list[dict[str, Any]]:
    def build() -> list[dict[str, Any]]:
        numbers = pl.col("divergence", "value_before", "value_after").round_sig_figs(4)
        # Many records may be of one state: it is listed once, by the first of them.
        changes = run.changes(records.number).unique(numbers, keep="first", maintain_order=True).head(CHANGES)
        facts = records.table.select([n for n in ("record_id", "step", "action") if n in records.table.columns])
        rows = changes.join(facts, on="record_id", how="left", maintain_order="left").to_dicts()
        return [_describe_change(run, row) for row in rows]

    shown: list[dict[str, Any]] = attempt(build, notes, "What this round changed in the policy is not known", [])
    return shown


def _describe_change(run: ExploredRun, row: dict[str, Any]) -> dict[str, Any]:
    change = read_change(run, row)
    numbers = {name: round_number(row.get(name)) for name in ("divergence", "value_before", "value_after")}
    known = {"record": row["record_id"], "step": row.get("step"), "action": name_action(row.get("action"), run.labels)}
    return (
        known
        | numbers
        | {
            "text": ""
            if change is None
            else change.describe_largest(lambda number: re.sub(r"^(-?)0\.", r"\1.", f"{number:.2f}"), 4)
        }
    )


def _shorten(number: float) -> str:
    return re.sub(r"^(-?)0\.", r"\1.", f"{number:.2f}")


def _make_rows(run: ExploredRun, table: pl.DataFrame, moments: Sequence[Moment]) -> list[list[Any]]:
    """Return the grid's rows: the moments' faces, then the rest of their stretches, up to `ROWS`."""
    faces = [moment.record_id for moment in moments]
    others = [record for moment in moments for record in moment.record_ids]
    ids = list(dict.fromkeys([*faces, *others]))[:ROWS] or table["record_id"].head(ROWS).to_list()
    wanted = pl.DataFrame({"record_id": ids}, schema={"record_id": pl.Int64})
    rows = wanted.join(table.unique("record_id", keep="first"), on="record_id", how="inner", maintain_order="left")
    columns = list_columns(table.columns, is_language=run.is_language)
    return [make_row(row, columns, run.labels) for row in rows.iter_rows(named=True)]
