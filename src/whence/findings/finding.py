"""Findings: what is said of a run; checks: what was looked at; and sights, which are what a detector sees."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from whence.findings.evidence import Evidence, Mask

CHANCE = 0.005
"""The chance at most of what a detector sees, where it has a test within the run."""

Rank: TypeAlias = Literal["wrong", "unusual"]
Outcome: TypeAlias = Literal["wrong", "unusual", "fine", "could not be looked at"]


@dataclass(frozen=True)
class Finding:
    """What is wrong with a run, or unusual, in words.

    Attributes:
        kind: of what: "reward", "dynamics", "observation", "episode", "critic" or "setting".
        title: one line: what, where, how much.
        evidence: how sure that is.
        advice: what to do.
        rank: "wrong": far beyond what any healthy run of the reference shows; "unusual": beyond it.
        p: the chance to see as much where nothing is wrong, by a test within the run whose null holds by construction,
            as between environments that share a policy. None: there is no such test.
        round: the round that shows it; None: no single one.
        record_ids: the records of that round that show it.
        next_command: the command to give next, such as `whence show runs/lander --record 12556`. Empty: there is none,
            as of an environment that is no run.
    """

    kind: str
    title: str
    evidence: str
    advice: str
    rank: Rank = "wrong"
    p: float | None = None
    round: int | None = None
    record_ids: tuple[int, ...] = ()
    next_command: str = ""

    def __post_init__(self) -> None:
        for name in ("title", "evidence"):  # negative numbers have a minus sign; 1e-07 and names stay
            object.__setattr__(self, name, re.sub(r"(?<![\w`.])-(?=\.?\d)", "−", getattr(self, name)))


@dataclass(frozen=True)
class Check:
    """What was looked at, and what came of it.

    Attributes:
        name: what, as the reference names it.
        outcome: "wrong" and "unusual" have a finding.
        text: how it compares with healthy runs; or why it could not be looked at, from "because" on.
        finding: what is said of it; None where it is fine or unknown.
    """

    name: str
    outcome: Outcome
    text: str
    finding: Finding | None = None


class Sight(NamedTuple):
    """What a detector sees at the place where its statistic is largest; the words are read where that is unusual.

    Attributes:
        statistic: dimensionless, the larger the worse; 0: nothing is seen.
        kind, title, evidence, advice, p: see `Finding`.
        mask: (n,) the records that show it; None: no single ones.
        reason: why it could not look; empty: it could.
    """

    statistic: float
    kind: str = ""
    title: str = ""
    evidence: str = ""
    advice: str = ""
    mask: Mask | None = None
    p: float | None = None
    reason: str = ""


class CannotTellError(Exception):
    """A detector has nothing to look at; its text says why, after "because"."""


def link_records(mask: Mask | None, evidence: Evidence) -> tuple[int | None, tuple[int, ...]]:
    """Return the round that holds most of some records, the last of several, and their ids there."""
    if mask is None or not mask.any():
        return None, ()
    rounds, counts = np.unique(evidence.columns["round"][mask], return_counts=True)
    number = int(rounds[len(counts) - 1 - counts[::-1].argmax()])
    ids = evidence.columns["record_id"][mask & (evidence.columns["round"] == number)].astype(int)
    return number, tuple(ids.tolist())


def say_chance(p: float) -> str:
    """Return a chance as a sentence."""
    return f"The chance of this where nothing is wrong is {p:.1g}."
