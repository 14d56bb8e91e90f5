"""Scores of a rollout's rows, in one process or several, and their parts: by tokens, and by the target's rows.

A response's objective is a sum of terms, one for each of its tokens (PPO: the mean of the tokens' clipped objectives).
So the gradient of the response is a sum over its tokens, and so is its score: the part of token t is
`<grad target, grad term_t>`. It says whether training on this token, as the response does with its advantage, clipping
and weights, raises the target or lowers it; it counts the term where it is predicted, not where in the sequence the
parameters' gradient arises. The parts of a response sum to its score.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.attribution import Summed, open_problem, score_targets
from whence.core import (
    NonFinite,
    Objective,
    RecordBatch,
    Target,
    Unsupported,
    WhenceError,
    as_objective,
    is_in_shards,
    target_name,
)
from whence.engines import (
    Gradient,
    Problem,
    compute_seeds,
    outputs_along,
    record_gradient,
    target_gradients,
)
from whence.influence import Influence
from whence.layers import Layers, choose_parameters, restrict_view
from whence.llm.base import ONE, Processes, language_view
from whence.llm.scores.language_targets import Along, split_mean, target_share
from whence.llm.scores.token_objectives import TokenPPO


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the rows of a rollout are scored.

    Attributes:
        target: the target.
        objective: the objective of a row's training.
        temperature: the sampling temperature of the responses.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold at a time, in each process; None: those that `chunk_size` rows take.
        chunk_size: rows that are scored at a time if no memory is given.
        processes: the processes; each scores a part of the rows.
        layers: the layers to score by; see `whence.attribute`.
        autocast: score in the precision of training by Accelerate, instead of the model's own.
    """

    target: Target
    objective: Objective
    temperature: float
    engine: str
    memory: int | None
    chunk_size: int
    processes: Processes = ONE
    layers: Layers | None = None
    autocast: bool = False

    def check(self, model: Any) -> None:
        """Refuse layers that a model does not have, and scores in float16.

        Raises:
            WhenceError: see above.
        """
        if self.autocast and getattr(self.processes.accelerator, "mixed_precision", "no") == "fp16":
            raise WhenceError(
                "autocast scores in the precision of training, which is float16: small gradients would be 0 there. "
                "Train in bfloat16 (mixed_precision='bf16'), or leave autocast off."
            )
        if self.layers is not None:
            trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            choose_parameters(model, trained, self.layers)

    def describe(self) -> dict[str, Any]:
        """Return the settings that make scores cheaper, by their names in JSON types, where they are set."""
        layers = self.layers if isinstance(self.layers, int | str | None) else list(self.layers)
        settings = {"layers": layers, "autocast": self.autocast or None}
        return {name: value for name, value in settings.items() if value is not None}


def score(model: Any, rows: RecordBatch, scoring: Scoring) -> Influence:
    """Return the influence of every row on a target, in every process.

    Args:
        model: the model; its parameters that train are scored.
        rows: all rows of the rollout, in every process.
        scoring: how they are scored.
    """
    processes, accelerator = scoring.processes, scoring.processes.accelerator
    local_rows, local_target, reduce = split_work(rows, scoring.target, processes)
    limits: Any = {"chunk_size": scoring.chunk_size} if scoring.memory is None else {"memory": scoring.memory}
    with accelerator.autocast() if scoring.autocast and accelerator is not None else nullcontext():
        influence = score_targets(
            restrict_view(language_view(model, temperature=scoring.temperature), scoring.layers),
            local_rows,
            {"": local_target},
            objective=scoring.objective,
            engine=scoring.engine,
            summed=reduce,
            **limits,
        )[""]
    if processes.number == 1:
        return influence
    device = next(iter(model.parameters())).device
    return Influence(
        processes.gather(influence.scores.to(device), len(rows)).cpu(),
        rows.ids.cpu().clone(),
        replace(influence.provenance, target=target_name(scoring.target), records=rows.fingerprint),
    )


def split_work(rows: RecordBatch, target: Target, processes: Processes) -> tuple[RecordBatch, Target, Summed | None]:
    """Return a process's rows, its share of the target, and what sums gradients; None: there is one process."""
    if processes.number == 1:
        return rows, target, None
    share = target_share(target, rows, processes.rank, processes.number)
    return rows.take(processes.part(len(rows))), share, processes.sum_tensors


def score_tokens(
    model: Any,
    rows: RecordBatch,
    *,
    target: Target,
    objective: Objective | None = None,
    temperature: float = 1.0,
    chunk_size: int = 16,
    layers: Layers | None = None,
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
        layers: the layers that the scores are of; see `whence.attribute`.

    Returns:
        (n, R) on the CPU, 0 where there is no response token.

    Raises:
        Unsupported: processes hold the parameters in shards.
        NonFinite: a part is not finite.
        NotImplementedError: torch has no forward mode for one of the model's kernels.
    """
    view = restrict_view(language_view(model, temperature=temperature), layers)
    if is_in_shards(view.parameters().values()):
        raise Unsupported(
            "The parameters are in shards, and tokens' parts of scores need them whole: score them in one process "
            "(whence llm why)."
        )
    objective = TokenPPO() if objective is None else as_objective(objective)
    with open_problem(view, rows, targets=[target], objective=objective) as problem:
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
        WhenceError: the target is no mean over rows, or there is no such position.
    """
    if not 0 <= position < len(rows):
        raise WhenceError(f"position is {position}, and there are {len(rows)} rows: one from 0 to {len(rows) - 1}.")
    mean_rows, terms = split_mean(target, rows)
    view = language_view(model, temperature=temperature)
    objective = TokenPPO() if objective is None else as_objective(objective)
    with open_problem(view, rows, targets=[target], objective=objective) as problem:
        gradient = record_gradient(problem, position)
    if not gradient:  # an empty response
        return torch.zeros(len(mean_rows))
    # A product is the same with its sides exchanged: the target's rows are scored by the response's gradient.
    return score_targets(view, mean_rows, {"": Along(gradient)}, objective=terms, chunk_size=chunk_size)[""].scores
