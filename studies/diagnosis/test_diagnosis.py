"""Rounds of a tiny FrozenLake, judged once, and exact advantages by hand."""

from pathlib import Path

import numpy as np
import pytest

from studies.diagnosis import run, tables
from whence.lab import read_rows


@pytest.mark.long
def test_rounds_are_judged_once_and_tabulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hyperparameters": {"n_steps": 256, "n_epochs": 1}}
    measures = ("visits", "exact", "rollouts")
    setup = run.Setup("lda-code/frozenlake", (1, 2), 1, measures, tiny, records=5, continuations=2)
    monkeypatch.setitem(run.SETUPS, "frozenlake", setup)
    jobs = [job for job in run.list_jobs() if job.setup == "frozenlake"]
    for job in [*jobs, *jobs]:
        run.study_round(job, tmp_path / "out", tmp_path / "runs")
    rows = [*read_rows(tmp_path / "out" / "rounds.parquet", run.KEYS).values()]
    assert [(row["round"], row["measure"]) for row in rows] == [
        (number, measure) for number in (1, 2) for measure in ("exact", "rollouts", "visits")
    ]
    tables.write_tables(tmp_path / "out")
    assert "| rollouts | 2 | 1 |" in (tmp_path / "out" / "tables.md").read_text()


def test_exact_advantages_by_hand() -> None:
    # State 0: action 0 stays without reward, action 1 ends with 1. State 1 cannot be left.
    transitions = {
        0: {0: [(1.0, 0, 0.0, False)], 1: [(1.0, 1, 1.0, True)]},
        1: {action: [(1.0, 1, 0.0, True)] for action in (0, 1)},
    }
    values, advantages = run.solve(transitions, np.full((2, 2), 0.5), 0.5)
    value = 0.5 / (1 - 0.25)
    assert values.tolist() == pytest.approx([value, 0])
    assert advantages[0].tolist() == pytest.approx([0.5 * value - value, 1 - value])
