"""One rollout of a language model: responses, what they are worth, and the advantages of their tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.guards import eval_mode
from whence.llm import losses
from whence.llm.config import PPOConfig
from whence.llm.generation import Responses
from whence.llm.model import Reference, WithValueHead
from whence.llm.processes import ONE, Processes
from whence.llm.rewards import NO_COLUMNS, Columns, Reward, compute_rewards
from whence.llm.rows import make_rows
from whence.llm.view import language_view
from whence.policies import Outputs
from whence.records import RecordBatch


@dataclass(frozen=True, eq=False)
class Rollout:
    """A rollout, ready to be scored and trained on.

    Attributes:
        responses: what was drawn.
        rows: a record for each response, with whitened advantages.
        rewards: (n,) float64 of the reward functions, before any penalty.
        divergence: (n,) of each response from the start model, in nats, by the estimate that penalises it.
        entropy: of the policy per response token, in nats, as minus the mean log-prob of what was drawn.
    """

    responses: Responses
    rows: RecordBatch
    rewards: Float[Tensor, " n"]
    divergence: Float[Tensor, " n"]
    entropy: float


def rolled_out(
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
    """Return responses with rewards, advantages and returns; the model is left in its mode.

    Rewards of tokens are less `kl_coef` times their divergence from the start model; the response's reward is at its
    last token. Advantages are by GAE, whitened over all response tokens of the rollout, before anything is selected.

    Args:
        model: the policy that drew the responses.
        reference: the model it began as.
        responses: from `generate`.
        reward: of prompts and responses.
        kl_coef: weight of the divergence.
        config: the other settings.
        first_id: record id of the first row.
        processes: which evaluate a part of the responses each, and get all.
        columns: what else is known of each prompt, for rewards that ask for it.

    Raises:
        WhenceError: a reward that is not finite, or not one for each response.
    """
    mask = responses.response_mask
    own = processes.own(len(mask))
    known = {name: column[own] for name, column in columns.items()}
    rewards = compute_rewards(reward, responses.prompts[own], responses.texts[own], known)
    if processes.number > 1:
        rewards = processes.gathered(rewards.to(mask.device), len(mask)).cpu()
    scores = rewards.clone()
    if config.missing_eos_penalty is not None:
        scores -= config.missing_eos_penalty * (~responses.ended.cpu()).double()
    mine = evaluated(model, responses, config, processes)
    with reference.of(model) as start:
        theirs = evaluated(start, responses, config, processes).log_prob
    assert mine.value is not None
    penalty = losses.divergence(mine.log_prob, theirs, config.kl_penalty)  # type: ignore[arg-type]
    tokens = losses.token_rewards(scores.to(mask.device), kl_coef * penalty, mask)
    if config.whiten_rewards:
        tokens = losses.whitened(tokens, mask, shift_mean=False)
    advantages = losses.gae(tokens, mine.value, mask, config.gamma, config.lam)
    rows = make_rows(
        input_ids=responses.input_ids,
        attention_mask=responses.attention_mask,
        response_mask=mask,
        log_probs=mine.log_prob,
        values=torch.where(mask, mine.value, 0.0),
        advantages=losses.whitened(advantages, mask),
        returns=torch.where(mask, advantages + mine.value, 0.0),
        record_ids=torch.arange(first_id, first_id + len(mask)),
    )
    drawn = mine.log_prob[mask]
    return Rollout(
        responses,
        rows,
        rewards,
        torch.where(mask, penalty, 0.0).sum(dim=1).cpu(),
        -float(drawn.mean()) if len(drawn) else 0.0,
    )


def evaluated(model: Any, responses: Responses, config: PPOConfig, processes: Processes = ONE) -> Outputs:
    """Return log-probs and values of the responses' tokens, (n, R), without gradients, in eval mode.

    Args:
        model: a causal language model, or one with a value head.
        responses: what to evaluate.
        config: temperature, and how many rows at a time.
        processes: which evaluate a part each, and get all.
    """
    view = language_view(model, temperature=config.temperature)
    params = {name: parameter.detach() for name, parameter in view.parameters().items()}
    like = torch.zeros(responses.response_mask.shape, device=responses.input_ids.device)
    rows = make_rows(
        input_ids=responses.input_ids,
        attention_mask=responses.attention_mask,
        response_mask=responses.response_mask,
        log_probs=like,
        advantages=like,
    )
    parts, own = [], rows.take(processes.own(len(rows)))
    with torch.no_grad(), eval_mode(model.modules()):
        for first in range(0, len(own), config.generation_batch_size):
            part = own.take(slice(first, first + config.generation_batch_size))
            parts.append(view.only({"log_prob", "value"}, params, view.prepare(part)))

    def joined(column: Callable[[Outputs], Any]) -> Tensor:
        return processes.gathered(torch.cat([column(part) for part in parts]), len(rows))

    value = None if parts[0].value is None else joined(lambda part: part.value)
    return Outputs(joined(lambda part: part.log_prob), value)
