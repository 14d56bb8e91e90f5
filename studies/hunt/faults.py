"""The faults that the hunt plants, and the one wrapper that all runs have: its name tells nothing of the fault."""

from types import SimpleNamespace as Step
from typing import Any

import gymnasium as gym
import numpy as np


class Fault:
    """What is wrong: nothing here. The number of the environment and the fault's options are attributes.

    A fault changes the action that is taken, what is observed, or what a step led to: a `Step` of `room` (the
    environment inside all wrappers), `before`, `action`, `after`, `reward`, `terminated` and `truncated`.
    """

    def __init__(self, copy: int = 0, **options: Any) -> None:
        self.copy, self.steps = copy, 0
        vars(self).update(options)

    def _act(self, action: Any) -> Any:
        return action

    def _see(self, observation: Any) -> Any:
        return observation

    def _change(self, step: Step) -> None:
        pass


class Task(gym.Wrapper[Any, Any, Any, Any]):
    """An environment with a fault, or none."""

    def __init__(self, env: gym.Env[Any, Any], fault: Fault) -> None:
        super().__init__(env)
        self._fault, self._last = fault, None

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(**options)
        self._last = self._fault._see(observation)
        return self._last, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        after, reward, *over, info = self.env.step(self._fault._act(action))
        step = Step(room=self.unwrapped, before=self._last, action=action, after=self._fault._see(after))
        step.reward, step.terminated, step.truncated = float(reward), *map(bool, over)
        self._fault.steps += 1
        self._fault._change(step)
        self._last = step.after
        return step.after, step.reward, step.terminated, step.truncated, info


class WrongSign(Fault):
    """One action's reward has the wrong sign where a feature, or the number of the state, is below a bound."""

    def _change(self, step: Step) -> None:
        place = step.before if self.feature is None else step.before[self.feature]
        if step.action == self.action and place < self.below:
            step.reward = -step.reward


class Stale(Fault):
    """Every second step shows the observation before."""

    def _change(self, step: Step) -> None:
        step.after = step.after if self.steps % 2 else step.before


class Frozen(Fault):
    """A feature is always 0."""

    def _see(self, observation: Any) -> Any:
        return np.where(np.arange(len(observation)) == self.feature, np.float32(0), observation)


class Swapped(Fault):
    """Two actions are taken for each other in one environment; of continuous actions, two axes."""

    def _act(self, action: Any) -> Any:
        swaps = dict(zip(self.actions, self.actions[::-1], strict=True)) if self.copy == self.only else {}
        if np.ndim(action):
            return action[[swaps.get(axis, axis) for axis in range(len(action))]]
        return swaps.get(int(action), action)


class LimitAsEnd(Fault):
    """A time limit is reported as an end."""

    def _change(self, step: Step) -> None:
        step.terminated, step.truncated = step.terminated or step.truncated, False


class EarlyEnd(Fault):
    """Episodes end where a feature is above a bound."""

    def _change(self, step: Step) -> None:
        step.terminated |= bool(step.after[self.feature] > self.above)


class Scaled(Fault):
    """One environment's rewards are a hundred times as large."""

    def _change(self, step: Step) -> None:
        step.reward *= 100 if self.copy == self.only else 1


class PaidTwice(Fault):
    """The last reward of an episode is paid again with the first of the next."""

    _debt = 0.0

    def _change(self, step: Step) -> None:
        reward, step.reward = step.reward, step.reward + self._debt
        self._debt = reward if step.terminated or step.truncated else 0.0


class Checkpoint(Fault):
    """A cell on the way pays at each step that is spent there, instead of once."""

    def _change(self, step: Step) -> None:
        step.reward += 0.2 * (tuple(step.room.agent_pos) == (3, 3))


class Lost(Fault):
    """From some step on, one action's gain is lost."""

    def _change(self, step: Step) -> None:
        if step.action == self.action and self.steps > self.after:
            step.reward = min(step.reward, 0.0)
