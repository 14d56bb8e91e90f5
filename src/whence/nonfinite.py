"""Numbers that are not finite: found in records, named in messages, and saved in a file."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from whence.errors import RunDirectoryError, WhenceError, first_line, suggest
from whence.guards import write_atomically
from whence.records import UNKNOWN, RecordBatch
from whence.runs.tensorfiles import CHANGED, parse_document, read_tensor_file
from whence.trees import map_tree, named_leaves

FORMAT, VERSION = "whence-nonfinite", "1"

OnNonFinite: TypeAlias = Literal["stop", "drop"]

NOT_FINITE = "not finite: "
"""How the reason of a record begins that was dropped because a number of it is not finite."""

_OWN_LABELS = {
    "observations": "observation",
    "actions": "action",
    "values": "value",
    "log_probs": "log-prob",
    "rewards": "reward",
}
_FOLLOWING_LABELS = {"advantages": "advantage", "returns": "return"}
_LABELS = {**_OWN_LABELS, **_FOLLOWING_LABELS}


def check_on_nonfinite(on_nonfinite: str) -> OnNonFinite:
    """Return `on_nonfinite` if it is "stop" or "drop".

    Raises:
        WhenceError: it is neither.
    """
    if on_nonfinite not in get_args(OnNonFinite):
        raise WhenceError(f"on_nonfinite is {on_nonfinite!r}.{suggest(str(on_nonfinite), get_args(OnNonFinite))}")
    return on_nonfinite  # type: ignore[return-value]


def make_unchecked(columns: Mapping[str, Any]) -> RecordBatch:
    """Return records that may hold numbers that are not finite, which `RecordBatch` refuses; to look at, not to score.

    Args:
        columns: the arguments of `RecordBatch`; columns as tensors.
    """
    numbers = {name: columns[name] for name in _LABELS if columns.get(name) is not None}
    batch = RecordBatch(**{**columns, **map_tree(torch.zeros_like, numbers)})
    return batch.with_columns(map_tree(torch.clone, numbers))


def find_faults(records: RecordBatch) -> list[str | None]:
    """Return, for each record, what about it is not finite; None if all is.

    A record's own numbers come first: "observation", "action", "value", "log-prob" or "reward". "advantage" and
    "return" mean that only these are not finite, as they follow from later records of the episode. "loss" means that
    the square of the difference between return and value overflows.

    Args:
        records: n records; see `make_unchecked`.
    """
    faults: list[str | None] = [None] * len(records)
    for name, label in _LABELS.items():
        for _, column in named_leaves(records.columns.get(name, {})):
            if column.is_floating_point():
                _mark(faults, ~torch.isfinite(column).reshape(len(records), -1).all(dim=1), label)
    if records.values is not None and records.returns is not None:
        _mark(faults, ~torch.isfinite((records.returns - records.values).square()), "loss")
    return faults


def _mark(faults: list[str | None], mask: Tensor, label: str) -> None:
    for position in mask.nonzero().flatten().tolist():
        faults[position] = faults[position] or label


def describe_number(records: RecordBatch, position: int, fault: str) -> str:
    """Return what is not finite about a record, with its value, such as "`reward` is nan".

    Args:
        records: the records.
        position: the record's position.
        fault: of `find_faults`.
    """
    if fault == "loss":
        assert records.returns is not None
        assert records.values is not None
        return (
            f"the value loss (return {float(records.returns[position]):.3g}, value "
            f"{float(records.values[position]):.3g}) overflows"
        )
    name = next(name for name, label in _LABELS.items() if label == fault)
    for leaf, column in named_leaves(records.columns[name], fault):
        numbers = column[position].reshape(-1)
        if column.is_floating_point() and not torch.isfinite(numbers).all():
            return f"`{leaf}` is {float(numbers[~torch.isfinite(numbers)][0])}"
    raise AssertionError(f"the record at {position} has a finite {fault}")


def describe_record(records: RecordBatch, position: int) -> str:
    """Return a record's id with environment, episode and step, as far as they are known."""
    places = {
        "environment": records.env_index,
        "episode": records.episode_ids,
        "step": records.steps,
    }
    numbers = {name: int(column[position]) for name, column in places.items() if column is not None}
    text = ", ".join(f"{name} {number}" for name, number in numbers.items() if number != UNKNOWN)
    return f"record {int(records.ids[position])}{f' ({text})' if text else ''}"


