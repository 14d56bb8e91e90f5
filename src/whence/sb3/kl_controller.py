"""Steer the learning rate, so that a round takes the policy a given divergence."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback

from whence.errors import Unsupported, WhenceError, suggest
from whence.sb3.buffer import check_model, replace_samples
from whence.sb3.divergence import measure_divergence, measure_sample_divergence
from whence.sb3.steering import SteeredSchedule, apply_schedule, note_schedule
from whence.sb3.train_hook import cancel_hook, claim_place, wrap_next_train

log = logging.getLogger("whence")

Every: TypeAlias = Literal["round", "minibatch"]

FACTOR = 1.5
"""The most by which the learning rate changes at a time."""

RANGE = 10.0
"""By default, the highest learning rate over the one at the start, and that over the lowest.

A round may stay below the target whatever the rate, as where PPO's clip holds it, and then the rate goes to its bound.
"""

PATIENCE = 5
"""Rounds in a row at the highest rate and below the target, after which the log says that it is out of reach."""


class KLController(BaseCallback):
    """Steer the learning rate, so that each round takes the policy a given KL divergence.

    After each round's training the divergence of the policy from the one that collected the rollout is measured, over
    all of its records. The learning rate is multiplied by the root of target over divergence, by at most 1.5 and at
    least 1/1.5: a divergence grows about with the square of the step. The rate is the model's own, or its schedule's,
    times a scale; the scale is all that changes.

    With `every="minibatch"` the rate is steered before each step of the optimiser, as rsl_rl does: divided by 1.5 if
    the policy has diverged by more than twice the target on the step's minibatch, multiplied by 1.5 if by less than
    half. That costs a forward pass a step.

    The model's logger gets `train/kl`, the round's divergence in nats; SB3 logs `train/learning_rate`. The steered rate
    is in place during `train()` only; `model.lr_schedule` is the model's own before and after. With an
    `InfluenceCallback`, in any order, `train/kl` is in the run's metrics, and an interrupted training goes on at the
    scale where it was.

    Args:
        target_kl: the divergence to reach each round, in nats. Of 0.005, 0.01, 0.02 and 0.04, 0.02 and 0.04 trained
            best in nine environments, and with `IIF` 0.04; a fixed rate of 1e-3 trained PPO as well
            (results/practice). SB3's own `target_kl` ends a round early instead.
        every: when the rate is steered: after each "round", or before each "minibatch".
        bounds: the lowest and the highest learning rate, or for a schedule those at its start; None: a tenth and ten
            times the model's.
        verbose: 1 prints a line a round.

    Raises:
        WhenceError: an argument is not what it should be; or, raised by `learn()`, the model's learning rate is outside
            the bounds.
        Unsupported: raised by `learn()` for a model whose rounds whence cannot read.

    Sources: Schulman et al. (2017), §4 (adaptive KL); rsl_rl, `PPO.update`.

    Example:
        ```
        model = PPO("MlpPolicy", "LunarLander-v3")
        model.learn(200_000, callback=KLController(target_kl=0.02))
        ```
    """

    def __init__(
        self,
        target_kl: float = 0.02,
        *,
        every: Every = "round",
        bounds: tuple[float, float] | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        if not _is_positive(target_kl):
            raise WhenceError(f"target_kl is {target_kl!r}; a finite number above 0 is needed, such as 0.02.")
        if every not in get_args(Every):
            raise WhenceError(f"every is {every!r}.{suggest(str(every), get_args(Every))}")
        self.target_kl, self.every = float(target_kl), every
        self.bounds = None if bounds is None else _check_bounds(bounds)
        self._schedule: SteeredSchedule | None = None
        self._steered: Any = None  # the model of the schedule
        self._short_of_target: list[float] = []

    def __repr__(self) -> str:
        every = "" if self.every == "round" else f", every={self.every!r}"
        bounds = "" if self.bounds is None else f", bounds={self.bounds!r}"
        return f"KLController({self.target_kl!r}{every}{bounds})"

    @property
    def scale(self) -> float:
        """The learning rate over that of the model's schedule; the next `learn()` of the same model starts with it."""
        return 1.0 if self._schedule is None else self._schedule.scale

    def _init_callback(self) -> None:
        cancel_hook(self.model)  # left by a learn() that was interrupted between a rollout and its training
        check_model(self.model)
        claim_place(self.model, "control")
        if self.every == "minibatch":
            _check_several_steps(self.model)
        base = self.model.lr_schedule
        start = float(base(1.0))
        if not start > 0:
            raise WhenceError(f"The model's learning rate is {start:g} at the start; KLController needs one above 0.")
        low, high = (start / RANGE, start * RANGE) if self.bounds is None else self.bounds
        if not low <= start <= high:
            raise WhenceError(
                f"The model's learning rate is {start:g}, and the bounds of KLController are {low:g} and {high:g}. "
                "Pass bounds=(lowest, highest) around it."
            )
        if self._steered is not self.model:
            self._short_of_target = []
        lowest, highest = low / start, high / start
        # The user may have changed the model's rate since its last learn(), to one that the scale takes out of bounds.
        scale = min(max(self.scale, lowest), highest) if self._steered is self.model else 1.0
        self._schedule = SteeredSchedule(base, scale, (lowest, highest), repr(self))
        self._steered = self.model
        note_schedule(self.model, self._schedule)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        wrap_next_train(self.model, self._train_round, "control")

    def _train_round(self, train: Callable[[], None]) -> None:
        """Train a round, measure its divergence and, with `every="round"`, steer the rate of the next."""
        assert self._schedule is not None
        model: Any = self.model
        updates = model._n_updates
        with (
            apply_schedule(model, self._schedule),
            self._steer_steps() if self.every == "minibatch" else nullcontext(),
        ):
            train()
        if model._n_updates == updates:
            return  # the round was skipped
        kl = measure_divergence(model)
        self.logger.record("train/kl", kl)
        rate = self._schedule(model._current_progress_remaining)
        self._note_out_of_reach(kl, rate)
        if self.every == "round":
            self._multiply_rate(choose_factor(kl, self.target_kl))
        if self.verbose:
            print(f"whence: a round at the learning rate {rate:.3g} took the policy {kl:.3g} nats")

    @contextmanager
    def _steer_steps(self) -> Iterator[None]:
        """Steer the rate before each step of `train()` but the first, when the policy is still where it was."""
        model: Any = self.model
        optimizer, get_samples = model.policy.optimizer, model.rollout_buffer._get_samples
        samples: Any = None
        steps = 0

        def note_samples(indices: Any, *rest: Any, **options: Any) -> Any:
            nonlocal samples
            samples = get_samples(indices, *rest, **options)
            return samples

        def steer(*_: Any) -> None:
            nonlocal steps
            steps += 1
            if steps > 1:
                kl = measure_sample_divergence(model, samples)
                rate = self._multiply_rate(choose_step_factor(kl, self.target_kl))
                for group in optimizer.param_groups:
                    group["lr"] = rate

        handle = optimizer.register_step_pre_hook(steer)
        try:
            with replace_samples(model.rollout_buffer, note_samples):
                yield
        finally:
            handle.remove()

    def _note_out_of_reach(self, kl: float, rate: float) -> None:
        """Log, once, that the highest rate does not reach the target."""
        assert self._schedule is not None
        if len(self._short_of_target) == PATIENCE:
            return
        is_short = self._schedule.is_highest and kl < self.target_kl / FACTOR
        self._short_of_target = [*self._short_of_target, kl] if is_short else []
        if len(self._short_of_target) == PATIENCE:
            mean = sum(self._short_of_target) / PATIENCE
            log.warning(
                "The learning rate is at its bound of %.3g, and a round still takes the policy less than target_kl=%g: "
                "%.2g nats, the mean of %d rounds. If PPO's clip holds it there, a higher rate does not help: choose a "
                "target of about %.1g. Else raise `bounds`.",
                *(rate, self.target_kl, mean, PATIENCE, mean),
            )

    def _multiply_rate(self, factor: float) -> float:
        """Multiply the learning rate by a factor, within the bounds; return the new one."""
        assert self._schedule is not None
        progress = self.model._current_progress_remaining
        if self._schedule(progress) > 0:  # at the end of a schedule the rate is 0, and a divergence of 0 says nothing
            self._schedule.multiply(factor)
        return self._schedule(progress)


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


