"""Causes of a decision or a response as terminal, pictures and page show them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.causes import OnRound, compare_log_probs, find_causes, rank_moments, read_record, sum_rounds
from whence.core import Action
from whence.page.content.explored_run import LOCK, ExploredRun
from whence.page.content.frames import make_thumb, replay_moments
from whence.page.content.moment_view import describe_moment
from whence.page.content.short_json import round_numbers
from whence.scores import find_moment, name_action

SCORED: Mapping[str, str] = {
    "nearest": "advantage × cosine of the record's gradient of log π with this decision's",
    "influence": "influence at the policy that collected the round",
}
"""Ways to score records, in words, by the name that commands and pages have for them; the first is the default."""

MOMENTS = 6
"""Moments at either end that the page shows."""

PULLED = 300
"""Characters of the texts of a target's row."""


@dataclass(frozen=True)
class Decision:
    """What is asked about: an agent's action in a state, or a model's response to a prompt.

    Attributes:
        what: it in words: "“left” at step 57 of an episode with seed 0".
        before: its mean log-probability under the first round's policy, or its log-density; None: not measured.
        after: the same under the present policy.
        is_discrete: whether these are logarithms of probabilities.
        frame: a picture of the state (height, width, 3); None if there is none.
    """

    what: str
    before: float | None
    after: float | None
    is_discrete: bool = True
    frame: NDArray[np.uint8] | None = None

    @property
    def text(self) -> str:
        """What is asked about, and how its probability changed, in a sentence."""
        if self.before is None or self.after is None:
            return f"{self.what}."
        name, form = ("probability", format_probability) if self.is_discrete else ("log-density", "{:.3g}".format)
        return f"{self.what}: its {name} was {form(self.before)} under the first policy and is {form(self.after)} now."


@dataclass(frozen=True)
class CauseView:
    """What taught a decision.

    Attributes:
        run: the run's directory.
        env: the environment's id, or "".
        decision: what is asked about.
        by: how records were scored.
        rounds: see `sum_rounds`.
        raised: the moments of the highest scores above 0, which speak for it, or the records, each in JSON types.
        lowered: those of the lowest below 0, which speak against it.
        frames: pictures of the moments' faces, by record.
        notes: what is missing, in sentences.
    """

    run: str
    env: str
    decision: Decision
    by: str
    rounds: pl.DataFrame
    raised: Sequence[dict[str, Any]]
    lowered: Sequence[dict[str, Any]]
    frames: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def text(self) -> str:
        """When the decision was taught, and by what most, in sentences."""
        if not self.raised:
            return "No record of any round speaks for it."
        top = self.raised[0]
        step = top.get("step")
        face = f"record is {top['record']}" if step is None else f"moment is step {step} of episode {top['episode']}"
        best = self.rounds.sort("raised", "round", descending=[True, False]).row(0, named=True)
        share = best["raised"] / self.rounds["raised"].sum()
        return (
            f"Round {best['round']} speaks for it most: it holds {share:.0%} of the sum of all rounds' scores above 0. "
            f"The strongest {face} in round {top['round']}."
        )


def read_decision(run: ExploredRun, number: int, record: int, *, with_frame: bool = False) -> tuple[Action, Decision]:
    """Return what was done in a record of a round, as a target and in words, perhaps with a picture of its state."""
    row = run.record(number, record)
    step, episode = row.get("step"), row.get("episode_id")
    where = "" if step is None or episode is None else f"step {step} of episode {episode}, "
    place = f"in record {record:,} ({where}round {number})"
    with LOCK:
        target = read_record(run.directory, number, record, env=run.env)
        decision = describe_target(run, target, place)
    if not with_frame:
        return target, decision
    moment = find_moment(run.round(number).table, record)
    frames, _ = replay_moments(run, [(moment, [moment.step or 0])])[record]
    return target, replace(decision, frame=frames.get(moment.step or 0))


def describe_target(
    run: ExploredRun, target: Action, place: str, log_probs: tuple[float, float, bool] | None = None
) -> Decision:
    """Return a decision in words, with its probability under the first policy and under the present one.

    `place` says where it was taken; `log_probs` are those of `compare_log_probs`, None: they are computed.
    """
    action = np.asarray(target.action).squeeze().tolist()
    name = name_action(action, run.labels)
    name = f"action {name}" if run.labels is None and isinstance(action, int) else name
    return Decision(f"“{name}” {place}", *(log_probs or compare_log_probs(run.directory, target, env=run.env)))


