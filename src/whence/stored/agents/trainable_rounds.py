"""The rounds of a stored run as recordings to train on again, whether they were recorded or not."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.logger import Logger

from whence.core import RunDirectoryError
from whence.rounds import RoundRecording
from whence.runs import RunDirectory
from whence.sb3.models import copy_tensors, is_recurrent, is_schedule, named_tensors
from whence.sb3.rounds import read_optimizer, read_update
from whence.stored.agents.replaying import AnyEnv
from whence.stored.agents.rounds import load_agent, read_records

_SCHEDULED = ("learning_rate", "clip_range", "clip_range_vf")


def load_trainable_rounds(
    run: RunDirectory, numbers: Sequence[int], *, env: AnyEnv = None
) -> tuple[Any, list[RoundRecording], list[int]]:
    """Return the model before consecutive rounds, the rounds, and the numbers of those that were recorded.

    Of a round that was not recorded, records, learning rate and clip range are the stored ones; its minibatches are
    unknown, so it has none. If that is the first one, its optimiser begins anew, as in round 1.

    Raises:
        RunDirectoryError: a round is not there, rounds between them are missing, or the policy cannot be built again.
    """
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
    epochs = [
        places[torch.randperm(len(places), generator=generator)].split(size) for _ in range(recording.update.n_epochs)
    ]
    return replace(
        recording,
        minibatches=[minibatch for epoch in epochs for minibatch in epoch],
        epochs=[number for number, epoch in enumerate(epochs) for _ in epoch],
        stopped=False,
        generator=generator.get_state(),
    )


def leave_out(recording: RoundRecording, ids: Sequence[int]) -> RoundRecording:
    """Return a round whose minibatches lack some records; a minibatch that is left with none is no step."""
    stays = ~torch.isin(recording.records.ids, torch.tensor(ids))
    minibatches = [minibatch[stays[minibatch]] for minibatch in recording.minibatches]
    pairs = [
        (minibatch, epoch) for minibatch, epoch in zip(minibatches, recording.epochs, strict=True) if len(minibatch)
    ]
    return replace(recording, minibatches=[pair[0] for pair in pairs], epochs=[pair[1] for pair in pairs])
