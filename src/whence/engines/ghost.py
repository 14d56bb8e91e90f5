"""The ghost engine: products from each layer's input and output gradient, without per-record gradients."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import Node

from whence.core import Outputs, first_line, reads_scored_records
from whence.engines.forward import derive_along
from whence.engines.problem import (
    Gradient,
    Problem,
    Refused,
    Seeds,
    add_gradients,
    bind_batch_targets,
    complete_gradient,
    compute_seeds,
    plain_target_gradient,
    pullback,
    target_gradients,
)
from whence.engines.tape import Call, Tape, count_uses, covered_layers, record_pass

T = TypeVar("T")

# How a problem finds its way. All paths give the same products; an upper one takes fewer passes or less memory.
#
#   ghost
#     |-- all records fit into one pass: _products_from_one_pass
#     |     |-- objective and targets read the log-probs alone, so their gradients share one backward pass:
#     |     |   _products_from_one_quantity
#     |     |     |-- each parameter has one call: _products_during_backward, and nothing is kept
#     |     |     `-- a parameter has several calls (tied weights): _products_from_kept_gradients
#     |     `-- otherwise one backward pass a target, one for the objective: _products_pass_by_pass
#     `-- they do not fit: the targets' gradients first, then part after part by _products_during_backward
#
# Every path ends in _add_plain, which adds the parameters that belong to no layer, by forward mode.

Direction: TypeAlias = Callable[[Call, Tensor], Gradient]
"""Of a call and its output's gradient: a target's gradient in the parameters of the call's layer, or in more."""


