"""Generalised advantage estimates from TD errors, for studies that change lambda or the values."""

import numpy as np
import torch
from numpy.typing import NDArray

from whence.advantages import continues, td_errors
from whence.records import RecordBatch

Array = NDArray[np.float64]


def accumulate_errors(errors: Array, continued: NDArray[np.bool_], decay: float) -> Array:
    """Return the advantages, (n,): each TD error and `decay` times the advantage that follows in its episode.

    Args:
        errors: (n,) TD errors.
        continued: (n,) whether a record's episode continues with the next record.
        decay: gamma times lambda.
    """
    advantages = errors.copy()
    for at in range(len(errors) - 2, -1, -1):
        if continued[at]:
            advantages[at] += decay * advantages[at + 1]
    return advantages


def change_lambda(records: RecordBatch, gae_lambda: float) -> RecordBatch:
    """Return a rollout whose advantages and returns are those of another GAE lambda."""
    assert records.gamma is not None
    assert records.gae_lambda is not None
    assert records.env_index is not None
    starts, env_index = records.episode_starts.bool().numpy(), records.env_index.numpy()
    errors = td_errors(records.advantages.double().numpy(), starts, env_index, records.gamma, records.gae_lambda)
    advantages = accumulate_errors(errors, continues(starts, env_index), records.gamma * gae_lambda)
    changed = torch.from_numpy(advantages).to(records.advantages)
    return records.with_columns({"advantages": changed, "returns": changed + records.values})
