"""What whence relies on in Accelerate beyond its documentation."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from helpers.contracts import check_each, takes


def keeps_the_forward_without_autocast() -> bool:
    model = torch.nn.Linear(2, 1)
    forward = model.forward
    AcceleratorState._reset_state()  # another test of this process may have made it in full precision
    prepared = vars(Accelerator(cpu=True, mixed_precision="bf16").prepare(model))
    AcceleratorState._reset_state()
    return prepared["_original_forward"] == forward != prepared["forward"]


PRIVATE = {
    "_original_forward": keeps_the_forward_without_autocast,
    "backward": lambda: takes(Accelerator.backward, "loss"),
    "scaler, is_fsdp2": lambda: (Accelerator(cpu=True).scaler, Accelerator(cpu=True).is_fsdp2) == (None, False),
}

test_private = check_each(PRIVATE)
