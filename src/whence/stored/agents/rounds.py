"""Rounds of a stored run, finished or not: the agent that collected each, its records, what it changed, its recording.

Rounds are also made ready to be trained on again, whether they were recorded or not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import torch
from stable_baselines3.common.distributions import BernoulliDistribution, Distribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor
from torch.distributions import Categorical, Normal, kl_divergence

from whence.core import (
    InvalidRecords,
    RecordBatch,
    Return,
    RunDirectoryError,
    eval_mode,
    named_tensors,
    preserve_rng_state,
    to_numpy,
)
from whence.rounds import RoundRecording
from whence.runs import RunDirectory
from whence.sb3.episodes import Pool
from whence.sb3.models import (
    SPACES,
    add_history,
    build_model,
    copy_tensors,
    is_recurrent,
    is_schedule,
    load_tensors,
)
from whence.sb3.policy import actor_critic_view, predict
from whence.sb3.rounds import read_optimizer, read_update
from whence.scores import Influence, attribute, usable_folds
from whence.stored.agents.custom_agents import build_agent, is_custom, read_objective, refuse_custom, shape_actions
from whence.stored.agents.environments import measure_return
from whence.stored.agents.replaying import AnyEnv, make_test_envs, observe_again

_SCHEDULED = ("learning_rate", "clip_range", "clip_range_vf")

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
    """
    table = run.round("records", number)
    if is_recurrent(model.policy):
        records = add_history(_read_table(run, table, model, env), run.policy(number, name="states"))
        return records if ids is None else records.take(torch.isin(records.ids, torch.tensor(ids)))
    return _read_table(run, table if ids is None else table.filter(pl.col("record_id").is_in(ids)), model, env)


def _read_table(run: RunDirectory, table: pl.DataFrame, model: Any, env: AnyEnv) -> RecordBatch:
    options: dict[str, Any] = {"space": model.observation_space, "gamma": model.gamma, "gae_lambda": model.gae_lambda}
    try:
        return shape_actions(model, RecordBatch.from_polars(table, **options))
    except InvalidRecords:
        if is_custom(run) or any(name.split(".")[0] == "observation" for name in table.columns):
            raise
        return RecordBatch.from_polars(observe_again(run, table, env, model.observation_space), **options)


def score_round(run: RunDirectory, number: int, *, env: AnyEnv = None) -> Influence:
    """Score a round's records for the return, as `load_round` returns them; with errors if they can be had."""
    target = Return()
    model, records = load_round(run, number, env=env)
    folds = usable_folds(target, records)
    return attribute(model.policy, records, target=target, objective=read_objective(model), folds=folds)


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
    """Return the model that collected a round, with the round's policy; see `load_round`, and `build_model`."""
    if is_custom(run):
        agent = build_agent(run)
        load_policy(run, number, agent)
        return agent
    has_spaces = all(run.config.get(name) for name in SPACES)
    with nullcontext() if has_spaces else closing(make_test_envs(run, env, 1, number)) as vec_env, preserve_rng_state():
        model = build_model(run, vec_env, changes=changes)
    load_policy(run, number, model)
    return model


def load_policy(run: RunDirectory, number: int, model: Any) -> None:
    """Load the policy that collected a round, after the last one the trained one; or raise a `RunDirectoryError`."""
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
        named = run.trusted(named)
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


def compare_policies(run: RunDirectory | str | Path, number: int, *, env: AnyEnv = None) -> pl.DataFrame:
    """Return how a round changed what the policy does in each of the round's states, the largest change first.

    Args:
        run: a run whose policy can be built again.
        number: the round, from 1.
        env: the environment of runs whose configuration does not name it; see `load_round`.

    Returns:
        A row for each record: `record_id`; `divergence`, KL(before‖after) of the distributions of actions in nats;
        `value_before` and `value_after`; of discrete actions the probabilities `before` and `after`, (actions,); of a
        box `mean_before`, `std_before`, `mean_after`, `std_after`, (axes,), of the Gaussian before any squashing or
        clipping.

    Raises:
        RunDirectoryError: the round, its policy or the policy after it is not there, or cannot be built again.
        Unsupported: the policy is no actor-critic one.
    """
    directory = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    refuse_custom(directory, "compare distributions of actions", "Its view gives log-probabilities alone.")
    model, records = load_round(directory, number, env=env)
    policy = model.policy
    inputs = actor_critic_view(policy).prepare(records)
    with torch.no_grad(), eval_mode(policy.modules()):
        past, value_before = predict(policy, inputs)
        load_policy(directory, number + 1, model)
        present, value_after = predict(policy, inputs)
        divergence = _divergence(past, present)
    columns = {
        "divergence": divergence.double(),
        **_describe(past, "before"),
        **_describe(present, "after"),
        "value_before": value_before,
        "value_after": value_after,
    }
    table = pl.DataFrame({"record_id": records.ids.numpy(), **{name: to_numpy(each) for name, each in columns.items()}})
    return table.sort("divergence", "record_id", descending=[True, False])


def _divergence(before: Distribution, after: Distribution) -> Tensor:
    """Return KL(before‖after) for each record, (n,).

    Squashing is the same bijection on both sides, so that the Gaussians before it have the same divergence.
    """
    by_part = [kl_divergence(old, new) for old, new in zip(_parts(before), _parts(after), strict=True)]
    return sum((divergence.reshape(len(divergence), -1).sum(dim=1) for divergence in by_part), start=torch.zeros(()))


def _parts(distribution: Distribution) -> list[Any]:
    """Return torch's distributions inside one of SB3's or sb3-contrib's: several of MultiDiscrete actions."""
    inner: Any = getattr(distribution, "distributions", None) or distribution.distribution
    return list(inner) if isinstance(inner, list | tuple) else [inner]


