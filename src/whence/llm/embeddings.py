"""Embeddings of rows: the mean of a language model's last hidden states."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.guards import eval_mode
from whence.llm.model import WithValueHead
from whence.llm.view import unscored_view
from whence.records import RecordBatch


def embed_rows(model: Any, rows: RecordBatch, *, batch_size: int = 16) -> Float[Tensor, "n d"]:
    """Return the mean of the last hidden states over the tokens of each row, of prompt and response.

    Args:
        model: a causal language model of Transformers, or a `WithValueHead`; it is read in eval mode.
        rows: the rows of `make_rows`.
        batch_size: the most rows in one pass.

    Returns:
        (n, d) in single precision, on the CPU.
    """
    view = unscored_view(model)
    language_model = model.language_model if isinstance(model, WithValueHead) else model
    parts = []
    with torch.no_grad(), eval_mode(model.modules()):
        for first in range(0, len(rows), batch_size):
            inputs: Any = view.prepare(rows.take(slice(first, first + batch_size)))
            names = ("input_ids", "attention_mask", "position_ids")
            columns = {name: inputs[name] for name in names}
            hidden = language_model(**columns, output_hidden_states=True, use_cache=False).hidden_states[-1].float()
            mask = inputs["attention_mask"][:, :, None].float()
            parts.append(((hidden * mask).sum(dim=1) / mask.sum(dim=1)).cpu())
    return torch.cat(parts)
