"""What actions do: their spread, their effect, and whether it is that of another action."""

import numpy as np

from whence.findings.evidence import Evidence
from whence.findings.finding import CannotTellError, Sight


def look_at_spread(evidence: Evidence) -> Sight:
    """Compare the width of an axis' range with the spread of what was taken: in decades, the largest over axes.

    A Gaussian policy begins with a deviation of 1, so that of a range of thousands it never leaves the middle.
    """
    space = evidence.config.get("action_space") or {}
    if evidence.actions.ndim == 1 or space.get("type") != "Box":
        raise CannotTellError("actions are discrete")
    low, high = (
        np.broadcast_to(np.asarray(space[end], dtype=np.float64).ravel(), (evidence.actions.shape[1],))
        for end in ("low", "high")
    )
    width, spread = high - low, evidence.actions.std(axis=0)
    bounded = np.isfinite(width) & (width > 0)
    if not bounded.any():
        raise CannotTellError("no action has bounds")
    decades = np.where(bounded, np.log10(np.maximum(np.where(bounded, width, 1) / np.maximum(spread, 1e-9), 1)), 0)
    axis = int(decades.argmax())
    return Sight(
        float(decades[axis]),
        "dynamics",
        f"Actions use a small part of their range: {evidence.action_names[axis]} may be from {low[axis]:g} to "
        f"{high[axis]:g}, and its spread is {spread[axis]:.2g}",
        "A Gaussian policy begins with a deviation of 1, whatever the range is.",
        "Let the environment take actions from −1 to 1 and scale them itself (`gymnasium.wrappers.RescaleAction`).",
    )
