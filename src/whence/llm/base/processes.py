"""Several processes with a model each, or parts of one: split rows among them, and sum or gather tensors over them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast, broadcast_object_list, gather_object
from torch import Tensor, nn

from whence.core import Unsupported, WhenceError, load_rng_state, read_rng_state
from whence.engines import Gradient, agree_on_most

_KINDS_WITH_COPIES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_XPU,
)


@dataclass(frozen=True)
class Processes:
    """The processes of a training; `ONE` is a process on its own.

    Attributes:
        accelerator: the accelerator of Accelerate, which connects the processes; None: there is only this one.
        need_copies: whether each process needs the whole model.

    Raises:
        Unsupported: the processes split the model's parameters among them, and need copies, or do it in another way
            than by FSDP2 or DeepSpeed.
    """

    accelerator: Accelerator | None = None
    need_copies: bool = False

    def __post_init__(self) -> None:
        if self.accelerator is None or self.hold_copies:
            return
        kind = self.accelerator.distributed_type
        if self.need_copies:
            raise Unsupported(
                f"The processes split the model's parameters among them ({kind.value}), and PPOTrainer needs a copy in "
                "each: accelerate launch --multi_gpu --num_processes N (on CPUs with ACCELERATE_USE_CPU=1), without "
                "FSDP, DeepSpeed, Megatron. TRL's trainers can be scored under FSDP2 and DeepSpeed."
            )
        if kind != DistributedType.DEEPSPEED and not getattr(self.accelerator, "is_fsdp2", False):
            raise Unsupported(
                f"The processes split the model's parameters among them by {kind.value}, which scores do not know. Use "
                "FSDP2 (accelerate launch --use_fsdp --fsdp_version 2), DeepSpeed's ZeRO (--use_deepspeed), or "
                "processes that hold a copy each (--multi_gpu)."
            )

    @property
    def hold_copies(self) -> bool:
        """Whether each process has the whole model."""
        return self.accelerator is None or self.accelerator.distributed_type in _KINDS_WITH_COPIES

    @property
    def number(self) -> int:
        """The number of processes."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return torch.device("cpu") if self.accelerator is None else self.accelerator.device

    def check_batch(self, batch_size: int) -> None:
        """Raise WhenceError for a batch that leaves a process without a row."""
        if batch_size < self.number:
            raise WhenceError(
                f"batch_size is {batch_size}, and there are {self.number} processes; give each a row at least."
            )

    def part(self, count: int) -> slice:
        """Return this process's part of `count` consecutive items; the parts' sizes differ by at most one."""
        return self._parts(count)[self.rank]

    def _parts(self, count: int) -> list[slice]:
        bounds = [rank * count // self.number for rank in range(self.number + 1)]
        return [slice(first, last) for first, last in pairwise(bounds)]

    def gather(self, rows: Tensor, count: int) -> Tensor:
        """Return the rows of all processes, in order: `count` rows, of which each process has at least one."""
        if self.accelerator is None or self.number == 1:
            return rows
        most = -(-count // self.number)
        padded = rows if len(rows) == most else torch.cat([rows, rows[-1:]])  # all processes have to send equally many
        parts = self.accelerator.gather(padded.contiguous()).split(most)
        sizes = [part.stop - part.start for part in self._parts(count)]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def sum_tensors(self, tensors: Gradient) -> Gradient:
        """Return the sum of each tensor over the processes."""
        if self.accelerator is None or self.number == 1:
            return tensors
        return self.accelerator.reduce(tensors, "sum")  # type: ignore[no-any-return]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set each parameter's gradient to its sum over the processes."""
        if self.number == 1:
            return
        by_name = {str(number): parameter for number, parameter in enumerate(parameters)}
        total = self.sum_tensors(
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in by_name.items()}
        )
        for name, parameter in by_name.items():
            parameter.grad = total[name]

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the first process's parameters and buffers to every process."""
        if self.number == 1:
            return
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.copy_(broadcast(tensor.detach().clone()))

    def gather_states(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return, in every process, a state of plain values and tensors of each, with its global random generators."""
        generators = read_rng_state()
        # The generators of other GPUs are other processes'.
        generators["cuda"] = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        states = [{**state, "generators": generators}]
        return states if self.number == 1 else gather_object(states)

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Put this process's generators where they were, and return its part of what `gather_states` returned."""
        state = states[self.rank]
        load_rng_state({**state["generators"], "cuda": []})
        if state["generators"]["cuda"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["generators"]["cuda"][0], self.device)
        return state

    def agree_on_most(self, count: int) -> int:
        """Return the largest count of all processes."""
        return count if self.number == 1 else agree_on_most(count, self.device)

    def agree(self, decision: bool) -> bool:
        """Return, in every process, what the first one decided."""
        return decision if self.number == 1 else bool(broadcast_object_list([decision])[0])

    def wait(self) -> None:
        """Wait until every process has come so far."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


ONE = Processes()
"""A process on its own."""
