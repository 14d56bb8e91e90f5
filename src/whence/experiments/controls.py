"""Training that separates what a selection does from what a step of its size would do."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whence.guards import kept_generators
from whence.sb3 import InfluenceCallback
from whence.selection import Selection


class MatchedUpdate(InfluenceCallback):
    """Train on all records, and give the round's update the norm that training on the rule's selection would have had.

    The round is trained twice from the same parameters, optimiser state and generators: on the selection, which is
    undone but for its norm, and on all records. Then all parameters are moved along the second update to that norm;
    the optimiser's state stays as the second left it. The logger gets `train/update_scale`, the factor.
    Selections, scores and reasons are recorded as the rule made them, though every record trained.
    """

    def _train_selected(self, own_train: Callable[[], None], selection: Selection) -> None:
        policy: Any = self.model.policy
        model: Any = self.model
        start = [parameter.detach().clone() for parameter in policy.parameters()]
        before = copy.deepcopy((policy.state_dict(), policy.optimizer.state_dict())), model._n_updates
        with kept_generators():
            super()._train_selected(own_train, selection)
        wanted = _distance(policy, start)
        (tensors, state), model._n_updates = before
        policy.load_state_dict(tensors)
        policy.optimizer.load_state_dict(state)
        own_train()
        made = _distance(policy, start)
        scale = wanted / made if made > 0 else 1.0
        with torch.no_grad():
            for parameter, old in zip(policy.parameters(), start, strict=True):
                parameter.copy_(old + scale * (parameter - old))
        model.logger.record("train/update_scale", scale)


def _distance(policy: Any, start: list[Tensor]) -> float:
    moved = (parameter.detach() - old for parameter, old in zip(policy.parameters(), start, strict=True))
    return float(torch.stack([change.double().square().sum() for change in moved]).sum().sqrt())
