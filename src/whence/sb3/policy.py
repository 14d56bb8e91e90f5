"""SB3's actor-critic policies as views, and the refusal of policies that cannot be read."""

import copy
from collections.abc import Callable
from typing import Any

from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import (
    DiagGaussianDistribution,
    Distribution,
    StateDependentNoiseDistribution,
)
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import Tensor

from whence.core import (
    InvalidRecords,
    LazyOutputs,
    ModuleView,
    NonFinite,
    RecordBatch,
    Tree,
    first_line,
    map_tree,
)
from whence.sb3.supported_models import check_policy


def actor_critic_view(policy: Any) -> ModuleView:
    """Return a view of an SB3 `ActorCriticPolicy`, or of sb3-contrib's maskable one.

    It covers all of SB3's observation and action spaces, features extractors shared or not, gSDE and squashed actions.
    A maskable policy reads the `action_masks` of records that have them.

    Raises:
        Unsupported: see `check_policy`.
    """
    check_policy(policy)

    def prepare(records: RecordBatch) -> Tree:
        dtype = next(policy.parameters()).dtype
        observations = preprocess_obs(records.observations, policy.observation_space, policy.normalize_images)
        if isinstance(policy.action_space, spaces.Discrete):
            actions = records.actions.long().flatten()
        else:
            # As SB3's buffer stores them; actions (n,) of a Box of one dimension would be broadcast to (n, n).
            actions = records.actions.to(dtype).reshape(len(records), -1)
        inputs = {"observations": map_tree(lambda t: t.to(dtype), observations), "actions": actions}
        if records.action_masks is not None and isinstance(policy, MaskableActorCriticPolicy):
            inputs["masks"] = records.action_masks
        return inputs

    return ModuleView(policy, _outputs, prepare)


def _outputs(policy: Any, inputs: Tree) -> LazyOutputs:
    """Return what `policy.evaluate_actions` returns, for prepared inputs, without changing `policy.action_dist`."""
    distribution, values = _run(policy, inputs)
    try:
        log_prob = distribution.log_prob(inputs["actions"])
    except ValueError as refusal:
        raise InvalidRecords(
            f"An action of the records is none of {policy.action_space}: {first_line(refusal)}. Pass records of this "
            "policy's environment."
        ) from refusal
    return LazyOutputs(log_prob, values, distribution.entropy)


def predict(policy: Any, inputs: Tree) -> tuple[Distribution, Tensor]:
    """Return the distribution of actions and the values, (n,), for inputs that the policy's view prepared."""
    distribution, values = _run(policy, inputs)
    return distribution, values()


def embed(policy: Any, inputs: Tree) -> Tensor:
    """Return the activations of the actor's penultimate layer, (n, d), for inputs that the policy's view prepared."""
    latent: Tensor = policy.mlp_extractor.forward_actor(policy.pi_features_extractor(inputs["observations"]))
    return latent


def _run(policy: Any, inputs: Tree) -> tuple[Distribution, Callable[[], Tensor]]:
    """Return the distribution of actions, and a function that returns the values, which need the critic's layers."""
    pi_features = policy.pi_features_extractor(inputs["observations"])
    latent = policy.mlp_extractor.forward_actor(pi_features)

    def values() -> Tensor:
        shared = policy.share_features_extractor
        vf_features = pi_features if shared else policy.vf_features_extractor(inputs["observations"])
        of_records: Tensor = policy.value_net(policy.mlp_extractor.forward_critic(vf_features))
        return of_records.flatten()

    return _make_distribution(policy, latent, inputs.get("masks")), values


def _make_distribution(policy: Any, latent: Tensor, masks: Tensor | None) -> Distribution:
    """Return the distribution of actions for the actor's latent features."""
    # A copy, since deepcopy(policy) raises while the policy's own distribution holds tensors of a graph.
    distribution: Any = copy.copy(policy.action_dist)
    parameters = policy.action_net(latent)
    try:
        if isinstance(distribution, DiagGaussianDistribution):
            return distribution.proba_distribution(parameters, policy.log_std)
        if isinstance(distribution, StateDependentNoiseDistribution):
            return distribution.proba_distribution(parameters, policy.log_std, latent)
        distribution.proba_distribution(action_logits=parameters)
        if masks is not None:
            distribution.apply_masking(masks)
    except ValueError as refusal:  # torch checks them
        raise NonFinite(
            f"The policy's distribution of actions is not finite: {first_line(refusal)}. Its weights have grown too "
            "large, or an observation has; find where, or take an earlier round."
        ) from refusal
    return distribution  # type: ignore[no-any-return]
