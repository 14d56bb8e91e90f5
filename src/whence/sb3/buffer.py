"""SB3's rollout buffer: read as records, and restricted to the selected ones while `train()` runs."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import Tensor

from whence.errors import InvalidRecords, Unsupported, WhenceError, suggest
from whence.records import RecordBatch
from whence.sb3.contrib import (
    MaskableDictRolloutBuffer,
    MaskablePPO,
    MaskableRolloutBuffer,
    RecurrentPPO,
    is_masking_supported,
)
from whence.sb3.episodes import Ongoing, begin_episodes, number_episodes
from whence.sb3.policy import check_policy
from whence.sb3.recorder import Recorder
from whence.sb3.train_hook import original_class
from whence.selection import Selection
from whence.trees import Tree

Last: TypeAlias = Literal["keep", "drop"]

_ALGORITHMS = (PPO, A2C, MaskablePPO)
_BUFFERS = (RolloutBuffer, DictRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer)


def check_model(model: Any) -> None:
    """Refuse, by name and with the reason, a model whose rounds whence does not know how to score and filter.

    Raises:
        Unsupported: see the message.
    """
    name = type(model).__name__
    if isinstance(model, RecurrentPPO):
        raise Unsupported(
            f"{name} is not supported: a record's log-prob runs through the hidden states of the records before it, "
            "and train() cuts its minibatches out of whole sequences, so one record cannot be left out while the "
            "others stay as they are. Use PPO with stacked frames (VecFrameStack), whose records stand alone."
        )
    base = next((algorithm for algorithm in _ALGORITHMS if isinstance(model, algorithm)), None)
    if base is None:
        why = "its loss is not known to whence" if isinstance(model, OnPolicyAlgorithm) else "it is not on-policy"
        raise Unsupported(
            f"{name} is not supported: {why}. PPO and A2C of Stable-Baselines3 are, and MaskablePPO of sb3-contrib."
        )
    if original_class(model).train is not base.train or "train" in vars(model):
        raise Unsupported(
            f"{name} overrides train(), so whence cannot know which records it trains on. Use {base.__name__}."
        )
    check_policy(model.policy)
    buffer = type(model.rollout_buffer)
    is_known = any(buffer.get is getattr(known, "get", None) for known in _BUFFERS)
    if not is_known or "get" in vars(model.rollout_buffer):
        raise Unsupported(
            f"The rollout buffer {buffer.__name__} overrides get(), so whence cannot know what it yields. Use SB3's "
            "own (rollout_buffer_class=None)."
        )


def snapshot(model: Any) -> RecordBatch:
    """Copy the rollout that a model has just collected, before `train()` reads it.

    Records are ordered environment by environment, as in the flattened buffer. A record's id is the time step at which
    it was collected, counted over all environments since learning began. Rewards include the bootstrap at a time limit,
    as in SB3.

    Args:
        model: an SB3 PPO or A2C, or a MaskablePPO, inside `on_rollout_end` (or after `collect_rollouts`).

    Raises:
        Unsupported: another algorithm, policy or buffer.
        InvalidRecords: the buffer is not full, or `train()` has flattened it.
    """
    check_model(model)
    return read_buffer(model, model.rollout_buffer)[0]


def collect(model: Any) -> RecordBatch:
    """Collect one rollout with the model's environment and return its records; nothing is trained.

    The environment, the model's count of steps and the random generators advance, as in any rollout. The model's own
    buffer stays as it is.

    Args:
        model: an SB3 PPO or A2C, or a MaskablePPO, with an environment.

    Raises:
        Unsupported: another algorithm, policy or buffer.
        WhenceError: the model has no environment.
    """
    check_model(model)
    if model.env is None:
        raise WhenceError("The model has no environment to collect from; give it one with model.set_env(env).")
    if model._last_obs is None:
        begin_episodes(model)
    if model.ep_info_buffer is None:
        model.ep_info_buffer, model.ep_success_buffer = (deque(maxlen=model._stats_window_size) for _ in range(2))
    callback = model._init_callback(None)
    buffer = copy.deepcopy(model.rollout_buffer)
    # A MaskablePPO does not store whether it trains with masks; by default, learn() uses them.
    masked = {"use_masking": is_masking_supported(model.env)} if isinstance(model, MaskablePPO) else {}
    model.collect_rollouts(model.env, callback, buffer, n_rollout_steps=model.n_steps, **masked)
    return read_buffer(model, buffer)[0]


def read_buffer(model: Any, buffer: RolloutBuffer, ongoing: Ongoing | None = None) -> tuple[RecordBatch, Ongoing]:
    """Return the records of a full buffer, and the episodes that are ongoing at its end.

    Args:
        model: the model that collected the rollout.
        buffer: its rollout buffer, not flattened yet.
        ongoing: the episodes that were ongoing when the rollout began; None: unknown.

    Raises:
        InvalidRecords: the buffer is not full, or `train()` has flattened it.
        NonFinite: a number is not finite.
    """
    if not buffer.full:
        raise InvalidRecords(
            f"The rollout buffer holds {buffer.pos} of {buffer.buffer_size} steps, so its advantages are not there "
            "yet. Call snapshot(model) in a callback's on_rollout_end, or use whence.sb3.collect(model)."
        )
    if buffer.generator_ready:
        raise InvalidRecords(
            "The rollout buffer has been flattened by train(), which leaves rewards and episode starts in another "
            "order than the rest, and the policy is no longer the one that collected it. Call snapshot(model) before "
            "train(), in a callback's on_rollout_end, or use whence.sb3.collect(model)."
        )
    steps, envs = buffer.buffer_size, buffer.n_envs
    first = model.num_timesteps - steps * envs
    episode_starts = _flatten(buffer.episode_starts)
    actions = _flatten(buffer.actions)
    if isinstance(model.action_space, spaces.Discrete):
        actions = actions.reshape(-1)
    if isinstance(buffer.observations, dict):
        observations: Tree = {key: _flatten(array) for key, array in buffer.observations.items()}
    else:
        observations = _flatten(buffer.observations)
        if isinstance(model.observation_space, spaces.Discrete):
            observations = observations.reshape(-1)
    masks = getattr(buffer, "action_masks", None)
    episode_ids, positions, ongoing = number_episodes(buffer.episode_starts.astype(bool), ongoing)
    records = RecordBatch(
        observations=observations,
        actions=actions,
        log_probs=_flatten(buffer.log_probs),
        values=_flatten(buffer.values),
        advantages=_flatten(buffer.advantages),
        returns=_flatten(buffer.returns),
        rewards=_flatten(buffer.rewards),
        episode_starts=episode_starts,
        record_ids=first + _flatten(np.arange(steps * envs).reshape(steps, envs)),
        env_index=torch.arange(envs).repeat_interleave(steps),
        episode_ids=_flatten(episode_ids),
        steps=_flatten(positions),
        action_masks=None if masks is None else _flatten(masks),
        gamma=buffer.gamma,
        gae_lambda=buffer.gae_lambda,
    )
    return records, ongoing


def _flatten(array: NDArray[Any]) -> Tensor:
    """Reshape (steps, envs, ...) to (envs * steps, ...), environment by environment, as SB3 flattens."""
    return torch.from_numpy(array.swapaxes(0, 1).reshape(-1, *array.shape[2:]))


@contextmanager
def select_from(
    buffer: RolloutBuffer,
    selection: Selection,
    *,
    last: Last = "keep",
    recorder: Recorder | None = None,
) -> Iterator[None]:
    """Let `buffer.get` yield the selected records only; the buffer has its own `get` again on exit.

    Every call draws SB3's permutation of all n records and then filters it, so that runs which drop different records
    share their random streams. Weights that are not uniform become probabilities of n draws with replacement.

    Args:
        buffer: the rollout buffer, of n records.
        selection: n entries, in the order of the flattened buffer.
        last: whether a last minibatch shorter than the others trains; see `cut_minibatches`.
        recorder: records every epoch and minibatch.
    """
    sb3_get = buffer.get
    keep = selection.keep.numpy()
    keeps_all = bool(keep.all()) and selection.uniform

    def get(batch_size: int | None = None) -> Iterator[Any]:
        if recorder is not None:
            recorder.start_epoch()
        order = _draw_order(buffer, sb3_get)
        if selection.uniform:
            order = order[keep[order]]
        else:
            weights = selection.weights.double().numpy()
            order = np.random.choice(len(keep), size=len(keep), p=weights / weights.sum())  # noqa: NPY002
        for indices in cut_minibatches(order, batch_size or len(keep), last=last, join=not keeps_all):
            if recorder is not None:
                recorder.add_minibatch(indices)
            yield buffer._get_samples(indices)
            if recorder is not None:  # not reached if train() stops early
                recorder.count_step()

    buffer.get = get  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del buffer.get  # the instance's, so that the class's is in effect again


def _draw_order(buffer: RolloutBuffer, sb3_get: Any) -> NDArray[np.int64]:
    """Draw the permutation that the buffer's own `get` draws; it flattens the arrays."""
    with replace_samples(buffer, lambda indices, env=None: indices):
        (order,) = sb3_get(batch_size=None)
    return order  # type: ignore[no-any-return]


