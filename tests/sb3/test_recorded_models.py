"""Models that cannot be scored: `InfluenceCallback` records them, and changes nothing."""

import logging
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import ARS, QRDQN, TQC, TRPO, CrossQ
from stable_baselines3 import DDPG, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

import whence
from whence import IIF
from whence.core import Unsupported
from whence.sb3 import InfluenceCallback
from whence.sb3.recorded_models import add_values

STEPS = 140


def make_env(name: str, count: int = 2) -> Any:
    return DummyVecEnv([lambda: gym.make(name)] * count)


def make_off_policy(algorithm: Any, name: str = "Pendulum-v1", **settings: Any) -> Callable[[], Any]:
    return lambda: algorithm(
        *("MlpPolicy", make_env(name)),
        **{"learning_starts": 50, "seed": 0, **shrink(), **settings},
    )


def shrink() -> dict[str, Any]:
    """Return settings of a small model; SB3 changes the dictionaries that it gets."""
    return {"batch_size": 16, "buffer_size": 1000, "policy_kwargs": {"net_arch": [16]}}


def make_her() -> Any:
    env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=4, continuous=False)])
    settings: Any = {"replay_buffer_class": HerReplayBuffer, "learning_starts": 50, "seed": 0, **shrink()}
    return DQN("MultiInputPolicy", env, **settings)


