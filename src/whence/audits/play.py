"""Play before training: episodes of random and of held actions, and each action tried from the same states."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np

from whence.core import named_leaves, preserve_rng_state

HORIZON = 4
"""Steps that are compared after an action is tried: its effect may show later than at once."""

RESETS = 12
"""Resets without a seed, and with one: where starts are mostly distinct, so many are never equal by chance."""

_PLAYED = 0.6
"""The share of the budget for episodes; the rest is for trying actions from the same states."""

_REPEATED = 5
"""Episodes that are played twice."""

_STATES, _DEEPEST = 60, 64
"""States from which actions are tried at most, and the steps before them: all are played again for each action."""

_VALUES, _ACTIONS, _AXES = 9, 64, 16
"""What is tried at most: values of an axis, discrete actions, axes."""

_BYTES = 2**27

Make: TypeAlias = Callable[[], gym.Env[Any, Any]]
Outcome: TypeAlias = tuple[bytes, str]
"""A digest of an observation; what `step` returned besides."""


class PlayError(Exception):
    """The environment raised something; the text says where and what."""


@dataclass(eq=False)
class Episode:
    """An episode as it was played: T actions and results (reward, terminated, truncated), T + 1 observations."""

    seed: int | None
    is_held: bool = False
    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    results: list[tuple[Any, Any, Any]] = field(default_factory=list)
    infos: list[type] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def end(self) -> str:
        """Return "terminated", which comes before "truncated"; "" where it was broken off."""
        _, terminated, truncated = self.results[-1] if self.results else (0, False, False)
        return "terminated" if terminated else "truncated" if truncated else ""

    def list_outcomes(self, first: int = 0) -> list[Outcome]:
        """Return what is equal where episodes are, from an observation on."""
        observations, results = self.observations[first:], ["", *map(repr, self.results)][first:]
        return [*zip(map(digest, observations), results, strict=True)]


@dataclass(frozen=True)
class Axis:
    """A number of the action that can be set: its values, and its place; () where it is the whole action."""

    name: str
    values: Sequence[Any]
    place: tuple[int, ...] = ()

    def put(self, action: Any, value: Any) -> Any:
        """Return an action with this value."""
        if not self.place:
            return value
        action = np.array(action)
        action[self.place] = value
        return action


def digest(tree: Any) -> bytes:
    """Return a digest that is equal where all numbers of a tree are."""
    arrays = [np.asarray(leaf) for _, leaf in named_leaves(tree)]
    parts = [repr(each).encode() if each.dtype.hasobject else each.tobytes() for each in arrays]
    return blake2b(b"|".join(parts), digest_size=8).digest()


def list_axes(space: gym.Space[Any]) -> list[Axis]:
    """Return the numbers that an action of a space has, and values of each; nothing of a Dict or a Tuple."""
    if isinstance(space, gym.spaces.Discrete):
        return [Axis("", (space.start + _spread(int(space.n), _ACTIONS)).astype(space.dtype))]
    if not isinstance(space, gym.spaces.Box | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        return []
    places = [*np.ndindex(space.shape)]
    chosen = [places[i] for i in _spread(len(places), _AXES)]
    return [Axis("a" + "_".join(map(str, place)), _list_values(space, place), place) for place in chosen]


def _list_values(space: Any, place: tuple[int, ...]) -> Any:
    """Return values from bound to bound; of an infinite range, what a normal policy draws."""
    if isinstance(space, gym.spaces.MultiBinary):
        return np.arange(2)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.start[place] + _spread(int(space.nvec[place]), _VALUES)
    low, high = space.low[place], space.high[place]
    first = low if np.isfinite(low) else min(-3.0, high - 6.0)
    return np.linspace(first, high if np.isfinite(high) else max(3.0, first + 6.0), _VALUES)


def _spread(count: int, most: int) -> Any:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


class Play:
    """Plays an environment, or those that a function makes, within a budget of steps and seconds.

    Attributes:
        env: the environment.
        axes: the numbers of an action that are tried.
        episodes: of random and of held actions.
        starts: digests of first observations without a seed; `seeded`: of as many seeds.
        overwritten: how often what was handed out, or the action that was handed in, changed in a later step.
        error: what was raised.
        repeats: whether episodes repeat, of "used" and "fresh" objects, with " seeded" where the global generators were
            seeded alike; "cross": in a fresh object as in a used one.
        differs: where a repeated episode differs first, 0 for its first observation, and by how much.
        tries: by state, axis and value: the outcomes.
    """

    def __init__(
        self, env: gym.Env[Any, Any] | Make, steps: int, seconds: float, on_steps: Callable[[int, int], None]
    ) -> None:
        self._make = None if isinstance(env, gym.Env) else env
        self.env: gym.Env[Any, Any] = env if isinstance(env, gym.Env) else env()
        size = sum(np.asarray(leaf).nbytes for _, leaf in named_leaves(self.env.observation_space.sample()))
        self._budget, self._seconds, self._on_steps = min(steps, _BYTES // max(size, 1)), seconds, on_steps
        self._steps, self._start = 0, time.monotonic()
        self._returned: list[tuple[str, Any, bytes]] = []
        self._actions, self._rng = deepcopy(self.env.action_space), np.random.default_rng(0)
        self.axes = list_axes(self.env.action_space)
        self.episodes, self.starts, self.seeded, self.error = list[Episode](), list[bytes](), list[bytes](), ""
        self.overwritten, self.repeats, self.differs = Counter[str](), dict[str, bool](), (0, 0.0)
        self.tries: list[list[list[list[Outcome]]]] = []

    @property
    def random(self) -> list[Episode]:
        """The episodes of random actions."""
        return [episode for episode in self.episodes if not episode.is_held]

    def run(self) -> None:
        """Play random and held actions, some episodes twice, and each action from the same states.

        The global generators are as before afterwards, and an environment that was made here is closed.
        """
        self._actions.seed(0)
        with preserve_rng_state():
            try:
                self.seeded = [digest(self._reset(Episode(i)).observations[0]) for i in range(RESETS)]
                self.starts = [digest(self._reset(Episode(None)).observations[0]) for _ in range(RESETS)]
                self._play_episodes()
                self._repeat_episodes()
                if any(self.repeats.values()):
                    self._try_actions()
            except PlayError as error:
                self.error = str(error)
            if self._make is not None:
                self.env.close()
        self._on_steps(self._budget, self._budget)

    def _get_spent(self) -> float:
        return max(self._steps / self._budget, (time.monotonic() - self._start) / self._seconds)

    def _play_episodes(self) -> None:
        """Play episodes of random actions, and every third time of one that is held."""
        holds, number = self._list_holds(), 0
        while self._get_spent() < _PLAYED or number < _REPEATED:
            is_held = bool(holds) and number % 3 == 2
            # What is held has the seed of a random episode, so that the two differ only by actions.
            episode, most = self._reset(Episode(number - 2 * is_held, is_held)), self._budget // (40 if is_held else 10)
            self.episodes.append(episode)
            while not episode.end and len(episode) < most and (self._get_spent() < _PLAYED or len(episode) < HORIZON):
                self._step(episode, holds[number // 3 % len(holds)] if is_held else self._actions.sample())
            number += 1

    def _list_holds(self) -> list[Any]:
        """Return the discrete actions; of several axes, all at an end, then a random corner for each."""
        if not self.axes or not self.axes[0].place:
            return [action for axis in self.axes for action in axis.values]
        holds = []
        for end in (0, -1, *range(len(self.axes))):
            action = self._actions.sample()
            for axis in self.axes:
                action = axis.put(action, axis.values[end if end < 1 else -int(self._rng.integers(2))])
            holds.append(action)
        return holds

    def _repeat_episodes(self) -> None:
        """Play some twice, in this object and in fresh ones, with other global generators and with the same ones."""
        # One episode is played six times, with a sixth of the budget where steps or objects are slow.
        most = max(HORIZON, min(_DEEPEST, int(self._steps / self._get_spent() / 36)))
        for episode in self.random[:_REPEATED]:
            twins = dict[str, tuple[Episode, Episode]]()
            for kind in ("used", "fresh") if self._make is not None else ("used",):
                one, other, seeded = (
                    self._replay(episode.seed, episode.actions[:most], kind == "fresh", number) for number in (1, 2, 1)
                )
                twins |= {kind: (one, other), f"{kind} seeded": (one, seeded)}
            if "fresh" in twins:
                twins["cross"] = twins["used"][0], twins["fresh"][0]
            for name, pair in twins.items():
                same = pair[0].list_outcomes() == pair[1].list_outcomes()
                if not same and all(self.repeats.values()):
                    self.differs = _find_difference(*pair)
                self.repeats[name] = same and self.repeats.get(name, True)
            if self._get_spent() > _PLAYED + 0.1:
                return

    def _try_actions(self) -> None:
        """Try each value of each axis of the action, in states where play saw what is rare, then in any."""
        # Where only fresh objects repeat an episode, each is played in one.
        fresh = next(name for name, same in self.repeats.items() if same).startswith("fresh")
        states = [(episode, i) for episode in self.episodes for i in range(min(len(episode), _DEEPEST))]
        weights = np.array([1 / (i + 1) for _, i in states])  # deep ones cost more: all before them is played again
        sampled = self._rng.choice(len(states), min(_STATES, len(states)), replace=False, p=weights / weights.sum())
        for episode, i in [*self._list_rare_states(states), *(states[k] for k in sampled)][:_STATES]:
            after = [self._actions.sample() for _ in range(HORIZON - 1)]
            by_axis = list[list[list[Outcome]]]()
            for axis in self.axes:
                actions = [axis.put(episode.actions[i], value) for value in axis.values]
                plays = [self._replay(episode.seed, [*episode.actions[:i], each, *after], fresh) for each in actions]
                by_axis.append([one.list_outcomes(i + 1) for one in plays])
                if self._get_spent() >= 1:
                    return
            self.tries.append(by_axis)

    def _list_rare_states(self, states: Sequence[tuple[Episode, int]]) -> list[tuple[Episode, int]]:
        """Return states where what came of an action is rare, such as a pick-up; of discrete ones, two for each."""
        kinds = dict[tuple[str, str, bool], list[tuple[Episode, int]]]()
        is_whole = any(not axis.place for axis in self.axes)
        for episode, i in states:
            moved = digest(episode.observations[i]) != digest(episode.observations[i + 1])
            action = repr(episode.actions[i]) if is_whole else ""
            kinds.setdefault((action, repr(episode.results[i][0]), moved), []).append((episode, i))
        rare = sorted(kinds, key=lambda kind: len(kinds[kind]))
        chosen = [[kind for kind in rare if kind[0] == action][:2] for action in sorted({kind[0] for kind in rare})]
        return [kinds[kind][0] for each in (chosen if is_whole else [rare]) for kind in each][: _STATES // 2]

    def _replay(self, seed: int | None, actions: Sequence[Any], fresh: bool, generators: int = 1) -> Episode:
        """Play actions from a seed up to the end."""
        if self._make is not None and fresh:
            self.env.close()
            self.env = self._make()
        episode = self._reset(Episode(seed), generators)
        for action in actions:
            if not episode.end:
                self._step(episode, action)
        return episode

    def _reset(self, episode: Episode, generators: int = 1) -> Episode:
        if episode.seed is not None:
            random.seed(1000 * generators + episode.seed)
            np.random.seed(1000 * generators + episode.seed)  # noqa: NPY002 what some environments draw from
        self._returned = []
        self._note(episode, *self._call(f"reset(seed={episode.seed})", lambda: self.env.reset(seed=episode.seed)))
        return episode

    def _step(self, episode: Episode, action: Any) -> None:
        handed = deepcopy(action)
        observation, *result, info = self._call(f"step({action!r})", lambda: self.env.step(handed))
        watched = [*self._returned, ("the action", handed, digest(action))]
        self.overwritten.update(name for name, array, before in watched if digest(array) != before)
        episode.actions.append(action)
        episode.results.append((*deepcopy(result),))
        self._note(episode, observation, info)
        self._steps += 1
        self._on_steps(int(self._budget * min(self._get_spent(), 1)), self._budget)

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise PlayError(f"{what} raised {type(error).__name__}: {error}") from error

    def _note(self, episode: Episode, observation: Any, info: Any) -> None:
        episode.observations.append(deepcopy(observation))
        episode.infos.append(type(info))
        infos = info.items() if isinstance(info, dict) else ()
        arrays = {f"info[{name!r}]": each for name, each in infos if isinstance(each, np.ndarray)}
        parts = {"the observation": observation, **arrays}
        self._returned = [(name, each, digest(each)) for name, each in parts.items()]


def _find_difference(one: Episode, other: Episode) -> tuple[int, float]:
    """Return where two episodes differ first, and how far numbers do relatively; infinite if one ends."""
    pairs = [*zip(one.list_outcomes(), other.list_outcomes(), strict=False)]
    step = next((i for i, (first, second) in enumerate(pairs) if first != second), len(pairs))
    if step == len(pairs):
        return step, math.inf
    trees = [(episode.observations[step], episode.results[step - 1 : step]) for episode in (one, other)]
    leaves = zip(*map(named_leaves, trees), strict=True)
    gaps = [np.subtract(a, b, dtype=np.float64) / np.maximum(1, np.abs(a)) for (_, a), (_, b) in leaves]
    return step, max(float(np.abs(gap).max(initial=0.0)) for gap in gaps)
