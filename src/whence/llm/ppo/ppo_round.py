"""One round of PPO on a language model: rewards and advantages of its responses, and the steps on the selected ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.advantages import gae
from whence.core import ModuleView, NonFinite, Outputs, RecordBatch, eval_mode
from whence.influence import Influence
from whence.llm.base import ONE, PPOConfig, Processes, Reference, WithValueHead, language_view, list_tokens, make_rows
from whence.llm.base import token_losses as losses
from whence.llm.text import NO_COLUMNS, Columns, Responses, Reward, compute_rewards
from whence.nonfinite import check_gradients, measure_gradients
from whence.selection import Selection, add_selection, summarise_selection


@dataclass(frozen=True, eq=False)
class Rollout:
    """A rollout, ready to be scored and trained on.

    Attributes:
        responses: the prompts and their responses.
        rows: a record for each response, with whitened advantages.
        rewards: (n,) float64 values of the reward functions, before any penalty.
        divergence: (n,) divergence of each response from the start model, in nats, by the estimate that penalises it.
        entropy: the policy's entropy per response token, in nats: minus the mean log-prob of the drawn tokens.
    """

    responses: Responses
    rows: RecordBatch
    rewards: Float[Tensor, " n"]
    divergence: Float[Tensor, " n"]
    entropy: float


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
    scores = rewards.clone()
    if config.missing_eos_penalty is not None:
        scores -= config.missing_eos_penalty * (~responses.ended.cpu()).double()
    tokens = {name: getattr(responses, name) for name in ("input_ids", "attention_mask", "response_mask")}
    draft = make_rows(**tokens)
    outputs = evaluate_rows(model, draft, config, processes)
    with reference.activate(model) as start_model:
        ref_log_probs = evaluate_rows(start_model, draft, config, processes).log_prob
    assert outputs.value is not None
    columns_of_tokens = {"log-prob": outputs.log_prob, "value": outputs.value}
    _check_finite(columns_of_tokens | {"log-prob of the start model": ref_log_probs}, mask, first_id)
    penalty = outputs.log_prob - ref_log_probs  # whose mean over tokens drawn from the policy is its divergence
    token_rewards = losses.token_rewards(scores.to(mask.device), kl_coef * penalty, mask)
    advantages = gae(token_rewards, outputs.value, mask, config.gamma, config.lam)
    # A prompt may begin with the token that pads others.
    prompts = torch.where(responses.attention_mask.bool(), responses.input_ids, -1)[:, : -mask.shape[1]]
    rows = make_rows(
        **tokens,
        log_probs=outputs.log_prob,
        values=torch.where(mask, outputs.value, 0.0),
        advantages=losses.whiten(advantages, mask),
        returns=torch.where(mask, advantages + outputs.value, 0.0),
        record_ids=torch.arange(first_id, first_id + len(mask)),
        rewards=rewards,
        group_ids=prompts.unique(dim=0, return_inverse=True)[1],
    )
    token_log_probs = outputs.log_prob[mask]
    return Rollout(
        responses,
        rows,
        rewards,
        torch.where(mask, penalty, 0.0).sum(dim=1).cpu(),
        -float(token_log_probs.mean()) if len(token_log_probs) else 0.0,
    )


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


def evaluate_rows(model: Any, rows: RecordBatch, config: PPOConfig, processes: Processes = ONE) -> Outputs:
    """Return log-probs and values of the rows' response tokens, (n, R), without gradients, in eval mode.

    The model may have a value head. Each process evaluates a part of the rows, and gets the outputs of all.
    """
    view = language_view(model, temperature=config.temperature)
    params = {name: parameter.detach() for name, parameter in view.parameters().items()}
    parts, local_rows = [], rows.take(processes.part(len(rows)))
    with torch.no_grad(), eval_mode(model.modules()):
        for first in range(0, len(local_rows), config.generation_batch_size):
            chunk = local_rows.take(slice(first, first + config.generation_batch_size))
            parts.append(view.only({"log_prob", "value"}, params, view.prepare(chunk)))

    def join(column: Callable[[Outputs], Any]) -> Tensor:
        return processes.gather(torch.cat([column(part) for part in parts]), len(rows))

    value = None if parts[0].value is None else join(lambda part: part.value)
    return Outputs(join(lambda part: part.log_prob), value)


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
    return add_selection(table.with_columns(list_tokens(rows)), selection, influence)


def make_metrics_row(
    number: int, rollout: Rollout, selection: Selection, influence: Influence | None
) -> dict[str, Any]:
    """Return a round's row of metrics, without those of the optimisation."""
    rewards, keep = rollout.rewards, selection.keep
    return {
        "round": number,
        "reward": float(rewards.mean()),
        "reward_kept": float(rewards[keep].mean()) if keep.any() else None,
        "reward_dropped": float(rewards[~keep].mean()) if (~keep).any() else None,
        "kl": float(rollout.divergence.mean()),
        "train/entropy_loss": -rollout.entropy,
        "length": float(rollout.responses.response_mask.sum(dim=1).double().mean()),
        "ended_share": float(rollout.responses.ended.to(torch.float64).mean()),
        **summarise_selection(selection, influence),
    }


