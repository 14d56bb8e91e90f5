"""How the callback scores the records of a round."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Float
from stable_baselines3 import A2C, PPO
from torch import Tensor

from whence import objectives
from whence.attribution import attribute
from whence.crossfitting import attribute_crossfit
from whence.engines import ENGINES
from whence.errors import WhenceError, nearest
from whence.influence import Influence
from whence.objectives import Objective, as_objective
from whence.policies import Params, PolicyView
from whence.records import RecordBatch
from whence.rounds import DRAWS, METHODS, attribute_round
from whence.rounds.smoothed import SMOOTHED
from whence.sb3.contrib import MaskablePPO
from whence.sb3.rehearsal import Rehearsal, of_some
from whence.selection import Selection
from whence.targets import BatchTarget, Return, Target, as_target, name_of

SCORES = ("snapshot", "crossfit", *METHODS)
"""Scores that a callback can select by: two at the policy that collected the rollout, and those of whole rounds."""


@dataclass(frozen=True)
class Scoring:
    """What records are scored by.

    Attributes:
        score: one of `SCORES`. "snapshot": `attribute`; "crossfit": `attribute_crossfit`; another: `attribute_round` on
            a rehearsal of the round.
        target: what to raise; None: `Return()`.
        objective: of the first two; None: the model's own, without its value term.
        engine: of the first two; see `attribute`.
        draws: of "smoothed"; see `attribute_round`. They are the same in every round.
        memory: bytes that scoring may hold at a time.

    Raises:
        WhenceError: an argument is not what it should be, or has no effect.
    """

    score: str
    target: Target
    objective: Objective | None
    engine: str
    draws: int
    memory: int

    @classmethod
    def asked(
        cls,
        score: str,
        target: Target | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        draws: int = DRAWS,
        memory: int = 2**31,
    ) -> "Scoring":
        """Return what was asked for, checked."""
        if score not in SCORES:
            raise WhenceError(f"score is {score!r}.{nearest(str(score), SCORES)}")
        if engine not in ("auto", *ENGINES):
            raise WhenceError(f"engine is {engine!r}.{nearest(str(engine), ['auto', *ENGINES])}")
        if score in METHODS and (objective is not None or engine != "auto"):
            raise WhenceError(
                f"score={score!r} differentiates the round as the model trains it, so objective and engine have no "
                "effect. Leave them out, or take score='snapshot'."
            )
        if draws < 1 or (draws != DRAWS and score != SMOOTHED):
            raise WhenceError(
                f"draws is {draws} and score {score!r}; at least 1 is needed, and {SMOOTHED!r} alone draws any."
            )
        target = as_target(Return() if target is None else target)
        if score == "crossfit" and not isinstance(target, BatchTarget):
            raise WhenceError(
                f"score='crossfit' leaves records out of the target, and {name_of(target)} does not say that it is "
                "made of them. Take Return(), or score='snapshot'."
            )
        return cls(score, target, None if objective is None else as_objective(objective), engine, draws, memory)

    @property
    def of_round(self) -> bool:
        """Whether the round has to be rehearsed."""
        return self.score in METHODS

    def influence(self, rehearsal: Rehearsal, records: RecordBatch, among: Bool[Tensor, " n"]) -> Influence:
        """Score records of a rollout that is collected and not trained on yet, by what these alone say.

        Args:
            rehearsal: of the round.
            records: the rollout.
            among: True for the records that are scored.
        """
        policy = rehearsal.model.policy
        whole = bool(among.all())
        some = records if whole else records.take(among)
        if self.of_round:
            # Of a whole round to the last bit, though sums in another order would do.
            own = None if whole else among
            recording = of_some(rehearsal.train(records, Selection.dropping(among, "left out"), own), among)
            target = _of_raw(self.target, some.advantages)
            limits: dict[str, Any] = {"draws": self.draws, "memory": self.memory}
            found = attribute_round(policy, recording, target=target, method=self.score, **limits)
            assert isinstance(found, Influence)
            # Of the records as they were collected, though the round may have normalised their advantages.
            return replace(found, provenance=replace(found.provenance, records=some.fingerprint))
        objective = self.objective or model_objective(rehearsal.model)
        asked: dict[str, Any] = {"objective": objective, "engine": self.engine, "memory": self.memory}
        scored_by = attribute if self.score == "snapshot" else attribute_crossfit
        return scored_by(policy, some, target=self.target, **asked)


def _of_raw(target: Target, advantages: Float[Tensor, " n"]) -> Target:
    """Return a target that reads these advantages, also of a round that was trained on normalised ones."""

    def of_raw(view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        return target(view, params, records.with_advantages(advantages.to(records.advantages)))

    of_raw.__name__ = name_of(target)
    return of_raw


def model_objective(model: Any) -> Objective:
    """Return what a model's `train()` raises, without the value term: its clip range, entropy, normalisation.

    At the policy that collected the rollout every ratio is 1, so a scheduled clip range does not matter.
    """
    norm: objectives.AdvantageNorm = "buffer" if model.normalize_advantage else "none"
    if isinstance(model, PPO | MaskablePPO):
        clip_range = float(model.clip_range(model._current_progress_remaining))  # type: ignore[operator]
        return objectives.PPOClip(clip_range=clip_range, ent_coef=model.ent_coef, advantage_norm=norm)
    assert isinstance(model, A2C)  # check_model lets no other pass
    return objectives.A2C(ent_coef=model.ent_coef, advantage_norm=norm)
