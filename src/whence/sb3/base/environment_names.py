"""Names of actions and of observations' entries: the user's, or those that an environment tells."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from math import prod
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from whence.core import WhenceError
from whence.sb3.base.wrappers import iterate_vec_wrappers

Names = Mapping[str, Sequence[str]]
"""Under "actions" the names of discrete actions, or of the axes of others; under "observations" those of entries."""


def check_names(names: object) -> Names:
    """Return the names that a user passes, by "actions" and "observations".

    Raises:
        WhenceError: they are something else.
    """
    is_table = isinstance(names, Mapping) and names.keys() <= {"actions", "observations"}
    if not is_table or not all(map(_are_names, names.values())):  # type: ignore[attr-defined]
        raise WhenceError(
            f"names is {names!r}. Pass lists of texts that differ, as "
            'names={"actions": ["left", "right"], "observations": ["x", "y"]}.'
        )
    return names  # type: ignore[return-value]


def read_names(model: Any, names: Names) -> dict[str, list[str]]:
    """Return the names that are known of a model's actions and observations, one for each.

    Those that `names` lacks are the environment's `action_names`, `get_action_meanings()`, an Enum in `Actions` or
    `actions`, and `observation_names`. Of stacked frames, each has its own names.

    Raises:
        WhenceError: `names` has other numbers of names.
    """
    counts = {"actions": _count(model.action_space), "observations": _count(model.observation_space)}
    env, lists = model.get_env(), {}
    stacks = [each.stacked_obs.n_stack for each in iterate_vec_wrappers(env) if isinstance(each, VecFrameStack)]
    frames = stacks[-1] if stacks else 1
    for kind, count in counts.items():
        listed = names.get(kind) or _ask(env.unwrapped, kind)
        if kind == "observations" and len(listed) * frames == count:
            ages = [f" ({age} back)" if age else "" for age in reversed(range(frames))]
            listed = [f"{name}{age}" for age in ages for name in listed]
        if len(listed) == count:
            lists[kind] = [*listed]
        elif names.get(kind):
            space = model.action_space if kind == "actions" else model.observation_space
            remedy = f"Pass {count}, in their order" if count else "Leave them out"
            raise WhenceError(f"names has {len(listed)} {kind} ({', '.join(listed)}); {space} has {count}. {remedy}.")
    return lists


def _count(space: spaces.Space[Any]) -> int:
    """Return how many names a space has; 0: it has none."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return prod(space.shape) if space.shape and len(space.shape) == 1 else 0


def _ask(env: Any, kind: str) -> Sequence[str]:
    """Return the names that the first environment tells; none if it does not."""
    with suppress(Exception):  # it may be of another library, or tell something else
        listed: Any = None
        if env.has_attr(attribute := f"{kind[:-1]}_names"):
            listed = env.get_attr(attribute, [0])[0]
        elif kind == "actions" and env.has_attr("get_action_meanings"):
            listed = env.env_method("get_action_meanings", indices=[0])[0]
        if _are_names(listed):
            return [*listed]
        # Only in this process: a class need not go through to another, which would end.
        for name in ("Actions", "actions") if isinstance(env, DummyVecEnv) and kind == "actions" else ():
            each = env.get_attr(name, [0])[0] if env.has_attr(name) else None
            if inspect.isclass(each) and issubclass(each, Enum):
                entries = sorted((entry.value, entry.name) for entry in each)
                if [value for value, _ in entries] == [*range(len(entries))]:
                    return [name.lower().replace("_", " ") for _, name in entries]
    return []


def _are_names(value: object) -> bool:
    """Return whether a value is a list of texts that differ."""
    is_list = (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)
    )
    return is_list and len({*value}) == len(value)  # type: ignore[misc,arg-type]
