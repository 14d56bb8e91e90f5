"""Numbers that are not finite: named, and never trained on."""

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import Tensor, nn

from helpers.language_training import PROMPTS, make_config, make_model, make_tokenizer, vowels
from helpers.trl_training import make_trainer as make_trl_trainer
from helpers.trl_training import reward as trl_reward
from whence import IIF, KeepAll, NonFinite, RunDirectory
from whence.llm.ppo import PPOTrainer
from whence.sb3 import InfluenceCallback

LENGTH = 20  # steps of an episode


class Faulty(gym.Env[Any, Any]):
    """Random observations and rewards; one of them is replaced, in the step of this number."""

    mended = False

    def __init__(self, fault: str = "", at: int = -1, value: float = math.nan, box: bool = False) -> None:
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32) if box else spaces.Discrete(2)
        self.fault, self.at, self.value, self.count = fault, at, value, 0

    def _observe(self) -> Any:
        observation = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        if self.fault == "observation" and self.count == self.at:
            observation[0] = self.value
        return observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.step_in_episode = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        reward = float(self.np_random.normal())
        if self.fault == "reward" and self.count == self.at and not self.mended:
            reward = self.value
        self.count += 1
        self.step_in_episode += 1
        return self._observe(), reward, self.step_in_episode >= LENGTH, False, {}

    def action_masks(self) -> Any:
        return np.array([True, True])


