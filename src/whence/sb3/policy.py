"""SB3's actor-critic policies as views, and the refusal of policies that cannot be read."""

import copy
import logging
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.distributions import (
    DiagGaussianDistribution,
    Distribution,
    StateDependentNoiseDistribution,
)
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import MlpExtractor
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
    preserve_buffers,
    preserve_rng_state,
    replace_attribute,
    unwrap_compiled,
)
from whence.sb3.models.recurrent import is_recurrent, prepare_sequences, run_sequences
from whence.sb3.models.supported_models import check_policy

log = logging.getLogger("whence")

# The methods that the parts stand for; a policy that has its own computes something else.
_REPLACED = ("evaluate_actions", "extract_features", "_get_action_dist_from_latent")


def actor_critic_view(policy: Any) -> ModuleView:
    """Return a view of an SB3 `ActorCriticPolicy`, or of sb3-contrib's maskable or recurrent one.

    It covers all of SB3's observation and action spaces, features extractors shared or not, gSDE and squashed actions.
    A maskable policy reads the `action_masks` of records that have them; a recurrent one reads the steps before a
    record, which `snapshot` and `collect` note. The view computes what `evaluate_actions` does from its parts, which
    takes less time; where that is not the same, as of a policy that overrides it or whose features extractor was
    replaced, it calls `evaluate_actions` itself.

    Raises:
        Unsupported: see `check_policy`.
    """
    check_policy(policy := unwrap_compiled(policy))

    def prepare(records: RecordBatch) -> Tree:
        if is_recurrent(policy):
            return prepare_sequences(records) | {"actions": _shape_actions(policy, records, _dtype(policy))}
        return _prepare_parts(policy, records) if _has_plain_parts(policy, records) else _prepare_raw(policy, records)

    find_optimizer = partial(getattr, policy, "optimizer", None)
    return ModuleView(policy, _outputs, prepare, in_train_mode=True, optimizer=find_optimizer)


def _prepare_parts(policy: Any, records: RecordBatch) -> Tree:
    """Return the inputs of the policy's parts: observations after one-hot and scaling, in the parameters' type."""
    dtype = _dtype(policy)
    observations = preprocess_obs(records.observations, policy.observation_space, policy.normalize_images)
    inputs = {
        "observations": map_tree(lambda t: t.to(dtype), observations),
        "actions": _shape_actions(policy, records, dtype),
    }
    return inputs | _read_masks(policy, records)


def _prepare_raw(policy: Any, records: RecordBatch) -> Tree:
    """Return the inputs of `evaluate_actions`, as `train()` passes them."""
    actions = _shape_actions(policy, records, records.actions.dtype)
    return {"raw": records.observations, "actions": actions} | _read_masks(policy, records)


def _dtype(policy: Any) -> torch.dtype:
    return next(policy.parameters()).dtype  # type: ignore[no-any-return]


def _shape_actions(policy: Any, records: RecordBatch, dtype: torch.dtype) -> Tensor:
    if isinstance(policy.action_space, spaces.Discrete):
        return records.actions.long().flatten()
    # As SB3's buffer stores them; actions (n,) of a Box of one dimension would be broadcast to (n, n).
    return records.actions.to(dtype).reshape(len(records), -1)


def _read_masks(policy: Any, records: RecordBatch) -> dict[str, Tensor]:
    has_masks = records.action_masks is not None and isinstance(policy, MaskableActorCriticPolicy)
    return {"masks": records.action_masks} if has_masks else {}  # type: ignore[dict-item]


_PARTS = ("features_extractor", "pi_features_extractor", "vf_features_extractor", "mlp_extractor", "action_net")
_COMPARED: WeakKeyDictionary[Any, dict[Hashable, bool]] = WeakKeyDictionary()
"""Of each policy, whether it was what its parts are, by the identities of the parts."""

_SAMPLE = 256  # the records whose stored log-probs are compared with the policy's


def _has_plain_parts(policy: Any, records: RecordBatch) -> bool:
    """Return whether the parts of a policy compute what its `evaluate_actions` does, for the first few records."""
    if not _reads_its_parts(policy):
        return False
    comparisons, key = _find_comparison(policy, records)
    if key not in comparisons:
        comparisons[key] = _compare_parts(policy, records.take(slice(0, 16)))
        if not comparisons[key]:
            log.info("The parts of the policy are not what its evaluate_actions computes: scores call the latter.")
    return comparisons[key]


def _reads_its_parts(policy: Any) -> bool:
    """Return whether `evaluate_actions` is SB3's code over the parts that the view reads."""
    base = MaskableActorCriticPolicy if isinstance(policy, MaskableActorCriticPolicy) else ActorCriticPolicy
    overridden = [
        name for name in _REPLACED if name in vars(policy) or getattr(type(policy), name) is not getattr(base, name)
    ]
    if overridden or type(policy.mlp_extractor) is not MlpExtractor:
        return False
    return not policy.share_features_extractor or policy.features_extractor is policy.pi_features_extractor


def _find_comparison(policy: Any, records: RecordBatch) -> tuple[dict[Hashable, bool], Hashable]:
    """Return what comparisons of the policy's parts said, and the key of the present parts and such records."""
    parts = tuple(id(getattr(policy, name, None)) for name in _PARTS)
    return _COMPARED.setdefault(policy, {}), (parts, records.actions.dtype, next(policy.parameters()).dtype)


