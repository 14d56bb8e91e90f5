"""A language model trained again on the stored responses of some rounds, by any trainer's clipped objective."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import get_scheduler

from whence.core import NonFinite, RecordBatch, WhenceError, eval_mode, preserve_rng_state
from whence.llm.base import language_view
from whence.llm.scores import ROW_LOSSES, evaluate_rows, surrogate


@dataclass(frozen=True)
class Recipe:
    """How a model is trained again: by AdamW on the clipped objective, with advantages as stored, without dropout.

    Attributes:
        learning_rate: AdamW's.
        epochs: passes over the responses of a round.
        step_rows: responses of a step; None: those of a round.
        clip_range: how far a token's ratio may move from 1, down and up.
        beta: weight of the divergence from the policy that training begins with.
        corrected: whether a token's divergence is multiplied by its ratio (TRL's `use_bias_correction_kl`).
        averages_rows: whether a step's loss is a mean over responses, or over all of their tokens.
        max_grad_norm: the norm to which gradients are clipped; None: no clipping.
        weight_decay: AdamW's.
        schedule: Transformers' name of the learning rate's schedule.
        warmup: steps at the beginning over which the learning rate rises.
        temperature: the sampling temperature.
        pass_rows: responses of one pass.
    """

    learning_rate: float
    epochs: int = 1
    step_rows: int | None = None
    clip_range: tuple[float, float] = (0.2, 0.2)
    beta: float = 0.0
    corrected: bool = False
    averages_rows: bool = True
    max_grad_norm: float | None = None
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    temperature: float = 1.0
    pass_rows: int = 16

    @property
    def text(self) -> str:
        """The recipe in words."""
        low, high = self.clip_range
        rows = "all responses" if self.step_rows is None else f"{self.step_rows} responses"
        divergence = f", divergence {self.beta:g}" if self.beta else ""
        return (
            f"AdamW, learning rate {self.learning_rate:g} ({self.schedule}), {self.epochs} × each round, steps of "
            f"{rows}, ratios clipped at 1 - {low:g} and 1 + {high:g}{divergence}, advantages as stored"
        )


def read_recipe(config: Mapping[str, Any], learning_rate: float | None = None, epochs: int | None = None) -> Recipe:
    """Return the recipe of a run's configuration, in which settings that were given replace its own."""
    options = {"learning_rate": learning_rate, "epochs": epochs}
    if (ppo := config.get("ppo")) is not None:
        settings = {
            "learning_rate": ppo["learning_rate"],
            "epochs": ppo["ppo_epochs"],
            "step_rows": ppo["mini_batch_size"] * ppo["gradient_accumulation_steps"] * config.get("processes", 1),
            "clip_range": (ppo["cliprange"], ppo["cliprange"]),
            "max_grad_norm": ppo["max_grad_norm"],
            "temperature": ppo["temperature"],
            "pass_rows": ppo["mini_batch_size"],
        }
    elif "trl" in config:
        settings = _read_trl(config)
    else:
        settings = {"temperature": config.get("temperature", 1.0), "pass_rows": config.get("batch_size", 16)}
    settings |= {name: value for name, value in options.items() if value is not None}
    if "learning_rate" not in settings:
        raise WhenceError(
            "The run holds rollouts and no settings of their training. Give the trainer's learning rate, and its "
            "epochs if they are more than 1: --learning-rate 1e-6 --epochs 2."
        )
    return Recipe(**settings)


def read_trl_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return TRL's settings of a run's training; its configuration holds those that differ from TRL's defaults."""
    import trl  # takes seconds

    kind = trl.RLOOConfig if config.get("algorithm") == "rloo" else trl.GRPOConfig
    defaults = {name: field.default for name, field in kind.__dataclass_fields__.items()}
    return {**defaults, **config["trl"]}


