"""Similarities of texts: BM25 by its formula, and embeddings of rows."""

import math
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from test_llm_trainer import make_model
from whence.core import Unsupported
from whence.diagnosis.response_causes import K1, B, rank_bm25, split_terms
from whence.llm import WithValueHead, make_rows
from whence.llm.base import embed_rows

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
    assert rank_bm25(TEXTS, "unicorns").tolist() == [0] * 5
    assert rank_bm25(TEXTS, "").tolist() == [0] * 5


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(Unsupported, match="pip install bm25s"):
        rank_bm25(TEXTS, "cat")


@pytest.mark.parametrize("has_head", [False, True])
def test_padding_and_passes_change_no_embedding(has_head):
    model = make_model()
    ids = torch.tensor([[0, 0, 3, 4, 5, 6], [2, 3, 4, 5, 1, 0], [7, 8, 9, 2, 3, 1]])
    attended = (ids != 0).long()
    zeros = torch.zeros(3, 3)
    rows = make_rows(
        input_ids=ids,
        attention_mask=attended,
        response_mask=attended[:, 3:].bool(),
        log_probs=zeros,
        advantages=zeros,
    )
    embeddings = embed_rows(WithValueHead(model) if has_head else model, rows, batch_size=2)
    for row, mask, embedding in zip(ids, attended.bool(), embeddings, strict=True):
        with torch.no_grad():
            hidden = model(row[mask][None], output_hidden_states=True).hidden_states[-1][0]
        assert embedding.numpy() == pytest.approx(hidden.mean(dim=0).numpy(), rel=1e-4, abs=1e-5)
