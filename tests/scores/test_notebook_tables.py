"""Influence and records as a notebook shows them: HTML tables."""

import torch

from whence import Influence, RecordBatch
from whence.scores.influence import Provenance

HOSTILE = "<script>alert(1)</script>"


def test_influence_shows_both_ends_with_errors():
    about = Provenance(HOSTILE, "o", "ghost", "why", ())
    scores = torch.arange(-10.0, 10.0)
    page = Influence(scores, torch.arange(20), about, errors=torch.full((20,), 0.5))._repr_html_()
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert "<td>-10.0</td><td>0.5</td>" in page
    assert "<td>9.0</td><td>0.5</td>" in page
    assert "<td>-3.0</td>" not in page


def test_records_show_their_columns():
    records = RecordBatch(
        observations={HOSTILE: torch.zeros(4, 2), "y": torch.ones(4)},
        actions=torch.tensor([0, 1, 1, 1]),
        log_probs=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
        advantages=torch.zeros(4),
        record_ids=[10_240, 10_241, 10_242, 10_243],
    )
    page = records._repr_html_()
    assert HOSTILE not in page
    for text in ("RecordBatch of 4 records", "4 × 2", "-2.5", "10240"):
        assert text in page, text
