"""Checks of a training by SB3: of numbers that are not finite, and of advantages that are not those scored."""

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whence.core import NonFinite, RecordBatch, named_leaves, preserve_rng_state, replace_attribute
from whence.sb3.models.building import preserve_model
from whence.sb3.rounds.environment_steps import list_normalisers
from whence.scores import check_gradients, check_parameters, measure_gradients, name_round, raise_if_refused

log = logging.getLogger("whence")

_OTHER_ADVANTAGES = (
    "train() gets other advantages than were scored, for %d of the %d records of a minibatch. They change after it has "
    "begun, as in the buffer's _get_samples(). Change them in collect_rollouts() or in a callback's on_rollout_end."
)


def check_observation(model: Any, observation: Any, first_record: int) -> None:
    """Refuse an observation before the policy reads it; see `check_step`."""
    if not _is_finite(observation):
        raise _explain_number(model, "observation", [observation], first_record + model.num_timesteps)


def check_step(model: Any, variables: Mapping[str, Any], number: int, first_record: int) -> None:
    """Refuse an environment step's rewards and observations, local variables of `collect_rollouts`, in a round.

    A `NonFinite` names the record and its environment. `first_record` is the id of the record at SB3's step 0.
    """
    rewards, observations = variables["rewards"], variables["new_obs"]
    if _is_finite(rewards) and _is_finite(observations):
        return
    next_record = first_record + model.num_timesteps
    with name_round(number):
        # VecNormalize spreads such a number over all environments, so what each reads is looked at first.
        normalisers = list_normalisers(model.env)[::-1]
        if not _is_finite(rewards):
            sources = [*(each.old_reward for each in normalisers), rewards]
            raise _explain_number(model, "reward", sources, next_record - len(rewards))
        sources = [*(each.old_obs for each in normalisers), observations]
        raise _explain_number(model, "observation", sources, next_record)


def _explain_number(model: Any, what: str, sources: Sequence[Any], first_id: int) -> NonFinite:
    """Return the error of the first number that is not finite in arrays, or dicts of arrays, over environments."""
    leaves = [leaf for source in sources for leaf in named_leaves(source, what)]
    name, array = next((name, array) for name, array in leaves if not _is_finite(array))
    place = tuple(np.argwhere(~np.isfinite(array))[0])
    record_id = first_id + int(place[0])
    spoilt = " Start from a VecNormalize that was saved before, since this one's statistics have read it."
    return NonFinite(
        f"`{name}` is {float(array[place])} in record {record_id} (environment {int(place[0])}). Nothing was trained "
        "in this round. Find out why the environment returns it, or replace it in a wrapper of the environment."
        f"{spoilt if model.get_vec_normalize_env() is not None else ''}",
        record_ids=[record_id],
    )


def _is_finite(numbers: Any) -> bool:
    """Return whether an array, or each of a dict of arrays, is finite."""
    if isinstance(numbers, dict):
        return all(_is_finite(array) for array in numbers.values())
    if numbers.dtype.kind != "f":
        return True
    # Cheaper than looking at each number; large numbers overflow, and then each is looked at.
    flat = numbers.reshape(-1)
    try:
        is_finite = math.isfinite(flat.dot(flat))
    except (FloatingPointError, RuntimeWarning):  # as NumPy, or the user's filter of warnings, may be set to raise
        is_finite = False
    return is_finite or bool(np.isfinite(numbers).all())


@contextmanager
def watch_training(model: Any, records: RecordBatch, logged: set[str]) -> Iterator[None]:
    """Check the gradients of each step while `train()` runs inside, before the step, and the parameters afterwards.

    `records` are those in the model's rollout buffer, in its order. If `train()` gets other advantages, that is logged
    once, and its kind added to `logged`.

    Raises:
        NonFinite: see `check_gradients` and `check_parameters`; or the policy has no valid distribution of actions.
    """
    policy, buffer = model.policy, model.rollout_buffer
    positions: Any = np.arange(len(records))
    get_samples, unread, samples = buffer._get_samples, len(records), None

    def note_samples(indices: Any, *rest: Any, **options: Any) -> Any:
        nonlocal positions, unread, samples
        positions, samples = indices, get_samples(indices, *rest, **options)
        if unread > 0 and "other advantages" not in logged:  # once for each record
            unread -= len(indices)
            scored = records.advantages[torch.as_tensor(indices)]
            mask = samples.mask > 0 if hasattr(samples, "mask") else slice(None)  # of padded sequences
            if count := int((samples.advantages[mask].cpu() != scored).sum()):
                logged.add("other advantages")
                log.warning(_OTHER_ADVANTAGES, count, len(scored))
        return samples

    def check(*args: Any) -> None:
        # SB3 has clipped all gradients by their norm. So one number other than 0 and NaN shows that all are finite.
        numbers = [0.0]
        for param in last_first:
            numbers.append(0.0 if param.grad is None else param.grad.reshape(-1)[0].item())
            if numbers[-1] and math.isfinite(numbers[-1]):
                return
        ids = records.ids[torch.as_tensor(np.asarray(positions))].tolist()
        shown = ", ".join(str(record_id) for record_id in ids[:4])
        batch = f"a minibatch of {len(ids)} records ({shown}{', ...' if len(ids) > 4 else ''})"
        check_gradients(_measure_again(model, samples), batch, ids, torch.tensor(sum(numbers)))

    last_first = [param for param in policy.parameters() if param.requires_grad][::-1]
    hook = policy.optimizer.register_step_pre_hook(check)
    try:
        noting = replace_attribute(buffer, "_get_samples", note_samples)
        with noting, raise_if_refused("training", "Lower the learning rate."):
            yield
    finally:
        hook.remove()
    check_parameters(policy.named_parameters())


class _Measured(Exception):
    """Ends a `train()` that began in order to measure its gradients."""


def _measure_again(model: Any, samples: Any) -> dict[str, Tensor]:
    """Return the norm of each gradient of a minibatch before SB3 clips them: `train()` begins again, with it alone."""
    norms: dict[str, Tensor] = {}
    trained = [(name, param) for name, param in model.policy.named_parameters() if param.requires_grad]

    def note_norms() -> None:
        norms.update(measure_gradients(trained))
        raise _Measured

    def wait_for_all(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(note_norms)

    buffer = copy.copy(model.rollout_buffer)
    buffer.get = lambda batch_size=None: iter([samples])
    hooks = [param.register_post_accumulate_grad_hook(wait_for_all) for _, param in trained]
    try:
        with preserve_model(model), preserve_rng_state(), suppress(_Measured):
            model.rollout_buffer = buffer
            model.train()
    finally:
        for hook in hooks:
            hook.remove()
    return norms