class Normed(FlattenExtractor):
    """A layer that mixes records while it trains."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.norm = nn.BatchNorm1d(self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(observations))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], Any], bool]] = {
    "DQN": (make_off_policy(DQN, "CartPole-v1"), True),
    "QRDQN": (make_off_policy(QRDQN, "CartPole-v1"), True),
    "SAC": (make_off_policy(SAC), True),
    "SAC, normalised": (
        lambda: SAC("MlpPolicy", VecNormalize(make_env("Pendulum-v1")), learning_starts=50, seed=0, **shrink()),
        True,
    ),
    "TD3": (make_off_policy(TD3), True),
    "DDPG": (make_off_policy(DDPG), True),
    "TQC": (make_off_policy(TQC), True),
    "CrossQ": (make_off_policy(CrossQ), True),
    "HER": (make_her, True),
    "TRPO": (lambda: TRPO("MlpPolicy", make_env("CartPole-v1"), n_steps=64, seed=0), False),
    "ARS": (lambda: ARS("LinearPolicy", make_env("CartPole-v1", 1), n_delta=2, seed=0), False),
}


def train(make: Callable[[], Any], callback: Any = None) -> tuple[Any, list[torch.Tensor]]:
    model = make()
    torch.manual_seed(0)
    model.learn(STEPS, callback=callback)
    return model, [parameter.detach().clone() for parameter in model.policy.parameters()]


# DDPG is a TD3 of other settings.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "DDPG" else ()) for name in MODELS]
)
def test_it_trains_to_the_same_bits_and_is_recorded(tmp_path: Any, caplog: Any, name: str) -> None:
    make, has_values = MODELS[name]
    _, plain = train(make)
    with caplog.at_level(logging.WARNING):
        model, recorded = train(make, InfluenceCallback(run=tmp_path / "run"))
    assert all(map(torch.equal, plain, recorded))
    assert [text for text in caplog.messages if "recorded without scores" in text] == caplog.messages
    assert "Recorded" not in type(model.env).__name__
    assert "Recorded" not in type(getattr(model.env, "venv", model.env)).__name__
    assert not any("RecordResets" in type(env).__name__ for env in model.env.unwrapped.envs)
    run = whence.open_run(tmp_path / "run")
    table = run.round("records", 1)
    assert len(table) >= (128 if name == "TRPO" else STEPS)
    assert {"value", "return"} <= {*table.columns} or not has_values
    episodes = run.round("episodes", 1)["episode_id"].to_list()
    if name != "HER":  # whose environment draws from a generator of its space
        replay = whence.replay_episode(run, episodes[0], env=lambda: make().env.unwrapped.envs[0])
        assert replay.mismatch is None
    assert any(check.outcome == "fine" for check in whence.inspect(run))


def test_values_are_the_critics_and_returns_those_of_their_definition(tmp_path: Any) -> None:
    model, _ = train(MODELS["SAC, normalised"][0], InfluenceCallback(run=tmp_path / "run"))
    table = whence.open_run(tmp_path / "run").round("records", 1)
    observations = model.env.normalize_obs(np.stack(table["observation"].to_list()))
    with torch.no_grad():
        actions = torch.as_tensor(np.array(table["action"].to_list(), np.float32)).reshape(-1, 1) / 2  # scaled to ±1
        values = torch.min(*model.critic(torch.as_tensor(observations, dtype=torch.float32), actions)).flatten()
    assert np.allclose(table["value"].to_numpy(), values.numpy(), atol=1e-5)
    # The first rewards of a run, by hand: r + γ ((1 − λ) v' + λ R').
    value, returns, rewards = (table[name].to_numpy().astype(float) for name in ("value", "return", "reward"))
    rewards = model.env.normalize_reward(rewards)  # the critic is of these
    assert returns[3] == pytest.approx(rewards[3] + 0.99 * (0.05 * value[4] + 0.95 * returns[4]), rel=1e-5)
    assert add_values(model, table.drop("observation")).columns == table.drop("observation").columns


def test_a_policy_that_mixes_records_is_recorded_but_not_chosen_from(tmp_path: Any, caplog: Any) -> None:
    def make() -> PPO:
        kwargs = {"features_extractor_class": Normed}
        return PPO("MlpPolicy", make_env("CartPole-v1"), n_steps=64, n_epochs=2, seed=0, policy_kwargs=kwargs)

    _, plain = train(make)
    with caplog.at_level(logging.WARNING):
        _, recorded = train(make, InfluenceCallback(run=tmp_path / "run"))
    assert all(map(torch.equal, plain, recorded))
    assert sum("recorded without scores" in text for text in caplog.messages) == 1
    run = whence.open_run(tmp_path / "run")
    table, run_metrics = run.round("records", 2), run.table("metrics")
    assert "advantage" in table.columns
    assert run_metrics["kept"].to_list() == run_metrics["records"].to_list()
    assert "score" not in table.columns
    for callback in (InfluenceCallback(), InfluenceCallback(IIF(drop=0.5), run=tmp_path / "other")):
        with pytest.raises(Unsupported, match="BatchNorm"):
            train(make, callback)


@pytest.mark.parametrize("options", [{}, {"rule": IIF(drop=0.5)}, {"recordings": [1]}])
def test_what_takes_a_choice_is_refused(tmp_path: Any, options: Any) -> None:
    run = {} if not options else {"run": tmp_path / "run"}
    with pytest.raises(Unsupported, match="not on-policy"):
        train(MODELS["DQN"][0], InfluenceCallback(**options, **run))


def test_a_second_learn_adds_rounds(tmp_path: Any) -> None:
    model, callback = MODELS["DQN"][0](), InfluenceCallback(run=tmp_path / "run")
    for _ in range(2):
        model.learn(100, callback=callback)
    run = whence.open_run(tmp_path / "run")
    assert run.rounds() == [1, 2]
    assert [len(run.round("records", number)) for number in (1, 2)] == [104, 104]


def test_an_evaluation_behind_vec_normalize_goes_on(tmp_path: Any) -> None:
    watched = DummyVecEnv([lambda: Monitor(gym.make("Pendulum-v1"))])
    evaluation = EvalCallback(
        VecNormalize(watched, training=False, norm_reward=False), n_eval_episodes=1, eval_freq=60, verbose=0
    )
    model = MODELS["SAC, normalised"][0]()
    model.learn(150, callback=[InfluenceCallback(run=tmp_path / "run"), evaluation])
    assert len(whence.open_run(tmp_path / "run").round("records", 1)) == 150


def test_what_was_recorded_before_an_interruption_stays(tmp_path: Any) -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 80:
                raise KeyboardInterrupt
            return True

    model = MODELS["DQN"][0]()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model.learn(200, callback=[InfluenceCallback(run=tmp_path / "run"), Stop()])
    model.learn(100, callback=InfluenceCallback(run=tmp_path / "run"))
    run = whence.open_run(tmp_path / "run")
    assert [len(run.round("records", number)) for number in run.rounds()] == [80, 80, 104]
    assert not {"reset", "step_wait", "end_round"} & vars(model.env).keys()
