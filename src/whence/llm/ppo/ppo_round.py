"""The steps of a round of PPO on a language model, on the selected responses."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.core import ModuleView, RecordBatch, train_mode
from whence.llm.base import PPOConfig, Processes, WithValueHead, language_view
from whence.llm.scores import RoundChooser, masked_mean, surrogate, value_loss
from whence.scores import check_gradients, measure_gradients
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
