"""What findings and each rival say of a run, and whether that names its fault."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from studies.healthy.environments import make_environment
from studies.healthy.measure import describe
from studies.healthy.tables import list_lines, read_healthy
from studies.operators.cells import Cell, find_row, make_task, read_play
from studies.operators.faults import ONLY
from studies.operators.operators import OPERATORS
from studies.operators.rivals import Line, boost, check, pivot, read_log, read_records
from studies.shared import Row
from whence.findings.detectors import DETECTORS
from whence.findings.evidence import read_evidence
from whence.findings.reference import Reference
from whence.runs import RunDirectory

FIRST = 3
"""The lines that are read of each."""

KEYS = ("environment", "operator", "size", "seed")
"""What names a row."""

RIVALS = ("pivots", "boosted residual", "SB3's log", "check_env")

FINDINGS = {"findings": "environment", "findings, kind unseen": "family"}
"""Findings, and what their reference of healthy runs has not seen."""


def look(run: RunDirectory) -> dict[str, Row]:
    """Return what each detector of findings sees in a run."""
    evidence = read_evidence(run)
    assert evidence is not None, run.path
    return {name: describe(name, evidence) for name in DETECTORS}


def say(seen: Mapping[str, Row], healthy: Sequence[Row], column: str, value: str) -> Row:
    """Return findings as lines, by a reference of healthy runs without an environment or a family.

    A finding that says that something is wrong has strength 1, one that it is unusual 0.5.
    """
    reference = read_without(tuple(healthy), column, value)
    lines = list_lines(seen, reference)[:FIRST]
    return {
        "strengths": [1.0 if rank == "wrong" else 0.5 for rank, *_ in lines],
        "texts": [f"{one['kind']}: {one['title']}{_add_advice(one)}" for *_, one in lines],
    }


def _add_advice(one: Row) -> str:
    """Return the advice on a setting, which has the setting's name."""
    return f" {one['advice']}" if one["kind"] == "setting" else ""


_REFERENCES: dict[tuple[int, str, str], Reference] = {}


def read_without(healthy: tuple[Row, ...], column: str, value: str) -> Reference:
    """Return the reference of healthy runs but for those of an environment or a family, once each."""
    key = (len(healthy), column, value)
    if key not in _REFERENCES:
        _REFERENCES[key] = read_healthy(row for row in healthy if row[column] != value)
    return _REFERENCES[key]


def judge(cell: Cell, runs: Path, known: Mapping[str, Any] = MappingProxyType({})) -> Row:
    """Return what is said of a run by each method, what its fault touched, and how long each method takes.

    `known` has what methods said of it before: they are not asked again.
    """
    path = cell.place_run(runs)
    run = RunDirectory.open(path)
    sample, _ = read_play(cell.environment, runs)
    row = find_row(cell.environment)
    methods: Mapping[str, Callable[[], list[Line]]] = {
        "pivots": lambda: pivot(read_records(run)),
        "boosted residual": lambda: boost(read_records(run)),
        "SB3's log": lambda: read_log(run.table("metrics")),
        "check_env": lambda: check(lambda: make_task(make_environment(row), cell, sample, ONLY)),
    }
    touched = json.loads((path / "touched.json").read_text(encoding="utf-8"))
    # A struct of a table needs the same fields in all rows.
    judged: Row = {**touched, "place": json.dumps(touched["place"]), "family": row.family}
    judged["seen"] = known.get("seen") or look(run)
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
        method: sorted((max(row[method]["strengths"], default=0.0) for row in twins), reverse=True) for method in RIVALS
    }
    thresholds = {method: values[allowed] if allowed < len(values) else 0.0 for method, values in strongest.items()}
    return {**thresholds, **dict.fromkeys(FINDINGS, 0.0), "check_env": 0.0}


def read_lines(row: Row, method: str, threshold: float, usual: frozenset[str]) -> list[str]:
    """Return the first lines of a method that are above its threshold and are not usual in healthy runs."""
    pairs = zip(row[method]["strengths"], row[method]["texts"], strict=True)
    return [text for strength, text in pairs if strength > threshold and text not in usual][:FIRST]


def list_usual(twins: Sequence[Row], environment: str) -> frozenset[str]:
    """Return what `check_env` says of the healthy runs of an environment, which no user could leave out."""
    texts: list[Any] = [row["check_env"]["texts"] for row in twins if row["environment"] == environment]
    return frozenset(text for each in texts for text in each)
