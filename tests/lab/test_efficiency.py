import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from whence.core import WhenceError
from whence.lab.efficiency import (
    PAIR_METRICS,
    Curve,
    curve_metrics,
    levels,
    literal_levels,
    pair_metrics,
    rounds_to,
    seconds_to,
    summarise,
)


def curve(returns, errors=0.0, seconds=1.0):
    """A curve from its returns; a number stands for the same standard error, or time, in every round."""
    return Curve(
        returns=np.asarray(returns, dtype=float),
        standard_errors=np.broadcast_to(np.asarray(errors, dtype=float), (len(returns),)),
        seconds=np.broadcast_to(np.asarray(seconds, dtype=float), (len(returns) - 1,)),
    )


# R = 5 rounds. SE = 1 wherever a maximum is, so 2 SE = 2; 5% of (20 - 0) = 1; floor 0 + 2.
# Maxima over k >= 1: 1, 6, 7, 20. 1 is not above 2; 6 is a level; 7 < 6 + 2 is none; 20 is one.
STANDARD = curve([0, 1, 6, 7, 5, 20], errors=[1, 1, 1, 1, 9, 1], seconds=[1, 2, 3, 4, 10])
# Reaches 6 in round 1 and 20 in round 3.
METHOD = curve([0, 8, 3, 21, 2, 2], errors=1.0, seconds=[2, 2, 2, 2, 2])


class TestCurve:
    def test_a_return_that_is_not_finite_is_refused(self):
        with pytest.raises(WhenceError, match=r"test returns are .*nan"):
            curve([0, math.nan])

    def test_what_was_not_evaluated_is_no_level_and_reaches_none(self):
        # Round 1 has the untrained policy's return, round 3 that of round 2.
        seen = replace(curve([5, 5, 2, 2, 7]), evaluated=np.array([1, 0, 1, 0, 1]))
        assert literal_levels(seen).tolist() == [2.0, 7.0]
        assert levels(seen).tolist() == [7.0]
        assert [rounds_to(seen, level) for level in (1.0, 3.0)] == [2, 4]
        # The other's level 3 was there untrained, and after its rounds never.
        never = replace(curve([9, 9, 1, 1, 1]), evaluated=np.array([1, 0, 1, 0, 1]))
        assert pair_metrics(never, curve([0, 0, 0, 3, 3]))["unreached"] == 1.0


class TestLevels:
    @pytest.mark.parametrize(
        ("returns", "errors", "expected"),
        [
            # Noise sets the floor and the gap; those of STANDARD.
            (STANDARD.returns, STANDARD.standard_errors, [6, 20]),
            # The errors of both evaluations count. Of the last: 12 < 6 + 8. Of the first: 6 is not above 8, and
            # 12 >= 7 + 2. Of the level: 12 < 9 + 8.
            ([0, 6, 7, 12], [1, 1, 1, 4], [6]),
            ([0, 6, 7, 12], [1, 4, 1, 1], [7, 12]),
            ([0, 9, 10, 12], [1, 4, 1, 1], [9]),
            # Without noise 5% of the rise do. v_0 = -100, peak 100: floor -100 + 0.05 * 200 = -90, itself no level.
            ([-100, -91, -90, -89, 100], 0, [-89, 100]),
            # Floor 2, gap 2: 3, then 4 < 5, then 5 >= 5: the gap is from the last level taken, not from 4. A level
            # exactly two errors above the last counts.
            ([0, 3, 4, 5, 6], 1, [3, 5]),
            # A return below an earlier one is no level.
            ([0, 10, 5, 7, 10, 12], 0, [10, 12]),
        ],
    )
    def test_by_hand(self, returns, errors, expected):
        assert levels(curve(returns, errors)).tolist() == expected

    @pytest.mark.parametrize("returns", [[5, 1, 2, 4], [3, 3, 3], [0, 1, 2]])
    def test_there_may_be_none(self, returns):
        # Worse than untrained; flat; a rise of no more than 2 SE = 2.
        result = levels(curve(returns, errors=1.0))
        assert result.shape == (0,)
        assert result.dtype == np.float64


