from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whence import (
    IIF,
    IPPO,
    AdvantageMagnitude,
    BelowMean,
    FromMask,
    Influence,
    InvalidInfluence,
    InvalidRecords,
    KeepAll,
    MaxVariance,
    NegativeRandom,
    NonPositive,
    Progress,
    RandomDrop,
    RecordBatch,
    Selection,
    WhenceError,
    ZeroVariance,
)
from whence.core import label_units
from whence.influence import Provenance


def scored(scores: list[float], ids: list[int] | None = None, **columns: Any) -> tuple[RecordBatch, Influence]:
    zeros = dict.fromkeys(("observations", "actions", "log_probs", "advantages"), torch.zeros(len(scores)))
    records = RecordBatch(**zeros, record_ids=ids or list(range(len(scores))), **columns)
    provenance = Provenance("f", "l", "loop", "", (), records.fingerprint)
    return records, Influence(torch.tensor(scores), records.ids, provenance)


LIKE = (IIF(0.5), NonPositive(), IIF(1.0, unit="episode"), ZeroVariance(), MaxVariance(2), FromMask([0, 5]))


def grouped(rewards: Any, groups: list[int] | None = None, **columns: Any) -> RecordBatch:
    """Records of one group, unless groups are named, with these rewards."""
    zeros = dict.fromkeys(("observations", "actions", "log_probs", "advantages"), torch.zeros(len(rewards)))
    return RecordBatch(**zeros | {"rewards": rewards, "group_ids": groups or [7] * len(rewards)} | columns)


def dropped(rule: Any, records: RecordBatch, influence: Influence | None = None) -> list[int]:
    selection = rule.select(records, influence)
    assert [reason is None for reason in selection.reasons] == selection.keep.tolist()
    return records.ids[~selection.keep].tolist()


# Two environments side by side; the first one's episode ends after its second step. The rollout cuts the other two.
EPISODES = {"env_index": [0, 1] * 3, "episode_starts": [True, False, False, False, True, False]}


@pytest.mark.parametrize(
    ("unit", "columns", "labels"),
    [
        ("record", {}, [0, 1, 2, 3, 4, 5]),
        ("row", {}, [0, 1, 2, 3, 4, 5]),
        ("episode", EPISODES, [0, 2, 0, 2, 1, 2]),
        ("episode", {"episode_ids": [4, 9, 4, 9, 5, 9]}, [0, 2, 0, 2, 1, 2]),
        ("episode", {"episode_ids": [4, 4, 4, 4, 5, 4], "env_index": [0, 1] * 3}, [0, 2, 0, 2, 1, 2]),
        ("episode", EPISODES | {"episode_ids": [-1, -1, -1, -1, 5, -1]}, [0, 2, 0, 2, 1, 2]),
        ("group", {"group_ids": [3, 1, 1, 3, 9, 9]}, [1, 0, 0, 1, 2, 2]),
    ],
)
def test_units_are_told_by_the_records(unit: Any, columns: dict[str, Any], labels: list[int]) -> None:
    found = label_units(grouped([0.0] * 6, **columns), unit)
    assert len(found.unique()) == len(set(labels)) == len(set(zip(found.tolist(), labels, strict=True)))


@pytest.mark.parametrize(
    ("unit", "columns", "message"),
    [
        ("episode", {}, "pass episode_ids, or episode_starts and env_index"),
        ("episode", {"episode_ids": [0, -1]}, "where episodes begin"),
        ("group", {"group_ids": [-1, 1]}, "pass group_ids to RecordBatch or make_rows"),
    ],
)
def test_units_that_the_records_do_not_tell_are_refused(unit: Any, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecords, match=message):
        AdvantageMagnitude(0.5, unit=unit).select(grouped([0.0, 0.0], **columns))


