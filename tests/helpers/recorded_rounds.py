"""Recorded rounds of SB3's models, and whether a model is as it was."""

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from whence import KeepAll
from whence.core import eval_mode, named_tensors, preserve_rng_state
from whence.lab.rounds import check_finite, check_weights, step
from whence.lab.rounds.replay import open_round, raise_on_divergence
from whence.sb3 import InfluenceCallback

SMALL = {"n_steps": 32, "batch_size": 16, "n_epochs": 3, "learning_rate": 0.01}
OPTIMIZERS = {
    "SGD": {},
    "SGD unclipped": {},
    "SGD with momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGD damped": {"momentum": 0.5, "dampening": 0.3},
    "SGD of no momentum": {"dampening": 0.3},  # which torch does not look at then
    "Adam": {},
    "AdamW": {"weight_decay": 0.1},
    "Adam decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RMSprop": {},
    "RMSprop with momentum": {"momentum": 0.9},
    "RMSprop centred": {"centered": True, "momentum": 0.5, "eps": 1e-3},
    "RMSprop centred alone": {"centered": True, "eps": 1e-3},
}


def replay(policy, recording, *, weights=None):
    """Return the trained parameters after a recorded round with weighted records."""
    round = open_round(policy, recording)
    weights = torch.ones(len(round.records)) if weights is None else check_weights(weights, round)
    point = round.start
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), raise_on_divergence(round):
        for number in range(len(round)):
            minibatch = round.minibatch(number)
            point = step(round, point, minibatch, weights[minibatch.positions])
    check_finite(point.params, round)
    return round.unflatten(point.params)


def model_of(name="Adam", env="CartPole-v1", n_envs=2, algorithm=PPO, policy="MlpPolicy", **settings):
    vec_env = make_vec_env(env, n_envs=n_envs, seed=0)
    kwargs = {"optimizer_class": getattr(torch.optim, name.split()[0]), "optimizer_kwargs": dict(OPTIMIZERS[name])}
    kwargs |= {"net_arch": [8]} | settings.pop("policy_kwargs", {})
    return algorithm(policy, vec_env, seed=0, device="cpu", policy_kwargs=kwargs, **(SMALL | settings))


def recorded(model, rule=None, rounds=2, **settings):
    """Train some rounds and return the last one's recording."""
    callback = InfluenceCallback(rule or KeepAll(), recordings=range(1, rounds + 1), **settings)
    model.learn(rounds * model.n_steps * model.n_envs, callback=callback)
    assert callback.recording.number == rounds
    return callback.recording


def state_of(model):
    tensors = {name: tensor.clone() for name, tensor in named_tensors(model.policy).items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.policy.parameters()]
    optimizer = model.policy.optimizer
    states = optimizer.state.values()
    objects = [*map(id, optimizer.param_groups), *(id(value) for state in states for value in state.values())]
    settings = str(optimizer.state_dict()), objects, [module.training for module in model.policy.modules()]
    return tensors, gradients, settings, dict(vars(model)), torch.get_rng_state(), np.random.get_state()[1].tolist()


def assert_untouched(before, after):
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert all(x is y or torch.equal(x, y) for x, y in zip(before[1], after[1], strict=True))
    assert before[2] == after[2]
    assert before[3].keys() == after[3].keys()
    assert all(before[3][name] is after[3][name] for name in before[3])
    assert torch.equal(before[4], after[4])
    assert before[5] == after[5]