class TestRoundsAndSeconds:
    @pytest.mark.parametrize(
        ("level", "rounds", "seconds"),
        [
            (1.0, 1, 1.0),
            (6.0, 2, 1.0 + 2.0),
            (6.5, 3, 1.0 + 2.0 + 3.0),
            (20.0, 5, 1.0 + 2.0 + 3.0 + 4.0 + 10.0),
            (20.1, 6, 20.0 + 20.0 / 5),  # never: R+1 = 6 rounds, all seconds and one mean round
        ],
    )
    def test_they_count_through_the_round_that_reaches_the_level(self, level, rounds, seconds):
        assert rounds_to(STANDARD, level) == rounds
        assert seconds_to(STANDARD, level) == pytest.approx(seconds)


class TestPairMetrics:
    def test_by_hand(self):
        # Levels 6 and 20: standard in rounds 2 and 5, method in 1 and 3: reductions 1/2 and 2/5, mean 9/20.
        # Peak level 20: method 2 + 2 + 2 = 6 s, standard 20 s, which are all its seconds too.
        # Literal 1, 6, 7, 20: standard 1, 2, 3, 5; method 1, 1, 1, 3: 0, 1/2, 2/3, 2/5, mean (47/30) / 4.
        assert pair_metrics(METHOD, STANDARD) == pytest.approx(
            {
                "se_ave": 9 / 20,
                "se_peak": 2 / 5,
                "rt_peak": 1 - 6 / 20,
                "rt_peak_paper": 1 - 6 / 20,
                "se_ave_literal": 47 / 120,
                "se_peak_literal": 2 / 5,
                "unreached": 0.0,
            }
        )

    def test_a_level_never_reached_counts_as_one_round_more_than_there_are(self):
        # Levels of the standard: 5, 10 in rounds 1, 3. The method reaches 5 in round 2 and never 10: R+1 = 5.
        # Reductions 1 - 2/1 = -1 and 1 - 5/3 = -2/3; mean -5/6. Seconds: 4 + 4/4 = 5 against 3 of 8.
        standard = curve([0, 5, 2, 10, 4], seconds=[1, 1, 1, 5])
        metrics = pair_metrics(curve([0, 2, 5, 9, 9], seconds=1.0), standard)
        assert metrics["se_ave"] == pytest.approx(-5 / 6)
        assert metrics["se_peak"] == pytest.approx(-2 / 3)
        assert metrics["rt_peak"] == pytest.approx(1 - 5 / 3)
        assert metrics["unreached"] == 0.5

    def test_the_papers_time_is_against_all_standard_rounds(self):
        # Peak level 10, in round 2 of both. Method 3 + 3 = 6 s; standard 4 + 4 = 8 s, of 40 s in all.
        standard = curve([0, 5, 10, 3, 3], seconds=[4, 4, 12, 20])
        metrics = pair_metrics(curve([0, 1, 10, 0, 0], seconds=3.0), standard)
        assert metrics["rt_peak"] == pytest.approx(1 - 6 / 8)
        assert metrics["rt_peak_paper"] == pytest.approx(1 - 6 / 40)

    def test_the_peak_is_the_highest_level_not_the_highest_return(self):
        # 2 SE = 4: levels 5 and 10; the peak of the returns, 12, is within the noise of 10.
        standard = curve([0, 5, 10, 12], errors=2.0)
        metrics = pair_metrics(curve([0, 10, 10, 10], errors=2.0), standard)
        assert metrics["se_peak"] == pytest.approx(1 - 1 / 2)
        assert metrics["rt_peak"] == pytest.approx(1 - 1 / 2)
        # 12 is never reached: R+1 = 4 rounds; the paper's time is to its own peak too.
        assert metrics["se_peak_literal"] == pytest.approx(1 - 4 / 3)
        assert metrics["rt_peak_paper"] == pytest.approx(1 - 4 / 3)
        assert metrics["unreached"] == 0.0

    def test_no_level_gives_none_except_in_the_literal_variant(self):
        # v_1 = 1 and v_2 = 2 are below v_0 = 5. The method reaches 1 in round 1 and 2 in round 1.
        metrics = pair_metrics(curve([0, 3, 3]), curve([5, 1, 2]))
        assert list(metrics) == list(PAIR_METRICS)
        for name in ("se_ave", "se_peak", "rt_peak", "unreached"):
            assert metrics[name] is None
        assert metrics["rt_peak_paper"] == pytest.approx(1 - 1 / 2)
        assert metrics["se_ave_literal"] == pytest.approx((0 + 1 / 2) / 2)
        assert metrics["se_peak_literal"] == pytest.approx(1 / 2)

    def test_another_number_of_rounds_is_refused(self):
        with pytest.raises(WhenceError, match="same in all"):
            pair_metrics(curve([0, 1, 2]), STANDARD)