def test_units_share_a_fate_by_their_mean() -> None:
    # Means: -2 (records 0, 2), 3 (record 4) and -1 (1, 3, 5): two units are below 0, and below their mean, 0.
    records, influence = scored([-1.0, 2, -3, -4, 3, -1], **EPISODES)
    assert dropped(IIF(0.5, unit="episode"), records, influence) == [0, 2]
    assert dropped(BelowMean(1.0, unit="episode"), records, influence) == [0, 1, 2, 3, 5]
    assert dropped(NonPositive(unit="episode"), records, influence) == [0, 1, 2, 3, 5]
    assert IPPO(unit="episode").select(records, influence).weights.tolist() == [0, 0, 0, 0, 1, 0]
    assert dropped(NegativeRandom(0.5, unit="episode"), records, influence) in ([0, 2], [1, 3, 5])
    by_chance = {tuple(dropped(RandomDrop(0.5, seed, unit="episode"), records, influence)) for seed in range(20)}
    assert by_chance == {(0, 2), (1, 3, 5), (4,)}
    assert IIF(0.5, unit="episode").select(records, influence).reasons[0] == (
        "influence of its episode among the lowest 50% of those below 0"
    )
    # Weights: 3 for the records of one unit, 1 for the other's; 2 on average.
    better, influence = scored([3.0, 1, 3, 1], group_ids=[0, 1, 0, 1])
    assert IPPO(unit="group").select(better, influence).weights.tolist() == [1.5, 0.5, 1.5, 0.5]


def test_of_equal_units_that_of_the_lowest_record_goes_first() -> None:
    records, influence = scored([-1.0, -3, -2, -2], ids=[40, 10, 30, 20], group_ids=[0, 0, 1, 1])
    assert dropped(IIF(0.5, unit="group"), records, influence) == [40, 10]
    assert dropped(AdvantageMagnitude(0.5, unit="group"), records) == [40, 10]


@pytest.mark.parametrize(
    ("rewards", "groups", "expected"),
    [
        ([1.0, 1, 0, 1], [0, 0, 1, 1], [0, 1]),
        ([-2.0, -2, -2, -2, -1], [0, 1, 0, 1, 1], [0, 2]),  # all negative
        ([0.0, 0, 5], [4, 4, 2], [0, 1]),  # a group of one is kept
        ([0.3, 0.1 + 0.2, 1e6, 1e6 + 1], [0, 0, 1, 1], [0, 1]),  # equal but for rounding; far from 0, and different
    ],
)
def test_groups_of_one_reward_are_dropped(rewards: list[float], groups: list[int], expected: list[int]) -> None:
    assert dropped(ZeroVariance(), grouped(torch.tensor(rewards, dtype=torch.float64), groups)) == expected


@pytest.mark.parametrize(
    ("rewards", "keep", "expected"),
    [
        ([0.0, 1, 5, 2], 2, [1, 3]),
        ([-1.0, -9, -5, -2], 3, [2]),  # all negative; -5 instead of -2 has 10.7 for 12.7
        ([1.0, 1, 1, 1], 2, [0, 1]),  # all equal
        ([0.0, 1, 0, 1], 3, [0]),  # 0, 1, 1 and 0, 0, 1 are as good
        ([3.0], 2, []),
        ([3.0, 1], 2, []),
        ([3.0, 1, 2], 1, [1, 2]),
    ],
)
def test_the_rewards_of_largest_variance_are_kept(rewards: list[float], keep: int, expected: list[int]) -> None:
    assert dropped(MaxVariance(keep), grouped(rewards)) == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.integers(1, 6))
def test_no_subset_has_a_larger_variance(rewards: list[int], keep: int) -> None:
    halves = grouped(
        [value / 2 for pair in zip(rewards, rewards[::-1], strict=True) for value in pair], [0, 1] * len(rewards)
    )
    kept = MaxVariance(keep).select(halves).keep
    assert halves.rewards is not None
    for group in (0, 1):
        values, chosen = halves.rewards[group::2].double(), kept[group::2]
        assert int(chosen.sum()) == min(keep, len(rewards))
        largest = max(
            values[list(one)].var(correction=0) for one in combinations(range(len(rewards)), int(chosen.sum()))
        )
        assert float(values[chosen].var(correction=0)) == pytest.approx(float(largest), abs=1e-9)


