"""Causes of a language model's response: the records of all rounds, by the effect on its probability."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from whence.core import RecordBatch, RunDirectoryError, Unsupported, WhenceError, eval_mode, suggest
from whence.diagnosis.ranking import OnRound, Score, average_nearest, score_rounds
from whence.experiments.llm.language_rebuilding import list_policies, load_trained_task, rebuild_round
from whence.experiments.llm.tasks import make_response_target
from whence.gradient_products import multiply_gradients
from whence.llm.base import language_view
from whence.llm.scores import ValidationLoss, score
from whence.llm.text import Prompt, join_messages
from whence.runs import RunDirectory
from whence.selection import read_weights

K1, B = 1.5, 0.75
"""BM25's constants: how soon repeated terms saturate, and how much long texts are discounted."""

RAW, NEAREST, BM25 = METHODS = ("raw", "nearest", "bm25")
"""Ways to score a record; see `find_response_causes`."""

_COLUMNS = ("record_id", "prompt", "response", "reward", "advantage", "keep")


def find_response_causes(
    run: RunDirectory,
    prompt: Prompt,
    response: str,
    *,
    rounds: Sequence[int] | None = None,
    method: str = RAW,
    engine: str = "auto",
    on_round: OnRound | None = None,
) -> pl.DataFrame:
    """Score the records of all rounds by what training on them did to the log-probability of a response to a prompt.

    A positive score speaks for the response. The log-probability is the mean over the response's
    tokens, its end-of-text token included, at the sampling temperature; of the sum, scores are this many times as
    large, in the same order. Methods:

    - "raw": `<grad log pi(response|prompt), grad objective_i>` at the policy that drew the record (LDA §3.3).
    - "nearest": advantage × cosine of `grad log pi` of the record's response with that of the response in question, at
      the same policy.
    - "bm25": advantage × BM25 score of the record's prompt and response for those that are asked about.

    A record that did not train scores 0, and one that trained with a weight counts by it.

    Args:
        run: a run of `whence llm train`, finished or not; for "bm25" any run of a language model.
        prompt: a text, or the messages of a chat. Where the run's prompts are chats, a text is one message.
        response: a text.
        rounds: the rounds to score, from 1; None: all whose policy is there, for "bm25" all.
        method: one of `METHODS`.
        engine: for "raw", see `whence.attribute`.
        on_round: called after each round.

    Returns:
        A row for each record: `round`, `record_id`, `prompt`, `response`, `reward`, `advantage`, `keep` if anything was
        selected, its `score`, and `log_prob`, that of the whole response under the round's policy; null for "bm25".

    Raises:
        WhenceError: the method is unknown, prompt or response do not fit the model, or the run was not made by the
            command.
        RunDirectoryError: the run holds no rounds, or the policy of a round that was asked for was not kept.
    """
    numbers = _list_rounds(run, rounds, method)
    score_round = _make_score(run, numbers, prompt, response, method, engine)
    return score_rounds(run, numbers, _COLUMNS, score_round, on_round)


def _list_rounds(run: RunDirectory, rounds: Sequence[int] | None, method: str) -> list[int]:
    if method not in METHODS:
        raise WhenceError(f"method is {method!r}.{suggest(method, METHODS)}")
    stored = run.require_rounds()
    numbers = stored if rounds is None else sorted(set(rounds))
    if method == BM25:
        return numbers
    policies = list_policies(run)
    if rounds is None:
        return policies.rounds
    if missing := [number for number in numbers if number in policies.missing]:
        raise RunDirectoryError(
            f"The policies of rounds {', '.join(map(str, missing))} of {run.path} were not kept, so their records "
            f"cannot be scored by method={method!r}. To keep all, train with --settings '{policies.settings}'; or take "
            "method='bm25', or rounds=None."
        )
    return numbers


