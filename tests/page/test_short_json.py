import math

import numpy as np
import polars as pl
import pytest

from whence.page.content.short_json import round_numbers, spread


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.23456789, 1.23457),
        (-2.0, -2),
        (1e16, 1e16),
        (math.nan, None),
        (-math.inf, None),
        (np.float64(0.1), 0.1),
        ({"a": [1.0, (None, "b", True)]}, {"a": [1, [None, "b", True]]}),
        (pl.Series([0.5, None, math.nan], dtype=pl.Float32), [0.5, None, None]),
    ],
)
def test_numbers_are_short_and_finite(value, expected):
    rounded = round_numbers(value)
    assert rounded == expected
    assert isinstance(rounded, type(expected))


def test_whole_numbers_keep_their_digits_where_they_are_integers():
    assert round_numbers(1_234_567) == 1_234_567
    assert round_numbers(1_234_567.0) == 1_234_570
    assert round_numbers(0.123456, 3) == 0.123


def test_rounds_are_spread_from_the_first_to_the_last():
    assert spread(range(1, 6), 3) == [1, 3, 5]
    assert spread([4, 9], 3) == [4, 9]
