"""A control of selections: every record trains, with a round's update as large as the selection's.

Run: `python -m studies.selection.matched --preset lda-code/frozenlake --seed 3 --by norm --run out/matched`. The arms
`ppo-matched` (by norm) and `ppo-as-far` (by divergence) of `results/paper` and `results/faithfulness` are such runs.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from gymnasium import spaces
from torch import Tensor

from whence import IIF, SelectionRule, lab
from whence.core import NonFinite, PolicyView, RecordBatch, as_view, eval_mode, preserve_rng_state
from whence.sb3 import InfluenceCallback
from whence.sb3.models import preserve_model
from whence.selection import Selection

CHUNK = 4096
"""Records that the policy reads at a time."""

Update = Mapping[str, Tensor]
"""Parameters, or how far they have moved, by name."""


def find_acting_parameters(view: PolicyView, records: RecordBatch) -> frozenset[str]:
    """Return the names of the parameters that log-probs depend on, by the first of some records."""
    with torch.enable_grad():
        params = {name: p.detach().requires_grad_() for name, p in view.parameters().items()}
        total = view(params, view.prepare(records.take(slice(0, 1)))).log_prob.sum()
        gradients = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    return frozenset(name for name, gradient in zip(params, gradients, strict=True) if gradient is not None)


class MatchedUpdate(InfluenceCallback):
    """Train on all records, and scale the round's update to the size that training on the rule's selection gives it.

    It separates what a selection does from what an update of its size does. The round is trained twice from the same
    parameters, optimiser state and generators: on the selection, which is undone after its norms and divergence are
    measured, and on all records. Then the parameters move along the second update. Those that the policy's log-probs
    depend on move until their update has the first one's norm, or until the policy has diverged as far over the
    rollout, within 1%. The others (of the value function) move until their update has the norm of theirs: the value
    function's gradients may be much larger, and would hide how far the policy moves. The optimiser's state stays as the
    second training left it.

    The logger gets the factors as `train/update_scale` and `train/update_scale_value`. `train/approx_kl` is measured
    after scaling, over the whole rollout; `train/clip_fraction` and the seconds are the second training's. Selections
    and scores are written as the rule made them, although every record trained.
    """

    def __init__(self, rule: SelectionRule, *, by: str = "norm", **options: Any) -> None:
        super().__init__(rule, **options)
        self.by = by

    def train_selected(self, train: Callable[[], None], selection: Selection) -> None:
        """Train on all records, and scale the update to the size that training on the selection gives it."""
        assert self.round is not None
        policy: Any = self.model.policy
        start = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        with preserve_rng_state():  # dropout draws
            acting = find_acting_parameters(as_view(policy), self.round.records)
        others = frozenset(start.keys() - acting)
        with self.optimisation_clock.paused(), preserve_rng_state(), preserve_model(self.model):
            super().train_selected(train, selection)
            norms = {names: _measure_norm(_read_update(policy, start, names)) for names in (acting, others)}
            divergence = measure_divergence(self.model)
        train()
        update = _read_update(policy, start, acting)
        if self.by == "norm":
            scale = _scale_to_norm(policy, start, update, norms[acting])
        else:
            scale = _scale_to_divergence(self.model, start, update, divergence)
        self.logger.record("train/update_scale", scale)
        update = _read_update(policy, start, others)
        self.logger.record("train/update_scale_value", _scale_to_norm(policy, start, update, norms[others]))
        self.logger.record("train/approx_kl", measure_divergence(self.model))


def measure_divergence(model: Any) -> float:
    """Return the KL divergence of a trained model's policy from the one that collected its rollout, in nats.

    It is the mean of `ratio - 1 - log ratio` over the rollout buffer, as SB3 estimates it.
    """
    buffer, size = model.rollout_buffer, len(model.rollout_buffer.log_probs)
    total = 0.0
    for start in range(0, size, CHUNK):
        samples = buffer._get_samples(np.arange(start, min(start + CHUNK, size)))
        actions = samples.actions
        if isinstance(model.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        with preserve_rng_state(), eval_mode(model.policy.modules()), torch.no_grad():
            _, log_probs, _ = model.policy.evaluate_actions(samples.observations, actions)
        log_ratio = (log_probs - samples.old_log_prob.flatten()).double()
        total += float((log_ratio.exp() - 1 - log_ratio).mean()) * len(log_ratio)
    return total / size


def _read_update(policy: Any, start: Update, names: Collection[str]) -> dict[str, Tensor]:
    """Return how far each of the named parameters has moved, in the policy's order.

    A set's own order differs from process to process, and so would the last digit of a sum.
    """
    return {name: p.detach() - start[name] for name, p in policy.named_parameters() if name in names}


def _measure_norm(update: Update) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in update.values()))


def _scale_to_norm(policy: Any, start: Update, update: Update, norm: float) -> float:
    """Move parameters along their update until it has this norm; return the factor."""
    present = _measure_norm(update)
    scale = norm / present if present > 0 else 1.0
    if not math.isfinite(scale):
        raise NonFinite(f"An update has the norm {present}, and was to have {norm}: training has diverged.")
    _move(policy, start, update, scale)
    return scale


def _scale_to_divergence(model: Any, start: Update, update: Update, divergence: float) -> float:
    """Move parameters along their update until the policy has this divergence; return the factor."""
    scale = 1.0
    for _ in range(20):
        _move(model.policy, start, update, scale)
        present = measure_divergence(model)
        if math.isnan(present) or math.isnan(divergence):
            raise NonFinite(f"An update diverges by {present}, and was to diverge by {divergence}.")
        if min(present, divergence) <= 0 or abs(present / divergence - 1) < 0.01:
            break
        # To lowest order, divergence grows with the square.
        scale *= min(4.0, max(0.25, math.sqrt(divergence / present)))
    return scale


def _move(policy: Any, start: Update, update: Update, scale: float) -> None:
    """Set parameters to `start + scale * update`."""
    with torch.no_grad():
        params = dict(policy.named_parameters())
        for name, step in update.items():
            params[name].copy_(start[name] + scale * step)


def main(
    run: Annotated[Path, typer.Option(help="Directory of the run.")],
    preset: Annotated[str, typer.Option(help="The preset whose selection is matched.")] = "lda-code/frozenlake",
    by: Annotated[str, typer.Option(help="What of the update is matched: norm or divergence.")] = "norm",
    seed: int = 0,
) -> None:
    """Train one run of the control."""
    arm = {"norm": "ppo-matched", "divergence": "ppo-as-far"}[by]

    def make_callback(config: Any, directory: Any, _: Any) -> MatchedUpdate:
        settings = {"target": config.make_target(), "engine": config.engine, "run": directory}
        return MatchedUpdate(IIF(config.drop, config.warmup), by=by, **settings)

    config = replace(lab.configure(preset=preset, seed=seed), arm=arm)
    lab.run(config, run, make_callback=make_callback)


if __name__ == "__main__":
    typer.run(main)
