"""Runs and rounds as the page shows them: curves; strip, moments, groups, how far to trust scores."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl
import polars.selectors as cs

from whence.core import require_file
from whence.page.content.episodes import read_metrics
from whence.page.content.explored_run import ExploredRun, Frames, Round, attempt
from whence.page.content.frames import choose_steps, make_thumb, read_picture
from whence.page.content.moment_view import choose_columns, describe_moment, describe_view, gather_moment, list_curves
from whence.page.content.record_grid import EMBEDDED, RESPONSES, STEPS, Column, list_columns, list_pivots, make_cells
from whence.page.content.responses import describe_text, list_group, list_prompts
from whence.page.content.short_json import cut_text, round_numbers
from whence.scores import SIGNIFICANT, Moment, find_moment, find_moments
from whence.stored.language import knows_policies


def name_commands(run: ExploredRun) -> dict[str, str | None]:
    """Return the commands that an opened record names; None: no policy is known, or not how to make it again."""
    config = run.directory.config
    if run.is_language:
        can_explain = "rollouts" in config or knows_policies(run.directory)
    else:
        can_explain = bool(run.directory.experiment) or config.get("policy") is not None
    why = run.name_command("why", "--record {record}") if can_explain else None
    return {"view": run.name_command("view"), "why": why}


SERIES = (
    *("round_return", "round_length", "episode_return", "test_return"),
    *("dropped_share", "negative_share", "significant_share"),
)
"""Curves over rounds that a page shows below the slider, where they exist."""

CURVES = {
    "reward": ("reward", "Mean over the round's responses"),
    "test_return": ("test", "Mean over the prompts of the test"),
    "length": ("length", "Tokens of a response"),
    "ended_share": ("ended", "The share of responses that ended before the limit of tokens"),
    "kl": ("divergence", "From the start model or the reference, in nats a response"),
    "train/entropy_loss": ("entropy", "Of the model, in nats a token"),
    "train/clip_fraction": ("clipped", "The share of ratios that were clipped"),
    "train/approx_kl": ("step size", "How far the round's steps took the model, in nats a token"),
    "dropped_share": ("dropped", "The share of responses that did not train"),
    "negative_share": ("scores below 0", "Their share"),
}
"""Curves of a language model's run by the names of metrics: their own names, and what they mean."""


