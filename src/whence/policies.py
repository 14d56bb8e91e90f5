"""How log-probabilities, values and entropies are read from a policy, as a function of its parameters."""

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, is_dataclass
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from whence.errors import Unsupported
from whence.records import RecordBatch, Tree, map_tree

Params: TypeAlias = Mapping[str, Tensor]


class Outputs(NamedTuple):
    """What a policy says of n records: `log_prob` (n,), `value` (n,) or None, `entropy` (n,) or None.

    A record that holds several actions, as a language model's row holds tokens, may have a number for each: (n, R).
    Objective and target then have to know of it, as those of `whence.llm` do.
    """

    log_prob: Float[Tensor, "n ..."]
    value: Float[Tensor, "n ..."] | None = None
    entropy: Float[Tensor, "n ..."] | None = None


class LazyOutputs(NamedTuple):
    """`Outputs` of which value and entropy are computed only where something reads them."""

    log_prob: Float[Tensor, "n ..."]
    value: Callable[[], Tensor | None]
    entropy: Callable[[], Tensor | None]


COLUMNS = frozenset(Outputs._fields)


@runtime_checkable
class PolicyView(Protocol):
    """A policy as engines see it.

    `prepare` does what needs no derivative (one-hot, image scaling, device), once; the call is what engines
    differentiate. Each output has the records first, and what it says of a record may depend on that record's inputs
    only. An attribute `action_space`, where there is one, is a space as Gymnasium has them; targets refuse actions that
    it does not hold.
    """

    module: nn.Module

    def parameters(self) -> dict[str, Tensor]:
        """The trainable parameters by name."""
        ...

    def prepare(self, records: RecordBatch) -> Tree:
        """Turn records into inputs: tensors, or nested dicts and tuples of them, records first."""
        ...

    def __call__(self, params: Params, inputs: Tree) -> Outputs:
        """Evaluate the policy at `params`."""
        ...


class ModuleView:
    """A view of any `nn.Module` through a plain function.

    Args:
        module: the policy. Its trainable parameters are those with `requires_grad`.
        outputs: `outputs(module, inputs)` returns `Outputs`, `LazyOutputs`, or the log-probs alone, (n,) or (n, R). It
            may call the module and its submodules in any way, but must not keep tensors on them.
        prepare: `prepare(records)` returns the inputs, records first. Default: a dict of `observations`,
            `actions` and, where there are, `action_masks`.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Callable[[Any, Tree], Outputs | LazyOutputs | Tensor],
        prepare: Callable[[RecordBatch], Tree] | None = None,
    ) -> None:
        self.module = module
        self._outputs = outputs
        self._prepare = prepare or _plain_inputs
        self._slots: list[_Slot] | None = None

    @property
    def action_space(self) -> Any:
        """The module's own `action_space`, as SB3's policies have one; None where there is none."""
        return getattr(self.module, "action_space", None)

    def parameters(self) -> dict[str, Tensor]:
        """The parameters with `requires_grad`, by the first name the module gives them."""
        self._slots = _slots(self.module)  # anew, since modules may have been added or unfrozen
        return {slot.name: slot.parameter for slot in self._slots}

    def prepare(self, records: RecordBatch) -> Tree:
        """Return the inputs, on the device of the parameters."""
        device = next((p.device for p in self.module.parameters()), None)
        return map_tree(lambda tensor: tensor.to(device), self._prepare(records))

    def __call__(self, params: Params, inputs: Tree) -> Outputs:
        """Evaluate the policy at `params`."""
        return self.only(COLUMNS, params, inputs)

    def only(self, columns: Collection[str], params: Params, inputs: Tree) -> Outputs:
        """Evaluate the policy at `params`; lazy columns outside `columns` are None."""
        if self._slots is None:
            self._slots = _slots(self.module)
        with _swapped(self._slots, params):
            found = self._outputs(self.module, inputs)
            if isinstance(found, LazyOutputs):
                value = found.value() if "value" in columns else None
                entropy = found.entropy() if "entropy" in columns else None
                return Outputs(found.log_prob, value, entropy)
        return Outputs(found) if isinstance(found, Tensor) else found


def compute_outputs(view: PolicyView, columns: Collection[str], params: Params, inputs: Tree) -> Outputs:
    """Evaluate a view of any kind at `params`; what is costly and outside `columns` may be None."""
    return view.only(columns, params, inputs) if isinstance(view, ModuleView) else view(params, inputs)


def _plain_inputs(records: RecordBatch) -> Tree:
    inputs = {"observations": records.observations, "actions": records.actions}
    return inputs if records.action_masks is None else inputs | {"action_masks": records.action_masks}


class _Slot(NamedTuple):
    """A place where a module keeps a parameter: `holder[key]` is `parameter`, which the view calls `name`."""

    holder: dict[str, Any]
    key: str
    parameter: Tensor
    name: str


def _slots(module: nn.Module) -> list[_Slot]:
    # torch.func.functional_call swaps a parameter once per name it can be reached under, and puts the wrong tensor
    # back where a submodule has several names, as SB3's shared features extractor has. Here each place is listed
    # once and named by the identity of its parameter, so aliases and tied weights come out as they went in.
    names: dict[int, str] = {}
    return [
        _Slot(submodule._parameters, key, p, names.setdefault(id(p), f"{path}.{key}" if path else key))
        for path, submodule in module.named_modules()
        for key, p in submodule._parameters.items()
        if p is not None and p.requires_grad
    ]


@contextmanager
def _swapped(slots: Sequence[_Slot], params: Params) -> Iterator[None]:
    try:
        for slot in slots:
            slot.holder[slot.key] = params.get(slot.name, slot.parameter)
        yield
    finally:
        for slot in slots:
            slot.holder[slot.key] = slot.parameter


# What engines noted of a view, by the view itself or by its module. An entry goes with its key, which it must not hold.
_NOTES: "weakref.WeakKeyDictionary[Any, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()


def notes_on(view: PolicyView) -> dict[Hashable, Any]:
    """Return what engines have noted of a view, to be read and added to; a note must not hold the view.

    Views of one module share their notes where they are made of the same functions: `as_view` makes one for each call.
    """
    functions = (view._outputs, view._prepare) if type(view) is ModuleView else ()
    codes = tuple(_code_alone(function, view.module) for function in functions)
    if codes and None not in codes:
        return _NOTES.setdefault(view.module, {}).setdefault(codes, {})  # type: ignore[no-any-return]
    try:
        return _NOTES.setdefault(view, {})
    except TypeError:  # no hash, or no weak references
        return {}


def _code_alone(function: Callable[..., Any], module: nn.Module) -> Hashable:
    """Return a function's code where it says all there is to it, given the module; else None."""
    if is_dataclass(function) and not isinstance(function, type):
        plain = all(isinstance(value, int | float | str) for value in vars(function).values())
        return (type(function), *astuple(function)) if plain else None
    if not isinstance(function, FunctionType) or function.__defaults__ or function.__kwdefaults__:
        return None
    if any(cell.cell_contents is not module for cell in function.__closure__ or ()):
        return None
    return function.__code__, function.__code__.co_filename  # code objects of two files may be equal


