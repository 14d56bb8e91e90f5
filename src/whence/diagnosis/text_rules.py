"""The simple rules to hold influence on a response against: advantage × similarity of texts."""

import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from whence.errors import Unsupported
from whence.experiments.llm.rebuilding import RebuiltRound
from whence.llm.base.language_view import embed_rows
from whence.records import RecordBatch

K1, B = 1.5, 0.75
"""BM25's constants: how soon repeated terms saturate, and how much long texts are discounted."""


def split_terms(text: str) -> list[str]:
    """Return the words, numbers and marks of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def rank_bm25(texts: Sequence[str], question: str) -> NDArray[np.float64]:
    """Return each text's BM25 score for a question, (n,), 0 or more; a term that the question repeats counts as often.

    The weight of a term is `log(1 + (n - df + 1/2) / (df + 1/2))`, over all texts (Lucene's form).

    Args:
        texts: the texts.
        question: the text to compare them with.

    Raises:
        Unsupported: the package bm25s is not installed.
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


def compare_embeddings(rebuilt: RebuiltRound, question: RecordBatch) -> NDArray[np.float64]:
    """Return the cosine of each row's embedding with the question's, (n,), under the round's policy.

    Args:
        rebuilt: the round.
        question: one row.
    """
    embeddings, centre = (
        embed_rows(rebuilt.model, rows, batch_size=rebuilt.chunk_size) for rows in (rebuilt.rows, question)
    )
    cosines: NDArray[np.float64] = torch.cosine_similarity(embeddings, centre).double().numpy()
    return cosines
