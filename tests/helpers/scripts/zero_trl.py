"""The script that test_zero.py runs in two processes: TRL's trainers under DeepSpeed's ZeRO."""

import os
from typing import Any

import deepspeed
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState

from helpers.scripts.shards_trl import Training, compare_trainers

TRAININGS: list[Training] = [("grpo", 3), ("rloo", 3), ("grpo", 2)]
"""Trainers and ZeRO's stages; in stage 2 each process holds whole parameters."""


def start(stage: int) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # without it, Accelerate sees one process on CPUs
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    sizes = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], "auto")
    return {"deepspeed": {**sizes, "zero_optimization": zero, "zero_allow_untested_optimizer": True}}


def copy_whole(model: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):  # in stage 2 without effect
        return {name: p.detach().clone() for name, p in model.named_parameters()}


if __name__ == "__main__":
    compare_trainers(TRAININGS, start, copy_whole)