def _compare_parts(policy: Any, records: RecordBatch, whole: tuple[Tensor | None, ...] = ()) -> bool:
    """Return whether the parts compute `whole`: log-probs and values; by default what `evaluate_actions` returns."""
    with torch.no_grad(), preserve_rng_state(), preserve_buffers(policy.modules()):
        try:
            whole = whole or _complete(_outputs(policy, _prepare_raw(policy, records)))
        except Exception:  # also where an action is in no space, of which the parts say more
            return True
        try:
            parts = _complete(_outputs(policy, _prepare_parts(policy, records)))
        except Exception:  # such as layers of several types
            return False
    return all(map(_is_close, whole, parts))


def _is_close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-6)


def _complete(outputs: LazyOutputs) -> tuple[Tensor | None, ...]:
    return outputs.log_prob, outputs.value(), outputs.entropy()


def _outputs(policy: Any, inputs: Tree) -> LazyOutputs:
    """Return what `policy.evaluate_actions` returns, for prepared inputs, without changing `policy.action_dist`."""
    if "raw" in inputs:
        masks = {"action_masks": inputs["masks"]} if "masks" in inputs else {}
        with _spare_distribution(policy):
            value, log_prob, entropy = policy.evaluate_actions(inputs["raw"], inputs["actions"], **masks)
        return LazyOutputs(log_prob, value.flatten, lambda: entropy)
    distribution, values = _run(policy, inputs)
    try:
        log_prob = distribution.log_prob(inputs["actions"])
    except ValueError as refusal:
        raise InvalidRecords(
            f"An action of the records is none of the policy's, for {policy.action_space}: {first_line(refusal)}. Pass "
            "records of its environment. SB3 counts the actions of a Discrete space from 0, whatever its start."
        ) from refusal
    return LazyOutputs(log_prob, values, distribution.entropy)


def _spare_distribution(policy: Any) -> AbstractContextManager[None]:
    """Let a policy fill a copy of its distribution; deepcopy(policy) would raise while it holds tensors of a graph."""
    return replace_attribute(policy, "action_dist", copy.copy(policy.action_dist))


def warn_of_log_probs(policy: Any, records: RecordBatch) -> None:
    """Log a warning if log-probs that SB3 stored while it collected are not the policy's, for some of the records.

    Scores stay those of what SB3 trains: its loss has the same ratios. All records are looked at if some of 256 differ,
    which are spread over the rollout. A fault in 1 of 100 records is missed in at most 8 of 100 rollouts.
    """
    policy = unwrap_compiled(policy)
    sample = records.take(torch.linspace(0, len(records) - 1, min(_SAMPLE, len(records))).long())
    # What is stored confirms the parts, which saves the comparison with evaluate_actions.
    if _reads_its_parts(policy) and _compare_parts(policy, sample, (sample.log_probs, sample.values)):
        comparisons, key = _find_comparison(policy, sample)
        comparisons[key] = True
    elif _find_apart(policy, sample)[1].any():
        log_probs, apart = _find_apart(policy, records)
        first = int(apart.nonzero()[0])
        log.warning(
            "The policy's log-probs are not those that the rollout holds, in %d of %d records: %.4g is stored and %.4g "
            "computed for record %d. SB3 trains on such ratios, and scores are of the same loss. Causes: actions of a "
            "Box of integers, which SB3 rounds when it stores them; a policy that acts otherwise than it is evaluated; "
            "a layer that keeps a state.",
            int(apart.sum()),
            len(records),
            float(records.log_probs[first]),
            float(log_probs[first]),
            int(records.ids[first]),
        )


def _find_apart(policy: Any, records: RecordBatch) -> tuple[Tensor, Tensor]:
    """Return the policy's log-probs of records, and which of them are not those that the rollout holds."""
    view = actor_critic_view(policy)
    pieces = [records.take(slice(start, start + _SAMPLE)) for start in range(0, len(records), _SAMPLE)]
    with torch.no_grad(), preserve_rng_state(), preserve_buffers(policy.modules()):
        log_probs = torch.cat([view.only({"log_prob"}, {}, view.prepare(piece)).log_prob for piece in pieces])
    is_half = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in policy.parameters())
    apart = (log_probs - records.log_probs).abs() / records.log_probs.abs().clamp(min=1.0)
    return log_probs, apart > (0.1 if is_half else 1e-3)


def predict(policy: Any, inputs: Tree) -> tuple[Distribution, Tensor]:
    """Return the distribution of actions and the values, (n,), for inputs that the policy's view prepared."""
    if "raw" in inputs:
        with _spare_distribution(policy):
            distribution = policy.get_distribution(inputs["raw"], *([inputs["masks"]] if "masks" in inputs else []))
            return distribution, policy.predict_values(inputs["raw"]).flatten()
    distribution, values = _run(policy, inputs)
    return distribution, values()


def _run(policy: Any, inputs: Tree) -> tuple[Distribution, Callable[[], Tensor]]:
    """Return the distribution of actions, and a function that returns the values, which need the critic's layers."""
    if is_recurrent(policy):
        latent, values_of_sequences = run_sequences(policy, inputs)
        return _make_distribution(policy, latent, None), values_of_sequences
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
