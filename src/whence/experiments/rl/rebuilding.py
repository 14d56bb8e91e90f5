"""The environments and the policy of a run, made again from its configuration."""

import importlib.util
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from whence.errors import ReplayError, RunDirectoryError, WhenceError, first_line
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.environments import make_env, make_evaluation_env, make_model_env, renew_world
from whence.guards import preserve_rng_state
from whence.runs import RunDirectory
from whence.sb3 import MakeEnv, read_settings
from whence.sb3.checkpoint import building as sb3_building

AnyEnv: TypeAlias = str | Callable[[], gym.Env[Any, Any]] | None
"""An environment's id, module:Id, or a function that makes one; None: what the run's configuration names."""

_FRAME_STACK = re.compile(r"VecFrameStack\(([1-9][0-9]{0,2})\)")

_REMEDY = "Build the model as the script does, and score its policy with RecordBatch.from_polars(...)."


def make_replay_env(run: RunDirectory, env: AnyEnv = None) -> MakeEnv:
    """Return a function that makes an environment like those that a run was trained in, to play and to draw.

    Raises:
        ReplayError: the run's configuration names no environment, and `env` was not given.
    """
    if env is not None and not isinstance(env, str):
        return env
    if run.is_language:
        raise ReplayError(f"{run.path} is a language-model run: it has no episodes of an environment.")
    if env is None and run.experiment:
        config = read_run_config(run)
        return lambda: make_env(config, render_mode="rgb_array", disable_env_checker=True)
    name, kwargs = (env, {}) if env is not None else (run.config.get("env"), read_settings(run, "env_kwargs"))
    if not isinstance(name, str):
        raise ReplayError(
            f"{run.path} was trained in an environment that Gymnasium has no id for. Pass env= (or --env): an id, "
            "module:Id, or a function that makes one like those that were trained in."
        )
    if env is None:
        check_env_module(run, name)
    options = {**kwargs, "render_mode": "rgb_array", "disable_env_checker": True}
    return partial(_make_gymnasium, name, options)


def read_run_config(run: RunDirectory) -> RunConfig:
    """Return the experiment of a run that whence's own commands made, whose environment may be made.

    Raises:
        RunDirectoryError: see `check_env_module`; or the configuration was changed.
    """
    try:
        config = RunConfig.from_json(run.experiment)
    except WhenceError as wrong:
        raise RunDirectoryError(
            f"{run.path / 'config.json'} does not hold the experiment of an agent's run: {wrong} Restore it, or train "
            "again into a new directory."
        ) from None
    check_env_module(run, config.env)
    return config


def _make_gymnasium(name: str, options: Mapping[str, Any]) -> gym.Env[Any, Any]:
    try:
        return gym.make(name, **options)
    except Exception as failure:  # an environment's constructor may raise anything
        raise ReplayError(
            f"The environment {name!r} cannot be made: {type(failure).__name__}: {first_line(failure)}"
        ) from failure


def check_env_module(run: RunDirectory, name: str) -> None:
    """Refuse to import what a run's configuration names as the module of its environment, but is none.

    Gymnasium imports the module of `module:Id`. An installed package is code that its user chose; a file that came
    with the run is not, and Python finds it there if the run lies below the working directory.

    Args:
        run: the run.
        name: the environment, as the configuration names it.

    Raises:
        RunDirectoryError: the module lies in the run directory or around it, is one of Python's own, or has a name
            that no module has.
    """
    module, colon, _ = name.partition(":")
    top = module.partition(".")[0]
    if not colon or module in sys.modules:
        return
    if not all(part.isidentifier() for part in module.split(".")) or top in sys.stdlib_module_names:
        reason = "which holds no environment"
    elif (spec := importlib.util.find_spec(top)) is None:
        return  # Gymnasium says that it is not there
    else:
        path = run.path.resolve()
        places = [Path(place).resolve() for place in (*(spec.submodule_search_locations or ()), spec.origin or path)]
        if not any(place.is_relative_to(path) or path.is_relative_to(place) for place in places):
            return
        reason = "which lies in the run's directory, or around it"
    raise RunDirectoryError(
        f"{run.path / 'config.json'} names an environment of the module {module!r}, {reason}. whence imports no code "
        "that came with a run. If you know this module, name the environment yourself: env= or --env."
    )


def list_wrappers(run: RunDirectory) -> list[str]:
    """Return the names of the wrappers around a run's environments, the outermost first.

    Raises:
        RunDirectoryError: they are no list of names.
    """
    names = run.config.get("vec_wrappers") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunDirectoryError(
            f"vec_wrappers is {reprlib.repr(names)} in {run.path / 'config.json'}; a list of names is needed. Restore "
            "the file."
        )
    return names


def reads_raw_observations(run: RunDirectory) -> bool:
    """Return whether a run's stored observations are those of its environment."""
    return not any(name.startswith(("VecNormalize", "VecFrameStack")) for name in list_wrappers(run))


def is_squashed(run: RunDirectory) -> bool:
    """Return whether a run's policy squashes its actions."""
    return bool(read_settings(run, "policy_kwargs").get("squash_output", False))


def build_model(run: RunDirectory, env: AnyEnv = None) -> Any:
    """Return an untrained model like the one that a run trained, on the CPU and to score with.

    Raises:
        RunDirectoryError: the configuration names an algorithm, a policy or a class that is not known here.
    """
    vec_env = make_vec_env(run, env)
    try:
        with preserve_rng_state():
            # Without its schedules: no score depends on them, since at the collecting policy no ratio is clipped.
            return sb3_building.build_model(run, vec_env, remedy=_REMEDY, device="cpu")
    finally:
        vec_env.close()


def make_vec_env(run: RunDirectory, env: AnyEnv = None, *, count: int = 1) -> VecEnv:
    """Return environments like those that a run was trained in, with frames stacked as its policy sees them.

    Args:
        run: the run.
        env: see `make_replay_env`.
        count: how many.

    Raises:
        RunDirectoryError: they cannot be made.
    """
    if env is None and run.experiment:
        config = read_run_config(run)
        return make_model_env(config) if count == 1 else make_evaluation_env(config, count)
    try:
        make = make_replay_env(run, env)
        vec_env: VecEnv = DummyVecEnv([lambda: Monitor(renew_world(make()))] * count)
    except (ReplayError, gym.error.Error) as failure:
        raise RunDirectoryError(f"The environment of {run.path} cannot be made: {failure}") from failure
    frames = count_frames(run)
    return VecFrameStack(vec_env, frames) if frames > 1 else vec_env


def count_frames(run: RunDirectory) -> int:
    """Return how many frames a run's policy sees at a time; 1 unless they were stacked by a VecFrameStack."""
    matches = [_FRAME_STACK.fullmatch(name) for name in list_wrappers(run)]
    return next((int(match[1]) for match in matches if match), 1)
