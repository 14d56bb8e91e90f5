"""Causes of a decision as terminal, pictures and page show them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.diagnosis import RankedMoment, compare_log_probs, find_causes, rank_moments, read_record, sum_rounds
from whence.moments import name_action
from whence.page.explored_run import LOCK, ExploredRun
from whence.page.moment_view import Frames
from whence.targets import Action

SCORED: Mapping[str, str] = {
    "influence": "influence at the policy that collected the round",
    "similar": "advantage × same action × similarity of observations",
    "similar-hidden": "advantage × same action × similarity in the last hidden layer",
}
"""Ways to score records, in words, by the name that commands and pages have for them."""

BY: Mapping[str, str] = {"influence": "raw", "similar": "similar", "similar-hidden": "similar-hidden"}
"""The method of `find_causes` by the name that commands and pages have for it."""


@dataclass(frozen=True)
class Decision:
    """What is asked about.

    Attributes:
        action: in words.
        place: where it was taken: "at step 57 of an episode with seed 0".
        before: its mean log-probability under the first round's policy; of continuous actions, the log-density.
        after: the same under the present policy.
        is_discrete: whether these are logarithms of probabilities.
        frame: a picture of the state (height, width, 3); None if there is none.
    """

    action: str
    place: str
    before: float
    after: float
    is_discrete: bool = True
    frame: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class CauseView:
    """What taught a decision.

    Attributes:
        run: the run's directory.
        env: the environment's id, or "".
        decision: what is asked about.
        by: how records were scored, a key of `BY`.
        rounds: see `sum_rounds`.
        raised: the moments that raised its probability most.
        lowered: those that lowered it most.
        action_labels: names of discrete actions, or None.
        frames: pictures of the moments' faces, by record.
        frames_note: why some are missing; None if none is.
    """

    run: str
    env: str
    decision: Decision
    by: str
    rounds: pl.DataFrame
    raised: Sequence[RankedMoment]
    lowered: Sequence[RankedMoment]
    action_labels: Sequence[str] | None = None
    frames: Frames = field(default_factory=dict)
    frames_note: str | None = None


def read_decision(run: ExploredRun, number: int, record: int) -> tuple[Action, Decision]:
    """Return what was done in a record of a round, as a target and in words.

    Raises:
        RunDirectoryError: the round or the record is not there, or the policy cannot be built again.
    """
    row = run.record(number, record)
    with LOCK:
        target = read_record(run.directory, number, record, env=run.env)
        return target, describe_target(run, target, place_record(number, row))


def describe_target(
    run: ExploredRun, target: Action, place: str, log_probs: tuple[float, float, bool] | None = None
) -> Decision:
    """Return a decision in words, with its probability under the first policy and under the present one.

    Args:
        run: the run.
        target: the decision.
        place: where it was taken, in words.
        log_probs: see `compare_log_probs`; None: they are computed.
    """
    action = np.asarray(target.action).squeeze().tolist()
    name = name_action(action, run.labels)
    name = f"action {name}" if run.labels is None and isinstance(action, int) else name
    return Decision(name, place, *(log_probs or compare_log_probs(run.directory, target, env=run.env)))


def gather_causes(
    run: ExploredRun,
    target: Action,
    decision: Decision,
    *,
    by: str = "influence",
    most: int = 10,
    on_round: Callable[[int, int], None] | None = None,
) -> CauseView:
    """Score the records of all rounds for a decision, and return what taught it, without frames.

    Args:
        run: the run of an agent.
        target: what is asked about.
        decision: the same in words.
        by: a key of `BY`.
        most: the most moments at either end.
        on_round: called after each round with the number of rounds that are scored, and of all; what it raises ends the
            work.

    Raises:
        RunDirectoryError: a policy cannot be built again.
        WhenceError: actions are continuous, and `by` asks which are the same.
    """
    pair = {"target_states": target.observation, "actions": target.action, "action_masks": target.action_mask}
    with LOCK:
        scores = find_causes(run.directory, **pair, method=BY[by], env=run.env, on_round=on_round)
    return CauseView(
        run=str(run.directory.path),
        env=run.env_name,
        decision=decision,
        by=by,
        rounds=sum_rounds(scores),
        raised=rank_moments(scores, lowest=False, most=most),
        lowered=rank_moments(scores, lowest=True, most=most),
        action_labels=run.labels,
    )


def replay_faces(run: ExploredRun, moments: Iterable[RankedMoment]) -> tuple[dict[int, NDArray[np.uint8]], str | None]:
    """Return pictures of moments' faces by record, and why one is missing; each episode is played once."""
    frames: dict[int, NDArray[np.uint8]] = {}
    note: str | None = None
    by_episode: dict[int, dict[int, int]] = {}
    for moment in (entry.moment for entry in moments):
        if moment.episode_id is None or moment.step is None:
            note = "No frames: a record's episode is not known."
        else:
            by_episode.setdefault(moment.episode_id, {})[moment.step] = moment.record_id
    for episode, steps in by_episode.items():
        replay, refusal = run.replay(episode, list(steps))
        if replay is None:
            note = refusal
            continue
        frames |= {steps[step]: frame for step, frame in replay.frames.items()}
        note = replay.mismatch or replay.frames_note or note
    return frames, note


