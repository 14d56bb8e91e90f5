"""What training on a selection gains on records that it has not seen: by how far it goes, and by which way."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.counterfactual.retrain import read_batch_size, reshuffle, retrain
from whence.errors import WhenceError
from whence.guards import eval_mode, preserve_rng_state
from whence.policies import Outputs, Params, compute_outputs, find_acting_parameters
from whence.records import RecordBatch
from whence.rounds import RoundRecording
from whence.rounds.identity import SAME, compare_outputs
from whence.rounds.replay import SteppedRound, open_round

ALL = "all"
"""What the selection of every record is called."""

SCHEMA = {
    "order": pl.Int64,
    "selection": pl.String,
    "kept": pl.Int64,
    "advantages": pl.String,
    "norm": pl.Float64,
    "kl": pl.Float64,
    "entropy": pl.Float64,
    "trained": pl.Float64,
    "gain": pl.Float64,
    "all_as_long": pl.Float64,
    "all_as_far": pl.Float64,
}


def measure_gains(
    policy: object,
    recording: RoundRecording,
    selections: Mapping[str, Bool[Tensor, " n"]],
    fresh: RecordBatch,
    *,
    advantages: Mapping[str, Float[Tensor, " f"]] | None = None,
    orders: int = 4,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> pl.DataFrame:
    """Train a recorded round on selections of its records, and judge the policies by records that none was trained on.

    The gain of an update is the rise of `mean(rho A)` on the fresh records, their advantages centred. To first order in
    the update it is in proportion to what the policy's expected return gains, free of what was fitted to the rollout's
    chance. An update in a good direction gains more the further it goes, up to a point. So beside each gain stands what
    training on everything gains when its update is stretched or shrunk: to the norm of this one, over the parameters
    that log-probs depend on; and until the policy diverges from the round's as much as by this one. What is left is the
    direction's. All epochs are trained, also where `target_kl` had ended the round before.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        selections: which records train, by name; training on everything ("all") is always there.
        fresh: records that the round's policy collected as it was before the round.
        advantages: of the fresh records, by name; None: their own, called "own".
        orders: trainings of each selection; in one order all share the permutations.
        seed: of these.
        memory: bytes that training may hold at a time; see `retrain`.
        on_stage: called with the name of each stage as it begins.

    Returns:
        A row for each order, selection and kind of advantages: `order` (from 1), `selection`, `kept` (records),
        `advantages`, `norm` (of the update), `kl` (from the round's policy, mean of `rho - 1 - log rho` on the fresh
        records), `entropy` (its rise there, by what the policy states of it; null where it states none), `trained` (the
        gain on the recorded rollout, with its raw advantages), `gain`, `all_as_long` (to its norm), `all_as_far` (to
        its divergence, within a hundredth; null where no length of that update diverges so).

    Raises:
        WhenceError: a selection called "all", of another number of records or that keeps fewer than two; no order;
            advantages of another number of records or not finite; fresh records of another policy; or see `retrain`.
    """
    if orders < 1 or ALL in selections:
        raise WhenceError(
            f"orders is {orders} and selections are {', '.join(selections)}; at least 1 order is needed, and training "
            f"on {ALL!r} is there by itself."
        )
    n, size = len(recording.records), read_batch_size(recording)
    for name, mask in selections.items():
        if mask.shape != (n,) or mask.dtype != torch.bool:
            raise WhenceError(
                f"The selection {name!r} is {tuple(mask.shape)} {mask.dtype}; ({n},) of torch.bool is needed, True for "
                "each record that trains."
            )
    advantages = {"own": fresh.advantages} if advantages is None else advantages
    for name, own in advantages.items():
        if own.shape != (len(fresh),) or not bool(torch.isfinite(own).all()):
            raise WhenceError(
                f"The advantages {name!r} have shape {tuple(own.shape)}; ({len(fresh)},) of finite numbers is needed."
            )
    round = open_round(policy, recording)
    masks = torch.stack([torch.ones(n, dtype=torch.bool), *selections.values()])
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, object]] = []
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.no_grad():
        if not (apart := compare_outputs(round.view, round.named(round.start.params), fresh)["log-probs"]) <= SAME:
            raise WhenceError(
                f"The fresh records were not collected by the policy of round {recording.number} as it was before the "
                f"round: log-probs are {apart:.2g} apart on average. Collect them with the recorded parameters."
            )
        judge = _Judge(round, fresh, advantages)
        rollout = _Judge(round, round.records, {"raw": round.records.advantages})
        for order in range(1, orders + 1):
            on_stage(f"training on {len(masks)} selections" + (f", order {order} of {orders}" if orders > 1 else ""))
            minibatches = reshuffle(masks, size, recording.update.n_epochs, generator)
            trained = retrain(policy, recording, masks, orders=minibatches, memory=memory)
            updates = [judge.update({name: own[row] for name, own in trained.items()}) for row in range(len(masks))]
            for selection, mask, update in zip((ALL, *selections), masks, updates, strict=True):
                about = {"order": order, "selection": selection, "kept": int(mask.sum())}
                rows += [about | row for row in _rows(judge, rollout, updates[0], update)]
    return pl.DataFrame(rows, schema=SCHEMA)


def _rows(judge: "_Judge", rollout: "_Judge", whole: Params, update: Params) -> Iterator[dict[str, object]]:
    """Yield what is to be said of an update, for each kind of advantages; `whole` is that of all records."""
    found, seen, entropy = judge(update), rollout(update).gains["raw"], judge.before.entropy
    norm, of_whole = _norm(update), _norm(whole)
    long = judge(whole, norm / of_whole if of_whole > 0 else 1.0)
    far = found if update is whole else _as_far(judge, whole, found.kl)
    for kind, gain in found.gains.items():
        yield {
            "advantages": kind,
            "norm": norm,
            "kl": found.kl,
            "entropy": None if found.entropy is None or entropy is None else found.entropy - entropy,
            "trained": seen,
            "gain": gain,
            "all_as_long": long.gains[kind],
            "all_as_far": None if far is None else far.gains[kind],
        }


@dataclass(frozen=True)
class _Verdict:
    gains: Mapping[str, float]
    kl: float
    entropy: float | None


class _Judge:
    """Measures updates of a round's policy on records that it collected as it was before."""

    def __init__(
        self, round: SteppedRound, records: RecordBatch, advantages: Mapping[str, Tensor], at_once: int = 10_000
    ) -> None:
        self._view = round.view
        parts = [slice(first, first + at_once) for first in range(0, len(records), at_once)]
        self._inputs = [round.view.prepare(records.take(part)) for part in parts]
        self._log_probs = records.log_probs.cpu().double()
        doubles = {kind: own.cpu().double() for kind, own in advantages.items()}
        # Centred, since the mean ratio is 1 but for chance, which a large mean advantage would make much of.
        self._advantages = {kind: own - own.mean() for kind, own in doubles.items()}
        self._params = round.named(round.start.params)
        self._moving = find_acting_parameters(round.view, round.records)
        self.before = self({})

    def update(self, trained: Params) -> Params:
        """Return by how much training has moved the parameters that log-probs depend on."""
        return {name: trained[name] - self._params[name] for name in self._moving}

    def __call__(self, update: Params, scale: float = 1.0) -> _Verdict:
        """Return the verdict on an update made `scale` times as long."""
        moved = {name: self._params[name] + scale * own for name, own in update.items()}
        outputs = list(self._outputs({**self._params, **moved}))
        log_ratio = torch.cat([one.log_prob for one in outputs]).cpu().double() - self._log_probs
        less = log_ratio.expm1()  # the ratio less 1
        entropies = [one.entropy for one in outputs if one.entropy is not None]
        return _Verdict(
            {kind: float((less * own).mean()) for kind, own in self._advantages.items()},
            float((less - log_ratio).mean()),
            float(torch.cat(entropies).double().mean()) if entropies else None,
        )

    def _outputs(self, params: Params) -> Iterator[Outputs]:
        for inputs in self._inputs:
            yield compute_outputs(self._view, {"log_prob", "entropy"}, params, inputs)


def _norm(update: Params) -> float:
    return float(torch.stack([own.double().square().sum() for own in update.values()]).sum().sqrt())


def _as_far(judge: _Judge, update: Params, kl: float) -> _Verdict | None:
    """Judge an update stretched or shrunk until the divergence is `kl`, within a hundredth; None where that fails."""
    scale = 1.0
    for _ in range(20):
        found = judge(update, scale)
        if min(found.kl, kl) <= 0 or not math.isfinite(found.kl):
            return None
        if abs(found.kl / kl - 1) < 0.01:
            return found
        # To lowest order, divergence grows with the square.
        scale *= min(4.0, max(0.25, math.sqrt(kl / found.kl)))
    return None
