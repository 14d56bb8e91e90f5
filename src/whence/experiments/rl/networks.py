"""Networks by name, and the default network for an observation space."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gymnasium as gym
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
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


_SMALLEST = {"NatureCNN": 36, "MiniGridCNN": 5}
"""The least height and width, in pixels, that the convolutions leave anything of."""


def default_policy(space: gym.Space[Any]) -> str:
    """Return SB3's name of the policy for an observation space."""
    if isinstance(space, gym.spaces.Dict):
        return "MultiInputPolicy"
    if isinstance(space, gym.spaces.Box) and is_image_space(space):
        return "CnnPolicy" if _read_image_size(space) >= _SMALLEST["MiniGridCNN"] else "MlpPolicy"
    return "MlpPolicy"


def default_policy_kwargs(policy: str, policy_kwargs: Mapping[str, Any], space: gym.Space[Any]) -> dict[str, Any]:
    """Return a policy's arguments, with LDA's MiniGrid network if the images are too small for SB3's NatureCNN.

    A features extractor that `policy_kwargs` names stays.
    """
    if policy == "CnnPolicy" and isinstance(space, gym.spaces.Box) and is_image_space(space):
        size = _read_image_size(space)
        if _SMALLEST["MiniGridCNN"] <= size < _SMALLEST["NatureCNN"]:
            return {"features_extractor_class": MiniGridCNN.__name__, **policy_kwargs}
    return dict(policy_kwargs)


def _read_image_size(space: gym.spaces.Box) -> int:
    """Return the smaller of an image's height and width."""
    height_and_width = space.shape[1:] if is_image_space_channels_first(space) else space.shape[:2]
    return min(height_and_width)


def resolve_classes(policy_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's arguments, with classes in place of the names that configurations hold.

    Raises:
        WhenceError: no class of that name is known.
    """
    resolved = dict(policy_kwargs)
    for argument, classes in _CLASSES.items():
        if isinstance(name := resolved.get(argument), str):
            if name not in classes:
                raise WhenceError(f"{argument} is {name!r}.{suggest(name, classes)}")
            resolved[argument] = classes[name]
    return resolved
