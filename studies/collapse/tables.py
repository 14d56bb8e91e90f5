"""The tables of the study of collapses.

Run: `python -m studies.collapse.tables results/collapse`. It reads what `judge`, `evaluate` and `repeat` wrote.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from studies.collapse import evaluate, judge, repeat
from studies.collapse.judge import LINES
from studies.collapse.worlds import STEPS, WORLDS
from studies.shared import Out, Row, read_list, table, write_page

NEAR = 2
"""A round is named if it is within so many of the true one."""

_BEGIN = ("Before it broke", "As it broke")


def find_true_round(name: str, tested: dict[str, Row]) -> int | None:
    """Return the round from which a return was lower: of a change in the environment its own, else the tested one."""
    world = WORLDS[name]
    if world.change is None or world.kind != "planted":
        return tested[name]["true_round"] if name in tested else None
    return int(world.steps * world.since // STEPS) + 1


def names_cause(name: str, lines: Sequence[Row]) -> bool | None:
    """Return whether the first lines about what was unusual name a planted cause; None: none is planted."""
    words = {
        **{"learning rate": "the learning rate", "divergence": "the divergence", "clip range": "the clip range"},
        **{"reward": "`reward`", "advantage": "`advantage`", "return": "`return`", "entropy": "the entropy"},
        **{"observation": "pole", "action": "The action", "dynamics": "swap"},
    }
    if not WORLDS[name].cause:
        return None
    titles = [line["title"] for line in lines if not line["title"].startswith("It worked")][:LINES]
    return any(words[cause].lower() in title.lower() for title in titles for cause in WORLDS[name].cause)


def describe_run(row: Row, tested: dict[str, Row], answers: dict[tuple[str, str], Row]) -> list[str]:
    """Return the line of a training that was to break."""
    true, drop = find_true_round(row["name"], tested), row["drop"]
    first = [line["title"].split(": ")[1] for line in row["lines"] if line["title"].startswith(_BEGIN)][:2]
    again = answers.get((row["name"], "again"))
    shares = [] if again is None else [f"{each['broke']} of {each['of']}" for each in again["variants"]]
    return [
        row["name"],
        "–" if drop is None else f"{drop['round']}",
        "–" if true is None else f"{true}",
        "; ".join(first) or "nothing",
        {True: "yes", False: "no", None: "–"}[names_cause(row["name"], row["lines"])],
        ", ".join(shares) or "–",
    ]


def count(rows: Sequence[Row], tested: dict[str, Row]) -> list[str]:
    """Return what the figures are, in lines."""
    broken = [row for row in rows if row["kind"] != "healthy" and row["drop"] is not None]
    healthy = [row for row in rows if row["kind"] == "healthy"]
    planted = [row for row in rows if row["kind"] == "planted"]
    near = [
        row
        for row in broken
        if (true := find_true_round(row["name"], tested)) is not None and abs(row["drop"]["round"] - true) <= NEAR
    ]
    named = [row for row in planted if names_cause(row["name"], row["lines"])]
    false = [row for row in healthy if any(line["kind"] == "drop" for line in row["lines"])]
    rivals = {
        "thresholds on SB3's log": lambda row: row["thresholds"]["drop"] is not None,
        "rldoctor 0.2.0": lambda row: any(text.startswith("CRITICAL") for text in row["rldoctor"] or ()),
    }
    lines = [
        f"- {len(broken)} are said to have broken; the round is within {NEAR} of the true one in {len(near)}.",
        f"- Of {len(planted)} planted changes, {len(named)} are named in the first {LINES} lines after the drop's.",
        f"- Of {len(healthy)} healthy trainings, {len(false)} have a line that they broke.",
    ]
    for rival, says in rivals.items():
        hits, wrong = (sum(map(says, group)) for group in (broken, healthy))
        lines.append(
            f"- {rival}: says so of {hits} of {len(broken)} that broke, and of {wrong} of {len(healthy)} healthy."
        )
    return lines


def write_tables(out: Path) -> None:
    """Write tables.md."""
    rows = [row for row in read_list(out / "runs.parquet", judge.KEYS) if row["name"] in WORLDS]
    tested = {row["name"]: row for row in read_list(out / "evaluations.parquet", evaluate.KEYS)}
    answers = {(row["name"], row["question"]): row for row in read_list(out / "repetitions.parquet", repeat.KEYS)}
    heads = ["training", "round said", "true round", "unusual until then", "cause named", "other seeds that break"]
    broken = [
        describe_run(row, tested, answers) for row in rows if row["kind"] != "healthy" and row["drop"] is not None
    ]
    others = [f"{row['name']} {row['seed']}" for row in rows if row["kind"] != "healthy" and row["drop"] is None]
    texts: list[Any] = [f"- **{name}**, {question}: {row['text']}" for (name, question), row in answers.items()]
    write_page(
        out / "tables.md",
        "# Collapses",
        "\n".join(count(rows, tested)),
        "Other seeds: unchanged, then with the likely cause changed (see repeat.py).",
        table([heads, *broken]),
        f"Trained, and did not break: {', '.join(others) or 'none'}.",
        "## What other seeds do",
        "\n".join(texts),
    )


def main(out: Out) -> None:
    """Write the tables."""
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
