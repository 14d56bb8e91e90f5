"""The study of means goes from a training to its tables."""

from pathlib import Path

import pytest

from studies.faithfulness import estimators


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_a_seed_is_studied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"PARTS": {"tested": {"frozenlake": (range(3, 4), (2,))}}, "HALVES": 4, "COUNTS": (2, 6)}
    for name, value in small.items():
        monkeypatch.setattr(estimators, name, value)
    monkeypatch.setattr(estimators, "TOGETHER", 3)
    sizes = {"n_steps": 64, "batch_size": 32, "n_epochs": 2}
    adam = {"optimizer": "Adam", "hyperparameters": {"learning_rate": 3e-4, "max_grad_norm": 0.5, **sizes}}
    monkeypatch.setitem(estimators.OPTIMIZERS, "adam", adam)
    (job,) = estimators.list_jobs("tested/frozen")
    assert estimators.list_jobs("tuned") == []
    for _ in range(2):
        estimators.study_seed(*job, tmp_path, tmp_path / "runs")
    (row,) = estimators.read_rows(tmp_path / "estimators.parquet", estimators.KEYS).values()
    assert [(about["estimator"], about["draws"]) for about in row["rows"][:3]] == [
        ("snapshot", 0),
        ("mean", 2),
        ("mean", 6),
    ]
    assert all(-1 <= about["lds"] <= 1 for about in row["rows"])
    estimators.write_tables(tmp_path)
    assert "## Tested: frozenlake" in (tmp_path / "estimators.md").read_text()
