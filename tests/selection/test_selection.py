"""What each rule keeps and drops, with numbers worked by hand."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import whence
from whence import IIF, IPPO, AdvantageMagnitude, BelowMean, FromMask, KeepAll, MaxVariance, RandomDrop, ZeroVariance
from whence.core import label_units
from whence.lab.rules import NegativeRandom
from whence.scores.influence import Provenance


def make_records(n: int, **columns: Any) -> whence.RecordBatch:
    zeros = dict.fromkeys(("observations", "actions", "log_probs", "advantages"), torch.zeros(n))
    return whence.RecordBatch(**zeros | columns)


def scored(scores: list[float], **columns: Any) -> tuple[whence.RecordBatch, whence.Influence]:
    records = make_records(len(scores), **columns)
    provenance = Provenance("f", "l", "loop", "", (), records.fingerprint)
    return records, whence.Influence(torch.tensor(scores), records.ids, provenance)


def dropped(rule: Any, records: whence.RecordBatch, influence: whence.Influence | None = None) -> list[int]:
    selection = rule.select(records, influence)
    assert [reason is None for reason in selection.reasons] == selection.keep.tolist()
    return records.ids[~selection.keep].tolist()


# Two environments side by side; the first one's episode ends after its second step. The rollout cuts the other two.
EPISODES = {"env_index": [0, 1] * 3, "episode_starts": [True, False, False, False, True, False]}
MEANS = [-1.0, 2, -3, -6, 3, -1]  # of the episodes: -2 (records 0, 2), 3 (record 4) and -5/3 (1, 3, 5)
PAIRS = {"group_ids": [0, 0, 1, 1], "record_ids": [40, 10, 30, 20]}

BY_SCORES = {
    "the lowest": (IIF(0.5), [-1, 3, -9, 0, -2, -4, -3, 7], {}, [2, 5]),  # 2.5 of five
    "ties": (IIF(0.5), [-1] * 4, {"record_ids": [40, 10, 30, 20]}, [10, 20]),
    "all negative": (IIF(1), [-1, 0, 1, -2], {}, [0, 3]),
    # The mean is 2; five lie below it, two of them above 0: floor(0.8 * 5) = 4 go, not 0.8 of the three below 0.
    "below the mean": (BelowMean(0.8), [-1, 9, 1, 1.5, -3, -2, 8.5], {}, [0, 2, 4, 5]),
    "zero": (whence.NonPositive(), [-1, 0, 1, -2, 3], {}, [0, 1, 3]),
    "units": (IIF(0.5, unit="episode"), MEANS, EPISODES, [0, 2]),
    "units below the mean": (BelowMean(1.0, unit="episode"), MEANS, EPISODES, [0, 1, 2, 3, 5]),
    "units not above 0": (whence.NonPositive(unit="episode"), MEANS, EPISODES, [0, 1, 2, 3, 5]),
    "tied units": (IIF(0.5, unit="group"), [-1, -3, -2, -2], PAIRS, [40, 10]),
}


@pytest.mark.parametrize("case", BY_SCORES)
def test_what_a_rule_drops_by_scores(case: str) -> None:
    rule, scores, columns, expected = BY_SCORES[case]
    assert dropped(rule, *scored([float(score) for score in scores], **columns)) == expected


def test_reasons_name_the_share_and_the_unit() -> None:
    records, influence = scored(MEANS, **EPISODES)
    for rule, at, reason in (
        (BelowMean(0.8), 3, "influence among the lowest 80% of those below the mean"),
        (IIF(0.5, unit="episode"), 0, "influence of its episode among the lowest 50% of those below 0"),
    ):
        assert rule.select(records, influence).reasons[at] == reason


@pytest.mark.parametrize(("drop", "negative", "count"), [(0.29, 100, 29), (0.125, 15, 1), (0.5, 1, 0), (0.1, 30, 3)])
def test_the_share_is_rounded_down_and_not_by_floating_point(drop: float, negative: int, count: int) -> None:
    records, influence = scored([-1.0] * negative + [1.0] * 5)
    for rule in (IIF(drop), RandomDrop(drop)):
        assert len(dropped(rule, records, influence)) == count


def test_ippo_weighs_what_is_positive_by_its_score() -> None:
    # Kept: 3, 1 and 8, whose mean is 4.
    records, influence = scored([3.0, -1.0, 0.0, 1.0, 8.0])
    assert dropped(IPPO(), records, influence) == [1, 2]
    assert IPPO().select(records, influence).weights.tolist() == [0.75, 0, 0, 0.25, 2]
    assert IPPO(weighted=False).select(records, influence).weights.tolist() == [1, 0, 0, 1, 1]
    assert IPPO(warmup=1).select(records, influence).weights.tolist() == [1] * 5
    assert IPPO().select(*scored([-1.0, -2.0])).weights.tolist() == [0, 0]
    # Of units, 3 and 1: they average to 2 over the records.
    pairs = scored([3.5, 1, 2.5, 1, -1], group_ids=[0, 1, 0, 1, 2])
    assert IPPO(unit="group").select(*pairs).weights.tolist() == [1.5, 0.5, 1.5, 0.5, 0]


@pytest.mark.parametrize("rule", [IIF, IPPO, BelowMean, whence.NonPositive, RandomDrop, NegativeRandom])
def test_nothing_is_dropped_while_warming_up(rule: type[IIF]) -> None:
    records, influence = scored([*range(-16, 0), 5])
    for number, drops in ((1, False), (2, False), (3, True)):
        keep = rule(warmup=2).select(records, influence, whence.Progress(round=number)).keep
        assert bool((~keep).any()) is drops, number


@pytest.mark.parametrize("rule", [IIF, BelowMean, RandomDrop, NegativeRandom])
def test_the_share_may_follow_the_progress_remaining(rule: type[IIF]) -> None:
    records, influence = scored([-4, -3, -2, -1, 10])
    for remaining, count in ((1.0, 4), (0.5, 2), (0.25, 1), (0.0, 0)):
        keep = rule(drop=lambda remaining: remaining).select(records, influence, whence.Progress(1, remaining)).keep
        assert int((~keep).sum()) == count
    with pytest.raises(whence.WhenceError, match=r"drop schedule gives -0\.5"):
        rule(drop=lambda remaining: -remaining).select(records, influence, whence.Progress(1, 0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"drop": drop}, rf"drop is {drop!r}; .*in \(0, 1\]") for drop in ("0.5", None, 0, -0.1, 1.01, float("nan"))),
        *(({"seed": seed}, rf"seed is {seed!r}") for seed in (-1, "a", None)),
        ({"warmup": 1.5}, r"warmup is 1\.5"),
        ({"unit": "episodes"}, "unit is 'episodes'.*episode"),
        ({"like": IIF}, "pass an instance"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    for rule in (RandomDrop, IIF if {"drop", "warmup", "unit"} & arguments.keys() else RandomDrop):
        with pytest.raises(whence.WhenceError, match=message):
            rule(**arguments)


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=40), st.floats(0.01, 1))
def test_iif_drops_only_negative_and_nothing_kept_is_lower(scores: list[float], drop: float) -> None:
    records, influence = scored(scores)
    keep = IIF(drop).select(records, influence).keep
    lowest = influence.scores[~keep]
    assert (lowest < 0).all()
    if len(lowest) and keep.any():
        assert influence.scores[keep].min() >= lowest.max()


@pytest.mark.parametrize("rule", [RandomDrop, NegativeRandom])
def test_controls_draw_by_their_own_generator(rule: Any) -> None:
    scores = [float(score) for score in range(-60, 40)]
    records, influence = scored(scores)
    state = torch.get_rng_state()
    keep = rule(0.5, seed=1).select(records, influence).keep
    assert torch.equal(torch.get_rng_state(), state)
    assert int((~keep).sum()) == 30
    assert (~keep[30:60]).any()  # rank plays no part
    assert (~keep[60:]).any() == (rule is RandomDrop)  # nor does the sign, or it does
    assert torch.equal(keep, rule(0.5, seed=1).select(records, influence).keep)
    assert not torch.equal(keep, rule(0.5, seed=2).select(records, influence).keep)
    assert not torch.equal(keep, rule(0.5, seed=1).select(*scored(scores, record_ids=range(100, 200))).keep)
    units = {tuple(dropped(rule(0.5, seed, unit="episode"), *scored(MEANS, **EPISODES))) for seed in range(20)}
    assert units == {(0, 2), (1, 3, 5), (4,)} - ({(4,)} if rule is NegativeRandom else set())


LIKE = (IIF(0.5), whence.NonPositive(), IIF(1.0, unit="episode"), ZeroVariance(), MaxVariance(2), FromMask([0, 5]))


@pytest.mark.parametrize("rule", LIKE, ids=repr)
def test_a_control_drops_as_many_units_as_the_rule_that_it_is_like(rule: Any) -> None:
    records, influence = scored(MEANS, **EPISODES, rewards=[1.0, 1, 2, 0, 0.5, 0], group_ids=[0, 0, 0, 1, 0, 1])
    scores = influence if rule.needs_influence else None
    expected, labels = rule.select(records, scores).keep, label_units(records, getattr(rule, "unit", "record"))
    draws = [RandomDrop(like=rule, seed=seed).select(records, scores).keep for seed in range(12)]
    assert RandomDrop(like=rule).needs_influence is rule.needs_influence
    for keep in draws:
        assert len(labels[~keep].unique()) == len(labels[~expected].unique()) > 0
        assert len(labels[keep].unique()) + len(labels[~keep].unique()) == len(labels.unique())
    assert any(not torch.equal(keep, draws[0]) for keep in draws)


def test_the_control_of_a_rule_within_groups_drops_as_many_of_each_group() -> None:
    groups = torch.tensor([0, 1, 0, 2, 0, 1, 0, 2, 2, 0])
    records = make_records(10, rewards=torch.arange(10.0), group_ids=groups)
    expected = MaxVariance(2).select(records).keep
    draws = [RandomDrop(like=MaxVariance(2), seed=seed).select(records).keep for seed in range(12)]
    for keep in draws:
        assert groups[~keep].bincount(minlength=3).tolist() == groups[~expected].bincount(minlength=3).tolist()
    assert len({tuple(keep.tolist()) for keep in draws}) > 6


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
        ("episode", {}, "pass episode_ids, or episode_starts and env_index"),
        ("episode", {"episode_ids": [0, -1] * 3}, "where episodes begin"),
        ("group", {"group_ids": [-1, 1] * 3}, "pass group_ids"),
    ],
)
def test_units_are_told_by_the_records(unit: Any, columns: dict[str, Any], labels: Any) -> None:
    if isinstance(labels, str):
        with pytest.raises(whence.InvalidRecords, match=labels):
            AdvantageMagnitude(0.5, unit=unit).select(make_records(6, **columns))
        return
    numbers = label_units(make_records(6, **columns), unit)
    assert len(numbers.unique()) == len(set(labels)) == len(set(zip(numbers.tolist(), labels, strict=True)))


# The first two differ by rounding, the others by 1 and by half.
NEARLY = torch.tensor([0.3, 0.1 + 0.2, 1e6, 1e6 + 1, 1e-9, 2e-9], dtype=torch.float64)
ADVANTAGES = {"advantages": [-3.0, 1.0, 2.0, -0.5], "group_ids": [0, 0, 1, 1]}
WITHOUT_SCORES = {
    "equal": (ZeroVariance(), {"rewards": [1.0, 1, 0, 1], "group_ids": [0, 0, 1, 1]}, [0, 1]),
    "equal negative": (ZeroVariance(), {"rewards": [-2.0, -2, -2, -2, -1], "group_ids": [0, 1, 0, 1, 1]}, [0, 2]),
    "a group of one": (ZeroVariance(), {"rewards": [0.0, 0, 5], "group_ids": [4, 4, 2]}, [0, 1]),
    "nearly equal": (ZeroVariance(), {"rewards": NEARLY, "group_ids": [0, 0, 1, 1, 2, 2]}, [0, 1]),
    "extremes": (MaxVariance(2), {"rewards": [0.0, 1, 5, 2]}, [1, 3]),
    "all negative": (MaxVariance(3), {"rewards": [-1.0, -9, -5, -2]}, [2]),  # -5 in place of -2: 10.7 for 12.7
    "all equal": (MaxVariance(2), {"rewards": [1.0, 1, 1, 1]}, [0, 1]),
    "a mirror": (MaxVariance(3), {"rewards": [0.0, 1, 0, 1]}, [0]),  # 0, 1, 1 and 0, 0, 1 are as good
    "one of one": (MaxVariance(2), {"rewards": [3.0]}, []),
    "two of two": (MaxVariance(2), {"rewards": [3.0, 1]}, []),
    "one of three": (MaxVariance(1), {"rewards": [3.0, 1, 2]}, [1, 2]),
    "close to 0": (AdvantageMagnitude(0.5), ADVANTAGES, [1, 3]),
    "groups close to 0": (AdvantageMagnitude(0.5, unit="group"), ADVANTAGES, [2, 3]),  # means of 2 and 1.25
    "tied groups": (AdvantageMagnitude(0.5, unit="group"), {"advantages": [1.0] * 4} | PAIRS, [40, 10]),
    "warm-up": (AdvantageMagnitude(0.5, warmup=1), ADVANTAGES, []),
    "flagged": (FromMask([3, 0, 900]), {"group_ids": [0, 1, 0, 1]}, [0, 3]),
    "groups of the flagged": (FromMask([3], unit="group"), {"group_ids": [0, 1, 0, 1]}, [1, 3]),
    "nothing": (KeepAll(), {"group_ids": [0, 1]}, []),
}


@pytest.mark.parametrize("case", WITHOUT_SCORES)
def test_what_a_rule_drops_without_scores(case: str) -> None:
    rule, columns, expected = WITHOUT_SCORES[case]
    n = len(next(iter(columns.values())))
    assert not rule.needs_influence
    assert dropped(rule, make_records(n, **{"group_ids": [7] * n} | columns)) == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.integers(1, 6))
def test_no_subset_has_a_larger_variance(rewards: list[int], keep: int) -> None:
    both = [value / 2 for pair in zip(rewards, rewards[::-1], strict=True) for value in pair]
    kept = MaxVariance(keep).select(make_records(len(both), rewards=both, group_ids=[0, 1] * len(rewards))).keep
    for group in (0, 1):
        values, chosen = torch.tensor(both[group::2]).double(), kept[group::2]
        assert int(chosen.sum()) == min(keep, len(rewards))
        subsets = combinations(range(len(rewards)), int(chosen.sum()))
        largest = max(float(values[list(subset)].var(correction=0)) for subset in subsets)
        assert float(values[chosen].var(correction=0)) == pytest.approx(largest, abs=1e-9)


def test_flagged_ids_come_from_lists_arrays_and_files(tmp_path: Path) -> None:
    for number, text in enumerate(("[3, 0]", "0\n3\n", "3,0")):
        (tmp_path / f"{number}.txt").write_text(text)
    sources = ([3, 0, 3], torch.tensor([0, 3]), np.array([3, 0]), *(tmp_path / f"{number}.txt" for number in range(3)))
    assert {repr(FromMask(source, unit="group")) for source in sources} == {"FromMask(ids=(0, 3), unit='group')"}
    long = [repr(FromMask(range(first, first + 99))) for first in (0, 1)]
    assert long[0] != long[1]
    assert all(text.startswith("FromMask(ids=<99 ids, digest") for text in long)
    for wrong in ([1.5], [-1], 7, ["a"]):
        with pytest.raises(whence.WhenceError, match="record's id; ids are whole numbers"):
            FromMask(wrong)
    with pytest.raises(whence.WhenceError, match="cannot be read from"):
        FromMask(tmp_path / "none.txt")
    with pytest.raises(whence.WhenceError, match="keep is 0"):
        whence.MaxVariance(0)
    with pytest.raises(whence.InvalidRecords, match="ZeroVariance needs rewards"):
        ZeroVariance().select(make_records(2, group_ids=[0, 0]))


def test_scores_of_other_records_are_refused() -> None:
    records, influence = scored([-1, 1, 2])
    other, _ = scored([-1, 1, 2], record_ids=[3, 4, 5])
    changed = records.with_advantages(records.advantages + 1)
    for asked, scores, message in (
        (records, None, "needs an influence"),
        (other, influence, "other records than the 3"),
        (records, influence.bottom(2), "not top"),
        (changed, influence, "other records"),
    ):
        with pytest.raises(whence.InvalidInfluence, match=message):
            IIF().select(asked, scores)


@pytest.mark.parametrize(
    ("weights", "reasons", "message"),
    [
        ([1.0, 1.0], [None], "n reasons"),
        ([1.0, 1.0], [None, "why"], "0 for dropped"),
        ([-1.0, 0.0], [None, "why"], "not negative"),
        ([0.0, 0.0], [None, "why"], "keeps 1 of 2 records .*weight 0"),
    ],
)
def test_a_selection_is_checked(weights: list[float], reasons: list[str | None], message: str) -> None:
    with pytest.raises(whence.WhenceError, match=message):
        whence.Selection(torch.tensor([True, False]), torch.tensor(weights), reasons)
    assert not whence.Selection(torch.ones(2, dtype=torch.bool), torch.tensor([1.0, 2.0]), [None, None]).uniform
    assert whence.Selection(torch.zeros(2, dtype=torch.bool), torch.zeros(2), ["why", "why"]).uniform