def test_the_smallest_advantages_are_dropped() -> None:
    records = grouped([0.0] * 4, [0, 0, 1, 1], advantages=[-3.0, 1.0, 2.0, -0.5])
    assert dropped(AdvantageMagnitude(0.5), records) == [1, 3]
    assert dropped(AdvantageMagnitude(0.5, unit="group"), records) == [2, 3]  # 2 and 1.25
    assert AdvantageMagnitude(0.5, warmup=1).select(records).keep.all()


def test_what_was_flagged_is_dropped(tmp_path: Path) -> None:
    records = grouped([0.0] * 4, [0, 1, 0, 1])
    for number, text in enumerate(("[3, 0]", "0\n3\n", "3,0")):
        (tmp_path / f"{number}.txt").write_text(text)
    sources = ([3, 0, 900], torch.tensor([0, 3]), np.array([3, 3, 0]), *(tmp_path / f"{n}.txt" for n in range(3)))
    assert all(dropped(FromMask(source), records) == [0, 3] for source in sources)
    assert dropped(FromMask([3], unit="group"), records) == [1, 3]
    assert repr(FromMask([3, 0], unit="group")) == "FromMask(ids=(0, 3), unit='group')"
    long = [repr(FromMask(range(first, first + 99))) for first in (0, 1)]
    assert long[0] != long[1]
    assert all(text.startswith("FromMask(ids=<99 ids, digest") for text in long)
    for wrong in ([1.5], [-1], 7, ["a"]):
        with pytest.raises(WhenceError, match="for a record's id; ids are whole numbers"):
            FromMask(wrong)
    with pytest.raises(WhenceError, match="cannot be read from"):
        FromMask(tmp_path / "none.txt")


@pytest.mark.parametrize("rule", LIKE, ids=repr)
def test_a_control_drops_as_many_units_at_random(rule: Any) -> None:
    columns = EPISODES | {"rewards": [1.0, 1, 2, 0, 0.5, 0], "group_ids": [0, 0, 0, 1, 0, 1]}
    records, influence = scored([-1.0, 2, -3, -4, 3, -1], **columns)
    scores = influence if rule.needs_influence else None
    unit = getattr(rule, "unit", "record")
    expected, labels = rule.select(records, scores).keep, label_units(records, unit)
    draws = [RandomDrop(like=rule, seed=seed).select(records, scores).keep for seed in range(12)]
    assert RandomDrop(like=rule).needs_influence is rule.needs_influence
    for keep in draws:
        assert len(labels[~keep].unique()) == len(labels[~expected].unique()) > 0
        assert len(labels[keep].unique()) + len(labels[~keep].unique()) == len(labels.unique())
    assert any(not torch.equal(keep, draws[0]) for keep in draws)


def test_iif_drops_the_lowest_of_the_negative() -> None:
    # Five are negative; floor(0.5 * 5) = 2 are dropped: -9 and -4.
    records, influence = scored([-1, 3, -9, 0, -2, -4, -3, 7])
    selection = IIF(drop=0.5).select(records, influence)
    assert selection.keep.tolist() == [True, True, False, True, True, False, True, True]
    assert selection.weights.tolist() == [1, 1, 0, 1, 1, 0, 1, 1]
    assert [reason is None for reason in selection.reasons] == selection.keep.tolist()
    assert selection.reasons[2] == "influence among the lowest 50% of those below 0"


def test_of_equal_scores_the_lower_id_goes_first() -> None:
    records, influence = scored([-1, -1, -1, -1], ids=[40, 10, 30, 20])
    assert IIF(drop=0.5).select(records, influence).keep.tolist() == [True, False, True, False]


def test_all_negative_are_dropped_at_one_and_zero_is_not_negative() -> None:
    records, influence = scored([-1, 0, 1, -2])
    assert IIF(drop=1).select(records, influence).keep.tolist() == [False, True, True, False]


