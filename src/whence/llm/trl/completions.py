"""The completions of a TRL generation batch: whether some can be dropped; as records, and as rows that are kept."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import polars as pl
import torch
from accelerate.utils import gather_object, pad_across_processes
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whence.core import NonFinite, RecordBatch, Unsupported, preserve_attributes, require_names
from whence.llm.base import EXTRA_PADDING, Processes, list_signals, make_rows
from whence.llm.scores import ROW_LOSSES, TOKEN_LOSSES

TRAINER_METHODS = (
    *("_generate_and_score_completions", "_calculate_rewards", "_compute_loss", "_get_per_token_logps_and_entropies"),
    *("_get_train_sampler", "training_step"),
)
"""The methods of TRL's trainers that whence extends; under other names in TRL, whence's would never be called."""

TRAINER_ATTRIBUTES = ("_buffered_inputs", "_step", "_logs", "_metrics", "_tokenizer", "_load_from_checkpoint")
"""What else whence needs of a trainer of TRL's beyond its documentation."""

# Under these settings dropped completions affect a step, or scores do not account for what a step does: an entropy
# bonus and a threshold are over the tokens of each pass, and Liger's layers have no rules.
_OFF = {
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_liger_kernel": False,
}


def check_release(trainer: object, base: object) -> None:
    """Refuse a release of TRL whose trainer, or whose class `base` as `super()` has it, lacks what whence needs."""
    require_names("trl", base, TRAINER_METHODS)
    require_names("trl", trainer, TRAINER_ATTRIBUTES)


def check_selectable(args: Any, *, has_router_loss: bool = False) -> None:
    """Refuse settings of TRL under which dropped completions would still affect a step; the error names the setting."""
    loss_type = getattr(args, "loss_type", "grpo")
    passes, delta = args.gradient_accumulation_steps, getattr(args, "delta", None)
    refusals = {
        f"loss_type={loss_type!r}: how it reduces tokens is unknown": loss_type not in (*ROW_LOSSES, *TOKEN_LOSSES),
        "loss_type='bnpo' with several passes a step: each pass, and each process, is divided by its own tokens. Use "
        "loss_type='dapo', or gradient_accumulation_steps=1 in one process": (
            loss_type == "bnpo" and passes * args.world_size > 1
        ),
        "several optimiser steps on a generation batch, each with another share of kept completions. Set "
        "steps_per_generation to gradient_accumulation_steps (num_iterations may be more than 1)": (
            args.steps_per_generation != passes
        ),
        "a router's auxiliary loss. Set router_aux_loss_coef=0": has_router_loss,
        "delta below 1, which clips already at the first step. Set it above 1 + epsilon": delta is not None
        and delta < 1,
        "vLLM's importance sampling ratio. Set vllm_importance_sampling_correction=False": (
            getattr(args, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False)
        ),
        **{
            f"{name}={getattr(args, name)!r}. Set it to {off!r}": getattr(args, name) != off
            for name, off in _OFF.items()
            if hasattr(args, name)
        },
    }
    if reason := next((reason for reason, is_set in refusals.items() if is_set), None):
        raise Unsupported(f"Completions cannot be selected with {reason}.")


def averages_rows(trainer: Any) -> bool:
    """Tell whether a trainer's loss is a mean over rows, including the dropped ones, and not over tokens."""
    return getattr(trainer, "loss_type", None) not in TOKEN_LOSSES


