"""One statement on a run."""

from dataclasses import dataclass

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


def make_finding(
    kind: str, evidence: Evidence, mask: Mask, *, title: str, because: str, advice: str, p: float | None
) -> Finding:
    """Return a finding on records: its round is the one that holds most of them, the last of several."""
    rounds, counts = np.unique(evidence.columns["round"][mask], return_counts=True)
    number = int(rounds[len(counts) - 1 - counts[::-1].argmax()])
    ids = evidence.columns["record_id"][mask & (evidence.columns["round"] == number)].astype(int)
    return Finding(kind, title, because, advice, p, number, tuple(ids.tolist()))


def say_chance(p: float) -> str:
    """Return a chance in words."""
    return "less than one in a million" if p < 1e-6 else f"{p:.1g}"
