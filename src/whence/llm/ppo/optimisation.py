"""The optimisation of a round: clipped losses on the selected rows."""

from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor

from whence.llm.base import PPOConfig, Processes, WithValueHead, language_view
from whence.llm.base import token_losses as losses
from whence.nonfinite import check_gradients, measure_gradients
from whence.policies import ModuleView
from whence.records import RecordBatch
from whence.selection import Selection

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
    is on the selected rows alone; its loss is `-sum_i w_i p_i / sum_i w_i + vf_coef mean_i v_i`.

    Args:
        model: a model with a value head; it is left in training mode.
        optimizer: the optimiser of the model's parameters.
        rows: all rows of the rollout, in every process.
        selection: the rows that train, and their weights.
        config: the settings.
        generator: draws the order of rows; in the same state in every process.
        processes: the processes, with their accelerator; each takes a part of every step's rows.

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
