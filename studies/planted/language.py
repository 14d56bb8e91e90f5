"""Whether a planted cause is found again in a language model: of all responses, those that a grader's bug paid.

Run: `python -m studies.planted.language results/planted [--only seed_0] [--methods influence,bm25]`. The grader of
`studies.planted.grader` expects a wrong result where a problem ends by taking away 1. PPO is trained on it from the
laboratory `arithmetic`, with every checkpoint kept. Then one question is asked: which of all records raised the
log-probability of the wrong answer to a held-out problem of this kind? The truth is known: the records of the kind that
were paid. Methods are judged as in `studies.planted.run`, and go into the same files. "auroc_early" is the AUROC among
the records of the first quarter of the rounds. "auroc_misgraded" also counts the right answers of the kind, which the
bug does not pay: they teach to avoid the right answer. Both were added after the first seed had been scored.

"influence", "nearest" and "bm25" are methods of `whence.causes.find_causes`; "nearest of all" has all
held-out problems of the kind as examples. The others are those of `studies.planted.finders`. "advantage x answer"
changes the sign of the advantage where a response ends in another number than the answer in question.

A finished line is not computed again: the command goes on where it was interrupted. Runs are kept in `--runs`.
"""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer
from rich.console import Console

from studies.planted import finders, grader
from studies.planted.scores import (
    LANGUAGE,
    LANGUAGE_METHODS,
    LANGUAGE_STUDIED,
    RUN_KEYS,
    SCORE_KEYS,
    Bools,
    Floats,
    compute_auroc,
    is_taught,
    judge,
    read_all,
)
from studies.planted.tables import write_tables
from studies.stored import round_numbers, write_line
from whence.causes import Examples, find_causes
from whence.causes.ranking import average_nearest
from whence.causes.response_causes import compute_response_log_prob
from whence.core import RecordBatch
from whence.lab import read_rows
from whence.lab.language import Lab, answer, reward, solution
from whence.lab.language.training import run
from whence.llm import ValidationLoss, language_view
from whence.runs import RunDirectory
from whence.scores.gradient_products import multiply_gradients
from whence.stored.language import LanguageConfig
from whence.stored.language.language_config import task_settings
from whence.stored.language.loading import load_language_model
from whence.stored.language.rounds import load_trained_task, rebuild_round
from whence.stored.language.tasks import make_response_target

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
    method: str, directory: RunDirectory, records: pl.DataFrame, question: tuple[str, str]
) -> tuple[Floats, float]:
    """Return the scores of all records by a method, and the CPU seconds that they took."""
    began = time.process_time()
    if method.startswith("advantage"):
        scores = records["advantage"].cast(pl.Float64).to_numpy()
        if method == "advantage x answer":
            result = answer(question[1])
            scores = scores * np.array([1 if answer(text) == result else -1 for text in records["response"]])
        return scores, time.process_time() - began
    causes = find_causes(directory, Examples(*question), method=method)
    return causes["score"].to_numpy(), time.process_time() - began