def _describe(distribution: Distribution, when: str) -> dict[str, Tensor]:
    """Return the columns of discrete actions' probabilities or of a Gaussian's mean and standard deviation."""
    parts = _parts(distribution)
    if len(parts) > 1 or isinstance(distribution, BernoulliDistribution):
        return {}
    if isinstance(parts[0], Categorical):
        return {when: parts[0].probs}
    if isinstance(parts[0], Normal):
        return {f"mean_{when}": parts[0].mean, f"std_{when}": parts[0].stddev}
    return {}


def require_training(run: RunDirectory) -> None:
    """Refuse a run whose rounds whence cannot train again, since their training is a loop of the user's."""
    refuse_custom(run, "train its rounds again", "`whence why` tells what taught a decision, without the proof.")


def load_trainable_rounds(
    run: RunDirectory, numbers: Sequence[int], *, env: AnyEnv = None
) -> tuple[Any, list[RoundRecording], list[int]]:
    """Return the model before consecutive rounds, the rounds, and the numbers of those that were recorded.

    Of a round that was not recorded, records, learning rate and clip range are the stored ones; its minibatches are
    unknown, so it has none. If that is the first one, its optimiser begins anew, as in round 1.
    """
    require_training(run)
    run.require_rounds(numbers)
    if missing := sorted(set(range(numbers[0], numbers[-1] + 1)) - set(numbers)):
        raise RunDirectoryError(
            f"Round {missing[0]} is missing between rounds {numbers[0]} and {numbers[-1]}, and each round is trained "
            f"from where the one before it ended. Take a stretch of rounds: --rounds {numbers[0]}-{numbers[-1]}."
        )
    metrics = {row["round"]: row for row in run.table("metrics").to_dicts()}
    model = load_agent(run, numbers[0], env=env, changes=_read_schedules(run, metrics.get(numbers[0], {})))
    if is_recurrent(model.policy):
        raise RunDirectoryError(
            f"{run.path} trained a recurrent policy, and whence cannot train its rounds again without some records: "
            "minibatches are stretches of sequences. `whence why` tells what taught a decision, without the proof."
        )
    recorded = [number for number in numbers if run.round_path("recordings", number).exists()]
    rounds = [
        RoundRecording.load(run.round_path("recordings", number))
        if number in recorded
        else _compose_round(run, number, model, metrics.get(number, {}), env)
        for number in numbers
    ]
    return model, rounds, recorded


def _read_schedules(run: RunDirectory, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return what a run's schedules gave in a round, by the hyper-parameters that were schedules."""
    settings = run.config.get("hyperparameters", {})
    names = [name for name in _SCHEDULED if is_schedule(settings.get(name))]
    if missing := [name for name in names if metrics.get(f"train/{name}") is None]:
        raise RunDirectoryError(
            f"{run.path} was trained with a schedule of {missing[0]}, and its metrics do not hold the numbers. Record "
            "the rounds: --record-rounds 1-40, or InfluenceCallback(recordings=range(1, 41))."
        )
    return {name: metrics[f"train/{name}"] for name in names}


def _compose_round(
    run: RunDirectory, number: int, model: Any, metrics: Mapping[str, Any], env: AnyEnv
) -> RoundRecording:
    """Return a round that was not recorded, without minibatches; `model` has the policy before the first round."""
    model.set_logger(logger := Logger(None, []))
    for name, setting in (("clip_range", model.clip_range(1.0)), ("clip_range_vf", model.clip_range_vf)):
        stored = metrics.get(f"train/{name}")
        logger.record(f"train/{name}", (setting(1.0) if callable(setting) else setting) if stored is None else stored)
    optimizer = read_optimizer(model.policy)
    rate = metrics.get("train/learning_rate")
    if rate is not None:
        optimizer = replace(optimizer, settings={**optimizer.settings, "lr": rate})
    return RoundRecording(
        number=number,
        records=read_records(run, number, model, env=env),
        start=copy_tensors(named_tensors(model.policy)),
        end={},
        optimizer=optimizer,
        minibatches=(),
        epochs=(),
        stopped=False,
        update=read_update(model),
        generator=torch.get_rng_state(),
        versions={},
    )


def draw_minibatches(recording: RoundRecording, trained: Sequence[int], seed: int) -> RoundRecording:
    """Return a round with minibatches drawn by a seed from the records that trained."""
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence([seed, recording.number]).generate_state(1)[0])
    )
    size = recording.update.batch_size or len(trained)
    places = torch.isin(recording.records.ids, torch.tensor(trained)).nonzero()[:, 0]
    steps = [
        (epoch, minibatch)
        for epoch in range(recording.update.n_epochs)
        for minibatch in places[torch.randperm(len(places), generator=generator)].split(size)
    ]
    return _set_steps(replace(recording, stopped=False, generator=generator.get_state()), steps)


def leave_out(recording: RoundRecording, ids: Sequence[int]) -> RoundRecording:
    """Return a round whose minibatches lack some records; a minibatch that is left with none is no step."""
    stays = ~torch.isin(recording.records.ids, torch.tensor(ids))
    pairs = zip(recording.epochs, recording.minibatches, strict=True)
    steps = [(epoch, minibatch[stays[minibatch]]) for epoch, minibatch in pairs]
    return _set_steps(recording, [step for step in steps if len(step[1])])


def _set_steps(recording: RoundRecording, steps: Sequence[tuple[int, Tensor]]) -> RoundRecording:
    return replace(recording, minibatches=[each for _, each in steps], epochs=[epoch for epoch, _ in steps])
