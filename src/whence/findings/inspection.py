"""What is looked at in a run: each detector's statistic, compared with those of healthy runs."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl
from threadpoolctl import threadpool_limits

from whence.core import RunDirectoryError
from whence.findings.detectors import DETECTORS, Look
from whence.findings.drops import WINDOW, describe_change, find_drop, find_records, list_precursors, say_distance
from whence.findings.evidence import Evidence, make_log_evidence, read_evidence
from whence.findings.finding import (
    CHANCE,
    CannotTellError,
    Check,
    Finding,
    Outcome,
    Rank,
    Sight,
    link_records,
    say_chance,
)
from whence.findings.gamed_rewards import find_gamed_rewards
from whence.findings.history import History
from whence.findings.reference import FEWEST, Reference, compare, read_reference
from whence.findings.response_figures import measure_rounds
from whence.findings.settings import RESPONSES, give_advice
from whence.findings.trainer_options import name_trainer
from whence.runs import RunDirectory
from whence.stored import LOG_FILES, Logs, find_logs, read_logs
from whence.stored.agents import is_custom

MOST = 5
"""Findings that are returned at most."""

DROP, BEFORE = "a return that fell", "before it fell: "
"""The check of a drop, and what begins the names of what was unusual until then."""

_PRECURSORS = 3
"""What was unusual before a drop is named so often at most."""

_REWARDS = "rewards that rise while another falls"

_NO_RECORDS = "logs hold no records"


def measure(evidence: Evidence) -> dict[str, Sight]:
    """Return what each detector sees."""
    fit = {name: one.look for name, one in DETECTORS.items() if len(evidence) or not one.reads_records}
    unfit = dict.fromkeys(DETECTORS, Sight(0.0, reason=_NO_RECORDS))
    with threadpool_limits(1, "blas"):  # of the process: matrices are small, and threads wait beside other programs
        return unfit | {name: measure_one(look, evidence) for name, look in fit.items()}


def measure_one(look: Look, evidence: Evidence) -> Sight:
    """Return what a detector sees, or why it cannot look."""
    try:
        sight = look(evidence)
        return sight if np.isfinite(sight.statistic) else Sight(0.0, reason="some numbers are not finite")
    except CannotTellError as error:
        return Sight(0.0, reason=str(error))
    except np.linalg.LinAlgError:
        return Sight(0.0, reason="numbers of the observation cannot be told apart")


def judge(measured: Mapping[str, Sight], evidence: Evidence, reference: Reference) -> list[Check]:
    """Return a check for each detector, those with a finding first: what is wrong, then what is unusual."""
    return sort_checks([_judge_one(name, one, evidence, reference.get(name, ())) for name, one in measured.items()])


def sort_checks(checks: Sequence[Check]) -> list[Check]:
    """Return checks by their outcome: what is wrong, unusual, fine, then what could not be looked at."""
    return sorted(checks, key=lambda check: get_args(Outcome).index(check.outcome))


def _judge_one(name: str, sight: Sight, evidence: Evidence, healthy: Sequence[float]) -> Check:
    if sight.reason:
        return Check(name, "could not be looked at", f"because {sight.reason}")
    outcome, text = compare(sight.statistic, healthy, DETECTORS[name])
    if outcome not in ("wrong", "unusual"):
        return Check(name, outcome, text)
    if sight.p is not None and sight.p > CHANCE:
        return Check(name, "fine", f"{text}, but by chance in {sight.p:.1%} of such runs")
    number, ids = link_records(sight.mask, evidence)
    words = " ".join([sight.evidence, f"It is {text}.", *([] if sight.p is None else [say_chance(sight.p)])])
    finding = Finding(sight.kind, sight.title, words, sight.advice, outcome, sight.p, number, ids)
    return Check(name, outcome, text, finding)


def _inspect_responses(run: RunDirectory | Logs) -> list[Check]:
    """Return a check for each rule on a language model's rewards and metrics, what is wrong first."""
    metrics = run.metrics if isinstance(run, Logs) else _join_rounds(run)
    try:
        if isinstance(run, Logs):
            raise CannotTellError(_NO_RECORDS)
        checks = [Check(_REWARDS, one.rank, one.title, one) for one in find_gamed_rewards(run)]
        checks = checks or [Check(_REWARDS, "fine", "nothing is seen")]
    except CannotTellError as error:
        checks = [Check(_REWARDS, "could not be looked at", f"because {error}")]
    advice = give_advice(metrics, run.trainer if isinstance(run, Logs) else name_trainer(run.config))
    checks += [Check(name, one.rank, one.title, one) for name, one in advice.items()]
    for name, rule in ((name, rule) for name, rule in RESPONSES.items() if name not in advice):
        rounds = metrics[rule.column].count() if rule.column in metrics.columns else 0
        reason = f"fewer than {rule.least} rounds have it" if rounds else f"the run has no `{rule.column}`"
        is_seen, text = rounds >= rule.least, f"nothing is seen in {rounds:,} rounds"
        outcome: Outcome = "fine" if is_seen else "could not be looked at"
        checks.append(Check(name, outcome, text if is_seen else f"because {reason}"))
    return sort_checks(checks)


