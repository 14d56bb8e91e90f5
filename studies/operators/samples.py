"""What random play shows of an environment: where a fault can be placed, and how large its numbers usually are."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray

from whence.core import write_atomically

STEPS = 3_000
"""Steps of random play."""

MOST_ENTRIES = 64
"""Entries of an observation that are looked at: those of an image that vary most."""

CONTINUOUS = 20
"""Values of an entry from which on it counts as continuous."""

Numbers = NDArray[np.float64]


class Place(NamedTuple):
    """Where a fault is: observations of which one entry is above a bound. `share` of random play is there."""

    entry: int
    bound: float
    share: float

    def contains(self, observation: Any) -> bool:
        """Return whether an observation is in the place."""
        return bool(read_entries(observation)[self.entry] > self.bound)


@dataclass(frozen=True)
class Sample:
    """Random play of an environment, n steps.

    Attributes:
        columns: (k,), the numbers of the entries that are looked at, of the flattened observation.
        before, after: (n, k), those entries before and after each step.
        actions: (n,), discrete actions; zeros where they are not discrete.
        rewards: (n,).
        lengths: of the episodes, at least one; the last one is not whole where it is the only one.
        truncates: whether an episode was truncated; `varies`: whether first observations differ.
    """

    columns: NDArray[np.int64]
    before: Numbers
    after: Numbers
    actions: NDArray[np.int64]
    rewards: Numbers
    lengths: NDArray[np.int64]
    truncates: NDArray[np.bool_]
    varies: NDArray[np.bool_]

    @property
    def spreads(self) -> Numbers:
        """The standard deviation of each entry, (k,)."""
        return self.before.std(axis=0)

    @property
    def reward_scale(self) -> float:
        """The mean size of a reward that is not 0; 1 if all are 0."""
        sizes = np.abs(self.rewards[self.rewards != 0])
        return float(sizes.mean()) if len(sizes) else 1.0

    def find_place(self, size: float, rng: np.random.Generator) -> Place:
        """Return a place of about a share `size` of the steps, that has its part of the rewards too, if there is one.

        A continuous entry is preferred, and of several that are as good one is drawn.
        """
        paid, best = np.abs(self.rewards), []
        for column in range(len(self.columns)):
            values = self.before[:, column]
            levels = np.unique(values)
            if len(levels) < 2:
                continue
            is_continuous = len(levels) >= CONTINUOUS
            for bound in [np.quantile(values, 1 - size)] if is_continuous else levels[:-1]:
                mask = values > bound
                lacks_rewards = paid[mask].sum() < size / 2 * paid.sum()
                cost = abs(np.log((mask.mean() + 1e-6) / size)) + 0.2 * (not is_continuous) + lacks_rewards
                best.append((round(float(cost), 1), rng.random(), column, float(bound), float(mask.mean())))
        if not best:
            raise ValueError("No entry of the observation varies in random play: there is no place for a fault.")
        _, _, column, bound, share = min(best)
        return Place(int(self.columns[column]), bound, share)

    def list_entries(self, rng: np.random.Generator) -> list[int]:
        """Return the columns that vary: continuous ones in an order that is drawn, others by how much they vary."""
        counts, spreads = np.array([len(np.unique(column)) for column in self.before.T]), self.spreads
        ranks = {
            column: (0, rng.random()) if counts[column] >= CONTINUOUS else (1, -spreads[column])
            for column in np.flatnonzero(counts > 1).tolist()
        }
        return sorted(ranks, key=lambda column: ranks[column])

    def find_pair(self) -> tuple[int, int]:
        """Return the two discrete actions that move the observation most differently."""
        changes = (self.after - self.before) / np.maximum(self.spreads, 1e-9)
        numbers = np.unique(self.actions)
        means = np.stack([changes[self.actions == number].mean(axis=0) for number in numbers])
        gaps = np.linalg.norm(means[:, None] - means[None], axis=-1)
        first, second = np.unravel_index(gaps.argmax(), gaps.shape)
        first, second = (first, second) if first != second else (0, len(numbers) - 1)
        return int(numbers[first]), int(numbers[second])


def read_entries(observation: Any) -> Numbers:
    """Return an observation as one new vector: a dict's parts in the order of their names."""
    if isinstance(observation, Mapping):
        return np.concatenate([read_entries(observation[name]) for name in sorted(observation)])
    return np.array(observation, dtype=np.float64).ravel()


