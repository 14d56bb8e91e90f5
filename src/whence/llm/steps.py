"""The optimisation of a round: clipped losses on the rows that a rule kept."""

from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int
from torch import Tensor

from whence.llm import losses
from whence.llm.config import PPOConfig
from whence.llm.processes import Processes
from whence.llm.view import language_view
from whence.policies import ModuleView
from whence.records import RecordBatch
from whence.selection import Selection

MEANS = ("train/policy_gradient_loss", "train/value_loss", "train/approx_kl", "train/clip_fraction")
"""What is told of a round's steps, by SB3's names: means over all of them."""


def optimise(
    model: Any,
    optimizer: Any,
    rows: RecordBatch,
    selection: Selection,
    config: PPOConfig,
    generator: torch.Generator,
    accelerator: Accelerator,
    processes: Processes,
) -> dict[str, float | None]:
    """Train on the kept rows and return `MEANS`, each None where no step was taken.

    A step's loss, with `p_i` and `v_i` the means over a row's response tokens of the clipped objective and of the value
    loss, is that of the kept rows alone: `-sum_i w_i p_i / sum_i w_i + vf_coef mean_i v_i`.

    Args:
        model: with a value head; left in training mode.
        optimizer: of its parameters.
        rows: all rows of the rollout, in every process.
        selection: which of them train, and how much.
        config: epochs, sizes of batches, ranges.
        generator: of the order of rows; in the same state in every process.
        accelerator: of Accelerate.
        processes: of which each takes a part of every step's rows.
    """
    totals, view = [], language_view(model, temperature=config.temperature)
    model.train()
    size = config.mini_batch_size * config.gradient_accumulation_steps * processes.number
    for _ in range(config.ppo_epochs):
        # Drawn over all rows and filtered then, so that runs that drop different rows share their orders.
        order = torch.randperm(len(rows), generator=generator)
        kept = order[selection.keep[order]]
        for chosen in kept.split(size) if len(kept) else ():
            own = chosen[processes.own(len(chosen))]
            totals.append(_gradient(view, rows, own, chosen, selection.weights, config, accelerator))
            processes.sum_gradients(parameter for parameter in model.parameters() if parameter.requires_grad)
            if config.max_grad_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    if not totals:
        return dict.fromkeys(MEANS)
    mean = torch.stack(totals).mean(dim=0).to(accelerator.device)
    return dict(zip(MEANS, processes.summed({"": mean})[""].tolist(), strict=True))


def _gradient(
    view: ModuleView,
    rows: RecordBatch,
    own: Int[Tensor, " o"],
    chosen: Int[Tensor, " b"],
    weights: Float[Tensor, " n"],
    config: PPOConfig,
    accelerator: Accelerator,
) -> Float[Tensor, "4"]:
    """Add the `own` rows' part of the gradient of a step on the rows `chosen`; return their part of MEANS."""
    total, params, told = float(weights[chosen].sum()) or 1.0, view.parameters(), torch.zeros(4)
    for part in own.split(config.mini_batch_size) if len(own) else ():
        batch = rows.take(part).to(accelerator.device)
        with accelerator.autocast():
            outputs = view.only({"log_prob", "value"}, params, view.prepare(batch))
        assert outputs.value is not None
        assert isinstance(batch.observations, dict)
        given = batch.observations
        mask, old = given["response_mask"], given["log_probs"]
        policy = losses.masked_mean(
            losses.surrogate(outputs.log_prob, old, given["advantages"], config.cliprange), mask
        )
        value = losses.masked_mean(
            losses.value_loss(outputs.value, given["values"], given["returns"], config.cliprange_value), mask
        )
        policy_loss = -(weights[part].to(policy) * policy).sum() / total
        accelerator.backward(policy_loss + config.vf_coef * value.sum() / len(chosen))
        with torch.no_grad():
            ratio = (outputs.log_prob - old).exp()
            apart = losses.masked_mean(ratio - 1 - (outputs.log_prob - old), mask).sum()
            clipped = losses.masked_mean(((ratio - 1).abs() > config.cliprange).to(ratio), mask).sum()
            shares = torch.stack([value.sum(), apart, clipped]).cpu() / len(chosen)
            told += torch.cat([policy_loss.detach().cpu().reshape(1), shares])
    return told
