"""Parts of a response's score: by its tokens, and by the target's rows.

A response's objective is a sum of terms, one for each of its tokens (PPO: the mean of the tokens' clipped objectives).
So the gradient of the response is a sum over its tokens, and so is its score: the part of token t is
`<grad target, grad term_t>`. It says whether training on this token, as the response does with its advantage, clipping
and weights, raises the target or lowers it; it counts the term where it is predicted, not where in the sequence the
parameters' gradient arises. The parts of a response sum to its score.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.core import NonFinite, Objective, RecordBatch, Target, Unsupported, as_objective
from whence.engines import (
    ENGINES,
    Along,
    Gradient,
    Problem,
    Refused,
    check_against_loop,
    compute_seeds,
    is_in_shards,
    outputs_along,
    record_gradient,
    target_gradients,
)
from whence.llm.base import language_view
from whence.llm.scores.language_targets import split_mean
from whence.llm.scores.token_objectives import TokenPPO
from whence.scores import open_problem, score_targets


def score_tokens(
    model: Any,
    rows: RecordBatch,
    *,
    target: Target,
    objective: Objective | None = None,
    temperature: float = 1.0,
    chunk_size: int = 16,
) -> Float[Tensor, "n R"]:
    """Return the part of each response's score that each of its tokens contributes; a response's parts sum to it.

    The part of a token is the product of the target's gradient with the gradient of the token's own term of the
    objective. Above 0: training on the token raises the target. All parts come from one pass in forward mode along the
    target's gradient.

    Args:
        model: a causal language model; its parameters that train are scored. See `language_view`.
        rows: the rows of `make_rows`.
        target: the target; see `whence.attribute`.
        objective: the objective of a row's training; None: `TokenPPO()`. Its value has to depend on a token through
            the outputs at that token's position.
        temperature: the sampling temperature of the responses.
        chunk_size: rows of a pass.

    Returns:
        (n, R) on the CPU, 0 where there is no response token.

    Raises:
        Unsupported: processes hold the parameters in shards, or forward mode differs from a backward pass.
        NonFinite: a part is not finite.
    """
    view = language_view(model, temperature=temperature)
    if is_in_shards(view.parameters().values()):
        raise Unsupported(
            "The parameters are in shards, and tokens' parts of scores need them whole: score them in one process "
            "(whence why)."
        )
    objective = TokenPPO() if objective is None else as_objective(objective)
    with open_problem(view, rows, targets=[target], objective=objective) as problem:
        try:
            check_against_loop(problem, ENGINES["forward"])
        except (Refused, RuntimeError) as refusal:
            raise Unsupported(
                f"Tokens' parts of scores come from forward mode, which is not exact for this model: {refusal}"
            ) from refusal
        (gradient,) = target_gradients(problem := replace(problem, chunk_size=min(chunk_size, len(rows))))
        parts = torch.cat([_parts_along(part, gradient) for part in problem.parts()])
    if not torch.isfinite(parts).all():
        row = int((~torch.isfinite(parts)).any(dim=1).nonzero()[0])
        raise NonFinite(
            f"A token's part of the score of record {int(rows.ids[row])} is not finite. Look at its log-probs "
            "and advantages; a ratio that overflows means that another policy drew the response."
        )
    return parts.cpu()


def _parts_along(problem: Problem, gradient: Gradient) -> Float[Tensor, "n R"]:
    """Return the parts by the chain rule: the objective's derivative in an output times the output's along the target.

    It holds for any objective of the outputs, even one that is no sum over tokens.
    """
    outputs, changes = outputs_along(problem, gradient)
    (seeds,) = compute_seeds([problem.objective_values], outputs)
    pairs = zip(seeds, changes, strict=True)
    terms = [seed * change for seed, change in pairs if seed is not None and change is not None]
    return torch.stack(terms).sum(dim=0) if terms else torch.zeros_like(outputs.log_prob)


def score_target_rows(
    model: Any,
    rows: RecordBatch,
    position: int,
    *,
    target: Target,
    objective: Objective | None = None,
    temperature: float = 1.0,
    chunk_size: int = 16,
) -> Float[Tensor, " m"]:
    """Return the part of one response's score that each row of the target contributes; they sum to the score.

    The target is a mean over rows: demonstrations (`ValidationLoss`), held-out rows, or the scored rows themselves.
    Above 0: training on the response raises this row's term of the target. It costs the response's gradient and one
    scoring of the target's rows. The other arguments are those of `score_tokens`.

    Args:
        rows: the scored rows.
        position: the position of the response in them.
        target: a `SequenceReturn`, `TokenReturn` or `ValidationLoss`.

    Returns:
        (m,) on the CPU, in the order of the target's rows.

    Raises:
        WhenceError: the target is no mean over rows.
    """
    mean_rows, terms = split_mean(target, rows)
    view = language_view(model, temperature=temperature)
    objective = TokenPPO() if objective is None else as_objective(objective)
    with open_problem(view, rows, targets=[target], objective=objective) as problem:
        gradient = record_gradient(problem, position)
    if not gradient:  # an empty response
        return torch.zeros(len(mean_rows))
    # A product is the same with its sides exchanged: the target's rows are scored by the response's gradient.
    return score_targets(view, mean_rows, {"": Along(gradient)}, objective=terms, chunk_size=chunk_size)[""].scores
