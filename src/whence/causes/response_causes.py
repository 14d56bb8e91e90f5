"""Causes of a language model's response: the records of all rounds, by the effect on its probability."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from whence.causes.ranking import OnRound, Score, average_nearest, check_flagged, score_rounds
from whence.core import RecordBatch, RunDirectoryError, Unsupported, WhenceError, eval_mode, preserve_rng_state, suggest
from whence.llm.base import language_view, read_tokens
from whence.llm.scores import ValidationLoss, score
from whence.llm.text import Prompt, join_messages
from whence.runs import RunDirectory
from whence.scores import multiply_gradients
from whence.selection import read_weights
from whence.stored.language import Task, list_policies, load_trained_task, make_response_target, rebuild_round

INFLUENCE, NEAREST, BM25 = METHODS = ("influence", "nearest", "bm25")
"""Ways to score a record; see `find_causes`."""

K1, B = 1.5, 0.75
"""BM25's constants: how soon repeated terms saturate, and how much long texts are discounted."""

_COLUMNS = ("record_id", "prompt", "response", "reward", "advantage", "keep")


@dataclass(frozen=True)
class Examples:
    """Responses to prompts, examples of one behaviour: what a language model is asked about.

    Attributes:
        prompts: one, or several: a text, or the messages of a chat. Where the run's are chats, a text is one message.
        responses: a text, or one for each of several prompts.
    """

    prompts: Prompt | Sequence[Prompt]
    responses: str | Sequence[str]

    @property
    def pairs(self) -> list[tuple[Any, str]]:
        """The prompts with their responses."""
        if isinstance(self.responses, str):
            return [(self.prompts, self.responses)]
        return [*zip(self.prompts, self.responses, strict=True)]

    @property
    def words(self) -> str:
        """What is asked about, in words."""
        if len(pairs := self.pairs) == 1:
            return f"“{pairs[0][1]}” after “{pairs[0][0]}”"
        return f"one of {len(pairs)} responses"


def find_response_causes(
    run: RunDirectory,
    behaviour: Examples | pl.DataFrame,
    *,
    rounds: Sequence[int] | None = None,
    method: str = INFLUENCE,
    on_round: OnRound | None = None,
) -> pl.DataFrame:
    """Score the records of all rounds by what training on them did to the probability of responses; see `find_causes`.

    The log-probability is the mean over the tokens of all responses, end-of-text tokens included, at the sampling
    temperature; of the sum, scores are this many times as large, in the same order.
    """
    numbers = _list_rounds(run, rounds, method)
    make_target, texts = read_examples(run, behaviour)
    by_gradients = partial(_score_round, run, make_target, method)
    score_round = _make_text_score(run, numbers, texts) if method == BM25 else by_gradients
    return score_rounds(run, numbers, _COLUMNS, score_round, on_round)


def read_examples(
    run: RunDirectory, behaviour: Examples | pl.DataFrame
) -> tuple[Callable[[Task], ValidationLoss], list[tuple[str, str]]]:
    """Return what makes the target of responses, or of stored ones by their keys, from a task, and their texts."""
    if isinstance(behaviour, Examples):
        texts = [(join_messages(prompt), response) for prompt, response in behaviour.pairs]
        return partial(make_response_target, examples=behaviour.pairs), texts
    check_flagged(run, behaviour)
    groups = behaviour.group_by("round", maintain_order=True)
    parts = [run.round("records", number).join(group, on="record_id", how="semi") for (number,), group in groups]
    table = pl.concat(parts, how="diagonal_relaxed")

    def make_target(task: Task) -> ValidationLoss:
        return ValidationLoss(*read_tokens(table, task.tokenizer.pad_token_id))

    return make_target, table.select("prompt", "response").rows()


def _list_rounds(run: RunDirectory, rounds: Sequence[int] | None, method: str) -> list[int]:
    if method not in METHODS:
        raise WhenceError(f"method is {method!r}.{suggest(method, METHODS)}")
    stored = run.require_rounds()
    numbers = stored if rounds is None else sorted(set(rounds))
    if method == BM25:
        return numbers
    policies = list_policies(run)
    if rounds is None and policies.rounds:
        return policies.rounds
    if missing := [number for number in numbers if number in policies.missing]:
        raise RunDirectoryError(
            f"The policies of rounds {', '.join(map(str, missing))} of {run.path} were not kept: they are not in "
            f"{policies.folder}. So their records cannot be scored by method={method!r}. To keep all, train with "
            f"{policies.remedy}; or take method='bm25' (--by bm25), or other rounds."
        )
    return numbers


