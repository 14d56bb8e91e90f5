"""Rounds of a stored run, finished or not: the model that collected a round, its records, its recording."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from gymnasium import spaces
from stable_baselines3 import PPO
from torch import Tensor

from whence.counterfactual.outcomes import Evaluate
from whence.errors import RunDirectoryError
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.environments import make_evaluation_env, make_model_env, measure_return
from whence.experiments.rl.training import make_model
from whence.guards import preserve_rng_state
from whence.records import UNKNOWN, RecordBatch, Tree
from whence.rounds import RoundRecording
from whence.runs import RunDirectory
from whence.sb3.state import load_tensors, named_tensors


def load_round(run: RunDirectory, number: int) -> tuple[PPO, RecordBatch]:
    """Return the model that collected a round, and the round's records.

    The model is on the CPU and has the optimiser of an untrained one: it is for scoring, not for training on.

    Args:
        run: a run of `whence train` or `whence compare`.
        number: the round's number, from 1.

    Raises:
        RunDirectoryError: the round is not there, its observations were not stored, or the run was not made by whence's
            own commands, so that its policy cannot be built again from its configuration.
    """
    table = run.round("records", number)
    model = _load_model(run, number)
    return model, _read_records(table, model, run, number)


def load_recording(run: RunDirectory, number: int) -> tuple[PPO, RoundRecording]:
    """Return the model that collected a round, as `load_round` does, and the recording of the round.

    Raises:
        RunDirectoryError: the round was not recorded; or see `load_round`.
    """
    path = run.recording_path(number)
    if not path.exists():
        numbers = run.recorded_rounds()
        recorded = f"rounds {', '.join(map(str, numbers))}" if numbers else "no round"
        raise RunDirectoryError(
            f"Round {number} of {run.path} was not recorded; {recorded} of it was. Train with --record-rounds {number}."
        )
    return _load_model(run, number), RoundRecording.load(path)


def _load_model(run: RunDirectory, number: int) -> PPO:
    config = read_run_config(run)
    env = make_model_env(config)
    try:
        with preserve_rng_state():  # PPO seeds the generators
            model = make_model(replace(config, device="cpu", n_envs=1), env)
    finally:
        env.close()
    stored_tensors, tensors = run.policy(number), named_tensors(model.policy)
    if differing := sorted(tensors.keys() ^ stored_tensors.keys()):
        raise RunDirectoryError(
            f"The policy of round {number} in {run.path} does not fit the one its configuration builds: "
            f"{', '.join(differing[:3])}. Has the policy's code changed since?"
        )
    load_tensors(tensors, stored_tensors)
    return model


def read_run_config(run: RunDirectory) -> RunConfig:
    """Return the configuration of a run that whence's own commands made.

    Raises:
        RunDirectoryError: the run was made in a script.
    """
    try:
        return RunConfig.from_json(run.config)
    except TypeError:
        raise RunDirectoryError(
            f"{run.path} was written by an InfluenceCallback in a script, and its configuration does not say how to "
            "build the policy. Build the model as the script does, load RunDirectory.open(...).policy(round) into it, "
            "and pass both to whence.attribute."
        ) from None


@contextmanager
def measure_returns(config: RunConfig, model: PPO, *, episodes: int, seed: int) -> Iterator[Evaluate]:
    """Yield a function that measures parameters' test return as the run's evaluations do, with a seed a repetition.

    The model's parameters are restored on exit.

    Args:
        config: the run.
        model: from `load_round`.
        episodes: episodes of each test.
        seed: at least 0; with the repetition, it seeds environments and actions.
    """
    before = {name: tensor.clone() for name, tensor in named_tensors(model.policy).items()}
    env = make_evaluation_env(config, episodes) if config.evaluate_with == "gymnasium" else None

    def measure(params: Mapping[str, Tensor], repetition: int) -> float:
        load_tensors({name: named_tensors(model.policy)[name] for name in params}, params)
        test_seed = int(np.random.SeedSequence([seed, repetition]).generate_state(1)[0])
        return measure_return(config, model, env, episodes=episodes, seed=test_seed)[0]

    try:
        yield measure
    finally:
        load_tensors(named_tensors(model.policy), before)
        if env is not None:
            env.close()


def _read_records(table: pl.DataFrame, model: PPO, run: RunDirectory, number: int) -> RecordBatch:
    def column(name: str) -> Any:
        return table[name].to_numpy() if name in table.columns else None

    def integers(name: str) -> Any:
        return table[name].fill_null(UNKNOWN).to_numpy() if name in table.columns else None

    return RecordBatch(
        observations=_read_observations(table, model.observation_space, run, number),
        actions=column("action"),
        log_probs=column("log_prob"),
        advantages=column("advantage"),
        values=column("value"),
        returns=column("return"),
        rewards=column("reward"),
        episode_starts=column("episode_start"),
        record_ids=column("record_id"),
        env_index=integers("env_index"),
        episode_ids=integers("episode_id"),
        steps=integers("step"),
        gamma=model.gamma,
        gae_lambda=model.gae_lambda,
    )


def _read_observations(
    table: pl.DataFrame, space: spaces.Space[Any], run: RunDirectory, number: int, name: str = "observation"
) -> Tree:
    if isinstance(space, spaces.Dict):
        return {key: _read_observations(table, part, run, number, f"{name}.{key}") for key, part in space.items()}
    if name not in table.columns:
        raise RunDirectoryError(
            f"Round {number} of {run.path} holds no observations: those of more than 4 KiB a record are not "
            "stored. Score in the run itself (--target), or collect anew with whence.sb3.collect."
        )
    array = np.asarray(table[name].to_numpy())
    if isinstance(space, spaces.Discrete) and name == "observation":
        return array
    return array.reshape(len(array), *(space.shape or (1,)))
