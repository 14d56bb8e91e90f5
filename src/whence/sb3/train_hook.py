"""Hooks around one call of `model.train()`, which leave no trace on the model."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

from whence.errors import WhenceError
from whence.sb3.finite_buffer import identify_rollout

Place: TypeAlias = Literal["selection", "control", "rows"]
"""What a hook does, from the innermost to the outermost: trains, steers the learning rate, writes the round's rows."""

_OWNERS = {"selection": "InfluenceCallback", "control": "KLController", "rows": "InfluenceCallback"}

_CLAIMS: WeakKeyDictionary[Any, tuple[float, set[Place]]] = WeakKeyDictionary()
"""When the last `learn()` of each model began, and the places that its callbacks have claimed."""


def claim_place(model: Any, place: Place) -> None:
    """Claim a place around the trainings of the `learn()` that begins.

    Raises:
        WhenceError: another callback of this `learn()` has claimed it.
    """
    began, places = _CLAIMS.get(model, (None, set[Place]()))
    if began != model.start_time:
        places = set()
    if place in places:
        owner = _OWNERS[place]
        does = "select from" if owner == "InfluenceCallback" else "steer"
        raise WhenceError(
            f"Two {owner}s in one learn() {does} the same round, and only one can. Pass one"
            f"{'; a rule of your own can combine two' if place == 'selection' else ''}."
        )
    _CLAIMS[model] = model.start_time, places | {place}


def wrap_next_train(model: Any, around: Callable[[Callable[[], None]], None], place: Place) -> None:
    """Let the next `model.train()` on this rollout run as `around(train)`, with SB3's own `train` at the centre.

    Until then the model has a subclass of its class: an attribute on the model would end up in `model.save()`. If
    another rollout is collected first (the training was interrupted), `train()` is SB3's own again. So it is while
    another buffer stands in for the model's, as in a trial of the round.

    Args:
        model: a model whose rollout is collected.
        around: called in place of `train()`. Its argument trains: it is SB3's own `train`, or the hook further in.
        place: which of several hooks it is; the callback has claimed the place.
    """
    buffer = model.rollout_buffer
    rollout = identify_rollout(buffer)
    hooks = vars(type(model)).get(_HOOKS, {})
    if hooks.get("rollout") is not rollout:
        cancel_hook(model)
        hooks = {"rollout": rollout}
        _insert_class(model, hooks, buffer)
    hooks[place] = around


def _insert_class(model: Any, hooks: dict[str, Any], buffer: Any) -> None:
    """Give the model a subclass of its class, whose `train` calls the hooks."""
    model_class = type(model)

    def train(self: Any) -> None:
        if self.rollout_buffer is not buffer:
            model_class.train(self)
            return
        cancel_hook(self)
        run = self.train
        if identify_rollout(buffer) is hooks["rollout"]:
            for place in get_args(Place):
                if place in hooks:
                    run = partial(hooks[place], run)
        run()

    namespace = {"train": train, "__module__": model_class.__module__, "__doc__": model_class.__doc__, _HOOKS: hooks}
    model.__class__ = type(model_class.__name__, (model_class,), namespace)


def original_class(model: Any) -> Any:
    """Return the model's class, even while a hook replaces it."""
    return type(model).__mro__[1] if _HOOKS in vars(type(model)) else type(model)


def cancel_hook(model: Any) -> None:
    """Give the model its own class back if `wrap_next_train` replaced it."""
    if _HOOKS in vars(type(model)):
        model.__class__ = type(model).__base__


_HOOKS = "_whence_around_train"
