"""A training taken up again from its run directory alone: `resume`, which builds its model and its rule."""

from functools import partial
from pathlib import Path
from typing import Any

from whence import selection
from whence.core import Objective, Return, RunDirectoryError, Target, WhenceError, describe_part, show
from whence.runs import RunDirectory, list_checkpoints
from whence.sb3.callback import InfluenceCallback
from whence.sb3.checkpointing import NAMES, restore_model
from whence.sb3.models import REMEDY, build_model, describe_model
from whence.scores import FOLDS
from whence.selection import SelectionRule


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
        raise RunDirectoryError(f"{run} holds no checkpoint to go on from. {REMEDY}")
    if target is None and config.get("target") != describe_part("target", Return()):
        raise RunDirectoryError(f"{run} was scored for the target {show(config.get('target'))}. Pass it: target=...")
    if objective is None and (stored_objective := config.get("objective")) is not None:
        raise RunDirectoryError(f"{run} was scored by the objective {show(stored_objective)}. Pass it: objective=...")
    make_callback = partial(
        InfluenceCallback,
        build_rule(config["rule"]) if rule is None else rule,
        target=target,
        objective=objective,
        engine=config["engine"],
        last=config.get("last", "keep"),
        folds=config.get("folds", FOLDS),
        env=stored.trusted(config["env"]) if ":" in str(config.get("env")) else None,  # it is imported
        names=config.get("names", {}),
    )
    model = build_model(stored, env, changes=hyperparameters, device=device)
    experiment = {"experiment": stored.experiment} if stored.experiment else {}
    settings = {**describe_model(model), **make_callback().settings(), **experiment}
    directory = RunDirectory.begin(run, settings, may_change=NAMES)
    assert directory.checkpoint is not None
    restore_model(model, directory.checkpoint.content["model"])
    directory.release()  # until learn() takes it
    return model, make_callback(run=directory)


def build_rule(stored: Any) -> SelectionRule:
    """Return the rule of whence that a run's configuration holds, such as {"rule": "IIF", "drop": 0.5, "warmup": 0}."""
    try:
        return _build(stored)  # type: ignore[no-any-return]
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
