"""Rounds of a stored run, finished or not: the agent that collected each, its records, its recording."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from whence.core import InvalidRecords, RecordBatch, Return, RunDirectoryError, preserve_rng_state
from whence.rounds import RoundRecording
from whence.runs import RunDirectory
from whence.sb3 import model_objective
from whence.sb3.episodes import Pool
from whence.sb3.models import SPACES, add_history, build_model, is_recurrent, load_tensors, named_tensors
from whence.scores import Influence, attribute, usable_folds
from whence.stored.agents.environments import measure_return
from whence.stored.agents.replaying import AnyEnv, make_test_envs, observe_again

Evaluate: TypeAlias = Callable[[Mapping[str, Tensor], int], float]
"""`evaluate(params, repetition)` measures trained parameters, a mapping by name; the repetition seeds the test."""


def read_reward_scale(run: RunDirectory, number: int) -> float:
    """Return how many of the environment's rewards are one of those that a round trained on; 1 if they are the same.

    VecNormalize divides rewards by it, as of the end of the round's collection; what it clips is left aside.
    """
    metrics = run.table("metrics")
    if "reward_scale" not in metrics.columns:
        return 1.0
    scales = metrics.filter(pl.col("round") <= number)["reward_scale"].drop_nulls()
    return float(scales[-1]) if len(scales) else 1.0


def load_round(run: RunDirectory, number: int, *, env: AnyEnv = None) -> tuple[Any, RecordBatch]:
    """Return the model that collected a round, and the round's records.

    The model is on the CPU and has the optimiser of an untrained one: it is for scoring, not for training on.
    Observations that were too large to store are observed again: every episode of the round is played again and
    checked.

    Args:
        run: the run of an agent.
        number: the round's number, from 1.
        env: the environment, if the run's own id does not name it: an id, module:Id, or a function that makes one.

    Raises:
        RunDirectoryError: the round is not there, or its policy cannot be built again from the run's configuration.
        ReplayError: observations are not stored, and cannot be observed again.
    """
    run.round("records", number)  # which says if it is not there, before anything is built
    model = load_agent(run, number, env=env)
    return model, read_records(run, number, model, env=env)


def read_records(
    run: RunDirectory, number: int, model: Any, *, env: AnyEnv = None, ids: Sequence[int] | None = None
) -> RecordBatch:
    """Return the records of a round, or some of them, observed again if their observations were too large to store.

    The model is the run's; which round's policy it holds does not matter. Records of a recurrent policy come with their
    history.

    Raises:
        ReplayError: observations are not stored, and cannot be observed again.
    """
    table = run.round("records", number)
    if is_recurrent(model.policy):
        records = add_history(_read_table(run, table, model, env), run.policy(number, name="states"))
        return records if ids is None else records.take(torch.isin(records.ids, torch.tensor(ids)))
    return _read_table(run, table if ids is None else table.filter(pl.col("record_id").is_in(ids)), model, env)


def _read_table(run: RunDirectory, table: pl.DataFrame, model: Any, env: AnyEnv) -> RecordBatch:
    options: dict[str, Any] = {"space": model.observation_space, "gamma": model.gamma, "gae_lambda": model.gae_lambda}
    try:
        return RecordBatch.from_polars(table, **options)
    except InvalidRecords:
        if any(name.split(".")[0] == "observation" for name in table.columns):
            raise
        return RecordBatch.from_polars(observe_again(run, table, env, model.observation_space), **options)


def score_round(run: RunDirectory, number: int, *, env: AnyEnv = None) -> Influence:
    """Score a round's records for the return, as `load_round` returns them; with errors if they can be had."""
    target = Return()
    model, records = load_round(run, number, env=env)
    folds = usable_folds(target, records)
    return attribute(model.policy, records, target=target, objective=model_objective(model), folds=folds)


