"""What is looked at in a run: each detector's statistic beside those of healthy runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from whence.findings.actions import (
    look_at_late_actions,
    look_at_spread,
    look_at_swaps_of_parts,
    look_at_swaps_of_places,
)
from whence.findings.evidence import Evidence, read_evidence
from whence.findings.finding import CHANCE, CannotTellError, Check, Finding, Sight, link_records
from whence.findings.gamed_rewards import find_gamed_rewards
from whence.findings.reference import Reference, compare, read_reference
from whence.findings.reward_effects import (
    look_at_late_rewards,
    look_at_missing_rewards,
    look_at_rewards_of_parts,
    look_at_rewards_of_places,
)
from whence.findings.settings import give_advice
from whence.runs import RunDirectory

MOST = 5
"""Findings that are returned at most."""

Look = Callable[[Evidence], Sight]
"""A detector: returns what it sees of a run, or raises `CannotTellError`."""

DETECTORS: Mapping[str, Look] = {
    "late actions": look_at_late_actions,
    "swapped actions of copies and rounds": look_at_swaps_of_parts,
    "swapped actions of places": look_at_swaps_of_places,
    "late rewards": look_at_late_rewards,
    "rewards of copies and rounds": look_at_rewards_of_parts,
    "missing rewards": look_at_missing_rewards,
    "rewards of places": look_at_rewards_of_places,
    "spread of actions": look_at_spread,
}
"""The detectors by the names that the reference has; of findings of one rank, causes come before what follows."""


@dataclass(frozen=True)
class Measured:
    """What a detector saw; or why it could not look."""

    sight: Sight
    reason: str = ""


def measure(evidence: Evidence) -> dict[str, Measured]:
    """Return what each detector sees."""
    return {name: measure_one(look, evidence) for name, look in DETECTORS.items()}


def measure_one(look: Look, evidence: Evidence) -> Measured:
    """Return what a detector sees."""
    try:
        return Measured(look(evidence))
    except CannotTellError as error:
        return Measured(Sight(0.0), str(error))


def judge(measured: Mapping[str, Measured], evidence: Evidence, reference: Reference) -> list[Check]:
    """Return a check for each detector, those with a finding first: what is wrong, then what is unusual."""
    checks = [_judge_one(name, one, evidence, reference.get(name, ())) for name, one in measured.items()]
    order = ("wrong", "unusual", "could not be looked at", "fine")
    return sorted(checks, key=lambda check: order.index(check.outcome))


def _judge_one(name: str, measured: Measured, evidence: Evidence, healthy: tuple[float, ...]) -> Check:
    sight = measured.sight
    if measured.reason:
        return Check(name, "could not be looked at", f"because {measured.reason}")
    outcome, text = compare(sight.statistic, healthy)
    if outcome not in ("wrong", "unusual") or not sight.statistic:
        return Check(name, "fine", text)
    if sight.p is not None and sight.p > CHANCE:
        return Check(name, "fine", f"{text}, but by chance in {sight.p:.1%} of such runs")
    number, ids = link_records(sight.mask, evidence)
    finding = Finding(sight.kind, sight.title, f"{sight.evidence} {text}", sight.advice, outcome, sight.p, number, ids)
    return Check(name, outcome, text, finding)


def inspect(run: RunDirectory | str | Path) -> list[Check]:
    """Return what was looked at in a run, and what came of it, what is wrong first.

    Args:
        run: the run of an agent, or its directory.

    Raises:
        RunDirectoryError: a round's file is damaged.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    evidence = None if run.is_language else read_evidence(run)
    return [] if evidence is None else judge(measure(evidence), evidence, read_reference())


def find(run: RunDirectory | str | Path) -> list[Finding]:
    """Return what is wrong with a run or unusual, at most five; nothing where nothing stands out.

    In a language model's run it looks at the rewards and the metrics; see `find_gamed_rewards`.

    Args:
        run: the run, or its directory.

    Raises:
        RunDirectoryError: a round's file is damaged.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    if run.is_language:
        return [*find_gamed_rewards(run), *give_advice(run.table("metrics"), run.config).values()][:MOST]
    return [check.finding for check in inspect(run) if check.finding is not None][:MOST]
