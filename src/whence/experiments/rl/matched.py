"""A control: train on all records, with a round's update as large as a selection's."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from whence.errors import NonFinite, WhenceError, suggest
from whence.guards import preserve_rng_state
from whence.policies import as_view, find_acting_parameters
from whence.sb3 import InfluenceCallback
from whence.sb3.divergence import measure_divergence
from whence.sb3.state import preserve_model
from whence.selection import Selection, SelectionRule

By: TypeAlias = Literal["norm", "divergence"]


class MatchedUpdate(InfluenceCallback):
    """Train on all records, and scale the round's update to the size that training on the rule's selection gives it.

    It separates what a selection does from what an update of its size does. The round is trained twice from the same
    parameters, optimiser state and generators: on the selection, which is undone after its norms and divergence are
    measured, and on all records. Then the parameters move along the second update. Those that the policy's log-probs
    depend on move until their update has the first one's norm, or until the policy has diverged as far over the
    rollout, within 1%. The others (of the value function) move until their update has the norm of theirs: the value
    function's gradients may be much larger, and would hide how far the policy moves. The optimiser's state and
    BatchNorm's statistics stay as the second training left them. A `target_kl` stops each training by itself.

    The logger gets the factors as `train/update_scale` and `train/update_scale_value`. `train/approx_kl` is measured
    after scaling, over the whole rollout; `train/clip_fraction` is the second training's. Seconds are those of the
    second training. Selections, scores and reasons are written as the rule made them, although every record trained. A
    round that keeps fewer than two records is skipped.

    Args:
        rule: see `InfluenceCallback`.
        by: what of the policy's update is matched, "norm" or "divergence".
        options: further arguments of `InfluenceCallback`, except `recordings`, since no recording holds two trainings,
            and `last`, since all records train, as in SB3.

    Raises:
        WhenceError: `recordings` or `last` is passed, or `by` is unknown; or see `InfluenceCallback`.
    """

    def __init__(self, rule: SelectionRule, *, by: By = "norm", **options: Any) -> None:
        super().__init__(rule, **options)
        if by not in get_args(By):
            raise WhenceError(f"by is {by!r}.{suggest(str(by), get_args(By))}")
        self.by = by
        if self.recordings or self.last != "keep":
            raise WhenceError(
                "MatchedUpdate takes no recordings and no last: it trains each round twice, and the training that "
                "counts is SB3's own, on all records. Leave them out, or take InfluenceCallback."
            )

    def train_selected(self, train: Callable[[], None], selection: Selection) -> None:
        """Train on all records, and scale the update to the size that training on the selection gives it."""
        assert self.round is not None
        policy: Any = self.model.policy
        records = self.round.records
        start = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        with preserve_rng_state():  # dropout draws
            acting = find_acting_parameters(as_view(policy), records)
        others = frozenset(start.keys() - acting)
        with self.optimisation_clock.paused(), preserve_rng_state(), preserve_model(self.model):
            super().train_selected(train, selection)
            norms = {names: _measure_update(policy, start, names) for names in (acting, others)}
            divergence = measure_divergence(self.model)
        train()
        if self.by == "norm":
            scale = _scale_to_norm(policy, start, acting, norms[acting])
        else:
            scale = _scale_to_divergence(self.model, start, acting, divergence)
        self.logger.record("train/update_scale", scale)
        self.logger.record("train/update_scale_value", _scale_to_norm(policy, start, others, norms[others]))
        self.logger.record("train/approx_kl", measure_divergence(self.model))


def _measure_update(policy: Any, start: Mapping[str, Tensor], names: Collection[str]) -> float:
    """Return the norm of the named parameters' update."""
    # In the policy's order: a set's own differs from process to process, and so would the sum's last digit.
    updates = [p.detach() - start[name] for name, p in policy.named_parameters() if name in names]
    return math.sqrt(sum(float(update.double().square().sum()) for update in updates))


def _scale_to_norm(policy: Any, start: Mapping[str, Tensor], names: Collection[str], norm: float) -> float:
    """Move the named parameters along their update until it has this norm; return the factor."""
    present = _measure_update(policy, start, names)
    scale = norm / present if present > 0 else 1.0
    if not math.isfinite(scale):
        raise NonFinite(f"An update has the norm {present}, and was to have {norm}: training has diverged.")
    _move(policy, start, _read_update(policy, start, names), scale)
    return scale


def _scale_to_divergence(model: Any, start: Mapping[str, Tensor], names: Collection[str], divergence: float) -> float:
    """Move the named parameters along their update until the policy has this divergence; return the factor."""
    update = _read_update(model.policy, start, names)
    scale = 1.0
    for _ in range(20):
        _move(model.policy, start, update, scale)
        present = measure_divergence(model)
        if math.isnan(present) or math.isnan(divergence):
            raise NonFinite(
                f"An update diverges by {present}, and was to diverge by {divergence}: training has diverged."
            )
        if min(present, divergence) <= 0 or abs(present / divergence - 1) < 0.01:
            break
        # To lowest order, divergence grows with the square.
        scale *= min(4.0, max(0.25, math.sqrt(divergence / present)))
    return scale


def _read_update(policy: Any, start: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return how far each of the named parameters has moved."""
    return {name: p.detach() - start[name] for name, p in policy.named_parameters() if name in names}


def _move(policy: Any, start: Mapping[str, Tensor], update: Mapping[str, Tensor], scale: float) -> None:
    """Set parameters to `start + scale * update`."""
    with torch.no_grad():
        params = dict(policy.named_parameters())
        for name, step in update.items():
            params[name].copy_(start[name] + scale * step)
