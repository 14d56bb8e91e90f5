"""A stored run made again, finished or not: its environments, the model that collected a round, the round's records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import polars as pl
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.stacked_observations import StackedObservations
from torch import Tensor

from whence.core import (
    InvalidRecords,
    RecordBatch,
    ReplayError,
    Return,
    RunDirectoryError,
    WhenceError,
    preserve_rng_state,
)
from whence.rounds.recording import RoundRecording
from whence.runs import RunDirectory
from whence.sb3 import (
    SPACES,
    EpisodeReplay,
    Frames,
    LockstepEnvs,
    MakeEnv,
    Part,
    add_history,
    build_model,
    is_recurrent,
    load_tensors,
    make_parts,
    make_space,
    model_objective,
    named_tensors,
    play_again,
    read_episode,
    to_env_actions,
    wrap_as_trained,
)
from whence.scores import Influence, attribute, usable_folds
from whence.stored.agents.environments import make_env, measure_return, renew_world
from whence.stored.agents.run_config import RunConfig

AnyEnv: TypeAlias = str | Callable[[], gym.Env[Any, Any]] | None
"""An environment's id, module:Id, module:function, or a function that makes one in all of its wrappers; None: what the
run's configuration names."""


Evaluate: TypeAlias = Callable[[Mapping[str, Tensor], int], float]
"""`evaluate(params, repetition)` measures trained parameters, a mapping by name; the repetition seeds the test."""


def make_replay_env(run: RunDirectory, env: AnyEnv = None, *, index: int = 0) -> MakeEnv:
    """Return a function that makes an environment as a run was trained in, in all wrappers, to play and to draw.

    That is the environment of `index` among those that were trained in.

    Raises:
        ReplayError: the run's configuration names no environment, and `env` was not given.
        RunDirectoryError: `env` was not given, and the run is not trusted.
    """
    if env is not None and not isinstance(env, str):
        return env
    if run.is_language:
        raise ReplayError(f"{run.path} is a language-model run: it has no episodes of an environment.")
    # The experiment of a command names the module of the environment, too.
    named: Mapping[str, Any] = {"env": env} if env is not None else run.experiment or run.config
    name = named.get("env")
    parts = read_parts(run, index) if env is None and not run.experiment and ":" not in str(name) else None
    if not parts and name is None:
        raise ReplayError(
            f"{run.path} was trained in environments that cannot be made from what it holds. Write a function without "
            "arguments that makes one in all of its wrappers, and pass --env module:function (env= in a script)."
        )
    if env is None:
        run.check_trust()
    if parts:
        return partial(make_parts, parts, render_mode="rgb_array")
    kwargs, observe = named.get("env_kwargs", {}), named.get("observe")
    return partial(make_env, str(name), kwargs, observe, checked=False, render_mode="rgb_array")


def read_parts(run: RunDirectory, index: int) -> Sequence[Part]:
    """Return the parts of one of a run's environments, as `make_parts` takes them; none if they are not known."""
    parts: Sequence[Part] = run.config.get("other_env_wrappers", {}).get(str(index), run.config.get("env_wrappers", []))
    return parts


def show_taken_actions(run: RunDirectory, table: pl.DataFrame) -> pl.DataFrame:
    """Return a round's records with continuous actions as the environment took them: within its bounds."""
    space = run.config.get("action_space") or {}
    if space.get("type") != "Box" or "action" not in table.columns or table.is_empty():
        return table
    actions = np.array(table["action"].to_list(), dtype=np.float32)
    clipped = to_env_actions(actions, make_space(space), squashed=is_squashed(run))
    return table.with_columns(pl.Series("action", clipped.astype(np.float32).reshape(actions.shape)))


def is_squashed(run: RunDirectory) -> bool:
    """Return whether training scaled a run's actions to the bounds of its environment; else it clipped them.

    sb3-contrib's RecurrentPPO clips them while it collects, even those of a policy that squashes.
    """
    return run.config.get("algorithm") != "RecurrentPPO" and bool(
        run.config.get("policy_kwargs", {}).get("squash_output", False)
    )


def _count_frames(run: RunDirectory) -> int:
    """Return how many frames a run's policy sees at a time; 1 unless they were stacked by a VecFrameStack."""
    return next((each["n_stack"] for each in run.config.get("vec_wrappers", ()) if "n_stack" in each), 1)


def read_reward_scale(run: RunDirectory, number: int) -> float:
    """Return how many of the environment's rewards are one of those that a round trained on; 1 if they are the same.

    VecNormalize divides rewards by it, as of the end of the round's collection; what it clips is left aside.
    """
    metrics = run.table("metrics")
    if "reward_scale" not in metrics.columns:
        return 1.0
    scales = metrics.filter(pl.col("round") <= number)["reward_scale"].drop_nulls()
    return float(scales[-1]) if len(scales) else 1.0


def make_lockstep(run: RunDirectory, env: AnyEnv, count: int, number: int, *, index: int = 0) -> VecEnv:
    """Return environments to play side by side, `LockstepEnvs`, behind the wrappers that a round's policy was behind.

    Raises:
        ReplayError: an environment or a wrapper cannot be made again; the message names it.
    """
    return wrap_as_trained(run, LockstepEnvs(make_replay_env(run, env, index=index), count), number)


