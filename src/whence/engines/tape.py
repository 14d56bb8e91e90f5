"""A recorded forward pass: the layers' calls, with their inputs and the places where their gradients arrive."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from whence.core import Outputs
from whence.engines.problem import Gradient, Problem, Refused
from whence.engines.rules import LayerRule, LayerTensors, rule_for, ruled_types


@dataclass(frozen=True)
class Layer:
    """A layer with a rule: `names` maps the layer's names of its trainable parameters to the policy's names."""

    module: nn.Module
    rule: LayerRule
    names: dict[str, str]

    def gradient(self, x: Tensor, g: Tensor, weights: Tensor | None) -> Gradient:
        """Return the weighted sum of the records' gradients in the layer's parameters; see `LayerRule.gradient`."""
        tensors = self.rule.gradient(self.module, x, g, weights)
        return {name: tensors[key] for key, name in self.names.items()}

    def product(self, direction: Gradient, x: Tensor, g: Tensor) -> Tensor:
        """Return each record's product with a direction in the policy's parameters, (n,); see `LayerRule.product`."""
        part: LayerTensors = {key: direction[name] for key, name in self.names.items() if name in direction}
        return self.rule.product(self.module, part, x, g) if part else g.new_zeros(len(g))


def covered_layers(modules: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> list[Layer]:
    """Return the layers that hold trainable parameters, from all modules and the policy's parameters by name.

    Parameters of the policy itself, or of modules that only hold others (an SB3 policy's `log_std`), belong to no
    layer; forward mode differentiates them.

    Raises:
        Refused: a layer has no rule.
    """
    canonical = {id(parameter): name for name, parameter in parameters.items()}
    layers = []
    for path, module in modules.items():
        names = {key: canonical[id(p)] for key, p in module._parameters.items() if id(p) in canonical}
        if not names:
            continue
        if (rule := rule_for(module)) is not None:
            layers.append(Layer(module, rule, names))
        elif path and type(module).forward is not nn.Module.forward and next(module.children(), None) is None:
            # Modules that hold others are judged by these; ParameterList and ParameterDict have no forward.
            raise Refused(
                f"The ghost engine has no rule for the layer `{path}` ({type(module).__name__}); it knows "
                f"{', '.join(ruled_types())}. Use engine='forward' (or 'auto'), or register a rule with "
                "whence.register_rule."
            )
    return layers


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input, and the edge of the graph at which its output's gradient arrives.

    `ends` is True if the input needs no gradient.
    """

    layer: Layer
    x: Tensor
    version: int
    edge: GradientEdge
    ends: bool


@dataclass(frozen=True)
class Tape:
    """A recorded forward pass over all records of a problem.

    `plain` are the names of used parameters that belong to no layer.
    """

    problem: Problem
    outputs: Outputs
    calls: list[Call] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)


def record_pass(problem: Problem, layers: Sequence[Layer], run: Callable[[], Tensor] | None = None) -> Tape:
    """Return the tape of a pass over all records of a problem, or of what `run` computes.

    That is a scalar, which takes the place of the outputs' log-probs; calls may be on any number of records.

    Raises:
        Refused: a parameter is used outside its layer, or the first axis of a layer is not the records'.
    """
    calls: list[Call] = []
    params = dict(problem.params)
    size = len(problem.records) if run is None else None

    def note_call(layer: Layer, module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        call, replaced = record_call(layer, args, output, size)
        calls.append(call)
        # Where processes hold shards, the graph's leaves are other tensors than the policy's parameters.
        params.update({name: p for key, name in layer.names.items() if (p := module._parameters[key]) is not None})
        return replaced

    # The hooks run before the user's own, which may change the layer's output.
    handles = [layer.module.register_forward_hook(partial(note_call, layer), prepend=True) for layer in layers]
    try:
        outputs = problem.outputs() if run is None else Outputs(run())
    finally:
        for handle in handles:
            handle.remove()
    plain = check_uses(outputs, calls, layers, params)
    return Tape(problem, outputs, calls, plain)


def check_uses(
    outputs: Outputs,
    calls: Sequence[Call],
    layers: Sequence[Layer],
    params: dict[str, Tensor],
    *,
    covers_all: bool = False,
) -> list[str]:
    """Return the names of used parameters that belong to no layer.

    Raises:
        Refused: a parameter is used outside its layer, or a layer's input was changed; or, with `covers_all`, a used
            parameter belongs to no layer.
    """
    used, reached = count_uses(outputs, params)
    # A call whose output is not used accounts for no use of a parameter.
    seen = Counter(name for call in calls if call.edge.node in reached for name in call.layer.names.values())
    layered = {name for layer in layers for name in layer.names.values()}
    plain = [name for name in params if used[name] and name not in layered]
    if outside := sorted(name for name in layered if used[name] > seen[name]) or (plain if covers_all else []):
        raise Refused(
            f"The parameter `{outside[0]}` is used outside its layer's own call, where the ghost engine cannot see "
            "it. Use engine='forward' (or 'auto')."
        )
    if any(call.x._version != call.version for call in calls):
        raise Refused("A layer's input was changed in place after the layer ran. Use engine='forward' (or 'auto').")
    return plain


def record_call(layer: Layer, args: tuple[Any, ...], output: Any, size: int | None) -> tuple[Call, Tensor | None]:
    """Return a call of a layer on `size` records, None: on as many as its input has; and an output in place of its own.

    An embedding of positions that all records share gets an output for each record, at which its gradient arrives.

    Raises:
        Refused: the first axis of input or output is not the records', or the layer ran without a graph.
    """
    x = args[0] if args else None
    size = len(x) if size is None and isinstance(x, Tensor) else size
    kind, replaced = type(layer.module).__name__, None
    if size is not None and isinstance(layer.module, nn.Embedding) and isinstance(x, Tensor) and len(x) == 1 < size:
        x, output = (tensor.expand(size, *tensor.shape[1:]) for tensor in (x, output))
        replaced = output
    if not isinstance(x, Tensor) or not isinstance(output, Tensor) or len(x) != size or len(output) != size:
        shown = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise Refused(
            f"A {kind} layer was called on {shown} for {size} records: the ghost engine needs the records on the first "
            "axis of each layer's input and output. Use engine='forward' (or 'auto')."
        )
    if not output.requires_grad:
        raise Refused(
            f"A {kind} layer ran without a graph (torch.no_grad(), or reentrant checkpointing). Use engine='forward' "
            "(or 'auto')."
        )
    # Taken now, the edge is that of the layer's own output, even if an in-place activation overwrites it later.
    return Call(layer, x.detach(), x._version, get_gradient_edge(output), not x.requires_grad), replaced


def count_uses(outputs: Outputs, params: dict[str, Tensor]) -> tuple[Counter[str], set[Node]]:
    """Return how often each parameter enters the graph of the outputs, and the graph's nodes."""
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
