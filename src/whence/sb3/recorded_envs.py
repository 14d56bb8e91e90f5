"""Environments that are recorded while any loop trains in them: `record` goes in front of whatever trains."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from whence.core import WhenceError
from whence.sb3.episodes import (
    DIGEST,
    STATE,
    AddedRecordResets,
    RecordResets,
    check_factory,
    describe_environments,
    describe_parts,
    digest_code,
    iterate_wrappers,
    read_seed,
)
from whence.sb3.models import Names, check_names, describe_env, name_spaces, read_spec
from whence.sb3.recording import Recording, States, copy_value

E = TypeVar("E")

_Spaces: TypeAlias = tuple[gym.Space[Any], gym.Space[Any]]
"""Of the observations and of the actions of one environment."""


def record(
    env: E,
    run: str | Path,
    *,
    round: int | None = 2048,
    names: Names | None = None,
    env_factory: str | None = None,
    overwrite: bool = False,
) -> E:
    """Record an environment, or several, while any loop trains in them; the training stays the same to the bit.

    What is returned is used in place of the environment; of a `VecEnv` it is the environment itself. It writes
    observations, actions, rewards, ends, numbers in infos, and what is needed to play episodes again. Every so many
    steps a round is written; `env.end_round(metrics)` ends one earlier, with numbers of the loop, and `env.close()`
    writes the rest. `whence findings`, `view` and `show` work on the run. If the directory holds a run of the same
    environments, rounds are added to it. A copy of the environment, as for an evaluation, is not recorded.

    Images and other large observations are stored as digests, and seen again by playing their episodes again. Episodes
    in other processes can be played again if each environment is wrapped in `whence.sb3.RecordResets` there.

    Args:
        env: an environment or a vector of them of Gymnasium's, a `VecEnv` of Stable-Baselines3's, which is recorded
            inside of VecNormalize and others, a parallel environment of PettingZoo's, whose agents are recorded side by
            side, or an environment with `num_envs` that steps a batch of tensors, as Isaac Lab's.
        run: the directory to write to.
        round: the steps of all environments that are a round; None: rounds end at `end_round` alone.
        names: of actions and of the observation's entries; see `InfluenceCallback`. Those that it lacks are the
            environment's.
        env_factory: the name of a function without arguments that makes one environment in all of its wrappers, as
            "module:function". None: it is made again by its class and its wrappers, as far as these can be stored.
        overwrite: delete the run that the directory holds, and start anew.

    Raises:
        WhenceError: an argument is not what it should be.
        RunDirectoryError: the directory holds another run.

    Example:
        ```
        env = whence.record(gymnasium.make("CartPole-v1"), "runs/mine")
        ```
    """
    check_names(names or {})
    settings: dict[str, Any] = {} if check_factory(env_factory) is None else {"env": env_factory, "env_kwargs": {}}

    def begin(config: Mapping[str, Any], spaces: _Spaces, **options: Any) -> Recording:
        listed = name_spaces(names or {}, *spaces, env)
        config = {**config, **({"names": listed} if listed else {}), **settings}
        options |= {"length": round, "overwrite": overwrite, "code": digest_code(env)}
        return Recording(run, config, spaces=spaces, **options)

    if isinstance(env, VectorEnv):
        return _record_vector(env, begin)  # type: ignore[return-value]
    if isinstance(env, VecEnv):
        base = env.unwrapped  # inside of VecNormalize and others, where observations and rewards are the environments'
        config = describe_env(read_spec(env), describe_environments(env))
        spaces = base.observation_space, base.action_space
        watched = WatchedVecEnv(base, begin(config, spaces, count=env.num_envs))
        vars(env)["end_round"] = watched.end_round
        return env
    if isinstance(env, gym.Env):
        return _record_env(env, begin)  # type: ignore[return-value]
    if hasattr(env, "possible_agents") and hasattr(env, "action_space"):
        return _record_agents(env, begin)  # type: ignore[return-value]
    raise WhenceError(
        f"record() got a {type(env).__name__}; an environment or a vector of them of Gymnasium's, a VecEnv of "
        "Stable-Baselines3's, or a parallel environment of PettingZoo's is needed."
    )


class _Recorded:
    """What recorded environments of all libraries share."""

    env: Any
    recording: Recording

    def end_round(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write the steps since the last round as a round, with further metrics; see `Recording.end_round`."""
        self.recording.end_round(metrics)

    def close(self, **kwargs: Any) -> None:
        """Write what is left, and close the environment."""
        self.recording.close()
        self.env.close(**kwargs)


