"""Stable-Baselines3: score rollout buffers, and train on the selected records with SB3's own `train()`."""

from importlib.util import find_spec

import lazy_loader

from whence.core import Unsupported

if find_spec("stable_baselines3") is None:
    raise Unsupported(
        "whence.sb3 needs Stable-Baselines3, which is not installed: in whence's source tree, pip install '.[sb3]'."
    )

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
