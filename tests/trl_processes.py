"""TRL's trainers in each of two processes, for processes.py: scores against the loop's, and steps on kept rows."""

import json
import os

import torch

from test_llm_trainer import Keep
from test_llm_trl import TRAINERS, Watch, make_trainer
from whence import NonPositive, attribute
from whence.llm import TokenReturn, language_view

KEPT = [0, 1, 2, 9]
"""The rows that are kept: other numbers of them in the two processes."""


def distance_from_kept_rows(trainer, rows, watch):
    """Return the distance of the first step's gradient from that of the kept rows, at the policy that drew them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name.removeprefix("module."): tensor for name, tensor in watch.states[0].items()}
    model.load_state_dict(state, strict=False)
    model.zero_grad()
    view = language_view(model, temperature=trainer.temperature)
    outputs = view.only({"log_prob"}, view.parameters(), view.prepare(rows))
    (-trainer.scoring.objective(outputs, rows).mean()).backward()
    gradients = {name.removeprefix("module."): tensor for name, tensor in watch.gradients[0].items()}
    apart = [
        float((gradients[name] - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-8))
        for name, p in model.named_parameters()
    ]
    model.load_state_dict(now, strict=False)
    return max(apart)


def main(folder):
    results = {}
    for kind in TRAINERS:
        batches_scored = []
        score_rows = TRAINERS[kind][0]._score_rows

        def score_and_compare(self, rows, score_rows=score_rows, batches_scored=batches_scored):
            influence = score_rows(self, rows)
            model = self.accelerator.unwrap_model(self.model)
            how = {"target": self.scoring.target, "objective": self.scoring.objective, "engine": "loop"}
            truth = attribute(language_view(model, temperature=self.temperature), rows, **how)
            apart = (influence.scores - truth.scores).abs().max() / truth.scores.abs().max()
            batches_scored.append({"apart": float(apart), "rows": len(rows)})
            return influence

        TRAINERS[kind][0]._score_rows = score_and_compare
        trainer = make_trainer(kind, folder / kind, NonPositive(), target=TokenReturn(), activation_checkpointing=True)
        trainer.train()
        watch, batches = Watch(), []
        make_rows = TRAINERS[kind][0]._make_rows

        def keep_rows(self, output, make_rows=make_rows, batches=batches):
            batches.append(make_rows(self, output))
            return batches[-1]

        TRAINERS[kind][0]._make_rows = keep_rows
        means = {"loss_type": "grpo"} if kind == "grpo" else {}  # over rows; TRL's default is over tokens
        kept = make_trainer(kind, folder / f"{kind}-kept", Keep(KEPT), watch=watch, **means)
        kept.train()
        results[kind] = {"scores": batches_scored, "kept": kept.selection.keep.tolist()}
        results[kind]["apart"] = distance_from_kept_rows(kept, batches[0].take(torch.tensor(KEPT)), watch)
        copies = [kept.accelerator.gather(p.detach().reshape(1, -1)) for p in kept.model.parameters()]
        results[kind]["alike"] = all(torch.equal(one, other) for one, other in copies)
    if os.environ["RANK"] == "0":
        (folder / "groups.json").write_text(json.dumps(results))