def test_curve_metrics_by_hand():
    # Trapezoids of 0, 4, 10, 2: 2 + 7 + 6 = 15 over R = 3 rounds.
    assert curve_metrics(curve([0, 4, 10, 2])) == {"final_return": 2.0, "peak_return": 10.0, "auc": 5.0}
    # The untrained policy may be the best: 9, 1 has the one trapezoid 5.
    assert curve_metrics(curve([9, 1])) == {"final_return": 1.0, "peak_return": 9.0, "auc": 5.0}


# One level, 10, reached in round 1, 2 or 4 of 4: a reduction is 1 - m_method / m_standard.
FIRST = curve([0, 10, 10, 10, 10])
SECOND = curve([0, 0, 10, 10, 10])
FOURTH = curve([0, 0, 0, 0, 10])
NONE = curve([10, 0, 0, 0, 0])  # no level of its own; as a method it never reaches 10: R+1 = 5


def random_arms(generator, methods, standards):
    """Two arms of runs of 12 rounds with gains drawn at random, those of "iif" larger by a half."""
    return {
        arm: {s: curve(np.cumsum(np.append(0, generator.random(12) * pace))) for s in range(seeds)}
        for arm, pace, seeds in (("ppo", 1.0, standards), ("iif", 1.5, methods))
    }


