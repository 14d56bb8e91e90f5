"""Products of gradients of log pi: how far training on a record moves the policy as training on an example does."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from whence.attribution import open_problem
from whence.core import NonFinite, Outputs, RecordBatch
from whence.engines import (
    Gradient,
    Layer,
    Precision,
    Problem,
    Refused,
    Seeds,
    add_gradients,
    covered_layers,
    linear_gradient,
    pullback,
    record_gradient,
    record_gradients,
    record_pass,
    run_engine,
)

_PROBES = 3
_MOST_NUMBERS = 2**22
"""Numbers of the records' gradients in a group of layers that are held at a time."""

_Calls: TypeAlias = list[tuple[Layer, Tensor, Tensor]]
"""Calls of layers that share parameters: each layer with its input and its output's gradient."""

_Run: TypeAlias = Callable[[Problem], Tensor]
"""Returns the products of some examples with a problem's records, and below them the records' squares, (m + 1, n)."""


class GradientProducts(NamedTuple):
    """Products of the gradients of log pi of m examples with those of n records, and the norms of both."""

    products: Float[Tensor, "m n"]
    example_norms: Float[Tensor, " m"]
    norms: Float[Tensor, " n"]

    def cosines(self) -> Float[Tensor, "m n"]:
        """Return the cosines; a gradient of zeros has cosine 0 with every other."""
        sizes = self.example_norms[:, None] * self.norms
        return (self.products / sizes).masked_fill(sizes == 0, 0).clamp(-1, 1)


def multiply_gradients(
    policy: object,
    records: RecordBatch,
    examples: RecordBatch,
    *,
    memory: int = 2**31,
    chunk_size: int | None = None,
) -> GradientProducts:
    """Return the products of each record's gradient of log pi with each example's, at the present policy.

    Where each layer has a rule, they are sums over layers, of a linear one `(X X') * (G G')` by inputs X and output
    gradients G, and no gradient is stored. For other policies the records' gradients are made, some at a time. A record
    of several numbers, as a response of tokens, has the gradient of their sum.

    Args:
        policy: see `whence.attribute`, as for what scoring leaves unchanged.
        records: n records.
        examples: m records, which are few; their observations and actions are read.
        memory: see `whence.attribute`.
        chunk_size: the most records in one pass; None: as many as `memory` allows.

    Raises:
        Unsupported: see `whence.attribute`.
        NonFinite: a gradient is not finite.
    """
    objective = _LogProb()
    with (
        open_problem(policy, examples, targets=[], objective=objective) as few,
        open_problem(policy, records, targets=[], objective=objective, chunk_size=chunk_size) as problem,
    ):
        run = _choose_way(problem, few)
        rows = run_engine(problem, run, memory if chunk_size is None else None).detach().cpu().double()
        squares = run(few)[-1].detach().cpu().double()
    if not rows.isfinite().all():
        place = int((~rows.isfinite()).any(0).nonzero()[0, 0])
        raise NonFinite(f"The gradient of log pi of record {int(records.ids[place])}, or an example's, is not finite.")
    return GradientProducts(rows[:-1], squares.sqrt(), rows[-1].sqrt())


class _LogProb:
    """The sum of a record's log-probs, as an objective."""

    reads = frozenset(["log_prob"])

    def prepare(self, records: RecordBatch) -> RecordBatch:
        return records

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        return outputs.log_prob.reshape(len(outputs.log_prob), -1).sum(1)


def _choose_way(problem: Problem, examples: Problem) -> _Run:
    """Return the first way to the products that agrees with the plain loop on three records and examples."""
    probe, few = (each.part(slice(0, _PROBES)) for each in (problem, examples))
    truth = _multiply_by_rows(few, _loop)(probe)
    with Precision() as precision:
        probe.outputs()
    for find in (_multiply_by_layers, lambda examples: _multiply_by_rows(examples, _vectorise)):
        try:
            difference = float((find(few)(probe) - truth).abs().max())
            if difference <= precision.tolerance(1e-3) * float(truth.abs().max()):
                return find(examples)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError, Refused):  # of what a transform lacks, or a layer without a rule
            continue
    return _multiply_by_rows(examples, _loop)


def _multiply_by_rows(examples: Problem, make_rows: Callable[[Problem], Gradient]) -> _Run:
    rows = make_rows(examples)
    return lambda problem: torch.cat([_multiply_rows(make_rows(part), rows) for part in problem.parts()], dim=1)