@pytest.mark.parametrize(("drop", "negative", "dropped"), [(0.29, 100, 29), (0.125, 15, 1), (0.5, 1, 0), (0.1, 30, 3)])
def test_the_share_is_rounded_down_and_not_by_floating_point(drop: float, negative: int, dropped: int) -> None:
    records, influence = scored([-1.0] * negative + [1.0] * 5)
    for rule in (IIF(drop), RandomDrop(drop)):
        assert int((~rule.select(records, influence).keep).sum()) == dropped


def test_below_mean_drops_the_lowest_of_those_below_the_mean() -> None:
    # The mean is 2; five lie below it, two of them above 0: floor(0.8 * 5) = 4 are dropped, not 0.8 of the negative 3.
    records, influence = scored([-1, 9, 1, 1.5, -3, -2, 8.5])
    selection = BelowMean(drop=0.8).select(records, influence)
    assert selection.keep.tolist() == [False, True, False, True, False, False, True]
    assert selection.reasons[0] == "influence among the lowest 80% of those below the mean"


def test_nonpositive_drops_zero_too() -> None:
    records, influence = scored([-1, 0, 1, -2, 3])
    assert NonPositive().select(records, influence).keep.tolist() == [False, False, True, False, True]


def test_negative_random_draws_from_the_negative_alone() -> None:
    records, influence = scored([-1.0] * 60 + [1.0] * 40)
    state = torch.get_rng_state()
    keep = NegativeRandom(0.5, seed=1).select(records, influence).keep
    assert torch.equal(torch.get_rng_state(), state)
    assert int((~keep).sum()) == 30
    assert keep[60:].all()
    assert torch.equal(keep, NegativeRandom(0.5, seed=1).select(records, influence).keep)
    assert not torch.equal(keep, NegativeRandom(0.5, seed=2).select(records, influence).keep)
    # Not the lowest: rank plays no part.
    ranked, graded = scored([float(score) for score in range(-60, 40)])
    dropped = ~NegativeRandom(0.5, seed=1).select(ranked, graded).keep
    assert dropped[30:60].any()


def test_ippo_weighs_what_is_positive_by_its_score() -> None:
    # Kept: 3, 1 and 8, whose mean is 4.
    records, influence = scored([3.0, -1.0, 0.0, 1.0, 8.0])
    selection = IPPO().select(records, influence)
    assert selection.keep.tolist() == [True, False, False, True, True]
    assert selection.weights.tolist() == [0.75, 0, 0, 0.25, 2]
    assert IPPO(weighted=False).select(records, influence).weights.tolist() == [1, 0, 0, 1, 1]
    assert IPPO(warmup=1).select(records, influence).weights.tolist() == [1] * 5
    nothing = IPPO().select(*scored([-1.0, -2.0]))
    assert not nothing.keep.any()
    assert nothing.weights.tolist() == [0, 0]


@pytest.mark.parametrize("rule", [IIF, IPPO, BelowMean, NonPositive, RandomDrop, NegativeRandom])
def test_nothing_is_dropped_while_warming_up(rule: type[IIF]) -> None:
    records, influence = scored([*range(-16, 0), 5])
    for number, drops in ((1, False), (2, False), (3, True)):
        keep = rule(warmup=2).select(records, influence, Progress(round=number)).keep
        assert bool((~keep).any()) is drops, number


@pytest.mark.parametrize("rule", [IIF, BelowMean, RandomDrop, NegativeRandom])
def test_the_share_may_follow_the_progress_remaining(rule: type[IIF]) -> None:
    records, influence = scored([-4, -3, -2, -1, 10])
    for remaining, dropped in ((1.0, 4), (0.5, 2), (0.25, 1), (0.0, 0)):
        keep = rule(drop=lambda remaining: remaining).select(records, influence, Progress(1, remaining)).keep
        assert int((~keep).sum()) == dropped
    with pytest.raises(WhenceError, match=r"drop schedule gives -0\.5 at 0\.5 remaining"):
        rule(drop=lambda remaining: -remaining).select(records, influence, Progress(1, 0.5))


