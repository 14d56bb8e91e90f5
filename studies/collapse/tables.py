"""The tables of the study of collapses.

Run: `python -m studies.collapse.tables results/collapse`. It reads what `judge`, `evaluate` and `repeat` wrote.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import typer

from studies.collapse import evaluate, judge, repeat
from studies.collapse.judge import LINES
from studies.collapse.worlds import SEEDS, STEPS, WORLDS
from studies.shared import Out, Row, read_list, table, write_page
from whence.lab import read_rows

NEAR = 2
"""A round is named if it is within so many of the true one."""

_BEGIN = ("Before it broke", "As it broke")


Key: TypeAlias = tuple[str, int]


def is_changed(name: str) -> bool:
    """Return whether a training breaks because its environment changes: no test in another one can tell."""
    return WORLDS[name].kind == "planted" and WORLDS[name].change is not None


def find_true_round(row: Row, tested: dict[Key, Row]) -> int | None:
    """Return the round from which a return was lower: of a change in the environment its own, else the tested one."""
    world, key = WORLDS[row["name"]], (row["name"], row["seed"])
    if is_changed(row["name"]):
        return int(world.steps * world.since // STEPS) + 1
    return tested[key]["true_round"] if key in tested and tested[key]["fell"] else None


def has_broken(row: Row, tested: dict[Key, Row]) -> bool | None:
    """Return whether a training broke, by tests of its policies or by a change that was made; None: not tested."""
    if is_changed(row["name"]):
        return True
    return tested[key]["fell"] if (key := (row["name"], row["seed"])) in tested else None


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


def describe_run(row: Row, tested: dict[Key, Row], answers: dict[tuple[str, str], Row]) -> list[str]:
    """Return the line of a training that broke, or that is said to have."""
    true, drop = find_true_round(row, tested), row["drop"]
    first = [line["title"].split(": ")[1] for line in row["lines"] if line["title"].startswith(_BEGIN)][:2]
    again = answers.get((row["name"], "again"))
    again = again if again is not None and again["seed"] == row["seed"] else None
    shares = [] if again is None else [f"{each['broke']} of {each['of']}" for each in again["variants"]]
    return [
        f"{row['name']} {row['seed']}",
        {True: "yes", False: "no", None: "–"}[has_broken(row, tested)],
        "–" if drop is None else f"{drop['round']}",
        "–" if true is None else f"{true}",
        ("; ".join(first) or "nothing") if drop else "–",
        {True: "yes", False: "no", None: "–"}[names_cause(row["name"], row["lines"])],
        ", ".join(shares) or "–",
    ]


RIVALS: Mapping[str, Callable[[Row], bool]] = {
    "findings": lambda row: row["drop"] is not None,
    "thresholds on SB3's log": lambda row: row["thresholds"]["drop"] is not None,
    "rldoctor 0.2.0": lambda row: any(text.startswith("CRITICAL") for text in row["rldoctor"] or ()),
}


def count(rows: Sequence[Row], tested: dict[Key, Row]) -> list[str]:
    """Return what the figures are, in lines."""
    planted = [row for row in rows if row["kind"] == "planted"]
    rounds = [
        (row["drop"]["round"], true)
        for row in rows
        if row["drop"] is not None and (true := find_true_round(row, tested)) is not None
    ]
    near = sum(abs(said - true) <= NEAR for said, true in rounds)
    named = sum(bool(names_cause(row["name"], row["lines"])) for row in planted)
    return [
        f"- Where it broke and is said to have, the round is within {NEAR} of the true one in {near} of {len(rounds)}.",
        f"- Of {len(planted)} planted changes, {named} are named in the first {LINES} lines after the drop's.",
    ]


def compare(rows: Sequence[Row], tested: dict[Key, Row]) -> str:
    """Return the table of how many trainings each way says to have broken, of those that did and did not."""
    groups = {
        f"{kind}, {words}": [row for row in rows if row["kind"] == kind and has_broken(row, tested) is broke]
        for kind in ("planted", "natural", "healthy")
        for broke, words in ((True, "broke"), (False, "did not"))
    }
    groups = {name: group for name, group in groups.items() if group}
    lines = [
        [way, *(f"{sum(map(says, group))} of {len(group)}" for group in groups.values())]
        for way, says in RIVALS.items()
    ]
    return table([["says that it broke", *groups], *lines])


def say(row: Row) -> str:
    """Return what other seeds did in a sentence; where the change was undone, as a count alone."""
    if row["question"] == "again":
        return str(row["text"])
    (variant,) = row["variants"]
    return f"{variant['broke']} of {variant['of']} other seeds break."


def write_tables(out: Path) -> None:
    """Write tables.md."""
    every = read_list(out / "runs.parquet", judge.KEYS)
    rows = [row for row in every if row["name"] in WORLDS and row["seed"] in SEEDS[row["kind"]]]
    tested = read_rows(out / "evaluations.parquet", evaluate.KEYS)
    answers = {(row["name"], row["question"]): row for row in read_list(out / "repetitions.parquet", repeat.KEYS)}
    heads = ["training", "broke", "round said", "true round", "unusual until then", "cause named", "other seeds break"]
    shown = [row for row in rows if has_broken(row, tested) or row["drop"] is not None]
    others = [f"{row['name']} {row['seed']}" for row in rows if row["kind"] == "natural" and row not in shown]
    texts: list[Any] = [f"- **{name}**, {question}: {say(row)}" for (name, question), row in answers.items()]
    write_page(
        out / "tables.md",
        "# Collapses",
        compare(rows, tested),
        "\n".join(count(rows, tested)),
        "Other seeds: unchanged, then with the likely cause changed (see repeat.py).",
        table([heads, *(describe_run(row, tested, answers) for row in shown)]),
        f"Meant to break by themselves, and did not: {', '.join(others) or 'none'}.",
        "## What other seeds do",
        "\n".join(texts),
    )


def main(out: Out) -> None:
    """Write the tables."""
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
