"""When a return fell, and which numbers of rounds were unusual until then."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.signal import lfilter

from whence.findings import find
from whence.findings.drops import EARLIER, find_drop, measure_changes, split_in_two
from whence.findings.history import History, Series
from whence.runs import RunDirectory

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

    def test_a_steady_rise_is_no_noise(self) -> None:
        """Each tenth is a third of the rise above the one before, more than most falls."""
        rising, fallen = np.linspace(40, 460, 14), make_returns((25, 35))
        drop = find_drop(np.arange(1, 50), np.concatenate([rising, fallen]))
        assert drop is not None
        assert drop.round == 15

    @pytest.mark.parametrize("count", [25, 50, 100])
    def test_what_wanders_seldom_breaks(self, count: int) -> None:
        generator = np.random.default_rng(0)
        noise = generator.standard_normal((100, count + 50))
        returns = lfilter([1.0], [1.0, -0.9], noise)[:, 50:]
        assert sum(find_drop(np.arange(count), each) is not None for each in returns) <= 10

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
        assert measure_changes(make_history(Series("reward", "the highest", values)), range(30, 31))["reward"].size == 0
        rising = Series("divergence", "the divergence", np.arange(40.0))
        assert not measure_changes(make_history(rising), range(EARLIER))
        assert measure_changes(make_history(rising), range(EARLIER, EARLIER + 1))

    def test_a_setting_that_stood_still_and_moves(self) -> None:
        rates = np.full(40, 3e-4)
        rates[30:] = 3e-3
        change = measure_changes(make_history(Series("learning rate", "the learning rate", rates)), range(25, 31))
        assert change["learning rate"].place == 30
        assert change["learning rate"].size > 100


def log_training(path: Path, broken: bool) -> Path:
    """Write SB3's log of a training whose divergence leaps before its return falls."""
    rounds = 40
    returns = make_returns((10, 10), (100, 20), (20, 10))
    divergence = np.tile([0.01, 0.02, 0.015], 14)[:rounds]
    divergence[28] = 3.0
    table = {
        "time/total_timesteps": np.arange(1, rounds + 1) * 2048,
        "rollout/ep_rew_mean": returns if broken else make_returns((10, 10), (100, 30)),
        "train/approx_kl": divergence,
        "train/learning_rate": np.full(rounds, 3e-4),
    }
    pl.DataFrame(table).write_csv(path / "progress.csv")
    return path


class TestLines:
    def test_a_log_that_broke_has_its_round_and_what_came_before(self, tmp_path: Path) -> None:
        first, second, *_ = find(log_training(tmp_path, broken=True))
        assert first.title.startswith("It worked, then it broke: the return rose from")
        assert (first.kind, first.rank, first.round) == ("drop", "wrong", 31)
        assert second.title == "Before it broke, in round 29: the divergence is 3, after 0.015 in the rounds before"
        assert (second.kind, second.rank, second.round) == ("drop", "wrong", 29)

    def test_a_leap_alone_has_no_line(self, tmp_path: Path) -> None:
        assert not [each for each in find(log_training(tmp_path, broken=False)) if each.kind == "drop"]

    def test_records_that_show_it_and_the_next_command(self, tmp_path: Path) -> None:
        run = RunDirectory.create(tmp_path / "run", {"algorithm": "PPO", "env": None, "n_envs": 1, "rule": {}})
        for number, level in enumerate(make_returns((10, 10), (100, 20), (20, 10)), start=1):
            sensor = np.full(8, 7.0 if number >= 31 else 0.5) + 0.01 * np.arange(8)
            table = pl.DataFrame(
                {
                    "record_id": np.arange(8) + 8 * (number - 1),
                    "env_index": np.zeros(8, int),
                    "episode_id": np.full(8, number),
                    "step": np.arange(8),
                    "action": np.arange(8) % 2,
                    "reward": np.full(8, level / 8, np.float32),
                    "episode_start": np.arange(8) == 0,
                    "end": [None] * 7 + ["terminated"],
                    "observation": pl.Series(np.column_stack([sensor, np.arange(8.0)]), dtype=pl.Array(pl.Float64, 2)),
                }
            )
            run.write_round("records", number, table)
            run.append("metrics", {"round": number, "timestep": 8 * number, "records": 8})
        run.release()
        findings = find(tmp_path / "run")
        assert findings[0].round == 31
        assert findings[0].next_command == f"whence again {tmp_path / 'run'}"
        sensors = [each for each in findings if each.title.startswith("As it broke, in round 31: the share outside")]
        assert [each.record_ids for each in sensors] == [tuple(range(240, 248))]

    def test_nothing_unusual_is_said(self, tmp_path: Path) -> None:
        table = {
            "rollout/ep_rew_mean": make_returns((10, 10), (100, 20), (20, 10)),
            "train/approx_kl": np.full(40, 0.01),
        }
        pl.DataFrame({"time/total_timesteps": np.arange(1, 41), **table}).write_csv(tmp_path / "progress.csv")
        (line,) = [each for each in find(tmp_path) if each.kind == "drop"]
        assert line.evidence.endswith("Nothing that was looked at was unusual in the 5 rounds before.")


class TestLevels:
    def test_a_level_counts_whatever_was_before(self) -> None:
        values = np.tile([0.01, 2.0], 20)
        change = measure_changes(make_history(Series("divergence", "the divergence", values)), range(30, 32))
        assert change["divergence"].size == 0
        assert (change["divergence itself"].size, change["divergence itself"].place) == (2.0, 31)

    def test_entropy_is_counted_in_decades_of_the_first_round(self) -> None:
        values = np.concatenate([np.full(20, 0.5), np.full(20, 0.05)])
        sizes = measure_changes(make_history(Series("entropy", "the entropy", values)), range(30, 31))
        assert sizes["entropy itself"].size == pytest.approx(1.0)
