"""A round of PPO on a language model before its steps: rewards and advantages of responses, and their table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.core import NonFinite, RecordBatch
from whence.llm.base import (
    ONE,
    PPOConfig,
    Processes,
    Reference,
    WithValueHead,
    average_rows,
    last_token,
    list_infos,
    list_signals,
    list_tokens,
    make_rows,
)
from whence.llm.scores import evaluate_rows
from whence.llm.text import NO_COLUMNS, Columns, Responses, Reward, compute_rewards
from whence.scores import Influence
from whence.selection import Selection, add_selection, summarise_selection


@dataclass(frozen=True, eq=False)
class Rollout:
    """A rollout, ready to be scored and trained on.

    Attributes:
        responses: the prompts and their responses.
        rows: a record for each response, with whitened advantages.
        rewards: (n,) float64 values of the reward functions, before any penalty.
        divergence: (n,) divergence of each response from the start model, in nats, by the estimate that penalises it.
        columns: the prompts' further columns, with a value for each response.
        token_entropies: (n, R) the entropies of all tokens that could have followed, in nats.
        ref_log_probs: (n, R) log-probs of the response tokens under the start model.
    """

    responses: Responses
    rows: RecordBatch
    rewards: Float[Tensor, " n"]
    divergence: Float[Tensor, " n"]
    columns: Columns
    token_entropies: Float[Tensor, "n R"]
    ref_log_probs: Float[Tensor, "n R"]


def make_rollout(
    model: WithValueHead,
    reference: Reference,
    responses: Responses,
    reward: Reward,
    kl_coef: float,
    config: PPOConfig,
    first_id: int = 0,
    processes: Processes = ONE,
    columns: Columns = NO_COLUMNS,
) -> Rollout:
    """Return responses with rewards, advantages and returns, which every process gets; the model is left in its mode.

    A token's reward is minus `kl_coef` times its divergence from the start model; the last token also gets the
    response's reward. Advantages are by GAE, whitened over all response tokens of the rollout, before any selection.
    Each process evaluates a part of the responses. `columns` are for rewards with arguments of these names.

    Raises:
        NonFinite: a row's reward, log-prob or value is not finite; `record_ids` holds the rows' ids.
        WhenceError: the reward fails, or does not return one number for each response.
    """
    mask = responses.response_mask
    part = processes.part(len(mask))
    local_columns = {name: column[part] for name, column in columns.items()}
    try:
        rewards = compute_rewards(reward, responses.prompts[part], responses.texts[part], local_columns)
    except NonFinite as error:
        ids = [first_id + (part.start or 0) + row for row in error.record_ids]
        raise NonFinite(f"{error} It is record {ids[0]}.", record_ids=ids) from error
    if processes.number > 1:
        rewards = processes.gather(rewards.to(mask.device), len(mask)).cpu()
    tokens = {name: getattr(responses, name) for name in ("input_ids", "attention_mask", "response_mask")}
    draft = make_rows(**tokens)
    evaluation = (draft, config.temperature, config.generation_batch_size, processes)
    outputs = evaluate_rows(model, *evaluation, with_entropy=True)
    with reference.activate(model.language_model) as start_model:
        ref_log_probs = evaluate_rows(start_model, *evaluation).log_prob
    assert outputs.value is not None
    assert outputs.entropy is not None
    columns_of_tokens = {"log-prob": outputs.log_prob, "value": outputs.value}
    _check_finite(columns_of_tokens | {"log-prob of the start model": ref_log_probs}, mask, first_id)
    penalty = outputs.log_prob - ref_log_probs  # whose mean over tokens drawn from the policy is its divergence
    scores = rewards - (config.missing_eos_penalty or 0.0) * (~responses.ended.cpu()).to(rewards)
    token_rewards = reward_tokens(scores.to(mask.device), kl_coef * penalty, mask)
    advantages = gae(token_rewards, outputs.value, mask, config.gamma, config.lam)
    # A prompt may begin with the token that pads others.
    prompts = torch.where(responses.attention_mask.bool(), responses.input_ids, -1)[:, : -mask.shape[1]]
    rows = make_rows(
        **tokens,
        log_probs=outputs.log_prob,
        values=torch.where(mask, outputs.value, 0.0),
        advantages=whiten(advantages, mask),
        returns=torch.where(mask, advantages + outputs.value, 0.0),
        record_ids=torch.arange(first_id, first_id + len(mask)),
        rewards=rewards,
        group_ids=prompts.unique(dim=0, return_inverse=True)[1],
    )
    return Rollout(
        responses,
        rows,
        rewards,
        torch.where(mask, penalty, 0.0).sum(dim=1).cpu(),
        columns,
        outputs.entropy,
        ref_log_probs,
    )


def reward_tokens(
    scores: Float[Tensor, " n"], penalty: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]
) -> Float[Tensor, "n R"]:
    """Return each token's reward: minus its penalty, plus the row's score at the last response token.

    A row without a response token gets no reward.
    """
    rewards = torch.where(mask, -penalty, 0.0)
    last = last_token(mask)
    rows = mask.any(dim=1)
    rewards[rows, last[rows]] += scores[rows].to(rewards)
    return rewards


def whiten(values: Float[Tensor, "n R"], mask: Bool[Tensor, "n R"]) -> Float[Tensor, "n R"]:
    """Return values minus their mean over all response tokens, divided by their standard deviation; 0 elsewhere.

    The variance has Bessel's correction, as in TRL.
    """
    chosen = values[mask]
    if len(chosen) < 2:
        return torch.where(mask, values, 0.0)
    return torch.where(mask, (values - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8), 0.0)


def _check_finite(columns: Mapping[str, Float[Tensor, "n R"]], mask: Bool[Tensor, "n R"], first_id: int) -> None:
    """Refuse a number at a response token that is not finite."""
    for name, column in columns.items():
        broken = (~torch.isfinite(column) & mask).any(dim=1)
        if broken.any():
            ids = [first_id + row for row in broken.nonzero().flatten().tolist()]
            raise NonFinite(
                f"the {name} of record {ids[0]} is not finite, nor are those of {len(ids) - 1} other of {len(mask)} "
                "rows. The model has diverged, or computes in a precision that overflows: lower the learning rate, or "
                "load it in bfloat16 or float32.",
                record_ids=ids,
            )


def make_response_table(rollout: Rollout, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Return a row for each response: texts, reward, divergence, advantage of its last token, score and selection."""
    responses, rows = rollout.responses, rollout.rows
    assert rows.group_ids is not None
    table = pl.DataFrame(
        {
            "record_id": rows.ids.tolist(),
            "group_id": rows.group_ids.tolist(),
            "prompt": list(responses.prompts),
            "response": list(responses.texts),
            "tokens": responses.response_mask.sum(dim=1).tolist(),
            "ended": responses.ended.tolist(),
            "reward": rollout.rewards.tolist(),
            "divergence": rollout.divergence.double().tolist(),
            "advantage": rows.advantages.double().tolist(),
            "log_prob": rows.log_probs.double().tolist(),
        }
    )
    observations: Any = rows.observations
    signals = list_signals(
        observations["response_mask"].cpu(),
        table["tokens"].to_list(),
        log_probs=observations["log_probs"],
        entropies=rollout.token_entropies,
        ref_log_probs=rollout.ref_log_probs,
    )
    signals = [column for column in signals if column.name not in table.columns]
    table = table.with_columns(*list_infos(rollout.columns), *list_tokens(rows), *signals)
    return add_selection(table, selection, influence)


