"""What taught a policy a decision, gathered for terminals, pictures and pages."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.diagnosis.causes import RankedMoment, rank_moments, sum_rounds
from whence.errors import WhenceError
from whence.experiments.rl.rebuilding import AnyEnv
from whence.runs import RunDirectory

SCORED: Mapping[str, str] = {
    "raw": "influence at the policy that collected the round",
    "similar": "advantage × same action × similarity of observations",
    "similar-hidden": "advantage × same action × similarity in the last hidden layer",
}
"""Ways to score records, in words, by the method of `find_causes`."""

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
        method: how records were scored; see `whence.diagnosis.find_causes`.
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
    method: str
    rounds: pl.DataFrame
    raised: Sequence[RankedMoment]
    lowered: Sequence[RankedMoment]
    action_labels: Sequence[str] | None = None
    frames: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    frames_note: str | None = None


def gather_causes(
    run: RunDirectory,
    causes: pl.DataFrame,
    decision: Decision,
    *,
    env_name: str,
    method: str,
    action_labels: Sequence[str] | None = None,
    most: int = 10,
) -> CauseView:
    """Return what taught a decision, without frames.

    Args:
        run: the run.
        causes: from `find_causes`.
        decision: what is asked about.
        env_name: the environment's id, or "".
        method: how the records were scored.
        action_labels: names of discrete actions, or None.
        most: the most moments at either end.
    """
    return CauseView(
        run=str(run.path),
        env=env_name,
        decision=decision,
        method=method,
        rounds=sum_rounds(causes),
        raised=rank_moments(causes, lowest=False, most=most),
        lowered=rank_moments(causes, lowest=True, most=most),
        action_labels=action_labels,
    )


def replay_faces(
    run: RunDirectory, moments: Iterable[RankedMoment], *, env: AnyEnv = None
) -> tuple[dict[int, NDArray[np.uint8]], str | None]:
    """Return pictures of moments' faces by record, and why one is missing; each episode is played once."""
    from whence.experiments.rl.stored import replay_episode

    frames: dict[int, NDArray[np.uint8]] = {}
    note: str | None = None
    by_episode: dict[int, list[RankedMoment]] = {}
    for entry in moments:
        if entry.moment.episode_id is None or entry.moment.step is None:
            note = "No frames: a record's episode is not known."
        else:
            by_episode.setdefault(entry.moment.episode_id, []).append(entry)
    for episode, entries in by_episode.items():
        steps = {int(entry.moment.step or 0): entry.moment.record_id for entry in entries}
        try:
            replay = replay_episode(run, episode, env=env, frames=list(steps), last_step=max(steps))
        except WhenceError as missing:
            note = f"No frames: {missing}"
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


def describe_decision(decision: Decision) -> dict[str, Any]:
    """Return a decision in JSON types."""
    return {
        "action": decision.action,
        "place": decision.place,
        "log_prob_first": decision.before,
        "log_prob": decision.after,
        "discrete": decision.is_discrete,
    }
