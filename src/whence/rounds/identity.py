"""The identity of a recording's policy: names, shapes, and outputs on the records."""

from collections.abc import Mapping

import torch
from torch import Tensor

from whence.core import (
    Params,
    PolicyView,
    RecordBatch,
    Unsupported,
    WhenceError,
    check_one_per_record,
    eval_mode,
    preserve_buffers,
    preserve_rng_state,
    train_mode,
)
from whence.rounds.recording import RoundRecording

SAME = 1e-3
"""How far apart outputs of the same policy may be on average; see `compare_outputs` for the units.

Float32 rounds to 1e-6 or so. Convolutions on a GPU, which round to 10 bits, differ from a CPU's by up to 1e-3 on
average, and by several times that on single records.
"""


def check_policy(view: PolicyView, trainable: Mapping[str, Tensor], recording: RoundRecording) -> None:
    """Refuse a policy whose parameters and buffers are not those of a recording.

    A tensor that is not among the `trainable` parameters has to have the recorded value.
    """
    tensors = {**dict(view.module.named_parameters()), **dict(view.module.named_buffers())}
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


def check_modes(view: PolicyView, params: Params, records: RecordBatch) -> None:
    """Refuse a policy whose outputs differ between train mode, in which SB3 trains, and eval mode, in which it acts.

    Up to 64 of the records are read. Dropout, for example, or running statistics make outputs differ.
    """
    positions = torch.linspace(0, len(records) - 1, min(64, len(records))).long()  # over all environments
    inputs = view.prepare(records.take(positions))
    with preserve_rng_state(), preserve_buffers(view.module.modules()), torch.no_grad():
        with eval_mode(list(view.module.modules())):
            acting = view(params, inputs)
        with train_mode(view.module):
            training = view(params, inputs)
    for name, one, other in zip(acting._fields, acting, training, strict=True):
        if one is not None and other is not None and not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
            raise Unsupported(
                f"The policy's {name} differs between train mode and eval mode, as with dropout or with a layer that "
                "keeps running statistics. SB3 trained it in train mode, so its steps cannot be repeated in eval mode. "
                "Train without such layers, or score by the snapshot (whence.attribute). SB3's own train() can repeat "
                "the round: whence.sb3.replay_round."
            )


def compare_outputs(view: PolicyView, params: Params, records: RecordBatch, at_once: int = 2048) -> dict[str, float]:
    """Return how far a policy's outputs on records are from the recorded ones, on average.

    Modes and generators are left as they are; `at_once` records are read in one pass.

    Returns:
        `log-probs` in nats. If both the policy and the records have values, also `values`, divided by the mean size of
        the recorded values if that is above 1.
    """
    totals: dict[str, float] = {}
    with preserve_rng_state(), eval_mode(list(view.module.modules())), torch.no_grad():
        for first in range(0, len(records), at_once):
            part = records.take(slice(first, first + at_once))
            outputs = view.only({"log_prob", "value"}, params, view.prepare(part))
            pairs = {"log-probs": (check_one_per_record("log_prob", outputs.log_prob), part.log_probs)}
            if outputs.value is not None and part.values is not None:
                pairs["values"] = (check_one_per_record("value", outputs.value), part.values)
            for name, (computed, recorded) in pairs.items():
                difference = (computed.double() - recorded.to(computed.device).double()).abs().sum()
                totals[name] = totals.get(name, 0.0) + float(difference)
    size = 1.0 if records.values is None else max(1.0, float(records.values.double().abs().mean()))
    return {name: total / len(records) / (size if name == "values" else 1.0) for name, total in totals.items()}
