"""Numbers that are not finite: named, saved, or dropped, and never trained on."""

import copy
import logging
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import Tensor, nn

from test_llm_trainer import PROMPTS, Keep, make_config, make_model, make_tokenizer, vowels
from test_llm_trl import make_trainer as make_trl_trainer
from test_llm_trl import reward as trl_reward
from whence import IIF, IPPO, KeepAll, NonFinite, RunDirectory, RunDirectoryError, WhenceError, load_nonfinite
from whence.culprits import find_culprits
from whence.llm.generation import generate, tokenize_prompts
from whence.llm.model import Reference, WithValueHead
from whence.llm.rollout import make_rollout
from whence.llm.trainer import PPOTrainer
from whence.nonfinite import measure_norms, nonfinite_path
from whence.policies import Outputs
from whence.sb3 import InfluenceCallback, collect, replay_round
from whence.tables import read_finite_rows

LENGTH = 20  # steps of an episode


class Faulty(gym.Env[Any, Any]):
    """Random observations and rewards; one of them is replaced, in the step of this number."""

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
        if self.fault == "reward" and self.count == self.at:
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
    if algorithm is not A2C:
        shared |= {"batch_size": 32, "n_epochs": 2}
    policy: dict[str, Any] = {"net_arch": [8], **({"features_extractor_class": Root} if root else {})}
    return algorithm("MlpPolicy", env or Faulty(), **{"policy_kwargs": policy, **shared, **settings})


