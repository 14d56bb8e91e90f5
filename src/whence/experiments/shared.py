"""Parts that both kinds of runs share: the name of the standard arm, and the report of a round."""

from collections.abc import Callable, Mapping
from typing import Any

STANDARD = "ppo"
"""The arm that the others are measured against."""

OnRound = Callable[[int, Mapping[str, Any]], None]
"""Called with the number of rounds done, from 0, and the last one's metrics."""


def ignore_round(number: int, metrics: Mapping[str, Any]) -> None:
    """Do nothing with a round that is reported."""
