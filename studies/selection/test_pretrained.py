from types import SimpleNamespace

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


def test_a_fifth_of_the_puzzles_is_marked_and_none_both_trains_and_measures() -> None:
    from datasets import Dataset

    from studies.selection import pretrained

    puzzles = Dataset.from_dict({"prompt": [str(i) for i in range(300)], "completion": [""] * 300})
    lab = SimpleNamespace(test=puzzles.select(range(64)), train=puzzles.select(range(64, 300)))
    train, test = pretrained.split(lab, seed=0)
    assert sum(train["marked"]) == 26
    assert not {*train["prompt"]} & {*test["prompt"]}
    assert train["marked"] != pretrained.split(lab, seed=1)[0]["marked"]
    clean = []
    lab.reward = lambda prompts, texts, answer: [float(a == b) for a, b in zip(texts, answer, strict=True)]
    reward = pretrained.make_reward(lab, True, clean)
    completions = [[{"content": text}] for text in ("1", "2", "1", "2")]
    assert reward(None, completions, answer=["1"] * 4, marked=[False, False, True, True]) == [1, 0, 0, 1]
    assert clean == [0.5]


def test_a_penalty_is_compared_at_the_divergence_of_an_arm(tmp_path) -> None:
    from studies.selection import penalty

    def make_line(arm, seed, reward, divergence):
        rounds = {"rewards": [0.0] + [reward] * 3, "divergences": [9.0] + [divergence] * 3, "kept": [1.0] * 4}
        return {"arm": arm, "seed": seed, "seconds": 1.0, **rounds}

    ends = dict(zip(penalty.PENALTIES, ((0.5, 1.0), (0.75, 2.0), (0.75, 3.0), (0.5, 4.0)), strict=True))
    runs = {arm: make_line(arm, 0, *end) for arm, end in ends.items()}
    assert penalty.read_frontier(runs, 1.5) == pytest.approx(0.625)
    assert penalty.read_frontier(runs, 9.0) == pytest.approx(0.5)
    for seed in range(2):
        for arm in (*penalty.PENALTIES, *penalty.CHOICES):
            line = make_line(arm, seed, *ends.get(arm, (0.5, 1.5)))
            put_row(tmp_path / "penalty.parquet", line, penalty.KEYS)
    penalty.write_tables(tmp_path)
    (line,) = [line for line in (tmp_path / "penalty.md").read_text().splitlines() if line.startswith("| iif, return")]
    assert "−0.125 [−0.125, −0.125]" in line
