"""Products of gradients of log pi: how far training on a record moves the policy as training on an example does."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from whence.core import NonFinite, Outputs, RecordBatch
from whence.engines import (
    Gradient,
    Layer,
    Precision,
    Problem,
    Refused,
    add_gradients,
    covered_layers,
    derive_along,
    linear_gradient,
    record_gradient,
    record_pass,
)
from whence.scores.attribution import open_problem

_PROBES, _MOST, _MOST_PLAIN = 3, 2**22, 256
"""Records of a check; numbers of gradients that are held at a time, and of parameters that belong to no layer."""

_Calls: TypeAlias = list[tuple[Layer, Tensor, Tensor]]
"""Layers, each with its input and its output's gradient."""

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
    policy: object, records: RecordBatch, examples: RecordBatch, *, chunk_size: int = 256
) -> GradientProducts:
    """Return the products of each record's gradient of log pi with each example's, at the present policy.

    Where each layer has a rule, they are sums over layers, of a linear one `(X X') * (G G')` by inputs X and output
    gradients G, and no gradient is stored. Other policies' gradients are made record by record. A record of several
    numbers, as a response of tokens, has the gradient of their sum. Examples are few, and a pass has `chunk_size`
    records at most. Of policies and of what stays unchanged see `whence.attribute`.

    Raises:
        NonFinite: a gradient is not finite.
    """
    objective = _LogProb()
    with (
        open_problem(policy, examples, targets=[], objective=objective) as few,
        open_problem(policy, records, targets=[], objective=objective, chunk_size=chunk_size) as problem,
    ):
        run = _choose_way(problem, few)
        rows, squares = (run(each).detach().cpu().double() for each in (problem, few))
    if not rows.isfinite().all():
        place = int((~rows.isfinite()).any(0).nonzero()[0, 0])
        raise NonFinite(f"The gradient of log pi of record {int(records.ids[place])}, or an example's, is not finite.")
    return GradientProducts(rows[:-1], squares[-1].sqrt(), rows[-1].sqrt())


class _LogProb:
    """The sum of a record's log-probs, as an objective."""

    reads = frozenset(["log_prob"])

    def prepare(self, records: RecordBatch) -> RecordBatch:
        return records

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        return outputs.log_prob.reshape(len(outputs.log_prob), -1).sum(1)


def _choose_way(problem: Problem, examples: Problem) -> _Run:
    """Return the way by layers, if it agrees with the plain loop on three records and examples; else the loop."""
    probe, few = (each.part(slice(0, _PROBES)) for each in (problem, examples))
    truth = _multiply_by_loop(few)(probe)
    with Precision() as precision:
        probe.outputs()
    try:
        difference = float((_multiply_by_layers(few)(probe) - truth).abs().max())
        if difference <= precision.tolerance(1e-3) * float(truth.abs().max()):
            return _multiply_by_layers(examples)
    except (Refused, RuntimeError):  # A layer has no rule, or torch.func cannot batch it.
        pass
    return _multiply_by_loop(examples)


def _multiply_by_loop(examples: Problem) -> _Run:
    def make_rows(problem: Problem, positions: Iterable[int]) -> Gradient:
        gradients = [record_gradient(problem, position) for position in positions]
        params = problem.params.items()
        rows = {name: torch.stack([each.get(name, torch.zeros_like(p)) for each in gradients]) for name, p in params}
        return rows if problem.summed is None else problem.summed(rows)

    rows = make_rows(examples, range(len(examples.records)))
    return lambda problem: torch.cat(
        [_multiply_rows(make_rows(problem, [position]), rows) for position in range(len(problem.records))], dim=1
    )


def _multiply_rows(rows: Gradient, examples: Gradient) -> Tensor:
    """Return the products of gradients by parameters, and the squares of the first ones."""
    products = [part.flatten(1).float() @ rows[name].flatten(1).float().T for name, part in examples.items()]
    squares = [part.flatten(1).float().square().sum(1) for part in rows.values()]
    return torch.cat([torch.stack(products).sum(0), torch.stack(squares).sum(0)[None]])


