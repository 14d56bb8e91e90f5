"""Replaying recorded rounds with SB3's own `train()`."""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from stable_baselines3 import A2C
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import FloatSchedule
from torch import Tensor

from whence.core import Tree, WhenceError, as_view, eval_mode, library_versions, named_tensors, preserve_rng_state
from whence.rounds import RoundRecording, check_collected, check_policy
from whence.sb3.models.building import copy_tensors, load_tensors, preserve_model
from whence.sb3.rounds.recorder import training_libraries

log = logging.getLogger("whence")


def replay_round(model: Any, recording: RoundRecording) -> dict[str, Tensor]:
    """Let SB3's own `train()` do a recorded round again, and return parameters and buffers after it.

    On the CPU, with the recorded versions of the libraries, the result equals the recorded one bit for bit. With other
    versions it equals it up to rounding, and the logger "whence" of Python's logging warns. The model is restored
    afterwards: policy, optimiser, gradients, schedules, logger, buffer and counters, and every random generator.

    Args:
        model: the PPO, A2C or MaskablePPO that was trained, or one built like it.
        recording: a recording made by `InfluenceCallback(recordings=...)`.

    Raises:
        WhenceError: the recording is of another policy, optimiser or algorithm.
    """
    _check_fits(model, recording)
    _warn_about_versions(model, recording)
    return replay_rounds(model, [recording])


def replay_rounds(model: Any, recordings: Iterable[RoundRecording]) -> dict[str, Tensor]:
    """Let SB3's own `train()` do rounds in a row, and return parameters and buffers after the last.

    The first one begins from its recorded policy and optimiser; each other goes on from where the round before it
    ended, with its own records, minibatches, learning rate and clip range. The model is restored as by `replay_round`.

    Raises:
        WhenceError: the first round is not of the model's policy.
    """
    with preserve_model(model), preserve_rng_state():
        for place, recording in enumerate(recordings):
            if place == 0:
                _load_start(model, recording)
                view = as_view(model.policy)
                check_collected(view, view.parameters(), recording.records, recording.number)
            _load_recording(model, recording)
            if place > 0:
                _begin_on_policy(model, recording)
            torch.set_rng_state(recording.generator)
            model.train()
        return copy_tensors(named_tensors(model.policy))


def _warn_about_versions(model: Any, recording: RoundRecording) -> None:
    installed, recorded = library_versions(training_libraries(model)), recording.versions
    if differing := [package for package in installed if recorded.get(package) != installed[package]]:
        log.warning(
            "The recording of round %d was made with %s; here is %s. So its replay may differ from the recording by "
            "rounding, which training amplifies. Install the recorded versions for a replay that is equal bit for bit.",
            recording.number,
            " and ".join(f"{package} {recorded.get(package, 'of unknown version')}" for package in differing),
            " and ".join(f"{package} {installed[package]}" for package in differing),
        )


def _check_fits(model: Any, recording: RoundRecording) -> None:
    """Refuse a recording of another algorithm, optimiser or policy than the model's."""
    algorithm, optimizer = "a2c" if isinstance(model, A2C) else "ppo", type(model.policy.optimizer).__name__
    for what, present, recorded in (
        ("algorithm", algorithm, recording.update.algorithm),
        ("optimiser", optimizer, recording.optimizer.name),
    ):
        if present != recorded:
            raise WhenceError(
                f"The recording is of another policy: its {what} is {recorded}, the model's {present}. Build the model "
                "with the settings of the run that was recorded."
            )
    check_policy(as_view(model.policy), recording.start, recording)


def _begin_on_policy(model: Any, recording: RoundRecording) -> None:
    """Let the ratios of a round begin at 1, where its policy is not the one that collected the rollout.

    With recorded log-probs each round would pull the policy back to the recorded one: clipping ends the gradient of a
    record that moves away from it, and not of one that moves towards it.
    """
    view, records = as_view(model.policy), recording.records
    with torch.no_grad(), eval_mode(model.policy.modules()):
        parts = [records.take(slice(first, first + 2048)) for first in range(0, len(records), 2048)]
        params = view.parameters()
        log_probs = [view.only({"log_prob"}, params, view.prepare(part)).log_prob for part in parts]
    present = torch.cat(log_probs).reshape(-1, 1).cpu().numpy()
    if abs(present - model.rollout_buffer.log_probs).mean() > ROUNDING:
        model.rollout_buffer.log_probs = present


ROUNDING = 1e-5
"""The mean difference of log-probs up to which two policies are taken to be one."""


def _load_start(model: Any, recording: RoundRecording) -> None:
    """Put policy and optimiser into the state in which the recorded `train()` began."""
    load_tensors(named_tensors(model.policy), recording.start)
    optimizer = model.policy.optimizer
    (group,) = optimizer.param_groups
    group.update({key: tuple(v) if isinstance(v, list) else v for key, v in recording.optimizer.settings.items()})
    optimizer.state.clear()
    for name, parameter in model.policy.named_parameters():
        if name in recording.optimizer.state:
            state = recording.optimizer.state[name].items()
            # Tensors loaded from a file are on the CPU, where optimisers leave their counts of steps.
            optimizer.state[parameter] = {k: t.to(t if k == "step" else parameter, copy=True) for k, t in state}


def _load_recording(model: Any, recording: RoundRecording) -> None:
    """Give a model the settings of a recorded `train()`, its rollout, and the recorded minibatches to come."""
    update = recording.update
    model.lr_schedule = FloatSchedule(recording.optimizer.settings["lr"])
    if update.algorithm == "ppo":
        model.clip_range = FloatSchedule(update.clip_range)
        model.clip_range_vf = None if update.clip_range_vf is None else FloatSchedule(update.clip_range_vf)
        model.target_kl, model.n_epochs = update.target_kl, update.n_epochs
    model.normalize_advantage, model.max_grad_norm = update.normalize_advantage, update.max_grad_norm
    model.ent_coef, model.vf_coef = update.ent_coef, update.vf_coef
    model._logger = Logger(None, [])
    model.rollout_buffer = _make_buffer(model.rollout_buffer, recording)


def _make_buffer(like: Any, recording: RoundRecording) -> Any:
    """Return a buffer that holds the recorded rollout and yields the recorded minibatches."""
    buffer, records, n = copy.copy(like), recording.records, len(recording.records)
    buffer.generator_ready, buffer.full = True, True
    shape = like.obs_shape

    def to_array(tree: Tree, shape: Any) -> Any:
        if isinstance(tree, Mapping):
            return {key: to_array(branch, shape[key]) for key, branch in tree.items()}
        return tree.cpu().numpy().reshape(n, *shape)

    buffer.observations = to_array(records.observations, shape)
    buffer.actions = to_array(records.actions, (like.action_dim,))
    for name in ("values", "log_probs", "advantages", "returns"):
        setattr(buffer, name, to_array(getattr(records, name), (1,)))
    if records.action_masks is not None:
        buffer.action_masks = to_array(records.action_masks, (-1,))
    epochs = iter(range(recording.update.n_epochs))

    def get(batch_size: int | None = None) -> Iterator[Any]:
        current = next(epochs)
        for indices, epoch in zip(recording.minibatches, recording.epochs, strict=True):
            if epoch == current:
                yield buffer._get_samples(indices.numpy())

    buffer.get = get
    return buffer
