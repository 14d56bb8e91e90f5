"""Faults do what the table says, and lines are judged by kind and place."""

import pytest

pytest.importorskip("Box2D")
pytest.importorskip("minigrid")

from studies.hunt import cells, tables
from studies.hunt.cells import CELLS


@pytest.mark.parametrize("name", ["sign-lander", "frozen-lander", "early-lander"])
def test_a_fault_changes_only_its_region(name: str) -> None:
    """The wrong sign, the frozen feature and the early end are where the table puts them, and nowhere else."""
    plain, faulty = cells.make_env(CELLS["healthy-lander"]), cells.make_env(CELLS[name])
    hits = 0
    for seed in range(5):
        (before, _), (seen, _) = plain.reset(seed=seed), faulty.reset(seed=seed)
        over = ended = False
        while not (over or ended):
            action = int(before[0] * 1000) % 4
            after, reward, over, *_ = plain.step(action)
            seen, paid, ended, *_ = faulty.step(action)
            is_wrong = name == "sign-lander" and action == 2 and before[1] < 0.5
            assert paid == pytest.approx(-reward if is_wrong else reward)
            assert [*seen] == [0 if name == "frozen-lander" and n == 3 else x for n, x in enumerate(after)]
            assert ended == (over or (name == "early-lander" and after[0] > 0.3))
            hits += is_wrong or ended != over or name == "frozen-lander"
            before = after
    assert hits


def test_a_line_names_a_fault_by_kind_and_place() -> None:
    """The third line is read, the fourth is not."""
    right, *wrong = (("reward", f"main_engine, {place} < 0.5 pays −3") for place in ("y", "y_speed", "x", "angle"))
    for cell, lines, is_named in [
        ("sign-lander", [right], True),
        ("sign-lander", [*wrong[:2], right], True),
        ("sign-lander", [*wrong, right], False),
        ("sign-lander", [("setting", right[1])], False),
        ("healthy-lander", [right], False),
    ]:
        assert tables.is_named(CELLS[cell], lines) == is_named