def _read_trl(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's settings by TRL's."""
    args = read_trl_settings(config)
    accumulation, processes = args["gradient_accumulation_steps"], config.get("processes", 1)
    epsilon, highest = args.get("epsilon", 0.2), args.get("epsilon_high")
    return {
        "learning_rate": args["learning_rate"],
        "epochs": args["num_iterations"],
        "step_rows": args["per_device_train_batch_size"] * accumulation * processes,
        "clip_range": (epsilon, epsilon if highest is None else highest),
        "beta": 0.0 if config.get("algorithm") == "rloo" else args["beta"],  # RLOO's divergence is part of its rewards
        "corrected": bool(args.get("use_bias_correction_kl")),
        "averages_rows": ROW_LOSSES.get(args.get("loss_type", "grpo"), "sum") == "mean",
        "max_grad_norm": args["max_grad_norm"] or None,  # 0 is no clipping
        "weight_decay": args["weight_decay"],
        "schedule": str(getattr(args["lr_scheduler_type"], "value", args["lr_scheduler_type"])),
        "warmup": int(args.get("warmup_steps") or 0),
        "temperature": args["temperature"],
        "pass_rows": args["per_device_train_batch_size"],
    }


def evaluate_log_probs(model: Any, rows: RecordBatch, recipe: Recipe) -> Float[Tensor, "n R"]:
    """Return the log-probs of the rows' response tokens under a model, without gradients."""
    return evaluate_rows(model, rows, recipe.temperature, recipe.pass_rows).log_prob


def train_again(
    model: Any,
    rounds: Mapping[int, RecordBatch],
    weights: Mapping[int, Float[Tensor, " n"]],
    recipe: Recipe,
    *,
    seed: int,
) -> None:
    """Train a model, in place, on the rows of some rounds in their order; rows of weight 0 are left out.

    The ratios of a round begin at 1, with the log-probs of the model before the round. The orders of rows are drawn by
    the seed over all rows and then filtered, so that trainings that leave out different rows share them.

    Args:
        model: a causal language model; the parameters that require gradients are trained.
        rounds: the rows of each round, with advantages.
        weights: (n,) the weights of each round's rows.
        recipe: how it is trained.
        seed: the seed of the orders.

    Raises:
        NonFinite: training diverged.
    """
    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    steps = sum(recipe.epochs * -(-len(rows) // (recipe.step_rows or len(rows))) for rows in rounds.values())
    scheduler = get_scheduler(recipe.schedule, optimizer, recipe.warmup, steps)
    with preserve_rng_state(), eval_mode(model.modules()):
        references = {n: evaluate_log_probs(model, rows, recipe) if recipe.beta else None for n, rows in rounds.items()}
        for number, rows in rounds.items():
            old, generator = evaluate_log_probs(model, rows, recipe), np.random.default_rng([seed, number])
            for _ in range(recipe.epochs):
                order = torch.from_numpy(generator.permutation(len(rows)))
                for places in order.split(recipe.step_rows or len(rows)):
                    if len(trained := places[weights[number][places] > 0]):
                        _accumulate(model, rows, trained, (old, references[number]), weights[number], recipe)
                        if recipe.max_grad_norm is not None:
                            torch.nn.utils.clip_grad_norm_(params, recipe.max_grad_norm)
                    optimizer.step()  # without gradients it moves nothing, and the schedule goes by it
                    optimizer.zero_grad()
                    scheduler.step()
    if not all(bool(torch.isfinite(parameter).all()) for parameter in params):
        raise NonFinite("Training diverged: a parameter is not finite. Lower the learning rate: --learning-rate.")


def _accumulate(
    model: Any,
    rows: RecordBatch,
    places: Tensor,
    log_probs: tuple[Float[Tensor, "n R"], Float[Tensor, "n R"] | None],
    weights: Float[Tensor, " n"],
    recipe: Recipe,
) -> None:
    """Add the gradient of a step on some rows; `log_probs` are those at the round's beginning, and the reference's."""
    view, mask = language_view(model, temperature=recipe.temperature), rows.observations["response_mask"]
    lengths = mask.sum(dim=1).clamp(min=1)
    # A row's weight in the step, and a token's: a mean over rows of the means over tokens, or one over all tokens.
    shares = weights.to(mask.device) / (lengths if recipe.averages_rows else 1)
    total = (shares * lengths)[places].sum()
    for part in places.split(recipe.pass_rows):
        chunk: Any = rows.take(part)
        present = view.only({"log_prob"}, view.parameters(), view.prepare(chunk)).log_prob
        objective = surrogate(present, log_probs[0][part], chunk.observations["advantages"], *recipe.clip_range)
        if log_probs[1] is not None:
            difference = log_probs[1][part] - present
            ratios = (present - log_probs[0][part]).exp() if recipe.corrected else 1.0
            objective = objective - recipe.beta * ratios * (difference.exp() - difference - 1)
        (-(torch.where(mask[part], objective, 0.0) * shares[part][:, None]).sum() / total).backward()
