"""The tables of a pretrained model, by hand."""

import polars as pl
import pytest

from studies.selection.tables import KEYS, read_at, write_tables
from whence.lab import put_row

STAGES = {"none": {"generation": 2.0, "optimisation": 6.0}, "iif": {}}
STAGES["random"] = {"generation": 2.0, "scoring": 1.0, "optimisation": 3.0}


def make_run(arm, seed, rewards, divergences=(0.0, 1.0, 3.0), seconds=(0.0, 80.0, 160.0)):
    columns = zip(rewards, divergences, seconds, strict=True)
    points = [{"round": 8 * i, "reward": r, "divergence": d, "seconds": s} for i, (r, d, s) in enumerate(columns)]
    kept = [] if arm == "none" else [0.5, 0.25]
    run = {"part": "three", "arm": arm, "rewards": "clean", "seed": seed, "points": points}
    return run | {"clean": list(rewards[:2]), "kept": kept, "stages": STAGES[arm]}


def test_a_quantity_is_read_between_points_and_ends_with_the_run() -> None:
    plain, quick = make_run("none", 0, (0.25, 0.5, 0.75)), make_run("iif", 0, (0.25, 0.5, 0.5), (0.0, 1.0, 2.0))
    assert read_at(plain, "divergence", quick) == pytest.approx(0.625)
    assert read_at(plain, "seconds", quick) == pytest.approx(0.75)
    assert read_at(quick, "divergence", plain) == pytest.approx(0.5)


def test_tables_compare_runs_of_a_seed(tmp_path) -> None:
    for seed in range(3):
        put_row(tmp_path / "pretrained.parquet", make_run("none", seed, (0.25, 0.5, 0.5 + seed / 10)), KEYS)
        put_row(tmp_path / "pretrained.parquet", make_run("random", seed, (0.25, 0.5, 0.25 + seed / 10)), KEYS)
    assert len(pl.read_parquet(tmp_path / "pretrained.parquet")) == 6
    write_tables(tmp_path)
    line, _ = [line for line in (tmp_path / "tables.md").read_text().splitlines() if line.startswith("| random")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:5] == ["0.350 [0.102, 0.598]", "−0.250 [−0.250, −0.250]", ""]
    assert cells[-3] == "0.375 [0.375, 0.375]"


def test_the_cost_of_a_round_is_compared_within_a_seed(tmp_path) -> None:
    for arm in ("none", "random"):
        put_row(tmp_path / "pretrained.parquet", make_run(arm, 0, (0.25, 0.5, 0.5)), KEYS)
    write_tables(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "| random | 1.00 | 0.50 | 1.50 | 0.75 | 0.67 | 1 |" in text
    assert "| none | 1.00 | 0.00 | 3.00 |  |  | 1 |" in text
