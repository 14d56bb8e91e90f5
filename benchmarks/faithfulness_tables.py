"""Tabulate what `benchmarks.faithfulness` has found so far: tables.md, summary.json and pictures.

Run: `python -m benchmarks.faithfulness_tables results/faithfulness [--no-pictures]`. Means are over the rounds and
seeds of an environment and optimiser, with 95% percentile bootstrap intervals; a round of a seed is one unit.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
import typer
from scipy import stats

from benchmarks.faithfulness import OPTIMIZERS, SETUPS
from benchmarks.selections import ONCE, STEPS
from whence.counterfactual.gains import ALL
from whence.counterfactual.interventions import mean_change
from whence.guards import written_atomically
from whence.report.figures import COLOURS, interventions_box

UNIT = ["env", "optimizer", "seed", "round"]
SCORES = (
    *("snapshot", "trajectory", "optimizer", "optimizer-momentum", "unrolled", "smoothed"),
    *("datamodel", "datamodel with prior", "advantage", "td-error", "random"),
)
TRUTHS = {"recorded": "recorded minibatches", "reshuffled": "reshuffled, mean of the orders"}
GRADIENTS = ("all", "random", "iif", "not negative")
SHARES_OF_ALL = {
    "less": "less all's",
    "less as long": "less all's, as long",
    "less as far": "less all's, as far",
}
GAINS = SHARES_OF_ALL | {
    "kl": "divergence, over all's",
    "entropy": "entropy, less all's",
}


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    no_pictures: Annotated[bool, typer.Option("--no-pictures", help="Draw nothing.")] = False,
) -> None:
    """Write the tables."""
    lds, removals, cosines = (_rows(out, "round", key) for key in ("lds", "removals", "cosines"))
    interventions = _rows(out, "intervention", "interventions")
    if lds.is_empty() or interventions.is_empty():
        raise typer.BadParameter(f"{out} holds no finished round. Run python -m benchmarks.faithfulness {out}.")
    judged = _rows(out, "selection", "selections")
    gains = None if judged.is_empty() else compared(judged)
    summary = {
        "lds": _nested(_lds_means(lds), ["share", "outcome", "truth", "group", "score"]),
        "removals": _nested(_removal_means(removals), ["outcome", "truth", "group", "side", "score", "removed"]),
        "cosines": _nested(_cosine_means(cosines), ["truth", "advantages", "group", "kept"]),
        "interventions": _nested(_intervention_means(interventions), ["group", "variant"]),
        "selections": {} if gains is None else _nested(_gain_means(gains), ["advantages", "group", "selection"]),
    }
    parts = [
        "# Tables\n\nBy `python -m benchmarks.faithfulness_tables`; [README.md](README.md) says what they hold.",
        *_lds_sections(lds),
        _cosine_section(cosines),
        *([] if gains is None else _gain_sections(gains)),
        _intervention_section(interventions),
    ]
    if not no_pictures:
        _draw(out / "figures" / "interventions.svg", _boxes(interventions))
        parts.append("![Change of the test return](figures/interventions.svg)")
        for group, own in _grouped(removals.filter(outcome="surrogate", truth="reshuffled")):
            _draw(out / "figures" / f"removals-{group}.svg", _removal_curves(own))
            parts.append(f"## Leaving out the best, the worst, or others: {group}\n\n![](figures/removals-{group}.svg)")
    _write(out / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    _write(out / "tables.md", "\n\n".join(parts) + "\n")


def _rows(out: Path, kind: str, key: str) -> pl.DataFrame:
    found = []
    for file in sorted((out / "rounds").glob(f"*/*/{kind}_*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        found += [{**{name: content[name] for name in UNIT}, **row} for row in content[key]]
    rows = pl.DataFrame(found, infer_schema_length=None)
    return rows.with_columns(group=pl.format("{}-{}", "env", "optimizer")) if found else rows


def _grouped(table: pl.DataFrame) -> Iterable[tuple[str, pl.DataFrame]]:
    for env in SETUPS:
        for optimizer in OPTIMIZERS:
            own = table.filter(env=env, optimizer=optimizer)
            if own.height:
                yield f"{env}-{optimizer}", own


def mean_over(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the mean over rounds and seeds and its 95% bootstrap interval; nulls are rounds without the figure."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if len(known) < 2 or np.ptp(known) == 0:
        mean = float(known.mean()) if len(known) else None
        return {"mean": mean, "low": None, "high": None, "rounds": len(known)}
    drawn = stats.bootstrap((known,), np.mean, method="percentile", random_state=np.random.default_rng(0))
    interval = drawn.confidence_interval
    return {"mean": float(known.mean()), "low": interval.low, "high": interval.high, "rounds": len(known)}


def ratio_over(values: Sequence[float | None], wholes: Sequence[float]) -> dict[str, Any]:
    """Return the sum of values over the sum of wholes, and its 95% bootstrap interval over rounds and seeds.

    There is none of rounds without a value, nor where the interval of the wholes' mean holds 0.
    """
    known = np.array([(v, w) for v, w in zip(values, wholes, strict=True) if v is not None], dtype=np.float64)
    found: dict[str, Any] = {"mean": None, "low": None, "high": None, "rounds": len(known)}
    whole = mean_over(known[:, 1].tolist()) if len(known) else found
    if whole["mean"] is None or (whole["low"] or whole["mean"]) <= 0:
        return found

    def ratio(values: Any, wholes: Any, axis: int = -1) -> Any:
        return values.sum(axis) / wholes.sum(axis)

    found["mean"] = float(ratio(*known.T))
    if len(known) > 1 and np.ptp(known[:, 0]) > 0:
        drawn = stats.bootstrap(known.T, ratio, paired=True, method="percentile", random_state=np.random.default_rng(0))
        found |= {"low": drawn.confidence_interval.low, "high": drawn.confidence_interval.high}
    return found


def _means(table: pl.DataFrame, by: Sequence[str], columns: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for key, own in table.group_by(by, maintain_order=True):
        row = dict(zip(by, key, strict=True))
        for name, column in columns.items():
            row[name] = mean_over(own[column].to_list())
        rows.append(row)
    return rows


def _lds_means(table: pl.DataFrame) -> list[dict[str, Any]]:
    by = ["share", "outcome", "truth", "group", "score"]
    return _means(table, by, {"lds": "lds", "ceiling": "ceiling"})


def _removal_means(table: pl.DataFrame) -> list[dict[str, Any]]:
    by = ["outcome", "truth", "group", "side", "score", "removed"]
    return _means(table.with_columns(pl.col("score").fill_null("any")), by, {"change": "change"})


def _cosine_means(table: pl.DataFrame) -> list[dict[str, Any]]:
    by = ["truth", "advantages", "group", "kept"]
    return _means(table, by, {"cosine": "cosine", "reliability": "reliability"})


def _intervention_means(table: pl.DataFrame) -> list[dict[str, Any]]:
    chosen = table.filter(pl.col("variant") != "full").drop_nulls("change")
    return [
        {"group": group, "variant": variant, **mean_change(own["change"].to_list())}
        for (group, variant), own in chosen.group_by("group", "variant", maintain_order=True)
    ]


def compared(table: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each round, selection and kind of advantages: means over orders, held against training on all.

    A selection whose advantages are normalised once is held against training on everything so; and that against
    training on everything as it is, where no update of its is known that goes as far.
    """
    by = [*UNIT, "group", "advantages"]
    of_orders = table.group_by(*by, "selection", maintain_order=True).agg(
        pl.col("gain", "all_as_long", "all_as_far", "kl", "entropy", "kept").mean()
    )
    whole = pl.col("selection") == ALL + ONCE
    once = pl.col("selection").str.ends_with(ONCE) & ~whole
    named = of_orders.with_columns(
        pl.when(whole).then(None).otherwise(pl.col("all_as_long", "all_as_far")).name.keep(),
        base=pl.when(once).then(pl.lit(ALL + ONCE)).otherwise(pl.lit(ALL)),
    )
    base = of_orders.select(*by, base="selection", gain_all="gain", kl_all="kl", entropy_all="entropy")
    return named.join(base, on=[*by, "base"], how="left", maintain_order="left").with_columns(
        (pl.col("gain") - pl.col("gain_all")).alias("less"),
        (pl.col("gain") - pl.col("all_as_long")).alias("less as long"),
        (pl.col("gain") - pl.col("all_as_far")).alias("less as far"),
        (pl.col("kl") / pl.col("kl_all")).alias("kl"),
        (pl.col("entropy") - pl.col("entropy_all")).alias("entropy"),
    )


