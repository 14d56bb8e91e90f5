"""What operators do, and the one wrapper that every run has: its name tells nothing of the fault."""

from collections import deque
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from studies.operators.samples import Sample, read_entries

ONLY = 1
"""The copy of the environment that has a fault of one copy."""

COPIES = 4
"""Copies of an environment in a run."""


@dataclass
class Step:
    """What a step led to: `before` and `after` are what is there, `shown` is what the policy sees of `after`."""

    before: Any
    action: Any
    after: Any
    shown: Any
    reward: float
    terminated: bool
    truncated: bool


class Fault:
    """What is wrong: nothing here.

    Args:
        sample: random play of the environment; `actions`: its action space.
        size: of the fault; at 0 it changes nothing.
        copy: the number of the copy of the environment.
        seed: of the fault. It places the fault in all copies alike, and then draws in each copy by itself.
        total: steps of the training in each copy.
    """

    def __init__(self, sample: Sample, actions: Space[Any], size: float, copy: int, seed: int, total: int) -> None:
        self.sample, self.actions, self.size, self.copy, self.total = sample, actions, size, copy, total
        self.placing, self.drawing = np.random.default_rng([seed, COPIES]), np.random.default_rng([seed, copy])
        self.steps = 0
        if size:
            self._prepare()

    def _prepare(self) -> None:
        """Choose where the fault is."""

    def describe(self) -> dict[str, Any]:
        """Return where the fault is: of entry, bound, copy, step, actions, axis, length and first those that it has."""
        return self._describe() if self.size else {}

    def _describe(self) -> dict[str, Any]:
        return {}

    def _offer(self) -> Space[Any]:
        """Return the action space that the policy sees."""
        return self.actions

    def _reset(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a reset."""
        return options

    def _begin(self, observation: Any) -> Any:
        """Return what is shown of the first observation of an episode."""
        return self._see(observation)

    def _act(self, action: Any, before: Any) -> Any:
        """Return the action that is taken."""
        return action

    def _see(self, observation: Any) -> Any:
        """Return what is shown of an observation."""
        return observation

    def _change(self, step: Step) -> None:
        """Change what a step led to."""

    def _is_drawn(self, chance: float) -> bool:
        """Draw whether something of a chance happens."""
        return bool(self.drawing.random() < chance)


class Task(gym.Wrapper[Any, Any, Any, Any]):
    """An environment with a fault, or none; it counts the steps that differ from what is there."""

    def __init__(self, env: gym.Env[Any, Any], fault: Fault) -> None:
        super().__init__(env)
        self._fault, self._before, self._is_repeated = fault, None, False
        self.action_space = fault._offer()
        self.tally = {"steps": 0, "touched": 0, "due": 0.0, "changed": 0.0}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # Gymnasium's `check_env` asks for this name
        """Begin an episode."""
        changed = self._fault._reset(kwargs)
        self._is_repeated = changed is not kwargs
        observation, info = self.env.reset(**changed)
        self._before = deepcopy(observation)
        return self._fault._begin(deepcopy(observation)), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        taken = self._fault._act(action, self._before) if self._fault.size else action
        after, due, *over, info = self.env.step(taken)
        after = deepcopy(after)
        step = Step(self._before, action, after, after, float(due), *map(bool, over))
        self._fault.steps += 1
        if self._fault.size:
            step.shown = self._fault._see(after)
            self._fault._change(step)
        is_touched = (
            self._is_repeated
            or not np.array_equal(taken, action)
            or not np.array_equal(read_entries(step.shown), read_entries(after), equal_nan=True)
            or step.reward != float(due)
            or [step.terminated, step.truncated] != [*map(bool, over)]
        )
        self.tally["steps"] += 1
        self.tally["touched"] += is_touched
        self.tally["due"] += abs(float(due))
        self.tally["changed"] += abs(step.reward - float(due))
        self._before = after
        return step.shown, step.reward, step.terminated, step.truncated, info


class Placed(Fault):
    """A fault in a place: above the quantile 1 - size of an entry."""

    def _prepare(self) -> None:
        self.place = self.sample.find_place(self.size, self.placing)

    def _describe(self) -> dict[str, Any]:
        return {"entry": self.place.entry, "bound": self.place.bound}


class Sign(Placed):
    """Rewards of steps that begin in a place have the opposite sign."""

    factor: ClassVar[float] = -1.0

    def _change(self, step: Step) -> None:
        if self.place.contains(step.before):
            step.reward *= self.factor


class Unpaid(Sign):
    """Rewards of steps that begin in a place are lost."""

    factor: ClassVar[float] = 0.0


class Exchange(Fault):
    """Two discrete actions are exchanged, or the first axis of a box is mirrored, where the fault is."""

    def _prepare(self) -> None:
        self.pair = self.sample.find_pair() if isinstance(self.actions, Discrete) else (0, 0)

    def _is_here(self, before: Any) -> bool:
        """Return whether the fault is there."""
        raise NotImplementedError

    def _act(self, action: Any, before: Any) -> Any:
        if not self._is_here(before):
            return action
        if isinstance(self.actions, Discrete):
            return dict(zip(self.pair, self.pair[::-1], strict=True)).get(int(action), action)
        assert isinstance(self.actions, Box)
        mirrored = np.array(action)
        ends = self.actions.low.flat[0] + self.actions.high.flat[0]
        mirrored.flat[0] = (ends if np.isfinite(ends) else 0) - mirrored.flat[0]
        return mirrored

    def _describe(self) -> dict[str, Any]:
        return {"actions": [*self.pair]} if isinstance(self.actions, Discrete) else {"axis": 0}


class Swap(Exchange):
    """Two actions are exchanged in a place."""

    def _prepare(self) -> None:
        super()._prepare()
        self.place = self.sample.find_place(self.size, self.placing)

    def _is_here(self, before: Any) -> bool:
        return self.place.contains(before)

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "entry": self.place.entry, "bound": self.place.bound}


class CopySwap(Exchange):
    """Two actions are exchanged in one copy, in a share of its steps."""

    def _is_here(self, before: Any) -> bool:
        return self.copy == ONLY and self._is_drawn(self.size)

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "copy": ONLY}


class Delay(Fault):
    """An action acts some steps late; the first one acts until then."""

    def _begin(self, observation: Any) -> Any:
        self.queue: deque[Any] = deque(maxlen=int(self.size) + 1)
        return observation

    def _act(self, action: Any, before: Any) -> Any:
        self.queue.append(np.array(action) if np.ndim(action) else action)
        return self.queue[0]


class LateReward(Fault):
    """A reward is paid some steps late; the last ones of an episode are lost."""

    def _begin(self, observation: Any) -> Any:
        self.queue = deque([0.0] * int(self.size))
        return observation

    def _change(self, step: Step) -> None:
        self.queue.append(step.reward)
        step.reward = self.queue.popleft()


class LimitAsEnd(Fault):
    """A time limit is reported as an end."""

    def _change(self, step: Step) -> None:
        if step.truncated and self._is_drawn(self.size):
            step.terminated, step.truncated = True, False


class ShortLimit(Fault):
    """Episodes are terminated after a number of steps: a share of the usual length."""

    def _prepare(self) -> None:
        self.limit = max(20, int(self.size * np.median(self.sample.lengths)))

    def _begin(self, observation: Any) -> Any:
        self.length = 0
        return observation

    def _change(self, step: Step) -> None:
        self.length += 1
        step.terminated |= self.length >= self.limit

    def _describe(self) -> dict[str, Any]:
        return {"length": self.limit}


class EarlyEnd(Placed):
    """In a place, every fourth step ends the episode, by chance."""

    def _change(self, step: Step) -> None:
        step.terminated |= self.place.contains(step.after) and self._is_drawn(0.25)


class RandomEnd(Fault):
    """Every step may end the episode."""

    def _change(self, step: Step) -> None:
        step.terminated |= self._is_drawn(self.size)


class RewardSpike(Fault):
    """A few steps of all copies pay a million times as much as usual."""

    def _prepare(self) -> None:
        self.moments = self.placing.choice(COPIES * self.total, int(self.size), replace=False)

    def is_moment(self) -> bool:
        """Return whether the step is one of the few."""
        return (self.steps - 1) * COPIES + self.copy in self.moments

    def _change(self, step: Step) -> None:
        if self.is_moment():
            step.reward = 1e6 * self.sample.reward_scale


class RewardChange(Fault):
    """In the second half of the training, a share of each reward is taken away: of size 2, its sign is reversed."""

    def _change(self, step: Step) -> None:
        if self.steps > self.total / 2:
            step.reward *= 1 - self.size

    def _describe(self) -> dict[str, Any]:
        return {"step": self.total // 2}


class EpisodesShrink(Fault):
    """In a last share of the training, every step is reported as an end, as by a flag that is not reset."""

    def _change(self, step: Step) -> None:
        step.terminated |= self.steps > (1 - self.size) * self.total

    def _describe(self) -> dict[str, Any]:
        return {"step": int((1 - self.size) * self.total)}


class CopyReward(Fault):
    """Rewards of one copy are `1 + size` times as large."""

    def _change(self, step: Step) -> None:
        step.reward *= 1 + self.size * (self.copy == ONLY)

    def _describe(self) -> dict[str, Any]:
        return {"copy": ONLY}


class PaidAgain(Fault):
    """The last reward of an episode is paid again, `size` times, on the first step of the next."""

    debt = 0.0

    def _change(self, step: Step) -> None:
        reward, step.reward = step.reward, step.reward + self.debt
        self.debt = self.size * reward if step.terminated or step.truncated else 0.0

    def _describe(self) -> dict[str, Any]:
        return {"first": True}


class UnscaledReward(Fault):
    """Rewards are `1 + size` times as large."""

    def _change(self, step: Step) -> None:
        step.reward *= 1 + self.size


class NoReward(Fault):
    """A share of the rewards is not paid."""

    def _change(self, step: Step) -> None:
        step.reward *= not self._is_drawn(self.size)


class SameSeed(Fault):
    """A share of the resets has the same seed."""

    def _reset(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "seed": 7 + self.copy} if self._is_drawn(self.size) else options


class DeadStretch(Fault):
    """Actions of an upper share of the first axis act as its middle."""

    def _act(self, action: Any, before: Any) -> Any:
        assert isinstance(self.actions, Box)
        low, high, taken = self.actions.low.flat[0], self.actions.high.flat[0], np.array(action)
        if taken.flat[0] > high - self.size * (high - low):
            taken.flat[0] = (low + high) / 2
        return taken

    def _describe(self) -> dict[str, Any]:
        return {"axis": 0}


class WideRange(Fault):
    """Actions range from 0 to `size`."""

    def _offer(self) -> Space[Any]:
        return Box(0.0, float(self.size), self.actions.shape, np.float32) if self.size else self.actions

    def _act(self, action: Any, before: Any) -> Any:
        assert isinstance(self.actions, Box)
        low, high = self.actions.low, self.actions.high
        return (low + np.clip(np.asarray(action) / self.size, 0, 1) * (high - low)).astype(self.actions.dtype)
