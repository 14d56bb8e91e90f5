import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whence import (
    IIF,
    IPPO,
    BelowMean,
    Influence,
    InvalidInfluence,
    KeepAll,
    NegativeRandom,
    NonPositive,
    Progress,
    RandomDrop,
    RecordBatch,
    Selection,
    WhenceError,
)
from whence.influence import Provenance


def scored(scores: list[float], ids: list[int] | None = None) -> tuple[RecordBatch, Influence]:
    n = len(scores)
    zeros = torch.zeros(n)
    records = RecordBatch(
        observations=zeros, actions=zeros, log_probs=zeros, advantages=zeros, record_ids=ids or list(range(n))
    )
    provenance = Provenance("f", "l", "loop", "", (), records.fingerprint)
    return records, Influence(torch.tensor(scores), records.ids, provenance)


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
