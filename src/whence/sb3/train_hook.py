"""A way around one call of `model.train()` that leaves no trace on the model."""

from collections.abc import Callable
from typing import Any

from whence.errors import WhenceError


def wrap_next_train(model: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Let the next `model.train()` of this rollout run as `around(train)`, with SB3's own `train`.

    The model's class stands aside for the time between: an attribute on the model would end up in `model.save()`.
    Should another rollout come first (the training was broken off), `train()` is SB3's own again.

    Raises:
        WhenceError: something else is to run around the training on this rollout; the model is its own again.
    """
    rollout = model.rollout_buffer.rewards  # each rollout has arrays of its own
    taken = vars(type(model)).get(_MARK) is rollout
    cancel_hook(model)
    if taken:
        raise WhenceError(
            "Two InfluenceCallbacks in one learn() select from the same rollout, and only one selection can train. "
            "Pass one; a rule of your own can combine two."
        )
    own = type(model)

    def train(self: Any) -> None:
        cancel_hook(self)
        if self.rollout_buffer.rewards is rollout:
            around(self.train)
        else:
            self.train()

    namespace = {"train": train, "__module__": own.__module__, "__doc__": own.__doc__, _MARK: rollout}
    model.__class__ = type(own.__name__, (own,), namespace)


def original_class(model: Any) -> Any:
    """Return the model's class, also while another stands in for it."""
    return type(model).__mro__[1] if _MARK in vars(type(model)) else type(model)


def cancel_hook(model: Any) -> None:
    """Give the model its own class back, where `wrap_next_train` put another in its place."""
    if _MARK in vars(type(model)):
        model.__class__ = type(model).__base__


_MARK = "_whence_around_train"
