"""Training on a selection: SB3's `train()` is wrapped once, and its buffer yields the selected records meanwhile."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback

from whence.core import Unsupported, WhenceError, replace_attribute
from whence.sb3.models.recurrent import STATES
from whence.sb3.models.supported_models import STAND_IN, original_class
from whence.sb3.rounds.recorder import Recorder
from whence.selection import Selection

Last: TypeAlias = Literal["keep", "drop"]


@contextmanager
def select_from(
    buffer: RolloutBuffer,
    selection: Selection,
    *,
    last: Last = "keep",
    recorder: Recorder | None = None,
) -> Iterator[None]:
    """Let `buffer.get` yield the selected records only; the buffer has its own `get` again on exit.

    Every call draws SB3's permutation of all n records and then filters it, so that runs which drop different records
    share their random streams. Weights that are not uniform become probabilities of n draws with replacement. `last`
    says whether a last minibatch shorter than the others trains.

    A recurrent buffer yields its own minibatches, in which only the selected records are in the loss: the LSTM reads
    the others, too. One with fewer than two selected records joins its neighbour.

    Raises:
        Unsupported: the buffer is recurrent, and the selection has weights.
    """
    sb3_get = buffer.get
    keep = selection.keep.numpy()
    keeps_all = bool(keep.all()) and selection.uniform
    if (recurrent := hasattr(buffer, STATES[0])) and not selection.uniform:
        raise Unsupported(
            "A RecurrentPPO trains on whole sequences, so records can be kept or dropped, but not drawn by weights. "
            "Use a rule without weights, such as IIF(drop=0.125)."
        )

    def get(batch_size: int | None = None) -> Iterator[Any]:
        if recorder is not None:
            recorder.start_epoch()
        order, env_change = _draw_order(buffer, sb3_get)
        if recurrent:
            for indices in _cut_sequences(order, batch_size or len(keep), keep, last=last):
                samples: Any = buffer._get_samples(indices, env_change)
                yield samples._replace(mask=buffer.pad_and_flatten(keep[indices, None].astype(np.float32)))  # type: ignore[attr-defined]
            return
        if selection.uniform:
            order = order[keep[order]]
        else:
            weights = selection.weights.double().numpy()
            order = np.random.choice(len(keep), size=len(keep), p=weights / weights.sum())  # noqa: NPY002
        for indices in cut_minibatches(order, batch_size or len(keep), last=last, join=not keeps_all):
            if recorder is not None:
                recorder.add_minibatch(indices)
            yield buffer._get_samples(indices)
            if recorder is not None:  # not reached if train() stops early
                recorder.count_step()

    with replace_attribute(buffer, "get", get):
        yield


def _cut_sequences(
    order: NDArray[np.int64], batch_size: int, keep: NDArray[np.bool_], *, last: Last
) -> list[NDArray[np.int64]]:
    """Cut records in the order of their sequences into minibatches that keep two each, to normalise advantages over.

    One with fewer joins its neighbour. If a last one that is short may not be left out, it stays.
    """
    minibatches = cut_minibatches(order, batch_size, last=last, join=False)
    if keep.all():
        return minibatches
    if keep[np.concatenate(minibatches)].sum() < 2:
        minibatches = cut_minibatches(order, batch_size, join=False)
    joined = minibatches[:1]
    for indices in minibatches[1:]:
        if min(keep[indices].sum(), keep[joined[-1]].sum()) < 2:
            joined[-1] = np.concatenate([joined[-1], indices])
        else:
            joined.append(indices)
    return joined


def _draw_order(buffer: RolloutBuffer, sb3_get: Any) -> tuple[NDArray[np.int64], Any]:
    """Draw the permutation that the buffer's own `get` draws, which flattens the arrays.

    A recurrent buffer rotates its records, and says where those of another environment begin; others say None.
    """
    with replace_attribute(buffer, "_get_samples", lambda indices, env_change=None: (indices, env_change)):
        (order,) = sb3_get(batch_size=None)
    return order  # type: ignore[no-any-return]


def cut_minibatches(
    order: NDArray[np.int64], batch_size: int, *, last: Last = "keep", join: bool
) -> list[NDArray[np.int64]]:
    """Cut an order of records into minibatches.

    `last="drop"` leaves out a last minibatch shorter than the others, unless it is the only one. With `join`, a last
    one of one record joins the one before, since one advantage cannot be normalised; SB3 cuts without.
    """
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if len(batches) > 1 and len(batches[-1]) < batch_size:
        if last == "drop":
            batches.pop()
        elif join and len(batches[-1]) == 1:
            batches[-2:] = [np.concatenate(batches[-2:])]
    return batches


_LEARNS: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""For each model that a callback selects for, when the `learn()` of that callback began."""


def claim_learn(model: Any) -> None:
    """Claim the trainings of the `learn()` that begins; refuse if another callback of it has claimed them."""
    if _LEARNS.get(model) == model.start_time:
        raise WhenceError(
            "Two InfluenceCallbacks in one learn() select from the same round, and only one can. Pass one; a rule of "
            "your own can combine two."
        )
    _LEARNS[model] = model.start_time


def check_callers(callback: BaseCallback) -> None:
    """Refuse a callback, as it is initialised, inside of one that calls it at events and not for rollouts.

    In nested lists SB3 sets `parent` only afterwards, so that the callers are looked at.
    """
    frame = inspect.currentframe()
    while frame is not None and (caller := frame.f_locals.get("self")) is not callback.model:
        # A callback that forwards rollouts does so by one of these.
        is_deaf = (
            isinstance(caller, BaseCallback)
            and type(caller).on_rollout_start is BaseCallback.on_rollout_start
            and type(caller)._on_rollout_start is BaseCallback._on_rollout_start
        )
        if caller is not callback and is_deaf:
            raise WhenceError(
                f"{type(callback).__name__} is inside of {type(caller).__name__}, which does not call it for each "
                "rollout, so nothing would be scored. Pass both to learn(): callback=[InfluenceCallback(...), the "
                "other]."
            )
        frame = frame.f_back


def wrap_next(model: Any, method: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    """Let the next call of a model's "collect_rollouts" or "train" in the present `learn()` run as `around(call)`."""
    cancel_hook(model)
    model_class, started = type(model), model.start_time

    def stand_in(self: Any, *args: Any, **options: Any) -> Any:
        cancel_hook(self)
        call = partial(getattr(self, method), *args, **options)
        # In another learn() the wrapped call was interrupted before it began, and this callback may not take part.
        return around(call) if self.start_time == started else call()

    # SB3 calls no callback around its methods, and an attribute `model.train` would be stored by model.save(), which
    # stores all attributes. So the model gets a subclass of its class, and its own class back as soon as it is called.
    namespace = {method: stand_in, "__module__": model_class.__module__, "__doc__": model_class.__doc__, STAND_IN: True}
    model.__class__ = type(model_class.__name__, (model_class,), namespace)


def cancel_hook(model: Any) -> None:
    """Give the model its own class back if `wrap_next` replaced it."""
    model.__class__ = original_class(model)
