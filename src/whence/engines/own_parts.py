"""Targets without a record's own unit: products with the unit's part of a target, which are taken away."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.core import COLUMNS, BatchTarget, Outputs, RecordBatch, Unsupported, is_in_shards
from whence.engines.auto import ENGINES, run_engine
from whence.engines.ghost import find_factors
from whence.engines.gradient_masks import add_masks
from whence.engines.problem import Problem, Refused, Seeds, bind_batch_targets, compute_seeds, pullback
from whence.engines.rules import Factors, dot
from whence.engines.tape import Tape, covered_layers, record_pass


@dataclass(frozen=True, eq=False)
class _Part(BatchTarget):
    """The sum of the records' values of a `MeanTarget`, each with its weight; None: 1."""

    target: Any
    weights: Float[Tensor, " n"] | None = None

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(getattr(self.target, "reads", COLUMNS))

    @property
    def reads_prepared(self) -> bool:
        return bool(getattr(self.target, "reads_prepared", False))

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        values: Tensor = self.target.values(outputs, records)
        return (values if self.weights is None else self.weights * values).sum()


def leave_out(
    problem: Problem, products: Float[Tensor, "targets n"], units: Int[Tensor, " n"], engine: str, memory: int | None
) -> Float[Tensor, "targets n"]:
    """Return the products with means over the other units than each record's own; 0 where there are none.

    A mean over the others is `(total mean - own part) / (total - own weight)`, of the weights of all records.

    Args:
        problem: the problem of a process's records, whose targets are each a `MeanTarget`.
        products: the products with the means over all records.
        units: the unit of each record, from 0.
        engine: the engine that solved the problem, by name.
        memory: see `solve`.

    Raises:
        Unsupported: processes hold the parameters in shards.
    """
    if is_in_shards(problem.parameters.values()):
        raise Unsupported(
            "leave_one_out needs whole parameters in each process, and here they are in shards (FSDP2, ZeRO stage 3): "
            "train with a copy in each, or leave it out."
        )
    targets: Any = problem.targets
    weights = torch.stack([target.weights(problem.read_by(target)) for target in targets])
    own_weights = torch.zeros_like(weights).index_add(1, units.to(weights.device), weights)[:, units]
    totals = weights.new_tensor([getattr(target, "total", None) or 0.0 for target in targets])
    totals = torch.where(totals > 0, totals, weights.sum(1))[:, None]
    # Rounding leaves something of a total that one unit has whole.
    others = torch.where(totals - own_weights > 1e-6 * totals, totals - own_weights, torch.inf)
    own = _solve_own_parts(problem, weights, units, engine, memory).to(products)
    difference = totals * products - own
    # Rounding alone would give a sign to the score of a unit whose others have no gradient.
    is_rounding = difference.abs() <= 16 * torch.finfo(products.dtype).eps * own.abs()
    return (difference.masked_fill(is_rounding, 0) / others).to(products)


def _solve_own_parts(
    problem: Problem, weights: Float[Tensor, "targets n"], units: Int[Tensor, " n"], engine: str, memory: int | None
) -> Float[Tensor, "targets n"]:
    """Return each record's products with the gradients of its own unit's part of each target.

    A part is the sum over the unit's records of `weight * value`. A record that is a unit of its own needs neither its
    gradient nor a pass of its own where every layer has `factors`; other units are problems of their own.
    """
    masks = add_masks(problem.parameters, None)
    whole = [_Part(target) for target in problem.targets]
    problem = replace(problem, targets=whole, summed=masks)
    if engine == "ghost" and masks is None and len(units.unique()) == len(units):
        try:
            return weights * run_engine(problem, _solve_by_factors, memory)
        except Refused:
            pass
    positions, columns = [], []
    for number in units.unique():
        index = (units == number).nonzero().flatten().to(weights.device)
        parts = [replace(part, weights=each[index]) for part, each in zip(whole, weights, strict=True)]
        columns.append(run_engine(replace(problem.part(index), targets=parts), ENGINES[engine], memory))
        positions.append(index)
    return torch.cat(columns, dim=1)[:, torch.cat(positions).argsort()]


_ByParameter = dict[str, list[Factors]]


def _solve_by_factors(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return each record's product with the gradient of its own value of each target, as an engine does.

    Raises:
        Refused: a layer has no factors, or a parameter belongs to no layer.
    """
    layers, columns = covered_layers(problem.modules, problem.parameters), []
    for part in problem.parts():
        tape = record_pass(part, layers)
        if tape.plain or any(layer.rule.factors is None for layer in layers):
            raise Refused("A parameter belongs to no layer, or to one without factors.")
        seed, *own_seeds = compute_seeds([part.objective_values, *bind_batch_targets(part)], tape.outputs)
        gradients = _list_factors(tape, seed)
        columns.append(torch.stack([_multiply_own(tape, seed, gradients, own) for own in own_seeds]))
    return torch.cat(columns, dim=1)


def _multiply_own(tape: Tape, seed: Seeds, gradients: _ByParameter, own: Seeds) -> Float[Tensor, " n"]:
    reads_more = any(column is not None for each in (seed, own) for column in each[1:])
    if reads_more or seed.log_prob is None or own.log_prob is None:
        multiples = None
    else:  # of the objective's gradient, record by record
        multiples = find_factors(own.log_prob, seed.log_prob)
    if multiples is None:
        return _multiply(gradients, _list_factors(tape, own))
    return multiples * _multiply(gradients, gradients)


def _list_factors(tape: Tape, seed: Seeds) -> _ByParameter:
    """Return the factors of the records' gradients, of all calls that use a parameter."""
    by_parameter: _ByParameter = {}
    derivatives = pullback(tape.outputs, seed, [call.edge for call in tape.calls], retain=True)
    for call, g in zip(tape.calls, derivatives, strict=True):
        if g is not None and call.layer.rule.factors is not None:
            with torch.no_grad():
                factors = call.layer.rule.factors(call.layer.module, call.x, g)
            for key, name in call.layer.names.items():
                by_parameter.setdefault(name, []).append(factors[key])
    return by_parameter


def _multiply(ones: _ByParameter, others: _ByParameter) -> Float[Tensor, " n"]:
    """Return the products of the records' gradients with their other gradients."""
    names = ones.keys() & others.keys()
    pairs = [(one, other) for name in names for one in ones[name] for other in others[name]]
    return torch.stack([_multiply_factors(*pair) for pair in pairs]).sum(0)


def _multiply_factors(one: Factors, other: Factors) -> Float[Tensor, " n"]:
    # <sum_s l_s r_s^T, sum_t l_t r_t^T> = sum_st <l_s, l_t> <r_s, r_t>
    if len(one) == 1:
        return dot(one[0], other[0])
    size = max(1, _MOST_NUMBERS // (one[1].shape[1] * other[1].shape[1]))
    blocks = zip(*(tensor.split(size) for tensor in (*one, *other)), strict=True)
    return torch.cat([(_match(a, c) * _match(b, d)).sum((1, 2)) for a, b, c, d in blocks])


_MOST_NUMBERS = 2**22  # of the products of all positions of some records, at a time


def _match(one: Tensor, other: Tensor) -> Float[Tensor, "n s t"]:
    """Return the products of a record's vectors with its other vectors; an integer is a one-hot vector."""
    if one.is_floating_point() and other.is_floating_point():
        return one @ other.mT
    if one.is_floating_point():
        return _match(other, one).mT
    if other.is_floating_point():
        return other.gather(2, one[:, None].expand(-1, other.shape[1], -1)).mT
    same: Tensor = one[:, :, None] == other[:, None]
    return same
