"""Tabulate what `studies.faithfulness.run` has found so far: tables.md.

Run: `python -m studies.faithfulness.tables results/faithfulness`. Rounds are chosen and seeds are drawn: figures are
means over the rounds of a seed first, with a 95% t interval over seeds, of which one has none.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import typer
from scipy import stats

from studies.faithfulness.means import Entry, means_of, over_seeds
from studies.faithfulness.rows import read_frame, read_rounds
from studies.faithfulness.run import LEFT_OUT, SETUPS, SHARES, SMOOTHED
from studies.shared import Out, cell, grid, table, write_page

PHASES = ("early", "middle", "late")
SCORES = (
    *("snapshot", "snapshot with values", "crossfit", "trajectory", "optimizer", "optimizer-momentum", "unrolled"),
    *("smoothed", *(f"smoothed, {draws} draws" for draws in (64, 512)), SMOOTHED, "advantage", "td-error", "random"),
)
TRUTHS = {"recorded": "recorded minibatches", "reshuffled": "reshuffled, mean of the orders"}
OUTCOMES = {"target": "the target", "surrogate": "the surrogate mean(ρÂ)", "evaluated": "the measured test return"}

Means = dict[tuple[Any, ...], Any]


def write_tables(out: Out) -> None:
    """Write the tables."""
    means = summarise(out)
    write_page(
        out / "tables.md",
        "# Tables\n\nBy `python -m studies.faithfulness.tables`; [README.md](README.md) says what they hold.",
        *_lds_sections(means["lds"]),
        *_phase_sections(means["phases"]),
        *_tested_sections(list_orders(out)),
        *_removal_sections(means["removals"]),
        _intervention_section(means["interventions"]),
    )


def summarise(out: Path) -> dict[str, Means]:
    """Return the means of all tables, by what tells them apart."""
    numbers = [
        {"env": env, "optimizer": optimizer, "round": number, "phase": phase}
        for (env, optimizer), setup in SETUPS.items()
        for phase, number in zip(PHASES, setup.studied, strict=False)
    ]
    lds = read_frame(out, "round", "lds")
    halves = lds.filter(outcome="target", share=SHARES[0]).join(
        pl.DataFrame(numbers), on=["env", "optimizer", "round"], maintain_order="left"
    )
    tested = read_frame(out, "round", "removals").filter(outcome="evaluated", truth="reshuffled")
    changes = read_frame(out, "intervention", "interventions").filter(pl.col("variant") != "full").drop_nulls("change")
    return {
        "lds": _lds_means(lds, ["share", "outcome", "truth", "group", "score"]),
        "phases": _lds_means(halves, ["group", "truth", "phase", "score"]),
        "removals": means_of(tested, ["score", "side", "group"], "change"),
        "interventions": {
            key: over_seeds(rows, "change") | {"improved": int((rows["change"] > 0).sum())}
            for key, rows in changes.group_by("group", "variant", maintain_order=True)
        },
    }


def _lds_means(rows: pl.DataFrame, by: Sequence[str]) -> Means:
    means: Means = means_of(rows, by, "lds", "ceiling")
    for key, group in rows.group_by(by, maintain_order=True):
        means[key]["of ceiling"] = over_seeds(group, "lds", "ceiling")
    return means


def _groups(means: Means, at: int) -> list[str]:
    """Return the environments and optimisers of some means, in the order of the study."""
    known = {key[at] for key in means}
    return [group for group in (f"{env}-{optimizer}" for env, optimizer in SETUPS) if group in known]


def _add_ceilings(text: str, show: Mapping[str, Entry | None]) -> str:
    return "\n".join([text, f"| *ceiling* | {' | '.join(cell(entry, interval=False) for entry in show.values())} |"])


def _lds_sections(means: Means) -> Iterator[str]:
    groups = _groups(means, 3)
    for place in [(share, outcome, truth) for share in SHARES for outcome in OUTCOMES for truth in TRUTHS]:
        if not any(key[:3] == place for key in means):
            continue

        def show(name: str, group: str, figure: str = "lds", place: tuple[Any, ...] = place) -> str:
            return cell(means.get((*place, group, name), {}).get(figure), percent=figure == "of ceiling")

        share, outcome, truth = place
        ceilings = {group: means.get((*place, group, "snapshot"), {}).get("ceiling") for group in groups}
        text = _add_ceilings(grid("score", SCORES, groups, show), ceilings)
        if truth == "reshuffled" and any(entry and entry["mean"] is not None for entry in ceilings.values()):
            text += "\n\nOf the ceiling:\n\n" + grid("score", SCORES, groups, lambda *at: show(*at, "of ceiling"))
        yield f"## LDS of {OUTCOMES[outcome]}, {share:.0%} of the records, {TRUTHS[truth]}\n\n{text}"


def _phase_sections(means: Means) -> Iterator[str]:
    yield f"## LDS of the target by phase, {SHARES[0]:.0%} of the records"
    for group in _groups(means, 0):
        numbers = dict(zip(PHASES, SETUPS[tuple(group.split("-"))].studied, strict=False))
        places = [(truth, phase) for truth in TRUTHS for phase in PHASES if (group, truth, phase, "random") in means]
        columns = {f"{truth}, {phase} ({numbers[phase]})": (group, truth, phase) for truth, phase in places}

        def show(name: str, column: str, columns: Mapping[str, tuple[Any, ...]] = columns) -> str:
            return cell(means.get((*columns[column], name), {}).get("lds"))

        ceilings = {column: means[(*place, "random")]["ceiling"] for column, place in columns.items()}
        yield f"### {group}\n\n{_add_ceilings(grid('score', SCORES, [*columns], show), ceilings)}"


def list_orders(out: Path) -> list[list[str]]:
    """Return Spearman's correlation of the target, mean of the orders, with each order's tests, by tested round.

    All subsets of an order are tested on one seed, so that they differ by more than chance; but then what that seed
    makes of them is theirs in common, and no number of subsets averages it out. So a round says as much as its orders
    agree.
    """
    places = [*SETUPS]
    rows = sorted(read_rounds(out, "round"), key=lambda row: places.index((row["env"], row["optimizer"])))
    lines = []
    for row in rows:
        outcomes = row["outcomes"][str(SHARES[0])]["reshuffled"]
        if "evaluated" in outcomes:
            target = np.mean(outcomes["target"], axis=0)
            correlations = [
                None if np.ptp(target) == 0 or np.ptp(tested) == 0 else stats.spearmanr(target, tested).statistic
                for tested in outcomes["evaluated"]
            ]
            shown = ", ".join(cell(each, digits=2) for each in correlations)
            lines.append([f"{row['env']}-{row['optimizer']}", str(row["seed"]), str(row["round"]), shown])
    return lines


def _tested_sections(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    if lines:
        yield (
            "## The target and the measured test return, by order\n\nSpearman's correlation over subsets of 50%, "
            "reshuffled, of the target (mean of the orders) with the test returns of each order. All subsets of an "
            "order are tested on the same seed, so intervals of LDS of the test return, which are over subsets, do not "
            "hold what that seed does, and neither do tables of recorded minibatches, which have one. A round tells as "
            f"much as its orders agree.\n\n{table([['', 'seed', 'round', 'orders'], *lines])}"
        )


def _removal_sections(means: Means) -> Iterator[str]:
    if means:
        sides = {"random": "at random", "top": "{}, highest", "bottom": "{}, lowest"}
        names = {sides[side].format(score): (score, side) for score, side, _ in means}

        def show(name: str, group: str) -> str:
            return cell(means.get((*names[name], group), {}).get("change"), digits=2)

        share = f"{LEFT_OUT:.0%}"
        lines = grid("score, records left out", names, _groups(means, 2), show)
        yield f"## Test return without {share} of the records, less that of training on everything\n\n{lines}"


def _intervention_section(means: Means) -> str:
    lines = [["", "seeds", "without negative scores", "rounds improved", "as many at random", "rounds improved"]]
    for group in _groups(means, 0):
        rows = [means[group, variant] for variant in ("filtered", "random")]
        cells = [text for row in rows for text in (cell(row, digits=2), f"{row['improved']} of {row['rounds']}")]
        lines.append([group, str(rows[0]["seeds"]), *cells])
    return f"## Test return of single rounds, less that of training on everything\n\n{table(lines)}"


if __name__ == "__main__":
    typer.run(write_tables)