def _check_bounds(bounds: Any) -> tuple[float, float]:
    """Return two learning rates as numbers of Python, so that a run knows them again however they were given."""
    rates = tuple(bounds) if isinstance(bounds, Iterable) else ()
    if len(rates) != 2 or not all(map(_is_positive, rates)) or rates[0] > rates[1]:
        raise WhenceError(f"bounds are {bounds!r}; two finite numbers above 0 are needed, the lower one first.")
    return float(rates[0]), float(rates[1])


def _check_several_steps(model: Any) -> None:
    """Refuse a model that takes one step a round: it has not moved when the rate would be steered.

    Raises:
        Unsupported: it does.
    """
    records = model.n_steps * model.n_envs
    steps = 1 if isinstance(model, A2C) else model.n_epochs * math.ceil(records / model.batch_size)
    if steps == 1:
        raise Unsupported(
            f"This {type(model).__name__} takes one step a round, so no step can follow the divergence of the one "
            "before. Steer after each round: KLController(every='round')."
        )


def choose_factor(kl: float, target: float) -> float:
    """Return the factor of the learning rate after a round: sqrt(target / kl), within 1/1.5 and 1.5.

    Args:
        kl: the round's divergence, 0 or more; NaN counts as infinite.
        target: the divergence to reach.
    """
    if not kl > 0:
        return 1 / FACTOR if math.isnan(kl) else FACTOR
    return min(max(math.sqrt(target / kl), 1 / FACTOR), FACTOR)


def choose_step_factor(kl: float, target: float) -> float:
    """Return the factor of the learning rate before a step (rsl_rl's rule).

    Args:
        kl: the divergence on the step's minibatch; NaN counts as infinite.
        target: the divergence to reach.
    """
    if kl > 2 * target or math.isnan(kl):
        return 1 / FACTOR
    return FACTOR if kl < target / 2 else 1.0