class TestSummarise:
    def test_pairs_by_hand(self):
        # Method in rounds 1, 2; standard in 2, 4. Pairs: 1 - 1/2, 1 - 1/4; 1 - 2/2, 1 - 2/4.
        summary = summarise({"ppo": {0: SECOND, 1: FOURTH}, "iif": {0: FIRST, 1: SECOND}})
        entry = summary["iif"]["se_ave"]
        assert entry["per_seed"] == pytest.approx([(1 / 2 + 3 / 4) / 2, (0 + 1 / 2) / 2])
        assert entry["mean"] == pytest.approx((1 / 2 + 3 / 4 + 0 + 1 / 2) / 4)
        # Without either method, 1/4 and 5/8: a variance of (3/16)^2; of the standards the same. Two equal variances of
        # one degree of freedom each have two together, whose t of 0.975 is 4.302653.
        half = 4.302653 * math.sqrt(2) * 3 / 16
        assert (entry["low"], entry["high"]) == pytest.approx((7 / 16 - half, 7 / 16 + half))
        # Standard against standard: 1 - 2/4 and 1 - 4/2.
        assert entry["null"] == pytest.approx((1 / 2 - 1) / 2)

    def test_the_null_of_different_standard_seeds_by_hand(self):
        # Ordered pairs of rounds 1, 2, 4: 1 - 1/2, 1 - 1/4, 1 - 2/1, 1 - 2/4, 1 - 4/1, 1 - 4/2.
        summary = summarise({"ppo": {0: FIRST, 1: SECOND, 2: FOURTH}, "iif": {0: FIRST}})
        entry = summary["iif"]["se_ave"]
        assert entry["null"] == pytest.approx((1 / 2 + 3 / 4 - 1 + 1 / 2 - 3 - 1) / 6)
        # Without one seed: 1 and 4, (3/4 - 3) / 2 = -9/8; 1 and 2 or 2 and 4, (1/2 - 1) / 2 = -1/4. The sum of squares
        # around their mean, -13/24, is 2 (7/24)^2 + (14/24)^2; times 2/3 it is (7/12)^2. Two degrees of freedom.
        assert entry["null_low"] == pytest.approx(-13 / 24 - 4.302653 * 7 / 12)
        assert entry["null_high"] == pytest.approx(-13 / 24 + 4.302653 * 7 / 12)

    def test_against_the_null_no_seed_meets_itself(self):
        # Standards in rounds 1, 2, 4, methods in 1, 2, 1: over those of other standard seeds 1/2, 1/4; 2, 1/2; 1, 1/2.
        # Of standards themselves 37/24.
        standards, methods = {0: FIRST, 1: SECOND, 2: FOURTH}, {0: FIRST, 1: SECOND, 2: FIRST}
        entry = summarise({"ppo": standards, "iif": methods})["iif"]["se_ave"]["against_null"]
        assert entry["mean"] == pytest.approx(1 - (19 / 4 / 6) / (37 / 24))
        # Without each method 1, 9/16, 13/16 are left, over 37/24. Without each standard 7/16, 15/16, 1, over those of
        # the two standards that are left: 5/4, 17/8, 5/4.
        left = [1 - x * 24 / 37 for x in (1, 9 / 16, 13 / 16)]
        of_methods = 2 / 3 * sum((x - sum(left) / 3) ** 2 for x in left)
        left = [1 - 7 / 16 / (5 / 4), 1 - 15 / 16 / (17 / 8), 1 - 1 / (5 / 4)]
        of_standards = 2 / 3 * sum((x - sum(left) / 3) ** 2 for x in left)
        variance = of_methods + of_standards
        freedom = variance**2 / (of_methods**2 / 2 + of_standards**2 / 2)
        half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
        assert entry["high"] - entry["mean"] == pytest.approx(half)

    def test_an_arm_of_half_the_rounds_saves_a_half_against_the_null(self):
        def first_at(k):
            return curve([0] * k + [10] * (9 - k), seconds=2.0)

        standards = {seed: first_at(k) for seed, k in enumerate((2, 4, 8))}
        halved = {seed: first_at(k) for seed, k in enumerate((1, 2, 4))}
        summary = summarise({"ppo": standards, "halved": halved, "same": standards})
        for name in ("se_ave", "se_peak", "rt_peak"):
            assert summary["halved"][name]["against_null"]["mean"] == pytest.approx(1 / 2)
            for arm in ("ppo", "same"):
                assert summary[arm][name]["against_null"]["mean"] == pytest.approx(0.0, abs=1e-12)
        assert summary["halved"]["se_ave"]["mean"] - summary["halved"]["se_ave"]["null"] > 0.6
        assert summarise({"ppo": {0: FIRST}, "iif": {0: FIRST}})["iif"]["se_ave"]["against_null"]["mean"] is None

    def test_the_standard_arm_is_its_own_null(self):
        summary = summarise({"ppo": {0: FIRST, 1: SECOND, 2: FOURTH}})
        for name in PAIR_METRICS:
            entry = summary["ppo"][name]
            assert entry["mean"] is not None
            assert [entry[key] for key in ("mean", "low", "high")] == [
                entry[key] for key in ("null", "null_low", "null_high")
            ]
        # Each seed against the two others only: (1/2 + 3/4) / 2, (-1 + 1/2) / 2, (-3 - 1) / 2.
        assert summary["ppo"]["se_ave"]["per_seed"] == pytest.approx([5 / 8, -1 / 4, -2])

    def test_one_seed_of_each_knows_no_spread(self):
        summary = summarise({"ppo": {0: SECOND}, "iif": {0: FIRST}})
        entry = summary["iif"]["se_ave"]
        assert (entry["mean"], entry["per_seed"]) == (0.5, [0.5])
        assert [entry[key] for key in ("low", "high", "null", "null_low", "null_high")] == [None] * 5
        assert summary["ppo"]["se_ave"]["mean"] is None
        assert summary["ppo"]["se_ave"]["per_seed"] == [None]
        # Area under 0, 10, 10, 10, 10: 35 / 4; under 0, 0, 10, 10, 10: 25 / 4.
        assert summary["iif"]["auc"] == {
            "mean": 8.75,
            "low": None,
            "high": None,
            "iqm": 8.75,
            "per_seed": [8.75],
            "null": 0.0,
            "differences": {"ppo": {"mean": 2.5, "low": None, "high": None}},
        }

    def test_pairs_without_a_value_are_left_out(self):
        # NONE has no level as a standard run: only SECOND's column counts. As a method it takes R+1 = 5.
        summary = summarise({"ppo": {0: SECOND, 1: NONE}, "iif": {0: FIRST, 1: FOURTH}})
        entry = summary["iif"]["se_ave"]
        assert entry["per_seed"] == pytest.approx([1 / 2, -1])
        assert entry["mean"] == pytest.approx(-1 / 4)
        # Without SECOND no pair is left, so how much hangs on it is not known.
        assert (entry["low"], entry["high"]) == (None, None)
        assert summary["ppo"]["se_ave"]["per_seed"] == [None, pytest.approx(1 - 5 / 2)]
        assert entry["null"] == pytest.approx(-3 / 2)

    def test_curve_metrics_and_their_differences_by_hand(self):
        # Final returns. Shared seeds 1 and 2: differences 13 - 10 = 3 and 25 - 20 = 5, mean 4, s = sqrt(2).
        # Standard error sqrt(2) / sqrt(2) = 1; t of 0.975 with one degree of freedom is 12.7062.
        standards = {s: curve([0, 10 * s]) for s in (1, 2, 3)}
        methods = {1: curve([0, 13]), 2: curve([0, 25]), 9: curve([0, 40])}
        entry = summarise({"ppo": standards, "iif": methods})["iif"]["final_return"]
        assert entry["mean"] == pytest.approx(26.0)
        assert entry["per_seed"] == [13.0, 25.0, 40.0]
        # Squares around 26 sum to 169 + 1 + 196 = 366; over 2, then over 3, 61; two degrees of freedom.
        half = 4.302653 * math.sqrt(61)
        assert (entry["low"], entry["high"]) == pytest.approx((26 - half, 26 + half))
        assert entry["null"] == 0.0
        assert entry["differences"]["ppo"]["mean"] == pytest.approx(4.0)
        assert entry["differences"]["ppo"]["low"] == pytest.approx(4.0 - 12.7062, abs=1e-4)
        assert entry["differences"]["ppo"]["high"] == pytest.approx(4.0 + 12.7062, abs=1e-4)

    @pytest.mark.long
    def test_intervals_hold_the_truth_about_as_often_as_they_say(self):
        # What arms of many seeds show stands for the truth. Of 100 small samples 95 should hold it; ratios of rounds
        # are skewed, which costs a few.
        generator = np.random.default_rng(0)
        truth = summarise(random_arms(generator, 60, 60))["iif"]
        covered = Counter()
        for _ in range(100):
            summary = summarise(random_arms(generator, 5, 5))["iif"]
            for name in ("se_ave", "auc"):
                covered[name] += summary[name]["low"] <= truth[name]["mean"] <= summary[name]["high"]
            covered["null"] += (
                summary["se_ave"]["null_low"] <= truth["se_ave"]["null"] <= summary["se_ave"]["null_high"]
            )
        assert all(85 <= count <= 99 for count in covered.values()), covered

    def test_a_missing_standard_arm_is_named(self):
        with pytest.raises(WhenceError, match=r"'ppo' .*'iif', 'random'"):
            summarise({"random": {0: FIRST}, "iif": {0: FIRST}})


# Eighths: sums and differences of these are exact, so that the properties hold without a tolerance.
