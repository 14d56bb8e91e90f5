"""Numbers that are not finite: they stop a training before a step is taken on them, and the error names them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from whence.core import NonFinite, WhenceError, first_line, target_name
from whence.engines import Gradient, Problem, record_gradient, target_gradients


@contextmanager
def name_round(number: int) -> Iterator[None]:
    """Add the number of the round, from 1, to a `NonFinite` that is raised inside."""
    try:
        yield
    except NonFinite as error:
        if error.round is not None:
            raise
        about = {"record_ids": error.record_ids, "parameter": error.parameter}
        raise NonFinite(str(error), **about, round=number) from error  # type: ignore[arg-type]


def measure_gradients(params: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the norm of the gradient of each parameter that has one, by name."""
    gradients = {name: param.grad for name, param in params if param.grad is not None}
    return dict(zip(gradients, torch._foreach_norm(list(gradients.values())), strict=True)) if gradients else {}


def check_gradients(
    norms: Mapping[str, Tensor], batch: str, record_ids: Iterable[int] = (), loss: Tensor | None = None
) -> None:
    """Refuse a loss or gradients before the optimiser's step on them, with a `NonFinite` that names the parameter.

    Args:
        norms: the norm of each parameter's gradient; see `measure_gradients`.
        batch: what they are of, such as "a minibatch of 32 records".
        record_ids: the ids of these records.
        loss: the loss that they are the gradient of, if it is at hand.
    """
    values = list(norms.values())
    # One look at the sum, since each look at a number waits for the device.
    are_finite = not values or bool(torch.stack([norm.to(values[0].device) for norm in values]).sum().isfinite())
    if are_finite and (loss is None or bool(loss.isfinite())):
        return
    broken = next((name for name, norm in norms.items() if not norm.isfinite()), None)
    what, where = ("loss", "") if broken is None else ("gradient", f" in the parameter `{broken}`")
    raise NonFinite(
        f"the {what} of {batch} is not finite{where}. The step was not taken: parameters and optimiser are as before "
        "it. Look at these records, lower the learning rate, or scale the rewards down.",
        record_ids=record_ids,
        parameter=broken,
    )


def check_parameters(params: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse, with a `NonFinite` that names it, a parameter that is not finite after a round's steps."""
    broken = next((name for name, param in params if not torch.isfinite(param.detach()).all()), None)
    if broken is not None:
        raise NonFinite(
            f"a step made the parameter `{broken}` not finite. Lower the learning rate, and train again from a "
            "checkpoint.",
            parameter=broken,
        )


@contextmanager
def raise_if_refused(what: str, remedy: str) -> Iterator[None]:
    """Raise a `NonFinite`: `what` diverged, and `remedy`; if torch's distributions refuse a policy's outputs inside."""
    try:
        yield
    except ValueError as error:
        is_other = isinstance(error, WhenceError) and not isinstance(error, NonFinite)
        if is_other or "to satisfy the constraint" not in str(error):
            raise
        raise NonFinite(
            f"{what} diverged: the policy's outputs no longer form a distribution ({first_line(error)}). {remedy}"
        ) from error


def check_scores(products: Float[Tensor, "targets n"], problem: Problem) -> None:
    """Refuse scores that are not finite, with a `NonFinite` that names record and parameter."""
    if math.isfinite(products.sum()):  # finite only if every term is, and cheaper to check
        return
    finite = torch.isfinite(products).all(dim=0)
    if finite.all():
        return
    alone = replace(problem, summed=None)  # other processes may have finite scores, and would not join a sum
    for target, gradient in zip(problem.targets, target_gradients(alone), strict=True):
        if names := _find_not_finite(gradient):
            raise NonFinite(
                f"The gradient of the target {target_name(target)} is not finite in the parameter `{names[0]}`, so no "
                "score is. The policy has diverged, or the target has no derivative there: look at the last update's "
                "learning rate and at the policy's log-probs.",
                parameter=names[0],
            )
    position = int((~finite).nonzero()[0])
    names = _find_not_finite(record_gradient(problem, position))
    where = f"its gradient is not finite in the parameter `{names[0]}`" if names else "its product overflows"
    raise NonFinite(
        f"The score of record {int(problem.records.ids[position])} is not finite, nor are those of "
        f"{int((~finite).sum()) - 1} of the other {len(finite) - 1}: {where}. Look at that record's observation, "
        "log-prob and advantage; a ratio that overflows means that another policy took these actions.",
        record_ids=problem.records.ids[~finite].tolist(),
        parameter=names[0] if names else None,
    )


def _find_not_finite(gradient: Gradient) -> list[str]:
    return [name for name, tensor in gradient.items() if not torch.isfinite(tensor).all()]
