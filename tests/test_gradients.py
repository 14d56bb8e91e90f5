"""Gradients of a rollout, compared with those of a much larger one."""

import numpy as np
import pytest
import torch

from test_rounds import assert_untouched, state_of
from whence import WhenceError
from whence.experiments import configure
from whence.experiments.rl.environments import make_model_env
from whence.experiments.rl.gradients import gradient_cosines, large_rollout
from whence.experiments.rl.training import make_model
from whence.sb3 import collect

KEPT = {"all": lambda records: torch.ones(len(records), dtype=torch.bool), "some": lambda records: records.values > 0}


@pytest.fixture(scope="module")
def case():
    hyperparameters = {"n_steps": 128, "batch_size": 64}
    config = configure(env="CartPole-v1", hyperparameters=hyperparameters, policy_kwargs={"net_arch": [8]})
    model = make_model(config, make_model_env(config))
    records = collect(model)
    return config, model, records, large_rollout(config, model, steps=2001, seed=5)


def test_the_larger_rollout_is_of_the_same_policy(case):
    config, model, _, large = case
    assert len(large) == 2100  # 21 steps in each of a hundred environments
    with torch.no_grad():
        _, log_probs, _ = model.policy.evaluate_actions(large.observations, large.actions)
    assert torch.allclose(log_probs, large.log_probs, atol=1e-5)
    before = state_of(model)
    again = large_rollout(config, model, steps=2001, seed=5)
    assert_untouched(before, state_of(model))
    assert again.fingerprint == large.fingerprint != large_rollout(config, model, steps=2001, seed=6).fingerprint
    with pytest.raises(WhenceError, match="at least 100"):
        large_rollout(config, model, steps=99)


def gradient(model, records, advantages):
    _, log_probs, _ = model.policy.evaluate_actions(records.observations, records.actions)
    parameters = [p for name, p in model.policy.named_parameters() if "value" not in name]
    gradients = torch.autograd.grad((log_probs * advantages).mean(), parameters)
    return torch.cat([part.flatten() for part in gradients]).double()


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def test_cosines_one_by_one(case):
    _, model, records, large = case
    before = state_of(model)
    kept = {name: choose(records) for name, choose in KEPT.items()}
    cosines = gradient_cosines(model, records, large, kept)
    assert_untouched(before, state_of(model))
    assert cosines.height == 8
    gae = {name: gradient(model, large.take(part), large.advantages[part]) for name, part in parts(large).items()}
    agreement = cosine(gae["first"], gae["second"])
    assert 0 < agreement < 1
    for name, mask in kept.items():
        some = records.take(mask)
        for treated, advantages in (("raw", some.advantages), ("centred", some.advantages - some.advantages.mean())):
            (row,) = cosines.filter(kept=name, advantages=treated, truth="gae").to_dicts()
            assert row["records"] == len(some)
            assert row["cosine"] == pytest.approx(cosine(gradient(model, some, advantages), gae["all"]), abs=1e-5)
            assert row["reliability"] == pytest.approx(np.sqrt(2 * agreement / (1 + agreement)), abs=1e-5)


def parts(large):
    first = torch.arange(len(large)) < len(large) // 2
    return {"all": torch.ones_like(first), "first": first, "second": ~first}


def test_returns_less_values_step_by_step(case):
    _, model, records, large = case
    every = torch.ones(len(records), dtype=torch.bool)
    cosines = gradient_cosines(model, records, large, {"all": every})
    (row,) = cosines.filter(advantages="raw", truth="monte-carlo").to_dicts()
    returns = torch.zeros(len(large), dtype=torch.float64)
    for env in range(100):
        at = (large.env_index == env).nonzero().flatten().tolist()
        # CartPole's rewards are 1. The last step's advantage gives its return, since nothing follows it.
        later = float(large.advantages[at[-1]] + large.values[at[-1]])
        returns[at[-1]] = later
        for here, after in zip(reversed(at[:-1]), reversed(at[1:]), strict=True):
            later = float(large.rewards[here]) + (0.0 if large.episode_starts[after] else large.gamma * later)
            returns[here] = later
    expected = gradient(model, large, (returns - large.values).float())
    assert row["cosine"] == pytest.approx(cosine(gradient(model, records, records.advantages), expected), abs=1e-5)


@pytest.mark.parametrize(
    ("make_mask", "message"),
    [
        (lambda n: torch.arange(n) == 3, r"kept\['wrong'\] has shape \(128,\) of torch.bool and keeps 1"),
        (lambda n: torch.arange(n) % 2, r"has shape \(128,\) of torch.int64 and keeps 64; .* of torch.bool"),
        (
            lambda n: torch.ones(3, dtype=torch.bool),
            r"has shape \(3,\) of torch.bool and keeps 3; a mask of the 128 records",
        ),
    ],
)
def test_masks_that_have_no_direction(case, make_mask, message):
    _, model, records, large = case
    with pytest.raises(WhenceError, match=message):
        gradient_cosines(model, records, large, {"wrong": make_mask(len(records))})


@pytest.mark.parametrize("other", ["records", "large"])
def test_records_of_another_policy(case, other):
    _, model, records, large = case
    rollouts = {"records": records, "large": large}
    rollouts[other] = rollouts[other].with_columns({"log_probs": rollouts[other].log_probs + 0.1})
    with pytest.raises(WhenceError, match=rf"{other} was not collected by this policy: log-probs are 0\.1 apart"):
        gradient_cosines(model, **rollouts, kept={"all": torch.ones(len(records), dtype=torch.bool)})


def test_a_gradient_of_nothing(case):
    _, model, records, large = case
    none = records.with_advantages(torch.zeros(len(records)))
    with pytest.raises(WhenceError, match="A gradient is 0"):
        gradient_cosines(model, none, large, {"all": torch.ones(len(records), dtype=torch.bool)})
