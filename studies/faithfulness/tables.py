"""Tabulate what `studies.faithfulness.run` has found so far: tables.md and summary.json.

Run: `python -m studies.faithfulness.tables results/faithfulness`. Rounds are chosen and seeds are
drawn: figures are means over the rounds of a seed first, with a 95% t interval over seeds, of which one has none. What
commands that are history found (selections, ablations, datamodels) stands there, too.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from studies.faithfulness import ablation_tables, tested
from studies.faithfulness.means import means_of, over_seeds
from studies.faithfulness.run import LEFT_OUT, SETUPS, SHARES, SMOOTHED, STEPS
from studies.faithfulness.selection_tables import compared, gain_means, gain_sections
from studies.markdown import cell, nested, table
from studies.stored import ROUND, read_datamodels, read_rounds
from whence.core import write_atomically

PHASES = ("early", "middle", "late")
SCORES = (
    *("snapshot", "snapshot with values", "crossfit", "trajectory", "optimizer", "optimizer-momentum", "unrolled"),
    *("smoothed", *(f"smoothed, {draws} draws" for draws in (64, 512)), SMOOTHED, "advantage", "td-error", "random"),
)
TRUTHS = {"recorded": "recorded minibatches", "reshuffled": "reshuffled, mean of the orders"}
OUTCOMES = {
    "target": "the target",
    "surrogate": "the surrogate mean(ρÂ)",
    "evaluated": "the measured test return",
}
GRADIENTS = ("all", "random", "iif", "not negative")
GROUPS = [f"{env}-{optimizer}" for env, optimizer in SETUPS]


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
) -> None:
    """Write the tables."""
    lds, removals, cosines = (_rows(out, "round", key) for key in ("lds", "removals", "cosines"))
    interventions = _rows(out, "intervention", "interventions")
    if lds.is_empty() or interventions.is_empty():
        raise typer.BadParameter(f"{out} holds no finished round. Run python -m studies.faithfulness.run {out}.")
    if unknown := sorted(set(lds["score"]) - set(SCORES)):
        raise typer.BadParameter(f"{out} holds scores that no table has: {', '.join(unknown)}. Add them to SCORES.")
    lds = lds.with_columns(phase=_phase())
    judged = _rows(out, "selection", "selections")
    gains = None if judged.is_empty() else compared(judged)
    additive = additive_ceilings(out)
    ablations, clipping = (_rows(out, "ablation", key) for key in ("ablations", "clipping"))
    taken_apart = ablation_tables.ablation_means(ablations)
    unclipped = ablation_tables.clipping_means(
        clipping if clipping.is_empty() else clipping.with_columns(phase=_phase())
    )
    orders = tested.by_order(out)
    summary = {
        "lds": nested(_lds_means(lds, _WHOLE), _WHOLE),
        "phases": nested(_lds_means(lds.filter(outcome="target", share=SHARES[0]), _BY_PHASE), _BY_PHASE),
        "tested": nested(orders, ["group", "seed", "round"]),
        "additive": additive,
        "ablations": nested(taken_apart, ["group", "share", "truth", "score"]),
        "clipping": nested(unclipped, ["group", "phase", "clipped"]),
        "removals": nested(_removal_means(removals), ["outcome", "truth", "group", "side", "score", "removed"]),
        "cosines": nested(_cosine_means(cosines), ["truth", "advantages", "group", "kept"]),
        "interventions": nested(_intervention_means(interventions), ["group", "variant"]),
        "selections": {} if gains is None else nested(gain_means(gains), ["advantages", "group", "selection"]),
    }
    parts = [
        "# Tables\n\nBy `python -m studies.faithfulness.tables`; [README.md](README.md) says what they hold.",
        *_lds_sections(lds),
        *_phase_sections(lds.filter(outcome="target", share=SHARES[0])),
        *tested.sections(orders),
        *_additive_sections(additive),
        *ablation_tables.sections(taken_apart, unclipped),
        _cosine_section(cosines),
        *([] if gains is None else gain_sections(gains, _groups(gains))),
        *_tested_removals(removals),
        _intervention_section(interventions),
    ]
    _write(out / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    _write(out / "tables.md", "\n\n".join(parts) + "\n")


def _rows(out: Path, kind: str, key: str) -> pl.DataFrame:
    tables_of_rounds = []
    for content in read_rounds(out, kind):
        setup = SETUPS[content["env"], content["optimizer"]]
        if content["round"] not in (setup.studied if kind in ("round", "ablation") else setup.recorded):
            place = ", ".join(f"{name} {content[name]}" for name in ROUND)
            raise typer.BadParameter(
                f"The line of {place} in {out}/rounds/{kind}.parquet is of a round that is not studied. Remove it, or "
                "add the round to SETUPS."
            )
        tables_of_rounds += [{**{name: content[name] for name in ROUND}, **row} for row in content[key]]
    rows = pl.DataFrame(tables_of_rounds, infer_schema_length=None)
    return rows.with_columns(group=pl.format("{}-{}", "env", "optimizer")) if tables_of_rounds else rows


def _phase() -> pl.Expr:
    """Return the phase that a studied round stands for."""
    phase = pl.lit(None, pl.String)
    for (env, optimizer), setup in SETUPS.items():
        for name, number in zip(PHASES, setup.studied, strict=False):
            here = (pl.col("env") == env) & (pl.col("optimizer") == optimizer) & (pl.col("round") == number)
            phase = pl.when(here).then(pl.lit(name)).otherwise(phase)
    return phase


def _groups(rows: pl.DataFrame) -> list[str]:
    return [group for group in GROUPS if group in set(rows["group"])]


_WHOLE = ["share", "outcome", "truth", "group", "score"]
_BY_PHASE = ["truth", "group", "phase", "score"]


def _lds_means(rows: pl.DataFrame, by: Sequence[str]) -> list[dict[str, Any]]:
    means = means_of(rows, by, ["lds", "ceiling"])
    for row, (_, group_rows) in zip(means, rows.group_by(by, maintain_order=True), strict=True):
        row["of ceiling"] = over_seeds(group_rows, "lds", "ceiling")
    return means


def _removal_means(rows: pl.DataFrame) -> list[dict[str, Any]]:
    by = ["outcome", "truth", "group", "side", "score", "removed"]
    return means_of(rows.with_columns(pl.col("score").fill_null("any")), by, ["change"])


def _cosine_means(rows: pl.DataFrame) -> list[dict[str, Any]]:
    return means_of(rows, ["truth", "advantages", "group", "kept"], ["cosine", "reliability"])


def _intervention_means(rows: pl.DataFrame) -> list[dict[str, Any]]:
    chosen = rows.filter(pl.col("variant") != "full").drop_nulls("change")
    return [
        {
            "group": group,
            "variant": variant,
            **over_seeds(group_rows, "change"),
            "improved": int((group_rows["change"] > 0).sum()),
        }
        for (group, variant), group_rows in chosen.group_by("group", "variant", maintain_order=True)
    ]


def additive_ceilings(out: Path) -> dict[str, Any]:
    """Return what the best sum of scores would come to on 4,000 trainings of a round, by outcome and group.

    Beside it what scores, and linear predictors fitted to some of the trainings, reach on the same trainings.
    """
    by_outcome: dict[str, Any] = {}
    contents = read_datamodels(out)
    for (env, optimizer), content in ((setup, contents[setup]) for setup in SETUPS if setup in contents):
        group = f"{env}-{optimizer}"
        for ceiling in content["ceilings"]:
            outcome = ceiling["outcome"]
            fits = [row for row in content["datamodels"] if row["outcome"] == outcome and row["lds"] is not None]
            by_outcome.setdefault(outcome, {})[group] = {
                "round": content["round"],
                "trainings": content["trainings"],
                "ceiling": {name: ceiling[name] for name in ("lds", "low", "high")},
                "fits": [{name: row[name] for name in ("trainings", "prior", "prior_lds", "lds")} for row in fits],
                "scores": {row["score"]: row["lds"] for row in content["scores"] if row["outcome"] == outcome},
            }
    return by_outcome


def _lds_sections(rows: pl.DataFrame) -> Iterable[str]:
    means = {tuple(row[name] for name in _WHOLE): row for row in _lds_means(rows, _WHOLE)}
    groups = _groups(rows)
    for share in sorted(rows["share"].unique()):
        for outcome, what in OUTCOMES.items():
            for truth, how in TRUTHS.items():
                by_score = {key[3:]: row for key, row in means.items() if key[:3] == (share, outcome, truth)}
                if not by_score:
                    continue
                lines = _by_score(by_score, groups, "lds")
                ceilings = [
                    cell(by_score.get((group, "snapshot"), {}).get("ceiling"), interval=False) for group in groups
                ]
                text = f"## LDS of {what}, {share:.0%} of the records, {how}\n\n"
                text += table([*lines, ["*ceiling*", *ceilings]])
                if truth == "reshuffled" and set(ceilings) != {"–"}:
                    text += f"\n\nOf the ceiling:\n\n{table(_by_score(by_score, groups, 'of ceiling', percent=True))}"
                yield text


def _by_score(
    means: Mapping[tuple[Any, ...], Mapping[str, Any]], columns: Sequence[str], name: str, *, percent: bool = False
) -> list[list[str]]:
    """Return a line for each score that there is, a cell for each column; `means` are by column and score."""
    lines = [["score", *columns]]
    for score in SCORES:
        cells = [cell(means.get((column, score), {}).get(name), percent=percent) for column in columns]
        if any(text != "–" for text in cells):
            lines.append([score, *cells])
    return lines


def _phase_sections(rows: pl.DataFrame) -> Iterable[str]:
    yield f"## LDS of the target by phase, {SHARES[0]:.0%} of the records"
    means = {tuple(row[name] for name in _BY_PHASE): row for row in _lds_means(rows, _BY_PHASE)}
    for (env, optimizer), setup in SETUPS.items():
        group = f"{env}-{optimizer}"
        if group not in _groups(rows):
            continue
        places = [(truth, phase) for truth in TRUTHS for phase in PHASES if (truth, group, phase, "random") in means]
        numbers = dict(zip(PHASES, setup.studied, strict=False))
        by_column = {
            (f"{truth}, {phase} ({numbers[phase]})", score): means[truth, group, phase, score]
            for truth, phase in places
            for score in SCORES
            if (truth, group, phase, score) in means
        }
        columns = list(dict.fromkeys(column for column, _ in by_column))
        ceilings = [cell(by_column[column, "random"]["ceiling"], interval=False) for column in columns]
        yield f"### {group}\n\n{table([*_by_score(by_column, columns, 'lds'), ['*ceiling*', *ceilings]])}"


def _additive_sections(by_outcome: Mapping[str, Any]) -> Iterable[str]:
    for outcome, by_group in by_outcome.items():
        rounds = ", ".join(f"{group} {study['round']}" for group, study in by_group.items())
        lines = [["", *by_group]]
        for score in SCORES:
            cells = []
            for study in by_group.values():
                lds, ceiling = study["scores"].get(score), study["ceiling"]["lds"]
                shown = "–" if lds is None else f"{lds:.3f} ({lds / ceiling:.0%})" if ceiling > 0 else f"{lds:.3f}"
                cells.append(shown.replace("-", "−"))
            if any(shown != "–" for shown in cells):
                lines.append([score, *cells])
        fits = dict.fromkeys((fit["trainings"], fit["prior"]) for study in by_group.values() for fit in study["fits"])
        for trainings, prior in fits:
            matching = [
                next((fit for fit in study["fits"] if (fit["trainings"], fit["prior"]) == (trainings, prior)), {})
                for study in by_group.values()
            ]
            rows = {f"linear, {trainings:,} trainings" + (f", from {prior}" if prior else ""): "lds"}
            if prior:
                rows[f"{prior}, on these {trainings:,}"] = "prior_lds"
            for name, key in rows.items():
                lines.append([name, *(cell({"mean": fit.get(key)}, interval=False) for fit in matching)])
        ceilings = [
            cell({"mean": study["ceiling"]["lds"], "low": study["ceiling"]["low"], "high": study["ceiling"]["high"]})
            for study in by_group.values()
        ]
        lines.append(["*additive ceiling*", *ceilings])
        yield (
            f"## The best sum of scores: {OUTCOMES[outcome]}, 50% of the records, recorded minibatches\n\n"
            f"LDS over all trainings of one round of seed 0 ({rounds}), and as a share of the additive ceiling: what "
            "the best sum of scores would come to, estimated without a fit. Linear predictors are cross-validated.\n\n"
            f"{table(lines)}"
        )


def _cosine_section(rows: pl.DataFrame) -> str:
    means = {tuple(row[k] for k in ("truth", "advantages", "group", "kept")): row for row in _cosine_means(rows)}
    groups = _groups(rows)
    parts = [f"## Cosine of a rollout's gradient with that of {STEPS:,} steps"]
    for truth in ("gae", "monte-carlo"):
        for advantages in ("raw", "centred"):
            by_group = {key[2:]: row for key, row in means.items() if key[:2] == (truth, advantages)}
            lines = [["records kept", *groups]]
            lines += [[kept, *(cell(by_group[group, kept]["cosine"]) for group in groups)] for kept in GRADIENTS]
            reliable = [cell(by_group[group, "all"]["reliability"], interval=False) for group in groups]
            lines.append(["*reliability*", *reliable])
            parts.append(f"Advantages {advantages}, against {truth} advantages:\n\n{table(lines)}")
    return "\n\n".join(parts)


def _tested_removals(rows: pl.DataFrame) -> Iterable[str]:
    tested = rows.filter(outcome="evaluated", truth="reshuffled")
    if tested.is_empty():
        return
    groups = _groups(tested)
    means = {(row["group"], row["score"], row["side"]): row["change"] for row in _removal_means(tested)}
    lines = [["score, records left out", *groups]]
    for score, side in dict.fromkeys(key[1:] for key in means):
        name = "at random" if side == "random" else f"{score}, {'highest' if side == 'top' else 'lowest'}"
        lines.append([name, *(cell(means.get((group, score, side)), digits=2) for group in groups)])
    share = f"{LEFT_OUT[1][0]:.0%}"
    yield f"## Test return without {share} of the records, less that of training on everything\n\n{table(lines)}"


def _intervention_section(rows: pl.DataFrame) -> str:
    lines = [["", "seeds", "without negative scores", "rounds improved", "as many at random", "rounds improved"]]
    means = {(row["group"], row["variant"]): row for row in _intervention_means(rows)}
    for group in _groups(rows):
        cells = []
        for variant in ("filtered", "random"):
            row = means[group, variant]
            cells += [cell(row, digits=2), f"{row['improved']} of {row['rounds']}"]
        lines.append([group, str(means[group, "filtered"]["seeds"]), *cells])
    return f"## Test return of single rounds, less that of training on everything\n\n{table(lines)}"


def _write(file: Path, text: str) -> None:
    with write_atomically(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