def measure_denominator(trainer: Any, inputs: Mapping[str, Any]) -> float:
    """Return what divides the sum of the rows' objectives in TRL's loss of a pass on a minibatch."""
    passes, loss_type = trainer.current_gradient_accumulation_steps, getattr(trainer, "loss_type", None)
    if averages_rows(trainer):
        length = trainer.max_completion_length if loss_type == "dr_grpo" else 1
        return float(passes * len(inputs["completion_ids"]) * length)
    if loss_type == "bnpo":
        return float((inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum().clamp(min=1) * passes)
    tokens = float(inputs["num_items_in_batch"].clamp(min=1)) / trainer.accelerator.num_processes
    return float(tokens * passes / trainer.args.steps_per_generation)


def find_other_inputs(output: Mapping[str, Any]) -> list[str]:
    """Return what a generation batch holds of images, which scores of tokens do not account for."""
    return sorted(output.keys() & {"pixel_values", "image_grid_thw", "mm_token_type_ids", "token_type_ids"})


def make_completion_rows(
    output: Mapping[str, Any],
    processes: Processes,
    batches_done: int,
    rewards: Float[Tensor, " n"],
    group_size: int,
) -> RecordBatch:
    """Return the completions of all processes, of which each has a part, as rows; call it in every process.

    Record ids follow those of the `batches_done` before this one. Of the `rewards`, see `sum_rewards`, one that is NaN
    becomes its group's mean; `group_size` consecutive completions are to one prompt. Images, which scores do not
    account for, are refused.
    """
    if others := find_other_inputs(output):
        raise Unsupported(f"TRL's batch holds {others[0]}: completions are scored by their tokens alone.")

    def gather_tokens(tokens: Tensor, *, pad_first: bool = False) -> Tensor:
        padded = pad_across_processes(tokens.contiguous(), dim=1, pad_index=0, pad_first=pad_first)
        return processes.gather(padded, len(tokens) * processes.number)

    mask = output["completion_mask"]
    if "tool_mask" in output:
        mask = mask * output["tool_mask"]
    prompts = gather_tokens(output["prompt_ids"], pad_first=True)
    prompt_mask = gather_tokens(output["prompt_mask"], pad_first=True)
    completions, attended = (gather_tokens(output[name]) for name in ("completion_ids", "completion_mask"))
    mask = gather_tokens(mask).bool()
    advantages = output["advantages"]  # a subclass may give each token its own
    advantages = gather_tokens(advantages) if advantages.ndim == 2 else processes.gather(advantages, len(mask))[:, None]
    # TRL tells the model no positions, and a process's batch is as wide as its own longest prompt.
    extra = torch.full_like(output["prompt_ids"][:, 0], prompts.shape[1] - output["prompt_ids"].shape[1])
    columns = {EXTRA_PADDING: processes.gather(extra, len(mask))}
    if "ref_per_token_logps" in output:
        columns["ref_log_probs"] = torch.where(mask, gather_tokens(output["ref_per_token_logps"]), 0.0)
    # Objectives assume ratios of 1, as at the policy that drew the tokens, so log-probs are not read.
    rows = make_rows(
        input_ids=torch.cat([prompts, completions], dim=1),
        attention_mask=torch.cat([prompt_mask, attended], dim=1),
        response_mask=mask,
        advantages=torch.where(mask, advantages, 0.0),
        record_ids=torch.arange(batches_done * len(mask), (batches_done + 1) * len(mask)),
        rewards=fill_unscored(rewards.reshape(-1, group_size)).flatten(),
        group_ids=torch.arange(len(mask)) // group_size,
    )
    observations: Any = rows.observations
    return rows.with_columns({"observations": {**observations, **columns}})


def gather_columns(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the data set's columns, other than the prompt, of all processes' completions; call it in every process."""
    rows = gather_object([{name: value for name, value in row.items() if name != "prompt"} for row in inputs])
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def number_doubles(names: Sequence[str]) -> list[str]:
    """Return the names of reward functions, with its place behind one that several have."""
    counts = Counter(names)
    return [name if counts[name] == 1 else f"{name} {place}" for place, name in enumerate(names, 1)]


def sum_rewards(rewards: Float[Tensor, "n functions"], weights: Float[Tensor, " functions"]) -> Float[Tensor, " n"]:
    """Return TRL's sum of each completion's weighted rewards, without those that are NaN; NaN where all are, float64.

    RLOO's clipping and divergence are not in it.
    """
    total = (rewards.double() * weights.to(rewards.device).double()).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, total)


def fill_unscored(groups: Float[Tensor, "groups size"]) -> Float[Tensor, "groups size"]:
    """Return rewards by group with the group's mean instead of NaN, since TRL gives such a completion no advantage."""
    unscored = groups.isnan()
    # A mean that is rounded would make equal rewards differ.
    lowest = groups.masked_fill(unscored, math.inf).amin(1, True)
    highest = groups.masked_fill(unscored, -math.inf).amax(1, True)
    mean = torch.minimum(torch.maximum(groups.nanmean(1, True), lowest), highest)
    mean = mean.masked_fill(unscored.all(1, True), 0.0)
    return torch.where(unscored, mean, groups)


def check_group_rewards(rewards: Tensor, names: Sequence[str], first_id: int) -> None:
    """Refuse an infinite reward of TRL's trainers, (n, functions), whose group would get advantages of 0, or of 3e38.

    A reward that is NaN is TRL's: of a function that does not apply to the completion. `first_id` is the record id of
    the first completion.
    """
    if places := torch.isinf(rewards).nonzero().tolist():
        row, column = places[0]
        raise NonFinite(
            f"the reward {names[column]} is {float(rewards[row, column])} for record {first_id + row}. No step was "
            "taken. Return a finite number, or None where the function does not apply.",
            record_ids=list(dict.fromkeys(first_id + row for row, _ in places)),
        )


SCALE = "loss_scale"
"""Added to TRL's batches: the factor of the loss, the same for each row."""

KEPT = "kept_row"
"""Added to TRL's batches: whether a row trains."""

WEIGHT = "row_weight"
"""Added to TRL's batches: what a row's loss is multiplied by, 1 in the mean over those that train."""


ROW = "row_number"
"""Added to TRL's batches: the place of a row in the generation batch of all processes."""


def take_rows(inputs: Mapping[str, Any], places: Tensor) -> dict[str, Any]:
    """Return some rows of a minibatch; what is not of its rows stays."""
    count = len(inputs["completion_ids"])
    return {
        name: column[places] if isinstance(column, Tensor) and column.shape[:1] == (count,) else column
        for name, column in inputs.items()
    }


def take_kept(inputs: Mapping[str, Any], count: int, *, averages: bool) -> tuple[dict[str, Any], Tensor]:
    """Return `count` rows of a minibatch, the kept ones first, and the factor of their loss.

    The others are dropped ones, which have no weight. TRL's loss `averages` over rows, or does not.
    """
    mask = inputs[KEPT]
    places = (~mask).long().argsort(stable=True)[:count].sort().values
    rows = take_rows(inputs, places)
    scale: Tensor = inputs[SCALE][0]
    return rows, scale * len(places) / len(mask) if averages else scale


def weigh_rows(log_probs: Float[Tensor, "n T"], weights: Float[Tensor, " n"]) -> None:
    """Let a pass train on each row with a weight: its whole loss, with a divergence, as in the step that chooses.

    TRL's loss depends on the parameters through the log-probs of tokens alone, and its values stay.
    """
    if log_probs.requires_grad and not bool((weights == 1).all()):
        log_probs.register_hook(lambda gradient: gradient * weights[:, None].to(gradient))


@contextmanager
def disable_autocast(model: Any) -> Iterator[None]:
    """Remove Accelerate's autocast around a model's forward pass: scores are in the model's own precision."""
    with preserve_attributes([model]):
        if (original := vars(model).get("_original_forward")) is not None:
            model.forward = original
        yield


def forget_passes(engine: Any) -> None:
    """Let DeepSpeed's ZeRO stage 3 forget in which order scores used the layers; other engines know no order.

    TRL's fused output layer is not called as a layer, and ZeRO would fetch and free its weight by the remembered order.
    """
    optimizer = getattr(engine, "optimizer", None)
    if hasattr(optimizer, "parameter_offload"):
        from trl.models.utils import add_hooks, remove_hooks

        remove_hooks(engine)
        add_hooks(engine)


def discard_gradients(params: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> RemovableHandle | None:
    """Let the optimiser's next step move no parameter and leave its state as it is: remove the hook after the step.

    Gradients are 0 until the step, since a gradient scaler fails without gradients to check. DeepSpeed's optimisers
    take no hook, and scale by themselves: their gradients are removed at once.
    """
    params = [param for param in params if param.grad is not None]

    def remove(*_: Any) -> None:
        for param in params:
            param.grad = None

    if not hasattr(optimizer, "register_step_pre_hook"):
        remove()
        return None
    for param in params:
        param.grad.zero_()  # type: ignore[union-attr]
    return optimizer.register_step_pre_hook(remove)


_SAME_RATIO = 1e-5  # ratios of probabilities that differ from 1 by no more are of one policy

_COLUMNS = ("log_probs", "entropies", "last", "sampler")


class PassSignals:
    """Log-probs and entropies of the tokens of this process's completions, of a generation batch."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Tensor]] = {}

    def note(self, minibatch: Mapping[str, Any], log_probs: Tensor, entropies: Tensor | None) -> None:
        """Take a pass: the first one's log-probs are those of the policy that drew the tokens, unless TRL has them."""
        columns = {"last": log_probs, "entropies": entropies, "log_probs": minibatch.get("old_per_token_logps")}
        columns["sampler"] = minibatch.get("sampling_per_token_logps")  # of vLLM alone
        present = {name: column.detach().float().cpu() for name, column in columns.items() if column is not None}
        for place, row in enumerate(minibatch[ROW].tolist()):
            numbers = {name: column[place] for name, column in present.items()}
            first = self._rows.get(row) or {"log_probs": numbers["last"], **numbers}
            self._rows[row] = {**first, "last": numbers["last"]}

    def take(self, processes: int) -> dict[int, dict[str, Tensor]]:
        """Return the passes of all processes by the number of the row, and begin anew; call it in every process."""
        parts = gather_object([self._rows]) if processes > 1 else [self._rows]
        self._rows = {}
        return {row: numbers for part in parts for row, numbers in part.items()}


def list_pass_signals(
    passes: Mapping[int, Mapping[str, Tensor]], rows: RecordBatch, lengths: list[int], args: Any
) -> list[pl.Series]:
    """Return the passes, by the place of a row, as columns of a round's records; see `list_signals`.

    Rows that were dropped have no pass; `lengths` are the tokens of each response.
    """
    observations: Any = rows.observations
    mask = observations["response_mask"].cpu()
    columns = {name: torch.full(mask.shape, torch.nan) for name in _COLUMNS}
    for row, numbers in passes.items():
        for name, column in numbers.items():
            columns[name][row, : len(column)] = column[: mask.shape[1]]
    ratios = (columns["last"] - columns["log_probs"]).exp()
    known = ratios[mask & ratios.isfinite()]
    return list_signals(
        mask,
        lengths,
        log_probs=columns["log_probs"],
        entropies=None if columns["entropies"].isnan().all() else columns["entropies"],
        ref_log_probs=observations.get("ref_log_probs"),
        ratios=ratios if ((known - 1).abs() > _SAME_RATIO).any() else None,
        clip=(1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon)),
        sampler_log_probs=None if columns["sampler"].isnan().all() else columns["sampler"],
    )