def _make_vec_env(run: RunDirectory, env: AnyEnv, count: int, number: int) -> VecEnv:
    """Return environments to test in, behind the wrappers that a round's policy was behind."""
    make = make_replay_env(run, env)
    try:
        return wrap_as_trained(run, DummyVecEnv([lambda: Monitor(renew_world(make()))] * count), number)
    except WhenceError:
        raise
    except Exception as failure:  # an environment's constructor may raise anything
        raise RunDirectoryError(
            f"The environment of {run.path} cannot be made: {type(failure).__name__}: {failure}"
        ) from failure


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
    model = load_model(run, number, env=env)
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
        return RecordBatch.from_polars(_observe_again(run, table, env, model.observation_space), **options)


def score_round(run: RunDirectory, number: int, *, env: AnyEnv = None) -> Influence:
    """Score a round's records for the return, as `load_round` returns them; with errors if they can be had."""
    target = Return()
    model, records = load_round(run, number, env=env)
    folds = usable_folds(target, records)
    return attribute(model.policy, records, target=target, objective=model_objective(model), folds=folds)


def _observe_again(run: RunDirectory, table: pl.DataFrame, env: AnyEnv, space: spaces.Space[Any]) -> pl.DataFrame:
    """Return a round's table with its observations, by playing its episodes again."""
    observed: dict[int, Any] = {}
    if run.config.get("VecNormalize", {}).get("norm_obs"):
        raise RunDirectoryError(
            f"The policy of {run.path} read observations that VecNormalize normalised by statistics that changed with "
            "each step, and that were too large to store."
        )
    for (episode,), rows in table.group_by("episode_id", maintain_order=True):
        stored = read_episode(run, int(episode))
        replay = play_again(
            make_replay_env(run, env, index=stored.env_index),
            stored,
            last_step=int(rows["step"].to_numpy().max()),
            squashed=is_squashed(run),
        )
        if replay.mismatch is not None:
            raise RunDirectoryError(f"Episode {episode} of {run.path} cannot be observed again. {replay.mismatch}")
        frames = _stack_frames(replay.observations, _count_frames(run))
        observed |= dict(zip(replay.record_ids.tolist(), frames, strict=False))
    images = np.stack([observed[record] for record in table["record_id"].to_list()])
    if is_image_space(space) and images.shape[1:] != space.shape:
        images = images.transpose(0, 3, 1, 2)  # as SB3 turns them
    return table.with_columns(pl.Series("observation", images.reshape(len(images), -1)))


def _stack_frames(frames: list[Any], count: int) -> list[NDArray[Any]]:
    """Return an episode's observations, each with those before it, as SB3's VecFrameStack shows them."""
    images = [np.asarray(frame) for frame in frames]
    if count == 1:
        return images
    is_image = images[0].dtype == np.uint8
    space = spaces.Box(0 if is_image else -np.inf, 255 if is_image else np.inf, images[0].shape, images[0].dtype.type)
    stacked = StackedObservations[Any](1, count, space)
    first = stacked.reset(images[0][None])[0].copy()
    ends = np.zeros(1, dtype=bool)
    return [first, *(stacked.update(image[None], ends, [{}])[0][0].copy() for image in images[1:])]


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
    return load_model(run, number, env=env), RoundRecording.load(path)


def load_model(run: RunDirectory, number: int, *, env: AnyEnv = None, changes: Mapping[str, Any] | None = None) -> Any:
    """Return the model that collected a round, with the round's policy; see `load_round`, and `build_model`.

    Raises:
        RunDirectoryError: there is no such policy, or it cannot be built again.
    """
    has_spaces = all(run.config.get(name) for name in SPACES)
    with nullcontext() if has_spaces else closing(_make_vec_env(run, env, 1, number)) as vec_env, preserve_rng_state():
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
    config = RunConfig.from_json(run.experiment) if env is None and run.experiment else None
    if on_pool := config is not None and config.evaluate_with == "envpool":
        run.check_trust()
    tests = None if on_pool else _make_vec_env(run, env, min(64, episodes), number)
    before = {name: tensor.clone() for name, tensor in named_tensors(model.policy).items()}

    def measure(params: Mapping[str, Tensor], repetition: int) -> float:
        load_tensors({name: named_tensors(model.policy)[name] for name in params}, params)
        test_seed = int(np.random.SeedSequence([seed, repetition]).generate_state(1)[0])
        return measure_return(config, model, tests, episodes=episodes, seed=test_seed)[0]

    try:
        yield measure
    finally:
        load_tensors(named_tensors(model.policy), before)
        if tests is not None:
            tests.close()


def replay_episode(
    run: RunDirectory | str | Path,
    episode: int,
    *,
    env: AnyEnv = None,
    frames: Frames = (),
    last_step: int | None = None,
) -> EpisodeReplay:
    """Play an episode of a run again, check it bit for bit against what was stored, and draw steps of it.

    The episode begins from its environment's stored generator state, and takes the stored actions. Episodes without
    such a state, as EnvPool's, cannot be played again. Global random generators are left as they are.

    Args:
        run: the run, or its directory.
        episode: the episode's id, as in the records.
        env: an id, module:Id, module:function, or a function that makes an environment like those that were trained in,
            in all of its wrappers; None: what the run's configuration names.
        frames: the steps to draw, or "all".
        last_step: the last step to play; None: all that are stored.

    Raises:
        ReplayError: the episode cannot be played again; the message says what is missing.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    stored = read_episode(run, episode)
    make_env = make_replay_env(run, env, index=stored.env_index)
    return play_again(make_env, stored, frames=frames, last_step=last_step, squashed=is_squashed(run))
