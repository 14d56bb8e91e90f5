"""Views of policies: log-probabilities, values and entropies as functions of the parameters."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, is_dataclass
from importlib.metadata import entry_points
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.core.columns import Tree, map_tree
from whence.core.errors import Unsupported
from whence.core.packages import load_plugin
from whence.core.records import RecordBatch

Params: TypeAlias = Mapping[str, Tensor]


class Outputs(NamedTuple):
    """A policy's outputs for n records: `log_prob` (n,), `value` (n,) or None, `entropy` (n,) or None.

    A record of several actions, such as a language model's row of tokens, may have a number for each: (n, R).
    Objective and target then have to read such outputs, as those of `whence.llm` do.
    """

    log_prob: Float[Tensor, "n ..."]
    value: Float[Tensor, "n ..."] | None = None
    entropy: Float[Tensor, "n ..."] | None = None


class LazyOutputs(NamedTuple):
    """`Outputs` whose value and entropy are computed only if something reads them."""

    log_prob: Float[Tensor, "n ..."]
    value: Callable[[], Tensor | None]
    entropy: Callable[[], Tensor | None]


COLUMNS = frozenset(Outputs._fields)


class PolicyView(ABC):
    """Base of policies as functions of their parameters, which engines differentiate.

    `prepare` runs once and does what needs no derivative (one-hot, image scaling, device). The first axis of each
    output is the records', and a record's outputs may depend on that record's inputs only.

    Attributes:
        module: the policy.
        in_train_mode: whether training puts the module in train mode, whatever mode it has now.
    """

    module: nn.Module
    in_train_mode: bool = False

    @property
    def action_space(self) -> Any:
        """A Gymnasium space, outside which targets refuse actions; None: not known."""
        return None

    @abstractmethod
    def parameters(self) -> dict[str, Tensor]:
        """Return the trainable parameters by name."""

    @abstractmethod
    def prepare(self, records: RecordBatch) -> Tree:
        """Return the inputs of the records: tensors, or nested dicts and tuples of tensors, records first."""

    @abstractmethod
    def __call__(self, params: Params, inputs: Tree) -> Outputs:
        """Evaluate the policy at `params`."""

    def only(self, columns: Collection[str], params: Params, inputs: Tree) -> Outputs:
        """Evaluate the policy at `params`; outputs outside `columns` may be None."""
        return self(params, inputs)

    def cast(self, dtype: torch.dtype) -> "PolicyView | None":
        """Return a view whose inputs are of a floating dtype, for such parameters; None: there is none."""
        return None

    def identity(self) -> Hashable:
        """Return a key of what the view computes, the same for all views of its module that compute it; or None."""
        return None


class ModuleView(PolicyView):
    """A view of any `nn.Module` through a plain function.

    Args:
        module: the policy. Its trainable parameters are those with `requires_grad`.
        outputs: `outputs(module, inputs)` returns `Outputs`, `LazyOutputs`, or the log-probs alone, (n,) or (n, R). It
            may call the module and its submodules in any way; `attribute` drops what they store on themselves.
        prepare: `prepare(records)` returns the inputs, records first. Default: a dict of `observations`, `actions`
            and, if the records have them, `action_masks`.
        in_train_mode: whether training puts the module in train mode, whatever mode it has now.
        optimizer: returns the optimiser, whose parameters alone are trainable; None: all that require a gradient are.
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Callable[[Any, Tree], Outputs | LazyOutputs | Tensor],
        prepare: Callable[[RecordBatch], Tree] | None = None,
        *,
        in_train_mode: bool = False,
        optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None,
    ) -> None:
        self.module = module
        self.in_train_mode, self._optimizer = in_train_mode, optimizer
        self._outputs = outputs
        self._prepare = prepare or _default_inputs
        self._slots: list[_Slot] | None = None

    @property
    def action_space(self) -> Any:
        """The module's `action_space`, which SB3's policies have; None if it has none."""
        return getattr(self.module, "action_space", None)

    def parameters(self) -> dict[str, Tensor]:
        """The parameters that train; one with several names goes by the module's first."""
        self._slots = self._list_slots()  # listed again: modules may have been added or unfrozen
        return {slot.name: slot.parameter for slot in self._slots}

    def _list_slots(self) -> "list[_Slot]":
        slots, optimizer = _list_slots(self.module), self._optimizer()
        if optimizer is None:
            return slots
        moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [slot for slot in slots if id(slot.parameter) in moved]

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
            self._slots = self._list_slots()
        tensors = [*params.values(), *(slot.parameter for slot in self._slots)]
        is_placed = any(places(tensors) for places in _PLACEMENTS)
        with nullcontext() if is_placed else _swap_in(self._slots, params):
            outputs = self._outputs(self.module, inputs)
            if isinstance(outputs, LazyOutputs):
                value = outputs.value() if "value" in columns else None
                entropy = outputs.entropy() if "entropy" in columns else None
                return Outputs(outputs.log_prob, value, entropy)
        return Outputs(outputs) if isinstance(outputs, Tensor) else outputs

    def cast(self, dtype: torch.dtype) -> "ModuleView | None":
        """Return a view whose inputs are of a floating dtype; None: buffers or frozen parameters are of another."""
        frozen = (parameter for parameter in self.module.parameters() if not parameter.requires_grad)
        if any(tensor.is_floating_point() for tensor in (*self.module.buffers(), *frozen)):
            return None

        def prepare(records: RecordBatch) -> Tree:
            return map_tree(lambda each: each.to(dtype) if each.is_floating_point() else each, self.prepare(records))

        return ModuleView(self.module, self._outputs, prepare)

    def identity(self) -> Hashable:
        """Return a key of the view's functions; None where code and module do not determine what they compute."""
        codes = tuple(_identify_function(function, self.module) for function in (self._outputs, self._prepare))
        return None if None in codes else (type(self), *codes)


