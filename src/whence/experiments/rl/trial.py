"""Trials of a round before it is trained: to score the whole round, and to judge whether selecting pays."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from torch import Tensor

from whence.crossfitting import assign_folds
from whence.errors import WhenceError, suggest
from whence.guards import eval_mode, preserve_rng_state
from whence.policies import as_view
from whence.records import RecordBatch
from whence.rounds import RoundRecording
from whence.sb3.buffer import Last, select_from
from whence.sb3.recorder import Recorder
from whence.sb3.state import preserve_model
from whence.selection import Selection

AdvantageNormalisation: TypeAlias = Literal["minibatch", "buffer"]


def check_advantage_norm(advantage_norm: str) -> None:
    """Refuse an unknown value of `advantage_norm`."""
    if advantage_norm not in get_args(AdvantageNormalisation):
        raise WhenceError(
            f"advantage_norm is {advantage_norm!r}.{suggest(str(advantage_norm), get_args(AdvantageNormalisation))}"
        )


@contextmanager
def normalise_advantages(model: Any, among: Bool[Tensor, " n"] | None = None) -> Iterator[None]:
    """Let `train()` read advantages that are normalised once over the rollout, and not again in each minibatch.

    If records are dropped, a minibatch's mean advantage differs from the rollout's, and normalising by it turns the
    sign of small advantages. On exit the buffer has its raw advantages back, and the model its setting.

    Args:
        model: the model that is about to be trained.
        among: (n,), in the order of the flattened buffer: True for the records whose mean and standard deviation
            normalise all advantages; None: all records.
    """
    buffer, raw = model.rollout_buffer, model.rollout_buffer.advantages
    was_flat, setting = buffer.generator_ready, model.normalize_advantage
    sample = raw if among is None else (raw if was_flat else buffer.swap_and_flatten(raw))[among.numpy()]
    buffer.advantages = (raw - sample.mean()) / (sample.std(ddof=1) + 1e-8)
    model.normalize_advantage = False
    try:
        yield
    finally:
        model.normalize_advantage = setting
        buffer.advantages = raw if buffer.generator_ready == was_flat else buffer.swap_and_flatten(raw)


@dataclass(frozen=True)
class Trial:
    """A way to train a model on its rollout and undo it, before the round itself is trained.

    Attributes:
        model: has collected its rollout and not yet trained on it.
        number: the round's number, from 1.
        remaining: the progress remaining that schedules will read in the round, from 1 to 0.
        last: see `select_from`.
        advantage_norm: "minibatch" or "buffer"; see `normalise_advantages`.
    """

    model: Any
    number: int
    remaining: float
    last: Last = "keep"
    advantage_norm: AdvantageNormalisation = "minibatch"

    def train(
        self, records: RecordBatch, selection: Selection, among: Bool[Tensor, " n"] | None = None
    ) -> RoundRecording:
        """Let SB3's own `train()` train on a selection, undo it, and return what it did.

        Model, buffer and every random generator are restored, so that the round itself visits records in the same
        order.

        Args:
            records: the rollout, n records.
            selection: one entry per record; keeps at least two.
            among: (n,) True for the records that the trial consists of; the selection keeps none of the others, and
                they do not influence it. None: all.

        Returns:
            The recording. Its records have the advantages that `train()` read: normalised ones with
            `advantage_norm="buffer"`.
        """
        model = self.model
        with preserve_model(model), preserve_rng_state():
            model._current_progress_remaining = self.remaining
            model._logger = Logger(None, [])
            model.rollout_buffer = _copy_buffer(model.rollout_buffer)
            recorder = Recorder(model)
            draws = None if among is None else int(among.sum())
            with (
                normalise_advantages(model, among) if self.advantage_norm == "buffer" else nullcontext(),
                select_from(model.rollout_buffer, selection, draws=draws, last=self.last, recorder=recorder),
            ):
                model.train()
            return recorder.make_recording(self.number, records)


def _copy_buffer(buffer: RolloutBuffer) -> RolloutBuffer:
    """Return a buffer of the same arrays. `train()` replaces those of the copy by flattened ones."""
    twin = copy.copy(buffer)
    if isinstance(twin.observations, dict):
        twin.observations = dict(twin.observations)  # type: ignore[assignment]
    return twin


def restrict_recording(recording: RoundRecording, among: Bool[Tensor, " n"]) -> RoundRecording:
    """Return the recording of a round without records that it did not train on.

    Args:
        recording: the recording of n records.
        among: (n,) True for the records to keep, which include all that were trained on.
    """
    positions = among.cumsum(0) - 1
    minibatches = tuple(positions[minibatch] for minibatch in recording.minibatches)
    return replace(recording, records=recording.records.take(among), minibatches=minibatches)


def held_out_gain(trial: Trial, records: RecordBatch, select: Callable[[Bool[Tensor, " n"]], Selection]) -> float:
    """Return by how much selecting beats training on everything, judged by episodes that neither trained on.

    The episodes are split into two halves. The policy is trained on all records of one half and, from the same
    parameters, on those that `select` keeps of it. The other half judges both by `mean(rho A)` with centred advantages:
    an advantage that all records share gives no direction, but times the drift of the mean ratio it can outweigh what
    does. Then the halves swap. This costs two trainings of the round and what `select` costs, and no environment step.

    Args:
        trial: a trial of the round.
        records: the rollout, n records.
        select: called with a mask (n,); selects among the records where it is True, from these alone. Its selection has
            one entry for each of them.

    Returns:
        The difference of `mean(rho A)`, over all records; NaN if a half keeps fewer than two records.
    """
    fold = assign_folds(records, 2)
    gain = 0.0
    for half in range(2):
        training, judges = fold == half, records.take(fold != half)
        if int(training.sum()) < 2:
            return float("nan")
        chosen = _expand_selection(training, select(training))
        if int(chosen.keep.sum()) < 2:
            return float("nan")
        everything = Selection.dropping(training, "in the other half")
        with_all, with_chosen = (
            _centred_surrogate(trial.model, judges, trial.train(records, selection, training).end)
            for selection in (everything, chosen)
        )
        gain += (with_chosen - with_all) * len(judges) / len(records)
    return gain


def _expand_selection(among: Bool[Tensor, " n"], selection: Selection) -> Selection:
    """Return a selection among some of n records as a selection among all n."""
    keep = torch.zeros(len(among), dtype=torch.bool)
    weights = torch.zeros(len(among), dtype=selection.weights.dtype)
    keep[among], weights[among] = selection.keep, selection.weights
    return Selection(keep, weights, [None if kept else "held out or dropped" for kept in keep.tolist()])


def _centred_surrogate(model: Any, records: RecordBatch, params: Mapping[str, Tensor]) -> float:
    """Return `mean(rho A)` at the given parameters, with advantages less their mean."""
    view = as_view(model.policy)
    policy_params = {name: params[name] for name in view.parameters()}
    with preserve_rng_state(), eval_mode(model.policy.modules()), torch.no_grad():
        log_probs = view(policy_params, view.prepare(records)).log_prob.cpu()
    return float(((log_probs - records.log_probs).exp() * (records.advantages - records.advantages.mean())).mean())