def count_reasons(reasons: Iterable[str]) -> str:
    """Return reasons with how often each occurs: "reward (1), advantage (22)"."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    return ", ".join(f"{reason} ({count})" for reason, count in counts.items())


def measure_norms(tensors: Sequence[Tensor]) -> float:
    """Return the sum of tensors' norms: NaN if a number is not finite, 0 if all are 0.

    Norms of large but finite numbers overflow. Then the sum is infinite, and the numbers are finite.

    Args:
        tensors: tensors on one device or several.
    """
    if not tensors:
        return 0.0
    device = tensors[0].device
    norms = torch._foreach_norm(list(tensors))
    if device.type == "cpu":
        total = sum(norm.item() for norm in norms)
    else:  # each item would wait for the device
        total = float(torch.stack([norm if norm.device == device else norm.to(device) for norm in norms]).sum())
    if math.isfinite(total):
        return total
    return math.inf if all(bool(torch.isfinite(tensor).all()) for tensor in tensors) else math.nan


@dataclass(frozen=True, eq=False)
class SavedMinibatch:
    """What `load_nonfinite` returns: a minibatch with a number that is not finite, and what was to train on it.

    Attributes:
        number: the round's number, from 1.
        message: the error's message.
        parameter: the first parameter whose gradient is not finite, or None.
        culprits: ids of the records that cause it.
        records: the minibatch's columns by the names of `RecordBatch`, (b, ...); observations in a dict are named
            `observations.KEY`. Numbers may not be finite.
        policy: the policy's parameters and buffers before the step, by name.
        optimizer: for each parameter, the optimiser's tensors before the step, by torch's names.
        settings: the settings of the optimiser's groups, in JSON types.
    """

    number: int
    message: str
    parameter: str | None
    culprits: tuple[int, ...]
    records: Mapping[str, Tensor]
    policy: Mapping[str, Tensor]
    optimizer: Mapping[str, Mapping[str, Tensor]]
    settings: Sequence[Mapping[str, Any]]


def nonfinite_path(folder: str | Path, number: int) -> Path:
    """Return the path of the minibatch of round `number` in a run directory."""
    return Path(folder) / "nonfinite" / f"round_{number:05d}.safetensors"


def save_nonfinite(
    path: Path,
    *,
    number: int,
    message: str,
    records: RecordBatch,
    policy: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    parameter: str | None = None,
    culprits: Iterable[int] = (),
) -> None:
    """Write a minibatch to one safetensors file, atomically; everything but tensors goes into its JSON header.

    Args:
        path: the file.
        number: the round's number.
        message: the error's message.
        records: the minibatch; see `make_unchecked`.
        policy: the policy's parameters and buffers, by name; no two may share memory.
        optimizer: the optimiser of the policy's parameters; None: its state is left out.
        parameter: the first parameter whose gradient is not finite.
        culprits: ids of the records that cause it.
    """
    tensors = {f"records/{name}": column for name, column in named_leaves(records.columns)}
    tensors |= {f"policy/{name}": tensor for name, tensor in policy.items()}
    names = {id(tensor): name for name, tensor in policy.items()}
    for owner, state in {} if optimizer is None else optimizer.state.items():
        values = {key: torch.as_tensor(value) for key, value in state.items() if value is not None}
        tensors |= {f"optimizer/{names[id(owner)]}/{key}": value for key, value in values.items()}
    groups = [] if optimizer is None else optimizer.param_groups
    about = {
        "number": number,
        "message": message,
        "parameter": parameter,
        "culprits": list(culprits),
        "settings": [{key: _plain(value) for key, value in g.items() if key != "params"} for g in groups],
    }
    with write_atomically(path) as temporary:
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            temporary,
            {"format": FORMAT, "version": VERSION, "about": json.dumps(about)},
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str | list | tuple | None) else repr(value)


def try_saving(path: Path, what: str, **content: Any) -> tuple[str, Path | None]:
    """Save a minibatch, and say where it is or why it is not: a full disk must not hide what happened.

    Args:
        path: the file.
        what: what is saved, for the sentence.
        content: see `save_nonfinite`.

    Returns:
        The sentence, and the path; None: nothing was saved.
    """
    try:
        save_nonfinite(path, **content)
    except Exception as refusal:
        return f"{path} could not be written: {first_line(refusal)}.", None
    return f"{what} are in {path}; whence.load_nonfinite reads it.", path


def load_nonfinite(path: str | Path) -> SavedMinibatch:
    """Read the minibatch that a training stopped at because a number was not finite.

    Args:
        path: the file that the message names: `nonfinite/round_00007.safetensors` in the run directory.

    Raises:
        RunDirectoryError: the file is missing, or this version cannot read it.
    """
    if not Path(path).exists():
        raise RunDirectoryError(
            f"{path} is not there. A training with a run directory writes such a file when it stops with NonFinite."
        )
    metadata, tensors = read_tensor_file(path, RunDirectoryError)
    marks = metadata.get("format"), metadata.get("version")
    if marks != (FORMAT, VERSION):
        raise RunDirectoryError(
            f"{path} is marked {marks[0]!r}, version {marks[1]!r}; a minibatch that is not finite ({FORMAT}, "
            f"version {VERSION}) is needed."
        )
    about = parse_document(path, metadata.get("about", ""), RunDirectoryError)
    try:
        return _restore_minibatch(about, tensors)
    except CHANGED as changed:
        raise RunDirectoryError(
            f"{path} holds what whence does not write ({first_line(changed)}). Restore the file."
        ) from None


def _restore_minibatch(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SavedMinibatch:
    parts: dict[str, dict[str, Tensor]] = {"records": {}, "policy": {}}
    optimizer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter, _, key = rest.rpartition("/")
            optimizer.setdefault(parameter, {})[key] = tensor
        else:
            parts[kind][rest] = tensor
    return SavedMinibatch(
        number=int(about["number"]),
        message=str(about["message"]),
        parameter=None if about["parameter"] is None else str(about["parameter"]),
        culprits=tuple(map(int, about["culprits"])),
        records=parts["records"],
        policy=parts["policy"],
        optimizer=optimizer,
        settings=[dict(group) for group in about["settings"]],
    )
