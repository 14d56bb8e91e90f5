"""A learning rate that a `KLController` steers: the model's schedule times a scale, and what checkpoints hold of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from whence.errors import RunDirectoryError, Unsupported


class SteeredSchedule:
    """A model's learning-rate schedule while a `KLController` steers it: its own schedule, times a scale.

    Args:
        base: the model's own schedule.
        scale: the scale.
        bounds: the lowest and the highest scale. They are of the scale, not of the rate: a rate held up while its
            schedule falls would be a scale that grows, and the next training would start with it.
        controller: the controller's text.
    """

    def __init__(
        self, base: Callable[[float], float], scale: float, bounds: tuple[float, float], controller: str
    ) -> None:
        self.base, self.scale, self.bounds, self.controller = base, scale, bounds, controller

    def __call__(self, progress_remaining: float) -> float:
        """Return the learning rate, for progress from 1 to 0."""
        return float(self.base(progress_remaining)) * self.scale

    def multiply(self, factor: float) -> None:
        """Multiply the scale by a factor, within the bounds."""
        low, high = self.bounds
        self.scale = min(max(self.scale * factor, low), high)

    @property
    def is_highest(self) -> bool:
        """Whether the scale is at its upper bound."""
        return self.scale >= self.bounds[1]


_STEERED: WeakKeyDictionary[Any, tuple[float, SteeredSchedule]] = WeakKeyDictionary()
"""When the `learn()` of each steered model began, and its schedule."""


def note_schedule(model: Any, schedule: SteeredSchedule) -> None:
    """Note the schedule that steers a model in the `learn()` that begins."""
    _STEERED[model] = model.start_time, schedule


@contextmanager
def apply_schedule(model: Any, schedule: SteeredSchedule) -> Iterator[None]:
    """Let a model train at a steered learning rate inside; it has its own schedule again on exit, even by an error."""
    base, model.lr_schedule = model.lr_schedule, schedule
    try:
        yield
    finally:
        model.lr_schedule = base


def _find_schedule(model: Any) -> SteeredSchedule | None:
    """Return the schedule that steers a model in the present `learn()`; None if nothing does."""
    began, schedule = _STEERED.get(model, (None, None))
    return schedule if began == model.start_time else None


def read_steering(model: Any) -> dict[str, Any] | None:
    """Return what steers a model's learning rate, `controller` and `scale`; None if nothing does."""
    schedule = _find_schedule(model)
    return None if schedule is None else {"controller": schedule.controller, "scale": schedule.scale}


def load_steering(model: Any, steering: Mapping[str, Any] | None) -> None:
    """Give a model's steered learning rate the scale that `read_steering` returned."""
    schedule = _find_schedule(model)
    if schedule is not None and steering is not None:
        schedule.scale = steering["scale"]


def check_steering(run: Path, steering: Mapping[str, Any] | None, model: Any) -> None:
    """Refuse a model whose learning rate is steered otherwise than a run's.

    Args:
        run: the run's directory.
        steering: what `read_steering` returned for the run.
        model: the model that goes on with it.

    Raises:
        RunDirectoryError: it is.
    """
    present = read_steering(model)
    before, now = (None if each is None else each["controller"] for each in (steering, present))
    if before == now:
        return
    raise RunDirectoryError(
        f"{run} was trained with {before or 'no KLController'}, and this learn() has {now or 'none'}. "
        f"{f'Pass {before} as a callback' if before else 'Leave it out'}, or overwrite=True to replace the run."
    )


def check_recorded_rate(model: Any) -> None:
    """Refuse to record rounds of a model whose learning rate changes inside of a round.

    Raises:
        Unsupported: it does.
    """
    steering = read_steering(model)
    if steering is not None and "minibatch" in steering["controller"]:
        raise Unsupported(
            f"{steering['controller']} changes the learning rate at each step, and a recording holds one rate a round. "
            "Leave recordings out, or steer after each round: KLController(every='round')."
        )
