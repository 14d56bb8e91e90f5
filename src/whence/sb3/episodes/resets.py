"""Resets of environments: recorded by a wrapper, so that episodes can be played again, and followed by a tracker."""

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.core import ReplayError, decode, encode
from whence.sb3.episodes.digests import digest_observation, digest_rows
from whence.sb3.episodes.held_values import keep_constant, list_held_changes, read_chain, read_vector_values
from whence.sb3.episodes.wrappers import (
    Part,
    describe_parts,
    is_watcher,
    iterate_wrappers,
    load_attributes,
    read_attributes,
)

STATE = "whence_generator_state"
"""The key of a reset's info under which `RecordResets` puts the generator's state."""

DIGEST = "whence_observation_digest"
"""The key of an info under which `RecordResets` puts the digest of the observation that came with it."""


class RecordResets(gym.Wrapper[Any, Any, Any, Any]):
    """Put into infos what is needed to play an episode again, and to check that the same was seen.

    A reset's info holds the state before the reset, as JSON: of the environment's generator, of what its wrappers
    count, and of an Atari emulator. Every info holds a digest of its observation. With the episode's actions that is
    enough to play it again, if the dynamics depend on nothing else. The environment's randomness is unchanged.

    Args:
        env: the environment.
        fresh_world: give a BipedalWalker a new Box2D world before each reset. It reuses its world, whose contacts then
            depend on the episodes before. Other environments are left as they are.
    """

    def __init__(self, env: gym.Env[Any, Any], *, fresh_world: bool = True) -> None:
        super().__init__(env)
        self.renews_world = fresh_world and reuses_world(env.unwrapped)
        self.unused_wrappers = _read_wrappers(env)
        self.last_action: Any = None
        self.space = env.observation_space  # each wrapper on the way would pass the question on, at each step

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset; the info holds the generator's state before, or the seed if there is one."""
        if self.renews_world:
            _renew_world(self.env.unwrapped)
        generator = {"seed": seed} if seed is not None else _read_generator(self.env)
        before = generator and {
            **generator,
            "wrappers": _read_wrappers(self.env),
            **_read_emulator(self.env, self.last_action),
        }
        # As SB3 calls it: an environment of another library may know no options.
        observation, info = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        state = before and json.dumps(before, default=lambda number: number.tolist())
        return observation, {**(info or {}), STATE: state, DIGEST: self._digest(observation)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Bring back the state that a reset's info held, to reset the environment again; a seed is for the reset."""
        _load_wrappers(self.env, state.get("wrappers", self.unused_wrappers))
        if "emulator" in state and hasattr(self.env.unwrapped, "ale"):
            from ale_py import ALEState

            emulator = ALEState(base64.b64decode(state["emulator"]))
            _restore_emulator(self.env, emulator, state["last_action"])
        if "seed" not in state:
            _set_generator(self.env, state)

    def describe_parts(self) -> list[Part]:
        """See `describe_parts`."""
        return describe_parts(self.env)

    def read_held_values(self) -> dict[str, Any]:
        """See `read_chain`."""
        return read_chain(self.env)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the info holds the observation's digest."""
        vars(self)["last_action"] = action  # not by a __setattr__ that looks where attributes belong
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**(info or {}), DIGEST: self._digest(observation)}

    def _digest(self, observation: Any) -> np.uint64:
        # Gymnasium's vectors would put an integer of Python's into an array that is too narrow for it.
        return np.uint64(digest_observation(observation, self.space))


