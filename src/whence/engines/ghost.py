"""Per-record products from each layer's input and output gradient; no per-record gradient is ever formed."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from whence.engines.forward import directional
from whence.engines.problem import (
    Gradient,
    Problem,
    Refused,
    Seeds,
    added,
    completed,
    of_outputs,
    plain_target_gradient,
    pullback,
    seeds,
    target_gradients,
)
from whence.engines.rules import LayerRule, Own, rule_for, ruled_types
from whence.policies import Outputs, notes_on
from whence.records import named_leaves
from whence.targets import BatchTarget

T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """A layer with a rule: `names` maps its own trainable parameters to the policy's names for them."""

    module: nn.Module
    rule: LayerRule
    names: dict[str, str]


def ghost(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return all products from one recorded pass over the records.

    A record's share of a layer's product is its output gradient times the change of the layer's output along the
    target's gradient. Where objective and target read nothing but the log-probs of these records, the pass is one
    forward and one backward: both gradients are then the same log-prob gradients, weighted. Each further target costs
    its gradient and the products, not another pass.

    Raises:
        Refused: a layer without a rule, a parameter used outside its layer, or a layer whose first axis is not the
            records'.
    """
    layers = covered_layers(problem.modules, problem.own)
    _confirm_axes(problem, layers)
    if len(problem.records) <= problem.chunk_size:
        return _whole_products(_recorded_pass(problem, layers))
    gradients, rows = target_gradients(problem), []
    for part in problem.parts():
        tape = _recorded_pass(part, layers)
        (own,) = seeds([part.objective_values], tape.outputs)
        rows.append(_products_on_arrival(tape, gradients, own))
    return torch.cat(rows, dim=1)


def _confirm_axes(problem: Problem, layers: Sequence[Layer]) -> None:
    """Refuse a layer whose first axis is as long as there are records by chance: it does not follow another number."""
    total = len(problem.records)
    shapes = tuple((name, tuple(t.shape[1:])) for name, t in named_leaves(problem.records.columns))
    trained = tuple(name for layer in layers for name in layer.names.values())
    confirmed, kind = notes_on(problem.view), (_confirm_axes, shapes, problem.columns, trained)
    if total > 1 and kind not in confirmed:
        _recorded_pass(problem.part(slice(0, 1 if total == 2 else 2)), layers)
        confirmed[kind] = True


def covered_layers(modules: Mapping[str, nn.Module], own: Mapping[str, Tensor]) -> list[Layer]:
    """Return the layers that hold trainable parameters; `own` are these, by the policy's names for them.

    Parameters of the policy itself, or of modules that only hold others (an SB3 policy's `log_std`), belong to no
    layer; they are differentiated in forward mode.

    Raises:
        Refused: a layer has no rule.
    """
    canonical = {id(parameter): name for name, parameter in own.items()}
    layers = []
    for path, module in modules.items():
        names = {key: canonical[id(p)] for key, p in module._parameters.items() if id(p) in canonical}
        if not names:
            continue
        if (rule := rule_for(module)) is not None:
            layers.append(Layer(module, rule, names))
        elif path and _is_layer(module):
            raise Refused(
                f"The ghost engine has no rule for the layer `{path}` ({type(module).__name__}); it knows "
                f"{', '.join(ruled_types())}. Use engine='forward' (or 'auto'), or register a rule with "
                "whence.engines.register_rule."
            )
    return layers


def _is_layer(module: nn.Module) -> bool:
    holds_only = type(module).forward is nn.Module.forward  # ParameterList, ParameterDict
    return not holds_only and next(module.children(), None) is None


@dataclass(frozen=True)
class _Call:
    """One call of a layer: its input, and the place in the graph where its output's gradient arrives.

    `ends`: whether no gradient goes on to the input.
    """

    layer: Layer
    x: Tensor
    version: int
    edge: GradientEdge
    ends: bool


@dataclass(frozen=True)
class _Tape:
    """A recorded forward pass over the records of a problem, all at once."""

    problem: Problem
    outputs: Outputs
    calls: list[_Call] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)


def _recorded_pass(problem: Problem, layers: Sequence[Layer]) -> _Tape:
    calls: list[_Call] = []
    size = len(problem.records)

    def noting(layer: Layer, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append(_call(layer, args, output, size))

    # Before the user's own hooks, which may change what the layer has put out.
    handles = [layer.module.register_forward_hook(partial(noting, layer), prepend=True) for layer in layers]
    try:
        outputs = problem.outputs()
    finally:
        for handle in handles:
            handle.remove()
    used, reached = _uses(outputs, problem.params)
    # A call whose output is thrown away accounts for no use.
    seen = Counter(name for call in calls if call.edge.node in reached for name in call.layer.names.values())
    layered = {name for layer in layers for name in layer.names.values()}
    if outside := sorted(name for name in layered if used[name] > seen[name]):
        raise Refused(
            f"The parameter `{outside[0]}` is used outside its layer's own call, where the ghost engine cannot see "
            "it. Use engine='forward' (or 'auto')."
        )
    if any(call.x._version != call.version for call in calls):
        raise Refused("A layer's input was changed in place after the layer ran. Use engine='forward' (or 'auto').")
    return _Tape(problem, outputs, calls, [name for name in problem.params if used[name] and name not in layered])


def _call(layer: Layer, args: tuple[Any, ...], output: Any, size: int) -> _Call:
    x = args[0] if args else None
    kind = type(layer.module).__name__
    if not isinstance(x, Tensor) or not isinstance(output, Tensor) or len(x) != size or len(output) != size:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise Refused(
            f"A {kind} layer was called on {got} for {size} records: the ghost engine needs the records on the first "
            "axis of each layer's input and output. Use engine='forward' (or 'auto')."
        )
    if not output.requires_grad:
        raise Refused(
            f"A {kind} layer ran without a graph (torch.no_grad(), or reentrant checkpointing). Use engine='forward' "
            "(or 'auto')."
        )
    # An edge taken now is that of the layer's own output, also where an in-place activation overwrites it later.
    return _Call(layer, x.detach(), x._version, get_gradient_edge(output), not x.requires_grad)


def _uses(outputs: Outputs, params: dict[str, Tensor]) -> tuple[Counter[str], set[Node]]:
    """Count how often each parameter enters the graph of the outputs; return the graph's nodes as well."""
    names = {id(parameter): name for name, parameter in params.items()}
    counts: Counter[str] = Counter()
    queue: list[Node] = [c.grad_fn for c in outputs if c is not None and c.grad_fn is not None]
    seen = set(queue)
    while queue:
        for node, _ in queue.pop().next_functions:
            if node is None:
                continue
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in names:
                counts[names[id(variable)]] += 1
            elif node not in seen:
                seen.add(node)
                queue.append(node)
    return counts, seen


def _whole_products(tape: _Tape) -> Tensor:
    """Return the products where one pass holds all records, so that it also holds the batch targets' gradients."""
    problem = tape.problem
    own, *found = seeds([problem.objective_values, *of_outputs(problem)], tape.outputs)
    weights = [seed.log_prob for seed in found if seed.log_prob is not None]
    if own.log_prob is None or any(_reads_more(seed) for seed in (own, *found)) or len(weights) < len(found):
        return _pass_by_pass(tape, own, found)
    # Objective and targets move the log-probs alone, each record with weights of its own.
    if len(problem.targets) == 1 and weights and (factors := _factors(own.log_prob, weights[0])) is not None:
        return _from_the_targets_pass(tape, factors, weights[0])
    if own.log_prob.ndim > 1:
        return _pass_by_pass(tape, own, found)
    return _from_the_log_probs_pass(tape, own.log_prob, weights)


def _reads_more(seed: Seeds) -> bool:
    return seed.value is not None or seed.entropy is not None


def _pass_by_pass(tape: _Tape, own: Seeds, found: Sequence[Seeds]) -> Tensor:
    """Return the products from a backward pass for each target, and one for the objective."""
    params = list(tape.problem.params.values())
    passes = (pullback(tape.outputs, seed, params, retain=True) for seed in found)
    of_batch = (added({}, dict(zip(tape.problem.params, one, strict=True))) for one in passes)
    return _products(tape, _in_order(tape.problem, of_batch), own)


def _from_the_targets_pass(tape: _Tape, factors: Tensor, weights: Tensor) -> Tensor:
    """Return the products from the one target's backward pass alone; a record's own weights are `factors` times its."""
    edges = [call.edge for call in tape.calls]
    found = pullback(tape.outputs, Seeds(weights), [*edges, *tape.problem.params.values()], retain=False)
    gradient = added({}, dict(zip(tape.problem.params, found[len(edges) :], strict=True)))
    gradients = _in_order(tape.problem, iter([gradient]))
    return _weighted_products(tape, found[: len(edges)], gradients, factors)


def _from_the_log_probs_pass(tape: _Tape, own: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return the products from one backward pass of the log-probs: the targets' gradients are summed up from it."""
    edges, unit = [call.edge for call in tape.calls], Seeds(torch.ones_like(own))
    g = pullback(tape.outputs, unit, edges, retain=bool(tape.plain))
    gradients = _in_order(tape.problem, (_weighted_gradient(tape, g, one) for one in weights))
    return _weighted_products(tape, g, gradients, own)


def _weighted_products(tape: _Tape, g: list[Tensor | None], gradients: Sequence[Gradient], weights: Tensor) -> Tensor:
    return torch.stack([_with_plain(weights * _layer_products(tape, g, one), tape, one) for one in gradients])


def _in_order(problem: Problem, of_batch: Iterator[Gradient]) -> list[Gradient]:
    """Return every target's gradient; those of batch targets come from `of_batch`, one after the other."""
    return [
        completed(problem, next(of_batch), target)
        if isinstance(target, BatchTarget)
        else plain_target_gradient(problem, target)
        for target in problem.targets
    ]


def _factors(own: Tensor, weights: Tensor) -> Tensor | None:
    """Return what each record's `weights` are to be multiplied by to give `own`, (n,); None where nothing does."""
    if own.ndim == 1:
        sizes = weights.abs()
        return own / weights if sizes.min() > 1e-12 * sizes.max() else None
    # Of a record with several numbers, that of the largest weight says what the factor would be.
    own, weights = own.flatten(1), weights.flatten(1)
    size = own.abs().amax(dim=1, keepdim=True)
    largest = weights.gather(1, place := weights.abs().argmax(dim=1, keepdim=True))
    if not ((size == 0) | (largest.abs() > 1e-12 * largest.abs().max())).all():
        return None
    factors = own.gather(1, place) / largest.masked_fill(size == 0, 1)
    return factors[:, 0] if ((own - factors * weights).abs() <= _ROUNDING * size).all() else None


_ROUNDING = 1e-5  # of log-probs that were recorded in other company, where ratios are 1 but for it


def _weighted_gradient(tape: _Tape, g: list[Tensor | None], weights: Tensor) -> Gradient:
    """Sum the records' log-prob gradients, each with its weight, layer by layer."""
    total = Gradient()
    for call, of_output in zip(tape.calls, g, strict=True):
        if of_output is None:
            continue
        for own in _by_blocks(partial(call.layer.rule.gradient, call.layer.module), call.x, of_output, weights):
            total = added(total, {name: own[key] for key, name in call.layer.names.items()})
    plain = [tape.problem.params[name] for name in tape.plain]
    found = pullback(tape.outputs, Seeds(weights), plain, retain=True)
    return added(total, dict(zip(tape.plain, found, strict=True)))


def _products(tape: _Tape, gradients: Sequence[Gradient], own: Seeds) -> Tensor:
    """Return the products with gradients already known; `own` are the objective's derivatives in the outputs."""
    g = pullback(tape.outputs, own, [call.edge for call in tape.calls], retain=False)
    return torch.stack([_with_plain(_layer_products(tape, g, one), tape, one) for one in gradients])


def _products_on_arrival(tape: _Tape, gradients: Sequence[Gradient], own: Seeds) -> Tensor:
    """Return what `_products` does, layer by layer as the backward pass comes by, so that little is held.

    Raises:
        Refused: a layer that the pass has to reach, and did not.
    """
    total = tape.outputs.log_prob.new_zeros(len(gradients), len(tape.problem.records))
    reached = _reached(tape.outputs, own)
    calls = [call for call in tape.calls if call.edge.node in reached]
    through, ends = {at: call for at, call in enumerate(calls) if not call.ends}, [call for call in calls if call.ends]
    own_leaves = {id(parameter) for parameter in tape.problem.params.values()}
    leaves_of = (getattr(node, "variable", None) for node in reached)
    # Such as embeddings that were told to require gradients, so that checkpointing goes through a frozen model.
    others = [leaf for leaf in leaves_of if leaf is not None and id(leaf) not in own_leaves]
    for one in (reached, calls, tape.calls):
        one.clear()  # a call goes, and its input with it, when its gradient has come

    def take(call: _Call, g: Tensor | None) -> None:
        if g is not None:
            for row, gradient in zip(total, gradients, strict=True):
                row += _call_product(call, g, gradient, len(row))

    def arrives(at: int, output: int) -> Callable[[Sequence[Tensor | None]], None]:
        return lambda arrived: take(through.pop(at), arrived[output])

    handles = [call.edge.node.register_prehook(arrives(at, call.edge.output_nr)) for at, call in through.items()]
    # A pass to where gradients end comes by all other calls.
    last = [*(call.edge for call in ends), *(tape.problem.params[name] for name in tape.plain), *others]
    try:
        found = pullback(tape.outputs, own, last, retain=False)
    finally:
        for handle in handles:
            handle.remove()
    for call, g in zip(ends, found, strict=False):
        take(call, g)
    for missed in through.values():
        raise Refused(
            f"The input of a {type(missed.layer.module).__name__} layer depends on something that needs gradients "
            "and is no parameter of the policy. Use engine='forward' (or 'auto')."
        )
    return torch.stack([_with_plain(row, tape, gradient) for row, gradient in zip(total, gradients, strict=True)])


def _reached(outputs: Outputs, seed: Seeds) -> set[Node]:
    """Return the nodes of the graph that a backward pass has reason to come by."""
    moved = [column if weight is not None else None for column, weight in zip(outputs, seed, strict=True)]
    return _uses(Outputs(*moved), {})[1]  # type: ignore[arg-type]


def _layer_products(tape: _Tape, g: list[Tensor | None], gradient: Gradient) -> Tensor:
    total = tape.outputs.log_prob.new_zeros(len(tape.problem.records))
    for call, of_output in zip(tape.calls, g, strict=True):
        if of_output is not None:
            total += _call_product(call, of_output, gradient, len(total))
    return total


def _call_product(call: _Call, g: Tensor, gradient: Gradient, size: int) -> Tensor:
    """Return the products of the records' share in a call's layer with a gradient, (size,)."""
    direction: Own = {key: gradient[name] for key, name in call.layer.names.items() if name in gradient}
    if not direction:
        return g.new_zeros(size)
    with torch.no_grad():
        product = partial(call.layer.rule.product, call.layer.module, direction)
        return torch.cat(_by_blocks(product, call.x, g))


def _by_blocks(rule: Callable[..., T], x: Tensor, g: Tensor, *more: Tensor) -> list[T]:
    """Apply a rule to blocks of records, so that what it makes of one stays in the processor's cache."""
    size = max(1, _BLOCK_BYTES * len(x) // max(x.nbytes, g.nbytes))
    if size >= len(x):
        return [rule(x, g, *more)]
    return [rule(*block) for block in zip(*(tensor.split(size) for tensor in (x, g, *more)), strict=True)]


_BLOCK_BYTES = 2**20


def _with_plain(products: Tensor, tape: _Tape, gradient: Gradient) -> Tensor:
    """Add the share of the parameters that belong to no layer."""
    along = gradient.keys() & set(tape.plain)
    if not along:
        return products
    try:
        return products + directional(tape.problem, gradient, along=along)
    except NotImplementedError as missing:
        raise Refused(
            f"The parameter `{min(along)}` belongs to no layer, and forward mode, which its share needs, does not go "
            f"through this policy: {str(missing).splitlines()[0]} Use engine='vmap' (or 'auto')."
        ) from missing
