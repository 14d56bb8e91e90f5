"""Updates that are matched to a selection's."""

import gymnasium as gym
import pytest
import torch
from stable_baselines3 import PPO

from studies.selection.matched import MatchedUpdate, main
from whence import IIF, KeepAll, RunDirectory
from whence.lab.agents import configure
from whence.sb3 import InfluenceCallback

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


def train(callback, optimizer=torch.optim.SGD, rounds=1):
    """Return a model after some rounds of PPO, and how the policy's parameters moved."""
    kwargs = {"optimizer_class": optimizer, "net_arch": [8]}
    env, sizes = gym.make("CartPole-v1"), {"n_steps": 64, "batch_size": 32, "n_epochs": 2}
    model = PPO("MlpPolicy", env, seed=0, device="cpu", learning_rate=0.05, policy_kwargs=kwargs, **sizes)
    start = read_acting(model)
    model.learn(64 * rounds, callback=callback)
    return model, read_acting(model) - start


def read_acting(model):
    parameters = [p for name, p in model.policy.named_parameters() if "value" not in name]
    return torch.cat([parameter.detach().flatten().double() for parameter in parameters])


def measure_kl(model, records):
    with torch.no_grad():
        _, log_probs, _ = model.policy.evaluate_actions(records.observations, records.actions)
    ratio = (log_probs - records.log_probs).double()
    return float((ratio.exp() - 1 - ratio).mean())


@pytest.mark.parametrize("by", ["norm", "divergence"])
def test_an_update_goes_where_ppo_goes_as_far_as_the_selection_would(by):
    _, plain = train(None)
    selected, filtered = train(InfluenceCallback(IIF(drop=1.0)))
    callback = MatchedUpdate(IIF(drop=1.0), by=by)
    model, matched = train(callback)
    records = callback.round.records
    assert float(torch.cosine_similarity(matched, plain, dim=0)) == pytest.approx(1, abs=1e-5)
    assert callback.metrics[0]["train/update_scale"] == pytest.approx(float(matched.norm() / plain.norm()), rel=1e-4)
    assert callback.metrics[0]["train/approx_kl"] == pytest.approx(measure_kl(model, records), rel=1e-4)
    if by == "norm":
        assert float(matched.norm()) == pytest.approx(float(filtered.norm()), rel=1e-4)
    else:
        assert measure_kl(model, records) == pytest.approx(measure_kl(selected, records), rel=0.01)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_where_all_is_kept_a_matched_update_is_ppos(optimizer):
    _, plain = train(None, optimizer, rounds=2)
    _, matched = train(MatchedUpdate(KeepAll()), optimizer, rounds=2)
    assert torch.allclose(matched, plain, rtol=1e-4, atol=1e-6)


def test_a_run_trains_with_a_studys_callback(tmp_path, monkeypatch):
    config = configure(env="CartPole-v1", rounds=1, eval_episodes=0, hyperparameters={"n_steps": 32, "batch_size": 16})
    monkeypatch.setattr("whence.lab.configure", lambda **settings: config)
    main(tmp_path / "run", by="divergence")
    run = RunDirectory.open(tmp_path / "run")
    assert run.experiment["arm"] == "ppo-as-far"
    assert "train/update_scale" in run.table("metrics").columns
