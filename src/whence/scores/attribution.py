"""Scores of records: which of them raise a target, which lower it (LDA §3)."""

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from whence.core import (
    BatchTarget,
    Objective,
    RecordBatch,
    Target,
    Unit,
    Unsupported,
    WhenceError,
    as_objective,
    as_target,
    as_view,
    check_records,
    check_unit,
    eval_mode,
    label_units,
    library_versions,
    preserve_attributes,
    preserve_rng_state,
    target_name,
    train_mode,
)
from whence.engines import (
    ENGINES,
    Problem,
    Summed,
    add_masks,
    check_memory,
    check_mixing,
    choose_memory,
    is_in_shards,
    release_whole,
    solve,
    subtract_own_parts,
)
from whence.scores.folds import (
    NoMean,
    balance_folds,
    check_batch_target,
    check_mean,
    check_mean_target,
    count_folds,
    split_target,
    standard_errors,
    usable_folds,
)
from whence.scores.influence import Influence, Provenance
from whence.scores.nonfinite import check_scores

log = logging.getLogger("whence")

K = TypeVar("K", bound=Hashable)


@overload
def attribute(
    policy: object,
    records: RecordBatch,
    *,
    target: Mapping[str, Target],
    objective: Objective | None = ...,
    engine: str = ...,
    memory: int | None = ...,
    folds: int | None = ...,
    leave_one_out: Unit | None = ...,
) -> dict[str, Influence]: ...
@overload
def attribute(
    policy: object,
    records: RecordBatch,
    *,
    target: Target,
    objective: Objective | None = ...,
    engine: str = ...,
    memory: int | None = ...,
    folds: int | None = ...,
    leave_one_out: Unit | None = ...,
) -> Influence: ...
def attribute(
    policy: object,
    records: RecordBatch,
    *,
    target: Target | Mapping[str, Target],
    objective: Objective | None = None,
    engine: str = "auto",
    memory: int | None = None,
    folds: int | None = None,
    leave_one_out: Unit | None = None,
) -> Influence | dict[str, Influence]:
    """Score every record by `<grad target, grad objective_i>` at the present policy (LDA §3.3; snapshot).

    A positive score says that training on the record raises the target. Scoring changes neither the policy with its
    gradients, modes and hooks, nor the records, nor any random generator, even if it raises. Modules are in eval mode
    during scoring.

    Args:
        policy: a policy of a supported library, or a `PolicyView`.
        records: the round's records; floating columns are used in the dtype they have.
        target: what to raise: `Return()`, `Action(...)` or a function `(view, params, records) -> scalar`; or a
            mapping from names to targets, which share one pass over the records.
        objective: what the round's optimisation raises, one value per record. None: `PPOClip()`.
        engine: "auto", "ghost", "forward", "vmap" or "loop"; see Concepts in the documentation.
        memory: bytes that scoring may hold at a time, without the policy and the records. The cost of a record is
            measured on a few of them, once per policy. Tensors of a target that runs the policy itself are not counted.
            None: a quarter of the GPU's memory, or half of what is free if that is less; on a CPU 2 GiB.
        folds: give each score a standard error over so many folds of the target's episodes, such as 8; None: scores
            have no errors. Where one pass holds all records, scores are the same bits either way. It takes about four
            times as long, and needs a target that reads the scored records, as `Return` does.
        leave_one_out: score each record by the mean over the other units alone: "record", "episode", "row" or "group".
            The target is then a mean over the scored records, as `Return` is. A unit's own part of the target raises
            its score: of a mean objective by the square of its gradient. A unit without others scores 0. None: the
            target is over all records.

    Returns:
        The `Influence`: scores (n,) on the CPU in the policy's dtype. For a mapping of targets, a dict of influences.

    Raises:
        Unsupported: whence cannot read this kind of policy, or its outputs for a record depend on other records.
        InvalidRecords: `records` is no `RecordBatch`.
        NonFinite: a gradient or score is not finite; the message names record and parameter.
        WhenceError: a target depends on no parameter, the engine is unknown, or it refuses the policy; `folds` has
            too few episodes or a target that reads no records; or `leave_one_out` a target that is no mean, or `folds`.
    """
    check_records(records)
    by_name = dict(target) if isinstance(target, Mapping) else {"": target}
    if not by_name:
        raise WhenceError("target is an empty mapping; name at least one target, such as {'return': Return()}.")
    if folds is not None and leave_one_out is not None:
        raise WhenceError(
            f"folds is {folds} and leave_one_out is {leave_one_out!r}: errors are of scores by the whole target. Leave "
            "out one of them."
        )
    targets: dict[Any, Target] = {(name, None): each for name, each in by_name.items()}
    if folds is not None:
        parts = {name: check_batch_target(as_target(each)) for name, each in by_name.items()}
        fold = balance_folds(records, folds)
        targets |= {(name, part): each for name in parts for part, each in split_target(parts[name], fold).items()}
    scored = score_targets(
        policy, records, targets, objective=objective, engine=engine, memory=memory, leave_one_out=leave_one_out
    )
    influences = {name: scored[name, None] for name in by_name}
    if folds is not None:
        for name, each in by_name.items():
            by_fold = [part for key, part in scored.items() if key[0] == name and key[1] is not None]
            influences[name] = join_folds(influences[name], by_fold, records, fold, each)
    return influences if isinstance(target, Mapping) else influences[""]