def score_studied(
    directory: RunDirectory, records: pl.DataFrame, questions: Sequence[tuple[str, str]], place: int
) -> dict[str, Floats]:
    """Return the scores of all records by the methods that are studied; the question is at `place`."""
    trained = load_trained_task(directory)
    assert trained is not None
    task, temperature = trained
    prompt = questions[place][0]
    counter_example = make_rows_of(task, [(prompt, ";".join(solution(prompt)))])
    middle = directory.round("records", ROUNDS // 2).sample(finders.ANCHORS, seed=0)
    examples = make_rows_of(task, [*questions, *middle.select("prompt", "response").rows()])
    of_question, of_all, of_anchors = (
        slice(place, place + 1),
        slice(0, len(questions)),
        slice(len(questions), None),
    )
    gathered, nearest, nearest_of_all, hidden = finders.GradientFinders(), [], [], []
    for number in directory.rounds():
        rebuilt = rebuild_round(directory, number)
        multiply = partial(multiply_gradients, records=rebuilt.rows, chunk_size=rebuilt.scoring.chunk_size)
        products = multiply(language_view(rebuilt.model, temperature=temperature), examples=examples)
        parts = [finders.take_examples(products, index) for index in (of_question, of_anchors)]
        gathered.add(*parts, torch.tensor(rebuilt.table["advantage"].to_list()))
        nearest_of_all.append(average_nearest(products.cosines()[of_all]).numpy())
        view = language_view(task.model, temperature=temperature)
        nearest.append(multiply(view, examples=examples.take(of_question)).cosines()[0].numpy())
        hidden.append(finders.embed_rows(task.model, rebuilt.rows))
    states, centre = torch.cat(hidden), finders.embed_rows(task.model, examples.take(of_question))
    projected = finders.score_projected(states, centre, finders.embed_rows(task.model, counter_example))
    advantages = records["advantage"].cast(pl.Float64).to_numpy()
    return gathered.score() | {
        "embedding": advantages * torch.cosine_similarity(states, centre).double().numpy(),
        "nearest-trained": advantages * np.concatenate(nearest),
        "nearest of all": advantages * np.concatenate(nearest_of_all),
        "hidden": advantages * projected,
    }


def make_rows_of(task: Any, pairs: Sequence[tuple[str, str]]) -> RecordBatch:
    """Return prompts with responses as rows."""
    dataset = [{"prompt": prompt, "completion": response} for prompt, response in pairs]
    rows = ValidationLoss.of(dataset, task.tokenizer).rows
    assert rows is not None
    return rows


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


def study_run(seed: int, methods: Sequence[str], out: Path, runs: Path) -> None:
    """Train a run where that is not done, and judge the methods that are not judged yet."""
    key = {"case": LANGUAGE, "seed": seed}
    done = read_rows(out / "scores.parquet", SCORE_KEYS)
    missing = [method for method in methods if (LANGUAGE, seed, method) not in done]
    if not missing:
        return
    lab, path = grader.make_lab(), runs / LANGUAGE / f"seed_{seed}"
    run(configure_run(lab, seed), path)
    directory = RunDirectory.open(path)
    records, questions = read_all(directory), list_questions(lab)
    rigged, place = find_rigged(records), seed % len(questions)
    question, misgraded = questions[place], find_misgraded(records)
    first, last = measure_answers(lab, directory, questions)
    about: dict[str, Any] = {"records": len(records), "rigged": int(rigged.sum()), "base_rate": float(rigged.mean())}
    about |= {"visits": len(questions), "probability_first": fmean(first), "probability_last": fmean(last)}
    about |= {"misgraded": int(misgraded.sum()), "prompt": question[0], "response": question[1]}
    about |= {"question_first": first[place], "question_last": last[place]}
    write_line(out / "runs.parquet", round_numbers(key | about), RUN_KEYS)
    if not is_taught(about):
        return
    began = time.process_time()
    studied = score_studied(directory, records, questions, place) if {*missing} & {*LANGUAGE_STUDIED} else {}
    together = time.process_time() - began
    for method in missing:
        scores, seconds = (
            (studied[method], together) if method in studied else score(method, directory, records, question)
        )
        early = len(records) // 4
        line = key | {"method": method, "seconds": seconds} | judge(scores, rigged)
        line |= {"auroc_early": compute_auroc(scores[:early], rigged[:early])}
        line |= {"auroc_misgraded": compute_auroc(scores, misgraded)}
        write_line(out / "scores.parquet", round_numbers(line), SCORE_KEYS)


def main(
    out: Annotated[Path, typer.Argument(help="The directory of the results.")],
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = Path("out/planted"),
    only: Annotated[str, typer.Option(help="Runs whose name begins so: seed_0.")] = "",
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(LANGUAGE_METHODS),
) -> None:
    """Run what is not there yet, and write tables.md."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    chosen = methods.split(",")
    if unknown := [method for method in chosen if method not in LANGUAGE_METHODS]:
        raise typer.BadParameter(f"{unknown[0]!r} is no method; known: {', '.join(LANGUAGE_METHODS)}.")
    for seed in (seed for seed in SEEDS if f"seed_{seed}".startswith(only)):
        Console(stderr=True).print(f"{LANGUAGE}, seed {seed}")
        study_run(seed, chosen, out, runs)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
