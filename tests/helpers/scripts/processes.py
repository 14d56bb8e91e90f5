"""The script that test_llm_processes.py runs, in two processes; the first process writes the results."""

import json
import os
import random
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
from safetensors.torch import save_file

from helpers.language_training import PROMPTS, copy_state, make_model, make_tokenizer, make_trainer, vowels
from helpers.launching import end_process, fork_second
from whence import DTV, IPPO, NonPositive
from whence.llm import TokenReturn, ValidationLoss
from whence.runs import RunDirectory

DEMONSTRATIONS = [{"prompt": "ab", "completion": "cc"}, {"prompt": "c", "completion": "aei"}] * 3


def with_column(texts):
    return datasets.Dataset.from_dict({"prompt": texts, "text": texts})


def summed_by_hand(view, params, records):
    outputs = view.only({"log_prob"}, params, view.prepare(records))
    return (outputs.log_prob.sum(dim=1) * records.advantages).mean()


def make_target(name):
    if name == "validation":
        return ValidationLoss.of(DEMONSTRATIONS, make_tokenizer(), batch_size=2)
    return {"token": TokenReturn(), "held out": TokenReturn(batch_size=2)}.get(name, summed_by_hand)


TARGETS = ("token", "held out", "function", "own")
MORE_TARGETS = ("validation", "dtv")
"""Targets; rows are chosen in the step by "held out", "validation" and "own", which is the last round's gradient."""


def by_the_column(prompts, responses, text):
    """A reward that is wrong in a process that gets the columns of other prompts."""
    return [value + 0.1 * (ord(own[0]) - 97) for value, own in zip(vowels(prompts, responses), text, strict=True)]


def with_noise(prompts, responses):
    """A reward that draws from the generators of Python and NumPy, which differ from process to process."""
    return [value + random.random() + float(np.random.rand()) for value in vowels(prompts, responses)]


def train(folder, target, processes, **more):
    """Train on greedy responses, with as many rows per step for any number of processes."""
    rounds = []
    held_out = ["ba", "jj", "e"] if target == "held out" else None
    settings = {"batch_size": 7, "mini_batch_size": 4 // processes, "top_k": 1, "max_grad_norm": 0.5} | more
    model = make_model(seed=int(os.environ.get("RANK", 0)))  # every process has to get the first one's
    trainer = make_trainer(
        folder,
        {"validation": IPPO(), "dtv": DTV(leave_one_out=True)}.get(target, NonPositive()),
        model=model,
        target=None if target in ("own", "dtv") else make_target(target),
        select="before" if target in ("token", "function", "dtv") else "in_step",
        reward=by_the_column,
        prompts=with_column(PROMPTS),
        held_out=held_out and with_column(held_out),
        on_rollout=lambda rollout, influence, selection, row: rounds.append(
            {
                "scores": None if influence is None else influence.scores.tolist(),
                "reward": row["reward"],
                "loss": row["train/value_loss"],
            }
        ),
        **settings,
    )
    trainer.train()
    return trainer, rounds


def main(folder):
    first = os.environ["RANK"] == "0"
    for target in MORE_TARGETS if "MORE_TARGETS" in os.environ else TARGETS:
        trainer, rounds = train(folder / target, target, 2)
        copies = [trainer.accelerator.gather(tensor.reshape(1, -1)) for tensor in trainer.model.state_dict().values()]
        alike = all(torch.equal(one, other) for one, other in copies)
        if first:
            save_file({k: v.contiguous() for k, v in copy_state(trainer).items()}, folder / f"{target}.safetensors")
            (folder / f"{target}.json").write_text(json.dumps({"rounds": rounds, "alike": alike}))
    ends = []
    for name, parts in (("whole", (2,)), ("broken", (1, 2))):
        for rounds in parts:
            settings = {"rounds": rounds, "mini_batch_size": 2, "reward": with_noise}
            trainer = make_trainer(folder / name, NonPositive(), **settings)
            trainer.train()
        ends.append(copy_state(trainer))
    if first:
        same = all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
        texts = RunDirectory.open(folder / name).round("records", 2)["response"].to_list()
        (folder / "resumed.json").write_text(json.dumps({"same": same, "responses": texts, "prompts": PROMPTS}))


if __name__ == "__main__":
    fork_second()  # once everything is imported, which takes longer than the trainings
    main(Path(sys.argv[1]))
    end_process()
