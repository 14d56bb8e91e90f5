"""Targets without a record's own unit: products with the unit's part of a target, which are taken away."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.core import MeanTarget, Outputs, RecordBatch, Unsupported, WrappedTarget
from whence.engines.auto import ENGINES, run_engine
from whence.engines.memory import is_out_of_memory
from whence.engines.parameters import add_masks, is_in_shards
from whence.engines.problem import (
    Gradient,
    Problem,
    Refused,
    add_gradients,
    bind_batch_targets,
    compute_seeds,
    pullback,
)
from whence.engines.tape import Tape, covered_layers, record_pass


@dataclass(frozen=True, eq=False)
class _Part(WrappedTarget):
    """The sum of the records' values of a `MeanTarget`, each with its weight; None: 1."""

    target: MeanTarget
    weights: Float[Tensor, " n"] | None = None

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        values = self.target.values(outputs, records)
        return (values if self.weights is None else self.weights * values).sum()


def subtract_own_parts(
    problem: Problem, products: Float[Tensor, "targets n"], units: Int[Tensor, " n"], engine: str, memory: int | None
) -> Float[Tensor, "targets n"]:
    """Return the products with means over the other units than each record's own; 0 where there are none.

    A mean over the others is `(total mean - own part) / (total - own weight)`, of the weights of all records. The
    targets are each a `MeanTarget`, and units are numbers from 0. Parameters in shards raise an `Unsupported`.
    """
    if is_in_shards(problem.parameters.values()):
        raise Unsupported(
            "leave_one_out needs whole parameters in each process, and here they are in shards (FSDP2, ZeRO stage 3): "
            "train with a copy in each, or leave it out."
        )
    targets: Any = problem.targets
    weights = torch.stack([target.weights(problem.read_by(target)) for target in targets])
    own_weights = torch.zeros_like(weights).index_add(1, units.to(weights.device), weights)[:, units]
    totals = weights.new_tensor([target.total or 0.0 for target in targets])
    totals = torch.where(totals > 0, totals, weights.sum(1))[:, None]
    # Rounding leaves something of a total that one unit has whole.
    others = torch.where(totals - own_weights > 1e-6 * totals, totals - own_weights, torch.inf)
    own_parts = _solve_own_parts(problem, weights, units, engine, memory).to(products)
    difference = totals * products - own_parts
    # Rounding alone would give a sign to the score of a unit whose others have no gradient.
    is_rounding = difference.abs() <= 16 * torch.finfo(products.dtype).eps * own_parts.abs()
    return (difference.masked_fill(is_rounding, 0) / others).to(products)


def _solve_own_parts(
    problem: Problem, weights: Float[Tensor, "targets n"], units: Int[Tensor, " n"], engine: str, memory: int | None
) -> Float[Tensor, "targets n"]:
    """Return each record's products with the gradients of its own unit's part of each target.

    A part is the sum over the unit's records of `weight * value`. A record that is a unit of its own needs no pass of
    its own where every parameter belongs to a layer with a rule; other units are problems of their own.
    """
    masks = add_masks(problem.parameters, None)
    whole = [_Part(cast(MeanTarget, target)) for target in problem.targets]
    problem = replace(problem, targets=whole, summed=masks)
    if engine == "ghost" and masks is None and len(units.unique()) == len(units):
        try:
            return weights * run_engine(problem, _solve_record_by_record, memory)
        except (Refused, RuntimeError) as failure:  # a rule of the user's may not run under vmap
            if is_out_of_memory(failure):
                raise
    positions, columns = [], []
    for number in units.unique():
        index = (units == number).nonzero().flatten().to(weights.device)
        parts = [replace(part, weights=each[index]) for part, each in zip(whole, weights, strict=True)]
        columns.append(run_engine(replace(problem.part(index), targets=parts), ENGINES[engine], memory))
        positions.append(index)
    return torch.cat(columns, dim=1)[:, torch.cat(positions).argsort()]


def _solve_record_by_record(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return each record's product with its own gradient of each target, or raise `Refused`, as an engine does."""
    layers, columns = covered_layers(problem.modules, problem.parameters), []
    for part in problem.parts():
        tape = record_pass(part, layers)
        if tape.plain:
            raise Refused(f"The parameter `{tape.plain[0]}` belongs to no layer.")
        seeds = compute_seeds([part.objective_values, *bind_batch_targets(part)], tape.outputs)
        edges = [call.edge for call in tape.calls]
        ones, *others = (pullback(tape.outputs, seed, edges, retain=True) for seed in seeds)
        columns.append(torch.stack([_multiply_records(tape, ones, of_target) for of_target in others]))
    return torch.cat(columns, dim=1)


def _multiply_records(
    tape: Tape, ones: Sequence[Tensor | None], others: Sequence[Tensor | None]
) -> Float[Tensor, " n"]:
    """Return the product of each record's two gradients, given by the gradients in the output of each call, or None."""
    rows = []
    for call, one, other in zip(tape.calls, ones, others, strict=True):
        reached = one if one is not None else other
        if reached is not None:
            none = torch.zeros_like(reached)
            rows.append((call.layer, call.x, none if one is None else one, none if other is None else other))
    layers, *columns = zip(*rows, strict=True)

    def multiply(xs: Sequence[Tensor], ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        gradient: Gradient = {}
        for layer, x, g in zip(layers, xs, others, strict=True):
            gradient = add_gradients(gradient, {**layer.gradient(x[None], g[None], None)})
        products = [layer.product(gradient, x[None], g[None]) for layer, x, g in zip(layers, xs, ones, strict=True)]
        return torch.cat(products).sum()

    numbers = sum(parameter.numel() for parameter in tape.problem.params.values())
    with torch.no_grad():
        # A record's whole gradient is made, so that large ones are made one after the other.
        products: Tensor = torch.vmap(multiply, chunk_size=max(1, _MOST_NUMBERS // numbers))(*columns)
        return products


_MOST_NUMBERS = 2**22
