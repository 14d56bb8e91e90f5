"""The gradients of SB3's `train()`, each checked before the optimiser's step on it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from stable_baselines3 import A2C

from whence.culprits import Culprits, find_culprits
from whence.errors import NonFinite, WhenceError
from whence.nonfinite import OnNonFinite, describe_record, measure_norms
from whence.objectives import Objective
from whence.records import RecordBatch
from whence.sb3.buffer import replace_samples
from whence.sb3.nonfinite_error import ErrorWriter, can_act, name_broken_layer
from whence.sb3.recorder import read_update
from whence.sb3.state import copy_tensors, load_tensors, named_tensors, remember_optimizer

log = logging.getLogger("whence")

_RESTORED = "Policy and optimiser are as before the round."
_DIVERGED = "Lower the learning rate, or max_grad_norm."


class StepGuard:
    """Checks a round's gradients before each step, and the policy afterwards.

    Args:
        errors: makes the round's errors.
        on_nonfinite: "drop" leaves out a step whose gradient is not finite; "stop" raises.
        records: the records in the rollout buffer, in its order.

    Attributes:
        left_out: the number of steps left out.
    """

    def __init__(self, errors: ErrorWriter, on_nonfinite: OnNonFinite, records: RecordBatch) -> None:
        self._errors, self._model, self._on_nonfinite, self._records = errors, errors.model, on_nonfinite, records
        self._indices: Any = None
        self._steps, self.left_out, self._reason = 0, 0, ""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Check while `train()` runs inside; the optimiser and the buffer are as they were on exit.

        Raises:
            NonFinite: see `InfluenceCallback`.
        """
        policy, buffer = self._model.policy, self._model.rollout_buffer
        get_samples = buffer._get_samples

        def note_samples(indices: Any, *rest: Any, **options: Any) -> Any:
            self._indices = indices
            return get_samples(indices, *rest, **options)

        self._tensors, self._restore_optimizer = (
            copy_tensors(named_tensors(policy)),
            remember_optimizer(policy.optimizer),
        )
        handle = policy.optimizer.register_step_pre_hook(self._check_gradient)
        try:
            with replace_samples(buffer, note_samples):
                yield
        except ValueError as error:
            if isinstance(error, WhenceError) or self._indices is None:
                raise
            batch, objective = self._minibatch()
            culprits = find_culprits(policy, batch, objective)
            if not culprits.is_policy:  # something else was wrong
                raise
            raise self._explain(culprits, refused=True) from error
        finally:
            handle.remove()
        self._check_policy()
        if self.left_out:
            log.warning(
                "round %d: %d of %d steps left out, %s", self._errors.number, self.left_out, self._steps, self._reason
            )

    def _check_gradient(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called before each step of the optimiser."""
        self._steps += 1
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        total = measure_norms([param.grad for param in params])
        if total > 0:
            return
        # SB3 clips gradients before the step: one that overflows, as of a loss that does, makes all others 0.
        culprits = None
        if total == 0 or self._on_nonfinite == "stop" or not self._reason:
            culprits = find_culprits(self._model.policy, *self._minibatch())
        if total == 0 and culprits is not None and culprits.is_finite:
            return
        for param in params:
            param.grad = None
        if culprits is not None and (self._on_nonfinite == "stop" or culprits.is_policy):
            raise self._explain(culprits)
        self.left_out += 1  # without gradients the optimiser does nothing
        if culprits is not None:
            self._reason = self._reason or self._name_gradient(culprits)

    def _batch(self) -> RecordBatch:
        """Return the present minibatch with the advantages that `train()` reads; all records before the first."""
        if self._indices is None:
            return self._records
        indices = np.asarray(self._indices)
        advantages = torch.from_numpy(self._model.rollout_buffer.advantages.reshape(-1)[indices])
        return self._records.take(torch.from_numpy(indices)).with_columns({"advantages": advantages})

    def _minibatch(self) -> tuple[RecordBatch, Objective]:
        """Return the present minibatch with normalised advantages, and what `train()` raises for each record."""
        batch, model = self._batch(), self._model
        if model.normalize_advantage and (len(batch) > 1 or isinstance(model, A2C)):
            advantages = batch.advantages
            batch = batch.with_columns({"advantages": (advantages - advantages.mean()) / (advantages.std() + 1e-8)})
        return batch, read_update(model).objective()

    def _check_policy(self) -> None:
        """Check what `train()` made of the policy.

        Raises:
            NonFinite: a parameter is not finite, the policy cannot act, or no step was taken.
        """
        model = self._model
        if self._steps and self.left_out == self._steps:
            raise self._errors.make_error(
                f"no step was taken, since in each of {self._steps} {self._reason}. The policy is as before the round. "
                "Lower the learning rate, or scale the rewards down.",
                self._records,
            )
        broken = None
        if not measure_norms([param.detach() for param in model.policy.parameters()]) >= 0:
            params = model.policy.named_parameters()
            broken = next(name for name, param in params if not torch.isfinite(param).all())
            what = f"a step made the parameter `{broken}` not finite"
        elif can_act(model.policy, model._last_obs):
            return
        else:
            what = f"the trained policy has no valid action for the next observation{name_broken_layer(model)}"
        error = self._errors.make_error(f"{what}. {_RESTORED} {_DIVERGED}", self._batch(), parameter=broken)
        self._restore()
        raise error

    def _restore(self) -> None:
        load_tensors(named_tensors(self._model.policy), self._tensors)
        self._restore_optimizer()

    def _explain(self, culprits: Culprits, *, refused: bool = False) -> NonFinite:
        """Return the error of a minibatch that no step can be taken on; a policy that has diverged is restored."""
        batch = self._batch()
        what = self._name_gradient(culprits)
        if refused:
            what = (
                f"the policy has no valid distribution of actions for a minibatch of {len(batch)} records: "
                f"{self._name_records(culprits)}{culprits.reason}"
            )
        restored = refused or culprits.is_policy
        state = _RESTORED if restored else "The step was not taken: policy and optimiser are as before it."
        remedy = "" if restored else " Such steps are left out with on_nonfinite='drop'."
        error = self._errors.make_error(
            f"{what}. {state} {_DIVERGED}{remedy}",
            batch,
            [int(batch.ids[position]) for position in culprits.positions],
            culprits.parameter,
        )
        if restored:
            self._restore()
        return error

    def _name_gradient(self, culprits: Culprits) -> str:
        return (
            f"the gradient of a minibatch of {len(self._batch())} records is not finite: "
            f"{self._name_records(culprits)}{culprits.reason}"
        )

    def _name_records(self, culprits: Culprits) -> str:
        if not culprits.positions:
            return ""
        more = len(culprits.positions) - 1
        first = describe_record(self._batch(), culprits.positions[0])
        return f"in {first}{f' and {more} more' if more else ''}, "
