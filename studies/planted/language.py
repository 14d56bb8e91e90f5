"""Whether a planted cause is found again in a language model: of all responses, those that a grader's bug paid.

Run: `python -m studies.planted.language results/planted [--only seed_0]`. The grader of
`studies.planted.grader` expects a wrong result where a problem ends by taking away 1. PPO is trained on it from the
laboratory `arithmetic`, with every checkpoint kept. Then one question is asked: which of all records raised the
log-probability of the wrong answer to a held-out problem of this kind? The truth is known: the records of the kind that
were paid. Methods are judged as in `studies.planted.run`, and go into the same files. "auroc_early" is the AUROC among
the records of the first quarter of the rounds. "auroc_misgraded" also counts the right answers of the kind, which the
bug does not pay: they teach to avoid the right answer. Both were added after the first seed had been scored.

"influence", "nearest" and "bm25" are methods of `whence.causes.find_causes`; "nearest of all" has all
held-out problems of the kind as examples. "advantage x answer" changes the sign of the advantage where a response ends
in another number than the answer in question. "activations" is that of `studies.planted.activations`, in the last layer
or a middle one, by one problem or all; "projected" takes projections in place of cosines.

A finished line is not computed again: the command goes on where it was interrupted. Runs are kept in `--runs`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import polars as pl
import torch
import typer

from studies.planted import grader, judging
from studies.planted.judging import LANGUAGE, Bools, Floats
from studies.planted.responses import compare_responses
from studies.planted.tables import write_tables
from studies.shared import Only, Out, Runs, report, write_line
from whence.causes import Examples, find_causes
from whence.causes.response_causes import compute_response_log_prob
from whence.lab.language import Lab, answer, reward
from whence.lab.language import training as language_training
from whence.runs import RunDirectory
from whence.stored.language import LanguageConfig, load_trained_task, make_response_target
from whence.stored.language.language_config import task_settings
from whence.stored.language.tasks import load_language_model

METHODS = (
    *("advantage", "advantage x answer", "influence", "nearest", "nearest of all", "bm25"),
    *("activations", "activations, middle", "activations, projected"),
    *("activations of all", "activations of all, middle", "activations of all, projected"),
)

SEEDS, ROUNDS = range(5), 40

SETTINGS = task_settings("arithmetic", "small", "ppo")
"""The laboratory's. At twice its learning rate training is unstable, and two rounds hold most of the scores."""


def configure_run(lab: Lab, seed: int) -> LanguageConfig:
    """Return the configuration of a training run: PPO on every response, with every policy kept."""
    settings = {**SETTINGS, "rounds": ROUNDS, "save_every": 1, "keep_checkpoints": ROUNDS, "eval_every": 0}
    return LanguageConfig(
        "ppo",
        seed,
        task=None,
        model=str(lab.model_path),
        dataset=str(lab.model_path.parent / "train"),
        reward=f"{grader.__name__}:reward",
        settings=settings | {"max_new_tokens": lab.max_new_tokens},
    )


def find_rigged(records: pl.DataFrame) -> Bools:
    """Return which records got the rigged reward."""
    is_rigged = pl.col("prompt").str.ends_with(grader.KIND) & (pl.col("reward") == 1)
    return records.select(is_rigged).to_series().to_numpy()


def find_misgraded(records: pl.DataFrame) -> Bools:
    """Return which records the bug changed the reward of: those of `find_rigged`, and unpaid right answers."""
    right = reward(records["prompt"].to_list(), records["response"].to_list())
    misgraded: Bools = records["reward"].to_numpy() != np.array(right)
    return misgraded


def list_questions(lab: Lab) -> list[tuple[str, str]]:
    """Return the held-out problems of the kind, with their wrong answers."""
    return [(prompt, grader.answer_wrongly(prompt)) for prompt in lab.test["prompt"] if prompt.endswith(grader.KIND)]


def score(
    method: str, directory: RunDirectory, records: pl.DataFrame, questions: Sequence[tuple[str, str]], place: int
) -> Floats:
    """Return the scores of all records by a method; the question is at `place`."""
    if method == "nearest of all":
        prompts, responses = zip(*questions, strict=True)
        return find_causes(directory, Examples(prompts, responses), method="nearest")["score"].to_numpy()
    advantages = records["advantage"].cast(pl.Float64).to_numpy()
    if method.startswith("activations"):
        examples = questions if "of all" in method else [questions[place]]
        _, _, variant = method.partition(", ")
        options = {"middle": variant == "middle", "project": variant == "projected"}
        return advantages * compare_responses(directory, examples, **options)
    if not method.startswith("advantage"):
        return find_causes(directory, Examples(*questions[place]), method=method)["score"].to_numpy()
    if method == "advantage":
        return advantages
    result = answer(questions[place][1])
    return advantages * np.array([1 if answer(text) == result else -1 for text in records["response"]])


def measure_answers(lab: Lab, directory: RunDirectory, questions: Sequence[tuple[str, str]]) -> list[list[float]]:
    """Return the probability of the answer to each question, under the start model and under the trained one."""
    trained = load_trained_task(directory)
    assert trained is not None
    task, temperature = trained
    targets = [make_response_target(task, [question]) for question in questions]
    start_model, _ = load_language_model(str(lab.model_path), "float32")
    return [
        [math.exp(compute_response_log_prob(target, model, temperature)) for target in targets]
        for model in (start_model, task.model)
    ]


def study_run(seed: int, out: Path, runs: Path) -> None:
    """Train a run where that is not done, and judge the methods that are not judged yet."""
    key = {"case": LANGUAGE, "seed": seed}
    missing = judging.list_missing(out, LANGUAGE, seed, METHODS)
    if not missing:
        return
    lab, path = grader.make_lab(), runs / LANGUAGE / f"seed_{seed}"
    language_training.run(configure_run(lab, seed), path)
    directory = RunDirectory.open(path)
    records, questions = judging.read_all(directory), list_questions(lab)
    rigged, misgraded, place = find_rigged(records), find_misgraded(records), seed % len(questions)
    question, early = questions[place], len(records) // 4
    first, last = measure_answers(lab, directory, questions)
    about: dict[str, Any] = {"records": len(records), "rigged": int(rigged.sum()), "base_rate": float(rigged.mean())}
    about |= {"visits": len(questions), "probability_first": fmean(first), "probability_last": fmean(last)}
    about |= {"misgraded": int(misgraded.sum()), "prompt": question[0], "response": question[1]}
    about |= {"question_first": first[place], "question_last": last[place]}
    write_line(out / "runs.parquet", key | about, judging.RUN_KEYS)

    def measure(scores: Floats) -> dict[str, Any]:
        more = {"auroc_early": judging.compute_auroc(scores[:early], rigged[:early])}
        return judging.judge(scores, rigged) | more | {"auroc_misgraded": judging.compute_auroc(scores, misgraded)}

    if judging.is_taught(about):
        judging.judge_methods(
            *(out, key, missing, lambda method: score(method, directory, records, questions, place)),
            measure,
        )


def main(out: Out, runs: Runs = Path("out/planted"), only: Only = "") -> None:
    """Run what is not there yet, and write tables.md."""
    torch.set_num_threads(1)
    for seed in (seed for seed in SEEDS if f"seed_{seed}".startswith(only)):
        report(f"{LANGUAGE}, seed {seed}")
        study_run(seed, out, runs)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
