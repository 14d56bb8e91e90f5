"""Networks that configurations name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gymnasium as gym
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from torch import Tensor, nn

from whence.errors import WhenceError, suggest


class MiniGridCNN(BaseFeaturesExtractor):
    """LDA's MiniGrid network: two 3x3 convolutions of 16 and 32 filters, then a linear layer of 64 (LDA §B.2)."""

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


_CLASSES: Mapping[str, Mapping[str, type[nn.Module]]] = MappingProxyType(
    {
        "features_extractor_class": {
            known.__name__: known for known in (MiniGridCNN, NatureCNN, FlattenExtractor, CombinedExtractor)
        },
        "activation_fn": {
            known.__name__: known for known in (nn.Tanh, nn.ReLU, nn.ELU, nn.GELU, nn.LeakyReLU, nn.SiLU)
        },
    }
)


def resolve_classes(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's arguments with the classes that configurations can only name.

    Raises:
        WhenceError: no class of that name is known.
    """
    found = dict(policy_kwargs)
    for argument, known in _CLASSES.items():
        if isinstance(name := found.get(argument), str):
            if name not in known:
                raise WhenceError(f"{argument} is {name!r}.{suggest(name, known)}")
            found[argument] = known[name]
    return found
