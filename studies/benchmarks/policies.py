"""The policies of the suite: each with records of any number, its plain pass, and its question for other libraries."""

from functools import lru_cache
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.distributions import DiagGaussianDistribution
from torch import Tensor, nn

import whence
from studies.benchmarks.subjects import MIB, Question, Subject, compute_log_probs
from whence.core import as_view, map_tree
from whence.sb3 import collect
from whence.sb3.models import MiniGridCNN

WIDTHS = (64, 128, 256, 512, 1024)
"""Of both layers of the MLPs that tell how the time grows with the parameters."""


class Frames(gym.Env[Any, Any]):
    """Four random 84x84 frames, the shape of Atari's observations: what they show plays no part in what they cost."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def _frames(self) -> Any:
        return self.np_random.integers(0, 256, (4, 84, 84), dtype=np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return self._frames(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go on for fifty steps or so, with a random reward."""
        return self._frames(), float(self.np_random.normal()), bool(self.np_random.random() < 0.02), False, {}


class Signals(Frames):
    """Random vectors, or a dict of two, and actions that are discrete or two numbers."""

    def __init__(self, kind: str) -> None:
        vector = spaces.Box(-3, 3, (8,), np.float32)
        several = {"near": vector, "far": spaces.Box(-3, 3, (4,), np.float32)}
        self.observation_space = spaces.Dict(several) if kind == "dict" else vector
        self.action_space = spaces.Box(-1, 1, (2,), np.float32) if kind == "gaussian" else spaces.Discrete(4)
        self._shapes = {"near": 8, "far": 4} if kind == "dict" else {"": 8}

    def _frames(self) -> Any:
        drawn = {name: self.np_random.normal(size=size).astype(np.float32) for name, size in self._shapes.items()}
        return drawn if len(drawn) > 1 else drawn[""]


RL = {"mlp": 2048, "minigrid": 2048, "nature": 512, "gaussian": 2048, "dict": 2048}
"""Policies of reinforcement learning, and how many records a rollout collects."""

LANGUAGE = tuple(f"gpt-{size}{kind}" for size in ("1M", "10M", "100M") for kind in ("", "-lora"))
"""GPT-2's architecture with random weights: all of its parameters, or LoRA's adapters of all linear layers."""


@lru_cache(maxsize=1)  # one at a time takes memory
def make_subject(name: str, device: str) -> Subject:
    """Return a policy of the suite on a device."""
    if not name.startswith("gpt-"):
        return _make_rl_subject(name, device)
    from studies.benchmarks.language import make_language_subject  # Transformers take seconds to import

    return make_language_subject(name, device)


def make_model(name: str, device: str) -> PPO:
    """Return SB3's PPO of a name: of `RL`, or `width-128` and so on."""
    settings: dict[str, Any] = {"n_steps": RL.get(name, 2048), "seed": 0, "device": device}
    if name == "minigrid":
        import minigrid.wrappers

        env = minigrid.wrappers.ImgObsWrapper(gym.make("MiniGrid-Empty-8x8-v0"))
        kwargs = {"features_extractor_class": MiniGridCNN, "net_arch": {"pi": [64, 64], "vf": [64, 64]}}
        return PPO("CnnPolicy", env, policy_kwargs=kwargs, **settings)
    if name == "nature":
        return PPO("CnnPolicy", Frames(), **settings)
    if name in ("gaussian", "dict"):
        return PPO("MultiInputPolicy" if name == "dict" else "MlpPolicy", Signals(name), **settings)
    if name == "cartpole":
        return PPO("MlpPolicy", gym.make("CartPole-v1"), **{**settings, "n_steps": 512})
    if name == "mlp":
        return PPO("MlpPolicy", gym.make("LunarLander-v3"), **settings)
    width = int(name.removeprefix("width-"))
    return PPO("MlpPolicy", Signals("vector"), policy_kwargs={"net_arch": [width, width]}, **settings)


class Actor(nn.Module):
    """The part of SB3's policy that a log-prob depends on, as a plain module: logits, or means and log std."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.keys = sorted(policy.observation_space) if isinstance(policy.observation_space, spaces.Dict) else None
        self.features = policy.pi_features_extractor
        self.body = policy.mlp_extractor.policy_net
        self.action_net = policy.action_net
        if isinstance(policy.action_dist, DiagGaussianDistribution):
            self.log_std = policy.log_std

    def forward(self, *observations: Tensor) -> Tensor:
        """Return (n, actions) logits; of continuous actions (n, 2, numbers): means, and log std.

        A dict's observations come one by one, in the order of their names.
        """
        tree = observations[0] if self.keys is None else dict(zip(self.keys, observations, strict=True))
        outputs = self.action_net(self.body(self.features(tree)))
        if not hasattr(self, "log_std"):
            return outputs
        return torch.stack([outputs, self.log_std.expand_as(outputs)], dim=1)


def compute_gaussian_log_probs(outputs: Tensor, actions: Tensor) -> Tensor:
    """Return (n,) log-probs of actions (n, numbers) from means and log std, (n, 2, numbers)."""
    mean, log_std = outputs.unbind(-2)
    return (-0.5 * ((actions - mean) / log_std.exp()) ** 2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)


def _make_rl_subject(name: str, device: str) -> Subject:
    np.random.seed(0)
    model = make_model(name, device)
    collected = collect(model).to(device)
    view = as_view(model.policy)
    actor = Actor(model.policy)

    def plain(records: whence.RecordBatch) -> None:
        advantages = (records.advantages - records.advantages.mean()) / (records.advantages.std() + 1e-8)
        _, log_prob, _ = model.policy.evaluate_actions(records.observations, records.actions)
        (advantages * log_prob).mean().backward()

    def question(n: int) -> Question:
        records = repeat_records(collected, n)
        prepared = whence.PPOClip().prepare(records)
        inputs = view.prepare(records)
        log_probs = compute_gaussian_log_probs if hasattr(actor, "log_std") else compute_log_probs
        weights = prepared.advantages, records.advantages
        tree = inputs["observations"]
        leaves = (tree,) if actor.keys is None else tuple(tree[key] for key in actor.keys)
        return Question(actor, leaves, inputs["actions"], *weights, log_probs)

    return Subject(
        name=name,
        policy=model.policy,
        module=model.policy,
        records=lambda n: repeat_records(collected, n),
        plain=plain,
        chunk=512 if name == "nature" else 4096,
        scoring={"target": whence.Return(), "objective": whence.PPOClip()},
        memory=(1024 if name == "nature" else 256) * MIB,
        question=question,
        model=model,
    )


@lru_cache(maxsize=1)
def repeat_records(records: whence.RecordBatch, n: int) -> whence.RecordBatch:
    """Return n records: the first of them, or all of them as often as it takes."""
    if n <= len(records):
        return records.take(slice(0, n))
    index = torch.arange(n, device=records.ids.device) % len(records)
    names = ("observations", "actions", "log_probs", "advantages", "values", "returns")
    return whence.RecordBatch(**{name: map_tree(lambda leaf: leaf[index], records.columns[name]) for name in names})
