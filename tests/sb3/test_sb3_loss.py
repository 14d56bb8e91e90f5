"""Scores against SB3's own loss: the gradient that `train()` itself would take on each record, by autograd."""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.torch_layers import BatchRenorm1d
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecFrameStack
from torch import Tensor, nn

import whence
import whence.lab
from helpers.gradients import Gradients, fill_buffer
from helpers.toys import Toy, model
from whence import Unsupported
from whence.core import as_view
from whence.sb3 import InfluenceCallback, model_objective
from whence.sb3.policy import warn_of_log_probs

OBSERVATIONS = ["vector", "image", "discrete", "multidiscrete", "multibinary", "dict"]
ACTIONS = ["discrete", "box", "multidiscrete", "multibinary", "gsde", "squashed"]


def train_gradients(toy: Any, minibatches: list[list[int]]) -> list[Tensor]:
    """Return the gradients that SB3's `train()` takes on given minibatches at the present policy, flat, to be raised.

    Advantages are used as they stand in the buffer. The policy does not move.
    """
    buffer = toy.rollout_buffer

    def get(batch_size: int | None = None) -> Iterator[Any]:
        for minibatch in minibatches:
            yield buffer._get_samples(np.array(minibatch))

    toy.policy.optimizer, buffer.get = Gradients(toy.policy.optimizer.param_groups[0]["params"]), get
    toy.normalize_advantage, toy.max_grad_norm, toy.vf_coef, toy.n_epochs = False, float("inf"), 0.0, 1
    toy.train()
    return [-torch.cat([g.flatten() for g in step]) for step in toy.policy.optimizer.steps]


def loss_scores(toy: Any, ent_coef: float) -> Tensor:
    """Return each record's product of its own gradient with that of mean log-probability times advantage."""
    buffer = toy.rollout_buffer
    n, normalised = buffer.buffer_size * buffer.n_envs, toy.normalize_advantage
    next(iter(buffer.get(n)))  # brings the arrays into the order of the records
    toy.ent_coef = 0.0
    (target,) = train_gradients(toy, [[*range(n)]])
    if normalised:
        buffer.advantages = (buffer.advantages - buffer.advantages.mean()) / (buffer.advantages.std(ddof=1) + 1e-8)
    toy.ent_coef = ent_coef
    return torch.stack([gradient @ target for gradient in train_gradients(toy, [[record] for record in range(n)])])


def check_scores(toy: Any, *, ent_coef: float = 0.0, engine: str = "auto", before: Any = None) -> whence.RecordBatch:
    toy.ent_coef = ent_coef
    records = fill_buffer(toy)
    if before is not None:
        before(toy.policy, records)
    objective = model_objective(toy)
    scores = whence.attribute(toy.policy, records, target=whence.Return(), objective=objective, engine=engine).scores
    expected = loss_scores(toy, ent_coef)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    return records


PAIRS = [*zip(ACTIONS, OBSERVATIONS[1:] + OBSERVATIONS[:1], strict=True)]
CELLS = [
    # Each observation and each action stands in a cell with sharing, in other pairs than where engines are held against
    # the loop; without it stand an image and a vector; the rest is long.
    pytest.param(action, observation, shared, marks=() if is_short else pytest.mark.long)
    for action, observation, shared in itertools.product(ACTIONS, OBSERVATIONS, [True, False])
    for is_short in [(action, observation) in PAIRS and (shared or observation in ("image", "vector"))]
]


@pytest.mark.parametrize(("action", "observation", "shared"), CELLS)
def test_ppo(observation: str, action: str, shared: bool) -> None:
    toy = model(observation=observation, action=action, shared=shared)
    records = check_scores(toy, ent_coef=0.01)
    view = as_view(toy.policy)
    outputs = view(view.parameters(), view.prepare(records))
    # What SB3 itself computed as it collected them.
    torch.testing.assert_close(outputs.log_prob, records.log_probs)
    torch.testing.assert_close(outputs.value, records.values)


@pytest.mark.parametrize(
    "action", [pytest.param(each, marks=() if each in ("discrete", "gsde") else pytest.mark.long) for each in ACTIONS]
)
def test_a2c(action: str) -> None:
    check_scores(model(A2C, action=action), ent_coef=0.01)


@pytest.mark.parametrize(
    ("observation", "action"),
    [
        *(("vector", action) for action in ("discrete", "multidiscrete", "multibinary")),
        ("dict", "discrete"),
        *(pytest.param("dict", action, marks=pytest.mark.long) for action in ("multidiscrete", "multibinary")),
    ],
)
def test_maskable_ppo(observation: str, action: str) -> None:
    check_scores(model(MaskablePPO, observation=observation, action=action), ent_coef=0.01)


