"""A training taken up again from its run directory alone: its model and its rule, built from the configuration.

No class is looked up but known ones.
"""

import inspect
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from whence import selection
from whence.core import Objective, Return, RunDirectoryError, Target, WhenceError, describe_part, read_numbers, show
from whence.runs import RunDirectory, list_checkpoints
from whence.sb3.base.model_description import HYPERPARAMETERS, describe_model, is_schedule
from whence.sb3.base.networks import resolve_classes
from whence.sb3.base.stored_spaces import make_space
from whence.sb3.callback import InfluenceCallback
from whence.sb3.training_state import NAMES, restore_model
from whence.scores import FOLDS
from whence.selection import SelectionRule

SPACES = ("observation_space", "action_space")
"""The spaces in a run's configuration; None or missing if they are none of SB3's, or the run is an older one."""

_REMEDY = "Build the model and the callback as the script did; learn() goes on by itself."

_ALGORITHMS: Mapping[str, Any] = {"PPO": PPO, "A2C": A2C, "MaskablePPO": MaskablePPO, "RecurrentPPO": RecurrentPPO}

_POLICIES: Mapping[str, Any] = {
    policy.__name__: policy for algorithm in _ALGORITHMS.values() for policy in algorithm.policy_aliases.values()
}


def build_model(
    run: RunDirectory,
    env: VecEnv | Any | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Any:
    """Return an untrained model like the one that a run trained.

    Args:
        run: the run.
        env: its environments; None: there are none, and the policy is built from the stored spaces.
        changes: hyper-parameters in place of stored ones, such as functions, which are not stored. None: the model is
            to score, not to train, and gets neither schedules nor the optimiser.
        device: where it is trained.

    Raises:
        RunDirectoryError: the configuration names an algorithm, a policy or a class that is not known here, or holds a
            schedule that `changes` does not.
    """
    config = run.config
    algorithm = _look_up(run, "algorithm", config.get("algorithm"), _ALGORITHMS)
    policy = _look_up(run, "policy", config.get("policy"), _POLICIES)
    parameters = inspect.signature(algorithm).parameters
    stored = read_numbers(config.get("hyperparameters", {}))
    functions = [name for name, value in stored.items() if is_schedule(value) and value["schedule"] != "linear"]
    if changes is not None and (missing := [name for name in functions if name not in changes]):
        raise RunDirectoryError(
            f"{run.path} was trained with {missing[0]} as {show(stored[missing[0]])}. Pass the schedule: "
            f"{missing[0]}=lambda remaining: ..."
        )
    policy_kwargs = config.get("policy_kwargs") or {}
    if changes is None:
        policy_kwargs = {name: value for name, value in policy_kwargs.items() if not name.startswith("optimizer_")}
    settings = {
        name: value
        for name, value in stored.items()
        if name in (*HYPERPARAMETERS, "seed") and name in parameters and name not in functions
    }
    if "use_rms_prop" in parameters:  # A2C's own optimiser, which is among the policy's arguments if it is used
        settings["use_rms_prop"] = "optimizer_class" in policy_kwargs
    if unknown := sorted(set(changes or {}) - set(parameters)):
        raise RunDirectoryError(
            f"{unknown[0]} is no hyper-parameter of {algorithm.__name__}. If it is an argument of InfluenceCallback, "
            "make the callback as the script did: model, _ = resume(run, env), then InfluenceCallback(rule, run=run, "
            "...)."
        )
    try:
        arguments = {name: _make_schedule(value) if is_schedule(value) else value for name, value in settings.items()}
        arguments |= {**(changes or {}), "policy_kwargs": resolve_classes(policy_kwargs)}
        with warnings.catch_warnings():
            # The model may have fewer environments than the one that was trained.
            warnings.filterwarnings("ignore", "You have specified a mini-batch size")
            model = algorithm(policy, env, device=device, _init_setup_model=env is not None, **arguments)
        if env is None:  # as SB3's own load() builds a model
            model.observation_space, model.action_space = map(make_space, (config[name] for name in SPACES))
            model.n_envs = 1
            model._setup_model()
        return model
    except Exception as refusal:  # SB3 and the policy's classes may raise anything
        kind = "" if isinstance(refusal, WhenceError) else f"{type(refusal).__name__}: "
        raise RunDirectoryError(
            f"The policy of {run.path} cannot be built from its configuration: {kind}{refusal} {_REMEDY}"
        ) from refusal


def _look_up(run: RunDirectory, what: str, name: object, classes: Mapping[str, Any]) -> Any:
    if not isinstance(name, str) or name not in classes:
        raise RunDirectoryError(
            f"{run.path} was trained with the {what} {name!r}, which cannot be built by its name; {', '.join(classes)} "
            f"can. {_REMEDY}"
        )
    return classes[name]


def _make_schedule(stored: Mapping[str, Any]) -> LinearSchedule:
    return LinearSchedule(**{name: value for name, value in stored.items() if name != "schedule"})


def build_rule(stored: Any) -> SelectionRule:
    """Return the rule of whence that a run's configuration holds, such as {"rule": "IIF", "drop": 0.5, "warmup": 0}.

    Raises:
        WhenceError: it is no rule of whence's with plain arguments.
    """
    try:
        rule: SelectionRule = _build(stored)
        return rule
    except (LookupError, TypeError, ValueError) as failure:
        raise WhenceError(f"The rule {show(stored)!r} cannot be built from the run. Pass it: rule=...") from failure


def _build(stored: Any) -> Any:
    """Return a rule, whose settings are plain values, lists of numbers, or rules."""
    kind = getattr(selection, str(stored["rule"]), None)
    if not isinstance(kind, type) or not hasattr(kind, "needs_influence") or kind is SelectionRule:
        raise ValueError("no rule of whence's")
    settings = {name: value for name, value in stored.items() if name != "rule"}
    if isinstance(settings.get("ids"), str):
        raise ValueError("the name of a file")
    return kind(**{name: _build(value) if isinstance(value, dict) else value for name, value in settings.items()})


def resume(
    run: str | Path,
    env: Any,
    *,
    rule: SelectionRule | None = None,
    target: Target | None = None,
    objective: Objective | None = None,
    device: str = "auto",
    **hyperparameters: Any,
) -> tuple[Any, InfluenceCallback]:
    """Return model and callback of an interrupted training, to continue with `learn()`.

    The same script, or the same command, continues by itself when it is run again. This is for those who have the run
    directory alone, or called `learn()` several times. Training then ends with the same bits as if it had not been
    interrupted. The test returns that `whence train` would have measured meanwhile are measured when it is called.

    Args:
        run: the directory that `InfluenceCallback(run=...)` or `whence train` wrote.
        env: environments made as before, with the same wrappers.
        rule: the rule; None: the one that the configuration names, if it is one of whence's.
        target: the target; None: `Return()`.
        objective: the objective; None: the model's own.
        device: where the model is trained.
        hyperparameters: schedules that are functions, which are not stored: `learning_rate=lambda left: 3e-4 * left`.

    Returns:
        The model as it was after the last checkpoint's round, and the callback. `model.learn(total, callback=callback)`
        takes the total of steps as before; `reset_num_timesteps=False` the steps that are left.

    Raises:
        RunDirectoryError: the directory holds no run of an agent, no checkpoint, or a model that cannot be
            built from its configuration.
        WhenceError: the rule cannot be built from the configuration.

    Example:
        ```
        model, callback = whence.sb3.resume("runs/lake", gym.make("FrozenLake-v1", is_slippery=False))
        model.learn(20_480, callback=callback)
        ```
    """
    stored = RunDirectory.open(run)
    config = stored.config
    if stored.is_language:
        raise RunDirectoryError(f"{run} is a language model's run, which goes on with its trainer.")
    if not list_checkpoints(run):
        raise RunDirectoryError(f"{run} holds no checkpoint to go on from. {_REMEDY}")
    if target is None and config.get("target") != describe_part("target", Return()):
        raise RunDirectoryError(f"{run} was scored for the target {show(config.get('target'))}. Pass it: target=...")
    if objective is None and (stored_objective := config.get("objective")) is not None:
        raise RunDirectoryError(f"{run} was scored by the objective {show(stored_objective)}. Pass it: objective=...")
    if config.get("factory_source"):
        stored.check_trust()  # the function is imported by its name
    make_callback = partial(
        InfluenceCallback,
        build_rule(config["rule"]) if rule is None else rule,
        target=target,
        objective=objective,
        engine=config["engine"],
        folds=config.get("folds", FOLDS),
        env=config["env"] if config.get("factory_source") else None,
        names=config.get("names", {}),
    )
    model = build_model(stored, env, changes=hyperparameters, device=device)
    experiment = {"experiment": stored.experiment} if stored.experiment else {}
    settings = {**describe_model(model), **make_callback().settings(), **experiment}
    directory = RunDirectory.begin(run, settings, may_change=NAMES)
    directory.is_trusted = stored.is_trusted  # a stranger's configuration does not become this user's
    assert directory.checkpoint is not None
    restore_model(model, directory.checkpoint.content["model"])
    directory.release()  # until learn() takes it
    return model, make_callback(run=directory)