def describe_runs(runs: Sequence[ExploredRun], rounds: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
    """Return the page's object in JSON types, with `rounds` of each run embedded; None: a server is asked for them."""
    kind = "responses" if runs and runs[0].is_language else "steps"
    numbers = [run.directory.rounds() for run in runs] if rounds is None else rounds
    shown = [_describe_run(run, chosen, is_served=rounds is None) for run, chosen in zip(runs, numbers, strict=True)]
    return {"mode": "served" if rounds is None else "file", "kind": kind, "runs": shown}


def _describe_run(run: ExploredRun, rounds: Sequence[int], *, is_served: bool) -> dict[str, Any]:
    findings = None if is_served else run.list_findings()  # a server is asked for them, as they take a while
    numbers = _read_numbers(run, rounds)
    return {
        "label": run.label,
        "path": str(run.directory.path),
        "commands": name_commands(run),
        "findings": findings,
        "looked": None if is_served else run.describe_checks(),
        "opens": choose_round(run, rounds, findings or ()),
        "planned": run.planned,
        "finished": run.is_finished(),
        "live": is_served and run.is_live(),
        "rounds": [*rounds],
        "series": {name: round_numbers(numbers[name]) for name in SERIES if name in numbers.columns},
        "curves": _list_curves(numbers) if run.is_language else [],
        "flags": [] if is_served else run.list_flags(),
        "columns": [column._asdict() for column in _list_run_columns(run, rounds)],
        "actions": run.labels,
    }


def _read_numbers(run: ExploredRun, rounds: Sequence[int]) -> pl.DataFrame:
    """Return the numbers of rounds' metrics and evaluations, a row for each round; no columns of nulls."""
    numbers = pl.DataFrame({"round": rounds}, schema={"round": pl.Int64})
    for table in (read_metrics(run.directory), run.directory.table("evaluations")):
        if not table.is_empty():
            columns = table.select("round", cs.numeric() - cs.by_name(numbers.columns, require_all=False))
            numbers = numbers.join(columns, on="round", how="left", maintain_order="left")
    return numbers.select(column for column in numbers if column.count())


def _list_curves(numbers: pl.DataFrame) -> list[dict[str, Any]]:
    """Return curves in JSON types, rewards first: `name`, `about` and `values`, one for each round, null if unknown."""
    parts = [name for name in numbers.columns if name.startswith("reward.")]
    infos = [name for name in numbers.columns if name.startswith("info.") and name != "info.step"]
    curves = []
    for key in ("reward", *parts, *list(CURVES)[1:], *infos):
        # Nothing was dropped, or all ended: no curve.
        if key not in numbers.columns or (key.endswith("share") and numbers[key].n_unique() == 1):
            continue
        about = "A column of the data set, or logged by a reward" if key in infos else "Of this reward function"
        name, about = CURVES.get(key, (key.partition(".")[2], about))
        values = -numbers[key] if key == "train/entropy_loss" else numbers[key]
        curves.append({"name": name, "about": about, "values": round_numbers(values, 4)})
    return curves


def _list_run_columns(run: ExploredRun, rounds: Sequence[int]) -> list[Column]:
    """Return the grid's columns, by the last round; all if it cannot be read."""
    try:
        names = [*pl.read_parquet_schema(require_file(run.directory.round_path("records", rounds[-1])))]
    except (IndexError, OSError, pl.exceptions.PanicException, pl.exceptions.PolarsError):
        return list(RESPONSES if run.is_language else STEPS)
    # An agent's scores are computed when a round is opened.
    computed = [] if "score" in names or run.is_language or not run.can_score else ["score", "error"]
    computed += ["score_per_token"] if {"score", "tokens"} <= {*names} else []
    return list_columns([*names, *computed], is_language=run.is_language)


def choose_round(
    run: ExploredRun, rounds: Sequence[int], findings: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any] | None:
    """Return the round to open with, and why: the first finding's, or where most scores differ from 0, or the last."""
    if findings and findings[0]["round"] in rounds:
        return {"round": findings[0]["round"], "why": "The first finding is about this round."}
    shares = choose_columns(_read_numbers(run, rounds), ["significant_share"]).to_series().fill_null(0.0)
    share, number = max(zip(shares, rounds, strict=True), default=(0.0, 0))
    if not share:
        return {"round": rounds[-1], "why": ""} if rounds else None
    return {"round": number, "why": "In no round can more scores be told from 0."}


def describe_trust(run: ExploredRun, records: pl.DataFrame) -> list[dict[str, str]]:
    """Return sentences on how far to trust a round's scores, each with a level: fair or unknown."""
    if "score" not in records.columns:
        return []
    lines = [*([_describe_sizes(records)] if run.is_language else []), _describe_errors(records)]
    return [{"level": level, "text": text} for level, text in lines if text]


ALIKE = 0.7
"""From this rank correlation on, the sizes of scores say little more than |advantage| × length."""


def _describe_sizes(records: pl.DataFrame) -> tuple[str, str]:
    """Return how far the sizes of scores are those of advantage and length alone; no text where that is not known."""
    if not {"advantage", "tokens"} <= {*records.columns}:
        return "unknown", ""
    rows = records.filter(pl.col("advantage") != 0).drop_nulls(["score", "advantage", "tokens"])
    product = pl.col("advantage").abs() * pl.col("tokens")
    rho = rows.select(pl.corr(pl.col("score").abs(), product, method="spearman")).item()
    if len(rows) < LEAST_RANKED or rho is None or not math.isfinite(rho):
        return "unknown", ""
    text = f"The sizes of these scores follow |advantage| × length with a rank correlation of {rho:.2f}"
    if rho < ALIKE:
        return "unknown", f"{text}, so they say something else, too."
    return "fair", f"{text}: they say little more. Compare the scores per token, and their signs."


LEAST_RANKED = 8
"""Responses from which on ranks are compared."""


def _describe_errors(records: pl.DataFrame) -> tuple[str, str]:
    if "error" not in records.columns or not records["error"].count():
        return "unknown", "The scores come without standard errors, so it is not known which differ from 0."
    pairs = records.select("score", "error").drop_nulls()
    share = pairs.select((pl.col("score").abs() > SIGNIFICANT * pl.col("error")).mean()).item() or 0.0
    shown = "<1%" if 0 < share < 0.005 else f"{share:.0%}"
    # Under noise the share is 2% to 6% in the mean, with standard deviations up to 13%: results/faithfulness/groups.md.
    return "unknown", (
        f"{shown} of the scores are beyond two of their errors, which is a 95% test for each of them alone. The share "
        "is no test of the round: all scores share one target, so chance alone may give none or a third."
    )


MOMENTS = 100
"""Moments at either end of a round that a served page lists at most."""

ROWS = 60
"""Rows of a round's grid in the offline file at most; a quarter of the responses of a language model's usual round."""

EXCERPT = 160
"""Characters of a response in a list."""

STRIP = 50_000
"""Records up to which the strip shows the whole round; of larger rounds it shows the moments' episodes."""


def build_round(
    run: ExploredRun, number: int, *, rows: bool = False, records: Sequence[int] = (), most: int = MOMENTS
) -> dict[str, Any]:
    """Return a round in JSON types, as the page's contract has it; a damaged one has no records, and a note.

    With `rows` it has the grid's rows of the moments, of which there are `most` at either end, and of `records`; where
    there is a server, the page asks that.
    """
    scored = run.round(number)
    table, notes = scored.table, [*scored.notes]
    worst, best = list_moments(scored, notes, most)
    shown = order_strip(table, [*worst, *best])
    if len(shown) < len(table):
        notes.append(f"The strip shows {len(shown):,} of {len(table):,} records: the episodes of the listed moments.")
    trust = attempt(lambda: describe_trust(run, table), notes, "Trust is not known", [])
    return {
        "round": number,
        "records": len(table),
        "scored": "score" in table.columns,
        "trust": trust,
        "strip": build_strip(shown),
        "worst": _describe_moments(run, number, worst),
        "best": _describe_moments(run, number, best),
        "prompts": list_prompts(scored) if run.is_language else [],
        "groupings": attempt(lambda: list_pivots(run, number), notes, "Groups cannot be made", []),
        "map": attempt(lambda: run.map(number), notes, "The map of this round is not known", None),
        "rows": _make_rows(run, number, [*worst, *best], records) if rows else None,
        "notes": notes,
    }


def list_moments(records: Round, notes: list[str], most: int = MOMENTS) -> tuple[list[Moment], list[Moment]]:
    """Return a round's most harmful and most helpful moments; none if a column is not what it should be."""
    failure = "Moments cannot be listed"
    worst, best = (
        attempt(partial(find_moments, records.table, lowest=lowest, most=most), notes, failure, [])
        for lowest in (True, False)
    )
    return worst, best


def _describe_moments(run: ExploredRun, number: int, moments: Sequence[Moment]) -> list[dict[str, Any]]:
    """Return moments in JSON types, with what their lists show.

    That is the beginning of a response, or a thumbnail of an observation that is a picture, as it was stored.
    """
    shown = []
    for moment in moments:
        row, about = run.record(number, moment.record_id), describe_moment(moment, run.labels)
        if "response" in row:
            about["text"] = cut_text(row["response"] or "", EXCERPT)
        elif (picture := read_picture(row, run.directory.config.get("observation_space"))) is not None:
            about["thumb"] = make_thumb(picture)
        shown.append(about)
    return shown


def build_detail(run: ExploredRun, number: int, record: int) -> dict[str, Any]:
    """Return a record and what surrounds it in JSON types, as the page's contract has it; rollouts are not made."""
    row, records = run.record(number, record), run.round(number)
    detail = describe_record(run, number, find_moment(records.table, record))
    return detail | {"group": list_group(records, row.get("prompt"))} if run.is_language else detail


def describe_record(
    run: ExploredRun,
    number: int,
    moment: Moment,
    *,
    replay: tuple[Frames, str | None] | None = None,
    with_tokens: bool = True,
) -> dict[str, Any]:
    """Return a moment's face and what surrounds it in JSON types, but for the other responses to its prompt.

    `replay` are its frames and their note, if they were drawn already.
    """
    view = gather_moment(run, number, moment, steps=choose_steps(moment.step), replay=replay)
    notes = run.directory.flags().filter(pl.col("round") == number, pl.col("record_id") == moment.record_id)["note"]
    detail = describe_view(view) | {"window": list_curves(view.window, run.labels), "flag": next(iter(notes), None)}
    return detail | describe_text(view.row, run.vocabulary, with_tokens=with_tokens) if run.is_language else detail


def order_strip(table: pl.DataFrame, moments: Sequence[Moment] = ()) -> pl.DataFrame:
    """Return the records of the strip in time order, of a large round those of the moments' episodes."""
    keys = [name for name in ("env_index", "episode_id", "step", "group_id") if name in table.columns]
    if len(table) > STRIP:
        episodes = {moment.episode_id for moment in moments if moment.episode_id is not None}
        if "episode_id" in keys and episodes:
            table = table.filter(pl.col("episode_id").is_in(list(episodes)))
        table = table.head(STRIP)
    return table.sort(*keys, "record_id", nulls_last=True)


def build_strip(table: pl.DataFrame) -> dict[str, Any]:
    """Return the strip of records in the order of `order_strip`, as arrays."""
    unit = "group_id" if "group_id" in table.columns else "episode_id"  # responses to one prompt
    columns = choose_columns(table, ["record_id", "env_index", unit, "step", "reward", "score", "keep"])
    episodes = columns.with_row_index("start").group_by(id=pl.col(unit), env=pl.col("env_index"), maintain_order=True)
    stretches = episodes.agg(
        pl.col("start").first(),
        pl.len().alias("length"),
        pl.col("step").first().alias("first_step"),
        pl.col("reward").sum().alias("return"),
    )
    return {
        "episodes": round_numbers(stretches.to_dicts()),
        "record_ids": columns["record_id"].to_list(),
        "scores": round_numbers(columns["score"]),
        "dropped": [int(keep is False) for keep in columns["keep"]],
    }


def _make_rows(
    run: ExploredRun, number: int, moments: Sequence[Moment], records: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the grid's rows, up to `ROWS`: flagged, the moments' faces, `records`, the rest of stretches, then others.

    Each has `differs`, whether its score differs from 0, and `groups`, the names of its groups.
    """
    keys = run.groupings(number)[:EMBEDDED]
    names = {f"groups {by}": run.group(number, by).cast(pl.String) for by in keys}
    table = run.flagged(number).with_columns(**names).unique("record_id", keep="first", maintain_order=True)
    faces = [moment.record_id for moment in moments]
    others = [record for moment in moments for record in moment.record_ids]
    flagged = table.filter(pl.col("flag").is_not_null())["record_id"].to_list()
    ids = list(dict.fromkeys([*flagged, *faces, *records, *others, *table["record_id"]]))[:ROWS]
    wanted = pl.DataFrame({"record_id": ids}, schema={"record_id": pl.Int64})
    rows = wanted.join(table, on="record_id", how="inner", maintain_order="left")
    differs = pl.col("differs") if "differs" in rows.columns else pl.lit(None)
    cells = make_cells(rows, list_columns(run.round(number).table.columns, is_language=run.is_language), run.labels)
    groups = pl.struct(pl.col(f"groups {by}").alias(by) for by in keys) if keys else pl.lit(None)
    return rows.select(**cells, differs=differs, groups=groups).to_dicts()