def _multiply_rows(rows: Gradient, examples: Gradient) -> Tensor:
    """Return the products of gradients by parameters, and the squares of the first ones."""
    products = [part.flatten(1).float() @ rows[name].flatten(1).float().T for name, part in examples.items()]
    squares = [part.flatten(1).float().square().sum(1) for part in rows.values()]
    return torch.cat([torch.stack(products).sum(0), torch.stack(squares).sum(0)[None]])


def _loop(problem: Problem) -> Gradient:
    gradients = [record_gradient(problem, position) for position in range(len(problem.records))]
    zeros = {name: torch.zeros_like(parameter) for name, parameter in problem.params.items()}
    rows = {name: torch.stack([each.get(name, zero) for each in gradients]) for name, zero in zeros.items()}
    return rows if problem.summed is None else problem.summed(rows)


def _vectorise(problem: Problem) -> Gradient:
    rows = record_gradients(problem, problem.params)
    return rows if problem.summed is None else problem.summed(rows)


def _multiply_by_layers(examples: Problem) -> _Run:
    if examples.summed is not None:
        raise Refused("Hooks mask parts of gradients.")
    groups = _group_layers(covered_layers(examples.modules, examples.parameters))
    calls, plain = _record_calls(examples, groups)

    def multiply(part: Problem) -> Tensor:
        others, rows = _record_calls(part, groups)
        pairs = [pair for pair in zip(others, calls, strict=True) if any(pair)]
        if not all(records and examples for records, examples in pairs):
            raise Refused("A layer runs on records and not on the examples, or on these alone.")
        products = [_multiply_calls(*pair) for pair in pairs]
        return torch.stack([*products, *([_multiply_rows(rows, plain)] if plain else [])]).sum(0)

    return lambda problem: torch.cat([multiply(part) for part in problem.parts()], dim=1)


def _group_layers(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Return the layers in groups that share no parameter."""
    groups: list[list[Layer]] = []
    for layer in layers:
        names = {*layer.names.values()}
        tied = [group for group in groups if any(names & {*other.names.values()} for other in group)]
        groups = [group for group in groups if group not in tied] + [[*chain.from_iterable(tied), layer]]
    return groups


def _record_calls(problem: Problem, groups: Sequence[Sequence[Layer]]) -> tuple[list[_Calls], Gradient]:
    """Return the calls of each group of layers, and the records' gradients in the parameters of no layer."""
    tape = record_pass(problem, [layer for group in groups for layer in group])
    seed = Seeds(torch.ones_like(tape.outputs.log_prob))
    gradients = pullback(tape.outputs, seed, [call.edge for call in tape.calls], retain=False)
    pairs = [(call, g) for call, g in zip(tape.calls, gradients, strict=True) if g is not None]
    calls = [
        [(call.layer, call.x, g) for call, g in pairs if any(call.layer is layer for layer in group)]
        for group in groups
    ]
    return calls, record_gradients(problem, tape.plain) if tape.plain else {}


def _multiply_calls(records: _Calls, examples: _Calls) -> Tensor:
    """Return the products in the parameters of a group of layers, and the records' squares."""
    (layer, x, g), (_, of_examples, g_of_examples) = records[0], examples[0]
    if len(records) == len(examples) == 1 and layer.rule.gradient is linear_gradient and x.ndim == 2:
        has_weight, has_bias = (float(name in layer.names) for name in ("weight", "bias"))
        products = (has_weight * (of_examples @ x.T) + has_bias) * (g_of_examples @ g.T)
        squares = (has_weight * x.square().sum(1) + has_bias) * g.square().sum(1)
        return torch.cat([products, squares[None]]).float()
    rows, columns = _make_rows(examples), []
    size = max(1, _MOST_NUMBERS * len(g_of_examples) // sum(each.numel() for each in rows.values()))
    for at in range(0, len(g), size):
        block = [(layer, x[at : at + size], g[at : at + size]) for layer, x, g in records]
        columns.append(_multiply_rows(_make_rows(block), rows))
    return torch.cat(columns, dim=1)


def _make_rows(calls: _Calls) -> Gradient:
    """Return the gradients of records in the parameters of a group of layers."""

    def sum_calls(xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Gradient:
        total = Gradient()
        for (layer, _, _), x, g in zip(calls, xs, gs, strict=True):
            total = add_gradients(total, {**layer.gradient(x[None], g[None], None)})
        return total

    _, xs, gs = zip(*calls, strict=True)
    with torch.no_grad():
        rows: Gradient = torch.vmap(sum_calls)(xs, gs)
        return rows
