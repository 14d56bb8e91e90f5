"""TRL's trainers with parameters in shards, for zero_trl.py and fsdp_trl.py: scores and training."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from helpers.language_training import make_model
from helpers.launching import end_process
from helpers.trl_training import TRAINERS, make_trainer
from whence import NonPositive, Selection, attribute
from whence.llm import TokenReturn, language_view
from whence.selection import ScoreAll

Training = tuple[str, Any]
"""A trainer, and what else its settings depend on."""


def compare_trainers(
    trainings: Sequence[Training],
    start: Callable[[Training], dict[str, Any]],
    copy_whole: Callable[[Any], dict[str, torch.Tensor]],
) -> None:
    """Write how far scores are from the loop's, and how far a training with scores is from TRL's own; end the process.

    Args:
        trainings: the trainings.
        start: connects the processes anew, and returns a trainer's settings.
        copy_whole: returns a model's whole parameters.
    """
    folder, results = Path(sys.argv[1]), dict[str, Any]()
    for kind, how in trainings:
        trainer_type = TRAINERS[kind][0]
        distances: list[float] = []
        score_rows = trainer_type._score_rows

        def train(name: str, rule: Any = None, *, kind: str = kind, how: Any = how, **more: Any) -> Any:
            settings = start((kind, how)) | {"use_cpu": False, "max_steps": 2, "dataloader_pin_memory": False}
            state = {"use_configured_state": True}
            trainer = make_trainer(kind, folder / name, rule, accelerator_config=state, **settings, **more)
            trainer.train()
            return trainer

        def score_and_compare(self: Any, rows: Any, score_rows: Any = score_rows, distances: Any = distances) -> Any:
            influence = score_rows(self, rows)
            whole = make_model()
            whole.load_state_dict(copy_whole(self.accelerator.unwrap_model(self.model)), strict=False)
            how = {"target": self.scoring.target, "objective": self.scoring.objective, "engine": "loop"}
            truth = attribute(language_view(whole, temperature=self.temperature), rows, **how)
            distances.append(float((influence.scores - truth.scores).abs().max() / truth.scores.abs().max()))
            return influence

        copies = [
            copy_whole(trainer.accelerator.unwrap_model(trainer.model))
            for trainer in (train("plain", own=False), train("scored", ScoreAll()))
        ]
        trainer_type._score_rows = score_and_compare
        selected = train("selected", NonPositive(), target=TokenReturn())
        trainer_type._score_rows = score_rows
        before_drop: list[dict[str, torch.Tensor]] = []

        class KeepFirstBatch:
            needs_influence = False

            def select(self, records: Any, influence: Any, progress: Any) -> Selection:
                return Selection.dropping(torch.full((len(records),), progress.round == 1), "not of the first batch")

        class Copy(TrainerCallback):
            def on_step_end(
                self, *_: Any, model: Any = None, states: list[dict[str, torch.Tensor]] = before_drop, **rest: Any
            ) -> None:
                states.append(copy_whole(model))

        train("dropped", KeepFirstBatch(), watch=Copy())
        results[f"{kind} {how}"] = {
            "moved by a dropped batch": max(
                float((before_drop[1][name] - tensor).abs().max()) for name, tensor in before_drop[0].items()
            ),
            "scores": distances,
            "kept": int(selected.selection.keep.sum()),
            "training": max(float((copies[1][name] - tensor).abs().max()) for name, tensor in copies[0].items()),
        }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
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