def ghost(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return all products from one recorded pass over the records.

    A layer's part of a record's product is the record's output gradient times the change of the layer's output along
    the target's gradient. If objective and target read only the log-probs of these records, one forward and one
    backward pass suffice: both gradients are the same log-prob gradients with different weights. Each further target
    costs its gradient and the products, not another pass.

    Raises:
        Refused: a layer has no rule, a parameter is used outside its layer, or the first axis of a layer is not the
            records'.
    """
    layers = covered_layers(problem.modules, problem.parameters)
    if len(problem.records) <= problem.chunk_size:
        return _products_from_one_pass(record_pass(problem, layers))
    gradients, columns = target_gradients(problem), []
    for part in problem.parts():
        tape = record_pass(part, layers)
        (seed,) = compute_seeds([part.objective_values], tape.outputs)
        products = _products_during_backward(tape, [partial(_known_direction, each) for each in gradients], seed)
        columns.append(_add_plain(products, tape, gradients))
    return torch.cat(columns, dim=1)


def _products_from_one_pass(tape: Tape) -> Tensor:
    """Return the products from a pass over all records, which also gives the batch targets' gradients."""
    problem = tape.problem
    seed, *target_seeds = compute_seeds([problem.objective_values, *bind_batch_targets(problem)], tape.outputs)
    weights = [each.log_prob for each in target_seeds if each.log_prob is not None]
    reads_more = any(each.value is not None or each.entropy is not None for each in (seed, *target_seeds))
    if seed.log_prob is None or reads_more or len(weights) < len(target_seeds):
        return _products_pass_by_pass(tape, seed, target_seeds)
    # Objective and targets depend on the log-probs alone: each is a weighted sum of the records' log-prob gradients.
    quantities = (seed.log_prob, *weights) if weights else ()
    factors = [each for quantity in quantities if (each := _find_factors(quantity, weights[0])) is not None]
    if len(factors) > len(weights):  # each is a multiple of the first target's in every record
        return _products_from_one_quantity(tape, weights[0], factors[0], factors[1:])
    if seed.log_prob.ndim > 1:
        return _products_pass_by_pass(tape, seed, target_seeds)
    return _products_from_one_quantity(tape, torch.ones_like(seed.log_prob), seed.log_prob, weights)


def _products_pass_by_pass(tape: Tape, seed: Seeds, target_seeds: Sequence[Seeds]) -> Tensor:
    """Return the products from one backward pass for each batch target, and one for the objective."""
    params = list(tape.problem.params.values())
    passes = (pullback(tape.outputs, each, params, retain=True) for each in target_seeds)
    of_batch = (add_gradients({}, dict(zip(tape.problem.params, each, strict=True))) for each in passes)
    gradients = _gradients_in_order(tape.problem, of_batch)
    g = pullback(tape.outputs, seed, [call.edge for call in tape.calls], retain=False)
    return _add_plain(torch.stack([_layer_products(tape, g, gradient) for gradient in gradients]), tape, gradients)


def _products_from_one_quantity(tape: Tape, unit: Tensor, weights: Tensor, target_weights: Sequence[Tensor]) -> Tensor:
    """Return the products from one backward pass, where each record's gradients are multiples of one quantity's.

    `unit` are the derivatives of the records' quantities in the log-probs; `weights` the objective's gradients as
    multiples of them, (n,), and `target_weights` those of each batch target.
    """
    if tape.problem.summed is not None or not _has_one_call_each(tape, Seeds(unit)):
        return _products_from_kept_gradients(tape, unit, weights, target_weights)
    directions: list[Direction] = []
    gradients: list[Gradient] = []
    remaining = iter(target_weights)
    for target in tape.problem.targets:
        if reads_scored_records(target):
            of_target = next(remaining)
            directions.append(partial(_weighted_direction, of_target))
            gradients.append(_weighted_plain_gradient(tape, unit, of_target))
        else:
            gradients.append(plain_target_gradient(tape.problem, target))
            directions.append(partial(_known_direction, gradients[-1]))
    products = _products_during_backward(tape, directions, Seeds(unit))
    return _add_plain(weights * products, tape, gradients)


def _has_one_call_each(tape: Tape, seed: Seeds) -> bool:
    """Tell whether each parameter's gradient arrives at one call of its layer, and is whole there."""
    reached = _nodes_reached(tape.outputs, seed)
    counts = Counter(name for call in tape.calls if call.edge.node in reached for name in call.layer.names.values())
    return bool(counts) and max(counts.values()) == 1


def _products_from_kept_gradients(
    tape: Tape, unit: Tensor, weights: Tensor, target_weights: Sequence[Tensor]
) -> Tensor:
    """Return the same as `_products_from_one_quantity`, from output gradients that are all kept to the end."""
    plain = [_weighted_plain_gradient(tape, unit, each) for each in target_weights]
    g = pullback(tape.outputs, Seeds(unit), [call.edge for call in tape.calls], retain=False)
    of_layers = (_weighted_gradient(tape, g, each) for each in target_weights)
    of_batch = (add_gradients(layered, {**rest}) for layered, rest in zip(of_layers, plain, strict=True))
    gradients = _gradients_in_order(tape.problem, of_batch)
    products = torch.stack([_layer_products(tape, g, gradient) for gradient in gradients])
    return _add_plain(weights * products, tape, gradients)


def _gradients_in_order(problem: Problem, of_batch: Iterator[Gradient]) -> list[Gradient]:
    """Return every target's gradient; `of_batch` yields those of the batch targets, in their order."""
    return [
        complete_gradient(problem, next(of_batch), target)
        if reads_scored_records(target)
        else plain_target_gradient(problem, target)
        for target in problem.targets
    ]


def _find_factors(weights_sought: Tensor, weights: Tensor) -> Tensor | None:
    """Return the factors, (n,), by which each record's `weights` become `weights_sought`; None if there are none."""
    if weights_sought.ndim == 1:
        sizes = weights.abs()
        return weights_sought / weights if sizes.min() > 1e-12 * sizes.max() else None
    # A record with several numbers has one factor at most: the one at its largest weight.
    weights_sought, weights = weights_sought.flatten(1), weights.flatten(1)
    size = weights_sought.abs().amax(dim=1, keepdim=True)
    largest = weights.gather(1, place := weights.abs().argmax(dim=1, keepdim=True))
    if not ((size == 0) | (largest.abs() > 1e-12 * largest.abs().max())).all():
        return None
    factors = weights_sought.gather(1, place) / largest.masked_fill(size == 0, 1)
    return factors[:, 0] if ((weights_sought - factors * weights).abs() <= _ROUNDING * size).all() else None


_ROUNDING = 1e-5  # log-probs recorded in batches of another size round differently, so that ratios are not quite 1


def _weighted_gradient(tape: Tape, g: list[Tensor | None], weights: Tensor) -> Gradient:
    """Sum the gradients of the records' quantities in the layers' parameters, each with its weight."""
    total = Gradient()
    for call, of_output in zip(tape.calls, g, strict=True):
        if of_output is not None:
            total = add_gradients(total, {**_weighted_direction(weights, call, of_output)})
    return total


def _weighted_direction(weights: Tensor, call: Call, g: Tensor) -> Gradient:
    """Sum the gradients of the records' quantities in the parameters of a call's layer, each with its weight."""
    total, x, rows = Gradient(), call.x, weights.nonzero().flatten()
    if 0 < len(rows) < len(weights):  # as of a target on a fold of the records
        x, g, weights = x[rows], g[rows], weights[rows]
    for of_block in _by_blocks(call.layer.gradient, x, g, weights):
        total = add_gradients(total, {**of_block})
    return total


def _known_direction(gradient: Gradient, call: Call, g: Tensor) -> Gradient:
    return gradient


def _weighted_plain_gradient(tape: Tape, unit: Tensor, weights: Tensor) -> Gradient:
    """Sum the gradients of the records' quantities in the parameters of no layer, each with its weight."""
    if not tape.plain:
        return {}
    seed = Seeds(unit * weights.reshape(-1, *[1] * (unit.ndim - 1)))
    derivatives = pullback(tape.outputs, seed, [tape.problem.params[name] for name in tape.plain], retain=True)
    return add_gradients({}, dict(zip(tape.plain, derivatives, strict=True)))


def _products_during_backward(tape: Tape, directions: Sequence[Direction], seed: Seeds) -> Tensor:
    """Return the layers' part of the products, (targets, n), computed call by call as the output gradients arrive.

    Each is freed at once, with the call's input, so that the pass holds little more than a training step.

    Raises:
        Refused: the pass did not reach a layer.
    """
    total = tape.outputs.log_prob.new_zeros(len(directions), len(tape.problem.records))
    reached = _nodes_reached(tape.outputs, seed)
    calls = [call for call in tape.calls if call.edge.node in reached]
    through, ends = {at: call for at, call in enumerate(calls) if not call.ends}, [call for call in calls if call.ends]
    params = {id(parameter) for parameter in tape.problem.params.values()}
    leaves = (getattr(node, "variable", None) for node in reached)
    # Such as embeddings that require gradients only so that checkpointing works in a frozen model.
    other_leaves = [leaf for leaf in leaves if leaf is not None and id(leaf) not in params]
    for references in (reached, calls, tape.calls):
        references.clear()  # so that a call and its input are freed as soon as its gradient has arrived

    def add_call(call: Call, g: Tensor | None) -> None:
        if g is not None:
            for row, find_direction in zip(total, directions, strict=True):
                row += _call_product(call, g, find_direction(call, g))

    def make_hook(at: int, output: int) -> Callable[[Sequence[Tensor | None]], None]:
        return lambda output_gradients: add_call(through.pop(at), output_gradients[output])

    handles = [call.edge.node.register_prehook(make_hook(at, call.edge.output_nr)) for at, call in through.items()]
    # A backward pass to all the places where gradients end goes through all other calls.
    last = [*(call.edge for call in ends), *(tape.problem.params[name] for name in tape.plain), *other_leaves]
    try:
        derivatives = pullback(tape.outputs, seed, last, retain=False)
    finally:
        for handle in handles:
            handle.remove()
    for call, g in zip(ends, derivatives, strict=False):
        add_call(call, g)
    for missed in through.values():
        raise Refused(
            f"The input of a {type(missed.layer.module).__name__} layer depends on something that needs gradients "
            "and is no parameter of the policy. Use engine='forward' (or 'auto')."
        )
    return total


def _nodes_reached(outputs: Outputs, seed: Seeds) -> set[Node]:
    """Return the nodes of the graph that a backward pass from `seed` can reach."""
    weighted = [column if weight is not None else None for column, weight in zip(outputs, seed, strict=True)]
    return count_uses(Outputs(*weighted), {})[1]  # type: ignore[arg-type]


def _layer_products(tape: Tape, g: list[Tensor | None], gradient: Gradient) -> Tensor:
    total = tape.outputs.log_prob.new_zeros(len(tape.problem.records))
    for call, of_output in zip(tape.calls, g, strict=True):
        if of_output is not None:
            total += _call_product(call, of_output, gradient)
    return total


def _call_product(call: Call, g: Tensor, gradient: Gradient) -> Tensor:
    """Return the part of the products that one call of a layer adds for a target's gradient, (n,)."""
    with torch.no_grad():
        return torch.cat(_by_blocks(partial(call.layer.product, gradient), call.x, g))


def _by_blocks(rule: Callable[..., T], x: Tensor, g: Tensor, *more: Tensor) -> list[T]:
    """Apply a rule to blocks of records that fit into the processor's cache."""
    size = max(1, _BLOCK_BYTES * len(x) // max(x.nbytes, g.nbytes))
    if size >= len(x):
        return [rule(x, g, *more)]
    return [rule(*block) for block in zip(*(tensor.split(size) for tensor in (x, g, *more)), strict=True)]


_BLOCK_BYTES = 2**20


def _add_plain(products: Tensor, tape: Tape, gradients: Sequence[Gradient]) -> Tensor:
    """Return the products, (targets, n), plus the part of the parameters that belong to no layer."""
    rows = zip(products, gradients, strict=True)
    return torch.stack([row + _plain_products(tape, gradient) if tape.plain else row for row, gradient in rows])


def _plain_products(tape: Tape, gradient: Gradient) -> Tensor:
    plain = gradient.keys() & set(tape.plain)
    if not plain:
        return tape.outputs.log_prob.new_zeros(len(tape.problem.records))
    try:
        return derive_along(tape.problem, {name: gradient[name] for name in plain})
    except NotImplementedError as missing:
        raise Refused(
            f"The parameter `{min(plain)}` belongs to no layer, so its part of the products needs forward mode, which "
            f"this policy has not: {first_line(missing)} Use engine='vmap' (or 'auto')."
        ) from missing
