"""The adaptive coefficient of the divergence from the start model."""

from dataclasses import dataclass

from whence.errors import WhenceError

MOST = 0.2
"""The largest part of the target that an error counts for."""


@dataclass
class KLCoefficient:
    """The coefficient of the divergence from the start model: fixed, or steered to a target (Ziegler et al., 2019).

    Attributes:
        value: its current value.
        target: the intended divergence of a response, in nats; None: the coefficient is fixed.
        horizon: responses over which it is steered.
        rows: the responses of a round.

    Raises:
        WhenceError: the horizon is so short that one round could turn the coefficient negative.
    """

    value: float
    target: float | None = None
    horizon: int = 10_000
    rows: int = 1

    def __post_init__(self) -> None:
        lowest = MOST * self.rows
        if self.target is not None and self.horizon <= lowest:
            raise WhenceError(
                f"horizon is {self.horizon}, and one round of batch_size={self.rows} rows could turn the weight "
                f"of the divergence negative: horizon has to be above {lowest:g}, such as 10000."
            )

    def update(self, current: float) -> None:
        """Move the coefficient after a round with the mean divergence `current`."""
        if self.target is not None:
            error = min(max(current / self.target - 1, -MOST), MOST)
            self.value *= 1 + error * self.rows / self.horizon
