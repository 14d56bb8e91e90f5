"""Small recorded trainings of agents, and whether their episodes play again."""

from types import MappingProxyType

import gymnasium as gym
import numpy as np
import polars as pl
from stable_baselines3 import PPO

from whence import IIF, RunDirectory, replay_episode
from whence.lab.agents import configure, run
from whence.sb3 import InfluenceCallback


class Jittery(gym.ObservationWrapper):
    """Its noise comes from a generator of its own."""

    def __init__(self, env, seed=0):
        super().__init__(env)
        self._generator = np.random.default_rng(seed)

    def observation(self, observation):
        return (observation + self._generator.normal(scale=1e-3, size=observation.shape)).astype(np.float32)


def train(path, *, arm="iif", rounds=2, n_steps=256, **settings) -> RunDirectory:
    small = {"n_steps": n_steps, "n_epochs": 1, "batch_size": 64}
    settings["hyperparameters"] = small | settings.pop("hyperparameters", {})
    config = configure(arm=arm, rounds=rounds, eval_episodes=0, **settings)
    run(config, path)
    return RunDirectory.open(path)


def learn(
    path, env, *, algorithm=PPO, policy="MlpPolicy", times=1, rule=None, noted=MappingProxyType({}), **settings
) -> RunDirectory:
    small = {"batch_size": 64, "n_epochs": 1} if algorithm is PPO else {}
    model = algorithm(policy, env, n_steps=64, seed=1, device="cpu", **small, **settings)
    rule = IIF(drop=0.5) if rule is None else rule
    callback = InfluenceCallback(rule, run=path, folds=None, **noted)  # errors take longer than all else
    for turn in range(times):
        model.learn(2 * 64 * model.n_envs, callback=callback, reset_num_timesteps=turn == 0)
    return RunDirectory.open(path)


def list_episodes(directory) -> list[int]:
    return pl.concat([directory.round("episodes", number) for number in directory.rounds()])["episode_id"].to_list()


def check_all(directory, **options) -> int:
    """Play every episode again; return the number of records that were."""
    replayed = 0
    for episode in list_episodes(directory):
        replay = replay_episode(directory, episode, **options)
        assert replay.mismatch is None, (episode, replay.mismatch)
        replayed += len(replay.record_ids)
    return replayed
