"""Small policies, environments and rollouts for the tests."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import Tensor, nn

import whence


class Toy(gym.Env[Any, Any]):
    """Random observations; the reward depends on the action and the observation; episodes end at random."""

    def __init__(self, observation: str = "vector", action: str = "discrete") -> None:
        self.observation_space = {
            "vector": spaces.Box(-3, 3, (5,), np.float32),
            "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
            "discrete": spaces.Discrete(7),
            "multidiscrete": spaces.MultiDiscrete([3, 4]),
            "multibinary": spaces.MultiBinary(4),
            "dict": spaces.Dict(
                {
                    "vector": spaces.Box(-1, 1, (2,), np.float32),
                    "image": spaces.Box(0, 255, (3, 36, 36), np.uint8),
                    "discrete": spaces.Discrete(3),
                }
            ),
        }[observation]
        self.action_space = {
            "discrete": spaces.Discrete(3),
            "box": spaces.Box(-1, 1, (2,), np.float32),
            "multidiscrete": spaces.MultiDiscrete([2, 3]),
            "multibinary": spaces.MultiBinary(3),
        }[action]

    def _observe(self, space: Any = None) -> Any:
        space = self.observation_space if space is None else space
        if isinstance(space, spaces.Dict):
            return {key: self._observe(part) for key, part in space.items()}
        if isinstance(space, spaces.Discrete):
            return int(self.np_random.integers(space.n))
        if isinstance(space, spaces.MultiDiscrete):
            return self.np_random.integers(space.nvec)
        if isinstance(space, spaces.MultiBinary):
            return self.np_random.integers(0, 2, space.n).astype(np.int8)
        return self.np_random.uniform(space.low, space.high).astype(space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(np.sum(action)) + float(self.np_random.normal())
        return self._observe(), reward, bool(self.np_random.random() < 0.1), False, {}


class MaskedToy(Toy):
    """Some actions are forbidden, others at each step."""

    def action_masks(self) -> Any:
        space = self.action_space
        if isinstance(space, spaces.Discrete):
            sizes = [int(space.n)]
        else:
            sizes = list(space.nvec) if isinstance(space, spaces.MultiDiscrete) else [2] * space.n
        masks = self.np_random.random(sum(sizes)) < 0.6
        masks[np.cumsum([0, *sizes[:-1]])] = True  # at least one action is allowed in each part
        return masks


class SmallCNN(BaseFeaturesExtractor):
    def __init__(self, observation_space: spaces.Box, inplace: bool = False) -> None:
        super().__init__(observation_space, features_dim=6)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.ReLU(inplace=inplace),
            nn.Conv2d(4, 4, 3, groups=2),
            nn.ReLU(inplace=inplace),
            nn.Flatten(),
            nn.Linear(16, 6),
            nn.Tanh(),
        )

    def forward(self, observations: Tensor) -> Tensor:
        return self.layers(observations)


def model(
    algorithm: Any = PPO,
    *,
    observation: str = "vector",
    action: str = "discrete",
    shared: bool = True,
    n_envs: int = 1,
    n_steps: int = 32,
    seed: int = 0,
    device: str = "cpu",
    normalised: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a small SB3 model on the toy environment; actions "gsde" and "squashed" are boxes explored with gSDE."""
    policy_kwargs: dict[str, Any] = {"net_arch": {"pi": [8], "vf": [8]}, "share_features_extractor": shared}
    if action in ("gsde", "squashed"):
        kwargs |= {"use_sde": True, "sde_sample_freq": 4}
        policy_kwargs |= {"squash_output": action == "squashed", "log_std_init": -1.0}
        action = "box"
    if observation == "image":
        policy_kwargs["features_extractor_class"] = SmallCNN
    if observation == "dict":
        policy_kwargs["features_extractor_kwargs"] = {"cnn_output_dim": 4}
    policy_kwargs |= kwargs.pop("policy_kwargs", {})
    toy = MaskedToy if algorithm is MaskablePPO else Toy
    env: Any = DummyVecEnv([lambda: toy(observation, action)] * n_envs)
    if normalised:
        env = VecNormalize(env)
    policy = {"image": "CnnPolicy", "dict": "MultiInputPolicy"}.get(observation, "MlpPolicy")
    if algorithm is RecurrentPPO:
        policy = policy.replace("Policy", "LstmPolicy")
        policy_kwargs = {"lstm_hidden_size": 8, **policy_kwargs}
    if algorithm is not A2C:
        kwargs = {"batch_size": 16, "n_epochs": 2, **kwargs}
    return algorithm(policy, env, n_steps=n_steps, policy_kwargs=policy_kwargs, seed=seed, device=device, **kwargs)


