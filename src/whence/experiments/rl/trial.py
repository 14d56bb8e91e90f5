"""A round's optimisation tried out before it happens: to score the whole of it, and to see whether selecting pays."""

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

Normalised: TypeAlias = Literal["minibatch", "buffer"]


def check_normalised(advantage_norm: str) -> None:
    """Refuse an unknown value of `advantage_norm`."""
    if advantage_norm not in get_args(Normalised):
        raise WhenceError(f"advantage_norm is {advantage_norm!r}.{suggest(str(advantage_norm), get_args(Normalised))}")


@contextmanager
def normalise_advantages(model: Any, among: Bool[Tensor, " n"] | None = None) -> Iterator[None]:
    """Let `train()` read advantages normalised once over the whole rollout, and not again in each minibatch.

    Where records are dropped, a minibatch has another mean advantage than the rollout, and normalising by it turns the
    sign of small advantages. Buffer and model have their own advantages and settings back on exit.

    Args:
        model: about to be trained.
        among: the records by whose mean and standard deviation all are normalised, in the order of the flattened
            buffer; None: all.
    """
    buffer, raw = model.rollout_buffer, model.rollout_buffer.advantages
    flat, own = buffer.generator_ready, model.normalize_advantage
    read = raw if among is None else (raw if flat else buffer.swap_and_flatten(raw))[among.numpy()]
    buffer.advantages = (raw - read.mean()) / (read.std(ddof=1) + 1e-8)
    model.normalize_advantage = False
    try:
        yield
    finally:
        model.normalize_advantage = own
        buffer.advantages = raw if buffer.generator_ready == flat else buffer.swap_and_flatten(raw)


@dataclass(frozen=True)
class Trial:
    """Trains a model on its rollout, before `train()` does, and leaves it as it is.

    Attributes:
        model: whose rollout is collected and not yet trained on.
        number: of the round.
        remaining: the progress remaining that schedules will read in the round.
        last: see `select_from`.
        advantage_norm: "minibatch" or "buffer"; see `normalise_advantages`.
    """

    model: Any
    number: int
    remaining: float
    last: Last = "keep"
    advantage_norm: Normalised = "minibatch"

    def train(
        self, records: RecordBatch, selection: Selection, among: Bool[Tensor, " n"] | None = None
    ) -> RoundRecording:
        """Let SB3's own `train()` train on a selection, and return what it did.

        Model, buffer and every random generator are as before afterwards, so that the round itself goes through the
        same orders.

        Args:
            records: the rollout.
            selection: of at least two records.
            among: the records that the round is of, all that are selected among them; the others have no say in it.
                None: all.

        Returns:
            The recording; its records have the advantages that `train()` read, which `advantage_norm="buffer"` had
            normalised.
        """
        model = self.model
        with preserve_model(model), preserve_rng_state():
            model._current_progress_remaining = self.remaining
            model._logger = Logger(None, [])
            model.rollout_buffer = _twin(model.rollout_buffer)
            recorder = Recorder(model)
            draws = None if among is None else int(among.sum())
            once = self.advantage_norm == "buffer"
            with (
                normalise_advantages(model, among) if once else nullcontext(),
                select_from(model.rollout_buffer, selection, draws=draws, last=self.last, recorder=recorder),
            ):
                model.train()
            return recorder.recording(self.number, records)


def _twin(buffer: RolloutBuffer) -> RolloutBuffer:
    """Return a buffer of the same arrays, which `train()` replaces by flattened ones."""
    twin = copy.copy(buffer)
    if isinstance(twin.observations, dict):
        twin.observations = dict(twin.observations)  # type: ignore[assignment]
    return twin


def restrict_recording(recording: RoundRecording, among: Bool[Tensor, " n"]) -> RoundRecording:
    """Return a round that trained on some of its records alone as one of these: the others are not in it.

    Args:
        recording: of the round.
        among: True for the records that are in it, all that were trained on among them.
    """
    place = among.cumsum(0) - 1
    minibatches = tuple(place[minibatch] for minibatch in recording.minibatches)
    return replace(recording, records=recording.records.take(among), minibatches=minibatches)


def held_out_gain(trial: Trial, records: RecordBatch, select: Callable[[Bool[Tensor, " n"]], Selection]) -> float:
    """Return by how much selecting beats training on everything, judged by episodes that neither saw.

    The episodes are dealt into two halves. The policy is trained on all records of one half, and, from the same
    parameters, on those that `select` keeps of it; the other half judges both by `mean(rho A)`, its advantages centred:
    an advantage that all its records share says nothing of a direction, but times the drift of the mean ratio it may
    outweigh what does. Then the halves change places. It costs two trainings of the round more, beside what `select`
    costs, and no step in the environment.

    Args:
        trial: of the round.
        records: the rollout.
        select: chooses among the records for which it is given True, by what these alone say; its selection has an
            entry for each of them.

    Returns:
        The difference of `mean(rho A)`, over all records; nan where a half is left with fewer than two records.
    """
    fold = assign_folds(records, 2)
    gain = 0.0
    for half in range(2):
        mine, others = fold == half, records.take(fold != half)
        if int(mine.sum()) < 2:
            return float("nan")
        chosen = _within(mine, select(mine))
        if int(chosen.keep.sum()) < 2:
            return float("nan")
        full, filtered = (
            _surrogate(trial.model, others, trial.train(records, one, mine).end)
            for one in (Selection.dropping(mine, "in the other half"), chosen)
        )
        gain += (filtered - full) * len(others) / len(records)
    return gain


def _within(mine: Tensor, chosen: Selection) -> Selection:
    """Return a selection from some of the records as one of all."""
    keep, weights = torch.zeros(len(mine), dtype=torch.bool), torch.zeros(len(mine), dtype=chosen.weights.dtype)
    keep[mine], weights[mine] = chosen.keep, chosen.weights
    return Selection(keep, weights, [None if kept else "held out or dropped" for kept in keep.tolist()])


def _surrogate(model: Any, records: RecordBatch, params: Mapping[str, Tensor]) -> float:
    """Return `mean(rho A)` with centred advantages."""
    view = as_view(model.policy)
    own = {name: params[name] for name in view.parameters()}
    with preserve_rng_state(), eval_mode(model.policy.modules()), torch.no_grad():
        found = view(own, view.prepare(records)).log_prob.cpu()
    return float(((found - records.log_probs).exp() * (records.advantages - records.advantages.mean())).mean())
