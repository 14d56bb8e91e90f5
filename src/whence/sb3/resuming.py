"""A training taken up again from its run directory alone."""

from functools import partial
from pathlib import Path
from typing import Any

from whence.errors import RunDirectoryError
from whence.objectives import Objective
from whence.runs import RunDirectory, list_checkpoints
from whence.sb3.base.model_description import describe
from whence.sb3.callback import InfluenceCallback
from whence.sb3.checkpoint.building import build_model, build_rule
from whence.sb3.checkpoint.restore import load_model
from whence.selection import SelectionRule
from whence.targets import Return, Target, target_name

_REMEDY = "Build the model and the callback as the script did, and call learn() again: it goes on by itself."


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
    """Return model and callback of an interrupted training, to go on with `learn()`.

    The same script, or the same command, goes on by itself when it is run again. This is for those who have the run
    directory alone, or called `learn()` several times. Training then ends with the same bits as if it had not been
    interrupted. The test returns that `whence train` would have measured meanwhile are measured when it is called.

    Args:
        run: the directory that `InfluenceCallback(run=...)` or `whence train` wrote.
        env: environments made as before, with the same wrappers.
        rule: the rule; None: the one that the configuration names, if it is one of whence's.
        target: the target; None: `Return()`.
        objective: the objective; None: the model's own.
        device: where the model is trained.
        hyperparameters: schedules, which a configuration holds in words only: `learning_rate=lambda left: 3e-4 * left`.

    Returns:
        The model as it was after the last checkpoint's round, and the callback. `model.learn(total, callback=callback)`
        takes the total of steps as before; `reset_num_timesteps=False` the steps that are left.

    Raises:
        RunDirectoryError: the directory holds no run of an agent, no checkpoint, or a model that cannot be
            built from its configuration.
        WhenceError: the rule cannot be built from its text.

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
    if target is None and config.get("target") != target_name(Return()):
        raise RunDirectoryError(f"{run} was scored for the target {config.get('target')!r}. Pass it: target=...")
    if objective is None and config.get("objective") != "the model's":
        raise RunDirectoryError(
            f"{run} was scored by the objective {config.get('objective')!r}. Pass it: objective=..."
        )
    make_callback = partial(
        InfluenceCallback,
        build_rule(config["rule"]) if rule is None else rule,
        target=target,
        objective=objective,
        engine=config["engine"],
        last=config.get("last", "keep"),
    )
    model = build_model(stored, env, remedy=_REMEDY, changes=hyperparameters, device=device)
    experiment = {"experiment": stored.experiment} if stored.experiment else {}
    directory = RunDirectory.begin(run, {**describe(model), **make_callback().settings(), **experiment})
    assert directory.checkpoint is not None
    load_model(model, directory.checkpoint.content["model"])
    directory.release()  # until learn() takes it
    return model, make_callback(run=directory)