class RecordedEnv(_Recorded, AddedRecordResets):
    """An environment whose steps are recorded; see `record`."""

    def __init__(self, env: gym.Env[Any, Any], recording: Recording) -> None:
        vars(self)["recording"] = recording
        super().__init__(env, steps=False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, and begin an episode of the run."""
        observation, info = super().reset(seed=seed, options=options)
        self.recording.start(observation, {0: info.pop(STATE)})
        del info[DIGEST]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and record it."""
        if self.notes_steps:
            vars(self)["last_action"] = action
        sent = copy_value(action)  # an environment may change it
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.recording.add(sent, reward, (terminated, truncated), observation, (info or {},))
        return observation, reward, terminated, truncated, info


def _record_env(env: gym.Env[Any, Any], begin: Callable[..., Recording]) -> RecordedEnv:
    """Return an environment that is recorded, or a batch of several; see `record`."""
    base: Any = env.unwrapped
    config = describe_env(env.spec, [describe_parts(env)])
    if getattr(base, "num_envs", None) is None:
        return RecordedEnv(env, begin(config, (env.observation_space, env.action_space)))
    names = "single_observation_space", "single_action_space"
    if missing := [name for name in names if not isinstance(getattr(base, name, None), gym.Space)]:
        raise WhenceError(
            f"The {type(base).__name__} is a batch, with num_envs = {base.num_envs}, and has no {missing[0]}. Let it "
            "have the spaces of one environment, single_observation_space and single_action_space, as Isaac Lab's do."
        )
    spaces = base.single_observation_space, base.single_action_space
    return RecordedBatch(env, begin(config, spaces, count=int(base.num_envs)))


class RecordedBatch(RecordedEnv):
    """An environment that is a batch of several, as Isaac Lab's, whose steps are recorded; see `record`.

    It takes and returns arrays or tensors of all, and resets those that have ended in the same step.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all, and begin their episodes."""
        observations, infos = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        self.recording.start(copy_value(observations), {})
        return observations, infos

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step, and record it."""
        sent = copy_value(action)  # an environment may change it
        observations, rewards, terminated, truncated, infos = self.env.step(action)
        self.recording.add(sent, rewards, (terminated, truncated), copy_value(observations), infos or {})
        return observations, rewards, terminated, truncated, infos


def _record_vector(env: VectorEnv, begin: Callable[..., Recording]) -> VectorEnv:
    """Return a vector of environments that is recorded; see `record`."""
    base: Any = env.unwrapped
    environments: list[Any] = []
    if isinstance(base, SyncVectorEnv):
        environments = [describe_parts(each) for each in base.envs]
        base.envs = [each if _notes_resets(each) else AddedRecordResets(each, steps=False) for each in base.envs]
    mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    spaces = env.single_observation_space, env.single_action_space
    resets_late = AutoresetMode(mode) == AutoresetMode.NEXT_STEP
    spec = env.spec or (base.envs[0].spec if environments else None)
    config = describe_env(spec, environments)
    return RecordedVectorEnv(env, begin(config, spaces, count=env.num_envs, resets_late=resets_late))


def _notes_resets(env: gym.Env[Any, Any]) -> bool:
    return any(isinstance(each, RecordResets) for each in iterate_wrappers(env))


class RecordedVectorEnv(_Recorded, VectorWrapper):
    """A vector of environments whose steps are recorded; see `record`."""

    def __init__(self, env: VectorEnv, recording: Recording) -> None:
        super().__init__(env)
        self.recording = recording

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all, or those of `options["reset_mask"]`, and begin their episodes."""
        mask = (options or {}).get("reset_mask")  # which the environments take away
        observations, infos = self.env.reset(seed=seed, options=options)
        infos, states = _take_states(infos)
        self.recording.start(observations, states, mask)
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step, and record it."""
        sent = copy_value(actions)  # environments may change it
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        infos, states = _take_states(infos)
        each = _split(infos, self.num_envs) if infos else ()
        self.recording.add(sent, rewards, (terminated, truncated), observations, each, states)
        return observations, rewards, terminated, truncated, infos


def _take_states(infos: dict[str, Any]) -> tuple[dict[str, Any], States]:
    """Return infos as the environments gave them, and the states that were noted at resets."""
    infos = infos or {}
    if STATE not in infos and DIGEST not in infos:
        return infos, {}
    rest = {key: each for key, each in infos.items() if key.removeprefix("_") not in (STATE, DIGEST)}
    present = infos.get(f"_{STATE}", ())
    return rest, {int(env): infos[STATE][env] for env in np.flatnonzero(present)}


def _split(infos: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return each environment's numbers of the infos of a vector: of one that was reset meanwhile, its last ones."""
    split: list[dict[str, Any]] = [{} for _ in range(count)]
    for key, values in infos.items():
        if not key.startswith("_") and isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
            for env in np.flatnonzero(infos.get(f"_{key}", np.ones(count, bool))):
                split[env][key] = values[env]
    if isinstance(last := infos.get("final_info"), Mapping):
        finals = _split(last, count)
        for env in np.flatnonzero(infos["_final_info"]):
            split[env] = finals[env]
    return split


class WatchedVecEnv(_Recorded):
    """A `VecEnv` of Stable-Baselines3's whose steps are recorded, by methods that replace its.

    No wrapper is added, since SB3 compares those of environments for training with those for evaluation.
    """

    def __init__(self, env: VecEnv, recording: Recording) -> None:
        if (watching := getattr(vars(env).get("step_wait"), "__self__", None)) and isinstance(watching, WatchedVecEnv):
            watching.stop()
        self.env, self.recording, self._unwatched = env, recording, list[Any]()
        self._calls = {name: getattr(env, name) for name in _WATCHED}
        self._attributes = {name: vars(env)[name] for name in _WATCHED if name in vars(env)}
        vars(env).update({name: getattr(self, name) for name in _WATCHED})
        if isinstance(base := env.unwrapped, DummyVecEnv):
            self._unwatched = [*base.envs]
            base.envs[:] = [each if _notes_resets(each) else AddedRecordResets(each, steps=False) for each in base.envs]

    def reset(self) -> VecEnvObs:
        """Reset all, and begin their episodes."""
        observations: VecEnvObs = self._calls["reset"]()
        self.recording.start(observations, self._read_states(range(self.env.num_envs)))
        return observations

    def begin(self, observations: Any) -> None:
        """Begin episodes in environments that were reset before; None: what they show is not known."""
        if observations is not None:
            states = self._read_states(range(self.env.num_envs))
            first = {env: states[env] or read_seed(each) for env, each in enumerate(self._unwatched)}
            self.recording.start(observations, {**states, **first})

    def step_async(self, actions: Any) -> None:
        """Step the environments with these actions."""
        self._actions = copy_value(actions)
        self._calls["step_async"](actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for the step, and record it."""
        observations, rewards, dones, infos = self._calls["step_wait"]()
        truncated = np.zeros_like(dones)
        ended = np.flatnonzero(dones)
        for env in ended:
            truncated[env] = infos[env].get("TimeLimit.truncated", False)
        states = self._read_states(ended) if len(ended) else {}
        self.recording.add(self._actions, rewards, (dones & ~truncated, truncated), observations, infos, states)
        return observations, rewards, dones, infos

    def _read_states(self, envs: Iterable[Any]) -> States:
        infos = getattr(self.env.unwrapped, "reset_infos", [{}] * self.env.num_envs)
        return {int(env): infos[env].get(STATE) for env in envs}

    def close(self, **kwargs: Any) -> None:
        """Write what is left, and close the environments."""
        self.stop()
        self.env.close()

    def stop(self) -> None:
        """Write what is left, and give the environments back as they were."""
        self.recording.close()
        for name in _WATCHED:
            del vars(self.env)[name]
        vars(self.env).update(self._attributes)
        vars(self.env).pop("end_round", None)
        if self._unwatched:
            self.env.unwrapped.envs[:] = self._unwatched


_WATCHED = "reset", "step_async", "step_wait", "close"
"""The methods of a `VecEnv` that stand in for its own while it is recorded."""


def _record_agents(env: Any, begin: Callable[..., Recording]) -> "RecordedAgents":
    """Return a parallel environment of PettingZoo's that is recorded; see `record`."""
    agents = list(env.possible_agents)
    first, *others = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
    if any(space.shape is None for space in first):
        raise WhenceError(f"The spaces of {agents[0]} are {first}; agents whose observations are one array are needed.")
    for agent, spaces in zip(agents[1:], others, strict=True):
        if spaces != first:
            raise WhenceError(
                f"The agents {agents[0]} and {agent} have different spaces, and the records of a run have one. Record "
                "an environment whose agents are alike, or pad them, as SuperSuit does."
            )
    config = {**describe_env(None, []), "agents": [*map(str, agents)]}
    return RecordedAgents(env, begin(config, first, count=len(agents)))


class RecordedAgents(_Recorded):
    """A parallel environment of PettingZoo's whose steps are recorded, each agent as an environment; see `record`."""

    def __init__(self, env: Any, recording: Recording) -> None:
        self.env, self.recording, self._agents = env, recording, list(env.possible_agents)
        spaces = env.observation_space(self._agents[0]), env.action_space(self._agents[0])
        self._observation, self._action = (np.zeros(space.shape, space.dtype) for space in spaces)

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.env, name)

    def _fill(self, parts: Mapping[Any, Any], empty: Any) -> list[Any]:
        """Return what each agent has; of those without a turn, something of the same kind."""
        return [parts.get(agent, empty) for agent in self._agents]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Reset, and begin an episode of each agent."""
        observations, infos = self.env.reset(seed=seed, options=options)
        self.recording.start(np.stack(self._fill(observations, self._observation)), {})
        return observations, infos

    def step(self, actions: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Step, and record it for the agents that act."""
        sent = {agent: actions[agent] for agent in self.env.agents if agent in actions}
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        self.recording.add(
            np.stack(self._fill(sent, self._action)),
            np.array([float(np.asarray(reward).item()) for reward in self._fill(rewards, 0.0)]),
            (np.array(self._fill(terminated, False)), np.array(self._fill(truncated, False))),
            np.stack(self._fill(observations, self._observation)),
            self._fill(infos or {}, {}),
            absent=np.array([agent not in sent for agent in self._agents]),
        )
        return observations, rewards, terminated, truncated, infos