class Root(BaseFeaturesExtractor):
    """The root of the first number, times a parameter: at 0 the gradient in the parameter is NaN, and nothing else."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, observations: Tensor) -> Tensor:
        root = (self.scale * observations[:, :1].abs()).sqrt()
        return torch.cat([root, observations[:, 1:]], dim=1)


def make(algorithm: Any = PPO, env: Any = None, *, root: bool = False, **settings: Any) -> Any:
    shared = {"n_steps": 64, "seed": 0, "device": "cpu"}
    if algorithm is A2C:
        settings.pop("batch_size", None)
    else:
        shared |= {"batch_size": 32, "n_epochs": 2}
    policy: dict[str, Any] = {"net_arch": [8], **({"features_extractor_class": Root} if root else {})}
    return algorithm("MlpPolicy", env or Faulty(), **{"policy_kwargs": policy, **shared, **settings})


def params(module: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def stop(model: Any, total: int = 192, **settings: Any) -> NonFinite:
    with pytest.raises(NonFinite) as raised:
        model.learn(total, callback=InfluenceCallback(settings.pop("rule", KeepAll()), **settings))
    assert not model.policy.optimizer._optimizer_step_pre_hooks
    assert not any(param._post_accumulate_grad_hooks for param in model.policy.parameters())
    assert not {"get", "_get_samples"} & set(vars(model.rollout_buffer))
    return raised.value


class TestRollouts:
    @pytest.mark.parametrize(
        ("algorithm", "value"),
        [
            *((PPO, math.nan), (A2C, math.inf), (MaskablePPO, math.nan)),
            *(pytest.param(*case, marks=pytest.mark.long) for case in ((PPO, math.inf), (A2C, math.nan))),
            pytest.param(MaskablePPO, math.inf, marks=pytest.mark.long),
        ],
    )
    def test_a_reward_is_named(
        self, algorithm: Any, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = make(algorithm, Faulty("reward", 70, value))
        error = stop(model, run=tmp_path)
        assert str(error).startswith(f"Round 2: `reward` is {value} in record 70 (environment 0). Nothing was trained")
        assert error.record_ids == (70,)
        # The run can be read, and goes on from the end of the last whole round.
        run = RunDirectory.open(tmp_path)
        assert run.table("metrics")["round"].to_list() == [1]
        monkeypatch.setattr(Faulty, "mended", True)
        again = make(algorithm, Faulty("reward", 70, value))
        again.learn(192, callback=InfluenceCallback(KeepAll(), run=tmp_path))
        assert RunDirectory.open(tmp_path).table("metrics")["round"].to_list() == [1, 2, 3]

    @pytest.mark.parametrize("fault", ["reward", "observation"])
    @pytest.mark.parametrize("normalised", [False, True])
    def test_of_the_environment_that_it_is_in(self, fault: str, normalised: bool) -> None:
        envs: Any = DummyVecEnv([Faulty, lambda: Faulty(fault, 70)])
        error = stop(make(env=VecNormalize(envs) if normalised else envs))
        assert f"Round 2: `{fault}` is nan in record 141 (environment 1)" in str(error)
        # VecNormalize's running statistics are NaN from then on.
        assert ("a VecNormalize that was saved before" in str(error)) == normalised

    def test_the_first_observation(self) -> None:
        error = stop(make(env=Faulty("observation", 0, math.inf)))
        assert "Round 1: `observation` is inf in record 0 (environment 0)" in str(error)

    def test_a_part_of_an_observation(self) -> None:
        class Parts(Faulty):
            def __init__(self) -> None:
                super().__init__("observation", 5)
                self.observation_space = spaces.Dict({"body": self.observation_space})

            def _observe(self) -> Any:
                return {"body": super()._observe()}

        model = PPO("MultiInputPolicy", Parts(), n_steps=64, device="cpu")
        assert "`observation.body` is nan in record 5 " in str(stop(model))


ZERO: dict[str, Any] = {"fault": "observation", "at": 13, "value": 0.0}


class TestSteps:
    @pytest.mark.parametrize("algorithm", [PPO, A2C, MaskablePPO])
    def test_a_gradient_stops_before_its_step(self, algorithm: Any) -> None:
        model = make(algorithm, Faulty(**ZERO), root=True, batch_size=64)
        start = params(model.policy)
        error = stop(model, 64)
        assert str(error).startswith("Round 1: the gradient of a minibatch of 64 records (")
        assert "is not finite in the parameter `features_extractor.scale`. The step was not taken" in str(error)
        assert error.parameter == "features_extractor.scale"
        assert sorted(error.record_ids) == list(range(64))
        assert same(start, params(model.policy))

    def test_only_records_of_the_minibatch_are_named(self) -> None:
        error = stop(make(env=Faulty(**ZERO), root=True), 64)
        assert len(error.record_ids) == 32
        assert 13 in error.record_ids

    def test_a_score_names_the_parameter(self) -> None:
        error = stop(make(env=Faulty(**ZERO), root=True), rule=IIF())
        assert "Round 1: The gradient of the target Return() is not finite in the parameter" in str(error)
        assert error.parameter == "features_extractor.scale"

    def test_a_norm_that_overflows(self) -> None:
        # The gradient is finite, but not its norm, so that SB3 clips it to 0.
        model = make()
        model.policy.value_net.weight.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
        assert "is not finite in the parameter `value_net.weight`" in str(stop(model, 64))

    def test_a_gradient_that_comes_out_otherwise_when_it_is_computed_again(self) -> None:
        model = make()
        spoil_gradient(model.policy, "value_net.weight")
        start = params(model.policy)
        assert "Round 1: the loss of a minibatch of 32 records" in str(stop(model, 64))
        assert same(start, params(model.policy))

    def test_a_policy_that_diverges(self) -> None:
        error = stop(make(env=Faulty(box=True), learning_rate=1e3, n_epochs=10), 64)
        assert "Round 1: training diverged: the policy's outputs no longer form a distribution" in str(error)
        error = stop(make(learning_rate=math.inf, n_epochs=1, batch_size=64), 64)
        assert "Round 1: a step made the parameter `mlp_extractor.policy_net.0.weight` not finite" in str(error)

    def test_a_zero_gradient_is_finite(self) -> None:
        model = make(max_grad_norm=0.0)
        start = params(model.policy)
        model.learn(64, callback=InfluenceCallback(KeepAll()))
        steps = [state["step"] for state in model.policy.optimizer.state.values()]
        assert steps
        assert set(map(int, steps)) == {4}
        assert same(start, params(model.policy))

    def test_another_error_stays_as_it_is(self) -> None:
        class Wrong(InfluenceCallback):
            def train_selected(self, train: Any, selection: Any) -> None:
                super().train_selected(train, selection)
                raise ValueError("another")

        with pytest.raises(ValueError, match=r"^another$"):
            make().learn(64, callback=Wrong(KeepAll()))


def spoil_gradient(model: Any, name: str) -> None:
    """Make the first gradient of a parameter NaN."""
    calls: list[Tensor] = []

    def spoil(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient * math.nan if len(calls) == 1 else gradient

    dict(model.named_parameters())[name].register_hook(spoil)


class TestLanguageModels:
    def make(self, folder: Path, reward: Any = vowels, **settings: Any) -> PPOTrainer:
        config = make_config(folder, **{"eval_every": 0, **settings})
        return PPOTrainer(config, make_model(), make_tokenizer(), reward, PROMPTS)

    def test_a_reward(self, tmp_path: Path) -> None:
        rounds: list[Any] = []

        def reward(prompts: Any, responses: Any) -> Any:
            rounds.append(vowels(prompts, responses))
            if len(rounds) == 2:
                rounds[1][3] = math.inf
            return rounds[-1]

        message = r"Round 2: .* reward is inf .*record 11"
        with pytest.raises(NonFinite, match=message) as raised:
            self.make(tmp_path, reward).train()
        assert raised.value.record_ids == (11,)
        assert RunDirectory.open(tmp_path).table("metrics")["round"].to_list() == [1]

    def test_a_gradient(self, tmp_path: Path) -> None:
        trainer = self.make(tmp_path, rounds=1, ppo_epochs=1)
        start, name = params(trainer.model), "language_model.model.layers.0.mlp.up_proj.weight"
        spoil_gradient(trainer.model, name)
        with pytest.raises(NonFinite, match=f"Round 1: the gradient .* 4 rows .* `{name}`") as raised:
            trainer.train()
        assert (raised.value.parameter, len(raised.value.record_ids)) == (name, 4)
        assert same(start, params(trainer.model))

    def test_a_value(self, tmp_path: Path) -> None:
        trainer = self.make(tmp_path)
        with torch.no_grad():
            trainer.model.value_head.weight.fill_(math.nan)
        with pytest.raises(NonFinite, match=r"Round 1: the value of record 0 .* 7 other"):
            trainer.train()

    def test_a_model_that_diverges(self, tmp_path: Path) -> None:
        with pytest.raises(NonFinite, match=r"Round \d: .* not finite"):
            self.make(tmp_path, learning_rate=1e30).train()


class TestTRL:
    def make(self, folder: Path, value: Any, monkeypatch: pytest.MonkeyPatch, kind: str = "grpo", **more: Any) -> Any:
        def spoilt(prompts: Any, completions: Any, **columns: Any) -> Any:
            rewards = trl_reward(prompts, completions)
            return [value if number == 1 else reward for number, reward in enumerate(rewards)]

        monkeypatch.setattr("helpers.trl_training.reward", spoilt)
        return make_trl_trainer(kind, folder, **more)

    def test_an_infinite_reward(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = self.make(tmp_path, math.inf, monkeypatch)
        with pytest.raises(NonFinite, match=r"Round 1: the reward spoilt is inf .*record 1") as raised:
            trainer.train()
        assert raised.value.record_ids == (1,)

    def test_a_reward_that_does_not_apply_is_trls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ends = []
        for own in (True, False):
            trainer = self.make(tmp_path, math.nan, monkeypatch, "rloo", own=own)
            start = params(trainer.model)
            trainer.train()
            ends.append(params(trainer.model))
            assert not same(start, ends[-1])
        assert same(*ends)

    def test_a_loss_is_checked_before_a_backward_pass_that_steps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("whence.llm.trl.trainers._SelectingTrainer._steps_in_backward", True)  # as under DeepSpeed
        trainer = self.make(tmp_path, 1.0, monkeypatch, run=tmp_path / "run")
        compute = type(trainer).__mro__[2]._compute_loss
        monkeypatch.setattr(type(trainer).__mro__[2], "_compute_loss", lambda *args: compute(*args) * math.nan)
        passes: list[Any] = []
        monkeypatch.setattr(trainer.accelerator, "backward", lambda *args, **more: passes.append(args))
        with pytest.raises(NonFinite, match=r"Round 1: the loss .* completions"):
            trainer.train()
        assert passes == []

    def test_a_gradient(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = self.make(tmp_path, 1.0, monkeypatch)
        start, name = params(trainer.model), "model.layers.0.self_attn.v_proj.weight"
        spoil_gradient(trainer.model, name)
        with pytest.raises(NonFinite, match=f"Round 1: the gradient .* `{name}`"):
            trainer.train()
        assert same(start, params(trainer.model))
