"""VecNormalize: what it received, and whether its running statistics are spoilt."""

from typing import Any

import numpy as np


def describe_spoilt_statistics(model: Any) -> str:
    """Return a sentence that says which running statistics are not finite any more; "" if all are.

    Args:
        model: a model; its environment may be a VecNormalize.
    """
    normalised = model.get_vec_normalize_env()
    if normalised is None:
        return ""
    observations = getattr(normalised, "obs_rms", None)
    statistics = observations if isinstance(observations, dict) else {"": observations}
    named = {f"obs_rms{f'[{key!r}]' if key else ''}": rms for key, rms in statistics.items()}
    named["ret_rms"] = getattr(normalised, "ret_rms", None)
    spoilt = [n for n, rms in named.items() if rms is not None and not np.isfinite([rms.mean, rms.var]).all()]
    if not spoilt:
        return ""
    return (
        f"VecNormalize's running statistics ({', '.join(spoilt)}) took the number in, so every later one that it "
        "normalises is NaN, and leaving out records cannot help: replace such numbers in a wrapper below VecNormalize, "
        "and start from a VecNormalize that was saved before. "
    )


def original_reward(model: Any, rewards: Any) -> Any:
    """Return the environments' rewards of the last step, before VecNormalize."""
    normalised = model.get_vec_normalize_env()
    return rewards if normalised is None else normalised.get_original_reward()


def original_observation(model: Any, observation: Any) -> Any:
    """Return the environments' observations of the last step, before VecNormalize."""
    normalised = model.get_vec_normalize_env()
    return observation if normalised is None else normalised.get_original_obs()
