"""Several processes with a copy of the model each: whose rows are whose, and what is summed or gathered over all."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast
from torch import Tensor, nn

from whence.engines import Gradient
from whence.errors import Unsupported

_COPIES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_XPU,
)


@dataclass(frozen=True)
class Processes:
    """The processes of a training; alone, `one`, where there are no others.

    Attributes:
        accelerator: of Accelerate, which talks to the others; None: there are none.
    """

    accelerator: Accelerator | None = None

    def __post_init__(self) -> None:
        if self.accelerator is not None and self.accelerator.distributed_type not in _COPIES:
            raise Unsupported(
                f"The processes share the model's parameters out among them ({self.accelerator.distributed_type.value}"
                "), and scores need whole gradients. Start processes that hold a copy each: accelerate launch "
                "--multi_gpu --num_processes N (on CPUs with ACCELERATE_USE_CPU=1), without FSDP, DeepSpeed, Megatron."
            )

    @property
    def number(self) -> int:
        """How many there are."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Which of them this is, from 0."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cpu") if self.accelerator is None else self.accelerator.device

    def own(self, count: int) -> slice:
        """Return this process's part of `count` things in a row; no two parts differ by more than one in size."""
        return self._parts(count)[self.rank]

    def _parts(self, count: int) -> list[slice]:
        bounds = [rank * count // self.number for rank in range(self.number + 1)]
        return [slice(first, last) for first, last in pairwise(bounds)]

    def gathered(self, own: Tensor, count: int) -> Tensor:
        """Return the `count` rows of all processes, in order, of which this one holds its `own`.

        Args:
            own: (rows of this process, ...).
            count: rows in all; at least one for each process.
        """
        if self.accelerator is None or self.number == 1:
            return own
        most = -(-count // self.number)
        sent = own if len(own) == most else torch.cat([own, own[-1:]])  # what is sent has to be of one size
        parts = self.accelerator.gather(sent.contiguous()).split(most)
        sizes = [part.stop - part.start for part in self._parts(count)]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def summed(self, tensors: Gradient) -> Gradient:
        """Return the sum of each tensor over the processes."""
        if self.accelerator is None or self.number == 1:
            return tensors
        return self.accelerator.reduce(tensors, "sum")  # type: ignore[no-any-return]

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the sum over the processes into each parameter's gradient."""
        if self.number == 1:
            return
        held = {str(at): parameter for at, parameter in enumerate(parameters)}
        zeros = {at: torch.zeros_like(parameter) for at, parameter in held.items() if parameter.grad is None}
        total = self.summed({at: zeros[at] if p.grad is None else p.grad for at, p in held.items()})
        for at, parameter in held.items():
            parameter.grad = total[at]

    def make_equal(self, model: nn.Module) -> None:
        """Give every process the first one's parameters and buffers."""
        if self.number == 1:
            return
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.copy_(broadcast(tensor.detach().clone()))

    def generators(self) -> dict[str, Tensor]:
        """Return the states of torch's global generators in all processes, uint8."""
        own = {"torch": torch.get_rng_state()}
        if self.device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(self.device)
        states = {kind: self.gathered(state[None].to(self.device), self.number).cpu() for kind, state in own.items()}
        return {f"{kind}/{rank}": state for kind, of_all in states.items() for rank, state in enumerate(of_all)}

    def set_generators(self, states: Mapping[str, Tensor]) -> None:
        """Put this process's generators back to what `generators` returned."""
        torch.set_rng_state(states[f"torch/{self.rank}"])
        if self.device.type == "cuda" and f"cuda/{self.rank}" in states:
            torch.cuda.set_rng_state(states[f"cuda/{self.rank}"], self.device)


ONE = Processes()
"""A process on its own."""
