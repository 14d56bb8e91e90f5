"""What findings and each rival say of a run, and whether that names its fault."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from studies.healthy.environments import PublicEnvironment, make_environment
from studies.operators.cells import Cell, find_row, make_task, read_play
from studies.operators.faults import ONLY
from studies.operators.operators import OPERATORS
from studies.operators.rivals import Line, boost, check, pivot, read_log, read_records
from studies.shared import Row
from whence.findings import find
from whence.runs import RunDirectory

FIRST = 3
"""The lines that are read of each."""

KEYS = ("environment", "operator", "size", "seed")
"""What names a row."""

METHODS = ("findings", "pivots", "boosted residual", "SB3's log", "check_env")


def list_lines(run: RunDirectory, row: PublicEnvironment) -> list[Line]:
    """Return findings as lines. This is the one place that knows their interface.

    A finding that says that something is wrong has strength 1, one that it is unusual 0.5. Of a setting the advice is
    read too, as the setting's name is there. A reference of healthy runs must leave out `row` and its family.
    """
    lines = []
    for finding in find(run):
        text = f"{finding.title} {finding.advice}" if finding.kind == "setting" else finding.title
        is_unusual = getattr(finding, "rank", "wrong") == "unusual"
        lines.append(Line(0.5 if is_unusual else 1.0, finding.kind, text))
    return lines


def judge(cell: Cell, runs: Path, known: Mapping[str, Any] = MappingProxyType({})) -> Row:
    """Return what is said of a run by each method, what its fault touched, and how long each method takes.

    `known` has what methods said of it before: they are not asked again.
    """
    path = cell.place_run(runs)
    run = RunDirectory.open(path)
    sample, _ = read_play(cell.environment, runs)
    row = find_row(cell.environment)
    methods: Mapping[str, Callable[[], list[Line]]] = {
        "findings": lambda: list_lines(run, row),
        "pivots": lambda: pivot(read_records(run)),
        "boosted residual": lambda: boost(read_records(run)),
        "SB3's log": lambda: read_log(run.table("metrics")),
        "check_env": lambda: check(lambda: make_task(make_environment(row), cell, sample, ONLY)),
    }
    touched = json.loads((path / "touched.json").read_text(encoding="utf-8"))
    # A struct of a table needs the same fields in all rows.
    judged: Row = {**touched, "place": json.dumps(touched["place"]), "family": row.family}
    for method, ask in methods.items():
        if method in known:
            judged[method] = known[method]
            continue
        began = time.process_time()
        lines = ask()
        seconds = time.process_time() - began
        count = FIRST if method != "check_env" else len(lines)  # those of healthy runs are left out later
        judged[method] = {
            "seconds": seconds,
            "strengths": [line.strength for line in lines[:count]],
            "texts": [f"{line.kind}: {line.text}" for line in lines[:count]],
        }
    return judged


def is_planted(row: Row) -> bool:
    """Return whether a fault touched a run: a twentieth of the steps, or a tenth of the rewards.

    Faults of episodes and those of single steps touch few steps by what they are: one is enough.
    """
    is_rare = OPERATORS[row["operator"]].about == "episode" or row["operator"] in ("observation-spike", "paid-again")
    return bool(row["steps"] >= 0.05 or row["rewards"] >= 0.1 or (is_rare and row["steps"] > 0))


def is_named(row: Row, line: str) -> bool:
    """Return whether a line names the fault of a run, or at least its place if it points at places alone."""
    kind, _, text = line.partition(": ")
    if kind != "place":
        return OPERATORS[row["operator"]].is_named(text)
    place = json.loads(row["place"])
    words = [f"entry {place['entry']} ="] if "entry" in place else []
    words += [f"copy = {place['copy']}"] if "copy" in place else []
    # A step is demanded where nothing else says where the fault is.
    words += ["second half = 1"] if "step" in place and not words else []
    words += ["first step = 1"] if "first" in place else []
    return bool(words) and any(word in text for word in words)


def set_thresholds(twins: Sequence[Row], rate: float) -> dict[str, float]:
    """Return for each rival the strength that at most a rate of the healthy runs are above; of findings 0."""
    allowed = int(rate * len(twins))
    strongest = {
        method: sorted((max(row[method]["strengths"], default=0.0) for row in twins), reverse=True)
        for method in METHODS
    }
    thresholds = {method: values[allowed] if allowed < len(values) else 0.0 for method, values in strongest.items()}
    return {**thresholds, "findings": 0.0, "check_env": 0.0}


def read_lines(row: Row, method: str, threshold: float, usual: frozenset[str]) -> list[str]:
    """Return the first lines of a method that are above its threshold and are not usual in healthy runs."""
    pairs = zip(row[method]["strengths"], row[method]["texts"], strict=True)
    return [text for strength, text in pairs if strength > threshold and text not in usual][:FIRST]


def list_usual(twins: Sequence[Row], environment: str) -> frozenset[str]:
    """Return what `check_env` says of the healthy runs of an environment, which no user could leave out."""
    texts: list[Any] = [row["check_env"]["texts"] for row in twins if row["environment"] == environment]
    return frozenset(text for each in texts for text in each)