def _multiply_by_layers(examples: Problem) -> _Run:
    if examples.summed is not None:
        raise Refused("Hooks mask parts of gradients.")
    linear, others, plain = _record_calls(examples)

    def multiply(part: Problem) -> Tensor:
        *calls, rows = _record_calls(part)
        if [*map(len, calls)] != [len(linear), len(others)]:
            raise Refused("Other layers run on the records than on the examples. Their gradients cannot be compared.")
        products = [_multiply_linear(*one, *other[1:]) for one, other in zip(calls[0], linear, strict=True)]
        products += [_multiply_calls(calls[1], others)] if others else []
        return torch.stack([*products, *([_multiply_rows(rows, plain)] if plain else [])]).sum(0)

    return lambda problem: torch.cat([multiply(part) for part in problem.parts()], dim=1)


def _record_calls(problem: Problem) -> tuple[_Calls, _Calls, Gradient]:
    """Return the calls of linear layers on rows, those of other layers, and gradients in the parameters of no layer.

    A linear layer that shares a parameter, or is called again, counts among the others.
    """
    tape = record_pass(problem, covered_layers(problem.modules, problem.parameters))
    edges = [call.edge for call in tape.calls]
    gradients = torch.autograd.grad(tape.outputs.log_prob.sum(), edges, allow_unused=True)
    calls = [(call.layer, call.x, g) for call, g in zip(tape.calls, gradients, strict=True) if g is not None]
    counts = Counter(name for layer, _, _ in calls for name in layer.names.values())
    linear, others = _Calls(), _Calls()
    for layer, x, g in calls:
        is_plain = layer.rule.gradient is linear_gradient and x.ndim == 2
        is_alone = is_plain and all(counts[name] == 1 for name in layer.names.values())
        (linear if is_alone else others).append((layer, x, g))
    if sum(problem.params[name].numel() for name in tape.plain) > _MOST_PLAIN:
        raise Refused(f"The parameter `{tape.plain[0]}` belongs to no layer, and is large.")
    parameters = {name: problem.params[name] for name in tape.plain}
    units = {name: torch.eye(each.numel()).to(each).view(-1, *each.shape) for name, each in parameters.items()}
    plain = {name: [derive_along(problem, {name: unit}) for unit in each] for name, each in units.items()}
    return linear, others, {name: torch.stack(each, dim=1) for name, each in plain.items()}


def _multiply_linear(layer: Layer, x: Tensor, g: Tensor, of_examples: Tensor, g_of_examples: Tensor) -> Tensor:
    """Return the products in the parameters of a linear layer, and the records' squares."""
    has_weight, has_bias = (float(name in layer.names) for name in ("weight", "bias"))
    products = (has_weight * (of_examples @ x.T) + has_bias) * (g_of_examples @ g.T)
    squares = (has_weight * x.square().sum(1) + has_bias) * g.square().sum(1)
    return torch.cat([products, squares[None]]).float()


def _multiply_calls(records: _Calls, examples: _Calls) -> Tensor:
    """Return the products in the parameters of any layers, and the records' squares, some records at a time."""

    def add_calls(xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Gradient:
        total = Gradient()
        for (layer, _, _), x, g in zip(records, xs, gs, strict=True):
            total = add_gradients(total, {**layer.gradient(x[None], g[None], None)})
        return {name: part[None] for name, part in total.items()}

    (_, xs, gs), (_, of_examples, g_of_examples) = (zip(*calls, strict=True) for calls in (records, examples))
    make_rows = torch.vmap(add_calls)
    with torch.no_grad():
        rows = make_rows(of_examples, g_of_examples)
        size = _MOST // sum(each[0].numel() for each in rows.values()) or 1
        parts = zip(*(zip(*(each.split(size) for each in some), strict=True) for some in (xs, gs)), strict=True)
        return torch.cat([_multiply_rows(make_rows(*part), rows) for part in parts], dim=1)
