"""One call of `model.train()`, wrapped without a trace on the model."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from whence.errors import WhenceError

_LEARNS: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""For each model that a callback selects for, when the `learn()` of that callback began."""

_MARK = "_whence_wraps_train"


def claim_learn(model: Any) -> None:
    """Claim the trainings of the `learn()` that begins.

    Raises:
        WhenceError: another callback of this `learn()` has claimed them.
    """
    if _LEARNS.get(model) == model.start_time:
        raise WhenceError(
            "Two InfluenceCallbacks in one learn() select from the same round, and only one can. Pass one; a rule of "
            "your own can combine two."
        )
    _LEARNS[model] = model.start_time


def wrap_next_train(model: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Let the next `model.train()` on the present rollout run as `around(train)`, with SB3's own `train`.

    Args:
        model: a model whose rollout is collected.
        around: called in place of `train()`; its argument trains.
    """
    cancel_hook(model)
    model_class, rollout = type(model), model.rollout_buffer.rewards

    def train(self: Any) -> None:
        cancel_hook(self)
        # SB3 makes new arrays for each rollout. Others than these mean that the wrapped training was interrupted before
        # it began, and the model has learned without this callback since.
        if self.rollout_buffer.rewards is rollout:
            around(self.train)
        else:
            self.train()

    # SB3 calls no callback around train(), and an attribute `model.train` would be stored by model.save(), which stores
    # all attributes. So the model gets a subclass of its class, and its own class back as soon as train() is called.
    namespace = {"train": train, "__module__": model_class.__module__, "__doc__": model_class.__doc__, _MARK: True}
    model.__class__ = type(model_class.__name__, (model_class,), namespace)


def original_class(model: Any) -> Any:
    """Return the model's class, even while a subclass stands in for it."""
    return type(model).__base__ if _MARK in vars(type(model)) else type(model)


def cancel_hook(model: Any) -> None:
    """Give the model its own class back if `wrap_next_train` replaced it."""
    model.__class__ = original_class(model)
