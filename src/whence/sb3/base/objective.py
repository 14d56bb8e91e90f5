"""The objective that a model's `train()` raises."""

from typing import Any

from stable_baselines3 import A2C, PPO

from whence import objectives
from whence.objectives import Objective
from whence.sb3.contrib import MaskablePPO


def model_objective(model: Any) -> Objective:
    """Return the objective of a model's `train()`, without its value term, with the model's settings.

    These are the clip range, the entropy coefficient and whether advantages are normalised. At the policy that
    collected the rollout every ratio is 1, so any clip range gives the same scores. Of a schedule, which may end at 0,
    the widest is taken: a ratio that rounding moves off 1 must not be clipped.
    """
    norm: objectives.AdvantageNorm = "buffer" if model.normalize_advantage else "none"
    if isinstance(model, PPO | MaskablePPO):
        clip_range = max(float(model.clip_range(left)) for left in (1.0, 0.5, 0.0))  # type: ignore[operator]
        return objectives.PPOClip(clip_range=clip_range, ent_coef=model.ent_coef, advantage_norm=norm)
    assert isinstance(model, A2C)  # check_model lets no other pass
    return objectives.A2C(ent_coef=model.ent_coef, advantage_norm=norm)
