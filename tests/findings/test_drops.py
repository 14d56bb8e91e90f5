"""When a return fell, and which numbers of rounds were unusual until then."""

import numpy as np
import pytest

from whence.findings.drops import EARLIER, find_drop, measure_changes, split_in_two
from whence.findings.history import History, Series

ROUNDS = np.arange(1, 41)


def make_returns(*levels: tuple[float, int], noise: float = 1.0) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.concatenate([level + noise * generator.standard_normal(count) for level, count in levels])


class TestDrop:
    def test_it_rose_and_fell(self) -> None:
        drop = find_drop(ROUNDS, make_returns((0, 10), (100, 20), (20, 10)))
        assert drop is not None
        assert drop.round == 31
        assert drop.place == 30
        assert 11 <= drop.best_rounds[0] <= drop.best_rounds[1] <= 30
        assert drop.best == pytest.approx(100, abs=2)
        assert drop.last == pytest.approx(20, abs=2)
        assert drop.depth == pytest.approx(0.8, abs=0.05)

    @pytest.mark.parametrize(
        "returns",
        [
            make_returns((0, 20), (100, 20)),
            make_returns((0, 40)),
            make_returns((100, 20), (0, 20)),  # it never rose
            make_returns((0, 10), (100, 15), (20, 3), (100, 12)),  # it recovered
            make_returns((0, 10), (100, 30), noise=40.0),
            np.linspace(0, 100, 40),
            np.full(40, 5.0),
            np.full(40, np.nan),
        ],
        ids=["rises", "nothing", "falls at once", "recovers", "noise", "line", "constant", "unknown"],
    )
    def test_what_is_no_drop(self, returns: np.ndarray) -> None:
        assert find_drop(ROUNDS, returns) is None

    def test_rounds_without_an_end_are_passed_over(self) -> None:
        returns = make_returns((0, 10), (100, 20), (20, 10))
        returns[[5, 28, 29, 35]] = np.nan
        drop = find_drop(ROUNDS, returns)
        assert drop is not None
        assert drop.round == 31

    def test_a_short_run_cannot_tell(self) -> None:
        assert find_drop(ROUNDS[:11], make_returns((0, 3), (100, 4), (0, 4))) is None

    def test_the_split_is_that_of_least_squares(self) -> None:
        values = make_returns((3, 7), (1, 5), noise=0.5)
        misfits = [values[:at].var() * at + values[at:].var() * (len(values) - at) for at in range(1, len(values))]
        assert split_in_two(values) == 1 + int(np.argmin(misfits)) == 7


def make_history(*series: Series) -> History:
    return History(ROUNDS, np.zeros(len(ROUNDS)), series)


class TestChanges:
    def test_how_far_beyond_the_earlier_range_in_its_widths(self) -> None:
        values = np.tile([1.0, 2.0, 1.5, 2.0], 10)
        values[30] = 4.0
        change = measure_changes(make_history(Series("divergence", "the divergence", values)), range(28, 33))[
            "divergence"
        ]
        assert (change.place, change.value, change.usual) == (30, 4.0, 1.75)
        assert change.size == pytest.approx((4 - 2) / (2 - 1))

    def test_below_counts_as_above(self) -> None:
        values = np.tile([1.0, 2.0], 20)
        values[30] = -1.0
        changes = measure_changes(make_history(Series("entropy", "the entropy", values)), range(30, 31))
        assert changes["entropy"].size == pytest.approx(2.0)

    def test_a_columns_summaries_share_their_range(self) -> None:
        middle = np.full(40, 1.0)
        middle[30] = 3.0
        extreme = np.full(40, 11.0)
        series = [
            Series("reward", "the median `reward`", middle, "reward"),
            Series("", "the highest", extreme, "reward"),
        ]
        assert measure_changes(make_history(*series), range(30, 31))["reward"].size == pytest.approx(0.2)

    def test_few_earlier_rounds_or_nothing_but_zeros_tell_nothing(self) -> None:
        values = np.zeros(40)
        values[30] = 1.0
        assert not measure_changes(make_history(Series("reward", "the highest", values)), range(30, 31))
        rising = Series("divergence", "the divergence", np.arange(40.0))
        assert not measure_changes(make_history(rising), range(EARLIER))
        assert measure_changes(make_history(rising), range(EARLIER, EARLIER + 1))

    def test_a_setting_that_stood_still_and_moves(self) -> None:
        rates = np.full(40, 3e-4)
        rates[30:] = 3e-3
        change = measure_changes(make_history(Series("learning rate", "the learning rate", rates)), range(25, 31))
        assert change["learning rate"].place == 30
        assert change["learning rate"].size > 100