@pytest.mark.parametrize("engine", ["loop", "ghost", "forward", "vmap"])
@pytest.mark.parametrize("algorithm", [PPO, pytest.param(A2C, marks=pytest.mark.long)])
def test_engines(algorithm: Any, engine: str) -> None:
    check_scores(model(algorithm, action="box"), engine=engine)


def test_environments_normalised_and_stacked() -> None:
    toy = model(normalised=True, n_envs=3, action="box")
    check_scores(toy)
    toy = model(n_envs=2)
    stacked = VecFrameStack(toy.env, 3)
    check_scores(type(toy)("MlpPolicy", stacked, n_steps=32, batch_size=16, seed=0))


class Small(BaseFeaturesExtractor):
    """A linear layer of its own, around which the cases below do something unusual."""

    def __init__(self, space: Any, around: Any = None) -> None:
        super().__init__(space, 6)
        self.layer, self.around = nn.Linear(space.shape[0], 6), around or (lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.layer, x).tanh()


def with_extractor(around: Any = None) -> Any:
    kwargs = {"features_extractor_class": Small, "features_extractor_kwargs": {"around": around}}
    return model(policy_kwargs=kwargs | {"ortho_init": False})


def replace_extractor() -> Any:
    toy = with_extractor()
    toy.policy.features_extractor = Small(toy.observation_space)
    toy.policy.optimizer = torch.optim.Adam(toy.policy.parameters())
    return toy


class Trunk(nn.Module):
    """`forward` has a layer that `forward_actor` lacks."""

    latent_dim_pi = latent_dim_vf = 8

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(5, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.head(self.trunk(x).tanh())
        return latent, latent

    def forward_actor(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))

    forward_critic = forward_actor


class WithTrunk(ActorCriticPolicy):
    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = Trunk()  # type: ignore[assignment]


class OwnPolicy(ActorCriticPolicy):
    """The actor does not train the features extractor."""

    def evaluate_actions(self, obs: Any, actions: Tensor) -> Any:
        features = self.extract_features(obs)
        latent = self.mlp_extractor.forward_critic(features)
        distribution = self._get_action_dist_from_latent(self.mlp_extractor.forward_actor(features.detach()))
        return self.value_net(latent), distribution.log_prob(actions), distribution.entropy()


def patch_distribution() -> Any:
    toy = model(policy_kwargs={"ortho_init": False})
    policy = toy.policy
    policy._get_action_dist_from_latent = lambda latent: policy.action_dist.proba_distribution(
        action_logits=5 * policy.action_net(latent)
    )
    return toy


def hook_extractor() -> Any:
    toy = model()
    toy.policy.mlp_extractor.register_forward_hook(lambda module, inputs, latents: (3 * latents[0], latents[1]))
    return toy


def halve_backbone() -> Any:
    def run(layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x.to(torch.bfloat16)).float()

    toy = with_extractor(run)
    toy.policy.features_extractor.layer.to(torch.bfloat16).requires_grad_(False)
    return toy


def train_some() -> Any:
    toy = with_extractor()
    head = [*toy.policy.mlp_extractor.parameters(), *toy.policy.action_net.parameters()]
    toy.policy.optimizer = torch.optim.Adam(head)
    return toy


def mask_parameter() -> Any:
    toy = with_extractor()
    weight = toy.policy.action_net.weight
    mask = (torch.arange(weight.numel()) % 2).view_as(weight)
    weight.register_hook(lambda g: g.mul_(mask))
    toy.policy.action_net.bias.register_hook(lambda g: None)  # as a logger's
    return toy


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(self.norm(x))


UNUSUAL = {
    "replaced extractor": replace_extractor,
    "forward is not forward_actor": lambda: PPO(WithTrunk, Toy(), n_steps=32, batch_size=16, seed=0),
    "own evaluate_actions": lambda: PPO(OwnPolicy, Toy(), n_steps=32, batch_size=16, seed=0),
    "patched distribution": patch_distribution,
    "hooked extractor": hook_extractor,
    "half precision first": halve_backbone,
    "optimiser over some parameters": train_some,
    "masked parameter": mask_parameter,
    "frozen normalisation": lambda: with_extractor(Normed(Frozen(5))),
    "discrete from -1": lambda: PPO("MlpPolicy", Shifted(), n_steps=32, batch_size=16, seed=0),
}


class Shifted(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3, start=-1)


@pytest.mark.parametrize(
    ("case", "warn"),
    [
        pytest.param(case, warn, marks=pytest.mark.long if (warn is None) == (place % 2 == 0) else ())
        for place, case in enumerate(UNUSUAL)
        for warn in (None, warn_of_log_probs)
    ],
)
def test_what_sb3_trains_is_scored_as_sb3_trains_it(case: str, warn: Any) -> None:
    check_scores(UNUSUAL[case](), before=warn)


