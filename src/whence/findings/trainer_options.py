"""The options of trainers of language models, by which advice on their runs names what to change."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Options(NamedTuple):
    """What a trainer calls its settings, in parts of sentences; the defaults are of no trainer."""

    kl: str = "the KL coefficient (`init_kl_coef`; TRL's `beta`)"
    rate: str = "`learning_rate`"
    cut: str = "raise the limit of tokens, or leave cut responses out of the loss"
    flat: str = "more responses a prompt"
    sampler: str = "weight tokens by the ratio of both probabilities"


_RLOO = Options(
    kl="the KL coefficient `beta`",
    cut="raise `max_completion_length`, or leave cut responses out of the loss (`mask_truncated_completions`)",
    flat="a larger `num_generations`",
)

OPTIONS: Mapping[str, Options] = {
    "ppo": Options(
        kl="the KL coefficient `init_kl_coef`",
        cut="raise `max_new_tokens`, or make cut responses cost (`missing_eos_penalty`)",
        flat="a larger `num_generations`",
    ),
    **dict.fromkeys(("grpo", "TRL"), _RLOO._replace(sampler="keep `vllm_importance_sampling_correction`")),
    "rloo": _RLOO,
    "verl": Options(
        kl="`actor_rollout_ref.actor.kl_loss_coef`",
        rate="`actor_rollout_ref.actor.optim.lr`",
        cut="raise `data.max_response_length`, or make cut responses cost (`overlong_buffer_cfg`, of DAPO's rewards)",
        flat="a larger `actor_rollout_ref.rollout.n`, or `algorithm.filter_groups`",
        sampler="correct for it by `algorithm.rollout_correction`",
    ),
    "OpenRLHF": Options(
        kl="`--init_kl_coef`",
        rate="`--actor_learning_rate`",
        cut="raise `--generate_max_len`, or make cut responses cost (`--overlong_buffer_len`)",
        flat="a larger `--n_samples_per_prompt`, or `--dynamic_filtering`",
        sampler="correct for it by `--enable_vllm_is_correction`",
    ),
}
"""By the `algorithm` of a run's configuration, and by the library that wrote logs."""


def name_trainer(config: Mapping[str, Any]) -> str:
    """Return the trainer that wrote a run's configuration; empty if it is not known."""
    return str(config.get("algorithm") or ("ppo" if "ppo" in config else ""))