def _join_rounds(run: RunDirectory) -> pl.DataFrame:
    """Return a language model's metrics with its evaluations, and with what its records hold of each round."""
    metrics = run.table("metrics")
    for table in (run.table("evaluations"), measure_rounds(run)):
        if len(table) and "round" in metrics.columns:
            table = table.drop({*table.columns} & {*metrics.columns} - {"round"}).unique("round", keep="last")
            metrics = metrics.join(table, on="round", how="left", maintain_order="left")
    return metrics


def open_run_or_logs(path: str | Path) -> RunDirectory | Logs:
    """Open a run's directory, or read logs; a `WhenceError` says why neither can be read."""
    path = Path(path)
    try:
        return RunDirectory.open(path)
    except RunDirectoryError as no_run:  # a language model's folder may hold another config.json
        if (path / "records").exists():
            raise
        if not find_logs(path):
            raise RunDirectoryError(f"{no_run} Logs are read, too: {', '.join(LOG_FILES)}.") from None
        return read_logs(path)


def inspect(run: RunDirectory | Logs | str | Path) -> list[Check]:
    """Return what was looked at in a run, and what came of it, what is wrong first.

    Args:
        run: the run of an agent or of a language model, or its directory; or logs that another library wrote.

    Raises:
        WhenceError: there is neither a run nor a log, or a file is damaged.
    """
    run = open_run_or_logs(run) if isinstance(run, str | Path) else run
    checks = _look_at(run)
    return checks if isinstance(run, Logs) else [_name_next_command(check, run) for check in checks]


def _look_at(run: RunDirectory | Logs) -> list[Check]:
    if run.is_language:
        return _inspect_responses(run)
    if (evidence := make_log_evidence(run) if isinstance(run, Logs) else read_evidence(run)) is None:
        reason = "because no round holds actions and rewards by environment and episode"
        return [Check(name, "could not be looked at", reason) for name in DETECTORS]
    checks = judge(measure(evidence), evidence, read_reference())
    if checks[0].name != DROP or checks[0].finding is None or (history := evidence.history) is None:
        return checks
    return sort_checks(_explain_drop(checks[0].finding, history, None if isinstance(run, Logs) else run) + checks[1:])


def _explain_drop(finding: Finding, history: History, run: RunDirectory | None) -> list[Check]:
    """Return the check of a return that fell, and those of what was unusual until then."""
    drop = find_drop(history.rounds, history.returns)
    assert drop is not None
    reference, checks = read_reference(), list[Check]()
    healthy = {name.removeprefix(BEFORE): values for name, values in reference.items() if name.startswith(BEFORE)}
    largest = {kind: values[0] for kind, values in healthy.items() if len(values) >= FEWEST}
    for change in list_precursors(history, drop, largest)[:_PRECURSORS]:
        name, number = f"{BEFORE}{change.series.kind}", int(history.rounds[change.place])
        outcome, text = compare(change.size, healthy[change.series.kind], DETECTORS[DROP])
        rank: Rank = "wrong" if outcome == "wrong" else "unusual"
        ids = () if run is None else find_records(run, history, change)
        words = f"{say_distance(change)} {text}."
        title, advice = describe_change(change, number, drop)
        checks.append(Check(name, rank, text, Finding("drop", title, words, advice, rank, None, number, ids)))
    if not checks:
        evidence = f"{finding.evidence} Nothing that was looked at was unusual in the {WINDOW} rounds before."
        finding = replace(finding, evidence=evidence)
    return [Check(DROP, finding.rank, finding.title, replace(finding, round=drop.round)), *checks]


def _name_next_command(check: Check, run: RunDirectory) -> Check:
    """Return a check whose finding, if any, names the command that opens its records, or the run's page."""
    if (finding := check.finding) is None:
        return check
    path, shows_record = shlex.quote(str(run.path)), finding.record_ids and not run.is_language
    command = f"whence show {path} --record {finding.record_ids[0]}" if shows_record else f"whence view {path}"
    if check.name == DROP and "rule" in run.config and not is_custom(run):
        command = f"whence again {path}"
    return replace(check, finding=replace(finding, next_command=command))


def choose_findings(checks: Sequence[Check]) -> list[Finding]:
    """Return the findings of checks, at most five."""
    return [check.finding for check in checks if check.finding is not None][:MOST]


def find(run: RunDirectory | Logs | str | Path) -> list[Finding]:
    """Return what is wrong with a run or unusual, at most five; nothing where nothing stands out.

    These are the findings of `inspect`. In a language model's run it looks at the rewards and the metrics.

    Args:
        run: the run, or its directory; or logs that another library wrote.

    Raises:
        WhenceError: see `inspect`.
    """
    return choose_findings(inspect(run))


def count_outcomes(checks: Sequence[Check]) -> str:
    """Return how many checks came out how, such as "1 unusual, 21 fine, 3 could not be looked at"."""
    counts = Counter(check.outcome for check in checks)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome) if counts[outcome])


def say_nothing_stands_out(checks: Sequence[Check]) -> str:
    """Return in words that no check has a finding, and what that is worth."""
    looked = sum(check.outcome == "fine" for check in checks)
    if not looked:
        return "Nothing could be looked at."
    count = max(len(read_reference().get(check.name, ())) for check in checks)
    compared = f", compared with those of {count} healthy environments" if count else ""
    figures = "one figure was" if looked == 1 else f"{looked} figures were"
    return f"Nothing stands out: {figures} looked at{compared}. That is no proof that all is well."