MEANS = ("train/policy_gradient_loss", "train/value_loss", "train/approx_kl", "train/clip_fraction")
"""Metrics of a round's steps, by SB3's names: means over the steps."""


def make_optimizer(model: WithValueHead, config: PPOConfig) -> torch.optim.Adam:
    """Return Adam over the parameters that train; the value head may have its own learning rate."""
    head_rate = config.learning_rate if config.value_learning_rate is None else config.value_learning_rate
    rates = ((model.language_model, config.learning_rate), (model.value_head, head_rate))
    return torch.optim.Adam(
        [{"params": [p for p in part.parameters() if p.requires_grad], "lr": rate} for part, rate in rates]
    )


def optimise(
    model: Any,
    optimizer: Any,
    rows: RecordBatch,
    selection: Selection,
    *,
    config: PPOConfig,
    generator: torch.Generator,
    processes: Processes,
) -> dict[str, float | None]:
    """Train on the selected rows and return `MEANS`, each None if no step was taken.

    Let `p_i` and `v_i` be the means over a row's response tokens of the clipped objective and of the value loss. A step
    is on the selected rows alone; its loss is `-sum_i w_i p_i / sum_i w_i + vf_coef mean_i v_i`. The generator, in the
    same state in every process, draws the order of rows, and each process takes a part of every step's rows. The model
    is left in training mode.

    Raises:
        NonFinite: a gradient is not finite; the step on it is not taken.
    """
    step_means, view, accelerator = [], language_view(model, temperature=config.temperature), processes.accelerator
    assert accelerator is not None
    model.train()
    size = config.mini_batch_size * config.gradient_accumulation_steps * processes.number
    # One flag for all accelerators of the process; a trainer that was stopped between two steps leaves it False, and
    # then `optimizer.step` does nothing.
    accelerator.sync_gradients = True
    for _ in range(config.ppo_epochs):
        # The order is drawn over all rows and then filtered, so that runs that drop different rows share their orders.
        order = torch.randperm(len(rows), generator=generator)
        selected = order[selection.keep[order]]
        for step_rows in selected.split(size) if len(selected) else ():
            part = step_rows[processes.part(len(step_rows))]
            means = _accumulate_gradient(view, rows, part, step_rows, selection.weights, config, accelerator)
            processes.sum_gradients(parameter for parameter in model.parameters() if parameter.requires_grad)
            if accelerator.scaler is None:  # scaled gradients overflow as a rule, and the scaler leaves out the step
                ids = rows.ids[step_rows].tolist()
                loss = means[:2].sum() if processes.number == 1 else None
                norms = measure_gradients(model.named_parameters())
                check_gradients(norms, f"a minibatch of {len(ids)} rows", ids, loss)
            step_means.append(means)
            if config.max_grad_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    if not step_means:
        return dict.fromkeys(MEANS)
    mean = torch.stack(step_means).mean(dim=0).to(accelerator.device)
    return dict(zip(MEANS, processes.sum_tensors({"": mean})[""].tolist(), strict=True))


def _accumulate_gradient(
    view: ModuleView,
    rows: RecordBatch,
    part: Int[Tensor, " p"],
    step_rows: Int[Tensor, " b"],
    weights: Float[Tensor, " n"],
    config: PPOConfig,
    accelerator: Accelerator,
) -> Float[Tensor, "4"]:
    """Add the gradient of the rows `part` of a step on `step_rows`; return these rows' part of MEANS."""
    total, params, means = float(weights[step_rows].sum()) or 1.0, view.parameters(), torch.zeros(4)
    for chunk in part.split(config.mini_batch_size) if len(part) else ():
        batch = rows.take(chunk).to(accelerator.device)
        with accelerator.autocast():
            outputs = view.only({"log_prob", "value"}, params, view.prepare(batch))
        assert outputs.value is not None
        assert isinstance(batch.observations, dict)
        columns = batch.observations
        mask, old_log_probs = columns["response_mask"], columns["log_probs"]
        policy = losses.masked_mean(
            losses.surrogate(outputs.log_prob, old_log_probs, columns["advantages"], config.cliprange), mask
        )
        value = losses.masked_mean(
            losses.value_loss(outputs.value, columns["values"], columns["returns"], config.cliprange_value), mask
        )
        policy_loss = -(weights[chunk].to(policy) * policy).sum() / total
        accelerator.backward(policy_loss + config.vf_coef * value.sum() / len(step_rows))
        with torch.no_grad():
            ratio = (outputs.log_prob - old_log_probs).exp()
            approx_kl = losses.masked_mean(ratio - 1 - (outputs.log_prob - old_log_probs), mask).sum()
            clipped = losses.masked_mean(((ratio - 1).abs() > config.cliprange).to(ratio), mask).sum()
            row_means = torch.stack([value.sum(), approx_kl, clipped]).cpu() / len(step_rows)
            means += torch.cat([policy_loss.detach().cpu().reshape(1), row_means])
    return means
