"""Similarities of texts: BM25 by its formula."""

import math
import sys
from collections import Counter

import numpy as np
import pytest

from whence.causes.response_causes import K1, B, rank_bm25, split_terms
from whence.core import Unsupported

TEXTS = ("a cat sat on a mat", "The cat, the CAT!", "dogs", "7+8=15;15", "")


def test_bm25_by_its_formula():
    terms = [split_terms(text) for text in TEXTS]
    assert terms[1] == ["the", "cat", ",", "the", "cat", "!"]
    assert terms[3] == ["7", "+", "8", "=", "15", ";", "15"]
    average = np.mean([len(document) for document in terms])

    def compute(document, query):
        total, counts = 0.0, Counter(document)
        for term in query:
            containing = sum(term in other for other in terms)
            weight = math.log(1 + (len(terms) - containing + 0.5) / (containing + 0.5))
            length = 1 - B + B * len(document) / average
            total += weight * counts[term] / (counts[term] + K1 * length)
        return total

    for question in ("cat", "cat cat mat", "15 - 7 unicorns", "the dogs"):
        expected = [compute(document, split_terms(question)) for document in terms]
        assert rank_bm25(TEXTS, question) == pytest.approx(expected, rel=1e-5)
    best = np.maximum(rank_bm25(TEXTS, "mat"), rank_bm25(TEXTS, "15"))
    assert rank_bm25(TEXTS, "mat", "unicorns", "15").tolist() == best.tolist()
    assert (best > 0).tolist() == [True, False, False, True, False]
    assert rank_bm25(TEXTS, "unicorns").tolist() == [0] * 5
    assert rank_bm25(TEXTS, "").tolist() == [0] * 5


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(Unsupported, match="pip install bm25s"):
        rank_bm25(TEXTS, "cat")
