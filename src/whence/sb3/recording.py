"""The recorder of any loop: what environments return, step by step, becomes the rounds of a run directory."""

import atexit
import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import polars as pl
from numpy.typing import NDArray
from torch import Tensor

from whence.core import Unsupported, WhenceError, add_observations, describe, make_series, named_leaves, to_numpy
from whence.runs import Checkpoint, EpisodeCounter, RunRecorder, find_last_round
from whence.sb3.episodes import InfoArrays, InfoNumbers, digest_observation, digest_rows, warn_of_infos
from whence.sb3.models import describe_space, read_versions

_STORED = 4096
"""Bytes of an observation that a table holds at most, see `add_observations`; of larger ones it holds digests."""

log = logging.getLogger("whence")

_OPEN = dict[Path, "Recording"]()
"""The recordings of this process that are not closed, by their directories."""


@atexit.register
def _close_all() -> None:
    for recording in [*_OPEN.values()]:
        recording.close()


_ENDS = pl.Series(["terminated", "truncated", None], dtype=pl.String)

States = Mapping[int, str | None]
"""By environment that was reset, the generator's state before, as `RecordResets` notes it."""


class _Step(NamedTuple):
    """What n environments showed, did and returned in a step; copies, and those of one environment have no axis."""

    observation: Any
    digests: Sequence[int] | None
    action: Any
    reward: Any
    terminated: Any
    truncated: Any


