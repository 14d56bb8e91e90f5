"""Models and policies that whence can score and filter; all others are refused, by name and with the reason."""

from typing import Any

from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy

from whence.core import Unsupported, require_names, unwrap_compiled

_ALGORITHMS = (PPO, A2C, MaskablePPO, RecurrentPPO)
_BUFFERS = (
    *(RolloutBuffer, DictRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer),
    *(RecurrentRolloutBuffer, RecurrentDictRolloutBuffer),
)
MODEL_NAMES = (
    *("_last_obs", "_last_original_obs", "_last_episode_starts", "_vec_normalize_env", "_stats_window_size"),
    *("_total_timesteps", "_episode_num", "_n_updates", "_current_progress_remaining", "_init_callback"),
)
"""What a training needs of a model beyond SB3's documentation; a rollout buffer's is `_get_samples`."""
_RECURRENT = "evaluate_actions", "extract_features", "_process_sequence", "_get_action_dist_from_latent"
"""The methods of a recurrent policy that whence computes from its parts."""
STAND_IN = "_whence_wraps_train"
"""An attribute of the class that stands in for a model's own until its next rollout or training."""


def original_class(model: Any) -> Any:
    """Return the model's class, even while a subclass stands in for it."""
    return type(model).__base__ if STAND_IN in vars(type(model)) else type(model)


def check_model(model: Any) -> None:
    """Refuse as `Unsupported`, by name and with the reason, a model whose rounds whence cannot score and filter."""
    name = type(model).__name__
    base = next((algorithm for algorithm in _ALGORITHMS if isinstance(model, algorithm)), None)
    if base is None:
        why = "its loss is not known to whence" if isinstance(model, OnPolicyAlgorithm) else "it is not on-policy"
        raise Unsupported(
            f"{name} is not supported: {why}. PPO and A2C of Stable-Baselines3 are, and MaskablePPO and RecurrentPPO "
            "of sb3-contrib."
        )
    if original_class(model).train is not base.train or "train" in vars(model):
        raise Unsupported(
            f"{name} overrides train(), so whence cannot know which records it trains on. Use {base.__name__}."
        )
    require_names("stable_baselines3", model, MODEL_NAMES)
    require_names("stable_baselines3", model.rollout_buffer, ["_get_samples"])
    check_policy(model.policy)
    buffer = type(model.rollout_buffer)
    is_known = any(buffer.get is known.get for known in _BUFFERS)
    if not is_known or "get" in vars(model.rollout_buffer):
        raise Unsupported(
            f"The rollout buffer {buffer.__name__} overrides get(), so whence cannot know what it yields. Use SB3's "
            "own (rollout_buffer_class=None)."
        )


def check_policy(policy: Any) -> None:
    """Refuse as `Unsupported` a policy whose log-probs `actor_critic_view` would not compute."""
    policy = unwrap_compiled(policy)
    if not isinstance(policy, ActorCriticPolicy | MaskableActorCriticPolicy):
        raise Unsupported(
            f"{type(policy).__name__} is no actor-critic policy, and whence scores on-policy records by their "
            "log-probs. Use PPO, A2C, MaskablePPO or RecurrentPPO with an actor-critic policy of theirs."
        )
    if isinstance(policy, RecurrentActorCriticPolicy):
        for method in _RECURRENT:
            if getattr(type(policy), method) is not getattr(RecurrentActorCriticPolicy, method):
                raise Unsupported(
                    f"{type(policy).__name__} overrides {method}(), so whence cannot know how its log-probs depend on "
                    "the steps before. Use MlpLstmPolicy, CnnLstmPolicy or MultiInputLstmPolicy."
                )
        if any(getattr(policy.lstm_actor, name) for name in ("proj_size", "bidirectional", "batch_first")):
            raise Unsupported(
                f"The LSTM of {type(policy).__name__} has lstm_kwargs={policy.lstm_kwargs}; whence knows LSTMs without "
                "projection that read forwards, steps first. Leave out proj_size, bidirectional and batch_first."
            )