def score_targets(
    policy: object,
    records: RecordBatch,
    targets: Mapping[K, Target],
    *,
    objective: Objective | None = None,
    engine: str = "auto",
    memory: int | None = None,
    chunk_size: int | None = None,
    summed: Summed | None = None,
    leave_one_out: Unit | None = None,
) -> dict[K, Influence]:
    """Score records as `attribute` does, whose arguments the others are, for at least one target by its name.

    Args:
        chunk_size: the most records in one pass; None: as many as `memory` allows, which is not read otherwise. Scores
            do not depend on it.
        summed: takes a gradient, one tensor per parameter, and returns its sum over the processes, each of which
            scores a part of the records, and whole units. Their targets then add up to the quantity to raise.
    """
    check_memory(memory)
    if leave_one_out is not None:
        check_unit(leave_one_out)
        for each in targets.values():
            check_mean_target(each)
    with open_problem(
        policy, records, targets=[*targets.values()], objective=objective, chunk_size=chunk_size, summed=summed
    ) as problem:
        limit = None
        if chunk_size is None:
            limit = choose_memory(next(iter(problem.params.values())).device) if memory is None else memory
        products, engine, reason = solve(problem, engine, limit)
        if leave_one_out is not None:
            products = subtract_own_parts(problem, products, label_units(records, leave_one_out), engine, limit)
        check_scores(products, problem)
    provenance = Provenance(
        target="",
        objective=repr(problem.objective),
        engine=engine,
        engine_reason=reason,
        parameters=tuple(problem.params),
        records=records.fingerprint,
        versions=library_versions(("whence", "torch")),
    )
    return {
        name: Influence(
            scores=row.detach().cpu().clone(),
            record_ids=records.ids.cpu().clone(),
            provenance=replace(provenance, target=name_target(each, leave_one_out)),
        )
        for (name, each), row in zip(targets.items(), products, strict=True)
    }


def name_target(target: Target, leave_one_out: Unit | None) -> str:
    """Return a target's name for provenance, with the units that it is over."""
    return target_name(target) + ("" if leave_one_out is None else f" over the other {leave_one_out}s")


def join_folds(
    influence: Influence, by_fold: Iterable[Influence], records: RecordBatch, fold: Int[Tensor, " n"], target: Target
) -> Influence:
    """Return an influence of all records with the standard errors of its scores over folds of the target's episodes.

    `by_fold` are the influences on the target's parts by `split_target`, whose folds are `fold`. A target that is no
    mean over the records is a `NoMean`.
    """
    scores, sizes = torch.stack([each.scores for each in by_fold]), fold.bincount()
    check_mean(target_name(target), influence.scores, scores, sizes)
    errors = standard_errors(influence.scores, scores, sizes, count_folds(fold, label_units(records, "episode")))
    return replace(influence, errors=errors, by_fold=scores.T.contiguous(), folds=fold.to(torch.int16))