def params(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.policy.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def stop(model: Any, total: int = 192, rule: Any = None, **settings: Any) -> NonFinite:
    with pytest.raises(NonFinite) as raised:
        model.learn(total, callback=InfluenceCallback(rule or KeepAll(), **settings))
    assert not model.policy.optimizer._optimizer_step_pre_hooks
    assert "get" not in vars(model.rollout_buffer)
    assert "_get_samples" not in vars(model.rollout_buffer)
    assert all(bool(torch.isfinite(param).all()) for param in model.policy.parameters())
    return raised.value


class TestRollouts:
    @pytest.mark.filterwarnings("ignore:invalid value encountered")  # in SB3's advantages
    @pytest.mark.parametrize("algorithm", [PPO, A2C, MaskablePPO])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_reward_is_named_where_it_begins(self, algorithm: Any, value: float, tmp_path: Path) -> None:
        model = make(algorithm, Faulty("reward", 37, value))
        before = params(model)
        error = stop(model, run=tmp_path)
        assert str(error).startswith(
            f"Round 1: `reward` is {value} in record 37 (environment 0, episode 1, step 17). "
            "Also not finite, in part as advantages reach back to earlier records: advantage (37)."
        )
        assert "on_nonfinite='drop'" in str(error)
        assert "At a time limit" not in str(error)
        assert same(before, params(model))
        saved = load_nonfinite(tmp_path / "nonfinite" / "round_00001.safetensors")
        assert error.path == nonfinite_path(tmp_path, 1)
        assert (saved.number, saved.culprits, error.record_ids) == (1, (37,), (37,))
        assert saved.records["record_ids"].tolist() == list(range(38))
        assert not saved.records["rewards"][37].isfinite()
        assert torch.equal(saved.policy["action_net.weight"], model.policy.action_net.weight)
        assert saved.settings[0]["lr"] == model.policy.optimizer.param_groups[0]["lr"]

    def test_of_the_environment_that_it_is_in(self) -> None:
        envs = DummyVecEnv([Faulty, lambda: Faulty("reward", 70)])
        error = stop(make(env=envs))
        assert "Round 2: `reward` is nan in record 141 (environment 1, episode 7, step 10)" in str(error)
        assert "With InfluenceCallback(run=...) the records are saved." in str(error)
        assert error.path is None

    @pytest.mark.parametrize("on_nonfinite", ["stop", "drop"])
    def test_statistics_of_vecnormalize_are_spoilt_for_ever(self, on_nonfinite: Any) -> None:
        envs = VecNormalize(DummyVecEnv([Faulty, lambda: Faulty("reward", 30)]), norm_obs=False)
        error = stop(make(env=envs), on_nonfinite=on_nonfinite)
        # From then on it spreads over all environments and steps.
        assert "`reward` is nan in record 61 (environment 1, episode 5, step 10)" in str(error)
        assert "VecNormalize's running statistics (ret_rms) took the number in" in str(error)
        assert "'drop'" not in str(error)

    def test_an_observation_stops_before_the_policy_reads_it(self) -> None:
        error = stop(make(env=DummyVecEnv([Faulty, lambda: Faulty("observation", 70)])), on_nonfinite="drop")
        assert str(error).startswith(
            "Round 2: `observation` is nan in record 141 (environment 1, step 10), which was not collected, and the "
            "policy has no valid action for it."
        )
        assert error.record_ids == (141,)
        envs = VecNormalize(DummyVecEnv([Faulty, lambda: Faulty("observation", 30)]))
        error = stop(make(env=envs))
        assert "in record 61 (environment 1, step 10)" in str(error)
        assert "(obs_rms)" in str(error)
        assert "At a time limit" in str(stop(make(env=Faulty("reward", 39))))
        assert "Round 1: `observation` is inf in record 0 (environment 0)" in str(
            stop(make(env=Faulty("observation", 0, math.inf)))
        )

    def test_a_policy_that_cannot_act_from_the_start(self) -> None:
        model = make()
        with torch.no_grad():
            model.policy.mlp_extractor.policy_net[0].weight.fill_(3e38)
            model.policy.action_net.weight.fill_(3e38)
        error = stop(model)
        assert "the policy has no valid action for the first observation: the output of the layer" in str(error)

    def test_a_value_loss_that_overflows(self) -> None:
        error = stop(make(env=Faulty("reward", 37, 1e30)))
        assert "the value loss (return 1e+30, value" in str(error)
        assert "in record 37 (" in str(error)


def train(model: Any, rule: Any = None, total: int = 192, **settings: Any) -> InfluenceCallback:
    callback = InfluenceCallback(rule or KeepAll(), on_nonfinite="drop", **settings)
    model.learn(total, callback=callback)
    assert all(bool(torch.isfinite(param).all()) for param in model.policy.parameters())
    assert (model.rollout_buffer.buffer_size, model.rollout_buffer.n_envs) == (model.n_steps, model.n_envs)
    return callback


class TestDropping:
    def test_records_of_one_episode(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        clean = collect(make(env=Faulty()))
        with caplog.at_level(logging.WARNING, "whence"):
            callback = train(make(env=Faulty("reward", 37)), total=64, run=tmp_path, recordings=[1])
        lost = list(range(20, 38))  # the episode's, up to the reward
        assert "round 1: 18 of 64 records dropped, not finite: advantage (17), reward (1)" in caplog.text
        assert callback.round is not None
        assert callback.round.nonfinite == dict.fromkeys(lost[:-1], "advantage") | {37: "reward"}
        others = torch.tensor([number for number in range(64) if number not in lost])
        # SB3 itself has NaN in all of the first 38, since 0 times NaN is NaN.
        assert torch.equal(callback.round.records.ids, others)
        assert torch.equal(callback.round.records.advantages, clean.advantages[others])
        assert torch.equal(callback.round.records.returns, clean.returns[others])
        table = RunDirectory.open(tmp_path).round("records", 1)
        assert table["record_id"].to_list() == list(range(64))
        dropped = table.filter(~pl.col("keep"))
        assert dropped["reason"].to_list() == ["not finite: advantage"] * 17 + ["not finite: reward"]
        assert dropped["advantage"].null_count() == 18
        assert dropped["reward"].null_count() == 1
        assert dropped["weight"].to_list() == [0.0] * 18
        assert table.filter("episode_start")["record_id"].to_list() == [0, 20, 40, 60]
        assert read_finite_rows(RunDirectory.open(tmp_path), 1)["record_id"].to_list() == others.tolist()
        assert callback.metrics[0]["nonfinite"] == 18
        assert callback.metrics[0]["nonfinite_steps"] == 0

    @pytest.mark.parametrize("algorithm", [PPO, A2C, MaskablePPO])
    def test_the_round_is_that_of_the_others(self, algorithm: Any, tmp_path: Path) -> None:
        model = make(algorithm, DummyVecEnv([Faulty, lambda: Faulty("reward", 90)]))
        callback = train(model, IIF(), 256, run=tmp_path, recordings=[2])
        assert [row["nonfinite"] for row in callback.metrics] == [0, 11]
        recording = callback.recording
        assert recording is not None
        assert len(recording.records) == 117
        assert recording.trained.max() < 117
        end = replay_round(model, recording)
        assert all(torch.equal(tensor, recording.end[name]) for name, tensor in end.items())

    def test_scores(self, tmp_path: Path) -> None:
        model = make(env=Faulty("observation", 13, 0.0), root=True)
        callback = train(model, IIF(), 64, run=tmp_path)
        assert callback.round is not None
        assert callback.round.nonfinite == {13: "score"}
        table = RunDirectory.open(tmp_path).round("records", 1)
        assert table.filter(pl.col("score").is_null())["reason"].to_list() == ["not finite: score"]
        error = stop(make(env=Faulty("observation", 13, 0.0), root=True), rule=IIF(), run=tmp_path / "stop")
        assert "Round 1: The gradient of the target Return() is not finite in the parameter" in str(error)
        assert "Not finite is the gradient of record 13 (environment 0, episode 0, step 13)." in str(error)
        assert load_nonfinite(tmp_path / "stop/nonfinite/round_00001.safetensors").parameter == error.parameter
        assert error.parameter == "features_extractor.scale"

    def test_infinite_observations_that_the_policy_can_act_on(self) -> None:
        callback = train(make(env=Faulty("observation", 13, math.inf)), total=64)
        assert callback.round is not None
        assert callback.round.nonfinite == {13: "observation"}

    def test_a_round_without_two_finite_records_is_skipped(self, tmp_path: Path) -> None:
        model = make(env=Faulty("reward", 15), n_steps=16, batch_size=16)
        before = params(model)
        callback = train(model, IIF(), 16, run=tmp_path)
        assert callback.metrics[0]["skipped"]
        assert callback.skipped_rounds == 1
        assert same(before, params(model))
        table = RunDirectory.open(tmp_path).round("records", 1)
        assert set(table["reason"]) == {"not finite: advantage", "not finite: reward"}
        assert table["advantage"].null_count() == 16
        callback = train(model, IIF(), 32)
        assert callback.metrics[-1]["kept"] > 2

    def test_a_rollout_whose_training_was_interrupted(self) -> None:
        class Failing(KeepAll):
            def select(self, *args: Any) -> Any:
                raise KeyboardInterrupt

        model = make(env=Faulty("reward", 37))
        with pytest.raises(KeyboardInterrupt):
            model.learn(64, callback=InfluenceCallback(Failing(), on_nonfinite="drop"))
        assert len(train(model, total=64).round.records) == 64  # type: ignore[union-attr]

    def test_all_values_diverged(self) -> None:
        model = make()
        with torch.no_grad():
            model.policy.value_net.bias.fill_(1e30)
        assert "the value loss" in str(stop(model, on_nonfinite="drop"))


ZERO = {"fault": "observation", "at": 13, "value": 0.0}


class TestSteps:
    @pytest.mark.parametrize("algorithm", [PPO, A2C, MaskablePPO])
    def test_a_gradient_stops_before_its_step(self, algorithm: Any, tmp_path: Path) -> None:
        model = make(algorithm, Faulty(**ZERO), root=True)  # type: ignore[arg-type]
        start = params(model)
        error = stop(model, 64, run=tmp_path)
        assert "in record 13 (environment 0, episode 0, step 13), its gradient" in str(error)
        assert "parameter `features_extractor.scale`" in str(error)
        assert "The step was not taken: policy and optimiser are as before it." in str(error)
        assert (error.record_ids, error.parameter) == ((13,), "features_extractor.scale")
        saved = load_nonfinite(tmp_path / "nonfinite/round_00001.safetensors")
        assert len(saved.records["record_ids"]) == (64 if algorithm is A2C else 32)
        assert 13 in saved.records["record_ids"]
        named = dict(model.policy.named_parameters())
        assert all(torch.equal(saved.policy[name], param) for name, param in named.items())
        steps = 0 if algorithm is A2C or not saved.optimizer else int(saved.optimizer["action_net.weight"]["step"])
        assert same(start, params(model)) == (steps == 0)
        assert all(param.grad is None for param in named.values())

    def test_a_step_that_is_left_out(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make(env=Faulty(**ZERO), root=True)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "whence"):
            callback = train(model, total=64)
        assert callback.metrics[0]["nonfinite_steps"] == 2  # one in each epoch
        assert model.policy.optimizer.state[model.policy.action_net.weight]["step"] == 2
        assert "round 1: 2 of 4 steps left out, the gradient of a minibatch of 32 records is not finite" in caplog.text

    def test_a_round_without_a_step(self) -> None:
        model = make(A2C, Faulty(**ZERO), root=True)  # type: ignore[arg-type]
        start = params(model)
        assert "no step was taken, since in each of 1 the gradient" in str(stop(model, 64, on_nonfinite="drop"))
        assert same(start, params(model))

    def test_a_loss_that_overflows(self) -> None:
        # The gradient is finite, but not its norm, so that SB3 clips it to 0.
        model = make(learning_rate=1e22, policy_kwargs={"net_arch": {"pi": [8], "vf": []}})
        for part in (model.policy.mlp_extractor, model.policy.action_net):
            part.requires_grad_(requires_grad=False)
        error = stop(model, 64)
        assert "the gradient of a minibatch of 32 records is not finite: in record" in str(error)
        assert "its loss overflows" in str(error)

    def test_an_infinite_gradient(self) -> None:
        model = make()
        model.policy.value_net.weight.register_hook(lambda gradient: gradient * math.inf)
        assert "the gradient of a minibatch of 32 records is not finite" in str(stop(model, 64))

    @pytest.mark.parametrize("on_nonfinite", ["stop", "drop"])
    def test_a_policy_that_diverges_is_restored(self, on_nonfinite: Any) -> None:
        model = make(env=Faulty(box=True), learning_rate=1e3, n_epochs=10)
        start = params(model)
        error = stop(model, 64, on_nonfinite=on_nonfinite)
        assert "the policy has no valid distribution of actions for a minibatch of 32 records" in str(error)
        assert "Policy and optimiser are as before the round." in str(error)
        assert same(start, params(model))
        assert not model.policy.optimizer.state

    def test_the_trained_policy_is_checked(self) -> None:
        model = make(env=Faulty(box=True), learning_rate=1e30, n_epochs=1, batch_size=64)
        start = params(model)
        assert "the trained policy has no valid action for the next observation" in str(stop(model, 64))
        assert same(start, params(model))

    def test_a_zero_gradient_is_finite(self) -> None:
        model = make(max_grad_norm=0.0)
        model.learn(64, callback=InfluenceCallback(KeepAll()))

    def test_another_error_stays_as_it_is(self) -> None:
        class Wrong(InfluenceCallback):
            def train_selected(self, train: Any, selection: Any) -> None:
                super().train_selected(train, selection)
                raise ValueError("another")

        with pytest.raises(ValueError, match=r"^another$"):
            make().learn(64, callback=Wrong(KeepAll()))

    def test_a_full_disk_does_not_hide_the_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr("whence.nonfinite.save_file", refuse)
        error = stop(make(env=Faulty("reward", 37)), run=tmp_path)
        assert "could not be written: No space left on device." in str(error)
        assert error.path is None


def test_only_dropping_is_part_of_a_runs_configuration() -> None:
    assert "on_nonfinite" not in InfluenceCallback(KeepAll()).settings()
    assert InfluenceCallback(KeepAll(), on_nonfinite="drop").settings()["on_nonfinite"] == "drop"
    with pytest.raises(WhenceError, match=r"on_nonfinite is 'ignore'.*Known: drop, stop"):
        InfluenceCallback(KeepAll(), on_nonfinite="ignore")  # type: ignore[arg-type]


def test_starting_a_run_over_removes_the_minibatch(tmp_path: Path) -> None:
    stop(make(env=Faulty("reward", 37)), run=tmp_path)
    make().learn(64, callback=InfluenceCallback(KeepAll(), run=tmp_path))
    with pytest.raises(RunDirectoryError, match="is not there"):
        load_nonfinite(nonfinite_path(tmp_path, 1))
    with pytest.raises(RunDirectoryError, match="is marked None"):
        load_nonfinite(tmp_path / "policies" / "round_00001.safetensors")


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (None, "not readable as JSON"),
        ("[]", "holds list, and an object is needed"),
        ("{}", r"holds what whence does not write \('number'\)"),
        ('{"number": 1, "message": "", "parameter": null, "culprits": 3, "settings": []}', "does not write"),
        ('{"number": 1, "message": "", "parameter": null, "culprits": [], "settings": [3]}', "does not write"),
    ],
)
def test_a_changed_minibatch_is_refused(tmp_path: Path, about: str | None, message: str) -> None:
    metadata = {"format": "whence-nonfinite", "version": "1", **({} if about is None else {"about": about})}
    save_file({"records/rewards": torch.zeros(2)}, tmp_path / "round_00001.safetensors", metadata)
    with pytest.raises(RunDirectoryError, match=message):
        load_nonfinite(tmp_path / "round_00001.safetensors")


