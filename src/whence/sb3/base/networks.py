"""LDA's network for MiniGrid, and the classes that a policy's arguments name."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from stable_baselines3.common import torch_layers
from stable_baselines3.common.sb2_compat import rmsprop_tf_like
from torch import Tensor, nn, optim

from whence.core import WhenceError, suggest


class MiniGridCNN(torch_layers.BaseFeaturesExtractor):
    """LDA's MiniGrid network: 3x3 convolutions of 16 and 32 filters, then a linear layer of 64 (LDA §B.2; v2 §A.2)."""

    def __init__(self, observation_space: gym.spaces.Box) -> None:
        super().__init__(observation_space, features_dim=64)
        channels, height, width = observation_space.shape
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(32 * (height - 4) * (width - 4), 64), nn.ReLU()),
        )

    def forward(self, observations: Tensor) -> Tensor:
        """Return (n, 64) features of (n, channels, height, width) images scaled to [0, 1]."""
        features: Tensor = self.layers(observations)
        return features


def resolve_classes(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's arguments, with classes in place of the names that configurations hold.

    A name is that of a class of PyTorch's, of Stable-Baselines3's or of this module's, alone or with its module's.

    Raises:
        WhenceError: no class of that name is known.
    """
    return {
        argument: _find_class(argument, value)
        if isinstance(value, str) and (argument.endswith("_class") or argument == "activation_fn")
        else value
        for argument, value in policy_kwargs.items()
    }


def _find_class(argument: str, path: str) -> type:
    name = path.rpartition(".")[2]
    known = {**vars(nn), **vars(torch_layers), **vars(optim), **vars(rmsprop_tf_like), "MiniGridCNN": MiniGridCNN}
    candidate = known.get(name)
    if isinstance(candidate, type) and path in (name, f"{candidate.__module__}.{candidate.__qualname__}"):
        return candidate
    of = optim.Optimizer if argument == "optimizer_class" else nn.Module
    names = (name for name, each in known.items() if isinstance(each, type) and issubclass(each, of))
    raise WhenceError(
        f"{argument} is {path!r}, which is no class of PyTorch's or Stable-Baselines3's."
        f"{suggest(name, names, otherwise='')}"
    )