def test_other_types_are_refused() -> None:
    for drop in ("0.5", None):
        with pytest.raises(WhenceError, match=rf"drop is {drop!r}; .*in \(0, 1\]"):
            IIF(drop)
    with pytest.raises(WhenceError, match=r"warmup is 1\.5; it is a number of rounds"):
        IIF(warmup=1.5)
    for rule in (RandomDrop, NegativeRandom):
        for seed in (-1, "a", None):
            with pytest.raises(WhenceError, match=rf"seed is {seed!r}; a whole number is needed"):
                rule(seed=seed)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=40), st.floats(0.01, 1))
def test_iif_drops_only_negative_and_nothing_kept_is_lower(scores: list[float], drop: float) -> None:
    records, influence = scored(scores)
    keep = IIF(drop).select(records, influence).keep
    dropped = influence.scores[~keep]
    assert (dropped < 0).all()
    if len(dropped) and keep.any():
        assert influence.scores[keep].min() >= dropped.max()


def test_random_drop_draws_from_all_records_by_its_own_generator() -> None:
    records, influence = scored([-1.0] * 60 + [1.0] * 40)
    state = torch.get_rng_state()
    keep = RandomDrop(0.5, seed=1).select(records, influence).keep
    assert int((~keep).sum()) == 30
    assert (~keep[60:]).any()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(keep, RandomDrop(0.5, seed=1).select(records, influence).keep)
    assert not torch.equal(keep, RandomDrop(0.5, seed=2).select(records, influence).keep)
    next_round, next_influence = scored([-1.0] * 60 + [1.0] * 40, ids=list(range(100, 200)))
    assert not torch.equal(keep, RandomDrop(0.5, seed=1).select(next_round, next_influence).keep)


def test_keep_all_needs_no_influence() -> None:
    records, _ = scored([-1, 1])
    assert not KeepAll().needs_influence
    selection = KeepAll().select(records)
    assert selection.keep.all()
    assert selection.uniform


@pytest.mark.parametrize("rule", [IIF, RandomDrop])
@pytest.mark.parametrize("drop", [0, -0.1, 1.01, float("nan")])
def test_shares_outside_zero_to_one_are_refused(rule: type[IIF] | type[RandomDrop], drop: float) -> None:
    with pytest.raises(WhenceError, match=rf"drop is {drop}; .*in \(0, 1\]"):
        rule(drop=drop)


def test_scores_of_other_records_are_refused() -> None:
    records, influence = scored([-1, 1, 2])
    other, _ = scored([-1, 1, 2], ids=[3, 4, 5])
    with pytest.raises(InvalidInfluence, match="needs an influence"):
        IIF().select(records, None)
    with pytest.raises(InvalidInfluence, match="other records than the 3"):
        IIF().select(other, influence)
    with pytest.raises(InvalidInfluence, match="not top"):
        IIF().select(records, influence.bottom(2))
    with pytest.raises(InvalidInfluence, match="other records"):
        IIF().select(records.with_advantages(records.advantages + 1), influence)


def test_a_selection_is_checked() -> None:
    keep = torch.tensor([True, False])
    with pytest.raises(WhenceError, match="n reasons"):
        Selection(keep, torch.ones(2), [None])
    with pytest.raises(WhenceError, match="0 for dropped"):
        Selection(keep, torch.ones(2), [None, "why"])
    with pytest.raises(WhenceError, match="not negative"):
        Selection(keep, torch.tensor([-1.0, 0]), [None, "why"])
    assert not Selection(torch.ones(2, dtype=torch.bool), torch.tensor([1.0, 2.0]), [None, None]).uniform
    with pytest.raises(WhenceError, match=r"keeps 1 of 2 records and gives all of them weight 0"):
        Selection(keep, torch.zeros(2), [None, "why"])
    assert not Selection(torch.zeros(2, dtype=torch.bool), torch.zeros(2), ["why", "why"]).keep.any()
