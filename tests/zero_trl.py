"""The script that test_zero.py runs in two processes: TRL's trainers under DeepSpeed's ZeRO."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState

from launching import end_process
from test_llm_trainer import ScoreAndKeepAll, make_model
from test_llm_trl import TRAINERS, make_trainer
from whence import NonPositive, attribute
from whence.llm import TokenReturn, language_view

TRAININGS = [("grpo", 3), ("rloo", 3), ("grpo", 2)]
"""Trainers and ZeRO's stages; in stage 2 each process holds whole parameters."""


def make_settings(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    sizes = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"], "auto")
    return {**sizes, "zero_optimization": zero, "zero_allow_untested_optimizer": True}


def copy_whole(model: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):  # in stage 2 without effect
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def start_processes() -> None:
    """Connect the processes anew; TRL's trainers find them connected."""
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")  # without it, Accelerate sees one process on CPUs


def train(kind: str, stage: int, folder: Path, rule: Any = None, **more: Any) -> Any:
    start_processes()
    settings = {"use_cpu": False, "deepspeed": make_settings(stage), "max_steps": 2}
    state = {"use_configured_state": True}
    trainer = make_trainer(kind, folder / kind, rule, accelerator_config=state, **settings, **more)
    trainer.train()
    return trainer


def compare_trainers(folder: Path) -> dict[str, Any]:
    """Return how far scores are from the loop's, and how far a training with scores is from TRL's own."""
    results: dict[str, Any] = {}
    for kind, stage in TRAININGS:
        trainer_type = TRAINERS[kind][0]
        distances: list[float] = []
        score_rows = trainer_type._score_rows

        def score_and_compare(self: Any, rows: Any, score_rows: Any = score_rows, distances: Any = distances) -> Any:
            influence = score_rows(self, rows)
            whole = make_model()
            whole.load_state_dict(copy_whole(self.accelerator.unwrap_model(self.model)), strict=False)
            how = {"target": self.target, "objective": self.influence_objective, "engine": "loop"}
            truth = attribute(language_view(whole, temperature=self.temperature), rows, **how)
            distances.append(float((influence.scores - truth.scores).abs().max() / truth.scores.abs().max()))
            return influence

        plain = train(kind, stage, folder / "plain", own=False)
        scored = train(kind, stage, folder / "scored", ScoreAndKeepAll())
        trainer_type._score_rows = score_and_compare
        selected = train(kind, stage, folder / "selected", NonPositive(), target=TokenReturn())
        trainer_type._score_rows = score_rows
        before, after = (copy_whole(each.accelerator.unwrap_model(each.model)) for each in (plain, scored))
        results[f"{kind} {stage}"] = {
            "scores": distances,
            "kept": int(selected.selection.keep.sum()),
            "training": max(float((after[name] - tensor).abs().max()) for name, tensor in before.items()),
        }
    return results


if __name__ == "__main__":
    results = compare_trainers(Path(sys.argv[1]))
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    end_process()