def make_metrics_row(
    number: int, rollout: Rollout, selection: Selection, influence: Influence | None
) -> dict[str, Any]:
    """Return a round's row of metrics, without those of the optimisation."""
    rewards, keep, tokens = rollout.rewards, selection.keep, rollout.rows.observations
    log_probs = tokens["log_probs"][tokens["response_mask"]]
    return {
        "round": number,
        **average_rows(pl.DataFrame(list_infos(rollout.columns))),
        "reward": float(rewards.mean()),
        "reward_kept": float(rewards[keep].mean()) if keep.any() else None,
        "reward_dropped": float(rewards[~keep].mean()) if (~keep).any() else None,
        "kl": float(rollout.divergence.mean()),
        # Minus the mean log-prob of the drawn tokens is the policy's entropy per token, in nats.
        "train/entropy_loss": float(log_probs.mean()) if len(log_probs) else 0.0,
        "length": float(rollout.responses.response_mask.sum(dim=1).double().mean()),
        "ended_share": float(rollout.responses.ended.to(torch.float64).mean()),
        **summarise_selection(selection, influence),
    }


def gae(
    rewards: Float[Tensor, "n R"],
    values: Float[Tensor, "n R"],
    mask: Bool[Tensor, "n R"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "n R"]:
    """Return generalised advantage estimates of response tokens; the last token ends the episode.

    Response tokens of a row are consecutive, from the first position on.

    Args:
        rewards: rewards of the tokens; see `token_rewards`.
        values: values of the states before the tokens.
        mask: mask of the response tokens.
        gamma: discount factor.
        lam: lambda of the estimator.
    """
    values = torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    advantage, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, 0.0)
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages
