"""What training on a selection gains on fresh records: by the length of the update, and by its direction."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from studies.selection.matched import find_acting_parameters
from whence.core import Outputs, Params, RecordBatch, compute_outputs, eval_mode, preserve_rng_state
from whence.counterfactual.retrain import read_batch_size, reshuffle, retrain
from whence.rounds import RoundRecording, SteppedRound, open_round

ALL = "all"
"""The name of the selection of all records."""

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
) -> pl.DataFrame:
    """Train a recorded round on selections of its records, and measure the policies on fresh records.

    The gain of an update is the rise of `mean(rho A)` on the fresh records, with centred advantages. To first order in
    the update it is proportional to the gain in expected return, without the part that was fitted to the rollout's
    noise. An update in a good direction gains more the longer it is, up to a point. So each gain is compared with that
    of training on everything, with its update scaled in two ways: to the norm of this one, over the parameters that
    log-probs depend on; and to the same divergence from the round's policy. The rest of the difference is due to the
    direction. All `n_epochs` are trained, even if `target_kl` ended the round early.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: the recorded round.
        selections: (n,) masks of the records that train, by name; training on everything ("all") is always included.
        fresh: records that the policy collected as it was before the round.
        advantages: (f,) advantages of the fresh records, by name; None: the recorded ones, under the name "own".
        orders: the number of trainings of each selection; in one order all share the permutations.
        seed: the seed of the permutations.

    Returns:
        A row for each order, selection and kind of advantages: `order` (from 1), `selection`, `kept` (the number
        of records), `advantages`, `norm` (of the update), `kl` (from the round's policy, the mean of
        `rho - 1 - log rho` on the fresh records), `entropy` (its rise there; null if the policy gives none), `trained`
        (the gain on the recorded rollout, with its raw advantages), `gain`, `all_as_long` (the gain of "all", scaled to
        the same norm) and `all_as_far` (the gain of "all", scaled to the same divergence within a hundredth; null if no
        scale reaches it).
    """
    size = read_batch_size(recording)
    advantages = {"own": fresh.advantages} if advantages is None else advantages
    round = open_round(policy, recording)
    masks = torch.stack([torch.ones(len(recording.records), dtype=torch.bool), *selections.values()])
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, object]] = []
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.no_grad():
        on_fresh = _Evaluator(round, fresh, advantages)
        on_rollout = _Evaluator(round, round.records, {"raw": round.records.advantages})
        for order in range(1, orders + 1):
            minibatches = reshuffle(masks, size, recording.update.n_epochs, generator)
            trained = retrain(policy, recording, masks, orders=minibatches)
            updates = [
                on_fresh.get_update({name: tensor[row] for name, tensor in trained.items()})
                for row in range(len(masks))
            ]
            for selection, mask, update in zip((ALL, *selections), masks, updates, strict=True):
                about = {"order": order, "selection": selection, "kept": int(mask.sum())}
                rows += [about | row for row in _gain_rows(on_fresh, on_rollout, updates[0], update)]
    return pl.DataFrame(rows, schema=SCHEMA)


def _gain_rows(
    on_fresh: "_Evaluator", on_rollout: "_Evaluator", whole: Params, update: Params
) -> Iterator[dict[str, object]]:
    """Yield the row of an update for each kind of advantages; `whole` is the update of all records."""
    measured, trained, entropy = on_fresh(update), on_rollout(update).gains["raw"], on_fresh.before.entropy
    norm, whole_norm = _update_norm(update), _update_norm(whole)
    as_long = on_fresh(whole, norm / whole_norm if whole_norm > 0 else 1.0)
    as_far = measured if update is whole else _scale_to_divergence(on_fresh, whole, measured.kl)
    for kind, gain in measured.gains.items():
        yield {
            "advantages": kind,
            "norm": norm,
            "kl": measured.kl,
            "entropy": None if measured.entropy is None or entropy is None else measured.entropy - entropy,
            "trained": trained,
            "gain": gain,
            "all_as_long": as_long.gains[kind],
            "all_as_far": None if as_far is None else as_far.gains[kind],
        }


@dataclass(frozen=True)
class _Measured:
    """What an update does on some records: the gain for each kind of advantages, divergence and entropy."""

    gains: Mapping[str, float]
    kl: float
    entropy: float | None


class _Evaluator:
    """Measures updates of a round's policy on records that the policy collected as it was before the round."""

    def __init__(
        self, round: SteppedRound, records: RecordBatch, advantages: Mapping[str, Tensor], at_once: int = 10_000
    ) -> None:
        self._view = round.view
        parts = [slice(first, first + at_once) for first in range(0, len(records), at_once)]
        self._inputs = [round.view.prepare(records.take(part)) for part in parts]
        self._log_probs = records.log_probs.cpu().double()
        doubles = {kind: values.cpu().double() for kind, values in advantages.items()}
        # Centred, since the mean ratio is 1 except for noise, which a large mean advantage would amplify.
        self._advantages = {kind: values - values.mean() for kind, values in doubles.items()}
        self._params = round.unflatten(round.start.params)
        self._moving = find_acting_parameters(round.view, round.records)
        self.before = self({})

    def get_update(self, trained: Params) -> Params:
        """Return the differences that training made to the parameters that log-probs depend on."""
        return {name: trained[name] - self._params[name] for name in self._moving}

    def __call__(self, update: Params, scale: float = 1.0) -> _Measured:
        """Measure an update made `scale` times as long."""
        moved = {name: self._params[name] + scale * difference for name, difference in update.items()}
        outputs = list(self._compute_outputs({**self._params, **moved}))
        log_ratio = torch.cat([one.log_prob for one in outputs]).cpu().double() - self._log_probs
        ratio_less_1 = log_ratio.expm1()
        entropies = [one.entropy for one in outputs if one.entropy is not None]
        return _Measured(
            {kind: float((ratio_less_1 * values).mean()) for kind, values in self._advantages.items()},
            float((ratio_less_1 - log_ratio).mean()),
            float(torch.cat(entropies).double().mean()) if entropies else None,
        )

    def _compute_outputs(self, params: Params) -> Iterator[Outputs]:
        for inputs in self._inputs:
            yield compute_outputs(self._view, {"log_prob", "entropy"}, params, inputs)


def _update_norm(update: Params) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in update.values()]).sum().sqrt())


def _scale_to_divergence(evaluator: _Evaluator, update: Params, kl: float) -> _Measured | None:
    """Measure an update scaled until the divergence is `kl`, within a hundredth; return None if no scale reaches it."""
    scale = 1.0
    for _ in range(20):
        measured = evaluator(update, scale)
        if min(measured.kl, kl) <= 0 or not math.isfinite(measured.kl):
            return None
        if abs(measured.kl / kl - 1) < 0.01:
            return measured
        # To lowest order, divergence grows with the square of the scale.
        scale *= min(4.0, max(0.25, math.sqrt(kl / measured.kl)))
    return None
