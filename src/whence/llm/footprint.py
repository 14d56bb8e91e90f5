"""What passes of a language model take, in bytes and operations, worked out without weights.

Models are made on the meta device and run on tensors that have shapes and no numbers, so that a model of any size is
looked at within seconds, and by its own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from whence.engines.memory import measure_bytes
from whence.errors import Unsupported
from whence.llm.model import takes
from whence.llm.view import unscored_view

_Run = Callable[[dict[str, Tensor]], None]
"""What is done with a batch's columns."""


@dataclass(frozen=True)
class Pass:
    """What one pass takes.

    Attributes:
        held: bytes in tensors at its most, besides weights and inputs; gradients are among them.
        flops: floating-point operations of linear layers; fused attention's own, few at short lengths, are left out.
    """

    held: int
    flops: float


@dataclass(frozen=True)
class Rows:
    """How many rows a pass is over, and their tokens.

    rows, prompt, response: numbers of each.
    """

    rows: int
    prompt: int
    response: int


@contextmanager
def without_weights() -> Iterator[None]:
    """Have models that are made within hold shapes alone."""
    with torch.device("meta"):
        yield


def training_pass(model: Any, rows: Rows, autocast: torch.dtype | None = None) -> Pass:
    """Return what log-probs, values and their gradients take, the gradients of trained parameters included.

    Args:
        model: made in `without_weights`; a causal language model, with an adapter or a value head or not.
        rows: of one forward and backward pass.
        autocast: of mixed precision; None: there is none.
    """

    def run(inputs: dict[str, Tensor]) -> None:
        view = unscored_view(model)
        with _autocast(autocast):
            outputs = view.only({"log_prob", "value"}, view.parameters(), inputs)
        loss = outputs.log_prob.sum() + (0 if outputs.value is None else outputs.value.sum())
        loss.backward()

    return _measured(model, rows, run)


def reading_pass(model: Any, rows: Rows, autocast: torch.dtype | None = None) -> Pass:
    """Return what log-probs and values take without gradients; arguments as of `training_pass`."""
    return _measured(model, rows, _reading(model, autocast))


def _reading(model: Any, autocast: torch.dtype | None) -> _Run:
    def run(inputs: dict[str, Tensor]) -> None:
        view = unscored_view(model)
        with torch.no_grad(), _autocast(autocast):
            view.only({"log_prob", "value"}, view.parameters(), inputs)

    return run


def generating_pass(model: Any, rows: Rows, autocast: torch.dtype | None = None) -> Pass:
    """Return what drawing responses takes: a pass over the prompts, and keys and values of all tokens.

    Arguments as of `training_pass`; the model has no value head, and is in eval mode: some keep nothing in training.
    """
    found: list[Any] = []

    def run(inputs: dict[str, Tensor]) -> None:
        last = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
        with torch.no_grad(), _autocast(autocast):
            found.append(
                model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=True, **last)
            )

    held = _held(model, Rows(rows.rows, rows.prompt, 0), run)
    # What is left of the pass is its logits, and keys and values, which grow with every token.
    grown = (held[-1] - found[0].logits.nbytes) * rows.response / rows.prompt
    # The tokens that are drawn and the logits that are read are those of reading the whole.
    return Pass(max(held) + round(grown), _flops(model, rows, _reading(model, autocast)))


def _autocast(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _measured(model: Any, rows: Rows, run: _Run) -> Pass:
    return Pass(max(_held(model, rows, run), default=0), _flops(model, rows, run))


def _held(model: Any, rows: Rows, run: _Run) -> list[int]:
    """Run something on rows without numbers; return the bytes held after each allocation and release."""
    with _inputs(model, rows) as inputs:
        return measure_bytes(lambda: run(inputs))


def _flops(model: Any, rows: Rows, run: _Run) -> float:
    """Run something on rows without numbers; return the operations, of a run apart: their counter keeps tensors."""
    with _inputs(model, rows) as inputs, FlopCounterMode(display=False) as counter:
        run(inputs)
    return float(counter.get_total_flops())


@contextmanager
def _inputs(model: Any, rows: Rows) -> Iterator[dict[str, Tensor]]:
    """Make rows without numbers for a model that has none while they are there.

    Raises:
        Unsupported: a model that looks at numbers.
    """
    tokens = rows.prompt + rows.response
    with _without_numbers(model):
        ids = torch.zeros(rows.rows, tokens, dtype=torch.long)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.zeros_like(ids),
            "response_mask": torch.ones(rows.rows, rows.response, dtype=torch.bool),
        }
        try:
            yield inputs
        except RuntimeError as wrong:
            raise Unsupported(
                f"What {type(model).__name__} takes cannot be told without its weights: {str(wrong).splitlines()[0]}"
            ) from wrong


@contextmanager
def _without_numbers(model: nn.Module) -> Iterator[None]:
    """Put tensors without numbers, which say that they are on the CPU, into a model's place for them.

    What looks at values, as Transformers does at attention masks, sees that there are none; on the meta device it
    would fail. Parameters that are tied stay so.
    """
    stores: list[dict[str, Any]] = [
        store for module in model.modules() for store in (module._parameters, module._buffers)
    ]
    before = [dict(store) for store in stores]
    with FakeTensorMode(allow_non_fake_inputs=True):
        made: dict[int, Any] = {}
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = made.setdefault(id(tensor), _like(tensor))
        try:
            yield
        finally:
            for store, own in zip(stores, before, strict=True):
                store.update(own)


def _like(tensor: Tensor) -> Tensor:
    found = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def count_bytes(model: nn.Module, *, trained: bool = False) -> int:
    """Return the bytes of a model's parameters and buffers; `trained`: of the parameters that train alone."""
    if trained:
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