def test_stored_log_probs_that_are_not_the_policys_are_counted(caplog: Any) -> None:
    toy = with_extractor()
    toy = PPO(toy.policy_class, Toy(), n_steps=512, batch_size=16, policy_kwargs=toy.policy_kwargs, seed=0)
    records = fill_buffer(toy)
    log_probs = records.log_probs.clone()
    log_probs[[2, 101, 303]] += 1
    warn_of_log_probs(toy.policy, replace(records, log_probs=log_probs))
    toy.policy.features_extractor = Small(toy.observation_space)  # what is stored is the old one's
    warn_of_log_probs(toy.policy, records)
    few, many = caplog.messages
    assert re.search("in 3 of 512 records: .* for record 2[.]", few)
    assert int(re.search(r"in (\d+) of 512 records", many)[1]) > 256  # type: ignore[index]


def record_round(toy: Any) -> whence.RoundRecording:
    """Train one round of one step."""
    toy.batch_size, toy.n_epochs, toy.vf_coef = 32, 1, 0.0
    callback = InfluenceCallback(whence.KeepAll(), recordings=[1])
    toy.learn(32, callback=callback)
    return callback.recording


def detach_half(layer: nn.Linear, x: Tensor) -> Tensor:
    output = layer(x)
    return output / 2 + output.detach() / 2


def scale_gradient(layer: nn.Linear, x: Tensor) -> Tensor:
    output = layer(x)
    if output.requires_grad:
        output.register_hook(lambda g: 0.1 * g)
    return output


@pytest.mark.parametrize("around", [detach_half, scale_gradient])
def test_scores_by_a_rounds_steps_are_of_the_gradients_that_these_took(around: Any) -> None:
    toy = with_extractor(around)
    recording = record_round(toy)
    scores = whence.lab.attribute_round(toy.policy, recording, target=whence.Return(), method="trajectory").scores
    toy.policy.load_state_dict(recording.start, strict=False)
    snapshot = whence.attribute(toy.policy, recording.records, target=whence.Return(), engine="loop").scores
    torch.testing.assert_close(scores, snapshot, rtol=1e-5, atol=1e-5 * float(snapshot.abs().max()))


def test_steps_with_masked_gradients_are_not_computed_again() -> None:
    toy = mask_parameter()
    with pytest.raises(Unsupported, match="hook on a parameter"):
        whence.lab.attribute_round(toy.policy, record_round(toy), target=whence.Return(), method="trajectory")


@pytest.mark.parametrize(
    "around", [lambda layer, x: layer(x - x.mean(0)), Normed(nn.BatchNorm1d(5)), Normed(BatchRenorm1d(5))]
)
def test_records_that_mix_are_refused(around: Any) -> None:
    toy = with_extractor(around)
    toy.learn(64, callback=InfluenceCallback(whence.KeepAll()))  # which scores nothing
    with pytest.raises(Unsupported, match="BatchNorm"):
        toy.learn(64, callback=InfluenceCallback(whence.IIF(0.5)))


@pytest.mark.parametrize("recorded", [False, True])
def test_training_is_the_same_to_the_last_call_and_bit(tmp_path: Path, recorded: bool) -> None:
    class Counting:
        calls = 0

        def __call__(self, progress: float) -> float:
            self.calls += 1
            return 3e-4 * 0.9**self.calls

    class Running(Normed):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return layer(x - self.mean)

    class Scored(whence.KeepAll):
        needs_influence = True

    def train(callback: Any) -> tuple[Any, ...]:
        rates, ranges = Counting(), Counting()
        kwargs = {"features_extractor_class": Small, "features_extractor_kwargs": {"around": Running()}}
        toy = model(policy_kwargs=kwargs, learning_rate=rates, clip_range=ranges)
        toy.learn(96, callback=callback)
        (env,) = toy.env.envs
        generators = repr((random.getstate(), np.random.get_state(), torch.get_rng_state(), env.np_random.random(3)))
        return toy.policy.state_dict(), rates.calls, ranges.calls, generators, type(env)

    run = {"run": tmp_path / "run", "recordings": [2]} if recorded else {}
    (plain, *others), (scored, *others_scored) = train(None), train(InfluenceCallback(Scored(), **run))
    assert others == others_scored
    assert all(torch.equal(plain[name], scored[name]) for name in plain)


def test_a_compiled_policy_is_the_policy() -> None:
    toy = model()
    records = fill_buffer(toy)
    plain = whence.attribute(toy.policy, records, target=whence.Return())
    policy = torch.compile(toy.policy, backend="eager")
    assert torch.equal(plain.scores, whence.attribute(policy, records, target=whence.Return()).scores)
    warn_of_log_probs(policy, records)