class Recording:
    """A run directory that is written while environments are stepped.

    Args:
        run: the directory. If it holds a run of the same configuration, rounds are added to it.
        config: what the run's configuration says of the environments.
        spaces: of the observations and of the actions of one environment.
        count: the number of environments n; None: one, whose observations, actions and rewards have no axis for it.
        length: records of a round; None: rounds end at `end_round` alone.
        overwrite: delete the run that the directory holds, and start anew.
        complete: adds columns to a round's table before it is written; None: nothing does.
        resets_late: whether an environment whose episode has ended is reset by the next step, in which nobody acts.
        code: digests of the environments' code, which the run notes; see `digest_code`.

    Raises:
        WhenceError: an argument is not what it should be.
        RunDirectoryError: the directory holds another run; see `RunDirectory.begin`.
    """

    def __init__(
        self,
        run: str | Path,
        config: Mapping[str, Any],
        *,
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        count: int | None = None,
        length: int | None = 2048,
        overwrite: bool = False,
        resets_late: bool = False,
        complete: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
        code: Mapping[str, str] | None = None,
    ) -> None:
        if length is not None and (isinstance(length, bool) or not isinstance(length, Integral) or length < 1):
            raise WhenceError(f"round is {length!r}; give the records of a round, or None to end it by end_round().")
        self._space, self._is_one, self._length, self._resets_late = spaces[0], count is None, length, resets_late
        self._count, self._complete = count or 1, complete
        self._recorder = RunRecorder(run)
        self._kept = keep_known_parts(*spaces)
        names = ("observation_space", "action_space")
        kept = zip(names, (self._kept, spaces[1]), strict=True)
        described = {name: describe(describe_space(space)) for name, space in kept}
        if (earlier := _OPEN.get(self._recorder.path)) is not None:
            what = "the steps of the environment that was recorded there end here"
            log.warning("%s is recorded anew: %s.", self._recorder.path, what)
            earlier.close()
        checkpoint = self._recorder.begin(
            {"algorithm": None, "policy": None, "n_envs": self._count, **described, **config},
            versions=read_versions(),
            overwrite=overwrite,
            find=find_last_round,
        )
        self._recorder.note_first(code=code)
        self._rounds, self._records, self._episodes = 0, 0, EpisodeCounter()
        if checkpoint is not None and checkpoint.round:
            self._continue_after(checkpoint)
        self._done, self._waits = np.zeros((2, self._count), bool)
        self._states: list[list[str | None]] = [[] for _ in range(self._count)]
        self._seen: Any = None
        self._logged = set[str]()
        self._is_stored: bool | None = None
        self._begin_round()
        self._is_closed, _OPEN[self._recorder.path] = False, self

    def _begin_round(self, reset: NDArray[np.bool_] | None = None) -> None:
        """Begin a round; `reset` are the environments that were reset since the last step."""
        self._rows: list[_Step] = []
        self._starts: dict[int, NDArray[np.bool_]] = {} if reset is None else {0: reset}
        self._absent: dict[int, NDArray[np.bool_]] = {}
        self._infos: Any = None  # InfoNumbers or InfoArrays, once there is one

    def _continue_after(self, checkpoint: Checkpoint) -> None:
        self._recorder.continue_after(checkpoint, ["the loop began anew, and with it whatever it trains"])
        self._rounds, directory = checkpoint.round, self._recorder.directory
        last = directory.round("records", checkpoint.round)
        self._records, episode = (int(last[name].max() or 0) + 1 for name in ("record_id", "episode_id"))  # type: ignore[arg-type]
        self._episodes = EpisodeCounter(episode)

    def start(self, observation: Any, states: States, reset: NDArray[np.bool_] | None = None) -> None:
        """Begin episodes in the environments that were `reset`, (n,), None: all; `observation` is of all of them."""
        starts = self._starts.get(len(self._rows), np.zeros(self._count, bool))
        for env in np.flatnonzero(starts):  # reset twice, without a step
            if env in states and self._states[env]:
                self._states[env].pop()
        self._starts[len(self._rows)] = starts | (np.ones(self._count, bool) if reset is None else reset)
        self._note_states(states)
        self._seen = self._read(observation)

    def add(
        self,
        action: Any,
        reward: Any,
        ends: tuple[Any, Any],
        observation: Any,
        infos: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        states: States | None = None,
        absent: NDArray[np.bool_] | None = None,
    ) -> None:
        """Take a step of all environments.

        Args:
            action: (n, ...), a copy that nobody changes.
            reward: (n,).
            ends: whether episodes were terminated, and whether truncated, (n,) each.
            observation: of all environments, as the step returned them.
            infos: one of each environment, or what `InfoArrays` reads; empty: there are none.
            states: of the environments that the step has reset.
            absent: (n,) which did not take part; None: none.

        Raises:
            WhenceError: there is not one reward of each environment.
        """
        seen, self._seen = self._seen, self._read(observation)
        if seen is None or self._is_closed:  # or nobody has reset the environments since recording began
            return
        if absent is not None and absent.any():
            self._absent[len(self._rows)] = absent
        copies = action, copy_value(reward), copy_value(ends[0]), copy_value(ends[1])
        if not self._rows and np.size(copies[1]) != self._count:
            raise WhenceError(
                f"The rewards of a step have the shape {np.shape(copies[1])}; {self._count} are needed, one of each "
                "environment. If the environment is a batch of several, let it have num_envs, "
                "single_observation_space and single_action_space."
            )
        self._rows.append(_Step(seen[0], seen[1], *copies))
        none: Any = {} if isinstance(infos, Mapping) else [{}] * self._count
        if self._infos is not None or any(infos):
            if self._infos is None:
                self._infos = InfoArrays(self._count) if isinstance(infos, Mapping) else InfoNumbers()
                for _ in self._rows[1:]:
                    self._infos.add(none)
            self._infos.add(infos or none)
        if states:
            self._note_states(states)
        if self._length is not None and len(self._rows) * self._count >= self._length:
            self.end_round()

    def _note_states(self, states: States) -> None:
        for env, state in states.items():
            self._states[env].append(state)

    def _read(self, observation: Any) -> tuple[Any, Sequence[int] | None]:
        """Return a copy of observations, None if they are too large to be stored, and digests where these are needed.

        They are needed of what is not stored; else `digest_rows` makes them, a round at a time.
        """
        kept = _keep(observation, self._kept)
        if self._is_stored is None:
            size = sum(np.asarray(leaf).nbytes for _, leaf in named_leaves(kept))
            self._is_stored = size <= _STORED * self._count
        stored = copy_value(kept) if self._is_stored else None
        if stored is not None and self._kept is self._space:
            return stored, None
        each = [observation] if self._is_one else [_take(observation, env) for env in range(self._count)]
        return stored, [digest_observation(one, self._space) for one in each]

    def __reduce__(self) -> tuple[type, tuple[()]]:  # by which copy.deepcopy and pickle copy
        return NoRecording, ()

    @property
    def size(self) -> int:
        """The number of records since the last round."""
        return len(self._rows) * self._count

    def end_round(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write the steps since the last round as a round; without a step, nothing is written.

        Args:
            metrics: further numbers of the round by name, such as {"train/approx_kl": 0.01}.
        """
        if not self._rows:
            return
        numbers = {name: float(number) for name, number in (metrics or {}).items() if number is not None}
        records, episodes = self._make_tables()
        records = records if self._complete is None else self._complete(records)
        left_out = set() if self._infos is None else self._infos.left_out
        self._begin_round(self._starts.pop(len(self._rows), None))
        self._rounds += 1
        self._records += len(records)
        self._recorder.write_round(self._rounds, records, tables={"episodes": episodes})
        warn_of_infos(left_out, self._logged)
        row = {
            **numbers,
            **{"round": self._rounds, "timestep": self._records, "records": len(records), "kept": len(records)},
            "episode_return": self._episodes.mean_return,
        }
        self._recorder.directory.append("metrics", row)

    def close(self) -> None:
        """Write what is left as a last round, and let others write the directory; further steps are not recorded."""
        if not self._is_closed:
            self._is_closed = True
            del _OPEN[self._recorder.path]
            self.end_round()
            self._recorder.end()

    def _make_tables(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Return the records since the last round, environment by environment, and the episodes that began."""
        rows, shape = self._rows, (len(self._rows), self._count)
        seen, noted, sent, *parts = zip(*rows, strict=True)
        actions = self._flatten(sent)
        rewards, terminated, truncated = (np.array(part).reshape(shape) for part in parts)
        begins, acts = self._mark_steps(terminated.astype(bool) | truncated.astype(bool))
        order = np.arange(acts.size).reshape(shape).T[acts.T]
        env, begins, rewards = order % self._count, begins.ravel()[order], rewards.ravel()[order].astype(np.float32)
        kinds = np.where(terminated, 0, np.where(truncated, 1, 2)).ravel()[order]
        episode, step = self._episodes.number(env, begins, kinds < 2, rewards)
        columns = {
            "record_id": self._records + np.arange(len(order)),
            **{"env_index": env, "episode_id": _null(episode), "step": _null(step)},
            "action": make_series("action", actions[order]),
            **{"reward": rewards, "episode_start": begins, "end": _ENDS.gather(kinds)},
        }
        observations = dict[str, NDArray[Any]]()
        if self._is_stored:
            names = [name for name, _ in named_leaves(seen[0], "observation")]
            leaves = [seen]
            if isinstance(seen[0], dict):
                leaves = [*zip(*([leaf for _, leaf in named_leaves(each)] for each in seen), strict=True)]
            observations = {name: self._flatten(each)[order] for name, each in zip(names, leaves, strict=True)}
        if noted[0] is None:
            digests = digest_rows(observations, self._space)
        else:
            digests = np.array(noted, np.uint64).ravel()[order].tolist()
        columns["observation_digest"] = pl.Series(digests, dtype=pl.UInt64)
        if self._infos is not None:  # whose rows come environment by environment
            places = env * len(rows) + order // self._count
            columns |= {column.name: column.gather(places) for column in self._infos.make_columns()}
        table = add_observations(pl.DataFrame(columns), observations) if observations else pl.DataFrame(columns)
        states = [self._states[index].pop(0) if self._states[index] else None for index in env[begins]]
        began = {"episode_id": episode[begins], "env_index": env[begins]}
        return table, pl.DataFrame({**began, "generator_state": pl.Series(states, dtype=pl.String)})

    def _flatten(self, steps: Sequence[Any]) -> NDArray[Any]:
        """Return an array of each step as one of all records, step by step."""
        array = np.array(steps)
        return array.reshape(len(steps) * self._count, *array.shape[1 + (not self._is_one) :])

    def _mark_steps(self, done: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return in which steps an episode begins, and in which somebody acts, (steps, n)."""
        starts, absent = np.zeros((2, *done.shape), bool)
        for marks, noted in ((starts, self._starts), (absent, self._absent)):
            for at, mask in noted.items():
                marks[at : at + 1] = mask  # what was reset after the last step begins in the next round
        follows_end = np.vstack([self._done, done[:-1]]) & ~starts
        waits = follows_end & self._resets_late
        begins = starts | np.vstack([self._waits, waits[:-1]]) | (follows_end & (not self._resets_late))
        self._done, self._waits = done[-1], waits[-1]
        return begins, ~(waits | absent)


class NoRecording:
    """What a copy of a recorded environment has in place of its recording: nothing is written."""

    size = 0

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, as each method."""

    add = end_round = close = start


def _null(numbers: NDArray[np.int64]) -> Any:
    """Return a column that is null where a number is below 0."""
    column = pl.Series(numbers)
    return column if (numbers >= 0).all() else column.set(column < 0, None)


def keep_known_parts(space: gym.Space[Any], actions: gym.Space[Any]) -> gym.Space[Any]:
    """Return the part of an observation space that a run can hold; refuse spaces of which it can hold nothing."""
    for what, one in (("observations", space), ("actions", actions)):
        if describe_space(one) is None or (one is actions and isinstance(one, gym.spaces.Dict)):
            raise Unsupported(
                f"A run cannot hold {what} of {one}. Record inside of a wrapper that gives arrays, such as "
                "gymnasium.wrappers.FlattenObservation, or numbers of actions."
            )
    if (known := _keep_known(space)) is None:
        raise Unsupported(f"A run cannot hold observations of {space}: no part of it is an array of numbers.")
    if isinstance(space, gym.spaces.Dict) and isinstance(known, gym.spaces.Dict) and known is not space:
        left_out = ", ".join(space.keys() - known.keys())
        log.warning("Of the observations, %s cannot be stored, and are left out.", left_out)
    return known


def _keep_known(space: gym.Space[Any]) -> gym.Space[Any] | None:
    """Return a space, or a part of a Dict, as it can be held; None: not at all."""
    if not isinstance(space, gym.spaces.Dict):
        return space if describe_space(space) else None
    parts = {name: _keep_known(part) for name, part in space.items()}
    if all(parts[name] is part for name, part in space.items()) and parts:
        return space
    known = {name: part for name, part in parts.items() if part is not None}
    return gym.spaces.Dict(known) if known else None


def _keep(observation: Any, space: gym.Space[Any]) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {name: _keep(observation[name], part) for name, part in space.items()}
    return observation


def copy_value(value: Any) -> Any:
    """Return a copy of an array, of several by name, or of what only looks like one; numbers need none."""
    if type(value) is np.ndarray:
        return value.copy()
    if isinstance(value, int | float | np.generic):
        return value
    if isinstance(value, Tensor):
        return to_numpy(value.detach()).copy()
    return {name: copy_value(part) for name, part in value.items()} if isinstance(value, Mapping) else np.array(value)


def _take(observation: Any, env: int) -> Any:
    if isinstance(observation, Mapping):
        return {name: _take(part, env) for name, part in observation.items()}
    return observation[env]
