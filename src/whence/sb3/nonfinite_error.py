"""The error of a round in which a number is not finite, with the file of its records; and whether a policy can act."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.utils import obs_as_tensor

from whence.culprits import first_broken_layer
from whence.errors import NonFinite
from whence.guards import eval_mode
from whence.nonfinite import nonfinite_path, try_saving
from whence.records import RecordBatch
from whence.sb3.recorder import current_records
from whence.sb3.state import named_tensors


@dataclass(frozen=True)
class ErrorWriter:
    """Makes the errors of a round.

    Attributes:
        model: the model.
        number: the round's number, from 1.
        folder: the run directory; None: nothing is saved.
    """

    model: Any
    number: int
    folder: Path | None

    def make_error(
        self, text: str, records: RecordBatch, culprits: Iterable[int] = (), parameter: str | None = None
    ) -> NonFinite:
        """Save records, policy and optimiser as they are, and return the error.

        Args:
            text: what happened, what it means and how to fix it.
            records: the records to save; see `make_unchecked`.
            culprits: ids of the records that cause it.
            parameter: the first parameter whose gradient is not finite.
        """
        message, path, ids = f"Round {self.number}: {text}", None, list(culprits)
        if self.folder is None:
            saved = "With InfluenceCallback(run=...) the records are saved."
        else:
            saved, path = try_saving(
                nonfinite_path(self.folder, self.number),
                "The records, the policy and its optimiser",
                number=self.number,
                message=message,
                records=records,
                policy=named_tensors(self.model.policy),
                optimizer=self.model.policy.optimizer,
                parameter=parameter,
                culprits=ids,
            )
        return NonFinite(f"{message} {saved}", record_ids=ids, parameter=parameter, path=path)


def can_act(policy: Any, observation: Any) -> bool:
    """Return whether a policy has a valid distribution of actions, and finite values, for observations.

    Args:
        policy: an actor-critic policy.
        observation: observations as a vectorised environment returns them.
    """
    with torch.no_grad(), eval_mode(policy.modules()):
        try:
            tensors = obs_as_tensor(observation, policy.device)
            policy.get_distribution(tensors)
            return bool(torch.isfinite(policy.predict_values(tensors)).all())
        except ValueError:  # of torch's distributions
            return False


def name_broken_layer(model: Any) -> str:
    """Return a clause that names the first layer whose output for the current observation is not finite; "" if none."""
    layer = first_broken_layer(model.policy, current_records(model))
    return f": the output of the layer `{layer}` is not finite" if layer else ""
