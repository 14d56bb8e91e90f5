"""Claims: findings before their records are looked up."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from whence.findings.evidence import Evidence, Mask
from whence.findings.finding import Finding

CHANCE = 0.005
"""The chance of a false finding by each kind of search at most: ten that compute one have 5% in all."""


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