_VIEWS: dict[str, Callable[[Any], PolicyView]] = {}


def register_view(package: str, make: Callable[[Any], PolicyView]) -> None:
    """Let `as_view` turn policies whose class, or a base of it, comes from the top-level `package` into views.

    An installed package registers its own by an entry point of the group "whence.views", named after `package`.
    """
    _VIEWS[package] = make


def _find_view(package: str) -> Callable[[Any], PolicyView] | None:
    """Return what makes views of a package's policies; an entry point is loaded once one of its policies arrives."""
    if package not in _VIEWS and (points := entry_points(group="whence.views", name=package)):
        _VIEWS[package] = next(iter(points)).load()
    return _VIEWS.get(package)


def _viewable_packages() -> list[str]:
    return sorted({*_VIEWS, *entry_points(group="whence.views").names})


def as_view(policy: object) -> PolicyView:
    """Return `policy` if it is a view, else the view registered for its class's package.

    Raises:
        Unsupported: no view is known for the policy's class.
    """
    if not isinstance(policy, nn.Module) and isinstance(policy, PolicyView):
        return policy
    for base in type(policy).__mro__:
        if make := _find_view(base.__module__.partition(".")[0]):
            return make(policy)
    raise Unsupported(
        f"whence cannot read log-probabilities from a {type(policy).__module__}.{type(policy).__qualname__}. "
        f"Pass a policy of {', '.join(_viewable_packages()) or 'a registered library'}, or wrap your own: "
        "whence.ModuleView(module, lambda module, inputs: log_probs)."
    )


def find_acting_parameters(view: PolicyView, records: RecordBatch) -> frozenset[str]:
    """Return the names of the parameters that log-probs depend on.

    Args:
        view: of the policy.
        records: at least one that the policy can read.
    """
    with torch.enable_grad():
        free = {name: p.detach().requires_grad_() for name, p in view.parameters().items()}
        total = view(free, view.prepare(records.take(slice(0, 1)))).log_prob.sum()
        gradients = torch.autograd.grad(total, list(free.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(free, gradients, strict=True) if gradient is not None)


def check_batch_norm(modules: Mapping[str, nn.Module]) -> None:
    """Refuse BatchNorm layers that normalise by the statistics of the records at hand.

    Raises:
        Unsupported: naming the layer.
    """
    for path, module in modules.items():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise Unsupported(
                f"The layer `{path}` ({type(module).__name__}) is in training mode: what it makes of a record depends "
                "on the other records of the minibatch, so no record has an objective of its own. Put it in eval "
                "mode, where its statistics are constants, if it is trained so; or use LayerNorm or GroupNorm."
            )