def write_entries(observation: Any, entries: Numbers) -> Any:
    """Return an observation of the same form that has the entries of a vector, as far as its type can hold them."""
    if isinstance(observation, Mapping):
        names, parts = sorted(observation), {}
        for name in names:
            size = np.size(observation[name])
            parts[name], entries = write_entries(observation[name], entries[:size]), entries[size:]
        return {name: parts[name] for name in observation}
    old = np.asarray(observation)
    if old.dtype.kind in "iub":
        limits = (0, 1) if old.dtype.kind == "b" else (np.iinfo(old.dtype).min, np.iinfo(old.dtype).max)
        entries = np.clip(np.round(entries), *limits)
    new = entries.reshape(old.shape).astype(old.dtype)
    return new if isinstance(observation, np.ndarray) else old.dtype.type(new)


def play(env: gym.Env[Any, Any], seed: int = 0, steps: int = STEPS) -> Sample:
    """Return a sample of random play."""
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    entries = read_entries(observation)
    rows, lengths, firsts, truncates, length = [], [], [entries], False, 0
    for _ in range(steps):
        action = env.action_space.sample()
        observation, reward, terminated, truncated, _ = env.step(action)
        after = read_entries(observation)
        rows.append((entries, after, float(reward), int(action) if isinstance(env.action_space, Discrete) else 0))
        entries, length, truncates = after, length + 1, truncates or bool(truncated)
        if terminated or truncated:
            lengths.append(length)
            entries, length = read_entries(env.reset()[0]), 0
            firsts.append(entries)
    before, after = (np.stack([row[place] for row in rows]) for place in (0, 1))
    columns = np.sort(np.argsort(-before.std(axis=0), kind="stable")[:MOST_ENTRIES])
    return Sample(
        columns,
        *(before[:, columns], after[:, columns]),
        np.array([row[3] for row in rows], dtype=np.int64),
        np.array([row[2] for row in rows]),
        np.array(lengths or [steps], dtype=np.int64),
        *(np.array(truncates), np.array(any((first != firsts[0]).any() for first in firsts))),
    )


def read_sample(file: Path, env: gym.Env[Any, Any]) -> Sample:
    """Return the sample of a file; if it is not there, play and write it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        sample = play(env)
        with write_atomically(file) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, **{field.name: getattr(sample, field.name) for field in fields(Sample)})
    with np.load(file) as arrays:
        return Sample(**{field.name: arrays[field.name] for field in fields(Sample)})


def list_traits(env: gym.Env[Any, Any], sample: Sample) -> set[str]:
    """Return what an operator may need of an environment, as words.

    "vector": the observation has entries; "floats": and the entries are floats; "place": an entry varies; "two": two
    actions or an axis can be told apart; "box": actions are a box, "bounded": a bounded one; "limit": episodes are
    truncated; "starts": episodes begin differently.
    """
    spaces = env.observation_space
    parts = list(spaces.spaces.values()) if isinstance(spaces, Dict) else [spaces]
    actions = env.action_space
    traits = {
        "vector": all(isinstance(part, Box) for part in parts),
        "floats": all(isinstance(part, Box) and np.dtype(part.dtype).kind == "f" for part in parts),
        "place": bool((sample.spreads > 0).any()),
        "two": isinstance(actions, Box) or (isinstance(actions, Discrete) and actions.n > 1),
        "box": isinstance(actions, Box),
        "bounded": isinstance(actions, Box) and actions.is_bounded(),
        "limit": bool(sample.truncates),
        "starts": bool(sample.varies),
    }
    return {name for name, holds in traits.items() if holds}
