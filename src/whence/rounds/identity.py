"""Whether a policy is the one that a recording is of: by names and shapes, and by what it says of the records."""

from collections.abc import Mapping

import torch
from torch import Tensor

from whence.errors import Unsupported, WhenceError
from whence.guards import eval_mode, preserve_buffers, preserve_rng_state, train_mode
from whence.policies import Params, PolicyView, compute_outputs
from whence.records import RecordBatch, check_one_per_record
from whence.rounds.recording import RoundRecording

SAME = 1e-3
"""Up to how far apart what one policy says of records may be on average; see `compare_outputs` for the units.

Float32 rounds to 1e-6 or so; convolutions on a GPU, which round to 10 bits, differ from a CPU's by up to 1e-3 on
average, and by several times that on single records.
"""


def check_policy(view: PolicyView, own: Mapping[str, Tensor], recording: RoundRecording) -> None:
    """Refuse a policy whose parameters and buffers are not those of a recording.

    Args:
        view: of the policy.
        own: its trainable parameters.
        recording: of a round.

    Raises:
        WhenceError: a name or a shape differs, or what is not trained has another value.
    """
    here = {**dict(view.module.named_parameters()), **dict(view.module.named_buffers())}
    if differing := sorted(here.keys() ^ recording.start.keys()):
        raise WhenceError(f"The recording is of another policy: one of them alone has `{differing[0]}`.")
    for name, tensor in here.items():
        recorded = recording.start[name]
        if tensor.shape != recorded.shape:
            raise WhenceError(
                f"The recording is of another policy: `{name}` has shape {tuple(recorded.shape)} there and "
                f"{tuple(tensor.shape)} here. Pass the policy that was trained, or one built with the same settings."
            )
        if name not in own and not torch.equal(tensor.cpu(), recorded.to(tensor.dtype).cpu()):
            raise WhenceError(
                f"`{name}` is not trained and differs from the recording, so the round would not be the same. Load "
                "the recorded policy into this one first."
            )


def check_collected(view: PolicyView, params: Params, records: RecordBatch, number: int) -> None:
    """Refuse a policy that is not the one that collected a round, whatever its parameters are called.

    Args:
        view: of the policy.
        params: that the round began with.
        records: of the round.
        number: of the round.

    Raises:
        WhenceError: its log-probs or its values are not those of the records.
    """
    for name, apart in compare_outputs(view, params, records).items():
        if not apart <= SAME:
            raise WhenceError(
                f"The recording is of another policy: at the parameters that round {number} began with, this policy's "
                f"{name} of the records are {apart:.2g} from the recorded ones on average, though all names and shapes "
                "are the same. Build it with the settings of the run that was recorded, such as activation_fn, "
                "normalize_images and use of action masks."
            )


def check_modes(view: PolicyView, params: Params, records: RecordBatch) -> None:
    """Refuse a policy that says something else in train mode, in which SB3 trains, than in eval mode, in which it acts.

    Args:
        view: of the policy.
        params: of the policy.
        records: of the round; a few are looked at.

    Raises:
        Unsupported: what it says in the two modes differs, as by dropout or running statistics.
    """
    spread = torch.linspace(0, len(records) - 1, min(64, len(records))).long()  # over all environments
    inputs = view.prepare(records.take(spread))
    with preserve_rng_state(), preserve_buffers(view.module), torch.no_grad():
        with eval_mode(list(view.module.modules())):
            acting = view(params, inputs)
        with train_mode(view.module):
            training = view(params, inputs)
    for name, one, other in zip(acting._fields, acting, training, strict=True):
        if one is not None and other is not None and not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
            raise Unsupported(
                f"In train mode the policy's {name} is another than in eval mode, as with dropout or with a layer that "
                "keeps running statistics: what it was trained by was another thing at each step, and cannot be "
                "stepped through again. Train without such layers or score by the snapshot, whence.attribute; a "
                "recorded round SB3's own train() replays: whence.sb3.replay_round."
            )


def compare_outputs(view: PolicyView, params: Params, records: RecordBatch, at_once: int = 2048) -> dict[str, float]:
    """Return how far what a policy says of records is from what was recorded, on average.

    Modes and generators are left as they are.

    Args:
        view: of the policy, on the device of the parameters.
        params: of the policy.
        records: whose log-probs are those of the policy that collected them.
        at_once: records that are read in one pass.

    Returns:
        `log-probs` in nats; and `values`, where policy and records have them, in units of the recorded ones' mean size
        where that is above 1.
    """
    totals: dict[str, float] = {}
    with preserve_rng_state(), eval_mode(list(view.module.modules())), torch.no_grad():
        for first in range(0, len(records), at_once):
            part = records.take(slice(first, first + at_once))
            read = compute_outputs(view, {"log_prob", "value"}, params, view.prepare(part))
            pairs = {"log-probs": (check_one_per_record("log_prob", read.log_prob), part.log_probs)}
            if read.value is not None and part.values is not None:
                pairs["values"] = (check_one_per_record("value", read.value), part.values)
            for name, (found, recorded) in pairs.items():
                apart = (found.double() - recorded.to(found.device).double()).abs().sum()
                totals[name] = totals.get(name, 0.0) + float(apart)
    size = 1.0 if records.values is None else max(1.0, float(records.values.double().abs().mean()))
    return {name: total / len(records) / (size if name == "values" else 1.0) for name, total in totals.items()}