def _gain_means(table: pl.DataFrame) -> list[dict[str, Any]]:
    by = ["advantages", "group", "selection"]
    means = _means(table, by, {name: name for name in ("gain", "kl", "entropy", "kept")})
    for row, (_, own) in zip(means, table.group_by(by, maintain_order=True), strict=True):
        row |= {name: ratio_over(own[name].to_list(), own["gain_all"].to_list()) for name in SHARES_OF_ALL}
    return means


def _nested(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for row in rows:
        place = nested
        for name in by[:-1]:
            place = place.setdefault(str(row[name]), {})
        place[str(row[by[-1]])] = {name: value for name, value in row.items() if name not in by}
    return nested


def _lds_sections(table: pl.DataFrame) -> Iterable[str]:
    means = {tuple(row[k] for k in ("share", "outcome", "truth", "group", "score")): row for row in _lds_means(table)}
    groups = [group for group, _ in _grouped(table)]
    for share in sorted(table["share"].unique()):
        for outcome, what in (
            ("target", "the target"),
            ("surrogate", "the surrogate mean(ρÂ)"),
            ("evaluated", "the measured test return"),
        ):
            for truth, how in TRUTHS.items():
                own = {key[3:]: row for key, row in means.items() if key[:3] == (share, outcome, truth)}
                if not own:
                    continue
                lines = [["score", *groups]]
                for score in SCORES:
                    cells = [_cell(own.get((group, score), {}).get("lds")) for group in groups]
                    if any(cell != "–" for cell in cells):
                        lines.append([score, *cells])
                ceilings = [_cell(own.get((group, "snapshot"), {}).get("ceiling"), interval=False) for group in groups]
                lines.append(["*ceiling*", *ceilings])
                yield f"## LDS of {what}, {share:.0%} of the records, {how}\n\n{_table(lines)}"


def _cosine_section(table: pl.DataFrame) -> str:
    means = {tuple(row[k] for k in ("truth", "advantages", "group", "kept")): row for row in _cosine_means(table)}
    groups = [group for group, _ in _grouped(table)]
    parts = ["## Cosine of a rollout's gradient with that of 200,000 steps"]
    for truth in ("gae", "monte-carlo"):
        for advantages in ("raw", "centred"):
            own = {key[2:]: row for key, row in means.items() if key[:2] == (truth, advantages)}
            lines = [["records kept", *groups]]
            lines += [[kept, *(_cell(own[group, kept]["cosine"]) for group in groups)] for kept in GRADIENTS]
            reliable = [_cell(own[group, "all"]["reliability"], interval=False) for group in groups]
            lines.append(["*reliability*", *reliable])
            parts.append(f"Advantages {advantages}, against {truth} advantages:\n\n{_table(lines)}")
    return "\n\n".join(parts)


def _gain_sections(table: pl.DataFrame) -> Iterable[str]:
    yield (
        "## What selections gain on fresh steps\n\n"
        f"The rise of mean(ρÂ) over {STEPS // 2:,} steps that no training saw, in standard deviations of Â (returns "
        "less values); means over rounds and seeds, differences from all's in percent of all's mean. *As long*: all's "
        "update, made as long as the selection's. *As far*: all's, made longer or shorter until the policy diverges "
        "as much. What is normalised once is held against all, normalised once."
    )
    means = {tuple(row[k] for k in ("advantages", "group", "selection")): row for row in _gain_means(table)}
    for group, _ in _grouped(table):
        own = {key[2]: row for key, row in means.items() if key[:2] == ("monte-carlo", group)}
        by_gae = {key[2]: row["less as far"] for key, row in means.items() if key[:2] == ("gae", group)}
        lines = [["records kept", "share", "gain", *GAINS.values(), "less all's, as far, Â by GAE"]]
        for selection, row in own.items():
            less = [_cell(row[name], percent=True) for name in SHARES_OF_ALL]
            others = [*less, _cell(row["kl"], digits=2), _cell(row["entropy"]), _cell(by_gae[selection], percent=True)]
            shown = others if selection != ALL else [""] * len(others)
            share = f"{row['kept']['mean'] / own[ALL]['kept']['mean']:.0%}"
            lines.append([selection, share, _cell(row["gain"], interval=selection == ALL, digits=4), *shown])
        rounds = own[ALL]["gain"]["rounds"]
        yield f"### {group}, {rounds} rounds\n\n{_table(lines)}"


def _intervention_section(table: pl.DataFrame) -> str:
    lines = [["", "rounds", "without negative scores", "rounds improved", "as many at random", "rounds improved"]]
    means = {(row["group"], row["variant"]): row for row in _intervention_means(table)}
    for group, _ in _grouped(table):
        cells = []
        for variant in ("filtered", "random"):
            row = means[group, variant]
            cells += [_cell(row, digits=2), f"{row['improved']} of {row['rounds']}"]
        lines.append([group, str(means[group, "filtered"]["rounds"]), *cells])
    return f"## Test return of single rounds, less that of training on everything\n\n{_table(lines)}"


def _cell(found: Mapping[str, Any] | None, *, interval: bool = True, digits: int = 3, percent: bool = False) -> str:
    if found is None or found["mean"] is None:
        return "–"
    form = ".0%" if percent else f".{digits}f"
    text = f"{found['mean']:{form}}"
    if interval and found["low"] is not None:
        text += f" [{found['low']:{form}}, {found['high']:{form}}]"
    return text.replace("-", "−")


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rest])


