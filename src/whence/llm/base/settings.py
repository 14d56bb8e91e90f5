"""The settings of a PPO training of a language model, and how a run directory describes any training, in JSON types."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from whence.core import WhenceError, describe, describe_scoring
from whence.runs import digest_content
from whence.selection import SelectionRule
from whence.validation import Count, Fraction, Natural, NotNegative, Positive, settings


@settings("PPO")
class PPOConfig:
    """Settings of `PPOTrainer`, by the names of TRL's first PPOConfig.

    Attributes:
        output_dir: the run directory, with checkpoints, the trained model and the tables of responses.
        rounds: rollouts to train on.
        batch_size: rows (a prompt with its response) of a rollout, over all processes.
        num_generations: responses to each prompt of a rollout, which rules that compare them need; None: one.
        mini_batch_size: rows of one forward and backward pass, on each process.
        gradient_accumulation_steps: passes per step of the optimiser.
        ppo_epochs: passes over the rows of a rollout.
        learning_rate: Adam's learning rate.
        value_learning_rate: the learning rate of the value head, which starts at 0; None: `learning_rate`.
        max_grad_norm: the norm to which gradients are clipped; None: no clipping.
        cliprange: how far a token's probability ratio may move from 1.
        cliprange_value: how far a value may move; None: without limit.
        vf_coef: weight of the value loss.
        gamma: discount factor per token.
        lam: lambda of the advantage estimator.
        init_kl_coef: weight of each token's divergence from the start model.
        adap_kl_ctrl: whether this weight is steered towards `target`.
        target: the intended divergence of a response, in nats.
        refresh_target_every: rounds that a gradient of the target serves where rows are chosen in the step; None: one.
        horizon: rows over which the weight is steered.
        max_new_tokens: the most tokens of a response.
        missing_eos_penalty: subtracted from the reward of a response that does not end; None: nothing.
        max_prompt_length: the most tokens of a prompt; longer ones are refused. None: what the model's context leaves.
        chat_template_kwargs: further arguments of the tokenizer's chat template for prompts that are chats.
        temperature: sampling temperature; the policy that trains is the one at this temperature.
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that hold this much probability.
        disable_dropout: switch dropout off, so that ratios begin at 1.
        generation_batch_size: rows of a pass that generates, or evaluates without gradients.
        save_every: rounds from one checkpoint to the next; 0: none are written. None: after every round, or after
            fewer of them, so that checkpoints take at most 2% of the time.
        keep_checkpoints: number of checkpoints that stay.
        eval_every: rounds between evaluations; 0: no evaluations.
        disable_tqdm: hide the progress bar.
        report_to: trackers, by Accelerate's names: "tensorboard", "wandb", "trackio".
        seed: seed of all random draws.
    """

    output_dir: str
    rounds: Count = 100
    batch_size: Annotated[int, Field(ge=2)] = 256
    num_generations: Count | None = None
    mini_batch_size: Count = 16
    gradient_accumulation_steps: Count = 1
    ppo_epochs: Count = 4
    learning_rate: NotNegative = 1e-5
    value_learning_rate: NotNegative | None = None
    max_grad_norm: Positive | None = None
    cliprange: Positive = 0.2
    cliprange_value: Positive | None = 0.2
    vf_coef: NotNegative = 0.1
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    init_kl_coef: NotNegative = 0.04
    adap_kl_ctrl: bool = True
    target: Positive = 6.0
    refresh_target_every: Count | None = None
    horizon: Count = 10_000
    max_new_tokens: Count = 32
    missing_eos_penalty: NotNegative | None = None
    max_prompt_length: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: Positive = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    disable_dropout: bool = True
    generation_batch_size: Count = 64
    save_every: Natural | None = None
    keep_checkpoints: Count = 2
    eval_every: Natural = 1
    disable_tqdm: bool = False
    report_to: Annotated[tuple[str, ...], Field(strict=False)] = ()
    seed: Natural = 0

    def __post_init__(self) -> None:
        if self.batch_size % (self.num_generations or 1):
            raise WhenceError(
                f"batch_size is {self.batch_size}, of which num_generations={self.num_generations} is no divisor; each "
                "prompt of a rollout gets as many responses."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the settings in JSON types."""
        return asdict(self) | {"report_to": list(self.report_to)}


_SECRET = re.compile(r"(^|_)(token|password|secret|credentials?)$|(api|access|private)_?key|auth_token", re.IGNORECASE)
_NO_SECRETS = ("bos_token", "eos_token", "pad_token", "unk_token")
_USER_OF_URL = re.compile(r"//[^/@\s]+@")

_MOST_ROWS = 1000  # rows of a data set that are read for its digest


def describe_settings(value: Any) -> Any:
    """Return a setting as data, see `describe`, without its secrets.

    These are entries whose names say that they are secret, and users and passwords in addresses.
    """
    return _hide_secrets(describe(value))


def _hide_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _hide_secrets(one) for name, one in value.items() if not is_secret(name)}
    if isinstance(value, list):
        return [*map(_hide_secrets, value)]
    return _USER_OF_URL.sub("//", value) if isinstance(value, str) else value


def is_secret(name: str) -> bool:
    """Tell whether the name of a setting says that it is secret."""
    return name not in _NO_SECRETS and _SECRET.search(name) is not None


def describe_reward(reward: Any) -> Any:
    """Return a reward function as data; another object by its class's name, and a model also by where it is from."""
    if isinstance(reward, partial) or hasattr(reward, "__qualname__"):
        return describe_settings(reward)
    source = getattr(getattr(reward, "config", None), "_name_or_path", "")
    return describe(type(reward)) + (f" of {source}" if source else "")


def describe_rows(rows: Any) -> dict[str, Any] | None:
    """Return the number of rows of data, and a digest of up to `_MOST_ROWS` of them; None if they cannot be counted."""
    if not hasattr(rows, "__len__"):
        return None
    count = len(rows)
    places = range(0, count, max(1, -(-count // _MOST_ROWS)))
    digest = hashlib.blake2b(digest_size=16)
    for place in places:
        digest.update(json.dumps(describe_settings(rows[place]), sort_keys=True).encode() + b"\n")
    return {"rows": count, "digest": digest.hexdigest()}


def describe_rows_scored(model: Any, rule: SelectionRule, scoring: Any) -> dict[str, Any]:
    """Return which model's rows are scored, and how, in JSON types."""
    name = getattr(getattr(model, "language_model", model).config, "_name_or_path", "")
    return {
        "kind": "language",
        "model": name or None,
        "weights": digest_content(Path(name)) if name else None,
        **describe_scoring(rule, scoring.target, scoring.objective),
        "leave_one_out": scoring.leave_one_out,
    }


def describe_run(trainer: Any, model: Any, rewards: Iterable[Any], **data: Any) -> dict[str, Any]:
    """Return the run directory's description of a training, in JSON types; `data` are the data sets by their names."""
    return {
        **describe_rows_scored(model, trainer.rule, trainer.scoring),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rewards": [*map(describe_reward, rewards)],
        "data": {name: describe_rows(rows) for name, rows in data.items()},
        "engine": trainer.scoring.engine,
        "processes": trainer.accelerator.num_processes,
        "device": str(trainer.accelerator.device),
    }