def _make_score(
    run: RunDirectory, numbers: Sequence[int], prompt: Prompt, response: str, method: str, engine: str
) -> Score:
    """Return the function that scores a round, with the response's log-prob under its policy."""
    if method == BM25:
        scores = _score_texts(run, numbers, prompt, response)
        return lambda number, table: {
            "score": scores[number] * read_weights(table),
            "log_prob": pl.lit(None, dtype=pl.Float64),
        }
    make_target = partial(make_response_target, prompt=prompt, response=response)

    def score_round(number: int, table: pl.DataFrame) -> dict[str, Any]:
        rebuilt = rebuild_round(run, number, make_target=make_target)
        model, scoring = rebuilt.model, rebuilt.scoring
        target = cast(ValidationLoss, scoring.target)
        log_prob = compute_response_log_prob(target, model, scoring.temperature)
        if method == NEAREST:
            view, question = language_view(model, temperature=scoring.temperature), cast(RecordBatch, target.rows)
            cosines = multiply_gradients(view, rebuilt.rows, question, chunk_size=scoring.chunk_size).cosines()
            scores = average_nearest(cosines).numpy() * _read_advantages(table)
        else:
            scores = score(model, rebuilt.rows, replace(scoring, engine=engine)).scores.double().numpy()
        return {"score": scores * read_weights(table), "log_prob": pl.lit(log_prob, dtype=pl.Float64)}

    return score_round


def _score_texts(
    run: RunDirectory, numbers: Sequence[int], prompt: Prompt, response: str
) -> dict[int, NDArray[np.float64]]:
    """Return advantage × BM25 score of each round's records; terms are weighed over the texts of all rounds."""
    tables = {number: run.round("records", number) for number in numbers}
    texts = ["\n".join(pair) for table in tables.values() for pair in table.select("prompt", "response").rows()]
    similarities = rank_bm25(texts, f"{join_messages(prompt)}\n{response}")
    ends = np.cumsum([len(table) for table in tables.values()])
    parts = np.split(similarities, ends[:-1])
    return {number: part * _read_advantages(table) for (number, table), part in zip(tables.items(), parts, strict=True)}


def split_terms(text: str) -> list[str]:
    """Return the words, numbers and marks of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def rank_bm25(texts: Sequence[str], question: str) -> NDArray[np.float64]:
    """Return each text's BM25 score for a question, (n,), 0 or more; a term that the question repeats counts as often.

    The weight of a term is `log(1 + (n - df + 1/2) / (df + 1/2))`, over all texts (Lucene's form).
    """
    try:
        from bm25s import BM25
    except ImportError:
        raise Unsupported(
            "BM25 needs the package bm25s, which is not installed: pip install bm25s, or in whence's source tree pip "
            "install '.[llm]'."
        ) from None
    terms = [split_terms(text) for text in texts]
    known = {term for document in terms for term in document}
    query = [term for term in split_terms(question) if term in known]
    if not query:
        return np.zeros(len(texts))
    index = BM25(k1=K1, b=B, method="lucene")
    index.index(terms, show_progress=False)
    scores: NDArray[np.float64] = index.get_scores(query).astype(np.float64)
    return scores


def _read_advantages(table: pl.DataFrame) -> NDArray[np.float64]:
    return table["advantage"].cast(pl.Float64).to_numpy()


def compute_response_log_prob(target: ValidationLoss, model: Any, temperature: float) -> float:
    """Return the log-probability of the whole response of a `make_response_target` under a model, in eval mode."""
    view = language_view(model, temperature=temperature)
    params = {name: parameter.detach() for name, parameter in view.parameters().items()}
    rows = target.rows
    assert rows is not None
    with torch.no_grad(), eval_mode(model.modules()):
        return float(target(view, params, rows)) * int(rows.observations["response_mask"].sum())


def measure_trained(run: RunDirectory, prompt: Prompt, response: str) -> float | None:
    """Return a response's log-probability under the trained model; None: the run holds none yet.

    Raises:
        WhenceError: see `find_response_causes`.
    """
    trained = load_trained_task(run)
    if trained is None:
        return None
    task, temperature = trained
    return compute_response_log_prob(make_response_target(task, prompt, response), task.model, temperature)
