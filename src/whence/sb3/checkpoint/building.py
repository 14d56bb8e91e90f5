"""A model and a rule built again from a run's configuration; no class is looked up but known ones."""

import ast
import reprlib
import warnings
from collections.abc import Mapping
from typing import Any

from stable_baselines3 import A2C, PPO
from stable_baselines3.common import policies
from stable_baselines3.common.vec_env import VecEnv

from whence import heuristics, selection
from whence.errors import RunDirectoryError, WhenceError
from whence.runs import RunDirectory
from whence.sb3.base.model_description import HYPERPARAMETERS
from whence.sb3.base.networks import resolve_classes
from whence.sb3.contrib import MaskableActorCriticPolicy, MaskablePPO
from whence.selection import SelectionRule

_ALGORITHMS: Mapping[str, Any] = {"PPO": PPO, "A2C": A2C, "MaskablePPO": MaskablePPO}

_POLICIES: Mapping[str, Any] = {
    policy_class.__name__: policy_class
    for policy_class in (
        *(policies.ActorCriticPolicy, policies.ActorCriticCnnPolicy, policies.MultiInputActorCriticPolicy),
        MaskableActorCriticPolicy,
    )
}


def build_model(
    run: RunDirectory,
    env: VecEnv | Any,
    *,
    remedy: str,
    changes: Mapping[str, Any] | None = None,
    device: str = "auto",
) -> Any:
    """Return an untrained model like the one that a run trained.

    Args:
        run: the run.
        env: its environments.
        remedy: what to do if it cannot be built, for the message.
        changes: hyper-parameters in place of stored ones; a schedule is stored in words only. None: the model is to
            score, not to train, and gets neither schedules nor the optimiser.
        device: where it is trained.

    Raises:
        RunDirectoryError: the configuration names an algorithm, a policy or a class that is not known here, or holds a
            schedule that `changes` does not.
    """
    config = run.config
    algorithm = _look_up(run, "algorithm", config.get("algorithm"), _ALGORITHMS, remedy)
    policy = _look_up(run, "policy", config.get("policy"), _POLICIES, remedy)
    parameters = algorithm.__init__.__code__.co_varnames
    stored = {
        name: value
        for name, value in read_settings(run, "hyperparameters").items()
        if name in (*HYPERPARAMETERS, "seed") and name in parameters
    }
    schedules = [name for name, value in stored.items() if str(value).startswith("a schedule")]
    if changes is not None and (missing := [name for name in schedules if name not in changes]):
        raise RunDirectoryError(
            f"{run.path} was trained with {missing[0]} as {stored[missing[0]]}. Pass the schedule: "
            f"{missing[0]}=lambda remaining: ..."
        )
    policy_kwargs = read_settings(run, "policy_kwargs")
    if changes is None:
        policy_kwargs = {name: value for name, value in policy_kwargs.items() if not name.startswith("optimizer_")}
    settings = {name: _read_number(value) for name, value in stored.items() if name not in schedules}
    if "use_rms_prop" in parameters:  # A2C's own optimiser, which is among the policy's arguments if it is used
        settings["use_rms_prop"] = "optimizer_class" in policy_kwargs
    if unknown := sorted(set(changes or {}) - set(parameters)):
        raise RunDirectoryError(
            f"{unknown[0]} is no hyper-parameter of {algorithm.__name__}. If it is an argument of InfluenceCallback, "
            "make the callback as the script did: model, _ = resume(run, env), then InfluenceCallback(rule, run=run, "
            "...)."
        )
    try:
        arguments = {**settings, **(changes or {}), "policy_kwargs": resolve_classes(policy_kwargs)}
        with warnings.catch_warnings():
            # The model may have fewer environments than the one that was trained.
            warnings.filterwarnings("ignore", "You have specified a mini-batch size")
            return algorithm(policy, env, device=device, **arguments)
    except Exception as refusal:  # SB3 and the policy's classes may raise anything
        kind = "" if isinstance(refusal, WhenceError) else f"{type(refusal).__name__}: "
        raise RunDirectoryError(
            f"The policy of {run.path} cannot be built from its configuration: {kind}{refusal} {remedy}"
        ) from refusal


def read_settings(run: RunDirectory, name: str) -> Mapping[str, Any]:
    """Return a table of settings in a run's configuration; empty if it has none.

    Raises:
        RunDirectoryError: what stands there is no table.
    """
    settings = run.config.get(name) or {}
    if not isinstance(settings, Mapping):
        raise RunDirectoryError(
            f"{name} is {reprlib.repr(settings)} in {run.path / 'config.json'}; a table of settings is needed. Restore "
            "the file."
        )
    return settings


def _read_number(value: Any) -> Any:
    """Return a setting as it was: numbers that are not finite are stored as text."""
    return float(value) if value in ("inf", "-inf", "nan") else value


def _look_up(run: RunDirectory, what: str, name: object, classes: Mapping[str, Any], remedy: str) -> Any:
    if not isinstance(name, str) or name not in classes:
        raise RunDirectoryError(
            f"{run.path} was trained with the {what} {name!r}, which cannot be built by its name; {', '.join(classes)} "
            f"can. {remedy}"
        )
    return classes[name]


def build_rule(text: str) -> SelectionRule:
    """Return the rule of whence whose text this is, such as "IIF(drop=0.5, warmup=0)".

    Raises:
        WhenceError: it is no rule of whence's with plain arguments.
    """
    wrong = WhenceError(f"The rule {text!r} cannot be built from its text. Pass it: rule=...")
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise wrong
        name = call.func.id
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        positional = [ast.literal_eval(argument) for argument in call.args]
        kind = getattr(selection, name, None) or getattr(heuristics, name, None)
        if not isinstance(kind, type) or not hasattr(kind, "needs_influence") or kind is SelectionRule:
            raise wrong
        rule: SelectionRule = kind(*positional, **arguments)
    except (SyntaxError, TypeError, ValueError) as failure:
        raise wrong from failure
    return rule
