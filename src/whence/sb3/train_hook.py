"""A hook around one call of `model.train()`, which leaves no trace on the model."""

from collections.abc import Callable
from typing import Any

from whence.errors import WhenceError


def wrap_next_train(model: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Let the next `model.train()` of this rollout run as `around(train)`, with SB3's own `train`.

    Until then the model has a subclass of its class: an attribute on the model would end up in `model.save()`. If
    another rollout is collected first (the training was interrupted), `train()` is SB3's own again.

    Args:
        model: a model whose rollout is collected.
        around: called in place of `train()`, with SB3's own `train` as its argument.

    Raises:
        WhenceError: there is a hook around the training on this rollout already; it is cancelled.
    """
    rollout = model.rollout_buffer.rewards  # a new array for each rollout
    is_hooked = vars(type(model)).get(_MARK) is rollout
    cancel_hook(model)
    if is_hooked:
        raise WhenceError(
            "Two InfluenceCallbacks in one learn() select from the same rollout, and only one selection can train. "
            "Pass one; a rule of your own can combine two."
        )
    model_class = type(model)

    def train(self: Any) -> None:
        cancel_hook(self)
        if self.rollout_buffer.rewards is rollout:
            around(self.train)
        else:
            self.train()

    namespace = {"train": train, "__module__": model_class.__module__, "__doc__": model_class.__doc__, _MARK: rollout}
    model.__class__ = type(model_class.__name__, (model_class,), namespace)


def original_class(model: Any) -> Any:
    """Return the model's class, even while a hook replaces it."""
    return type(model).__mro__[1] if _MARK in vars(type(model)) else type(model)


def cancel_hook(model: Any) -> None:
    """Give the model its own class back if `wrap_next_train` replaced it."""
    if _MARK in vars(type(model)):
        model.__class__ = type(model).__base__


_MARK = "_whence_around_train"
