"""Recorded rounds of optimisation: what `train()` did, as data, and whether a policy is the one that did it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from whence.core import (
    A2C,
    Objective,
    Params,
    PolicyView,
    PPOClip,
    RecordBatch,
    RunDirectoryError,
    WhenceError,
    check_one_per_record,
    eval_mode,
    first_line,
    named_tensors,
    preserve_rng_state,
)
from whence.runs import CHANGED, load_tree, save_tree

Algorithm: TypeAlias = Literal["ppo", "a2c"]


@dataclass(frozen=True)
class Update:
    """What a round maximises and how its gradients are treated.

    Attributes:
        algorithm: "ppo" or "a2c".
        clip_range: PPO's clip range in this round.
        clip_range_vf: the range in which values may move, or None.
        normalize_advantage: whether each minibatch's advantages are normalised.
        ent_coef: weight of the entropy.
        vf_coef: weight of the value loss.
        max_grad_norm: the norm that gradients are clipped to; may be infinite.
        target_kl: the divergence at which the round stopped, or None.
        n_epochs: passes over the records, as configured; `target_kl` may end the round earlier.
        batch_size: records in a full minibatch, as configured; None: all.
    """

    algorithm: Algorithm
    clip_range: float
    clip_range_vf: float | None
    normalize_advantage: bool
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float | None
    n_epochs: int
    batch_size: int | None

    def objective(self) -> Objective:
        """Return the objective, one value per record, for records whose advantages are normalised already."""
        if self.algorithm == "ppo":
            return PPOClip(
                clip_range=self.clip_range,
                ent_coef=self.ent_coef,
                vf_coef=self.vf_coef,
                clip_range_vf=self.clip_range_vf,
                advantage_norm="none",
            )
        return A2C(ent_coef=self.ent_coef, vf_coef=self.vf_coef, advantage_norm="none")


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """An optimiser of torch.optim with one group of parameters.

    Attributes:
        name: the name of its class.
        settings: the group's settings: `lr`, `betas`, ...; numbers, booleans and lists of numbers.
        state: for each parameter, its tensors by torch's names; empty before the first step.
    """

    name: str
    settings: Mapping[str, Any]
    state: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class RoundRecording:
    """One round's optimisation, enough to do it again.

    Attributes:
        number: the round's number, from 1.
        records: the whole rollout, in the order of the flattened buffer.
        start: the parameters and buffers of the policy that collected it, by name.
        end: the same after the round.
        optimizer: the optimiser before the round, with the learning rate of the round.
        minibatches: positions in `records` of each minibatch, in their order.
        epochs: the epoch of each minibatch, from 0.
        stopped: whether the last minibatch was read but not stepped on, because `target_kl` was exceeded.
        update: the objective and its settings.
        generator: the state of torch's CPU generator before the round.
        versions: the versions of the libraries.
    """

    number: int
    records: RecordBatch
    start: Mapping[str, Tensor]
    end: Mapping[str, Tensor]
    optimizer: OptimizerState
    minibatches: Sequence[Int[Tensor, " b"]]
    epochs: Sequence[int]
    stopped: bool
    update: Update
    generator: Tensor
    versions: Mapping[str, str]

    @property
    def steps(self) -> Sequence[Int[Tensor, " b"]]:
        """The minibatches that were stepped on."""
        return self.minibatches[:-1] if self.stopped else self.minibatches

    @property
    def trained(self) -> Int[Tensor, " trained"]:
        """The positions of the records that were stepped on, in order, without those that a rule dropped."""
        positions: Tensor = torch.cat([*self.steps, torch.zeros(0, dtype=torch.int64)]).cpu().unique()
        return positions

    def save(self, path: str | Path) -> None:
        """Write the recording to one safetensors file, atomically."""
        tree = {field.name: getattr(self, field.name) for field in fields(self)}
        tree["records"] = {**self.records.columns, "gamma": self.records.gamma, "gae_lambda": self.records.gae_lambda}
        tree |= {"optimizer": vars(self.optimizer), "update": vars(self.update), "versions": [*self.versions.items()]}
        # One tensor in the place of many, which would each have an entry of their own.
        tree["minibatches"] = torch.cat([*self.minibatches, torch.zeros(0, dtype=torch.int64)])
        save_tree(Path(path), tree | {"sizes": [len(minibatch) for minibatch in self.minibatches]})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; a `RunDirectoryError` if it is missing, or this version cannot read it."""
        if not Path(path).exists():
            raise RunDirectoryError(
                f"{path} is not there. Record rounds with InfluenceCallback(recordings=[5, 20]) or whence train "
                "--record-rounds 5,20."
            )
        tree = load_tree(Path(path))
        try:
            tree["minibatches"] = tree["minibatches"].split(tree.pop("sizes"))
            tree |= {"records": RecordBatch(**tree["records"]), "update": Update(**tree["update"])}
            tree |= {"optimizer": OptimizerState(**tree["optimizer"]), "versions": dict(tree["versions"])}
            return cls(**tree)
        except CHANGED as changed:
            raise RunDirectoryError(
                f"{path} does not hold what RoundRecording.save writes ({type(changed).__name__}: "
                f"{first_line(changed)}). Restore it, or record the round again."
            ) from None

    def __repr__(self) -> str:
        return (
            f"RoundRecording of round {self.number}: {len(self.records)} records, {len(self.steps)} steps of "
            f"{self.optimizer.name}"
        )


