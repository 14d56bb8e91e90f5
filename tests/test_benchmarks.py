"""What the studies make of their rows."""

from pathlib import Path

import polars as pl
import pytest
import torch

from test_rounds import model_of
from whence import Return, attribute
from whence.sb3 import collect


@pytest.fixture
def study(monkeypatch):
    """The modules of the study of selections."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    from benchmarks import faithfulness_tables, selections

    return faithfulness_tables, selections


def row(selection, gain, long, far, kl=1.0, entropy=0.0):
    unit = {"env": "lake", "optimizer": "sgd", "seed": 0, "round": 3, "group": "lake-sgd", "advantages": "gae"}
    about = {"selection": selection, "gain": gain, "all_as_long": long, "all_as_far": far}
    return unit | about | {"kl": kl, "entropy": entropy, "kept": 8.0}


def test_selections_are_held_against_all(study):
    tables, _ = study
    rows = [
        row("all", 1.0, 1.0, 1.0),
        row("all", 3.0, 3.0, 3.0),
        row("iif", 5.0, 4.0, 6.0, kl=3.0, entropy=-0.5),
        row("all, normalised once", 1.5, 1.5, 1.5, kl=2.0),
        row("iif, normalised once", 4.5, 3.5, 2.5, kl=3.0),
    ]
    found = {one["selection"]: one for one in tables.compared(pl.DataFrame(rows)).to_dicts()}
    kinds = ("less", "less as long", "less as far", "kl", "entropy")
    assert [found["iif"][kind] for kind in kinds] == [3.0, 1.0, -1.0, 3.0, -0.5]
    assert [found["all, normalised once"][kind] for kind in kinds] == [-0.5, None, None, 2.0, 0.0]
    assert [found["iif, normalised once"][kind] for kind in kinds] == [3.0, 1.0, 2.0, 1.5, 0.0]


def test_shares_of_next_to_nothing_are_not_told(study):
    tables, _ = study
    found = tables.ratio_over([1.0, None, 3.0], [1.0, 5.0, 3.0])
    assert (found["mean"], found["rounds"]) == (1.0, 2)
    assert tables.ratio_over([1.0, 2.0], [-1.0, 1.5])["mean"] is None
    assert tables.ratio_over([1.0], [-1.0])["mean"] is None
    assert tables.ratio_over([None], [1.0])["mean"] is None


def test_records_of_the_policy_itself_judge_as_the_return_does(study):
    _, selections = study
    model = model_of(env="CartPole-v1")
    records = collect(model)
    parts = [records.take(slice(0, 40)), records.take(slice(40, 64))]
    mine = attribute(model.policy, records, target=selections.Elsewhere(parts)).scores
    assert torch.allclose(mine, attribute(model.policy, records, target=Return()).scores, rtol=1e-4, atol=1e-7)
