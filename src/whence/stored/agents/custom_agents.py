"""Policies of `whence.Run`'s runs, made again by the function that a run names, with what else scores need."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from whence.core import A2C, Objective, PolicyView, PPOClip, RecordBatch, RunDirectoryError, first_line, read_numbers
from whence.loops import CUSTOM, SHAPES
from whence.runs import RunDirectory
from whence.sb3 import model_objective
from whence.sb3.episodes import find_object

_OBJECTIVES: dict[str, Any] = {each.__name__: each for each in (PPOClip, A2C)}


@dataclass(frozen=True, eq=False)
class CustomAgent:
    """What commands read of an agent, where SB3's model has the same names.

    Attributes:
        policy: the view that the user's function made.
        objective: what the loop's optimisation raises.
        observation_space: of the shapes that records have; without bounds.
        action_space: the same.
    """

    policy: PolicyView
    objective: Objective
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    gamma: None = None
    gae_lambda: None = None


def is_custom(run: RunDirectory) -> bool:
    """Return whether a run was written by `whence.Run`."""
    return run.config.get("algorithm") == CUSTOM


def refuse_custom(run: RunDirectory, what: str, remedy: str) -> None:
    """Refuse what needs the loop itself, which a run of `whence.Run` does not hold."""
    if is_custom(run):
        raise RunDirectoryError(
            f"{run.path} was written by whence.Run, whose loop is your code, so whence cannot {what}. {remedy}"
        )


def build_agent(run: RunDirectory) -> CustomAgent:
    """Return an agent whose policy is as the user's function makes it."""
    name, objective = run.config.get("policy"), read_numbers(run.config.get("objective") or {})
    if name is None:
        raise RunDirectoryError(
            f"{run.path} names no policy, so none can be asked again. Name a function without arguments that returns "
            'its view, and write a new run: whence.Run(..., policy="module:function").'
        )
    kind, shapes = objective.pop("objective", None), run.notes.get(SHAPES, {})
    if kind not in _OBJECTIVES or not shapes:
        raise RunDirectoryError(
            f"{run.path} holds scores of the objective {kind}, which is not made again by its name; "
            f"{', '.join(_OBJECTIVES)} are. The stored scores are in its records and on its page."
        )
    run.trusted(name)
    try:
        policy = find_object(name)()
    except Exception as failure:  # the user's function may raise anything
        reason = f"{type(failure).__name__}: {first_line(failure)}"
        raise RunDirectoryError(f"The policy {name} of {run.path} cannot be made: {reason}.") from failure
    if not isinstance(policy, PolicyView):
        raise RunDirectoryError(f"{name} returned a {type(policy).__name__}; a whence.PolicyView is needed.")
    observations, actions = (_make_space(shapes, column) for column in ("observations", "actions"))
    return CustomAgent(policy, _OBJECTIVES[kind](**objective), observations, actions)


def _make_space(shapes: dict[str, Any], name: str) -> spaces.Space[Any]:
    """Return a space of the shapes that a run notes of a column or, of a nested one, of its parts."""
    if name in shapes:
        dtype, *shape = shapes[name]
        if name == "actions" and not dtype.startswith(("float", "bfloat")):
            return spaces.MultiDiscrete(np.full(shape, 2**31)) if shape else spaces.Discrete(2**31)
        return spaces.Box(-np.inf, np.inf, shape, np.dtype("float32" if dtype == "bfloat16" else dtype).type)
    keys = dict.fromkeys(each.removeprefix(f"{name}.").split(".")[0] for each in shapes if each.startswith(f"{name}."))
    return spaces.Dict({key: _make_space(shapes, f"{name}.{key}") for key in keys})


def shape_actions(agent: Any, records: RecordBatch) -> RecordBatch:
    """Return records whose actions have the shape that the loop gave them; a table has them flat."""
    if not isinstance(agent, CustomAgent):
        return records
    actions: torch.Tensor = records.actions.reshape(len(records), *(agent.action_space.shape or ()))
    return records.with_columns({"actions": actions})


def read_objective(agent: Any) -> Objective:
    """Return what the optimisation of a model, or of a custom agent, raises for each record."""
    return agent.objective if isinstance(agent, CustomAgent) else model_objective(agent)