def estimate_errors(
    policy: object,
    influence: Influence | None,
    records: RecordBatch,
    target: Target,
    folds: int | None,
    logged: set[str],
    **settings: Any,
) -> Influence | None:
    """Return snapshot scores of a rollout with errors over folds of its episodes; unchanged where there can be none.

    A target that is no mean over records has none, which is logged once, and noted in `logged`. The settings are the
    `objective`, `engine` and `memory` that the records were scored with.
    """
    if influence is None or influence.errors is not None or "errors" in logged:
        return influence
    usable = usable_folds(target, records, folds)
    is_snapshot = influence.provenance.target == target_name(target) and influence.engine in ENGINES
    if usable is None or not is_snapshot or len(influence) != len(records):
        return influence
    fold = balance_folds(records, usable)
    by_fold = score_targets(policy, records, split_target(check_batch_target(target), fold), **settings)
    try:
        return join_folds(influence, by_fold.values(), records, fold, target)
    except NoMean as reason:
        _warn_of_no_errors(reason, logged)
        return influence


def attribute_with_errors(
    policy: object, folds: int | None, logged: set[str], records: RecordBatch, *, target: Target, **settings: Any
) -> Influence:
    """Return what `attribute` does with folds, in one pass; without errors where there can be none, as above."""
    usable = None if "errors" in logged else usable_folds(target, records, folds)
    try:
        return attribute(policy, records, target=target, folds=usable, **settings)
    except NoMean as reason:
        _warn_of_no_errors(reason, logged)
        return attribute(policy, records, target=target, **settings)


def _warn_of_no_errors(reason: NoMean, logged: set[str]) -> None:
    logged.add("errors")
    log.warning("Scores are written without errors. %s", reason)


@contextmanager
def open_problem(
    policy: object,
    records: RecordBatch,
    *,
    targets: Sequence[Target],
    objective: Objective | None = None,
    chunk_size: int | None = None,
    summed: Summed | None = None,
) -> Iterator[Problem]:
    """Yield the problem that engines solve; the policy's modules are in eval mode inside, and generators are restored.

    The arguments are those of `score_targets`; without a `chunk_size`, all records are in one pass.

    Raises:
        Unsupported: whence cannot read this kind of policy, or its outputs for a record depend on other records.
    """
    view, objective = as_view(policy), as_objective(objective)
    targets = [
        each.with_objective(objective) if isinstance(each, BatchTarget) else each for each in map(as_target, targets)
    ]
    modules = dict(view.module.named_modules())
    with (
        preserve_rng_state(),
        preserve_attributes(modules.values()),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        release_whole(modules.values())
        # Fresh leaves that share the parameters' memory: the user's hooks and gradients never see whence's graphs.
        parameters = view.parameters()
        params = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        if not params:
            raise WhenceError(
                f"The policy ({type(view.module).__name__}) has no trainable parameter: every requires_grad is False, "
                "so no record can move it. Unfreeze the parameters that training moves."
            )
        if complex_names := [name for name, parameter in params.items() if parameter.is_complex()]:
            raise Unsupported(
                f"The parameter `{complex_names[0]}` is complex, and scores are products of real gradients. Hold it as "
                "a real parameter of shape (..., 2), and call torch.view_as_complex on that in the forward pass."
            )
        records = records.to(next(iter(params.values())).device)
        prepared, size = objective.prepare(records), chunk_size or len(records)
        summed = add_masks(parameters, summed)
        problem = Problem(view, modules, parameters, params, records, prepared, objective, targets, size, summed=summed)
        _check_mixing(problem, view.module if view.in_train_mode else None)
        with eval_mode(modules.values()):
            yield problem


def _check_mixing(problem: Problem, module: nn.Module | None) -> None:
    """Refuse a policy that mixes records in its present modes, or if `module` is given in its train mode."""
    if is_in_shards(problem.parameters.values()):
        return
    dropouts = [each for each in problem.modules.values() if isinstance(each, _DropoutNd)]
    with nullcontext() if module is None else train_mode(module), eval_mode(dropouts):
        check_mixing(problem)