def load_recording(run: RunDirectory, number: int, *, env: AnyEnv = None) -> tuple[Any, RoundRecording]:
    """Return the model that collected a round, as `load_round` does, and the recording of the round.

    Raises:
        RunDirectoryError: the round was not recorded; or see `load_round`.
    """
    path = run.round_path("recordings", number)
    if not path.exists():
        recorded = ", ".join(map(str, run.rounds("recordings"))) or "none"
        raise RunDirectoryError(
            f"Round {number} of {run.path} was not recorded. Recorded rounds: {recorded}. Train a run with "
            f"--record-rounds {number}, or InfluenceCallback(recordings=[{number}])."
        )
    return load_agent(run, number, env=env), RoundRecording.load(path)


def load_agent(run: RunDirectory, number: int, *, env: AnyEnv = None, changes: Mapping[str, Any] | None = None) -> Any:
    """Return the model that collected a round, with the round's policy; see `load_round`, and `build_model`.

    Raises:
        RunDirectoryError: there is no such policy, or it cannot be built again.
    """
    has_spaces = all(run.config.get(name) for name in SPACES)
    with nullcontext() if has_spaces else closing(make_test_envs(run, env, 1, number)) as vec_env, preserve_rng_state():
        model = build_model(run, vec_env, changes=changes)
    load_policy(run, number, model)
    return model


def load_policy(run: RunDirectory, number: int, model: Any) -> None:
    """Load the policy that collected a round into the run's model; the one after the last round is the trained one.

    Raises:
        RunDirectoryError: there is no such policy, it is not finite, or the model has other tensors.
    """
    stored_tensors, tensors = run.policy(number), named_tensors(model.policy)
    shapes, stored_shapes = ({(name, each.shape) for name, each in of.items()} for of in (tensors, stored_tensors))
    if differing := sorted({name for name, _ in shapes ^ stored_shapes}):
        raise RunDirectoryError(
            f"The policy of round {number} in {run.path} does not fit the one its configuration builds: "
            f"{', '.join(differing[:3])}. Has the policy's code changed since?"
        )
    if diverged := [name for name, each in stored_tensors.items() if not bool(torch.isfinite(each).all())]:
        raise RunDirectoryError(
            f"The policy of round {number} in {run.path} is not finite in {diverged[0]}: training diverged before that "
            "round, or the file was changed. Take an earlier round."
        )
    load_tensors(tensors, stored_tensors)


@contextmanager
def measure_returns(
    run: RunDirectory, model: Any, number: int, *, episodes: int, seed: int, env: AnyEnv = None
) -> Iterator[Evaluate]:
    """Yield a function that measures parameters' test return as a run's evaluations do, with a seed a repetition.

    Returns are in the environment's rewards. The model's parameters are restored on exit.

    Args:
        run: the run.
        model: from `load_round`.
        number: the round, by whose statistics VecNormalize normalises observations.
        episodes: episodes of each test.
        seed: at least 0; with the repetition, it seeds environments and actions.
        env: see `load_round`.

    Raises:
        ReplayError: an environment or a wrapper cannot be made again; the message names it.
        RunDirectoryError: the environments cannot be made.
    """
    tests: VecEnv | Pool
    named = run.experiment if env is None else {}
    if named.get("evaluate_with") == "envpool":
        run.check_trust()
        tests = Pool(str(named.get("env")), named.get("pool_kwargs", {}), named.get("observe"))
    else:
        tests = make_test_envs(run, env, min(64, episodes), number)
    before = {name: tensor.clone() for name, tensor in named_tensors(model.policy).items()}

    def measure(params: Mapping[str, Tensor], repetition: int) -> float:
        load_tensors({name: named_tensors(model.policy)[name] for name in params}, params)
        test_seed = int(np.random.SeedSequence([seed, repetition]).generate_state(1)[0])
        return measure_return(model, tests, episodes=episodes, seed=test_seed)[0]

    try:
        yield measure
    finally:
        load_tensors(named_tensors(model.policy), before)
        if isinstance(tests, VecEnv):
            tests.close()
