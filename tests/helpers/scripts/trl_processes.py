"""TRL's trainers in each of two processes: scores against the loop's, and steps on kept rows."""

import json
import os
import sys
from pathlib import Path

import torch

from helpers.launching import end_process
from helpers.trl_training import TRAINERS, Watch, make_target, make_trainer
from whence import Selection, attribute
from whence.llm import TokenReturn, language_view
from whence.llm.trl.completions import averages_rows

KEPT = [0, 1, 2, 9]
"""The rows that are kept: other numbers of them in the two processes."""


class KeepIds:
    """Keeps the rows of some ids, whichever rows it sees."""

    needs_influence = True

    def select(self, records, influence=None, progress=None):
        return Selection.dropping(torch.isin(records.ids % 16, torch.tensor(KEPT)), "for the test")


def distances_at_the_step(trainer, watch):
    """Return the distances of the last step's gradient and scores from those at the policy that drew the rows.

    The gradient is that of the kept rows alone; scores are the loop's.
    """
    rows = trainer.rows.take(torch.tensor(KEPT))
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
    how = {"target": trainer.scoring.target, "objective": trainer.scoring.objective, "engine": "loop"}
    # In the step the target is a gradient that is older than the rows.
    how["leave_one_out"] = trainer.scoring.leave_one_out if trainer.chooser is None else None
    truth = attribute(view, trainer.rows, **how).scores
    scores = (trainer.influence.scores - truth).abs() / truth.abs().max()
    model.load_state_dict(now, strict=False)
    return max(apart), float(scores.max())


def main(folder):
    results = {}
    for kind in TRAINERS:
        results[kind] = []
        for way, target in (("before", TokenReturn()), ("in_step", make_target())):
            watch, how = Watch(), {"select": way, "target": target, "max_steps": 2}
            how |= {"activation_checkpointing": way == "before"}
            how |= (
                {"loss_type": "grpo" if way == "before" else "dapo"} if kind == "grpo" else {}
            )  # over rows, or tokens
            trainer = make_trainer(kind, folder / f"{kind}-{way}", KeepIds(), watch=watch, **how)
            trainer.train()
            gradient, scores = distances_at_the_step(trainer, watch)
            copies = [trainer.accelerator.gather(p.detach().reshape(1, -1)) for p in trainer.model.parameters()]
            alike = all(torch.equal(one, other) for one, other in copies)
            step = {"gradient": gradient, "scores": scores, "kept": trainer.selection.keep.tolist(), "alike": alike}
            results[kind].append({**step, "in_step": trainer.chooser is not None})
    if os.environ["RANK"] == "0":
        (folder / "groups.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    end_process()
