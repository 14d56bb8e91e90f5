"""The study of what choosing costs: its ways choose as they say, and its tables are made of its cells."""

from pathlib import Path

import pytest

from studies.benchmarks.cells import measure_cells
from studies.scoring import run, tables
from studies.scoring.trainings import STAGES, WAYS


def test_a_cell_is_measured_once_and_tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"plain": 2.0, "before": 4.0, "in_step": 3.0}
    calls = []

    def train(size: str, batch: int, epochs: int, way: run.Way, device: str) -> dict[str, float]:
        calls.append(way.name)
        return dict.fromkeys(STAGES, 0.0) | {"generation": 1.0, "optimisation": seconds[way.name.split(",")[0]]}

    monkeypatch.setitem(run.TRAINERS, "grpo", train)
    cells = [cell for cell in run.list_cells() if cell.name == "grpo/1M/16/1"]
    for _ in range(2):
        measure_cells(tmp_path, cells, "cpu", 2)
    assert calls == 2 * [way.name for way in WAYS]
    tables.write_tables(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "| 1M, 16, 1 | 2 |" + 3 * " 2.00 [2.00, 2.00] |" + 3 * " 1.50 [1.50, 1.50] |" in text
    assert "| GRPO, 1M, 16 | 1 | 2 | 4 | 1.33 |" in text
