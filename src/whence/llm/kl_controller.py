"""The adaptive coefficient of the divergence from the start model."""

from dataclasses import dataclass


@dataclass
class KLController:
    """The coefficient of the divergence from the start model: fixed, or steered to a target (Ziegler et al., 2019).

    Attributes:
        coefficient: its current value.
        target: the intended divergence of a response, in nats; None: the coefficient is fixed.
        horizon: responses over which it is steered.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10_000

    def update(self, current: float, rows: int) -> None:
        """Move the coefficient after `rows` rows with the mean divergence `current`."""
        if self.target is not None:
            error = min(max(current / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * rows / self.horizon