def named_tensors(policy: Any) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, or of a view's, each once.

    A shared features extractor stands under three names in `state_dict()`, which safetensors refuses.
    """
    module = policy.module if isinstance(policy, PolicyView) else policy
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _default_inputs(records: RecordBatch) -> Tree:
    inputs = {"observations": records.observations, "actions": records.actions}
    return inputs if records.action_masks is None else inputs | {"action_masks": records.action_masks}


class _Slot(NamedTuple):
    """A place where a module stores a parameter: `holder[key]` is `parameter`, which the view calls `name`."""

    holder: dict[str, Any]
    key: str
    parameter: Tensor
    name: str


def _list_slots(module: nn.Module) -> list[_Slot]:
    # torch.func.functional_call swaps a parameter once for each of its names, and restores the wrong tensor if a
    # submodule has several names, such as SB3's shared features extractor. Here each place is listed once and named
    # by the identity of its parameter, which restores aliases and tied weights correctly.
    names: dict[int, str] = {}
    return [
        _Slot(submodule._parameters, key, p, names.setdefault(id(p), f"{path}.{key}" if path else key))
        for path, submodule in module.named_modules()
        for key, p in submodule._parameters.items()
        if p is not None and p.requires_grad
    ]


_PLACEMENTS: list[Callable[[Iterable[Tensor]], bool]] = []


def register_placement(places: Callable[[Iterable[Tensor]], bool]) -> None:
    """Register a test that tells whether a pass on some of these parameters puts them in place itself.

    A view then leaves the module's parameters as they are, and evaluates it at these.
    """
    _PLACEMENTS.append(places)


@contextmanager
def _swap_in(slots: Sequence[_Slot], params: Params) -> Iterator[None]:
    try:
        for slot in slots:
            slot.holder[slot.key] = params.get(slot.name, slot.parameter)
        yield
    finally:
        for slot in slots:
            slot.holder[slot.key] = slot.parameter


# Engines' notes on a view, by the view or its module. An entry dies with its key, which it must not reference.
_NOTES: "weakref.WeakKeyDictionary[Any, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()


def notes_on(view: PolicyView) -> dict[Hashable, Any]:
    """Return the engines' notes on a view, a dict to read and to add to; a note must not reference the view.

    Views of one module with the same functions share their notes, since `as_view` makes a view for each call.
    """
    if (identity := view.identity()) is not None:
        return _NOTES.setdefault(view.module, {}).setdefault(identity, {})  # type: ignore[no-any-return]
    try:
        return _NOTES.setdefault(view, {})
    except TypeError:  # the view has no hash, or allows no weak references
        return {}


def _identify_function(function: Callable[..., Any], module: nn.Module) -> Hashable:
    """Return a key of a function's code if code and module determine what it computes; else None."""
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
    """Register a function that makes views of policies whose class, or a base of it, is from the package `package`.

    An installed package can register its function by an entry point of the group "whence.views" with its own name.
    """
    _VIEWS[package] = make


def unwrap_compiled(policy: object) -> object:
    """Return the module of which `torch.compile` returned `policy`; they share all parameters."""
    return getattr(policy, "_orig_mod", policy)


def as_view(policy: object) -> PolicyView:
    """Return `policy` if it is a view, else a view by the function registered for its class's package.

    Raises:
        Unsupported: no function is registered for the policy's class, or `policy` is an algorithm of SB3.
    """
    if any(base.__module__ == "stable_baselines3.common.base_class" for base in type(policy).__mro__):
        raise Unsupported(
            f"policy is a {type(policy).__name__} algorithm of Stable-Baselines3; a policy is needed. Pass its policy: "
            "model.policy."
        )
    if isinstance(policy, PolicyView):
        return policy
    policy = unwrap_compiled(policy)
    for base in type(policy).__mro__:
        package = base.__module__.partition(".")[0]
        if make := _VIEWS.get(package) or load_plugin("whence.views", package):
            return make(policy)
    packages = sorted({*_VIEWS, *entry_points(group="whence.views").names})
    raise Unsupported(
        f"whence cannot read log-probabilities from a {type(policy).__module__}.{type(policy).__qualname__}. "
        f"Pass a policy of {', '.join(packages) or 'a registered library'}, or wrap your own: "
        "whence.ModuleView(module, lambda module, inputs: log_probs)."
    )
