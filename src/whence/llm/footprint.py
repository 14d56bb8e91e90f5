"""Bytes and operations of a language model's passes, measured without weights.

Models are made on the meta device and run on tensors that have shapes and no numbers, so that a model of any size is
measured within seconds, by its own code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from whence.engines.memory import measure_bytes
from whence.errors import Unsupported, first_line
from whence.layers import Layers, choose_parameters
from whence.llm.hidden_states import HIDDEN
from whence.llm.model import accepts_argument
from whence.llm.view import unscored_view

_Run = Callable[[dict[str, Tensor]], None]
"""A pass: called with the model's inputs by name."""


@dataclass(frozen=True)
class Pass:
    """Memory and work of one pass.

    Attributes:
        bytes: the most bytes in tensors at a time, without weights and inputs, with gradients.
        flops: floating-point operations of linear layers, without those of fused attention, few at short lengths.
    """

    bytes: int
    flops: float


@dataclass(frozen=True)
class BatchShape:
    """The size of a pass: its number of rows, and the tokens of each row's prompt and response."""

    rows: int
    prompt: int
    response: int


@contextmanager
def skip_weights() -> Iterator[None]:
    """Make models without weights, with shapes alone."""
    with torch.device("meta"):
        yield


def measure_training_pass(
    model: Any, shape: BatchShape, autocast: torch.dtype | None = None, *, first_block: int = 0
) -> Pass:
    """Measure a pass for log-probs, values and their gradients, including the gradients of trained parameters.

    Args:
        model: a causal language model made in `skip_weights`, with or without an adapter or a value head.
        shape: the size of the pass.
        autocast: the type of mixed precision; None: no mixed precision.
        first_block: the block that the pass begins at, from 0, with hidden states from before.
    """

    def run(inputs: dict[str, Tensor]) -> None:
        view = unscored_view(model, first_block=first_block)
        with _autocast(autocast):
            outputs = view.only({"log_prob", "value"}, view.parameters(), _add_hidden(inputs, model, first_block))
        loss = outputs.log_prob.sum() + (0 if outputs.value is None else outputs.value.sum())
        loss.backward()

    return _measure(model, shape, run)


@contextmanager
def train_layers_alone(model: nn.Module, layers: Layers | None) -> Iterator[None]:
    """Let no parameters train but those of some layers, as scores by them have it; None: all that train."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen = trained.keys() if layers is None else choose_parameters(model, trained, layers)
    others = [p for name, p in trained.items() if name not in set(chosen)]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def measure_reading_pass(
    model: Any, shape: BatchShape, autocast: torch.dtype | None = None, *, first_block: int = 0
) -> Pass:
    """Measure a pass for log-probs and values without gradients; arguments as in `measure_training_pass`."""

    def run(inputs: dict[str, Tensor]) -> None:
        view = unscored_view(model, first_block=first_block)
        with torch.no_grad(), _autocast(autocast):
            view.only({"log_prob", "value"}, view.parameters(), _add_hidden(inputs, model, first_block))

    return _measure(model, shape, run)


def hidden_bytes(model: Any, shape: BatchShape) -> int:
    """Return the bytes of the hidden states of a pass's rows before one block."""
    tokens, parameter = shape.rows * (shape.prompt + shape.response), next(iter(model.parameters()))
    return tokens * _find_width(model) * int(parameter.element_size())


def _add_hidden(inputs: dict[str, Tensor], model: Any, first_block: int) -> dict[str, Tensor]:
    """Return inputs with the hidden states that a pass begins with, if it begins at a later block than the first."""
    if not first_block:
        return inputs
    shape, dtype = inputs["input_ids"].shape, next(iter(model.parameters())).dtype
    return {**inputs, HIDDEN: torch.empty(*shape, _find_width(model), dtype=dtype)}


def _find_width(model: Any) -> int:
    return int(getattr(model, "language_model", model).get_input_embeddings().embedding_dim)


def measure_generating_pass(model: Any, shape: BatchShape, autocast: torch.dtype | None = None) -> Pass:
    """Measure drawing responses: a pass over the prompts, and keys and values of all tokens.

    Arguments as in `measure_training_pass`. The model has no value head, and is in eval mode: some models store no keys
    and values in training mode.
    """
    outputs: list[Any] = []

    def run(inputs: dict[str, Tensor]) -> None:
        last = {"logits_to_keep": 1} if accepts_argument(model, "logits_to_keep") else {}
        with torch.no_grad(), _autocast(autocast):
            outputs.append(
                model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=True, **last)
            )

    trace, _ = _trace(model, BatchShape(shape.rows, shape.prompt, 0), run)
    # After the pass there remain its logits, and keys and values, which grow with every token.
    growth = (trace[-1] - outputs[0].logits.nbytes) * shape.response / shape.prompt
    # Drawing token by token computes as many tokens and logits as reading the whole.
    return Pass(max(trace) + round(growth), measure_reading_pass(model, shape, autocast).flops)


def _autocast(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _measure(model: Any, shape: BatchShape, run: _Run) -> Pass:
    trace, flops = _trace(model, shape, run)
    return Pass(max(trace, default=0), flops)


def _trace(model: Any, shape: BatchShape, run: _Run) -> tuple[list[int], float]:
    """Run a pass on inputs without numbers; return the bytes after each allocation and release, and the operations."""
    counter = _FlopCounter()
    with _make_inputs(model, shape) as inputs:

        def count() -> None:
            with counter:
                run(inputs)

        return measure_bytes(count), float(counter.total)


class _FlopCounter(TorchDispatchMode):
    """Counts operations as PyTorch's `FlopCounterMode` does, which keeps tensors: bytes would take a second pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=output)
        return output


@contextmanager
def _make_inputs(model: Any, shape: BatchShape) -> Iterator[dict[str, Tensor]]:
    """Yield inputs without numbers, while the model's own tensors have no numbers either.

    Raises:
        Unsupported: the model's code depends on numbers.
    """
    tokens = shape.prompt + shape.response
    with _fake_tensors(model):
        ids = torch.zeros(shape.rows, tokens, dtype=torch.long)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.zeros_like(ids),
            "response_mask": torch.ones(shape.rows, shape.response, dtype=torch.bool),
        }
        try:
            yield inputs
        except RuntimeError as error:
            raise Unsupported(
                f"{type(model).__name__} cannot be measured without its weights: {first_line(error)}"
            ) from error


@contextmanager
def _fake_tensors(model: nn.Module) -> Iterator[None]:
    """Replace a model's tensors by fake ones: on the CPU by their own account, and without numbers.

    Code that reads values, as Transformers does for attention masks, detects fake tensors; on the meta device it would
    fail. Tied parameters stay tied.
    """
    stores: list[dict[str, Any]] = [
        store for module in model.modules() for store in (module._parameters, module._buffers)
    ]
    before = [dict(store) for store in stores]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes: dict[int, Any] = {}
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = fakes.setdefault(id(tensor), _make_empty(tensor))
        try:
            yield
        finally:
            for store, tensors in zip(stores, before, strict=True):
                store.update(tensors)


def _make_empty(tensor: Tensor) -> Tensor:
    """Return an empty tensor, or parameter, of the same shape and type on the CPU."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def count_bytes(model: nn.Module, *, trained: bool = False) -> int:
    """Return the bytes of a model's parameters and buffers; with `trained`, of the parameters that train alone."""
    if trained:
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
