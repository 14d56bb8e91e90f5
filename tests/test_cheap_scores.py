"""The study of what language models' scores cost: it goes on where it was, and its table says what was measured."""

import json

import pytest

from studies.scoring import cheap_scores

HOW = {"sizes": "1M", "rows": 4, "steps": 1, "repeats": 1, "device": "cpu"}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cheap_scores, "SHAPES", {"1M": (16, 2, 2)})


def read(path):
    (result,) = json.loads((path / "language.json").read_text(encoding="utf-8"))
    return result


def test_what_is_measured_is_not_measured_again(small, tmp_path, monkeypatch):
    cheap_scores.main(tmp_path, **HOW)
    whole = read(tmp_path)
    names = [line["scores"] for line in whole["scores"]]
    assert names[:4] == ["all", "all, one pass", "all, bfloat16", "all, both"]
    assert whole["scores"][0]["spearman"] == pytest.approx(1.0)
    rest = {**whole, "scores": whole["scores"][:-2]}
    (tmp_path / "language.json").write_text(json.dumps([rest]), encoding="utf-8")
    measured = []

    def measure(run, repeats, device):
        measured.append(run)
        return cheap_scores.Cost(1.0, 1.0, 1.0)

    monkeypatch.setattr(cheap_scores, "measure", measure)
    cheap_scores.main(tmp_path, **HOW)
    assert len(measured) == 2  # nor is the epoch
    again = read(tmp_path)
    assert again["scores"][:-2] == rest["scores"]
    assert [line["scores"] for line in again["scores"]] == names
    assert again["epoch"] == whole["epoch"]


def test_other_settings_are_measured_anew(small, tmp_path, monkeypatch):
    cheap_scores.main(tmp_path, **HOW)
    before = read(tmp_path)
    cheap_scores.main(tmp_path, **{**HOW, "rows": 5})
    after = read(tmp_path)
    assert after["rows"] == 5
    assert [line["scores"] for line in after["scores"]] == [line["scores"] for line in before["scores"]]
    assert after["epoch"] != before["epoch"]


def test_a_share_is_the_seconds_by_those_of_the_epochs():
    seconds = {"median": 3.0, "low": 2.0, "high": 4.0}
    epoch = {"16": {"median": 10.0}, "64": {"median": 5.0}}
    text = cheap_scores.tabulate(
        [{"size": "1M", "epoch": epoch, "scores": [{"scores": "all", "seconds": seconds, "spearman": 0.8}]}]
    )
    cells = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    assert cells == ["1M", "all", "3 [2, 4]", "30% / 60%", "8% / 15%", "0.800"]
