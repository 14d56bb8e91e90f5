"""The study of verdicts judges random sets by others, and counts what is seen."""

from pathlib import Path

import numpy as np
import polars as pl

from studies.verdicts import run, tables


def simulate(sets: float, training: float) -> dict[str, list[dict[str, float]]]:
    """Values without each set: it has an effect of its own, and each seed of training adds chance."""
    generator = np.random.default_rng(0)
    names = [str(place) for place in range(run.DECISIONS)]
    titles = ["all", *(f"null_{number}" for number in range(run.NULLS))]
    effects = {title: sets * generator.normal(size=len(names)) * (title != "all") for title in titles}
    return {
        title: [
            dict(zip(names, effects[title] + training * generator.normal(size=len(names)), strict=True))
            for _ in range(run.SEEDS)
        ]
        for title in titles
    }


def test_effects_of_sets_are_no_causes_and_were_seen_before(tmp_path: Path) -> None:
    rows = pl.DataFrame([*run.judge_nulls("simulated", simulate(sets=1.0, training=0.2))])
    assert rows.group_by("seeds").len().sort("seeds").rows() == [(5, 400), (20, 100)]
    shares = dict(rows.group_by("seeds").agg(pl.col("seen").mean()).iter_rows())
    before = dict(rows.group_by("seeds").agg(pl.col("before").mean()).iter_rows())
    assert max(shares.values()) < 0.05
    assert before[20] > before[5] > 0.05
    rows.write_parquet(tmp_path / "verdicts.parquet")
    tables.write_tables(tmp_path)
    count = rows.filter(seeds=5)["seen"].sum()
    assert f"| simulated | null | decision | 5 | 400 | {count} of 400: " in (tmp_path / "tables.md").read_text()


def test_a_change_beyond_that_of_other_sets_is_seen() -> None:
    sets = simulate(sets=1.0, training=0.2)
    values = {variant: [each["0"] for each in sets[f"null_{place}"]] for place, variant in enumerate(run.VARIANTS)}
    controls = {control: [sets[f"null_{seed}"][seed]["0"] for seed in range(run.SEEDS)] for control in run.VARIANTS[2:]}
    for change, is_seen in ((0.5, False), (8.0, True), (-8.0, True)):
        moved = {**values, **controls, "without": [value + change for value in values["all"]]}
        assert {row["seen"] for row in run.judge_blocks({}, moved)} == {is_seen}