class OnRolloutEnd(BaseCallback):
    """Calls a function with the model when a rollout ends."""

    def __init__(self, function: Callable[[Any], object]) -> None:
        super().__init__()
        self.function = function

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.function(self.model)


def moved(records: whence.RecordBatch) -> whence.RecordBatch:
    """Return the records as if another policy had collected them: ratios away from 1, some of them clipped."""
    return records.with_columns({"log_probs": records.log_probs + 0.3 * torch.randn(len(records))})


class Softmax(nn.Module):
    """Logits `theta * s` of two actions in a scalar state: the smallest policy there is."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2))


def softmax_view(policy: nn.Module) -> whence.ModuleView:
    def log_probs(module: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits = inputs["observations"][:, None] * module.theta
        return logits.log_softmax(-1).gather(-1, inputs["actions"][:, None]).squeeze(-1)

    return whence.ModuleView(policy, log_probs)


def mlp_view(sizes: tuple[int, ...] = (5, 8, 3), dtype: torch.dtype = torch.float32) -> whence.ModuleView:
    """Return a view of a tanh network over discrete actions."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return categorical_view(nn.Sequential(*layers[:-1]).to(dtype))


def log_probs(network: nn.Module, inputs: Any) -> Tensor:
    """Return the log-probs of actions by a network that maps observations to logits."""
    return network(inputs["observations"]).log_softmax(-1).gather(-1, inputs["actions"][:, None]).squeeze(-1)


def categorical_view(network: nn.Module) -> whence.ModuleView:
    return whence.ModuleView(network, log_probs)


def records_for(
    view: whence.PolicyView, n: int = 24, *, features: int | tuple[int, ...] = 5, dtype: torch.dtype = torch.float32
) -> whence.RecordBatch:
    """Return records of random states and actions, as the policy of `view` would have collected them."""
    shape = (features,) if isinstance(features, int) else features
    draft = whence.RecordBatch(
        observations=torch.randn(n, *shape, dtype=dtype),
        actions=torch.randint(0, 3, (n,)),
        log_probs=torch.zeros(n, dtype=dtype),
        advantages=torch.randn(n, dtype=dtype) + 0.3,
    )
    log_probs = view(view.parameters(), view.prepare(draft)).log_prob.detach()
    columns = {name: getattr(draft, name) for name in ("observations", "actions", "advantages")}
    return whence.RecordBatch(**columns, log_probs=log_probs)


def difference(one: whence.Influence, other: whence.Influence) -> float:
    """Return max|one - other| over max|other|."""
    return float((one.scores - other.scores).abs().max() / other.scores.abs().max())


def assert_close(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.0, relative: float = 0.0
) -> None:
    """Compare tensors by their names; `relative` is a tolerance in units of the largest number that is expected."""
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        allowed = tolerance + relative * float(expected[name].detach().abs().max())
        assert torch.allclose(tensor, expected[name], rtol=0, atol=allowed), name


@contextmanager
def flip_bit(file: Path, place: int | None = None) -> Iterator[None]:
    """Let a file differ in one bit, by default in the middle."""
    before = file.read_bytes()
    content = bytearray(before)
    content[len(content) // 2 if place is None else place] ^= 1
    file.write_bytes(content)
    yield
    file.write_bytes(before)


def sign_runs(folder: Path) -> None:
    """Make the runs in a folder this user's in their place."""
    for file in folder.rglob("config.json"):
        if '"whence-run"' in file.read_text(encoding="utf-8"):
            whence.open_run(file.parent).sign()


def copy_signed(source: Path, path: Path) -> Path:
    shutil.copytree(source, path)
    sign_runs(path)
    return path


def rewrite(path: Path, change: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")
