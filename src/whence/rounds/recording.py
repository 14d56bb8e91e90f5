"""One round's optimisation as it was: where it began, what it trained on, in which order, and where it ended."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whence.errors import RunDirectoryError
from whence.guards import write_atomically
from whence.objectives import A2C, Objective, PPOClip
from whence.records import RecordBatch, Tree

FORMAT, VERSION = "whence-round", "3"

Algorithm: TypeAlias = Literal["ppo", "a2c"]


@dataclass(frozen=True)
class Update:
    """What a round raises and how its gradients are treated.

    Attributes:
        algorithm: "ppo" or "a2c".
        clip_range: PPO's, at this round.
        clip_range_vf: the range in which values may move, or None.
        normalize_advantage: whether each minibatch's advantages are normalised.
        ent_coef: weight of the entropy.
        vf_coef: weight of the value loss.
        max_grad_norm: gradients are clipped to it; may be infinite.
        target_kl: the divergence at which the round stopped, or None.
        n_epochs: passes over the records that were asked for.
        batch_size: records in a minibatch that were asked for; None: all.
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
        """Return what is raised, one value per record whose advantage is normalised already."""
        shared: dict[str, Any] = {
            "ent_coef": self.ent_coef,
            "vf_coef": self.vf_coef,
            "clip_range_vf": self.clip_range_vf,
            "advantage_norm": "none",
        }
        return PPOClip(clip_range=self.clip_range, **shared) if self.algorithm == "ppo" else A2C(**shared)


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """An optimiser of torch.optim with one group of parameters.

    Attributes:
        name: its class.
        settings: the group's: `lr`, `betas`, ...; numbers, booleans and lists of numbers.
        state: the tensors of each parameter by their names in torch; empty before the first step.
    """

    name: str
    settings: Mapping[str, Any]
    state: Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class RoundRecording:
    """One round's optimisation, enough to do it again.

    Attributes:
        number: of the round, from 1.
        records: the rollout, all of it; in the order of the flattened buffer.
        start: parameters and buffers of the policy that collected it, by name.
        end: the same after the round.
        optimizer: the optimiser before the round, with the learning rate of the round.
        minibatches: positions in `records` of each minibatch, in their order.
        epochs: the epoch of each minibatch, from 0.
        stopped: whether the last minibatch was looked at but not stepped on, since `target_kl` was exceeded.
        update: what was raised.
        generator: state of torch's CPU generator before the round.
        versions: of the libraries.
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
        """The positions of the records that were stepped on, in order; those that a rule dropped are not among them."""
        found: Tensor = torch.cat([*self.steps, torch.zeros(0, dtype=torch.int64)]).cpu().unique()
        return found

    def save(self, path: str | Path) -> None:
        """Write the recording to one safetensors file, atomically; what is no tensor goes into its JSON header."""
        columns = dict(self.records.columns)
        observations = list(_branches(columns.pop("observations")))
        tensors = {f"records/{name}": tensor for name, tensor in columns.items()}
        tensors |= {f"observations/{number}": tensor for number, (_, tensor) in enumerate(observations)}
        tensors |= {f"start/{name}": tensor for name, tensor in self.start.items()}
        tensors |= {f"end/{name}": tensor for name, tensor in self.end.items()}
        tensors |= {
            f"optimizer/{name}/{key}": tensor
            for name, own in self.optimizer.state.items()
            for key, tensor in own.items()
        }
        tensors["minibatches"] = torch.cat([*self.minibatches, torch.zeros(0, dtype=torch.int64)])
        tensors["generator"] = self.generator
        about = {
            "number": self.number,
            "gamma": self.records.gamma,
            "gae_lambda": self.records.gae_lambda,
            "observations": [path for path, _ in observations],
            "optimizer": {"name": self.optimizer.name, "settings": dict(self.optimizer.settings)},
            "sizes": [len(minibatch) for minibatch in self.minibatches],
            "epochs": list(self.epochs),
            "stopped": self.stopped,
            "update": asdict(self.update),
            "versions": dict(self.versions),
        }
        metadata = {"format": FORMAT, "version": VERSION, "about": json.dumps(about)}
        with write_atomically(path) as temporary:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary, metadata
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            RunDirectoryError: the file is missing, or is none that this version reads.
        """
        try:
            opened = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{path} is not there. Record rounds with InfluenceCallback(recordings=[5, 20]) or whence train "
                "--record-rounds 5,20."
            ) from None
        except (SafetensorError, OSError) as broken:
            raise RunDirectoryError(f"{path} cannot be read as safetensors: {broken}") from None
        with opened as file:
            metadata = file.metadata() or {}
            marks = metadata.get("format"), metadata.get("version")
            if marks != (FORMAT, VERSION) or "about" not in metadata:
                raise RunDirectoryError(
                    f"{path} is marked {marks[0]!r}, version {marks[1]!r}; a file written by RoundRecording.save "
                    f"({FORMAT}, version {VERSION}) is needed."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(metadata["about"])
        state: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _below("optimizer/", tensors).items():
            parameter, _, key = name.rpartition("/")
            state.setdefault(parameter, {})[key] = tensor
        return cls(
            number=about["number"],
            records=RecordBatch(
                observations=_tree(about["observations"], _below("observations/", tensors)),
                **_below("records/", tensors),
                gamma=about["gamma"],
                gae_lambda=about["gae_lambda"],
            ),
            start=_below("start/", tensors),
            end=_below("end/", tensors),
            optimizer=OptimizerState(about["optimizer"]["name"], about["optimizer"]["settings"], state),
            minibatches=tensors["minibatches"].split(about["sizes"]),
            epochs=about["epochs"],
            stopped=about["stopped"],
            update=Update(**about["update"]),
            generator=tensors["generator"],
            versions=about["versions"],
        )

    def __repr__(self) -> str:
        return (
            f"RoundRecording of round {self.number}: {len(self.records)} records, {len(self.steps)} steps of "
            f"{self.optimizer.name}"
        )


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _branches(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield a tree's tensors with the keys that lead to them, which may hold any character."""
    if isinstance(tree, Mapping):
        for key, branch in tree.items():
            yield from _branches(branch, (*path, key))
    else:
        yield path, tree


def _tree(paths: Sequence[Sequence[str]], tensors: Mapping[str, Tensor]) -> Tree:
    tree: dict[str, Any] = {}
    for number, path in enumerate(paths):
        branch = tree
        *keys, last = "", *path
        for key in keys:
            branch = branch.setdefault(key, {})
        branch[last] = tensors[str(number)]
    return tree[""]
