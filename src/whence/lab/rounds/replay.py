"""A recorded round replayed step by step, as a differentiable function of the weight of each record.

Weights are counts, not proportions. With weights of 1 the result is the recorded one up to rounding; a weight of 0
leaves the record out of every recorded minibatch, and one of 2 counts it twice. A minibatch whose weights sum to 1 or
less uses raw advantages, as one of a single record does.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.core import (
    COLUMNS,
    NonFinite,
    Objective,
    Params,
    PolicyView,
    RecordBatch,
    Target,
    Tree,
    Unsupported,
    WhenceError,
    as_target,
    as_view,
    eval_mode,
    map_tree,
    preserve_buffers,
    preserve_rng_state,
    take,
    target_name,
    train_mode,
)
from whence.engines import check_scalar, differentiate
from whence.lab.rounds import optimizers
from whence.lab.rounds.optimizers import State, safe_sqrt
from whence.rounds import RoundRecording, check_collected, check_policy
from whence.scores import open_problem, raise_if_refused

MARGIN = 3
"""The factor by which the process may grow beyond the tensors of a step, which are all that is measured.

The allocator retains freed blocks that fit nothing later, and kernels allocate working memory.
"""


class Point(NamedTuple):
    """The parameters, flattened into one vector, and the optimiser's state, at one point of a round's optimisation.

    With one vector instead of many tensors a step is a few operations, whatever the number of layers.
    """

    params: Float[Tensor, "*trainings p"]
    state: State

    @property
    def nbytes(self) -> int:
        """The bytes that its tensors take."""
        return self.params.nbytes + sum(tensor.nbytes for tensor in self.state.values())

    def map(self, function: Callable[[Tensor], Tensor]) -> "Point":
        """Return the point with a function applied to each of its tensors."""
        return Point(function(self.params), {key: function(tensor) for key, tensor in self.state.items()})

    def expand(self, count: int) -> "Point":
        """Return `count` copies side by side along a new first axis, without copying memory."""
        return self.map(lambda tensor: tensor.expand(count, *tensor.shape))


@dataclass(frozen=True, eq=False)
class SteppedRound:
    """A recorded round, ready to be stepped through with a policy.

    Attributes:
        recording: the recorded round.
        view: the policy; its parameters are not read.
        shapes: the shapes of the parameters, by name, in their order in a point.
        start: the point at which the round begins.
        records: all records, on the policy's device.
        inputs: the policy's inputs for all records.
        objective: returns one value per record, for records whose advantages are normalised already.
    """

    recording: RoundRecording
    view: PolicyView
    shapes: Mapping[str, torch.Size]
    start: Point
    records: RecordBatch
    inputs: Tree
    objective: Objective

    def __len__(self) -> int:
        return len(self.recording.steps)

    def unflatten(self, params: Float[Tensor, "*trainings p"]) -> dict[str, Tensor]:
        """Return a point's parameters by name, each with the trainings first."""
        parts = params.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        leading = params.shape[:-1]
        return {
            name: part.view(*leading, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " p"]:
        """Return tensors with the parameters' names and shapes as one vector, in the order of a point."""
        return torch.cat([tensors[name].flatten() for name in self.shapes])

    def minibatch(self, number: int) -> "Minibatch":
        """Return the records of a step, numbered from 0."""
        return self.minibatch_at(self.recording.steps[number].to(self.records.log_probs.device))

    def minibatch_at(self, positions: Int[Tensor, " b"]) -> "Minibatch":
        """Return the records at these positions, under `vmap` too."""
        records = self.records.with_columns(take(self.records.columns, positions))
        return Minibatch(positions, records, take(self.inputs, positions))

    def reduce_to_largest_step(self) -> "SteppedRound":
        """Return a round with only the step that has the most records, to measure what any step takes at most."""
        largest = max(self.recording.steps, key=len)
        return replace(self, recording=replace(self.recording, minibatches=[largest], epochs=[0], stopped=False))


class Minibatch(NamedTuple):
    """The records of one step: their positions, columns and inputs."""

    positions: Int[Tensor, " b"]
    records: RecordBatch
    inputs: Tree


def open_round(policy: object, recording: RoundRecording, *, dtype: torch.dtype | None = None) -> SteppedRound:
    """Return a round to step through with the policy that was trained, or one built like it.

    `dtype` is that of parameters and records; None: the recorded one.

    Raises:
        Unsupported: the optimiser cannot be replayed step by step, the kind of policy is unknown, its parameters have
            several dtypes and `dtype` is None or hooks that change their gradients, it mixes records, or it has
            dropout.
        NonFinite: the round began with parameters that are not finite.
        WhenceError: the recording is of another policy: by names, shapes, or log-probs or values of its records.
    """
    optimizers.check_optimizer(recording.optimizer)
    recorded_view = as_view(policy)
    if (view := recorded_view if dtype is None else recorded_view.cast(dtype)) is None:
        raise WhenceError(
            f"A {type(recorded_view.module).__name__} cannot be read in {dtype}: it has buffers or frozen parameters "
            "of another dtype, or a custom view. Pass dtype=None."
        )
    with open_problem(policy, recording.records, targets=[]) as problem:  # it refuses policies that mix records
        if problem.summed is not None:
            raise Unsupported(
                "A hook on a parameter changes its gradient, and a round's steps are computed again without such "
                "hooks. Score by the snapshot, or leave the parameter out of the optimiser."
            )
    trainable = view.parameters()
    check_policy(view, trainable, recording)
    device = next(iter(trainable.values())).device

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    params = {name: place(recording.start[name]) for name in trainable}
    for name, param in params.items():
        if not bool(torch.isfinite(param).all()):
            raise NonFinite(
                f"Round {recording.number} began with `{name}` not finite: training had diverged before it. Take an "
                "earlier round."
            )
    if len(dtypes := {p.dtype for p in params.values()}) > 1:
        raise Unsupported(
            f"The policy's parameters have the dtypes {', '.join(sorted(str(one)[6:] for one in dtypes))}, and a round "
            "is replayed in one. Pass dtype=torch.float32 where the function takes it, or train a policy of one."
        )
    columns = map_tree(place, recording.records.columns)
    records = recording.records.with_columns(columns)
    check_collected(view, params, records, recording.number)
    _check_modes(view, params, records)
    inputs = map_tree(lambda tensor: place(tensor.detach()), view.prepare(records))
    state = optimizers.initial_state(recording.optimizer, params)
    start = Point(torch.cat([p.flatten() for p in params.values()]), state)
    shapes = {name: p.shape for name, p in params.items()}
    return SteppedRound(recording, view, shapes, start, records, inputs, recording.update.objective())


def _check_modes(view: PolicyView, params: Params, records: RecordBatch) -> None:
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


def step(round: SteppedRound, point: Point, minibatch: Minibatch, weights: Float[Tensor, " b"]) -> Point:
    """Return the point after one step on weighted records (see `minibatch_loss`).

    A minibatch whose weights are all 0 is no step. Differentiable in point and weights, under `vmap` too.
    """
    gradient = torch.func.grad(lambda p: minibatch_loss(round, round.unflatten(p), minibatch, weights))(point.params)
    clipped = gradient * clip_factor(gradient, round.recording.update.max_grad_norm)
    params, state = optimizers.step(round.recording.optimizer, point.params, clipped, point.state)
    weighted = weights.sum() > 0
    return Point(
        torch.where(weighted, params, point.params),
        {key: torch.where(weighted, tensor, point.state[key]) for key, tensor in state.items()},
    )


def pull_back(
    round: SteppedRound, point: Point, minibatch: Minibatch, weights: Float[Tensor, " b"], adjoint: Point
) -> tuple[Point, Float[Tensor, " b"]]:
    """Return the derivatives by the point before a step and by its weights, from the one by the point after it."""
    pull = torch.func.vjp(lambda p, w: step(round, p, minibatch, w), point, weights)[1]
    pulled: tuple[Point, Tensor] = pull(adjoint)
    return pulled


def minibatch_loss(
    round: SteppedRound, params: Params, minibatch: Minibatch, weights: Float[Tensor, " b"]
) -> Float[Tensor, ""]:
    """Return the minibatch's loss with weighted records, `-sum(w l) / sum(w)`.

    Advantages are normalised by the weighted mean `sum(w a) / sum(w)` and variance
    `sum(w (a - mean)^2) / (sum(w) - 1)`, as a minibatch without the records of weight 0 would be.
    """
    total = weights.sum()  # 1 instead of 0, so that the quotient is differentiable there
    return -(weights * objective_values(round, params, minibatch, weights)).sum() / torch.where(total > 0, total, 1.0)


def objective_values(
    round: SteppedRound, params: Params, minibatch: Minibatch, weights: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Return the objective of each record of a minibatch, whose advantages are normalised with the weights."""
    records = minibatch.records
    if round.recording.update.normalize_advantage:
        records = records.with_columns({"advantages": normalise_advantages(records.advantages, weights)})
    columns = getattr(round.objective, "reads", COLUMNS)
    return round.objective(round.view.only(columns, params, minibatch.inputs), records)


def normalise_advantages(advantages: Float[Tensor, " b"], weights: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return advantages less their weighted mean, over their weighted standard deviation (Bessel's correction).

    If the weights sum to 1 or less, return the advantages unchanged: one record has no standard deviation, and SB3
    leaves its advantage as it is.
    """
    total = weights.sum()
    mean = (weights * advantages).sum() / torch.where(total > 0, total, 1.0)
    enough = total > 1
    degrees_of_freedom = torch.where(enough, total - 1, 1.0)
    deviation = safe_sqrt((weights * (advantages - mean) ** 2).sum() / degrees_of_freedom)
    return torch.where(enough, (advantages - mean) / (deviation + 1e-8), advantages)


def clip_factor(gradient: Float[Tensor, " p"], max_norm: float) -> Float[Tensor, ""]:
    """Return what torch's `clip_grad_norm_` multiplies gradients by."""
    squares = gradient.square().sum()
    if math.isinf(max_norm):  # otherwise the derivative would be 0 times infinity
        return torch.ones_like(squares)
    return (max_norm / (safe_sqrt(squares) + 1e-6)).clamp(max=1.0)


def iterate_points(round: SteppedRound) -> Iterator[Point]:
    """Yield the point before each step, and the one after the last."""
    point = round.start
    yield point
    for number in range(len(round)):
        minibatch = round.minibatch(number)
        point = step(round, point, minibatch, torch.ones_like(minibatch.records.log_probs))
        yield point


def check_weights(
    weights: Float[Tensor, "*trainings n"], round: SteppedRound, *, reshuffled: bool = False
) -> Float[Tensor, "*trainings n"]:
    """Return the weights of one training or of several in the round's dtype and on its device.

    `reshuffled` trainings leave the recorded minibatches, so that records that a rule dropped count as well.

    Raises:
        WhenceError: a weight is negative or not finite, or a training has fewer than two weights above 0.
    """
    weights = weights.to(round.records.log_probs)
    if not bool((weights >= 0).all()) or not bool(torch.isfinite(weights).all()):
        raise WhenceError(
            "A weight is negative or not finite; weights are counts of a record: 0 (left out), 1 (as it was), 0.5, 2."
        )
    counted = weights if reshuffled else weights[..., round.recording.trained.to(weights.device)]
    if len(round) > 0 and (least := int((counted > 0).sum(dim=-1).min())) < 2:
        among = "" if reshuffled else " that the round trained on"
        raise WhenceError(
            f"A training keeps {least} of {counted.shape[-1]} records{among}, fewer than two, and the advantage of a "
            "single record cannot be normalised: give at least two of them a weight above 0."
        )
    return weights


def raise_on_divergence(round: SteppedRound) -> AbstractContextManager[None]:
    """Raise `NonFinite` if one of torch's distributions refuses the outputs of a diverged policy."""
    return raise_if_refused(f"Training round {round.recording.number}", _REMEDY)


_REMEDY = "Take a round with a smaller learning rate, or one whose gradients are clipped."


def check_finite(params: Float[Tensor, "*trainings p"], round: SteppedRound) -> None:
    """Refuse parameters that are not finite after training; `NonFinite` names the training and the parameter."""
    lost = ~torch.isfinite(params.detach()).reshape(-1, params.shape[-1])
    if not bool(lost.any()):
        return
    training = int(lost.any(dim=1).nonzero()[0])
    name = next(name for name, mask in round.unflatten(lost).items() if bool(mask[training].any()))
    raise NonFinite(
        f"Training round {round.recording.number} diverged: `{name}` is not finite after training {training}. {_REMEDY}"
    )


def check_target(target: Target, round: SteppedRound) -> Target:
    """Return a target that can be measured on a round's records; refuse one that returns no scalar tensor."""
    target = as_target(target)
    params = {name: p.detach().requires_grad_() for name, p in round.unflatten(round.start.params).items()}
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.enable_grad():
        check_scalar(target(round.view, params, round.records), target)
    return target


def target_gradient(round: SteppedRound, params: Float[Tensor, " p"], target: Target) -> Float[Tensor, " p"]:
    """Return a target's gradient, 0 in parameters that it does not depend on; refuse one that depends on none."""
    free = {name: p.detach().requires_grad_() for name, p in round.unflatten(params).items()}
    gradient = differentiate(target(round.view, free, round.records), free)
    if not gradient:
        raise WhenceError(f"The target {target_name(target)} depends on no parameter, so no record can move it.")
    return round.flatten({name: gradient.get(name, torch.zeros_like(p)) for name, p in free.items()})
