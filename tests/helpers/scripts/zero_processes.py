"""The script that test_zero.py runs in two processes, which hold a model in shards (DeepSpeed's ZeRO stage 3)."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DeepSpeedPlugin
from deepspeed.utils import safe_get_full_grad

from helpers.launching import end_process
from helpers.scripts.sharded_processes import compare_scores, square_logits
from whence.llm.base import Processes

CASES: dict[int, list[tuple[str, float | None]]] = {
    0: [("gpt2", None), ("llama", 0.1), ("qwen3", None)],
    100: [("gpt2", None)],
}
"""Models, and the dropout of an adapter, by the most numbers of a parameter that stays whole: norms and biases."""

ENGINES: dict[int, Any] = {}
"""DeepSpeed's engines by the model that each trains."""


def make_settings(persist: int) -> dict[str, Any]:
    """Return DeepSpeed's settings; parameters of at most `persist` numbers stay whole."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": persist, "stage3_prefetch_bucket_size": 600}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}


def shard(model: Any, settings: dict[str, Any]) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ENGINES[id(model)], *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return model


def check_shards(model: Any) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.numel() == 0 or parameter.ds_persist, name
        assert parameter.grad is None, name
    assert any(parameter.numel() == 0 for parameter in model.parameters())


def differentiate(model: Any, rows: Any) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a training's loss by DeepSpeed's engine, which takes the loss's mean."""
    engine = ENGINES[id(model)]
    engine.backward(square_logits(engine, rows))
    return {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}


def main(folder: Path) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=make_settings(0), zero3_init_flag=False)
    gloo = InitProcessGroupKwargs(backend="gloo")  # without it, Accelerate sees one process on CPUs
    processes = Processes(Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo]))
    results = {}
    for persist, cases in CASES.items():
        shard_model = partial(shard, settings=make_settings(persist))
        scores = compare_scores(processes, cases, shard_model, check_shards, differentiate)
        results |= {f"{case}, {persist} whole": result for case, result in scores.items()}
    (folder / f"{processes.rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
