"""The completions of a TRL generation batch as records."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from whence.errors import Unsupported
from whence.llm.processes import Processes
from whence.llm.rows import make_rows
from whence.llm.view import EXTRA_PADDING
from whence.records import RecordBatch

_NOT_TOKENS = frozenset(["pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids"])
"""Of TRL's batches: what scores of tokens do not account for."""


def has_tokens_alone(output: Mapping[str, Any]) -> bool:
    """Return whether a generation batch holds tokens, and no images."""
    return not output.keys() & _NOT_TOKENS


def make_completion_rows(
    output: Mapping[str, Any], accelerator: Accelerator, processes: Processes, batches_done: int
) -> RecordBatch:
    """Return the completions of all processes as rows; call it in every process.

    Args:
        output: a process's part of the generation batch.
        accelerator: the trainer's.
        processes: the processes that train.
        batches_done: the generation batches before this one, from which record ids go on.

    Raises:
        Unsupported: there are images, which scores do not account for.
    """
    if others := sorted(output.keys() & _NOT_TOKENS):
        raise Unsupported(f"TRL's batch holds {others[0]}: completions are scored by their tokens alone.")

    def gather_tokens(tokens: Tensor, *, pad_first: bool = False) -> Tensor:
        padded = accelerator.pad_across_processes(tokens.contiguous(), dim=1, pad_index=0, pad_first=pad_first)
        return processes.gather(padded, len(tokens) * processes.number)

    mask = output["completion_mask"]
    if "tool_mask" in output:
        mask = mask * output["tool_mask"]
    prompts = gather_tokens(output["prompt_ids"], pad_first=True)
    prompt_mask = gather_tokens(output["prompt_mask"], pad_first=True)
    completions, attended = (gather_tokens(output[name]) for name in ("completion_ids", "completion_mask"))
    mask = gather_tokens(mask).bool()
    advantages = processes.gather(output["advantages"], len(mask))
    # TRL tells the model no positions, and a process's batch is as wide as its own longest prompt.
    extra = torch.full_like(output["prompt_ids"][:, 0], prompts.shape[1] - output["prompt_ids"].shape[1])
    columns = {EXTRA_PADDING: processes.gather(extra, len(mask))}
    if "ref_per_token_logps" in output:
        columns["ref_log_probs"] = torch.where(mask, gather_tokens(output["ref_per_token_logps"]), 0.0)
    rows = make_rows(
        input_ids=torch.cat([prompts, completions], dim=1),
        attention_mask=torch.cat([prompt_mask, attended], dim=1),
        response_mask=mask,
        # Objectives assume ratios of 1, as at the policy that drew the tokens, so these are not read.
        log_probs=torch.zeros(mask.shape, device=mask.device),
        advantages=torch.where(mask, advantages[:, None], 0.0),
        record_ids=torch.arange(batches_done * len(mask), (batches_done + 1) * len(mask)),
    )
    observations: Any = rows.observations
    return rows.with_columns({"observations": {**observations, **columns}})