@contextmanager
def replace_samples(buffer: RolloutBuffer, get_samples: Callable[..., Any]) -> Iterator[None]:
    """Let `buffer._get_samples` be another function inside; replacements may be nested."""
    before = vars(buffer).get("_get_samples")
    buffer._get_samples = get_samples  # type: ignore[method-assign]
    try:
        yield
    finally:
        del buffer._get_samples  # the instance's, so that the class's is in effect again
        if before is not None:
            buffer._get_samples = before  # type: ignore[method-assign]


def cut_minibatches(order: NDArray[np.int64], batch_size: int, *, last: Last, join: bool) -> list[NDArray[np.int64]]:
    """Cut an order of records into minibatches.

    Args:
        order: positions of records.
        batch_size: records in a minibatch.
        last: "drop" leaves out a last minibatch shorter than the others (as LDA's code does), unless it is the only
            one.
        join: let a last minibatch of one record join the one before, since one advantage cannot be normalised. False
            cuts as SB3 does.
    """
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if len(batches) > 1 and len(batches[-1]) < batch_size:
        if last == "drop":
            batches.pop()
        elif len(batches[-1]) == 1 and join:
            batches[-2:] = [np.concatenate(batches[-2:])]
    return batches


def check_last(last: str) -> None:
    """Refuse an unknown value of `last`."""
    if last not in get_args(Last):
        raise WhenceError(f"last is {last!r}.{suggest(str(last), get_args(Last))}")
