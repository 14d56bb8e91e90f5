"""What SB3's `train()` raises and how: its objective, and a recording of what it does in a round."""

from collections.abc import Collection
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from torch import Tensor

from whence.core import Objective, RecordBatch, Unsupported, WhenceError, library_versions, named_tensors, objectives
from whence.rounds import OptimizerState, RoundRecording, Update
from whence.sb3.models.building import copy_tensors
from whence.sb3.models.descriptions import is_own_schedule


def model_objective(model: Any) -> Objective:
    """Return the objective of a model's `train()`, without its value term, with the model's settings.

    These are the clip range, the entropy coefficient and whether advantages are normalised. At the policy that
    collected the rollout every ratio is 1, so any clip range gives the same scores. Of a schedule of SB3's, which may
    end at 0, the widest is taken: a ratio that rounding moves off 1 must not be clipped. Another schedule may count its
    calls, and is not called.
    """
    norm: objectives.AdvantageNorm = "buffer" if model.normalize_advantage else "none"
    if isinstance(model, PPO | MaskablePPO | RecurrentPPO):
        schedule: Any = model.clip_range
        clip_range = objectives.PPOClip.clip_range
        if is_own_schedule(schedule):
            clip_range = max(float(schedule(left)) for left in (1.0, 0.5, 0.0))
        return objectives.PPOClip(clip_range=clip_range, ent_coef=model.ent_coef, advantage_norm=norm)
    assert isinstance(model, A2C)  # check_model lets no other pass
    return objectives.A2C(ent_coef=model.ent_coef, advantage_norm=norm)


class Recorder:
    """Records a round while `model.train()` runs; the filtered `buffer.get` calls it at each epoch and minibatch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._start = copy_tensors(named_tensors(model.policy))
        self._minibatches: list[Tensor] = []
        self._epochs: list[int] = []
        self._epoch, self._steps = -1, 0
        self._advantages: Tensor | None = None

    def start_epoch(self) -> None:
        """Record that a pass over the records begins."""
        if self._epoch < 0:
            # Not earlier: train() sets the learning rate, and the progress that schedules read, when it begins.
            self._optimizer = read_optimizer(self._model.policy)
            self._generator = torch.get_rng_state()
        self._epoch += 1

    def add_minibatch(self, indices: NDArray[np.int64]) -> None:
        """Record the positions of the next minibatch's records."""
        if self._advantages is None:  # as train() reads them: flattened by now, and normalised if that is done once
            self._advantages = torch.from_numpy(self._model.rollout_buffer.advantages.flatten())
        self._minibatches.append(torch.from_numpy(np.array(indices)))
        self._epochs.append(self._epoch)

    def count_step(self) -> None:
        """Record that the optimiser stepped on the last minibatch."""
        self._steps += 1

    def make_recording(self, number: int, records: RecordBatch) -> RoundRecording:
        """Return the recording of a round, once `train()` is over; its records have the advantages that it read."""
        return RoundRecording(
            number=number,
            records=records if self._advantages is None else records.with_advantages(self._advantages),
            start=self._start,
            end=copy_tensors(named_tensors(self._model.policy)),
            optimizer=self._optimizer,
            minibatches=tuple(self._minibatches),
            epochs=tuple(self._epochs),
            stopped=self._steps < len(self._minibatches),
            update=read_update(self._model),
            generator=self._generator,
            versions=library_versions(["whence", *training_libraries(self._model)]),
        )


def check_recordings(recordings: Collection[int]) -> frozenset[int]:
    """Return the rounds to record as a set; refuse what is no collection of numbers from 1 on."""
    if not isinstance(recordings, Collection) or not all(isinstance(n, Integral) and n >= 1 for n in recordings):
        raise WhenceError(f"recordings is {recordings!r}; give the rounds to record, from 1, such as [5, 20].")
    return frozenset(recordings)


def check_groups(model: Any) -> None:
    """Refuse to record a model whose optimiser has several groups of parameters, or not all that get gradients."""
    if isinstance(model, RecurrentPPO):
        raise Unsupported(
            "Rounds of a RecurrentPPO cannot be recorded: a recording holds minibatches of single records, and here "
            "they are stretches of sequences. Leave out recordings (--record-rounds)."
        )
    if (count := len(model.policy.optimizer.param_groups)) != 1:
        raise Unsupported(
            f"The optimiser has {count} groups of parameters, and a recording needs one. Record no rounds, or train "
            "all parameters in one group."
        )
    identities = {id(parameter) for parameter in model.policy.optimizer.param_groups[0]["params"]}
    for name, parameter in model.policy.named_parameters():
        if parameter.requires_grad and id(parameter) not in identities:
            # SB3 clips all gradients together, and this one grows from round to round, since none sets it to 0.
            raise Unsupported(
                f"The optimiser does not hold `{name}`, whose gradient decides all the same how far SB3 clips the "
                "others'. Set its requires_grad to False, or record no rounds."
            )


def training_libraries(model: Any) -> list[str]:
    """Return the names of the libraries that compute a model's training."""
    return ["torch", "stable-baselines3", *(["sb3-contrib"] if isinstance(model, MaskablePPO) else [])]


def read_optimizer(policy: Any) -> OptimizerState:
    """Return a copy of the state of a policy's optimiser, which has one group of parameters."""
    optimizer = policy.optimizer
    (group,) = optimizer.param_groups
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    settings = {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key != "params"}
    state = {
        names[id(parameter)]: {
            key: torch.as_tensor(value).detach().clone() for key, value in values.items() if value is not None
        }
        for parameter, values in optimizer.state.items()
    }
    return OptimizerState(type(optimizer).__name__, settings, state)


def read_update(model: Any) -> Update:
    """Return how `train()` has updated the model; clip ranges as SB3 logged them, since schedules may have state."""
    logged, ppo = model.logger.name_to_value, not isinstance(model, A2C)
    clip_range_vf = logged["train/clip_range_vf"] if ppo and model.clip_range_vf is not None else None
    return Update(
        algorithm="ppo" if ppo else "a2c",
        clip_range=float(logged["train/clip_range"]) if ppo else 0.2,
        clip_range_vf=None if clip_range_vf is None else float(clip_range_vf),
        normalize_advantage=bool(model.normalize_advantage),
        ent_coef=float(model.ent_coef),
        vf_coef=float(model.vf_coef),
        max_grad_norm=float(model.max_grad_norm),
        target_kl=model.target_kl if ppo else None,
        n_epochs=model.n_epochs if ppo else 1,
        batch_size=model.batch_size if ppo else None,
    )
