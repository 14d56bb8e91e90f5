"""What every process runs for the test of TRL's trainers in two: scores of the first batch, against the loop on one."""

import json
import os
import sys
from pathlib import Path

import torch

from test_llm_trainer import Keep
from test_llm_trl import TRAINERS, Watch, make_trainer
from whence import NonPositive, attribute
from whence.llm import TokenReturn, language_view


def from_the_kept_alone(trainer, rows, watch):
    """How far the first step's gradient is from that of the kept rows, at the policy that drew them."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name.removeprefix("module."): tensor for name, tensor in watch.states[0].items()}
    model.load_state_dict(state, strict=False)
    model.zero_grad()
    view = language_view(model, temperature=trainer.temperature)
    outputs = view.only({"log_prob"}, view.parameters(), view.prepare(rows))
    (-trainer.influence_objective(outputs, rows).mean()).backward()
    gradients = {name.removeprefix("module."): tensor for name, tensor in watch.gradients[0].items()}
    apart = [
        float((gradients[name] - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-8))
        for name, p in model.named_parameters()
    ]
    model.load_state_dict(now, strict=False)
    return max(apart)


def main(folder):
    found = {}
    for kind in TRAINERS:
        told = []
        made = TRAINERS[kind][0]._score_rows

        def noting(self, rows, made=made, told=told):
            scores = made(self, rows)
            model = self.accelerator.unwrap_model(self.model)
            how = {"target": self.target, "objective": self.influence_objective, "engine": "loop"}
            truth = attribute(language_view(model, temperature=self.temperature), rows, **how)
            apart = (scores.scores - truth.scores).abs().max() / truth.scores.abs().max()
            told.append({"apart": float(apart), "rows": len(rows)})
            return scores

        TRAINERS[kind][0]._score_rows = noting
        trainer = make_trainer(kind, folder / kind, NonPositive(), target=TokenReturn(), activation_checkpointing=True)
        trainer.train()
        watch, batches = Watch(), []
        make_rows = TRAINERS[kind][0]._make_rows

        def keeping(self, output, make_rows=make_rows, batches=batches):
            batches.append(make_rows(self, output))
            return batches[-1]

        TRAINERS[kind][0]._make_rows = keeping
        means = {"loss_type": "grpo"} if kind == "grpo" else {}  # over rows; TRL's default is over tokens
        kept = make_trainer(kind, folder / f"{kind}-kept", Keep([0, 9]), watch=watch, **means)
        kept.train()
        found[kind] = {"scores": told, "kept": kept.selection.keep.tolist()}
        found[kind]["apart"] = from_the_kept_alone(kept, batches[0].take(torch.tensor([0, 9])), watch)
        every = [kept.accelerator.gather(p.detach().reshape(1, -1)) for p in kept.model.parameters()]
        found[kind]["alike"] = all(torch.equal(one, other) for one, other in every)
    if os.environ["RANK"] == "0":
        (folder / "groups.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
