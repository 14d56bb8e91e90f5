"""The script that test_sharded.py runs in two processes: TRL's trainers under Accelerate's FSDP2, on CPUs."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from helpers.language_training import make_model
from helpers.launching import end_process
from helpers.trl_training import TRAINERS, make_trainer
from whence import NonPositive, Selection, attribute
from whence.llm import TokenReturn, language_view
from whence.selection import ScoreAll

Training = tuple[str, Any]
"""A trainer, and what else its settings depend on."""

TRAININGS: list[Training] = [("grpo", "fsdp2"), ("rloo", "fsdp2")]


def start(how: Any) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo")
    # Accelerate shards by FSDP where it sees several GPUs; its code then runs on CPUs just as well.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    layers = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    return {"fsdp": "full_shard auto_wrap", "fsdp_config": layers}


def copy_whole(model: Any) -> dict[str, torch.Tensor]:
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


def compare_training(
    kind: str, how: Any, start: Callable[[Any], dict[str, Any]], copy_whole: Callable[[Any], dict[str, torch.Tensor]]
) -> dict[str, Any]:
    """Return how far scores are from the loop's, and how far a training with scores is from TRL's own."""
    folder, trainer_type = Path(sys.argv[1]), TRAINERS[kind][0]
    distances: list[float] = []
    score_rows = trainer_type._score_rows

    def train(name: str, rule: Any = None, **more: Any) -> Any:
        settings = start(how) | {"use_cpu": False, "max_steps": 2, "dataloader_pin_memory": False}
        state = {"use_configured_state": True}
        trainer = make_trainer(kind, folder / name, rule, accelerator_config=state, **settings, **more)
        trainer.train()
        return trainer

    def score_and_compare(self: Any, rows: Any) -> Any:
        influence = score_rows(self, rows)
        whole = make_model()
        whole.load_state_dict(copy_whole(self.accelerator.unwrap_model(self.model)), strict=False)
        by_loop = {"target": self.scoring.target, "objective": self.scoring.objective, "engine": "loop"}
        truth = attribute(language_view(whole, temperature=self.temperature), rows, **by_loop)
        distances.append(float((influence.scores - truth.scores).abs().max() / truth.scores.abs().max()))
        return influence

    plain, scored = (
        copy_whole(trainer.accelerator.unwrap_model(trainer.model))
        for trainer in (train("plain", own=False), train("scored", ScoreAll()))
    )
    trainer_type._score_rows = score_and_compare
    selected = train("selected", NonPositive(), target=TokenReturn())
    trainer_type._score_rows = score_rows
    states: list[dict[str, torch.Tensor]] = []

    class KeepFirstBatch:
        needs_influence = False

        def select(self, records: Any, influence: Any, progress: Any) -> Selection:
            return Selection.dropping(torch.full((len(records),), progress.round == 1), "not of the first batch")

    class Copy(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **rest: Any) -> None:
            states.append(copy_whole(model))

    train("dropped", KeepFirstBatch(), watch=Copy())
    return {
        "moved by a dropped batch": max(float((states[1][name] - t).abs().max()) for name, t in states[0].items()),
        "scores": distances,
        "kept": int(selected.selection.keep.sum()),
        "training": max(float((scored[name] - tensor).abs().max()) for name, tensor in plain.items()),
    }


def compare_trainers(
    trainings: Sequence[Training],
    start: Callable[[Any], dict[str, Any]] = start,
    copy_whole: Callable[[Any], dict[str, torch.Tensor]] = copy_whole,
) -> None:
    """Write what `compare_training` returns of each training, and end the process.

    Args:
        trainings: the trainings.
        start: connects the processes anew, and returns the settings of a trainer, by what they depend on.
        copy_whole: returns a model's whole parameters.
    """
    results = {f"{kind} {how}": compare_training(kind, how, start, copy_whole) for kind, how in trainings}
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    end_process()


def check_trainings(folder: Path, names: set[str]) -> None:
    """Check what `compare_trainers` wrote in two processes: the same as without shards."""
    for rank in range(2):
        results = json.loads((folder / f"{rank}.json").read_text())
        assert results.keys() == names
        for training, result in results.items():
            assert len(result["scores"]) == 2, training
            assert max(result["scores"]) < 1e-4, training
            assert 0 < result["kept"] < 16, training
            assert result["training"] == 0, training
            assert result["moved by a dropped batch"] == 0, training


if __name__ == "__main__":
    compare_trainers(TRAININGS)
