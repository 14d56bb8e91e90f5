"""The adaptive coefficient of the divergence from the start model."""

from dataclasses import dataclass

MOST = 0.2
"""The largest part of the target that an error counts for."""


@dataclass
class KLCoefficient:
    """The coefficient of the divergence from the start model: fixed, or steered to a target (Ziegler et al., 2019).

    Attributes:
        value: its current value.
        target: the intended divergence of a response, in nats; None: the coefficient is fixed.
        horizon: responses over which it is steered; more than a fifth of a round's, else it could turn negative.
    """

    value: float
    target: float | None = None
    horizon: int = 10_000

    def update(self, current: float, rows: int) -> None:
        """Move the coefficient after `rows` rows with the mean divergence `current`."""
        if self.target is not None:
            error = min(max(current / self.target - 1, -MOST), MOST)
            self.value *= 1 + error * rows / self.horizon
