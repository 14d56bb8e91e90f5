"""TRL's trainers in each of two processes, for processes.py: scores against the loop's, and steps on kept rows."""

import json
import os

import torch

from test_llm_trl import TRAINERS, Watch, make_trainer
from test_llm_trl_steps import make_target
from whence import NonPositive, Selection, attribute
from whence.llm import TokenReturn, language_view
from whence.llm.trl.supported_settings import averages_rows

KEPT = [0, 1, 2, 9]
"""The rows that are kept: other numbers of them in the two processes."""


class KeepIds:
    """Keeps the rows of some ids, whichever rows it sees."""

    def __init__(self, *, scored):
        self.needs_influence = scored

    def select(self, records, influence=None, progress=None):
        return Selection.dropping(torch.isin(records.ids % 16, torch.tensor(KEPT)), "for the test")


def distances_at_the_step(trainer, batch, watch):
    """Return the distances of the last step's gradient and scores from those at the policy that drew the rows.

    The gradient is that of the kept rows alone; scores are the loop's.
    """
    rows = batch.take(torch.tensor(KEPT))
    model = trainer.accelerator.unwrap_model(trainer.model)
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name.removeprefix("module."): tensor for name, tensor in watch.states[-1].items()}
    model.load_state_dict(state, strict=False)
    model.zero_grad()
    view = language_view(model, temperature=trainer.temperature)
    outputs = view.only({"log_prob"}, view.parameters(), view.prepare(rows))
    count = len(rows) if averages_rows(trainer) else rows.observations["response_mask"].sum()
    (-trainer.scoring.objective(outputs, rows).sum() / count).backward()
    gradients = {name.removeprefix("module."): tensor for name, tensor in watch.gradients[-1].items()}
    apart = [
        float((gradients[name] - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-8))
        for name, p in model.named_parameters()
    ]
    scores = torch.zeros(1)
    if trainer.influence is not None:
        how = {"target": trainer.scoring.target, "objective": trainer.scoring.objective, "engine": "loop"}
        truth = attribute(view, batch, **how).scores
        scores = (trainer.influence.scores - truth).abs() / truth.abs().max()
    model.load_state_dict(now, strict=False)
    return max(apart), float(scores.max())


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
        ways = {"activation_checkpointing": True, "select": "before"}
        trainer = make_trainer(kind, folder / kind, NonPositive(), target=TokenReturn(), **ways)
        trainer.train()
        batches = []
        make_rows = TRAINERS[kind][0]._make_rows

        def keep_rows(self, output, make_rows=make_rows, batches=batches):
            batches.append(make_rows(self, output))
            return batches[-1]

        TRAINERS[kind][0]._make_rows = keep_rows
        results[kind] = {"scores": batches_scored, "steps": []}
        for scored in (False, True):  # chosen before the step, and in it
            watch = Watch()
            more = {"loss_type": "dapo" if scored else "grpo"} if kind == "grpo" else {}
            rule, target = KeepIds(scored=scored), make_target()
            kept = make_trainer(
                kind, folder / f"{kind}-{scored}", rule, watch=watch, target=target, max_steps=2, **more
            )
            kept.train()
            gradient, scores = distances_at_the_step(kept, batches[-1], watch)
            copies = [kept.accelerator.gather(p.detach().reshape(1, -1)) for p in kept.model.parameters()]
            alike = all(torch.equal(one, other) for one, other in copies)
            step = {"gradient": gradient, "scores": scores, "kept": kept.selection.keep.tolist(), "alike": alike}
            results[kind]["steps"].append({**step, "in_step": kept.chooser is not None})
    if os.environ["RANK"] == "0":
        (folder / "groups.json").write_text(json.dumps(results))
