"""How studies score the records of a round: at the policy that collected them, or by the round as a whole."""

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor

from whence.attribution import attribute
from whence.crossfitting import attribute_crossfit
from whence.engines import check_engine
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
"""The methods of scoring: two at the policy that collected the rollout, and those of whole rounds."""


@dataclass(frozen=True)
class Scoring:
    """How the records of a round are scored. Make one with `create`.

    Attributes:
        method: one of `SCORES`. "snapshot": by `attribute`; "crossfit": by `attribute_crossfit`; another: by
            `attribute_round`, on a trial of the round.
        target: what to raise.
        objective: what "snapshot" and "crossfit" differentiate; None: the model's own, without its value term.
        engine: the engine of "snapshot" and "crossfit"; see `attribute`.
        draws: trainings that "smoothed" averages, with the same noise in every round; see `attribute_round`.
        memory: bytes that scoring may hold at a time.
    """

    method: str
    target: Target
    objective: Objective | None
    engine: str
    draws: int
    memory: int

    @classmethod
    def create(
        cls,
        method: str,
        target: Target | None = None,
        objective: Objective | None = None,
        engine: str = "auto",
        draws: int = DRAWS,
        memory: int = 2**31,
    ) -> "Scoring":
        """Return a checked scoring; the target None is `Return()`.

        Raises:
            WhenceError: an argument is not what it should be, or has no effect.
        """
        if method not in SCORES:
            raise WhenceError(f"method is {method!r}.{suggest(str(method), SCORES)}")
        check_engine(engine)
        if method in METHODS and (objective is not None or engine != "auto"):
            raise WhenceError(
                f"method={method!r} differentiates the round as the model trains it, so objective and engine have no "
                "effect. Leave them out, or take method='snapshot'."
            )
        if draws < 1 or (draws != DRAWS and method != SMOOTHED):
            raise WhenceError(
                f"draws is {draws} and method {method!r}; at least 1 is needed, and only {SMOOTHED!r} reads draws."
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
        """Whether scoring needs a trial of the round."""
        return self.method in METHODS

    def influence(self, trial: Trial, records: RecordBatch, among: Bool[Tensor, " n"]) -> Influence:
        """Score some records of a rollout that is not trained on yet, from these records alone.

        Args:
            trial: a trial of the round.
            records: the rollout, n records.
            among: (n,) True for the records to score.
        """
        if self.of_round:
            return self._score_round(trial, records, among)
        score = attribute if self.method == "snapshot" else attribute_crossfit
        return score(
            trial.model.policy,
            records if bool(among.all()) else records.take(among),
            target=self.target,
            objective=self.objective or model_objective(trial.model),
            engine=self.engine,
            memory=self.memory,
        )

    def _score_round(self, trial: Trial, records: RecordBatch, among: Bool[Tensor, " n"]) -> Influence:
        """Score records by a trial of the whole round."""
        whole = bool(among.all())
        scored = records if whole else records.take(among)
        # None for all records, so that scores equal those of the round itself to the last bit.
        recording = trial.train(records, Selection.dropping(among, "left out"), None if whole else among)
        influence = attribute_round(
            trial.model.policy,
            restrict_recording(recording, among),
            target=_read_advantages(self.target, scored.advantages),
            method=self.method,
            draws=self.draws,
            memory=self.memory,
        )
        assert isinstance(influence, Influence)
        # The recording's records may have normalised advantages; the scores belong to the collected ones.
        return replace(influence, provenance=replace(influence.provenance, records=scored.fingerprint))


def _read_advantages(target: Target, advantages: Float[Tensor, " n"]) -> Target:
    """Return a target that reads these advantages in place of the records'; it keeps the target's name."""

    def with_advantages(view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        return target(view, params, records.with_advantages(advantages.to(records.advantages)))

    with_advantages.__name__ = target_name(target)
    return with_advantages
