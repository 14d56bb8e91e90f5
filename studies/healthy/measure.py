"""What each detector of findings shows on runs of public environments; the healthy ones are the reference.

Run: `python -m studies.healthy.measure results/healthy [--runs out/healthy] [--only NAME]`. It measures what is not
measured yet; a detector whose source changed is named by `--only`, and is measured anew. The reference,
`src/whence/findings/reference.csv`, has the largest statistic over the runs of an environment.
"""

import csv
import time
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.healthy.environments import PublicEnvironment, read_environments
from studies.healthy.run import VARIANTS, place_run
from studies.shared import Only, Out, report, write_line
from whence.findings.detectors import DETECTORS
from whence.findings.drops import EARLIER, ITSELF, LEVELS, measure_changes
from whence.findings.evidence import Evidence, read_evidence
from whence.findings.finding import CannotTellError, Sight
from whence.findings.history import METRICS
from whence.findings.inspection import BEFORE, measure_one
from whence.findings.reference import TABLE
from whence.lab import read_rows
from whence.runs import RunDirectory

KEYS = ("environment", "variant")

KINDS = (
    *(kind for kind, _ in METRICS.values()),
    *("reward", "advantage", "value", "observation", "new observations", "action", "length"),
)
"""The kinds of numbers in a history."""

NAMES = (*DETECTORS, *(f"{BEFORE}{kind}" for kind in (*KINDS, *(f"{kind}{ITSELF}" for kind in LEVELS))))
"""The detectors, and the kinds of numbers that are looked at before a return fell."""


def describe(name: str, evidence: Evidence) -> dict[str, Any]:
    """Return what a detector sees in a run, as JSON has it, and how long it takes."""
    began = time.process_time()
    look = DETECTORS[name].look if name in DETECTORS else partial(look_at_changes, kind=name.removeprefix(BEFORE))
    sight = measure_one(look, evidence)
    return {
        **{"statistic": float(sight.statistic), "p": sight.p, "reason": sight.reason, "kind": sight.kind},
        **{"title": sight.title, "advice": sight.advice, "seconds": time.process_time() - began},
    }


def look_at_changes(evidence: Evidence, kind: str) -> Sight:
    """Return how far a kind of number came from all rounds before, in any round."""
    history = evidence.history
    changes = {} if history is None else measure_changes(history, range(EARLIER, len(history.rounds)))
    if kind not in changes:
        raise CannotTellError("the run has few rounds, or no such number")
    return Sight(changes[kind].size)


def measure_run(row: PublicEnvironment, variant: str, runs: Path, out: Path, only: str) -> None:
    """Write what the detectors show on a run, a row of `statistics.parquet`."""
    path = place_run(runs, row, variant)
    known = read_rows(out / "statistics.parquet", KEYS).get((row.id, variant), {}).get("seen", {})
    names = [name for name in NAMES if (only in name if only else name not in known)]
    if not names or not (path / "done").exists():
        return
    evidence = read_evidence(RunDirectory.open(path))
    assert evidence is not None, path
    seen = {name: sight for name, sight in known.items() if name in NAMES}
    seen |= {name: describe(name, evidence) for name in names}
    line = {"environment": row.id, "variant": variant, "family": row.family, "healthy": row.healthy, "seen": seen}
    write_line(out / "statistics.parquet", line, KEYS)
    report(row.id, variant)


def write_reference(out: Path) -> None:
    """Write the largest statistic of each detector and environment; of a detector that could not look, none."""
    largest: dict[tuple[str, str, str], float] = {}
    for run in filter(itemgetter("healthy"), read_rows(out / "statistics.parquet", KEYS).values()):
        for name, one in run["seen"].items():
            if name in NAMES and not one["reason"]:
                key = (name, run["environment"], run["family"])
                largest[key] = max(largest.get(key, 0.0), one["statistic"])
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["detector", "environment", "family", "statistic"])
        writer.writerows((*names, f"{statistic:.4g}") for names, statistic in sorted(largest.items()))


def main(
    out: Out,
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("out/healthy"),
    only: Only = "",
) -> None:
    """Measure what is not measured yet, and write the reference."""
    for row in read_environments():
        for variant in VARIANTS:
            measure_run(row, variant, runs.resolve(), out, only)
    write_reference(out)


if __name__ == "__main__":
    typer.run(main)
