"""BM25: texts ranked by the words that they share with a question."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whence.core import Unsupported, preserve_rng_state

K1, B = 1.5, 0.75
"""BM25's constants: how soon repeated terms saturate, and how much long texts are discounted."""


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
