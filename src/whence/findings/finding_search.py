"""The search through all kinds of faults."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from whence.findings.agreement import find_action_faults, find_critic_faults, find_harm, find_reward_faults
from whence.findings.environments import (
    find_clipped,
    find_constant,
    find_limit_as_end,
    find_loops,
    find_odd_copies,
    find_paid_again,
    find_repeated,
    find_unpaid_ends,
)
from whence.findings.evidence import RECORDS, Evidence, read_evidence
from whence.findings.finding import CHANCE, Claims, Finding, link_records
from whence.findings.rewards import find_gamed_rewards
from whence.findings.settings import give_advice
from whence.runs import RunDirectory

MOST = 5
"""Findings that are returned at most."""

_CERTAIN = 1e-6

CAUSES: Sequence[Callable[[Evidence], Claims]] = (
    find_repeated,
    find_constant,
    find_clipped,
    find_paid_again,
    find_reward_faults,
    find_action_faults,
    find_odd_copies,
    find_limit_as_end,
    find_unpaid_ends,
)
EFFECTS: Sequence[Callable[[Evidence], Claims]] = (find_loops, find_critic_faults, find_harm)
"""What is looked for in the records: what may be wrong with the environment, and what follows also from settings."""

SEARCHES = (find_reward_faults, find_action_faults, find_critic_faults, find_harm)
"""What fits models or searches subgroups, of which more records cost more than they show."""


def find(run: RunDirectory | str | Path) -> list[Finding]:
    """Return what stands out in a run, the surest first, at most five; nothing where nothing stands out.

    In a language model's run it looks at the rewards and the metrics; see `find_gamed_rewards`.

    Findings are ordered by their chance. Plain facts, whose `p` is None, and chances below one in a million are all as
    good as certain: of these, causes come before what follows from them.

    Args:
        run: the run, or its directory.

    Raises:
        RunDirectoryError: a round's file is damaged.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    if run.is_language:
        return [*find_gamed_rewards(run), *give_advice(run.table("metrics"), run.config).values()][:MOST]
    evidence = read_evidence(run)
    if evidence is None:
        return []
    findings = [*_look(evidence, CAUSES), *find_settings(evidence), *_look(evidence, EFFECTS)]
    return sorted(findings, key=lambda one: max(one.p or 0.0, _CERTAIN))[:MOST]


def _look(evidence: Evidence, detectors: Sequence[Callable[[Evidence], Claims]]) -> list[Finding]:
    """Return what detectors find. Those that search the records see `RECORDS` of them at most, the others all."""
    sample, findings = evidence.thin(RECORDS), list[Finding]()
    for detector in detectors:
        seen = sample if detector in SEARCHES else evidence
        claims = [claim for claim in detector(seen) if claim.p is None or claim.p <= CHANCE]
        findings += [link_records(claim, seen) for claim in claims]
    return findings


def find_settings(evidence: Evidence) -> list[Finding]:
    """Return settings that do not fit the run, by its metrics and the lengths of its episodes."""
    ended = evidence.ends != ""
    length = float(np.median(evidence.columns["step"][ended]) + 1) if ended.any() else None
    return [*give_advice(evidence.metrics, {**evidence.config, "episode_length": length}).values()]
