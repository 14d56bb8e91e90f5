"""Objectives: what a round's optimisation raises, one value per record (LDA §2.1, eq. 1)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, TypeAlias, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from whence.core.errors import InvalidRecords, WhenceError, suggest
from whence.core.policies import Outputs
from whence.core.records import RecordBatch, check_one_per_record

AdvantageNorm: TypeAlias = Literal["none", "buffer"]


@runtime_checkable
class Objective(Protocol):
    """One value per record, to be raised; the engines sum over records.

    A record's value may depend on that record's outputs only. What depends on the whole buffer, such as normalised
    advantages, belongs into `prepare`, which is called once. Engines call the objective on any part of the prepared
    records, down to a single one, so it must read all it needs about a record from the records it is called with. An
    optional attribute `reads` names the outputs that the objective reads; without it all are computed.
    """

    def prepare(self, records: RecordBatch) -> RecordBatch:
        """Return the records as the objective reads them."""
        ...

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the objective of each record; `records` may be any part of the prepared records."""
        ...


@dataclass(frozen=True)
class FunctionObjective:
    """A plain function `function(outputs, records) -> (n,)` as an objective that prepares nothing."""

    function: Callable[[Outputs, RecordBatch], Tensor]

    def prepare(self, records: RecordBatch) -> RecordBatch:
        """Return the records unchanged."""
        return records

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the function's values."""
        return self.function(outputs, records)


class WeightedTerms:
    """An objective whose terms of entropy and value have weights."""

    # The dataclasses that inherit it declare them again, in the order of their signatures.
    ent_coef: float
    vf_coef: float

    @property
    def reads(self) -> frozenset[str]:
        """The policy's outputs that the objective reads; the others need not be computed."""
        value, entropy = ["value"] if self.vf_coef else [], ["entropy"] if self.ent_coef else []
        return frozenset(["log_prob", *value, *entropy])

    def policy_part(self) -> Self:
        """Return the objective without its terms of entropy and value."""
        return replace(self, ent_coef=0.0, vf_coef=0.0)  # type: ignore[type-var]


class _ActorCritic(WeightedTerms):
    """The common part of PPO and A2C: normalised advantages, entropy and value terms."""

    # As above, the dataclasses below declare them again.
    advantage_norm: AdvantageNorm
    clip_range_vf: float | None = None

    def __post_init__(self) -> None:
        if self.advantage_norm not in get_args(AdvantageNorm):
            known = suggest(str(self.advantage_norm), get_args(AdvantageNorm))
            raise WhenceError(f"advantage_norm is {self.advantage_norm!r}.{known}")

    def prepare(self, records: RecordBatch) -> RecordBatch:
        """Return the records with the advantages normalised as `advantage_norm` says."""
        if self.vf_coef and (records.values is None or records.returns is None):
            raise InvalidRecords(
                f"vf_coef is {self.vf_coef}, so the value term needs `values` and `returns`, and these records "
                "lack them. Pass both to RecordBatch, or set vf_coef=0."
            )
        if self.advantage_norm == "none":
            return records
        return records.with_columns({"advantages": _normalise(records.advantages)})

    def _add_entropy_and_value(self, values: Tensor, outputs: Outputs, records: RecordBatch) -> Tensor:
        if self.ent_coef:
            # SB3 estimates an entropy without closed form by -log pi of the action taken.
            entropy = -outputs.log_prob if outputs.entropy is None else check_one_per_record("entropy", outputs.entropy)
            values = values + self.ent_coef * entropy
        if self.vf_coef:
            if outputs.value is None or records.values is None or records.returns is None:
                raise WhenceError(f"vf_coef is {self.vf_coef}, but policy or records give no values. Set vf_coef=0.")
            value = check_one_per_record("value", outputs.value)
            if self.clip_range_vf is not None:
                value = records.values + (value - records.values).clamp(-self.clip_range_vf, self.clip_range_vf)
            values = values - self.vf_coef * (records.returns - value) ** 2
        return values


def _normalise(advantages: Tensor) -> Tensor:
    # One record has no standard deviation; SB3 does not change its advantage.
    if len(advantages) < 2:
        return advantages
    std, mean = torch.std_mean(advantages, correction=1)
    return (advantages - mean) / (std + 1e-8)


@dataclass(frozen=True)
class PPOClip(_ActorCritic):
    """PPO's clipped objective of each record, to be raised.

    `min(rho A, clip(rho, 1-eps, 1+eps) A) + ent_coef H - vf_coef (R - V)^2` with `rho` the ratio of the policy's
    probability to the recorded one and `A` the normalised advantage.

    Attributes:
        clip_range: eps, 0 or more: how far the ratio may move from 1 before it is clipped.
        ent_coef: weight of the entropy; if the policy returns no entropy, -log pi of the action replaces it.
        vf_coef: weight of the squared value error; 0 omits it, as LDA does.
        clip_range_vf: how far the value may move from the recorded one; None: any distance.
        advantage_norm: "none"; "buffer": mean 0 and standard deviation 1 (Bessel's correction) over the buffer.
    """

    clip_range: float = 0.2
    ent_coef: float = 0.0
    vf_coef: float = 0.0
    clip_range_vf: float | None = None
    advantage_norm: AdvantageNorm = "buffer"

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the objective of each record, (n,)."""
        ratio = (check_one_per_record("log_prob", outputs.log_prob) - records.log_probs).exp()
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        surrogate = torch.minimum(ratio * records.advantages, clipped * records.advantages)
        return self._add_entropy_and_value(surrogate, outputs, records)


@dataclass(frozen=True)
class A2C(_ActorCritic):
    """A2C's objective of each record, `A log pi + ent_coef H - vf_coef (R - V)^2`, to be raised.

    Attributes as in `PPOClip`.
    """

    ent_coef: float = 0.0
    vf_coef: float = 0.0
    advantage_norm: AdvantageNorm = "buffer"

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the objective of each record, (n,)."""
        return self._add_entropy_and_value(
            records.advantages * check_one_per_record("log_prob", outputs.log_prob), outputs, records
        )


def as_objective(objective: Objective | Callable[[Outputs, RecordBatch], Tensor] | None) -> Objective:
    """Return an `Objective`: a plain function is wrapped, None becomes `PPOClip()`, and anything else is refused."""
    if objective is None:
        return PPOClip()
    if isinstance(objective, type) or not callable(objective):
        raise WhenceError(
            f"objective is {objective!r}; pass whence.PPOClip(), whence.A2C() or a function "
            "`function(outputs, records)` that returns one value per record."
        )
    return objective if isinstance(objective, Objective) else FunctionObjective(objective)


def policy_part(objective: Objective) -> Objective:
    """Return an objective without its terms of value, entropy and divergence, by its optional method `policy_part`.

    One without that method counts whole.
    """
    part: Callable[[], Objective] | None = getattr(objective, "policy_part", None)
    return objective if part is None else part()
