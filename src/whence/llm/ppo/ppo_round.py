"""A round of PPO on a language model: rewards and advantages of responses, their table, and steps on selected ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.core import ModuleView, NonFinite, RecordBatch, train_mode
from whence.llm.base import (
    ONE,
    PPOConfig,
    Processes,
    Reference,
    WithValueHead,
    average_rows,
    language_view,
    list_infos,
    list_signals,
    list_tokens,
    make_rows,
)
from whence.llm.scores import (
    RoundChooser,
    evaluate_rows,
    gae,
    masked_mean,
    reward_tokens,
    surrogate,
    value_loss,
    whiten,
)
from whence.llm.text import NO_COLUMNS, Columns, Responses, Reward, compute_rewards
from whence.scores import Influence, check_gradients, measure_gradients
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
    numbers = {"log-prob": outputs.log_prob, "value": outputs.value, "log-prob of the start model": ref_log_probs}
    _check_finite(numbers, mask, first_id)
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


MEANS = ("train/policy_gradient_loss", "train/value_loss", "train/approx_kl", "train/clip_fraction")
"""Metrics of a round's steps, by SB3's names: means over the steps."""


def make_optimizer(model: WithValueHead, config: PPOConfig) -> torch.optim.Adam:
    """Return Adam over the parameters that train; the value head may have its own learning rate."""
    head_rate = config.learning_rate if config.value_learning_rate is None else config.value_learning_rate
    rates = ((model.language_model, config.learning_rate), (model.value_head, head_rate))
    return torch.optim.Adam(
        [{"params": [p for p in part.parameters() if p.requires_grad], "lr": rate} for part, rate in rates]
    )


class _Terms(NamedTuple):
    """What the p rows of a pass contribute to the loss and the metrics of a step, each a mean over response tokens."""

    policy: Float[Tensor, " p"]
    value: Float[Tensor, " p"]
    approx_kl: Float[Tensor, " p"]
    clipped: Float[Tensor, " p"]

    def add_up(self, weights: Float[Tensor, " p"], total: float, vf_coef: float) -> Float[Tensor, ""]:
        """Return the rows' part of a step's loss; `total` is the sum of the weights of the step's rows."""
        weights = weights.to(self.policy)
        return -(weights * self.policy).sum() / total + vf_coef * (weights * self.value).sum() / total

    @torch.no_grad()
    def measure(self, weights: Float[Tensor, " p"], total: float, count: int) -> Float[Tensor, "4"]:
        """Return the rows' part of MEANS in a step on `count` rows; dropped ones have weight 0."""
        weights = weights.to(self.policy)
        sums = [-(weights * self.policy).sum() / total, (weights * self.value).sum() / total]
        sums += [torch.where(weights > 0, column, 0.0).sum() / count for column in (self.approx_kl, self.clipped)]
        return torch.stack(sums).cpu()