def place_record(number: int, row: Mapping[str, Any]) -> str:
    """Return where a record is, in words.

    Args:
        number: its round.
        row: its row of the round's table.
    """
    step, episode = row.get("step"), row.get("episode_id")
    where = "" if step is None or episode is None else f"step {step} of episode {episode}, "
    return f"in record {row['record_id']:,} ({where}round {number})"


def tell_decision(decision: Decision) -> str:
    """Return what is asked about, and how its probability changed, in a sentence."""
    what, form = ("probability", format_probability) if decision.is_discrete else ("log-density", "{:.3g}".format)
    before, after = form(decision.before), form(decision.after)
    change = f"its {what} was {before} under the first policy and is {after} now"
    return f"“{decision.action}” {decision.place}: {change}."


def tell_causes(view: CauseView) -> str:
    """Return when the decision was taught, and by which moment most, in sentences."""
    if not view.raised:
        return "No record of any round raised it."
    face = view.raised[0]
    where = "" if face.moment.step is None else f"step {face.moment.step} of episode {face.moment.episode_id} in "
    return f"{tell_rounds(view.rounds)} The strongest moment is {where}round {face.round}."


def tell_rounds(rounds: pl.DataFrame) -> str:
    """Return which round raised something most, and in which rounds half of what raised it lies, in sentences.

    Args:
        rounds: from `sum_rounds`, with a score above 0.
    """
    if len(rounds) == 1:
        return f"Only round {rounds['round'][0]} was scored."
    top = rounds.sort("raised", "round", descending=[True, False]).row(0, named=True)
    total = float(rounds["raised"].sum())
    first, last = find_core(rounds)
    span = f"round {first}" if first == last else f"rounds {first} to {last}"
    return (
        f"Round {top['round']} raised it most: it holds {top['raised'] / total:.0%} of the sum of all rounds' scores "
        f"above 0. Half of that sum lies in {span}."
    )


def find_core(rounds: pl.DataFrame) -> tuple[int, int]:
    """Return the first and the last of the fewest consecutive rounds that hold half of all that raised a decision."""
    numbers = rounds["round"].to_list()
    cumulated = np.concatenate([[0.0], np.cumsum(rounds["raised"].to_numpy())])
    half = cumulated[-1] / 2
    best = (0, len(numbers) - 1)
    for first in range(len(numbers)):
        last = int(np.searchsorted(cumulated, cumulated[first] + half)) - 1
        if last < len(numbers) and last - first < best[1] - best[0]:
            best = (first, max(first, last))
    return numbers[best[0]], numbers[best[1]]


def format_probability(log_probability: float) -> str:
    """Return the probability of a log-probability, in percent."""
    probability = math.exp(log_probability)
    return (
        f"{probability:.0%}"
        if 0.095 <= probability <= 0.985
        else f"{probability:.1%}"
        if probability > 5e-4
        else "<0.1%"
    )
