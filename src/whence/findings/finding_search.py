"""The search through all kinds of faults."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from whence.advice import give_advice
from whence.core import first_line
from whence.experiments import AnyEnv, estimate_advantages, read_reward_scale
from whence.findings.agreement import find_action_faults, find_reward_faults
from whence.findings.environments import (
    find_limit_as_end,
    find_loops,
    find_odd_copies,
    find_paid_again,
    find_unpaid_ends,
)
from whence.findings.evidence import Evidence, read_evidence
from whence.findings.finding import CHANCE, Claims, Finding, link_records
from whence.findings.learning import find_critic_faults, find_harm
from whence.findings.observations import find_clipped, find_constant, find_repeated
from whence.findings.rewards import find_gamed_rewards
from whence.runs import RunDirectory

MOST = 5
"""Findings that are returned at most."""

_MOMENTS = 10
_CONTINUATIONS = 8
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


def find(run: RunDirectory, *, env: AnyEnv = None, play: bool = False) -> list[Finding]:
    """Return what stands out in a run, the surest first, at most five; nothing where nothing stands out.

    In a language model's run it looks at the rewards alone; see `find_gamed_rewards`.

    Findings are ordered by their chance. Plain facts, whose `p` is None, and chances below one in a million are all as
    good as certain: of these, causes come before what follows from them.

    Args:
        run: the run.
        env: the environment, if it is not the run's own; see `make_replay_env`.
        play: measure where the critic is off by fresh rollouts, too, which takes longer.

    Raises:
        RunDirectoryError: a round's file is damaged.
    """
    if run.is_language:
        return find_gamed_rewards(run)[:MOST]
    evidence = read_evidence(run)
    if evidence is None:
        return []
    findings = [*_look(evidence, CAUSES), *find_settings(evidence), *_look(evidence, EFFECTS)]
    sure = sorted(findings, key=lambda one: max(one.p or 0.0, _CERTAIN))[:MOST]
    return [_measure(run, evidence, one, env) for one in sure] if play else sure


def _look(evidence: Evidence, detectors: Sequence[Callable[[Evidence], Claims]]) -> list[Finding]:
    claims = [claim for detector in detectors for claim in detector(evidence)]
    return [link_records(claim, evidence) for claim in claims if claim.p is None or claim.p <= CHANCE]


def find_settings(evidence: Evidence) -> list[Finding]:
    """Return settings that do not fit the run, by its metrics and the lengths of its episodes."""
    ended = evidence.ends != ""
    length = float(np.median(evidence.columns["step"][ended]) + 1) if ended.any() else None
    advice = give_advice(evidence.metrics, {**evidence.config, "episode_length": length})
    return [Finding("setting", a.title, a.evidence, a.remedy, None, a.round) for a in advice if a.is_setting]


def _measure(run: RunDirectory, evidence: Evidence, finding: Finding, env: AnyEnv) -> Finding:
    """Return a finding on the critic with what fresh rollouts from some of its records say; others as they are."""
    if finding.kind != "critic" or finding.round is None:
        return finding
    ids = list(finding.record_ids[:: max(1, len(finding.record_ids) // _MOMENTS)][:_MOMENTS])
    try:
        table = estimate_advantages(run, finding.round, ids, env=env, continuations=_CONTINUATIONS)
    except Exception as refusal:  # An environment's own code may raise anything.
        return replace(finding, evidence=f"{finding.evidence} Not measured by fresh rollouts: {first_line(refusal)}")
    places = [int(np.flatnonzero(evidence.columns["record_id"] == each)[0]) for each in ids]
    # The critic speaks in the rewards that trained it, fresh rollouts in the environment's.
    misses = table["mc_value"].to_numpy() / read_reward_scale(run, finding.round) - evidence.columns["value"][places]
    error = misses.std() / np.sqrt(len(misses))
    text = (
        f"Fresh rollouts from {len(ids)} of these records return {misses.mean():+.3g} ± {error:.2g} more than it says."
    )
    return replace(finding, evidence=f"{finding.evidence} {text}")
