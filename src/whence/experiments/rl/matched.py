"""Training that separates what a selection does from what a step of its size would do."""

import math
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from whence.errors import NonFinite, WhenceError, suggest
from whence.guards import preserve_rng_state
from whence.policies import as_view, find_acting_parameters
from whence.records import RecordBatch
from whence.sb3 import InfluenceCallback
from whence.sb3.state import preserve_model
from whence.selection import Selection, SelectionRule

By: TypeAlias = Literal["norm", "divergence"]


class MatchedUpdate(InfluenceCallback):
    """Train on all records, and make the round's update as long as training on the rule's selection made it, or as far.

    The round is trained twice from the same parameters, optimiser state and generators: on the selection, which is
    undone but for its norms and divergence, and on all records. Then the parameters are moved along the second update:
    those that the policy's log-probs depend on to the norm of theirs, or until the policy has diverged as far over the
    rollout, within a hundredth; the others (of the values) to the norm of theirs. So gradients of the values, which may
    be much larger, do not hide how far the policy goes. The optimiser's state and BatchNorm's
    statistics stay as the second training left them; a `target_kl` stops each training by itself.

    The logger gets the factors as `train/update_scale` and `train/update_scale_value`, and `train/approx_kl` is that
    after scaling, over the whole rollout; `train/clip_fraction` is still the second training's. Seconds are those of
    the second training. Selections, scores and reasons are recorded as the rule made them, though every record
    trained; a round that keeps fewer than two is skipped.

    Args:
        rule: see `InfluenceCallback`.
        by: what of the policy's update is matched, "norm" or "divergence".
        options: see there; but no `recordings`, since two trainings are no round, and no `last`, since all records
            train, as in SB3.

    Raises:
        WhenceError: one of these is given, `by` is another; or see there.
    """

    def __init__(self, rule: SelectionRule, *, by: By = "norm", **options: Any) -> None:
        super().__init__(rule, **options)
        if by not in get_args(By):
            raise WhenceError(f"by is {by!r}.{suggest(str(by), get_args(By))}")
        self.by = by
        if self.recordings or self.last != "keep":
            raise WhenceError(
                "MatchedUpdate takes no recordings and no last: a round is trained twice in it, and what counts is "
                "SB3's own training on all records. Leave them out, or take InfluenceCallback."
            )

    def train_selected(self, train: Callable[[], None], selection: Selection) -> None:
        """Train on all records, and scale the update to what training on the selection makes of it."""
        assert self.round is not None
        policy: Any = self.model.policy
        records = self.round.records
        start = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        with preserve_rng_state():  # dropout draws
            steering = find_acting_parameters(as_view(policy), records)
        others = frozenset(start.keys() - steering)
        with self._optimisation.paused(), preserve_rng_state(), preserve_model(self.model):
            super().train_selected(train, selection)
            lengths = {names: _distance(policy, start, names) for names in (steering, others)}
            far = _divergence(policy, records)
        train()
        if self.by == "norm":
            scale = _scaled(policy, start, steering, lengths[steering])
        else:
            scale = _as_far(policy, start, steering, records, far)
        self.logger.record("train/update_scale", scale)
        self.logger.record("train/update_scale_value", _scaled(policy, start, others, lengths[others]))
        self.logger.record("train/approx_kl", _divergence(policy, records))


def _distance(policy: Any, start: dict[str, Tensor], names: Collection[str]) -> float:
    own = dict(policy.named_parameters())
    return math.sqrt(sum(float((own[name].detach() - start[name]).double().square().sum()) for name in names))


def _scaled(policy: Any, start: dict[str, Tensor], names: Collection[str], wanted: float) -> float:
    """Move parameters along their update until it has the norm wanted; return the factor."""
    made = _distance(policy, start, names)
    scale = wanted / made if made > 0 else 1.0
    if not math.isfinite(scale):
        raise NonFinite(f"An update has the norm {made}, and was to have {wanted}: training has diverged.")
    _move(policy, start, {name: p - start[name] for name, p in policy.named_parameters() if name in names}, scale)
    return scale


def _as_far(
    policy: Any, start: dict[str, Tensor], names: Collection[str], records: RecordBatch, wanted: float
) -> float:
    """Move parameters along their update until the policy diverges as wanted; return the factor."""
    update = {name: p.detach() - start[name] for name, p in policy.named_parameters() if name in names}
    scale = 1.0
    for _ in range(20):
        _move(policy, start, update, scale)
        found = _divergence(policy, records)
        if math.isnan(found) or math.isnan(wanted):
            raise NonFinite(f"An update diverges by {found}, and was to diverge by {wanted}: training has diverged.")
        if min(found, wanted) <= 0 or abs(found / wanted - 1) < 0.01:
            break
        # To lowest order, divergence grows with the square.
        scale *= min(4.0, max(0.25, math.sqrt(wanted / found)))
    return scale


def _move(policy: Any, start: dict[str, Tensor], update: dict[str, Tensor], scale: float) -> None:
    with torch.no_grad():
        own = dict(policy.named_parameters())
        for name, moved in update.items():
            own[name].copy_(start[name] + scale * moved)


def _divergence(policy: Any, records: RecordBatch) -> float:
    """Return the approximate KL divergence from the policy that collected the records, as SB3 estimates it."""
    view = as_view(policy)
    with torch.no_grad():
        log_ratio = view(view.parameters(), view.prepare(records)).log_prob.cpu() - records.log_probs.cpu()
    return float((log_ratio.exp() - 1 - log_ratio).mean())
