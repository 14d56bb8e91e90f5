"""Training that separates what a selection does from what a step of its size would do."""

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from whence.errors import NonFinite, WhenceError
from whence.guards import kept_generators
from whence.policies import acting_parameters, as_view
from whence.records import RecordBatch
from whence.sb3 import InfluenceCallback
from whence.sb3.rounds import untouched
from whence.selection import Selection, SelectionRule


class MatchedUpdate(InfluenceCallback):
    """Train on all records, and give the round's update the norms that training on the rule's selection would have had.

    The round is trained twice from the same parameters, optimiser state and generators: on the selection, which is
    undone but for its norms, and on all records. Then the parameters are moved along the second update to those norms:
    those that the policy's log-probs depend on to theirs, the others (of the values) to theirs. So gradients of the
    values, which may be much larger, do not hide how far the policy goes. The optimiser's state and BatchNorm's
    statistics stay as the second training left them; a `target_kl` stops each training by itself.

    The logger gets the factors as `train/update_scale` and `train/update_scale_value`, and `train/approx_kl` is that
    after scaling, over the whole rollout; `train/clip_fraction` is still the second training's. Seconds are those of
    the second training. Selections, scores and reasons are recorded as the rule made them, though every record
    trained; a round that keeps fewer than two is skipped.

    Args:
        rule: see `InfluenceCallback`.
        asked: see there; but no `recordings`, since two trainings are no round, and what trains on all records, as
            SB3 does, takes no `last` or `advantage_norm`.

    Raises:
        WhenceError: one of these is given; or see there.
    """

    def __init__(self, rule: SelectionRule, **asked: Any) -> None:
        super().__init__(rule, **asked)
        if self.recordings or self.last != "keep" or self.advantage_norm != "minibatch":
            raise WhenceError(
                "MatchedUpdate takes no recordings, last or advantage_norm: a round is trained twice in it, and what "
                "counts is SB3's own training on all records. Leave them out, or take InfluenceCallback."
            )

    def _train_selected(self, own_train: Callable[[], None], selection: Selection) -> None:
        assert self.round is not None
        policy: Any = self.model.policy
        records = self.round.records
        start = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        with kept_generators():  # dropout draws
            steering = acting_parameters(as_view(policy), records)
        others = frozenset(start.keys() - steering)
        with self._optimisation.paused(), kept_generators(), untouched(self.model):
            super()._train_selected(own_train, selection)
            wanted = {names: _distance(policy, start, names) for names in (steering, others)}
        own_train()
        scales = {names: _scaled(policy, start, names, norm) for names, norm in wanted.items()}
        self.logger.record("train/update_scale", scales[steering])
        self.logger.record("train/update_scale_value", scales[others])
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
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in names:
                parameter.copy_(start[name] + scale * (parameter - start[name]))
    return scale


def _divergence(policy: Any, records: RecordBatch) -> float:
    """Return the approximate KL divergence from the policy that collected the records, as SB3 estimates it."""
    view = as_view(policy)
    with torch.no_grad():
        log_ratio = view(view.parameters(), view.prepare(records)).log_prob.cpu() - records.log_probs.cpu()
    return float((log_ratio.exp() - 1 - log_ratio).mean())