def test_norms() -> None:
    assert measure_norms([torch.tensor([3.0, 4.0]), torch.tensor([1.0])]) == 6
    assert measure_norms([]) == measure_norms([torch.zeros(2)]) == 0
    assert measure_norms([torch.tensor([3e38, 3e38])]) == math.inf
    assert math.isnan(measure_norms([torch.ones(1), torch.tensor([math.inf])]))
    assert math.isnan(measure_norms([torch.tensor([math.nan]), torch.ones(1)]))


class TestCulprits:
    def find(self, objective: Any) -> Any:
        records = collect(make(env=Faulty()))
        return find_culprits(make().policy, records, objective), records

    def test_all_of_them(self) -> None:
        wrong = [5, 31, 63]

        def objective(outputs: Outputs, records: Any) -> Tensor:
            factor = torch.where(torch.isin(records.ids, torch.tensor(wrong)), math.nan, 1.0)
            return outputs.log_prob * factor

        culprits, _ = self.find(objective)
        assert culprits.positions == tuple(wrong)
        assert culprits.parameter == "mlp_extractor.policy_net.0.weight"
        assert not culprits.is_policy

    def test_only_their_sum(self) -> None:
        culprits, _ = self.find(lambda outputs, records: outputs.log_prob * 1e37)
        assert culprits.positions == ()
        assert "sum" in culprits.reason

    def test_none(self) -> None:
        culprits, _ = self.find(lambda outputs, records: outputs.log_prob)
        assert culprits.is_finite


