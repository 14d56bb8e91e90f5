"""Influence and records as a notebook shows them: HTML tables."""

from html.parser import HTMLParser

import torch

from whence import Influence, RecordBatch
from whence.influence import Provenance
from whence.notebook import Bar, Histogram, format_table


class Tags(HTMLParser):
    """It checks that tags are closed in order, and keeps names and text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.names, self.text = [], set(), ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.names.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


class TestNotebooks:
    def test_influence_shows_both_ends_with_errors(self):
        scores = torch.arange(-10.0, 10.0)
        about = Provenance("<script>alert(1)</script>", "o", "ghost", "why", ())
        page = Tags(Influence(scores, torch.arange(20), about, errors=torch.full((20,), 0.5))._repr_html_())
        assert page.names == {"div", "table", "thead", "tbody", "tr", "th", "td"}
        assert "<script>alert(1)</script>" in page.text
        assert "-10 ± 0.5" in page.text
        assert "9 ± 0.5" in page.text
        assert "-3 ± 0.5" not in page.text

    def test_few_scores_and_none_above_zero(self):
        about = Provenance("t", "o", "ghost", "why", ())
        assert "0 ± " not in Tags(Influence(torch.zeros(3), torch.arange(3), about)._repr_html_()).text

    def test_records_show_their_columns(self):
        records = RecordBatch(
            observations={"<b>": torch.zeros(4, 2), "y": torch.ones(4)},
            actions=torch.tensor([0, 1, 1, 1]),
            log_probs=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
            advantages=torch.zeros(4),
            record_ids=[10_240, 10_241, 10_242, 10_243],
        )
        page = Tags(records._repr_html_())
        assert "b" not in page.names
        for text in ("RecordBatch of 4 records", "observations.<b>", "4 × 2", "-2.5", "10240"):
            assert text in page.text, text

    def test_bars_point_to_their_sides(self):
        page = format_table("t", ("a", "b"), [[Bar(-0.5), Bar(1.0)], [Histogram([0, 2]), None]])
        assert "left:25.0%;width:25.0%" in page
        assert "left:50.0%;width:50.0%" in page
        assert Tags(page)