def _set_generator(env: gym.Env[Any, Any], state: Mapping[str, Any]) -> None:
    """Put an environment's generator into a state that a reset's info held, and that is no seed."""
    kind = getattr(np.random, str(state.get("bit_generator")), None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise ReplayError(f"The stored generator is a {state.get('bit_generator')!r}, which NumPy does not have.")
    bits = kind()
    bits.state = {name: state[name] for name in type(bits)().state}
    env.unwrapped.np_random = np.random.Generator(bits)


def reseed(env: gym.Env[Any, Any], seed: np.random.SeedSequence, last_action: Any) -> None:
    """Give an environment other randomness from here on; its state stays, into which an action has brought it."""
    env.unwrapped.np_random = np.random.default_rng(seed)
    base: Any = env.unwrapped
    if hasattr(base, "ale") and base.ale.getFloat("repeat_action_probability") > 0:
        # Its generator takes a seed only as a game is loaded; a state without the generator's brings the game back.
        state = base.ale.cloneState(include_rng=False)
        base.ale.setInt("random_seed", int(seed.generate_state(1)[0] >> 1))
        base.load_game()
        _restore_emulator(env, state, last_action)


def _restore_emulator(env: gym.Env[Any, Any], state: Any, last_action: Any) -> None:
    base: Any = env.unwrapped
    if np.ndim(last_action) == 0 and last_action is not None:
        # A sticky action may be repeated, and no state holds it. Acting often enough makes it the last one.
        for _ in range(32 if base.ale.getFloat("repeat_action_probability") > 0 else 0):
            base.ale.act(base._action_set[int(last_action)])
    base.ale.restoreState(state)


def reuses_world(env: Any) -> bool:
    """Return whether an environment, without wrappers, is a BipedalWalker, which keeps its Box2D world."""
    return any(base.__module__ == "gymnasium.envs.box2d.bipedal_walker" for base in type(env).__mro__)


def _renew_world(env: Any) -> None:
    """Give a Box2D environment a new world, as its constructor does."""
    import Box2D

    env._destroy()  # the bodies of the old world, which must not be destroyed in the new one
    env.world = Box2D.b2World()


_Seen: TypeAlias = dict[str, NDArray[Any]] | list[int | None]
"""What environments show at a step: a copy, of which digests are made a rollout at a time, or the digests."""

_SMALL = 4096  # bytes of an observation up to which copies of a rollout take no memory that matters


class ResetTracker:
    """What is needed to play each environment's episodes again, and to check that the same was seen.

    That is the generator's state before each reset, the actions since the last one, and digests of the observations.
    Environments of a `DummyVecEnv` are wrapped in `RecordResets` inside of `wrapped()`; others have to be wrapped where
    they are made. `has_started` says whether `start` or `load_state` was called.
    """

    def __init__(self, vec_env: VecEnv) -> None:
        self.vec_env, self._base = vec_env, vec_env.unwrapped
        self.has_started = False
        self._constants = read_vector_values(vec_env)
        # Its buffers hold what the environments returned, so that nothing has to be added to infos.
        self._has_buffers = getattr(type(self._base), "step_wait", None) is DummyVecEnv.step_wait
        self._names: dict[str | None, str] | None = None
        self._past: list[_Seen] = []
        self._current: _Seen = [None] * vec_env.num_envs
        self._states: list[list[str | None]] = [[] for _ in range(vec_env.num_envs)]
        self._open: list[tuple[str | None, list[NDArray[Any]]]] = [(None, []) for _ in range(vec_env.num_envs)]

    @contextmanager
    def wrapped(self) -> Iterator[None]:
        """Wrap the environments that are not yet, if they can be reached; on exit they are the user's own again."""
        envs = self._base.envs if isinstance(self._base, DummyVecEnv) else []
        envs[:] = [env if _records_resets(env) else AddedRecordResets(env, steps=not self._has_buffers) for env in envs]
        try:
            yield
        finally:
            envs[:] = [env.env if isinstance(env, AddedRecordResets) else env for env in envs]

    def start(self, starts: NDArray[np.bool_]) -> None:
        """Read the present observations, and the states before resets where episodes are about to begin."""
        self.has_started, self._past = True, []
        infos = self._read_reset_infos()
        self._current = [_read_digest(info) if start else None for start, info in zip(starts, infos, strict=True)]
        states = [info.get(STATE) for info in infos]
        if isinstance(self._base, DummyVecEnv):
            # learn() resets before its callbacks can wrap anything. A first reset follows from the generator's seed;
            # whether it was the first is seen when the episode is played again.
            self._current = self._read_buffers()
            states = [state or read_seed(env) for state, env in zip(states, self._base.envs, strict=True)]
        self._states = [[state] if start else [] for state, start in zip(states, starts, strict=True)]
        self._open = [(state if start else None, []) for state, start in zip(states, starts, strict=True)]

    def step(self, actions: NDArray[Any], ended: NDArray[np.int64], infos: list[dict[str, Any]]) -> None:
        """Follow one step: the actions as the environments took them, which episodes ended, and what was returned."""
        self._past.append(self._current)
        current: list[int | None] = [] if self._has_buffers else [_read_digest(info) for info in infos]
        self._current = self._read_buffers() if self._has_buffers else current
        for (_, taken), action in zip(self._open, actions, strict=True):
            taken.append(action)
        if len(ended):
            resets = self._read_reset_infos()
            for env in ended:
                state = resets[env].get(STATE)
                if not self._has_buffers:
                    current[env] = _read_digest(resets[env])
                self._states[env].append(state)
                self._open[env] = state, []

    def _read_reset_infos(self) -> list[dict[str, Any]]:
        # What another library takes for a VecEnv has none.
        return getattr(self._base, "reset_infos", None) or [{}] * self._base.num_envs

    def take_digests(self) -> list[int | None]:
        """Return the digests of a rollout's observations, in the order of the flattened buffer, and forget them."""
        digests, self._past = self._digest(self._past), []
        return [step[env] for env in range(self._base.num_envs) for step in digests]

    def _digest(self, steps: Sequence[_Seen]) -> list[list[int | None]]:
        """Return the digests of steps, of which some may be copies of what was seen."""
        copies = [step for step in steps if isinstance(step, dict)]
        if not copies:
            return [*steps]  # type: ignore[list-item]
        columns = {name: np.concatenate([copy[name] for copy in copies]) for name in copies[0]}
        rows = iter(digest_rows(columns, self._base.observation_space))
        return [[*islice(rows, self._base.num_envs)] if isinstance(step, dict) else step for step in steps]

    def take_state(self, env: int) -> str | None:
        """Return the generator state before the next reset of an environment that was not taken yet."""
        return self._states[env].pop(0) if self._states[env] else None

    def read_state(self) -> list[dict[str, Any]]:
        """Return what is noted of each environment between two rollouts, for a checkpoint.

        `pending` are the states before resets that were not taken yet, `digest` is of its present observation;
        `generator` and `actions`, the state before its reset and what was done since, are of its ongoing episode.
        """
        return [
            {"pending": pending, "digest": digest, "generator": state, "actions": np.array(actions)}
            for pending, digest, (state, actions) in zip(
                self._states, *self._digest([self._current]), self._open, strict=True
            )
        ]

    def load_state(self, noted: list[Mapping[str, Any]]) -> None:
        """Take over what `read_state` returned."""
        self.has_started, self._past = True, []
        self._states = [list(each["pending"]) for each in noted]
        self._current = [each["digest"] for each in noted]
        self._open = [(each["generator"], list(each["actions"])) for each in noted]

    def read_constants(self) -> dict[str, Any]:
        """Return what the environments hold since they were followed, for a checkpoint; see `keep_constant`."""
        return keep_constant(self._constants, read_vector_values(self.vec_env))

    def list_changes(self, content: Mapping[str, Any]) -> list[str]:
        """List in what the environments differ from those that `read_environments` described."""
        return list_held_changes(content.get("constants", {}), self._constants)

    def _read_buffers(self) -> _Seen:
        """Return the present observations, which a `DummyVecEnv` holds: a copy, or the digests of large ones."""
        parts = self._base.buf_obs  # type: ignore[attr-defined]
        if self._names is None:
            is_small = sum(part[0].nbytes for part in parts.values()) <= _SMALL
            names = {name: "observation" if name is None else f"observation.{name}" for name in parts}
            self._names = names if is_small else {}
        if self._names:
            return {name: parts[part].copy() for part, name in self._names.items()}
        rows = [{name: part[env] for name, part in parts.items()} for env in range(self._base.num_envs)]
        return [digest_observation(row.get(None, row), self._base.observation_space) for row in rows]


def _read_digest(info: Mapping[str, Any]) -> int | None:
    digest = info.get(DIGEST)
    return None if digest is None else int(digest)


class AddedRecordResets(RecordResets):
    """The wrapper that whence adds to a user's environments while it trains in them.

    It is outermost, where `VecEnv.set_attr` sets attributes, so all but its own are read and set in the user's
    environment, as if the wrapper were not there.
    """

    def __init__(self, env: gym.Env[Any, Any], *, steps: bool) -> None:
        super().__init__(env, fresh_world=False)
        self.notes_steps = steps or hasattr(env.unwrapped, "ale")
        vars(self)["_names"] = frozenset(vars(self))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the info holds the observation's digest where that is needed."""
        return super().step(action) if self.notes_steps else self.env.step(action)

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        names = vars(self).get("_names")
        if names is None or name in names:
            super().__setattr__(name, value)
        else:
            setattr(self.env, name, value)


def _records_resets(env: gym.Env[Any, Any]) -> bool:
    """Return whether the outermost wrapper, monitors left aside, is `RecordResets`."""
    while isinstance(env, Monitor):
        env = env.env
    return isinstance(env, RecordResets)


def _read_generator(env: gym.Env[Any, Any]) -> dict[str, Any] | None:
    """Return the state of an environment's generator; None if it has none of NumPy's, and cannot be played again."""
    with suppress(Exception):  # what is inside of the wrappers may be no environment of Gymnasium's
        bits = getattr(env.unwrapped.np_random, "bit_generator", None)
        return dict(bits.state) if isinstance(bits, np.random.BitGenerator) else None
    return None


_MOST = 512  # the most numbers in an attribute of a wrapper that is noted before each reset


def _read_wrappers(env: gym.Env[Any, Any]) -> list[tuple[str, Any]]:
    """Return what wrappers hold from episode to episode, such as counters, in JSON types; not what is large."""
    states: list[tuple[str, Any]] = []
    for wrapper in iterate_wrappers(env):
        state: dict[str, Any] = {}
        for name, entry in {} if is_watcher(wrapper) else read_attributes(wrapper).items():
            with suppress(TypeError):  # it has no JSON types
                state |= {name: encode(entry)} if _count(entry) <= _MOST else {}
        if state:
            states.append((type(wrapper).__name__, state))
    return states


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return len(value) if isinstance(value, list | tuple) else int(np.size(value)) if hasattr(value, "size") else 1


def _load_wrappers(env: gym.Env[Any, Any], states: list[tuple[str, Any]]) -> None:
    """Set what `_read_wrappers` returned, in the wrappers of the same names in the same order."""
    by_name: dict[str, list[Any]] = defaultdict(list)
    for name, state in states:
        by_name[name].append(state)
    for wrapper in iterate_wrappers(env):
        if by_name[type(wrapper).__name__]:
            load_attributes(wrapper, decode({"dict": by_name[type(wrapper).__name__].pop(0)}))


def _read_emulator(env: gym.Env[Any, Any], last_action: Any) -> dict[str, Any]:
    """Return the state of an Atari emulator with its generator, and the last action; nothing of another environment."""
    with suppress(AttributeError):
        state = env.unwrapped.ale.cloneState(include_rng=True)  # type: ignore[attr-defined]
        return {"emulator": base64.b64encode(state.serialize()).decode(), "last_action": last_action}
    return {}


def read_seed(env: gym.Env[Any, Any]) -> str | None:
    """Return the seed of an environment's generator as a state; None if it has none."""
    base = env.unwrapped
    if getattr(base, "_np_random", None) is not None and getattr(base, "_np_random_seed", None) is None:
        return None  # a generator of the environment's making, in whose place the property would put another one
    seed = getattr(base, "np_random_seed", None)
    return json.dumps({"seed": int(seed)}) if isinstance(seed, int | np.integer) and seed >= 0 else None
