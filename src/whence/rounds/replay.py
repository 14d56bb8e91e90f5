"""A recorded round once more, as a function of how much each record weighs."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.errors import NonFinite, Unsupported, WhenceError
from whence.guards import eval_mode, preserve_rng_state
from whence.objectives import Objective
from whence.policies import COLUMNS, ModuleView, Outputs, Params, PolicyView, as_view, check_batch_norm, compute_outputs
from whence.records import RecordBatch, Tree, map_tree, take
from whence.rounds import optimizers
from whence.rounds.identity import check_collected, check_modes, check_policy
from whence.rounds.optimizers import State
from whence.rounds.recording import RoundRecording
from whence.targets import Target, as_target, target_name

MARGIN = 3
"""How much larger the process may grow than the tensors of a step, which is all that is measured of it.

The allocator keeps freed blocks that fit nothing later, and kernels take working memory of their own.
"""


class Point(NamedTuple):
    """Where a round's optimisation stands: the parameters, laid end to end, and the optimiser's state of them.

    One vector instead of many tensors: a step is then a few operations, whatever the number of layers.
    """

    params: Float[Tensor, "*trainings p"]
    state: State

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        return self.params.nbytes + sum(tensor.nbytes for tensor in self.state.values())

    def map(self, function: Callable[[Tensor], Tensor]) -> "Point":
        """Return the point with a function applied to each of its tensors."""
        return Point(function(self.params), {key: function(tensor) for key, tensor in self.state.items()})

    def spread(self, count: int) -> "Point":
        """Return so many of it side by side, first axis, in no more memory."""
        return self.map(lambda tensor: tensor.expand(count, *tensor.shape))


@dataclass(frozen=True, eq=False)
class SteppedRound:
    """A recorded round, ready to be stepped through with a policy.

    Attributes:
        recording: what was done.
        view: the policy; its own parameters are not read.
        shapes: of the parameters, by name, in the order in which a point has them.
        start: where the round begins.
        records: all records, on the policy's device.
        inputs: what the policy is evaluated on, of all records.
        objective: one value per record, of records whose advantages are normalised already.
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

    def named(self, params: Float[Tensor, "*trainings p"]) -> dict[str, Tensor]:
        """Return a point's parameters by name, each with the trainings first."""
        parts = params.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        leading = params.shape[:-1]
        return {n: part.view(*leading, *shape) for (n, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def laid_out(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " p"]:
        """Return tensors of the parameters' names and shapes as a point has them."""
        return torch.cat([tensors[name].flatten() for name in self.shapes])

    def minibatch(self, number: int) -> "Minibatch":
        """Return the records of a step, from 0."""
        return self.at(self.recording.steps[number].to(self.records.log_probs.device))

    def at(self, positions: Int[Tensor, " b"]) -> "Minibatch":
        """Return the records at these positions, under `vmap` too."""
        records = self.records.with_columns(take(self.records.columns, positions))
        return Minibatch(positions, records, take(self.inputs, positions))

    def of_one_step(self) -> "SteppedRound":
        """Return a round of the step with the most records alone: what is measured on it holds for the others."""
        largest = max(self.recording.steps, key=len)
        return replace(self, recording=replace(self.recording, minibatches=[largest], epochs=[0], stopped=False))


class Minibatch(NamedTuple):
    """The records of one step: their positions, columns and inputs."""

    positions: Int[Tensor, " b"]
    records: RecordBatch
    inputs: Tree


def open_round(policy: object, recording: RoundRecording, *, dtype: torch.dtype | None = None) -> SteppedRound:
    """Return a round to step through.

    Args:
        policy: the policy that was trained, or one built like it.
        recording: of the round.
        dtype: of parameters and records; None: the recorded ones.

    Raises:
        Unsupported: an optimiser that cannot be replayed step by step, a policy of no known kind, parameters of several
            dtypes where none is given, BatchNorm, or dropout.
        NonFinite: the round began with parameters that are not.
        WhenceError: the recording is of another policy: by names, shapes, or log-probs or values of its records.
    """
    optimizers.check_optimizer(recording.optimizer)
    view = as_view(policy) if dtype is None else _in_dtype(policy, dtype)
    check_batch_norm(dict(view.module.named_modules()))
    own = view.parameters()
    check_policy(view, own, recording)
    device = next(iter(own.values())).device

    def placed(tensor: Tensor) -> Tensor:
        return _cast_to(dtype)(tensor.to(device))

    params = {name: placed(recording.start[name]) for name in own}
    for name, own_start in params.items():
        if not bool(torch.isfinite(own_start).all()):
            raise NonFinite(
                f"Round {recording.number} began with `{name}` not finite: training had diverged before it. Take an "
                "earlier round."
            )
    if len(dtypes := {p.dtype for p in params.values()}) > 1:
        raise Unsupported(
            f"The policy's parameters have the dtypes {', '.join(sorted(str(one)[6:] for one in dtypes))}, and a round "
            "is stepped through in one. Pass dtype=torch.float32 where the function takes it, or train a policy of one."
        )
    columns = map_tree(placed, recording.records.columns)
    records = recording.records.with_columns(columns)
    check_collected(view, params, records, recording.number)
    check_modes(view, params, records)
    inputs = map_tree(lambda tensor: placed(tensor.detach()), view.prepare(records))
    start = Point(torch.cat([p.flatten() for p in params.values()]), optimizers.begin(recording.optimizer, params))
    shapes = {name: p.shape for name, p in params.items()}
    return SteppedRound(recording, view, shapes, start, records, inputs, recording.update.objective())


def _in_dtype(policy: object, dtype: torch.dtype) -> PolicyView:
    """Return a view whose inputs have another dtype; it is called with parameters of that dtype."""
    view = as_view(policy)
    fixed = [*view.module.buffers(), *(p for p in view.module.parameters() if not p.requires_grad)]
    if not isinstance(view, ModuleView) or any(tensor.is_floating_point() for tensor in fixed):
        raise WhenceError(
            f"A {type(view.module).__name__} cannot be read in {dtype}: it has buffers or frozen parameters of its own "
            "dtype, or a view of its own kind. Pass dtype=None."
        )
    return ModuleView(view.module, view._outputs, lambda records: map_tree(_cast_to(dtype), view.prepare(records)))


def _cast_to(dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def step(round: SteppedRound, point: Point, minibatch: Minibatch, weights: Float[Tensor, " b"]) -> Point:
    """Return where one step leads in which records weigh so much (see `loss`).

    A minibatch that weighs nothing is not stepped on. Differentiable in point and weights, under `vmap` too.
    """
    gradient = torch.func.grad(lambda free: loss(round, round.named(free), minibatch, weights))(point.params)
    clipped = gradient * clip_factor(gradient, round.recording.update.max_grad_norm)
    params, state = optimizers.step(round.recording.optimizer, point.params, clipped, point.state)
    there = weights.sum() > 0
    return Point(
        torch.where(there, params, point.params),
        {key: torch.where(there, tensor, point.state[key]) for key, tensor in state.items()},
    )


def loss(round: SteppedRound, params: Params, minibatch: Minibatch, weights: Float[Tensor, " b"]) -> Float[Tensor, ""]:
    """Return the minibatch's loss with weighted records, `-sum(w l) / sum(w)`.

    Advantages are normalised by the weighted mean `sum(w a) / sum(w)` and variance
    `sum(w (a - mean)^2) / (sum(w) - 1)`, as a minibatch without the records of weight 0 would be.
    """
    return -(weights * values(round, params, minibatch, weights)).sum() / _positive(weights.sum())


def values(
    round: SteppedRound, params: Params, minibatch: Minibatch, weights: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """Return what the round raises of each record of a minibatch, whose advantages are normalised with the weights."""
    records = minibatch.records
    if round.recording.update.normalize_advantage:
        records = records.with_columns({"advantages": normalised(records.advantages, weights)})
    return round.objective(_outputs(round, params, minibatch.inputs), records)


def normalised(advantages: Float[Tensor, " b"], weights: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return advantages less their weighted mean, over their weighted standard deviation (Bessel's correction).

    Where less than two records are there, as they are: one has no standard deviation, and SB3 leaves it so.
    """
    total = weights.sum()
    mean = (weights * advantages).sum() / _positive(total)
    enough = total > 1
    spread = torch.where(enough, total - 1, 1.0)
    variance = (weights * (advantages - mean) ** 2).sum() / spread
    positive = variance > 0
    deviation = torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)
    return torch.where(enough, (advantages - mean) / (deviation + 1e-8), advantages)


def clip_factor(gradient: Float[Tensor, " p"], most: float) -> Float[Tensor, ""]:
    """Return what torch's `clip_grad_norm_` multiplies gradients by."""
    squares = gradient.square().sum()
    if math.isinf(most):  # else the derivative would be 0 times infinity
        return torch.ones_like(squares)
    positive = squares > 0
    norm = torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
    return (most / (norm + 1e-6)).clamp(max=1.0)


def points(round: SteppedRound, weights: Float[Tensor, " n"] | None = None) -> Iterator[Point]:
    """Yield where the optimisation stands before each step, and after the last.

    Args:
        round: from `opened`.
        weights: of the records; None: 1 each.
    """
    weights = torch.ones_like(round.records.log_probs) if weights is None else weights
    point = round.start
    yield point
    for number in range(len(round)):
        minibatch = round.minibatch(number)
        point = step(round, point, minibatch, weights[minibatch.positions])
        yield point


def replay(
    policy: object,
    recording: RoundRecording,
    *,
    weights: Float[Tensor, " n"] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return the trained parameters after a recorded round in which records weigh `weights`.

    With weights of 1 these are the recorded ones up to rounding; a weight of 0 leaves the record out of every minibatch
    of the recorded schedule, and one of 2 is the record twice: weights are counts, not proportions, and a minibatch
    whose records come to no more than one in all goes by raw advantages, as one of a single record does. The policy and
    every random generator are left as they are.

    Args:
        policy: the policy that was trained, or one built like it.
        recording: of the round.
        weights: (n,) of the records, at least 0; None: 1 each. The result is differentiable in them.
        dtype: to compute in; None: the recorded one.

    Raises:
        NonFinite: training diverged.
        WhenceError: weights of another shape, negative, or above 0 for fewer than two records that the round trained
            on; or see `opened`.
    """
    round = open_round(policy, recording, dtype=dtype)
    if weights is not None:
        if weights.shape != (len(round.records),):
            raise WhenceError(
                f"weights have shape {tuple(weights.shape)}; one for each of the {len(round.records)} records is "
                "needed. Several trainings at once: whence.counterfactual.retrain."
            )
        weights = check_weights(weights, round)
    modules = list(round.view.module.modules())
    with preserve_rng_state(), eval_mode(modules), torch.inference_mode(False), raise_on_divergence(round):
        for point in points(round, weights):
            last = point
    check_finite(last.params, round)
    return round.named(last.params)


def check_weights(
    weights: Float[Tensor, "*trainings n"], round: SteppedRound, *, anew: bool = False
) -> Float[Tensor, "*trainings n"]:
    """Return weights of one training or of several in the round's dtype and on its device.

    Args:
        weights: of all records.
        round: that is trained.
        anew: whether minibatches are others than the recorded ones, so that what a rule dropped counts as well.

    Raises:
        WhenceError: one is negative or not finite, or a training has fewer than two above 0.
    """
    weights = weights.to(round.records.log_probs)
    if not bool((weights >= 0).all()) or not bool(torch.isfinite(weights).all()):
        raise WhenceError(
            "A weight is negative or not finite; weights are counts of a record: 0 (left out), 1 (as it was), 0.5, 2."
        )
    counted = weights if anew else weights[..., round.recording.trained.to(weights.device)]
    if len(round) > 0 and (least := int((counted > 0).sum(dim=-1).min())) < 2:
        raise WhenceError(
            f"A training keeps {least} of {counted.shape[-1]} records{'' if anew else ' that the round trained on'}, "
            "fewer than two, and one has no advantage to be normalised by another: give at least two of them a weight "
            "above 0."
        )
    return weights


@contextmanager
def raise_on_divergence(round: SteppedRound) -> Iterator[None]:
    """Raise `NonFinite` where a distribution of torch refuses what a diverged policy says."""
    try:
        yield
    except ValueError as refused:
        if isinstance(refused, WhenceError) or "to satisfy the constraint" not in str(refused):
            raise
        raise NonFinite(
            f"Training round {round.recording.number} diverged: what the policy says is no distribution any more. Take "
            "a round of a smaller learning rate, or one whose gradients are clipped."
        ) from refused


def check_finite(params: Float[Tensor, "*trainings p"], round: SteppedRound) -> None:
    """Refuse parameters that training has made something else than numbers.

    Raises:
        NonFinite: names the training and the parameter.
    """
    lost = ~torch.isfinite(params.detach()).reshape(-1, params.shape[-1])
    if not bool(lost.any()):
        return
    training = int(lost.any(dim=1).nonzero()[0])
    name = next(name for name, own in round.named(lost).items() if bool(own[training].any()))
    raise NonFinite(
        f"Training round {round.recording.number} diverged: after training {training} of those asked for `{name}` is "
        "not finite. Take a round of a smaller learning rate, or one whose gradients are clipped."
    )


def check_target(target: Target, round: SteppedRound) -> Target:
    """Return a target that can be measured on the records of a round.

    Raises:
        WhenceError: it cannot be called as one, does not return a scalar tensor, or meets None where the recording
            lacks columns.
    """
    target = as_target(target)
    records = round.records
    free = {name: p.detach().requires_grad_() for name, p in round.named(round.start.params).items()}
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.enable_grad():
        try:
            value = target(round.view, free, records)
        except Exception as wrong:
            lacking = [field.name for field in fields(RecordBatch) if getattr(records, field.name) is None]
            if isinstance(wrong, WhenceError) or "NoneType" not in str(wrong) or not lacking:
                raise
            raise WhenceError(
                f"The target {target_name(target)} fails on the recording of round {round.recording.number} with "
                f"{type(wrong).__name__}: {wrong}. The recording lacks {', '.join(lacking)}: take a target that reads "
                "none of these, or record a round that has them. If it reads none, look at what it makes of the "
                "policy's outputs."
            ) from wrong
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise WhenceError(f"The target {target_name(target)} returned {got}; a scalar tensor is needed.")
    return target


def _outputs(round: SteppedRound, params: Params, inputs: Tree) -> Outputs:
    return compute_outputs(round.view, getattr(round.objective, "reads", COLUMNS), params, inputs)


def _positive(total: Tensor) -> Tensor:
    return torch.where(total > 0, total, 1.0)