def llm_reward(value: float, at: int = 3, call: int = 2) -> Any:
    """Return a reward that is `value` for one response of one round."""
    calls = [0]

    def reward(prompts: Any, responses: Any) -> Any:
        calls[0] += 1
        rewards = vowels(prompts, responses)
        if calls[0] == call:
            rewards[at] = value
        return rewards

    return reward


def make_llm(folder: Path, on_nonfinite: Any, reward: Any = vowels, rule: Any = None, **settings: Any) -> PPOTrainer:
    config = make_config(folder, **{"eval_every": 0, **settings})
    return PPOTrainer(
        config,
        make_model(),
        make_tokenizer(),
        reward,
        PROMPTS,
        rule=rule,
        on_nonfinite=on_nonfinite,
        token_parts=bool(rule),
    )


class TestLanguageModels:
    def test_a_reward(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(
            NonFinite, match=r"Round 2: The reward reward is inf for response 3.*It is record 11"
        ) as raised:
            make_llm(tmp_path / "stop", "stop", llm_reward(math.inf)).train()
        assert raised.value.record_ids == (11,)
        with caplog.at_level(logging.WARNING, "whence"):
            rows = make_llm(tmp_path / "drop", "drop", llm_reward(math.nan), IPPO()).train()
        assert "round 2: 1 of 8 rows dropped, not finite: reward (1)" in caplog.text
        assert [row["nonfinite"] for row in rows] == [0, 1]
        assert math.isfinite(rows[1]["reward"])
        table = RunDirectory.open(tmp_path / "drop").round("records", 2)
        assert table["record_id"].to_list() == list(range(8, 16))
        dropped = table.row(3, named=True)
        assert (dropped["reward"], dropped["score"], dropped["keep"]) == (None, None, False)
        assert dropped["reason"] == "not finite: reward"
        assert table["score"].null_count() == 1

    def test_whitening_is_over_the_others(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, whiten_rewards=True)
        model, tokenizer = WithValueHead(make_model()), make_tokenizer()
        prompts = tokenize_prompts(tokenizer, PROMPTS, config, None)
        torch.manual_seed(0)
        responses = generate(model.language_model, tokenizer, prompts, config)
        reference = Reference(model)
        rollout = make_rollout(
            model, reference, responses, llm_reward(math.nan, 1, 1), 0.1, config, allow_nonfinite=True
        )
        assert rollout.faults == (None, "reward", None, None, None)
        others = [0, 2, 3, 4]
        alone = copy.copy(responses)
        for name in ("input_ids", "attention_mask", "response_mask", "ended"):
            object.__setattr__(alone, name, getattr(responses, name)[others])
        for name in ("prompts", "texts"):
            object.__setattr__(alone, name, [getattr(responses, name)[number] for number in others])
        expected = make_rollout(model, reference, alone, vowels, 0.1, config).rows.observations
        rows: Any = rollout.finite_rows.observations
        torch.testing.assert_close(rows["advantages"], expected["advantages"])
        torch.testing.assert_close(rows["returns"], expected["returns"])

    @pytest.mark.parametrize("on_nonfinite", ["stop", "drop"])
    def test_a_gradient(self, on_nonfinite: Any, tmp_path: Path) -> None:
        trainer = make_llm(tmp_path, on_nonfinite, rounds=1, ppo_epochs=1)
        start = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
        name = "language_model.model.layers.0.mlp.up_proj.weight"
        calls = []

        def spoil(gradient: Tensor) -> Tensor:
            calls.append(gradient)
            return gradient * math.nan if len(calls) == 1 else gradient

        dict(trainer.model.named_parameters())[name].register_hook(spoil)
        if on_nonfinite == "drop":
            assert trainer.train()[0]["nonfinite_steps"] == 1
            assert all(bool(torch.isfinite(param).all()) for param in trainer.model.parameters())
            assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {1}
            return
        with pytest.raises(NonFinite, match=f"Round 1: the gradient of a minibatch of 4 rows .* `{name}`") as raised:
            trainer.train()
        assert all(torch.equal(start[name], param) for name, param in trainer.model.named_parameters())
        saved = load_nonfinite(tmp_path / "nonfinite/round_00001.safetensors")
        assert saved.parameter == raised.value.parameter == name
        assert len(saved.records["record_ids"]) == 4
        assert torch.equal(saved.policy[name], start[name])

    def test_a_model_that_diverges(self, tmp_path: Path) -> None:
        with pytest.raises(NonFinite, match=r"the gradient of a minibatch of 4 rows .* the output of the layer"):
            make_llm(tmp_path / "stop", "stop", learning_rate=1e30).train()
        with pytest.raises(NonFinite, match="the trained model has no finite log-probs: the output of the layer"):
            make_llm(tmp_path / "drop", "drop", learning_rate=1e30).train()
        trainer = make_llm(tmp_path / "head", "drop")
        with torch.no_grad():
            trainer.model.value_head.weight.fill_(math.nan)
        with pytest.raises(NonFinite, match=r"no row is left to train on, not finite: value \(8\)"):
            trainer.train()


def trl_params(trainer: Any) -> list[Tensor]:
    return [param.detach().clone() for param in trainer.model.parameters()]


class TestTRL:
    def make(
        self, folder: Path, value: Any, monkeypatch: pytest.MonkeyPatch, kind: str = "grpo", **settings: Any
    ) -> Any:
        def spoilt(prompts: Any, completions: Any, **columns: Any) -> Any:
            rewards = trl_reward(prompts, completions)
            return [value if number == 1 else reward for number, reward in enumerate(rewards)]

        monkeypatch.setattr("test_llm_trl.reward", spoilt)
        return make_trl_trainer(kind, folder, **settings)

    def test_an_infinite_reward(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer = self.make(tmp_path / "stop", math.inf, monkeypatch)
        with pytest.raises(NonFinite, match="Round 1: the reward spoilt is inf for completion 1") as raised:
            trainer.train()
        assert raised.value.record_ids == (1,)
        dropping = self.make(tmp_path / "a", math.inf, monkeypatch, on_nonfinite="drop", run=tmp_path / "run")
        dropping.train()
        others = [0, 2, 3, 4, 5, 6, 7]
        # TRL leaves a completion out of its group's statistics if no function has a reward for it.
        expected = self.make(tmp_path / "b", None, monkeypatch, rule=Keep(others))
        expected.train()
        assert same(trl_params(dropping), trl_params(expected))
        reasons = RunDirectory.open(tmp_path / "run").round("records", 1)["reason"].to_list()
        assert reasons == [None, "not finite: reward", *[None] * 6]

    def test_a_reward_that_does_not_apply_is_trls(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.make(tmp_path, math.nan, monkeypatch, "rloo").train()

    def test_a_loss_is_checked_before_a_backward_pass_that_steps(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("whence.llm.trl._SelectingTrainer._steps_in_backward", True)  # as under DeepSpeed
        trainer = self.make(tmp_path, 1.0, monkeypatch, run=tmp_path / "run")
        compute = type(trainer).__mro__[2]._compute_loss
        monkeypatch.setattr(type(trainer).__mro__[2], "_compute_loss", lambda *args: compute(*args) * math.nan)
        passes: list[Any] = []
        monkeypatch.setattr(trainer.accelerator, "backward", lambda *args, **more: passes.append(args))
        with pytest.raises(NonFinite, match=r"Round 1: the loss is nan .* The step was not taken"):
            trainer.train()
        assert passes == []

    @pytest.mark.parametrize("on_nonfinite", ["stop", "drop"])
    def test_a_gradient(self, on_nonfinite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = tmp_path / "run"
        trainer = self.make(tmp_path / "t", 1.0, monkeypatch, on_nonfinite=on_nonfinite, run=run)
        start, name = trl_params(trainer), "model.layers.0.self_attn.v_proj.weight"
        calls = []

        def spoil(gradient: Tensor) -> Tensor:
            calls.append(gradient)
            return gradient * math.nan if len(calls) == 1 else gradient

        dict(trainer.model.named_parameters())[name].register_hook(spoil)
        if on_nonfinite == "drop":
            trainer.train()
            assert all(bool(torch.isfinite(param).all()) for param in trainer.model.parameters())
            assert not same(start, trl_params(trainer))
            return
        with pytest.raises(NonFinite, match=f"Round 1: the gradient is not finite in the parameter `{name}`"):
            trainer.train()
        assert same(start, trl_params(trainer))
        saved = load_nonfinite(nonfinite_path(run, 1))
        assert saved.parameter == name
        assert saved.records["observations.completion_ids"].shape[0] == 4
