"""Which records raise a target, which lower it (LDA §3)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from types import MappingProxyType
from typing import TypeAlias, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.engines import Gradient, Problem, record_gradient, solve, target_gradients
from whence.errors import NonFinite, WhenceError
from whence.guards import eval_mode, preserve_rng_state
from whence.influence import Influence, Provenance
from whence.objectives import Objective, as_objective
from whence.policies import PolicyView, as_view, check_batch_norm
from whence.records import RecordBatch
from whence.targets import Target, as_target, target_name

Summed: TypeAlias = Callable[[Gradient], Gradient]
"""Sums a gradient over processes."""


@overload
def attribute(
    policy: object,
    records: RecordBatch,
    *,
    target: Mapping[str, Target],
    objective: Objective | None = ...,
    engine: str = ...,
    chunk_size: int | None = ...,
    memory: int = ...,
    summed: Summed | None = ...,
) -> dict[str, Influence]: ...
@overload
def attribute(
    policy: object,
    records: RecordBatch,
    *,
    target: Target,
    objective: Objective | None = ...,
    engine: str = ...,
    chunk_size: int | None = ...,
    memory: int = ...,
    summed: Summed | None = ...,
) -> Influence: ...
def attribute(
    policy: object,
    records: RecordBatch,
    *,
    target: Target | Mapping[str, Target],
    objective: Objective | None = None,
    engine: str = "auto",
    chunk_size: int | None = None,
    memory: int = 2**31,
    summed: Summed | None = None,
) -> Influence | dict[str, Influence]:
    """Score every record by `<grad target, grad objective_i>` at the policy as it is (LDA §3.3; snapshot).

    A positive score says that training on the record raises the target. Nothing of the user's is changed: not the
    policy, its gradients, modes and hooks, nor the records, nor any random generator, also when scoring raises.
    Modules are in eval mode while they are scored.

    Args:
        policy: a policy of a supported library, or a `PolicyView`.
        records: the round's records; floating columns are used in the dtype they have.
        target: what to raise: `Return()`, `Action(...)`, a function `(view, params, records) -> scalar`; or a mapping
            of such, which shares one pass over the records.
        objective: what the round's optimisation raises, one value per record. None: `PPOClip()`.
        engine: "auto", "ghost", "forward", "vmap" or "loop"; see Concepts in the documentation.
        chunk_size: the most records in one pass; None: as many as `memory` holds. Scores do not depend on it.
        memory: bytes that scoring may hold at a time, beside the policy and the records. The cost of a record is
            measured on a few of them, once per policy. What a target makes that runs the policy itself is not counted.
        summed: where several processes each score a part of the records: takes a gradient, one tensor per parameter,
            and returns its sum over the processes. Targets are then shares that add up to what is to be raised.

    Returns:
        The `Influence`, scores (n,) on the CPU in the policy's dtype; for a mapping of targets a dict of them.

    Raises:
        Unsupported: the policy is of no kind whence can read, or holds a BatchNorm layer in training mode.
        NonFinite: a gradient or score is not finite; record and parameter are named.
        WhenceError: a target that depends on no parameter, an unknown engine, or an engine that refuses the policy.
    """
    targets = dict(target) if isinstance(target, Mapping) else {"": target}
    if not targets:
        raise WhenceError("target is an empty mapping; name at least one target, such as {'return': Return()}.")
    if chunk_size is not None and chunk_size < 1:
        raise WhenceError(f"chunk_size is {chunk_size}; at least one record has to fit into a pass.")
    view, objective = as_view(policy), as_objective(objective)
    asked = [as_target(one) for one in targets.values()]
    modules = dict(view.module.named_modules())
    check_batch_norm(modules)
    with preserve_rng_state(), eval_mode(modules.values()), torch.inference_mode(False), torch.enable_grad():
        problem = _problem(view, modules, records, objective, asked, chunk_size or len(records), summed)
        products, used, reason = solve(problem, engine, memory if chunk_size is None else None)
        _check_scores(products, problem)
    influences = {
        name: Influence(
            scores=row.detach().cpu().clone(),
            record_ids=records.ids.cpu().clone(),
            provenance=Provenance(
                target=target_name(one),
                objective=repr(objective),
                engine=used,
                engine_reason=reason,
                parameters=tuple(problem.params),
                records=records.fingerprint,
                versions=dict(_versions()),
            ),
        )
        for (name, one), row in zip(targets.items(), products, strict=True)
    }
    return influences if isinstance(target, Mapping) else influences[""]


def _problem(
    view: PolicyView,
    modules: Mapping[str, nn.Module],
    records: RecordBatch,
    objective: Objective,
    targets: list[Target],
    chunk_size: int,
    summed: Summed | None,
) -> Problem:
    # Fresh leaves that share the parameters' memory: hooks and gradients of the user's own never see our graphs.
    own = view.parameters()
    params = {name: parameter.detach().requires_grad_() for name, parameter in own.items()}
    if not params:
        raise WhenceError(
            f"The policy ({type(view.module).__name__}) has no trainable parameter: every requires_grad is False, so "
            "no record can move it. Unfreeze the parameters that training moves."
        )
    device = next(iter(params.values())).device
    records = records.to(device)
    prepared = objective.prepare(records)
    return Problem(view, modules, own, params, records, prepared, objective, targets, chunk_size, summed=summed)


@cache
def _versions() -> Mapping[str, str]:
    return MappingProxyType({package: version(package) for package in ("whence", "torch")})


def _check_scores(products: Float[Tensor, "targets n"], problem: Problem) -> None:
    if math.isfinite(products.sum()):  # finite only where every term is, and cheaper to look at
        return
    finite = torch.isfinite(products).all(dim=0)
    if finite.all():
        return
    alone = replace(problem, summed=None)  # other processes may have met nothing, and would not take part in a sum
    for one, gradient in zip(problem.targets, target_gradients(alone), strict=True):
        if guilty := _not_finite(gradient):
            raise NonFinite(
                f"The gradient of the target {target_name(one)} is not finite in the parameter `{guilty[0]}`, so no "
                "score is. The policy has diverged, or the target has no derivative there: look at the last update's "
                "learning rate and at the policy's log-probs."
            )
    position = int((~finite).nonzero()[0])
    guilty = _not_finite(record_gradient(problem, position))
    where = f"its gradient is not finite in the parameter `{guilty[0]}`" if guilty else "its product overflows"
    raise NonFinite(
        f"The score of record {int(problem.records.ids[position])} is not finite, nor are those of "
        f"{int((~finite).sum()) - 1} of the other {len(finite) - 1}: {where}. Look at that record's observation, "
        "log-prob and advantage; a ratio that overflows means that the records are not of this policy."
    )


def _not_finite(gradient: Gradient) -> list[str]:
    return [name for name, tensor in gradient.items() if not torch.isfinite(tensor).all()]