def _score_round(
    run: RunDirectory, make_target: Callable[[Task], ValidationLoss], method: str, number: int, table: pl.DataFrame
) -> dict[str, Any]:
    """Return the scores of a round by gradients, and the examples' log-prob under its policy."""
    rebuilt = rebuild_round(run, number, make_target=make_target)
    model, scoring = rebuilt.model, rebuilt.scoring
    target = cast(ValidationLoss, scoring.target)
    log_prob = compute_response_log_prob(target, model, scoring.temperature)
    if method == NEAREST:
        view, examples = language_view(model, temperature=scoring.temperature), cast(RecordBatch, target.rows)
        cosines = multiply_gradients(view, rebuilt.rows, examples, chunk_size=scoring.chunk_size).cosines()
        scores = average_nearest(cosines).numpy() * _read_advantages(table)
    else:
        scores = score(model, rebuilt.rows, scoring).scores.double().numpy()
    return {"score": scores * read_weights(table), "log_prob": pl.lit(log_prob, dtype=pl.Float64)}


def _make_text_score(run: RunDirectory, numbers: Sequence[int], examples: Sequence[tuple[str, str]]) -> Score:
    """Return the function that scores a round by BM25; terms are weighed over the texts of all rounds."""
    tables = [run.round("records", number).select("prompt", "response") for number in numbers]
    texts = ["\n".join(pair) for table in tables for pair in table.rows()]
    ends = np.cumsum([*map(len, tables)])
    similarities = np.split(rank_bm25(texts, *map("\n".join, examples)), ends[:-1])
    parts = dict(zip(numbers, similarities, strict=True))
    return lambda number, table: {
        "score": parts[number] * _read_advantages(table) * read_weights(table),
        "log_prob": pl.lit(None, dtype=pl.Float64),
    }


def split_terms(text: str) -> list[str]:
    """Return the words, numbers and marks of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def rank_bm25(texts: Sequence[str], *questions: str) -> NDArray[np.float64]:
    """Return each text's BM25 score for the question that it matches best, (n,), 0 or more.

    A term that a question repeats counts as often. The weight of a term is `log(1 + (n - df + 1/2) / (df + 1/2))`, over
    all texts (Lucene's form).
    """
    try:
        with preserve_rng_state():  # with JAX installed the import tries JAX out, which draws from NumPy's generator
            from bm25s import BM25
    except ImportError:
        raise Unsupported(
            "BM25 needs the package bm25s, which is not installed: pip install bm25s, or in whence's source tree pip "
            "install '.[llm]'."
        ) from None
    terms = [split_terms(text) for text in texts]
    known = {term for document in terms for term in document}
    queries = [[term for term in split_terms(question) if term in known] for question in questions]
    if not any(queries):
        return np.zeros(len(texts))
    index = BM25(k1=K1, b=B, method="lucene")
    index.index(terms, show_progress=False)
    scores: NDArray[np.float64] = np.max([index.get_scores(query) for query in queries if query], axis=0)
    return scores.astype(np.float64)


def _read_advantages(table: pl.DataFrame) -> NDArray[np.float64]:
    return table["advantage"].cast(pl.Float64).to_numpy()


def compute_response_log_prob(target: ValidationLoss, model: Any, temperature: float) -> float:
    """Return the mean log-probability of a target's whole responses under a model, in eval mode."""
    view = language_view(model, temperature=temperature)
    params = {name: parameter.detach() for name, parameter in view.parameters().items()}
    rows = target.rows
    assert rows is not None
    with torch.no_grad(), eval_mode(model.modules()):
        return float(target(view, params, rows)) * int(rows.observations["response_mask"].sum()) / len(rows)


def measure_trained(run: RunDirectory, behaviour: Examples | pl.DataFrame) -> float | None:
    """Return the mean log-probability of responses under the trained model; None: the run holds none yet."""
    trained = load_trained_task(run)
    if trained is None:
        return None
    task, temperature = trained
    make_target, _ = read_examples(run, behaviour)
    return compute_response_log_prob(make_target(task), task.model, temperature)
