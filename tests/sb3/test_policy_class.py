"""A policy with a class of the user's: built again by whoever names the class, and what is said of one with a state."""

import gymnasium as gym
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from typer.testing import CliRunner

from whence import IIF, WhenceError, open_run
from whence.cli.app import app
from whence.sb3 import InfluenceCallback, register_policy_class
from whence.sb3.models import building
from whence.stored import load_round


class Squashed(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 4)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, observations):
        return torch.tanh(self.layer(observations))


class Growing(Squashed):
    """Has another scale at each call."""

    calls = 0

    def forward(self, observations):
        self.calls += 1
        return super().forward(observations * (1 + 0.05 * self.calls))


def train(run, extractor, rule=None):
    policy_kwargs = {"features_extractor_class": extractor}
    env = gym.make("CartPole-v1")
    fixed = {"n_steps": 256, "batch_size": 64, "n_epochs": 1, "seed": 0, "device": "cpu"}
    model = PPO("MlpPolicy", env, **fixed, policy_kwargs=policy_kwargs)
    return model.learn(256, callback=InfluenceCallback(rule, run=run))


def test_it_is_built_again_once_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "_REGISTERED", {})
    train(tmp_path / "run", Squashed)
    arguments = ["attribute", str(tmp_path / "run"), "--round", "1"]
    assert "--policy module:Class" in str(CliRunner().invoke(app, arguments).exception)
    named = CliRunner().invoke(app, [*arguments, "--policy", f"{__name__}:Squashed"])
    assert named.exit_code == 0, named.output
    model, records = load_round(open_run(tmp_path / "run"), 1)
    log_probs = model.policy.evaluate_actions(records.observations, records.actions.long())[1]
    torch.testing.assert_close(log_probs, records.log_probs)
    assert "has no attribute 'Squished'" in str(
        CliRunner().invoke(app, [*arguments, "--policy", f"{__name__}:Squished"]).exception
    )
    with pytest.raises(WhenceError, match="a class of torch"):
        register_policy_class(gym.Env)


def test_a_layer_with_a_state_is_among_the_causes(tmp_path, caplog):
    train(tmp_path / "run", Growing, IIF())
    assert "a layer that keeps a state" in caplog.text
    assert "a features extractor, that keeps a state" in caplog.text
