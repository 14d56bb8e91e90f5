"""The objective that a model's own `train()` raises."""

from typing import Any

from stable_baselines3 import A2C, PPO

from whence import objectives
from whence.objectives import Objective
from whence.sb3.contrib import MaskablePPO


def model_objective(model: Any) -> Objective:
    """Return what a model's `train()` raises, without the value term: its clip range, entropy, normalisation.

    At the policy that collected the rollout every ratio is 1, so a scheduled clip range does not matter.
    """
    norm: objectives.AdvantageNorm = "buffer" if model.normalize_advantage else "none"
    if isinstance(model, PPO | MaskablePPO):
        clip_range = float(model.clip_range(model._current_progress_remaining))  # type: ignore[operator]
        return objectives.PPOClip(clip_range=clip_range, ent_coef=model.ent_coef, advantage_norm=norm)
    assert isinstance(model, A2C)  # check_model lets no other pass
    return objectives.A2C(ent_coef=model.ent_coef, advantage_norm=norm)
