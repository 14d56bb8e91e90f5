"""The screens and the onset, by hand."""

from types import SimpleNamespace

import pytest
import torch

from studies.loophole.screens import Monitor, Suspects
from studies.loophole.tables import find_onset
from whence.llm import make_rows
from whence.selection import Progress

ANSWERS = ["1+1=2;2", "9*9=81;81", "3", "7*3=21;21"]
TOKENIZER = SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, **_: [ANSWERS[row[0] - 1] for row in ids.tolist()])
ROWS = make_rows(
    input_ids=torch.tensor([[9, 1], [9, 2], [9, 3], [9, 4]]),
    attention_mask=torch.ones(4, 2),
    response_mask=torch.ones(4, 1, dtype=torch.bool),
)


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Monitor(TOKENIZER, 0), [True, False, True, False]),
        (Monitor(TOKENIZER, 0, caught=0.0, mistaken=1.0), [False, True, False, True]),
        (Suspects(0.5), [True, True, False, True]),  # of the two highest, one lowers what shall not be learned
    ],
)
def test_screens_drop_what_is_flagged(rule: Monitor | Suspects, kept: list[bool]) -> None:
    influence = SimpleNamespace(scores=torch.tensor([-2.0, -1.0, 3.0, -4.0]))
    assert rule.select(ROWS, influence, Progress()).keep.tolist() == kept  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shares", "onset"),
    [([0.02, 0.1, 0.03, 0.05, 0.2], 4), ([0.02, 0.03], None), ([0.5, 0.6], 1)],
)
def test_the_onset_is_where_shares_stay_above_twice_the_starts(shares: list[float], onset: int | None) -> None:
    assert find_onset(shares, start=0.02) == onset
