"""Activations of a language model at its responses, for the finder of `studies.planted.activations`."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from studies.planted.activations import compare_activations
from studies.planted.judging import Floats
from whence.core import RecordBatch, eval_mode
from whence.lab.language import solution
from whence.llm import language_view
from whence.runs import RunDirectory
from whence.stored.language import Task, load_trained_task, make_response_target
from whence.stored.language.rounds import make_stored_rows

BATCH = 64
"""Responses that the model reads at once."""


def compare_responses(
    directory: RunDirectory, questions: Sequence[tuple[str, str]], *, middle: bool, project: bool
) -> Floats:
    """Return the similarity of all responses of a run with wrong answers, as against the right ones, (n,).

    Args:
        directory: the run.
        questions: problems with their wrong answers.
        middle: take the middle layer; else the last one.
        project: see `compare_activations`.
    """
    trained = load_trained_task(directory)
    assert trained is not None
    task, _ = trained
    count = task.model.config.num_hidden_layers
    layer = (1 + count) // 2 if middle else count
    right = [(problem, ";".join(solution(problem))) for problem, _ in questions]
    tables = [directory.round("records", number) for number in directory.rounds()]
    rows = [make_stored_rows(table, task.tokenizer, task.model.device) for table in tables]
    activations = torch.cat([read_residual(task.model, each, layer) for each in rows])
    ends = (_read_pairs(task, pairs, layer) for pairs in (questions, right))
    return compare_activations(activations, *ends, project=project)


def _read_pairs(task: Task, pairs: Sequence[tuple[str, str]], layer: int) -> Float[Tensor, "m d"]:
    rows = make_response_target(task, pairs).rows
    assert rows is not None
    return read_residual(task.model, rows, layer)


def read_residual(model: Any, rows: RecordBatch, layer: int) -> Float[Tensor, "n d"]:
    """Return the residual stream after a layer, counted from 1, as the mean over each response's tokens."""
    view, means = language_view(model), []
    with torch.no_grad(), eval_mode(model.modules()):
        for first in range(0, len(rows), BATCH):
            inputs: Any = view.prepare(rows.take(slice(first, first + BATCH)))
            columns = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
            stream = model(**columns, output_hidden_states=True, use_cache=False).hidden_states[layer]
            mask = inputs["response_mask"][:, :, None].float()
            means.append((stream[:, -mask.shape[1] :].float() * mask).sum(1) / mask.sum(1))
    return torch.cat(means)
