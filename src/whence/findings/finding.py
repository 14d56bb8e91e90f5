"""Findings: what is said of a run; and claims, which are findings before their records are looked up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from whence.findings.evidence import Evidence, Mask

CHANCE = 0.005
"""The chance of a false finding by each kind of search at most: ten that compute one have 5% in all."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a run, in words.

    Attributes:
        kind: of what it is wrong: "reward", "dynamics", "observation", "episode", "critic", "records" or "setting".
        title: one line: what, where, how much.
        evidence: how sure that is.
        advice: what to do.
        p: the chance to see as much, in all that its kind of search looked at, where nothing is wrong. None: no sample
            but a plain fact, such as a number that never changed, or a setting next to what it did.
        round: the round that shows it; None: no single one.
        record_ids: the records of that round that show it.
    """

    kind: str
    title: str
    evidence: str
    advice: str
    p: float | None = None
    round: int | None = None
    record_ids: tuple[int, ...] = ()


class Claim(NamedTuple):
    """A finding before its records are looked up in `mask`, (n,); see `Finding`."""

    kind: str
    mask: Mask
    title: str
    evidence: str
    advice: str
    p: float | None = None


Claims: TypeAlias = Iterator[Claim]


def link_records(claim: Claim, evidence: Evidence) -> Finding:
    """Return a claim as a finding on the round that holds most of its records, the last of several."""
    rounds, counts = np.unique(evidence.columns["round"][claim.mask], return_counts=True)
    number = int(rounds[len(counts) - 1 - counts[::-1].argmax()])
    ids = evidence.columns["record_id"][claim.mask & (evidence.columns["round"] == number)].astype(int)
    return Finding(claim.kind, claim.title, claim.evidence, claim.advice, claim.p, number, tuple(ids.tolist()))


def say_chance(p: float, tried: str = "") -> str:
    """Return a chance as a sentence, with what was tried."""
    size = "less than one in a million" if p < 1e-6 else f"{p:.1g}"
    return (
        f"The chance of this where nothing is wrong is {size}{f', over all {tried} that were tried' if tried else ''}."
    )
