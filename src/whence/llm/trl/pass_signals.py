"""What the passes of a step say of tokens, kept until the generation batch is written."""

from collections.abc import Mapping
from typing import Any

import polars as pl
import torch
from accelerate.utils import gather_object
from torch import Tensor

from whence.core import RecordBatch
from whence.llm.base import list_signals
from whence.llm.trl.completions import ROW

_SAME_RATIO = 1e-5
"""Ratios of probabilities that differ from 1 by no more are of one policy."""

_COLUMNS = ("log_probs", "entropies", "last")


class PassSignals:
    """Log-probs and entropies of the tokens of this process's completions, of a generation batch."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Tensor]] = {}

    def note(self, minibatch: Mapping[str, Any], log_probs: Tensor, entropies: Tensor | None) -> None:
        """Take a pass: the first one's log-probs are those of the policy that drew the tokens, unless TRL has them."""
        columns = {"last": log_probs, "entropies": entropies, "log_probs": minibatch.get("old_per_token_logps")}
        present = {name: column.detach().float().cpu() for name, column in columns.items() if column is not None}
        for place, row in enumerate(minibatch[ROW].tolist()):
            numbers = {name: column[place] for name, column in present.items()}
            first = self._rows.get(row) or {"log_probs": numbers["last"], **numbers}
            self._rows[row] = {**first, "last": numbers["last"]}

    def take(self, processes: int) -> dict[int, dict[str, Tensor]]:
        """Return the passes of all processes by the number of the row, and begin anew; call it in every process."""
        parts = gather_object([self._rows]) if processes > 1 else [self._rows]
        self._rows = {}
        return {row: numbers for part in parts for row, numbers in part.items()}


def list_pass_signals(
    passes: Mapping[int, Mapping[str, Tensor]], rows: RecordBatch, lengths: list[int], args: Any
) -> list[pl.Series]:
    """Return the passes as columns of a round's records; see `list_signals`.

    Args:
        passes: by the place of a row; rows that were dropped have none.
        rows: the rows of the generation batch.
        lengths: the tokens of each response.
        args: TRL's settings, for the bounds of ratios.
    """
    observations: Any = rows.observations
    mask = observations["response_mask"].cpu()
    columns = {name: torch.full(mask.shape, torch.nan) for name in _COLUMNS}
    for row, numbers in passes.items():
        for name, column in numbers.items():
            columns[name][row, : len(column)] = column[: mask.shape[1]]
    ratios = (columns["last"] - columns["log_probs"]).exp()
    known = ratios[mask & ratios.isfinite()]
    return list_signals(
        mask,
        lengths,
        log_probs=columns["log_probs"],
        entropies=None if columns["entropies"].isnan().all() else columns["entropies"],
        ref_log_probs=observations.get("ref_log_probs"),
        ratios=ratios if ((known - 1).abs() > _SAME_RATIO).any() else None,
        clip=(1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon)),
    )
