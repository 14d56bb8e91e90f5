"""The script that test_sharded.py runs in two processes: TRL's trainers under Accelerate's FSDP2, on CPUs."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from helpers.scripts.shards_trl import Training, compare_trainers

TRAININGS = [("grpo", "fsdp2"), ("rloo", "fsdp2")]


def start(training: Training) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    # Accelerate shards by FSDP where it sees several GPUs; its code then runs on CPUs just as well.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": layers}


def copy_whole(model: Any) -> dict[str, torch.Tensor]:
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    compare_trainers(TRAININGS, start, copy_whole)
