"""The ghost engine for parameters that processes hold in shards: no gradient is ever whole in one process.

Each process scores records of its own. The target's gradient is summed over the processes layer by layer, and each
keeps its shard of the sum; the products need one layer's whole gradient at a time, which is put together from shards.
All processes make the same number of passes, since a pass gathers parameters.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from whence.core import BatchTarget, SummedTarget, Target, WhenceError, reads_scored_records, target_name
from whence.engines.parameters import release_whole, whole_shape
from whence.engines.problem import (
    Gradient,
    Problem,
    Refused,
    Seeds,
    add_gradients,
    bind_batch_targets,
    compute_like,
    compute_seeds,
    pullback,
)
from whence.engines.tape import Call, Layer, Tape, covered_layers, record_pass

Shards = dict[str, Float[Tensor, " part"]]
"""This process's part of a gradient by parameter: a stretch of the flattened tensor, padded to equal parts."""


def sharded(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return the products of this process's records.

    Raises:
        Refused: a layer has no rule, or a parameter belongs to none.
        WhenceError: it is not said how processes sum, or a target depends on no parameter.
    """
    if problem.summed is None:
        raise WhenceError(
            "The parameters are in shards, so every process scores its own records, and targets are summed over the "
            "processes: score in the trainers of whence.llm, or give score_targets(summed=...) the function that sums."
        )
    layers = covered_layers(problem.modules, problem.parameters)
    covered = {name for layer in layers for name in layer.names.values()}
    if outside := sorted(problem.params.keys() - covered):
        raise Refused(
            f"The parameter `{outside[0]}` belongs to no layer with a rule, and in shards only these are scored. "
            "Freeze it."
        )
    _confirm_axes(problem, layers)
    gradients = [_compute_target_gradient(problem, layers, target) for target in problem.targets]
    columns = []
    for part, is_own in _parts_in_step(problem):
        tape = record_pass(part, layers)
        (seed,) = compute_seeds([part.objective_values], tape.outputs)
        products = _compute_products(tape, layers, gradients, seed)
        if is_own:
            columns.append(products)
    return torch.cat(columns, dim=1)


def _confirm_axes(problem: Problem, layers: list[Layer]) -> None:
    """Refuse a layer whose first axis has the records' length by chance; in every process by the same passes."""
    for count in (1, 2):
        records, prepared = (each.take(torch.zeros(count).long()) for each in (problem.records, problem.prepared))
        tape = record_pass(replace(problem, records=records, prepared=prepared, known_inputs=None), layers)
        _pull(tape, Seeds(torch.zeros_like(tape.outputs.log_prob)))


def _parts_in_step(problem: Problem) -> Iterator[tuple[Problem, bool]]:
    """Yield parts of the records, as many in every process, and whether they are more than company for the others."""
    count = -(-len(problem.records) // problem.chunk_size)
    # First, since passes gather parameters in the same group.
    most = agree_on_most(count, next(iter(problem.params.values())).device)
    for part in problem.parts():
        yield part, True
    for _ in range(most - count):
        yield problem.part(slice(0, 1)), False


def agree_on_most(count: int, device: torch.device) -> int:
    """Return the largest count of all processes; what gathers over them has to be done as often in each."""
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _pull(tape: Tape, seed: Seeds) -> list[Tensor | None]:
    derivatives = pullback(tape.outputs, seed, [call.edge for call in tape.calls], retain=False)
    release_whole(tape.problem.modules.values())
    return derivatives


def _compute_target_gradient(problem: Problem, layers: list[Layer], target: Target) -> Shards:
    """Return this process's shards of a target's gradient, summed over all processes."""
    shards: Shards = {}
    if reads_scored_records(target):
        passes = _pass_over_records(problem, layers, target)
    else:
        passes = _pass_over_parts(problem, layers, target)
    for calls, derivatives in passes:
        _add_to_shards(shards, problem, layers, calls, derivatives)
    sizes = torch.stack([shard.abs().sum() for shard in shards.values()])
    assert problem.summed is not None
    if not problem.summed({"": sizes.sum()})[""]:  # in every process, since all have to take part
        raise WhenceError(
            f"The target {target_name(target)} depends on no trainable parameter of the policy, so no record can move "
            "it. Compute it from `view(params, inputs)`, without torch.no_grad() or .detach()."
        )
    return shards


Pass = tuple[list[Call], list[Tensor | None]]


def _pass_over_records(problem: Problem, layers: list[Layer], target: BatchTarget) -> Iterator[Pass]:
    """Yield the calls of each pass over the records, and the derivatives of the target in their outputs."""
    like = compute_like(problem, target, (part for part, _ in _parts_in_step(problem)))
    (seed,) = compute_seeds(bind_batch_targets(replace(problem, targets=[target])), like)
    splits = [itertools.repeat(None) if column is None else column.split(problem.chunk_size) for column in seed]
    seeds_of_parts = zip(*splits, strict=False)
    for part, is_own in _parts_in_step(problem):
        tape = record_pass(part, layers)
        seeds = Seeds(*next(seeds_of_parts)) if is_own else Seeds(torch.zeros_like(tape.outputs.log_prob))
        yield tape.calls, _pull(tape, seeds)


def _pass_over_parts(problem: Problem, layers: list[Layer], target: Target) -> Iterator[Pass]:
    """Yield the calls of each part of a target that runs the policy itself, and the part's derivatives."""
    parts: list[Any] = list(target.parts()) if isinstance(target, SummedTarget) else [target]
    most = agree_on_most(len(parts), next(iter(problem.params.values())).device)
    # Where the records' passes begin at a later block, one of them would gather less than another part does.
    spare = target.spare_part() if isinstance(target, SummedTarget) else None
    for number in range(most):
        part = parts[number] if number < len(parts) else spare
        if part is None:
            tape = record_pass(problem.part(slice(0, 1)), layers)
        else:
            tape = record_pass(problem, layers, run=partial(part, problem.view, problem.params, problem.records))
        weight = float(number < len(parts))
        yield tape.calls, _pull(tape, Seeds(torch.full_like(tape.outputs.log_prob, weight)))


def _add_to_shards(
    shards: Shards, problem: Problem, layers: list[Layer], calls: list[Call], derivatives: list[Tensor | None]
) -> None:
    """Add a pass's gradient, layer by layer: summed over the processes, of which each keeps its shard."""
    assert problem.summed is not None
    for layer in layers:
        total: Gradient = {}
        for call, g in _list_calls(layer, calls, derivatives):
            with torch.no_grad():
                total = add_gradients(total, {**layer.gradient(call.x, g, g.new_ones(len(g)))})
        for name in layer.names.values():
            parameter = problem.parameters[name]
            whole = total.get(name)
            if whole is None:  # this process's pass does not reach the layer
                whole = torch.zeros(whole_shape(parameter), dtype=parameter.dtype, device=parameter.device)
            shard = _cut_shard(problem.summed({name: whole.contiguous()})[name])
            shards[name] = shards[name] + shard if name in shards else shard


def _list_calls(layer: Layer, calls: list[Call], derivatives: list[Tensor | None]) -> list[tuple[Call, Tensor]]:
    """Return the calls of a layer that a pass reached, each with its output's gradient."""
    pairs = zip(calls, derivatives, strict=True)
    return [(call, g) for call, g in pairs if call.layer is layer and g is not None]


def _cut_shard(whole: Tensor) -> Float[Tensor, " part"]:
    """Return this process's stretch of a tensor."""
    flat, number = whole.flatten(), dist.get_world_size()
    size = -(-len(flat) // number)
    part = flat[dist.get_rank() * size : (dist.get_rank() + 1) * size]
    return torch.cat([part, part.new_zeros(size - len(part))])


def _join_shards(shard: Float[Tensor, " part"], shape: torch.Size) -> Tensor:
    """Return the tensor of which every process holds a stretch."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return torch.cat(parts)[: shape.numel()].reshape(shape)


def _compute_products(
    tape: Tape, layers: list[Layer], gradients: list[Shards], seed: Seeds
) -> Float[Tensor, "targets n"]:
    """Return the products of a pass's records, with one layer's whole gradient at a time."""
    derivatives = _pull(tape, seed)
    total = tape.outputs.log_prob.new_zeros(len(gradients), len(tape.problem.records))
    for layer in layers:
        calls = _list_calls(layer, tape.calls, derivatives)
        for row, shards in zip(total, gradients, strict=True):
            direction = {
                name: _join_shards(shards[name], whole_shape(tape.problem.parameters[name]))
                for name in layer.names.values()
            }
            for call, g in calls:
                with torch.no_grad():
                    row += layer.product(direction, call.x, g)
    return total