def gather_causes(
    run: ExploredRun,
    target: Action | pl.DataFrame,
    decision: Decision,
    *,
    by: str,
    most: int,
    framed: int,
    on_round: OnRound,
) -> CauseView:
    """Score the records of all rounds of an agent for a decision, and return what taught it.

    `by` is a key of `SCORED`. At either end there are up to `most` moments, `framed` of them with pictures. What
    `on_round` raises ends the work.
    """
    with LOCK:
        scores = find_causes(run.directory, target, method=by, env=run.env, on_round=on_round)
    raised, lowered = (rank_moments(scores, lowest=lowest, most=most) for lowest in (False, True))
    faces = [entry.moment for entry in (*raised[:framed], *lowered[:framed])]
    replays = replay_moments(run, [(moment, [moment.step or 0]) for moment in faces])
    notes = {note for _, note in replays.values() if note is not None}
    rows = [
        [describe_moment(entry.moment, run.labels) | {"round": entry.round} for entry in entries]
        for entries in (raised, lowered)
    ]
    return CauseView(
        run=str(run.directory.path),
        env=run.env_name,
        decision=decision,
        by=by,
        rounds=sum_rounds(scores),
        raised=rows[0],
        lowered=rows[1],
        frames={record: frame for record, (frames, _) in replays.items() for frame in frames.values()},
        notes=sorted(notes)[:1],
    )


def build_causes(run: ExploredRun, number: int, record: int, by: str, on_round: OnRound) -> dict[str, Any]:
    """Return in JSON types what taught the policy the action of a record, with thumbnails of the moments."""
    if run.is_language:
        return _explain_tokens(run, number, record)
    target, decision = read_decision(run, number, record)
    view = gather_causes(run, target, decision, by=by, most=MOMENTS, framed=MOMENTS, on_round=on_round)
    thumbs = {number: make_thumb(frame) for number, frame in view.frames.items()}
    for row in (*view.raised, *view.lowered):
        row["thumb"] = thumbs.get(row["record"])
    return describe_causes(view) | {"record": record, "round": number}


def _explain_tokens(run: ExploredRun, number: int, record: int) -> dict[str, Any]:
    """Return the part of a response's score that each of its tokens has, and its log-prob and entropy, in JSON types.

    `pulls` are the rows of the target with the largest parts of the score at either end.
    """
    # Transformers takes seconds to import.
    from whence.stored.language import explain_response

    with LOCK:
        explanation = explain_response(run.directory, number, record)
    pulls = explanation.pulls.with_columns(pl.col("prompt", "response").str.slice(0, PULLED))
    ends = pl.concat([pulls.head(MOMENTS), pulls.tail(MOMENTS)]).unique(maintain_order=True)
    columns = {"parts": explanation.parts, "log_probs": explanation.log_probs, "entropies": explanation.entropies}
    return {
        "texts": explanation.tokens,
        **{name: round_numbers(values, 3) for name, values in columns.items()},
        "pulls": [row | {"part": round_numbers(row["part"], 3)} for row in ends.to_dicts()],
        "notes": [] if explanation.note is None else [explanation.note],
    }


def describe_causes(view: CauseView) -> dict[str, Any]:
    """Return what taught a decision in JSON types."""
    ends = ("raised", "lowered")
    return {
        "run": view.run,
        "decision": view.decision.text,
        "log_prob_first": view.decision.before,
        "log_prob": view.decision.after,
        "by": view.by,
        "text": view.text,
        "rounds": view.rounds["round"].to_list(),
        "sums": {name: round_numbers(view.rounds[name].to_list()) for name in ends},
        "total": {name: round_numbers(view.rounds[name].sum()) for name in ends},
        **{name: list(getattr(view, name)) for name in ends},
        "notes": list(view.notes),
    }


def format_probability(log_probability: float) -> str:
    """Return the probability of a log-probability, in percent; of a small one the logarithm, too."""
    probability = math.exp(log_probability)
    if probability <= 5e-4:
        return f"<0.1% (log {log_probability:.3g})"
    return f"{probability:.0%}" if 0.095 <= probability <= 0.985 else f"{probability:.1%}"
