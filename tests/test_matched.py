"""Updates scaled to the norm or the divergence that a selection gives."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO

from whence import IIF, KeepAll, RunDirectory, WhenceError
from whence.experiments import configure, run
from whence.experiments.rl.matched import MatchedUpdate
from whence.sb3 import InfluenceCallback


def model_of(optimizer=torch.optim.SGD, **settings):
    return PPO(
        "MlpPolicy",
        gym.make("CartPole-v1"),
        n_steps=64,
        batch_size=32,
        n_epochs=2,
        seed=0,
        device="cpu",
        learning_rate=0.05,
        policy_kwargs={"optimizer_class": optimizer, "net_arch": [8]},
        **settings,
    )


def trained(callback, rounds=1, **settings):
    """A model after some rounds of PPO, and how its parameters moved: the policy's, and the values'."""
    model = model_of(**settings)
    start = flat(model)
    model.learn(64 * rounds, callback=callback)
    return model, {part: flat(model)[part] - start[part] for part in start}


def flat(model):
    parts = {"policy": [], "values": []}
    for name, parameter in model.policy.named_parameters():
        parts["values" if "value" in name else "policy"].append(parameter.detach().flatten().double())
    return {part: torch.cat(tensors) for part, tensors in parts.items()}


@pytest.mark.parametrize("vf_coef", [0.5, 0.0])
def test_it_goes_where_ppo_goes_as_far_as_the_selection_would(vf_coef):
    _, plain = trained(None, vf_coef=vf_coef)
    _, filtered = trained(InfluenceCallback(IIF(drop=1.0)), vf_coef=vf_coef)
    callback = MatchedUpdate(IIF(drop=1.0))
    model, matched = trained(callback, vf_coef=vf_coef)
    assert abs(filtered["policy"].norm() / plain["policy"].norm() - 1) > 0.02  # else there would be nothing to match
    for part, scale in (("policy", "train/update_scale"), ("values", "train/update_scale_value")):
        assert float(matched[part].norm()) == pytest.approx(float(filtered[part].norm()), rel=1e-4, abs=1e-9)
        if vf_coef or part == "policy":
            assert float(torch.cosine_similarity(matched[part], plain[part], dim=0)) == pytest.approx(1, abs=1e-5)
            factor = float(filtered[part].norm() / plain[part].norm())
            assert callback.metrics[0][scale] == pytest.approx(factor, rel=1e-4)
    assert model._n_updates == 2


def test_it_goes_on_until_the_policy_diverges_as_far():
    _, plain = trained(None)
    filtering = InfluenceCallback(IIF(drop=1.0))
    selected, filtered = trained(filtering)
    callback = MatchedUpdate(IIF(drop=1.0), by="divergence")
    model, matched = trained(callback)
    records = callback.round.records
    assert divergence(model, records) == pytest.approx(divergence(selected, records), rel=0.01)
    assert divergence(trained(MatchedUpdate(IIF(drop=1.0)))[0], records) != pytest.approx(
        divergence(selected, records), rel=0.05
    )
    assert float(torch.cosine_similarity(matched["policy"], plain["policy"], dim=0)) == pytest.approx(1, abs=1e-5)
    factor = float(matched["policy"].norm() / plain["policy"].norm())
    assert callback.metrics[0]["train/update_scale"] == pytest.approx(factor, rel=1e-4)
    assert float(matched["values"].norm()) == pytest.approx(float(filtered["values"].norm()), rel=1e-4)


def divergence(model, records):
    with torch.no_grad():
        _, log_probs, _ = model.policy.evaluate_actions(records.observations, records.actions)
    ratio = (log_probs - records.log_probs).double()
    return float((ratio.exp() - 1 - ratio).mean())


def test_what_is_matched_has_two_names():
    with pytest.raises(WhenceError, match="by is 'length'"):
        MatchedUpdate(IIF(), by="length")


@pytest.mark.parametrize("by", ["norm", "divergence"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_where_all_is_kept_it_is_ppo(optimizer, by):
    _, plain = trained(None, rounds=3, optimizer=optimizer)
    _, matched = trained(MatchedUpdate(KeepAll(), by=by), rounds=3, optimizer=optimizer)
    for part in plain:
        assert torch.allclose(matched[part], plain[part], rtol=1e-4, atol=1e-6)


def test_the_divergence_is_that_of_the_update_made():
    callback = MatchedUpdate(IIF(drop=1.0))
    model, _ = trained(callback)
    records = callback.round.records
    assert callback.metrics[0]["train/approx_kl"] == pytest.approx(divergence(model, records), rel=1e-4)


def test_a_trial_that_fails_leaves_the_model_as_it_was():
    model = model_of()
    callback = MatchedUpdate(IIF(drop=1.0))
    steps = []

    def step(closure=None):
        steps.append(None)
        if len(steps) == 3:
            raise RuntimeError("broken")
        return sgd_step(closure)

    sgd_step, model.policy.optimizer.step = model.policy.optimizer.step, step
    before = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
    state = np.random.get_state()[1].copy()
    with pytest.raises(RuntimeError, match="broken"):
        model.learn(64, callback=callback)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.policy.state_dict().items())
    assert np.array_equal(state, np.random.get_state()[1])
    assert model._n_updates == 0


def test_seconds_are_those_of_the_training_that_counts(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("whence.stopwatch.time.process_time", lambda: clock[0])
    model, seconds = model_of(), []
    sgd_step = model.policy.optimizer.step

    def step(closure=None):
        clock[0] += 1
        return sgd_step(closure)

    model.policy.optimizer.step = step
    callback = MatchedUpdate(KeepAll())
    monkeypatch.setattr(callback, "_write_rows", lambda metrics, stages: seconds.append(stages["optimisation"]["cpu"]))
    model.learn(64, callback=callback)
    assert clock[0] == 8  # twice 2 epochs of 2 minibatches
    assert seconds == [4]


@pytest.mark.parametrize("arguments", [{"recordings": [1]}, {"last": "drop"}])
def test_what_two_trainings_cannot_do(arguments):
    with pytest.raises(WhenceError, match="MatchedUpdate takes no recordings and no last"):
        MatchedUpdate(IIF(), **arguments)
    with pytest.raises(TypeError, match="advantage_norm"):
        MatchedUpdate(IIF(), advantage_norm="buffer")


def test_a_run_trains_with_it(tmp_path):
    hyperparameters = {"n_steps": 32, "batch_size": 16, "n_epochs": 1}
    config = configure(env="CartPole-v1", arm="ppo-matched", rounds=1, eval_episodes=0, hyperparameters=hyperparameters)
    run(config, tmp_path / "run")
    assert RunDirectory.open(tmp_path / "run").table("metrics").height == 1
