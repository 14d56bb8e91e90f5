"""SB3's actor-critic policies as views, and the refusal of what cannot be read yet."""

import copy
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import Tensor

from whence.errors import Unsupported
from whence.policies import LazyOutputs, ModuleView
from whence.records import RecordBatch, Tree, map_tree

# What `_outputs` does in their stead; a subclass that overrides one of them computes something else.
_READ = ("evaluate_actions", "extract_features", "_get_action_dist_from_latent")


def actor_critic_view(policy: Any) -> ModuleView:
    """Return a view of an SB3 `ActorCriticPolicy` (Mlp and Cnn; any features extractor, shared or not).

    Raises:
        Unsupported: another policy, space or exploration; the message says which.
    """
    check_policy(policy)

    def prepare(records: RecordBatch) -> Tree:
        dtype = next(policy.parameters()).dtype
        observations = preprocess_obs(records.observations, policy.observation_space, policy.normalize_images)
        actions = records.actions
        if isinstance(policy.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        return {"observations": map_tree(lambda t: t.to(dtype), observations), "actions": actions}

    return ModuleView(policy, _outputs, prepare)


def _outputs(policy: ActorCriticPolicy, inputs: Tree) -> LazyOutputs:
    """What `policy.evaluate_actions` returns, on prepared observations and without touching `policy.action_dist`."""
    observations, extractor = inputs["observations"], policy.mlp_extractor
    pi_features = policy.pi_features_extractor(observations)
    distribution = _distribution(policy, policy.action_net(extractor.forward_actor(pi_features)))

    def value() -> Tensor:
        shared = policy.share_features_extractor
        vf_features = pi_features if shared else policy.vf_features_extractor(observations)
        values: Tensor = policy.value_net(extractor.forward_critic(vf_features))
        return values.flatten()

    return LazyOutputs(distribution.log_prob(inputs["actions"]), value, distribution.entropy)


def _distribution(policy: ActorCriticPolicy, parameters: Tensor) -> Distribution:
    # A copy: the policy's own object would keep our tensors, and deepcopy(policy) would then raise.
    distribution = copy.copy(policy.action_dist)
    if isinstance(distribution, DiagGaussianDistribution):
        return distribution.proba_distribution(parameters, policy.log_std)
    return distribution.proba_distribution(action_logits=parameters)


def check_policy(policy: Any) -> None:
    """Refuse, by name and with the reason, a policy whose log-probs `actor_critic_view` would not compute.

    Raises:
        Unsupported: see the message.
    """
    name = type(policy).__name__
    if not isinstance(policy, ActorCriticPolicy):
        raise Unsupported(
            f"{name} is no actor-critic policy: whence scores on-policy records by their log-probs. Use PPO or A2C "
            "with MlpPolicy or CnnPolicy."
        )
    changed = [method for method in _READ if getattr(type(policy), method) is not getattr(ActorCriticPolicy, method)]
    if changed:
        raise Unsupported(
            f"{name} overrides {', '.join(changed)}, so whence cannot know its log-probs from SB3's own code. Wrap it: "
            "whence.ModuleView(policy, lambda policy, inputs: whence.Outputs(...))."
        )
    if policy.use_sde:
        raise Unsupported(f"{name} uses gSDE (use_sde=True), which whence does not read yet. Train with use_sde=False.")
    if not isinstance(policy.observation_space, spaces.Box | spaces.Discrete):
        raise Unsupported(
            f"The observation space {type(policy.observation_space).__name__} is not supported yet; Box and Discrete "
            "are. Flatten it with gymnasium.wrappers.FlattenObservation."
        )
    if not isinstance(policy.action_space, spaces.Box | spaces.Discrete):
        raise Unsupported(
            f"The action space {type(policy.action_space).__name__} is not supported yet; Discrete and Box are."
        )