def _boxes(table: pl.DataFrame) -> go.Figure:
    chosen = table.filter(pl.col("variant") != "full").drop_nulls("change")
    # Returns of environments differ in scale: each is shown in standard deviations of its own changes.
    spread = pl.col("change").std().over("env")
    scaled = chosen.with_columns(run=pl.col("group"), change=pl.col("change") / spread)
    figure = interventions_box(scaled)
    return figure.update_layout(width=900, yaxis_title="change of the test return, in its standard deviations")


def _removal_curves(table: pl.DataFrame) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(width=760, height=380, font_family="sans-serif", template="plotly_white")
    figure.update_xaxes(title="records left out").update_yaxes(title="change of mean(ρÂ)", zeroline=True)
    scores = [score for score in (*SCORES, None) if table.filter(pl.col("score").eq_missing(score)).height]
    for score, colour in zip(scores, COLOURS, strict=False):
        for side, dash in (("top", "solid"), ("bottom", "dash"), ("random", "dot")):
            own = table.filter(pl.col("score").eq_missing(score), side=side)
            if own.height:
                curve = own.group_by("removed").agg(pl.col("change").mean()).sort("removed")
                name = "random" if score is None else f"{score}, {side}"
                line = {"color": colour, "dash": dash}
                figure.add_scatter(x=curve["removed"].to_list(), y=curve["change"].to_list(), name=name, line=line)
    return figure


def _draw(file: Path, figure: go.Figure) -> None:
    content = figure.update_layout(font_family="sans-serif").to_image(format="svg")
    with written_atomically(file) as temporary:
        temporary.write_bytes(content)


def _write(file: Path, text: str) -> None:
    with written_atomically(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
