"""Scores of rows, in one process or several, and their parts by tokens and by the target's rows.

A response's objective is a sum of terms, one for each of its tokens (PPO: the mean of the tokens' clipped objectives).
So the gradient of the response is a sum over its tokens, and so is its score: the part of token t is
`<grad target, grad term_t>`. It says whether training on this token, as the response does with its advantage, clipping
and weights, raises the target or lowers it; it counts the term where it is predicted, not where in the sequence the
parameters' gradient arises. The parts of a response sum to its score.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.core import (
    MeanObjective,
    NonFinite,
    Objective,
    Outputs,
    RecordBatch,
    Target,
    Unit,
    Unsupported,
    as_objective,
    eval_mode,
    is_mean,
    rows_of,
)
from whence.engines import (
    ENGINES,
    Along,
    Gradient,
    Problem,
    Refused,
    Summed,
    check_against_loop,
    compute_seeds,
    is_in_shards,
    outputs_along,
    record_gradient,
    target_gradients,
)
from whence.llm.base import ONE, Processes, language_view
from whence.llm.scores.language_targets import SequenceReturn, TokenReturn, split_mean, target_share
from whence.llm.scores.token_objectives import GroupObjective, TokenPPO
from whence.scores import Influence, name_target, open_problem, score_targets
from whence.selection import SelectionRule, score_for


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
        leave_one_out: what a row's own unit leaves out of a target that is a mean over the scored rows: of few rows
            each would vote for itself. None: nothing.
    """

    target: Target
    objective: Objective
    temperature: float
    engine: str
    memory: int | None
    chunk_size: int
    processes: Processes = ONE
    leave_one_out: Unit | None = None


def score(model: Any, rows: RecordBatch, scoring: Scoring, rule: SelectionRule | None = None) -> Influence:
    """Return the scores of a rollout's rows in every process, which has all rows; a rule may bring its own.

    Rows without an advantage whose objective is that alone score 0, and no pass is spent on them.
    """

    def attribute(rows: RecordBatch, **settings: Any) -> Influence:
        return _score_signal(model, rows, replace(scoring, **settings))

    if rule is None:
        return attribute(rows)
    return score_for(rule, rows, attribute, target=scoring.target, objective=scoring.objective)


def _score_signal(model: Any, rows: RecordBatch, scoring: Scoring) -> Influence:
    """Score the rows that have a gradient, by a target over all rows; the others score 0."""
    has_signal = _find_signal(rows, scoring)
    if has_signal.all():
        return _score_rows(model, rows, scoring)
    target: Any = scoring.target
    if rows_of(target) is None:  # a mean over the rows, in which the others count
        scoring = replace(scoring, target=replace(target, total=float(target.weights(rows).double().sum())))
    places = has_signal.nonzero().flatten() if has_signal.any() else torch.arange(1)
    influence = _score_rows(model, rows.take(places), scoring)
    scores = influence.scores.new_zeros(len(rows)).index_copy(0, places.cpu(), influence.scores)
    about = replace(influence.provenance, records=rows.fingerprint)
    return Influence(scores, rows.ids.cpu().clone(), about)


def _find_signal(rows: RecordBatch, scoring: Scoring) -> Bool[Tensor, " n"]:
    """Return which rows have to be scored: those with an advantage; all, where others may have a gradient, too."""
    target, objective = scoring.target, scoring.objective
    follows = isinstance(objective, GroupObjective | TokenPPO) and objective == objective.policy_part()
    over_rows = type(target) in (SequenceReturn, TokenReturn)
    over_rows |= isinstance(target, MeanObjective) and target.unit in ("record", "row")
    columns: Any = rows.observations
    advantages: Tensor = columns["advantages"]
    if follows and (over_rows or rows_of(target) is not None):
        return (advantages != 0).any(dim=1)
    return torch.ones(len(rows), dtype=torch.bool, device=advantages.device)


def _score_rows(model: Any, rows: RecordBatch, scoring: Scoring) -> Influence:
    # A target that is no mean over the rows has none of their votes.
    leave_one_out = scoring.leave_one_out if is_mean(scoring.target) else None
    # Of fewer rows than processes, each process scores all.
    processes = scoring.processes if len(rows) >= scoring.processes.number else ONE
    if processes.number > 1 and "group" in (leave_one_out, getattr(scoring.target, "unit", None)):
        raise Unsupported(
            "The mean over groups, or over other groups, needs all responses to a prompt in one process: score by rows "
            "(unit='row'), or train in one process."
        )
    local_rows, local_target, reduce = split_work(rows, scoring.target, processes)
    limits: Any = {"chunk_size": scoring.chunk_size} if scoring.memory is None else {"memory": scoring.memory}
    influence = score_targets(
        language_view(model, temperature=scoring.temperature),
        local_rows,
        {"": local_target},
        objective=scoring.objective,
        engine=scoring.engine,
        summed=reduce,
        leave_one_out=leave_one_out,
        **limits,
    )[""]
    if processes.number == 1:
        return influence
    device = next(iter(model.parameters())).device
    return Influence(
        processes.gather(influence.scores.to(device), len(rows)).cpu(),
        rows.ids.cpu().clone(),
        replace(influence.provenance, target=name_target(scoring.target, leave_one_out), records=rows.fingerprint),
    )


def evaluate_rows(
    model: Any,
    rows: RecordBatch,
    temperature: float,
    batch_size: int,
    processes: Processes = ONE,
    *,
    with_entropy: bool = False,
) -> Outputs:
    """Return log-probs and values of the rows' response tokens, (n, R), without gradients, in eval mode.

    The model may have a value head. Each process evaluates a part of the rows, and gets the outputs of all.
    """
    view = language_view(model, temperature=temperature)
    wanted = {"log_prob", "value", *(["entropy"] if with_entropy else [])}
    params = {name: parameter.detach() for name, parameter in view.parameters().items()}
    parts, local_rows = [], rows.take(processes.part(len(rows)))
    with torch.no_grad(), eval_mode(model.modules()):
        for first in range(0, len(local_rows), batch_size):
            chunk = local_rows.take(slice(first, first + batch_size))
            parts.append(view.only(wanted, params, view.prepare(chunk)))

    def join(parts: tuple[Any, ...]) -> Any:
        return None if parts[0] is None else processes.gather(torch.cat(parts), len(rows))

    return Outputs(*map(join, zip(*parts, strict=True)))


def add_reference(rows: RecordBatch, reference: Any, temperature: float, batch_size: int) -> RecordBatch:
    """Return rows with the log-probs of a reference model, from which a divergence is measured."""
    columns: Any = rows.observations
    log_probs = evaluate_rows(reference, rows, temperature, batch_size).log_prob
    log_probs = torch.where(columns["response_mask"], log_probs, 0.0)
    return rows.with_columns({"observations": {**columns, "ref_log_probs": log_probs}})


def compute_target_gradient(model: Any, rows: RecordBatch, scoring: Scoring) -> Gradient:
    """Return the gradient of the scoring's target by the parameters' names, in every process; see `score`."""
    local_rows, local_target, reduce = split_work(rows, scoring.target, scoring.processes)
    with open_problem(
        language_view(model, temperature=scoring.temperature),
        local_rows,
        targets=[local_target],
        objective=scoring.objective,
        chunk_size=scoring.chunk_size,
        summed=reduce,
    ) as problem:
        return target_gradients(problem)[0]


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