@dataclass(frozen=True, eq=False)
class _Steps:
    """The steps of a round, of which each process takes a part of every step's rows."""

    view: ModuleView
    rows: RecordBatch
    config: PPOConfig
    processes: Processes

    def evaluate(self, places: Int[Tensor, " p"]) -> _Terms:
        """Return what the rows of a pass contribute to a step, with a graph."""
        accelerator: Any = self.processes.accelerator
        batch = self.rows.take(places).to(accelerator.device)
        with accelerator.autocast():
            outputs = self.view.only({"log_prob", "value"}, self.view.parameters(), self.view.prepare(batch))
        assert outputs.value is not None
        columns: Any = batch.observations
        clip_range, old_log_probs = self.config.cliprange, columns["log_probs"]
        objective = surrogate(outputs.log_prob, old_log_probs, columns["advantages"], clip_range)
        value = value_loss(outputs.value, columns["values"], columns["returns"], self.config.cliprange_value)
        with torch.no_grad():
            ratio = (outputs.log_prob - old_log_probs).exp()
            approx_kl = ratio - 1 - (outputs.log_prob - old_log_probs)
            clipped = ((ratio - 1).abs() > clip_range).to(ratio)
        means = (masked_mean(each, columns["response_mask"]) for each in (objective, value, approx_kl, clipped))
        return _Terms(*means)

    def accumulate(self, places: Int[Tensor, " b"], weights: Float[Tensor, " n"]) -> Float[Tensor, "4"]:
        """Add the gradient of this process's part of a step's rows; return these rows' part of MEANS."""
        total, means = float(weights[places].sum()) or 1.0, torch.zeros(4)
        part, accelerator = places[self.processes.part(len(places))], self.processes.accelerator
        assert accelerator is not None
        for chunk in part.split(self.config.mini_batch_size) if len(part) else ():
            terms = self.evaluate(chunk)
            accelerator.backward(terms.add_up(weights[chunk], total, self.config.vf_coef))
            means += terms.measure(weights[chunk], total, len(places))
        return means

    def choose(self, places: Int[Tensor, " b"], chooser: RoundChooser) -> Float[Tensor, "4"] | None:
        """Set the gradient of the rows of a step that the chooser keeps; return their MEANS, None: none train.

        All rows of a pass have the denominator that they have if all rows of the step train.
        """
        parts, scaler = [], getattr(self.processes.accelerator, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        for pass_rows in places.split(self.config.mini_batch_size * self.processes.number):
            chunk, step, loss = pass_rows[self.processes.part(len(pass_rows))], None, None
            if len(chunk):
                with chooser.record_pass(len(chunk)) as step:
                    terms = self.evaluate(chunk)
                    loss = terms.add_up(torch.ones(len(chunk)), len(places), self.config.vf_coef)
                    loss = loss if scaler is None else scaler.scale(loss)
            weights = chooser.run_backward(step, loss, pass_rows, scale / len(places))
            if len(chunk):
                parts.append((terms, weights))
        chooser.end_step()
        selection = chooser.selection
        weight, count = float(selection.weights[places].sum()), int(selection.keep[places].sum())
        if not weight:
            return None
        chooser.sum_gradients(len(places) / weight)
        return torch.stack([torch.zeros(4), *(terms.measure(part, weight, count) for terms, part in parts)]).sum(dim=0)


def optimise(
    model: Any,
    optimizer: Any,
    rows: RecordBatch,
    selection: Selection,
    *,
    config: PPOConfig,
    generator: torch.Generator,
    processes: Processes,
    chooser: RoundChooser | None = None,
) -> dict[str, float | None]:
    """Train on the selected rows and return `MEANS`, each None if no step was taken.

    Let `p_i` and `v_i` be the means over a row's response tokens of the clipped objective and of the value loss. A step
    is on the selected rows alone; its loss is `-sum_i w_i (p_i - vf_coef v_i) / sum_i w_i`. The generator, in the same
    state in every process, draws the order of rows, and each process takes a part of every step's rows. The model is
    left in training mode. A chooser chooses among the selected rows in the steps of the first epoch.

    Raises:
        NonFinite: a gradient is not finite; the step on it is not taken.
    """
    steps, step_means = _Steps(language_view(model, temperature=config.temperature), rows, config, processes), []
    accelerator: Any = processes.accelerator
    model.train()
    size = config.mini_batch_size * config.gradient_accumulation_steps * processes.number
    # One flag for all accelerators of the process; a trainer that was stopped between two steps leaves it False, and
    # then `optimizer.step` does nothing.
    accelerator.sync_gradients = True
    for epoch in range(config.ppo_epochs):
        # The order is drawn over all rows and then filtered, so that runs that drop different rows share their orders.
        order = torch.randperm(len(rows), generator=generator)
        selected = order[selection.keep[order]]
        for step_rows in selected.split(size) if len(selected) else ():
            if chooser is not None and epoch == 0:
                means = steps.choose(step_rows, chooser)
                if means is None:
                    continue
                step_rows = step_rows[chooser.selection.keep[step_rows]]
            else:
                means = steps.accumulate(step_rows, selection.weights)
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
        if chooser is not None and epoch == 0:
            selection = chooser.selection
    if not step_means:
        return dict.fromkeys(MEANS)
    mean = torch.stack(step_means).mean(dim=0).to(accelerator.device)
    return dict(zip(MEANS, processes.sum_tensors({"": mean})[""].tolist(), strict=True))


def compute_pair_loss(
    model: Any, rows: RecordBatch, config: PPOConfig, processes: Processes, alone: bool
) -> Float[Tensor, ""]:
    """Return the loss of the two rows with the largest advantages; `alone`: the first one's part of it."""
    with train_mode(model):
        steps = _Steps(language_view(model, temperature=config.temperature), rows, config, processes)
        terms = steps.evaluate(rows.advantages.abs().topk(2).indices)
    return terms.add_up(torch.tensor([1.0, float(not alone)]), 2.0, config.vf_coef)


def steer_kl_coef(coefficient: float, divergence: float, config: PPOConfig) -> float:
    """Return the divergence's weight after a round with this mean divergence of a response (Ziegler et al., 2019)."""
    if not config.adap_kl_ctrl:
        return coefficient
    error = min(max(divergence / config.target - 1, -0.2), 0.2)
    return coefficient * (1 + error * config.batch_size / config.horizon)
