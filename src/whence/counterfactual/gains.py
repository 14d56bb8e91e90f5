"""What training on a selection gains on records that it has not seen: by how far it goes, and by which way."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.counterfactual.retrain import batch_size_of, reshuffled, retrain
from whence.errors import WhenceError
from whence.guards import eval_mode, kept_generators
from whence.policies import ModuleView, Outputs, Params, PolicyView, acting
from whence.records import RecordBatch
from whence.rounds import RoundRecording
from whence.rounds.replay import opened

ALL = "all"
"""What the selection of every record is called."""


def gains(
    policy: object,
    recording: RoundRecording,
    selections: Mapping[str, Bool[Tensor, " n"]],
    fresh: RecordBatch,
    *,
    advantages: Mapping[str, Float[Tensor, " f"]] | None = None,
    orders: int = 4,
    seed: int = 0,
    memory: int = 2**31,
    told: Callable[[str], None] = lambda stage: None,
) -> pl.DataFrame:
    """Train a recorded round on selections of its records, and judge the policies by records that none was trained on.

    The gain of an update is the rise of `mean(rho A)` on the fresh records, their advantages centred: to first order in
    the update, what the policy's expected return gains by it, free of what was fitted to the chance of the rollout. An
    update that goes further gains more, whichever way it goes. So beside each gain stands what training on everything
    gains when its update is made longer or shorter: to the norm of this one, over the parameters that log-probs depend
    on; and until the policy diverges from the round's as much as by this one. What is left is the direction's.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        selections: which records train, by name; training on everything ("all") is always there.
        fresh: records that the round's policy collected as it was before the round.
        advantages: of the fresh records, by name; None: their own, called "own".
        orders: trainings of each selection; in one order all share the permutations.
        seed: of these.
        memory: bytes that training may hold at a time; see `retrain`.
        told: hears of each stage as it begins.

    Returns:
        A row for each order, selection and kind of advantages: `order` (from 1), `selection`, `kept` (records),
        `advantages`, `norm` (of the update), `kl` (from the round's policy, mean of `rho - 1 - log rho` on the fresh
        records), `entropy` (its rise there, by what the policy states of it; null where it states none), `trained` (the
        gain on the recorded rollout, with its raw advantages), `gain`, `all_as_long` (to its norm), `all_as_far` (to
        its divergence).

    Raises:
        WhenceError: a selection called "all" or that keeps fewer than two records, no order, or advantages of another
            number of records, or fresh records of another policy; or see `retrain`.
    """
    if orders < 1 or ALL in selections:
        raise WhenceError(
            f"orders is {orders} and selections are {', '.join(selections)}; at least 1 order is needed, and training "
            f"on {ALL!r} is there by itself."
        )
    advantages = {"own": fresh.advantages} if advantages is None else advantages
    for name, own in advantages.items():
        if own.shape != (len(fresh),):
            raise WhenceError(f"The advantages {name!r} have shape {tuple(own.shape)}; ({len(fresh)},) is needed.")
    round = opened(policy, recording)
    names = acting(round.view, round.records)
    begun = round.named(round.start.params)
    start = {name: begun[name] for name in names}
    others = {name: p for name, p in begun.items() if name not in names}
    judge = _Judge(round.view, fresh, advantages)
    of_rollout = _Judge(round.view, round.records, {"raw": round.records.advantages})
    everything = torch.ones(len(recording.records), dtype=torch.bool)
    masks = torch.stack([everything, *selections.values()])
    generator = torch.Generator().manual_seed(seed)
    rows = []
    with kept_generators(), eval_mode(list(round.view.module.modules())), torch.no_grad():
        before = judge(begun)
        if before.furthest > 1e-3:
            raise WhenceError(
                f"The fresh records were not collected by the policy of round {recording.number} as it was before the "
                f"round: log-probs differ by up to {before.furthest:.2g}. Collect them with the recorded parameters."
            )
        for order in range(1, orders + 1):
            told(f"training on {len(masks)} selections" + (f", order {order} of {orders}" if orders > 1 else ""))
            minibatches = reshuffled(masks, batch_size_of(recording), recording.update.n_epochs, generator)
            trained = retrain(policy, recording, masks, orders=minibatches, memory=memory)
            updates = [{name: trained[name][row] - p for name, p in start.items()} for row in range(len(masks))]
            norms = [_norm(update) for update in updates]
            for selection, mask, update, norm in zip((ALL, *selections), masks, updates, norms, strict=True):
                found = judge(others | _moved(start, update))
                long = judge(others | _moved(start, updates[0], norm / norms[0] if norms[0] > 0 else 1.0))
                far = found if selection == ALL else _as_far(judge, others, start, updates[0], found.kl)
                seen = of_rollout(others | _moved(start, update)).gains["raw"]
                rows += [
                    {
                        "order": order,
                        "selection": selection,
                        "kept": int(mask.sum()),
                        "advantages": kind,
                        "norm": norm,
                        "kl": found.kl,
                        "entropy": None if found.entropy is None else found.entropy - (before.entropy or 0.0),
                        "trained": seen,
                        "gain": found.gains[kind],
                        "all_as_long": long.gains[kind],
                        "all_as_far": far.gains[kind],
                    }
                    for kind in advantages
                ]
    return pl.DataFrame(rows, schema_overrides={"entropy": pl.Float64})


@dataclass(frozen=True)
class _Verdict:
    gains: Mapping[str, float]
    kl: float
    entropy: float | None
    furthest: float


class _Judge:
    """Measures parameters on records that were collected by the policy from which they were trained."""

    def __init__(
        self, view: PolicyView, records: RecordBatch, advantages: Mapping[str, Tensor], at_once: int = 10_000
    ) -> None:
        self._view = view
        parts = [slice(first, first + at_once) for first in range(0, len(records), at_once)]
        self._inputs = [view.prepare(records.take(part)) for part in parts]
        self._before = records.log_probs.cpu().double()
        # Centred, since the mean ratio is 1 but for chance, which a large mean advantage would make much of.
        self._advantages = {kind: own.cpu().double() - own.double().mean().cpu() for kind, own in advantages.items()}

    def __call__(self, params: Params) -> _Verdict:
        outputs = list(self._outputs(params))
        log_ratio = torch.cat([one.log_prob for one in outputs]).cpu().double() - self._before
        less = log_ratio.expm1()  # the ratio less 1
        entropies = [one.entropy for one in outputs if one.entropy is not None]
        return _Verdict(
            {kind: float((less * own).mean()) for kind, own in self._advantages.items()},
            float((less - log_ratio).mean()),
            float(torch.cat(entropies).double().mean()) if entropies else None,
            float(log_ratio.abs().max()),
        )

    def _outputs(self, params: Params) -> Iterator[Outputs]:
        for inputs in self._inputs:
            if isinstance(self._view, ModuleView):
                yield self._view.only({"log_prob", "entropy"}, params, inputs)
            else:
                yield self._view(params, inputs)


def _norm(update: Params) -> float:
    return float(torch.stack([own.double().square().sum() for own in update.values()]).sum().sqrt())


def _moved(start: Params, update: Params, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: p + scale * update[name] for name, p in start.items()}


def _as_far(judge: _Judge, others: Params, start: Params, update: Params, kl: float) -> _Verdict:
    """Judge an update made longer or shorter until the divergence is `kl`, within a hundredth."""
    scale, found = 1.0, judge({**others, **_moved(start, update)})
    for _ in range(10):
        if min(found.kl, kl) <= 0 or abs(found.kl / kl - 1) < 0.01:
            break
        scale *= math.sqrt(kl / found.kl)  # to lowest order, divergence grows with the square
        found = judge({**others, **_moved(start, update, scale)})
    return found
