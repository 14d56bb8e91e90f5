"""Rounds whose rewards tell no action from another: found, and kept whole where a study asks for it."""

import itertools
from typing import Any

import gymnasium as gym
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from toys import Toy
from whence import IIF, KeepAll
from whence.experiments.rl.research_callback import ResearchCallback
from whence.sb3 import InfluenceCallback


class Paying(Toy):
    """Pays `usual` for each step and `last` for the eighth, with which the episode ends or is cut."""

    def __init__(self, usual: float, last: float, ends: bool) -> None:
        super().__init__()
        self.usual, self.last, self.ends, self.steps = usual, last, ends, itertools.count(1)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.steps = itertools.count(1)
        return super().reset(**options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        is_last = next(self.steps) == 8
        reward = self.last if is_last else self.usual
        return self._observe(), reward, is_last and self.ends, is_last and not self.ends, {}


def train(callback: InfluenceCallback, *envs: gym.Env[Any, Any], normalised: bool = False, rounds: int = 2) -> Any:
    """Return a model trained on environments side by side, 32 steps of each a round."""
    env: Any = DummyVecEnv([lambda env=each: Monitor(env) for each in envs])
    env = VecNormalize(env) if normalised else env
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=2, policy_kwargs={"net_arch": [8]}, seed=0)
    return model.learn(32 * len(envs) * rounds, callback=callback)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("usual", "last", "ends", "flat"),
    [
        (0.0, 0.0, True, True),
        (0.0, 0.0, False, True),
        (-1.0, -1.0, False, True),  # Acrobot, as long as nobody swings up
        (1.0, 1.0, True, False),  # CartPole: who stays longer earns more
        (0.0, 1.0, False, False),
        (-1.0, 0.0, True, False),
    ],
)
def test_a_round_is_flat_where_no_action_earned_more_than_another(
    usual: float, last: float, ends: bool, flat: bool, normalised: bool
) -> None:
    callback = ResearchCallback(IIF(0.5), keep_flat=True)
    train(callback, Paying(usual, last, ends), Paying(usual, last, ends), normalised=normalised)
    assert [row["flat"] for row in callback.metrics] == [flat] * 2
    assert [row["kept"] == row["records"] for row in callback.metrics] == [flat] * 2
    assert all(row["negative_share"] > 0 for row in callback.metrics)  # scored in any case


def test_one_environment_that_pays_otherwise_is_enough() -> None:
    callback = ResearchCallback(IIF(0.5), keep_flat=True)
    train(callback, Paying(-1.0, -1.0, False), Paying(-2.0, -2.0, False))
    assert [row["flat"] for row in callback.metrics] == [False] * 2


class PayingInTheSecond(Paying):
    """Pays for every second step of the second rollout, and for no other."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0, False)
        self.total = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.total += 1
        observation, _, *rest = super().step(action)
        return observation, float(32 < self.total <= 64 and self.total % 2), *rest


def test_each_round_is_looked_at_by_itself() -> None:
    callback = ResearchCallback(IIF(0.5), keep_flat=True)
    train(callback, PayingInTheSecond(), rounds=3)
    assert [row["flat"] for row in callback.metrics] == [True, False, True]


def test_a_flat_round_kept_whole_trains_as_without_selection() -> None:
    policies = [
        train(callback, Paying(0.0, 0.0, False)).policy.state_dict()
        for callback in (ResearchCallback(IIF(0.5), keep_flat=True), InfluenceCallback(KeepAll()))
    ]
    assert all(torch.equal(policies[0][name], policies[1][name]) for name in policies[0])


def test_as_published_a_rule_selects_in_flat_rounds_too() -> None:
    for callback in (InfluenceCallback(IIF(0.5)), ResearchCallback(IIF(0.5))):
        train(callback, Paying(0.0, 0.0, False))
        assert all(row["flat"] and row["kept"] < row["records"] for row in callback.metrics)
