"""The environments' own rewards and observations, below VecNormalize."""

from typing import Any


def original_reward(model: Any, rewards: Any) -> Any:
    """Return the environments' rewards of the last step, before VecNormalize."""
    normalised = model.get_vec_normalize_env()
    return rewards if normalised is None else normalised.get_original_reward()


def original_observation(model: Any, observation: Any) -> Any:
    """Return the environments' observations of the last step, before VecNormalize."""
    normalised = model.get_vec_normalize_env()
    return observation if normalised is None else normalised.get_original_obs()
