"""How records of a round are scored in studies: at the policy that collected them, or by the round as a whole."""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from whence.attribution import attribute
from whence.crossfitting import attribute_crossfit
from whence.engines import ENGINES
from whence.errors import WhenceError, suggest
from whence.experiments.rl.trial import Trial, restrict_recording
from whence.influence import Influence
from whence.objectives import Objective, as_objective
from whence.policies import Params, PolicyView
from whence.records import RecordBatch
from whence.rounds import DRAWS, METHODS, attribute_round
from whence.rounds.smoothed import SMOOTHED
from whence.sb3.objective import model_objective
from whence.selection import Selection
from whence.targets import BatchTarget, Return, Target, as_target, target_name

SCORES = ("snapshot", "crossfit", *METHODS)
"""Methods that records can be scored by: two at the policy that collected the rollout, and those of whole rounds."""


@dataclass(frozen=True)
class Scoring:
    """What records are scored by.

    Attributes:
        method: one of `SCORES`. "snapshot": `attribute`; "crossfit": `attribute_crossfit`; another: `attribute_round`
            on a trial of the round.
        target: what to raise; None: `Return()`.
        objective: of the first two; None: the model's own, without its value term.
        engine: of the first two; see `attribute`.
        draws: of "smoothed"; see `attribute_round`. They are the same in every round.
        memory: bytes that scoring may hold at a time.

    Raises:
        WhenceError: an argument is not what it should be, or has no effect.
    """

    method: str
    target: Target
    objective: Objective | None
    engine: str
    draws: int
    memory: int

    @classmethod
    def checked(
        cls,
        method: str,
        target: Target | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        draws: int = DRAWS,
        memory: int = 2**31,
    ) -> "Scoring":
        """Return the scoring of these arguments, checked."""
        if method not in SCORES:
            raise WhenceError(f"method is {method!r}.{suggest(str(method), SCORES)}")
        if engine not in ("auto", *ENGINES):
            raise WhenceError(f"engine is {engine!r}.{suggest(str(engine), ['auto', *ENGINES])}")
        if method in METHODS and (objective is not None or engine != "auto"):
            raise WhenceError(
                f"method={method!r} differentiates the round as the model trains it, so objective and engine have no "
                "effect. Leave them out, or take method='snapshot'."
            )
        if draws < 1 or (draws != DRAWS and method != SMOOTHED):
            raise WhenceError(
                f"draws is {draws} and method {method!r}; at least 1 is needed, and {SMOOTHED!r} alone draws any."
            )
        target = as_target(Return() if target is None else target)
        if method == "crossfit" and not isinstance(target, BatchTarget):
            raise WhenceError(
                f"method='crossfit' leaves records out of the target, and {target_name(target)} does not say that it "
                "is made of them. Take Return(), or method='snapshot'."
            )
        return cls(method, target, None if objective is None else as_objective(objective), engine, draws, memory)

    @property
    def of_round(self) -> bool:
        """Whether the round has to be rehearsed."""
        return self.method in METHODS

    def influence(self, trial: Trial, records: RecordBatch, among: Bool[Tensor, " n"]) -> Influence:
        """Score records of a rollout that is collected and not trained on yet, by what these alone say.

        Args:
            trial: of the round.
            records: the rollout.
            among: True for the records that are scored.
        """
        policy = trial.model.policy
        whole = bool(among.all())
        some = records if whole else records.take(among)
        if self.of_round:
            # Of a whole round to the last bit, though sums in another order would do.
            own = None if whole else among
            recording = restrict_recording(trial.train(records, Selection.dropping(among, "left out"), own), among)
            target = _of_raw(self.target, some.advantages)
            limits: dict[str, Any] = {"draws": self.draws, "memory": self.memory}
            found = attribute_round(policy, recording, target=target, method=self.method, **limits)
            assert isinstance(found, Influence)
            # Of the records as they were collected, though the round may have normalised their advantages.
            return replace(found, provenance=replace(found.provenance, records=some.fingerprint))
        objective = self.objective or model_objective(trial.model)
        asked: dict[str, Any] = {"objective": objective, "engine": self.engine, "memory": self.memory}
        scored_by = attribute if self.method == "snapshot" else attribute_crossfit
        return scored_by(policy, some, target=self.target, **asked)


def _of_raw(target: Target, advantages: Float[Tensor, " n"]) -> Target:
    """Return a target that reads these advantages, also of a round that was trained on normalised ones."""

    def of_raw(view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        return target(view, params, records.with_advantages(advantages.to(records.advantages)))

    of_raw.__name__ = target_name(target)
    return of_raw