SAME = 1e-3
"""How far apart outputs of the same policy may be on average; see `compare_outputs` for the units.

Float32 rounds to 1e-6 or so. Convolutions on a GPU, which round to 10 bits, differ from a CPU's by up to 1e-3 on
average, and by several times that on single records.
"""


def check_policy(view: PolicyView, trainable: Mapping[str, Tensor], recording: RoundRecording) -> None:
    """Refuse a policy whose parameters and buffers are not those of a recording.

    A tensor that is not among the `trainable` parameters has to have the recorded value.
    """
    tensors = named_tensors(view)
    if differing := sorted(tensors.keys() ^ recording.start.keys()):
        raise WhenceError(f"The recording is of another policy: only one of the two has `{differing[0]}`.")
    for name, tensor in tensors.items():
        recorded = recording.start[name]
        if tensor.shape != recorded.shape:
            raise WhenceError(
                f"The recording is of another policy: `{name}` has shape {tuple(recorded.shape)} there and "
                f"{tuple(tensor.shape)} here. Pass the policy that was trained, or one built with the same settings."
            )
        if name not in trainable and not torch.equal(tensor.cpu(), recorded.to(tensor.dtype).cpu()):
            raise WhenceError(
                f"`{name}` is not trained and differs from the recording, so the round would not be the same. Load "
                "the recorded policy into this one first."
            )


def check_collected(view: PolicyView, params: Params, records: RecordBatch, number: int) -> None:
    """Refuse a policy whose log-probs or values, at the start of round `number`, are not those of its records.

    The names and the shapes of its parameters may all be the same.
    """
    for name, difference in compare_outputs(view, params, records).items():
        if not difference <= SAME:
            raise WhenceError(
                f"The recording is of another policy: at the parameters that round {number} began with, this policy's "
                f"{name} of the records are {difference:.2g} from the recorded ones on average, though all names and "
                "shapes are the same. Build it with the settings of the run that was recorded, such as activation_fn, "
                "normalize_images and use of action masks."
            )


def compare_outputs(view: PolicyView, params: Params, records: RecordBatch) -> dict[str, float]:
    """Return how far a policy's outputs on records are from the recorded ones, on average.

    Modes and generators are left as they are.

    Returns:
        `log-probs` in nats. If both the policy and the records have values, also `values`, divided by the mean size of
        the recorded values if that is above 1.
    """
    totals: dict[str, float] = {}
    with preserve_rng_state(), eval_mode(list(view.module.modules())), torch.no_grad():
        for first in range(0, len(records), 2048):
            part = records.take(slice(first, first + 2048))
            outputs = view.only({"log_prob", "value"}, params, view.prepare(part))
            pairs = {"log-probs": (check_one_per_record("log_prob", outputs.log_prob), part.log_probs)}
            if outputs.value is not None and part.values is not None:
                pairs["values"] = (check_one_per_record("value", outputs.value), part.values)
            for name, (computed, recorded) in pairs.items():
                difference = (computed.double() - recorded.to(computed.device).double()).abs().sum()
                totals[name] = totals.get(name, 0.0) + float(difference)
    size = 1.0 if records.values is None else max(1.0, float(records.values.double().abs().mean()))
    return {name: total / len(records) / (size if name == "values" else 1.0) for name, total in totals.items()}
