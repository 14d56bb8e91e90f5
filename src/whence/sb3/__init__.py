"""Stable-Baselines3: score rollout buffers, and train on the selected records with SB3's own `train()`."""

from whence.errors import Unsupported

try:
    import stable_baselines3 as _  # noqa: F401
except ImportError as missing:
    raise Unsupported(
        "whence.sb3 needs Stable-Baselines3, which is not installed: in whence's source tree, pip install '.[sb3]'."
    ) from missing

from whence.sb3.buffer import collect as collect
from whence.sb3.buffer import snapshot as snapshot
from whence.sb3.callback import InfluenceCallback as InfluenceCallback
from whence.sb3.episodes import RecordResets as RecordResets
from whence.sb3.objective import model_objective as model_objective
from whence.sb3.replay import replay as replay
