"""The settings of a PPO training of a language model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from whence.errors import WhenceError, suggest

KL_ESTIMATES = ("kl", "abs", "mse")


@dataclass(frozen=True)
class PPOConfig:
    """Settings of `PPOTrainer`, by the names of TRL's first PPOConfig.

    Attributes:
        output_dir: the run directory, with checkpoints, the trained model and the tables of responses.
        rounds: rollouts to train on.
        batch_size: rows (a prompt with its response) of a rollout, over all processes.
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
        whiten_rewards: scale token rewards to a standard deviation of 1; their mean stays.
        init_kl_coef: weight of each token's divergence from the start model.
        adap_kl_ctrl: whether this weight is steered towards `target`.
        target: the intended divergence of a response, in nats.
        horizon: rows over which the weight is steered.
        kl_penalty: how a token's divergence is estimated: "kl", "abs" or "mse".
        max_new_tokens: the most tokens of a response.
        max_prompt_length: the most tokens of a prompt; longer ones are refused. None: what the model's context leaves.
        temperature: sampling temperature; the policy that trains is the one at this temperature.
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that hold this much probability.
        missing_eos_penalty: subtracted from the reward of a response that does not end; None: nothing.
        disable_dropout: switch dropout off, so that ratios begin at 1.
        generation_batch_size: rows of a pass that generates, or evaluates without gradients.
        save_every: rounds from one checkpoint to the next; 0: none are written. None: after every round, or after
            fewer of them, so that checkpoints take at most 5% of the time.
        keep_checkpoints: number of checkpoints that stay.
        eval_every: rounds between evaluations; 0: no evaluations.
        disable_tqdm: hide the progress bar.
        report_to: trackers, by Accelerate's names: "tensorboard", "wandb", "trackio".
        seed: seed of all random draws.
    """

    output_dir: str
    rounds: int = 100
    batch_size: int = 256
    mini_batch_size: int = 16
    gradient_accumulation_steps: int = 1
    ppo_epochs: int = 4
    learning_rate: float = 1e-5
    value_learning_rate: float | None = None
    max_grad_norm: float | None = None
    cliprange: float = 0.2
    cliprange_value: float | None = 0.2
    vf_coef: float = 0.1
    gamma: float = 1.0
    lam: float = 0.95
    whiten_rewards: bool = False
    init_kl_coef: float = 0.04
    adap_kl_ctrl: bool = True
    target: float = 6.0
    horizon: int = 10_000
    kl_penalty: str = "kl"
    max_new_tokens: int = 32
    max_prompt_length: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    missing_eos_penalty: float | None = None
    disable_dropout: bool = True
    generation_batch_size: int = 64
    save_every: int | None = None
    keep_checkpoints: int = 2
    eval_every: int = 1
    disable_tqdm: bool = False
    report_to: tuple[str, ...] = field(default_factory=tuple)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name == "save_every":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise WhenceError(f"{name} is {value!r}; a whole number, at least {least}, is needed.")
        for name, (what, is_met) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and is_met(value)):
                raise WhenceError(f"{name} is {value!r}; {what} is needed.")
        if self.learning_rate is None:
            raise WhenceError("learning_rate is None; a number, 0 or more, is needed.")
        if isinstance(self.report_to, str):
            raise WhenceError(f"report_to is {self.report_to!r}; a tuple of names is needed: ({self.report_to!r},).")
        if self.kl_penalty not in KL_ESTIMATES:
            raise WhenceError(f"kl_penalty is {self.kl_penalty!r}.{suggest(str(self.kl_penalty), KL_ESTIMATES)}")

    def to_json(self) -> dict[str, Any]:
        """Return the settings in JSON types."""
        return asdict(self) | {"report_to": list(self.report_to)}


_LEAST = {
    "rounds": 1,
    "batch_size": 2,
    "mini_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "ppo_epochs": 1,
    "horizon": 1,
    "max_new_tokens": 1,
    "top_k": 0,
    "generation_batch_size": 1,
    "save_every": 0,
    "keep_checkpoints": 1,
    "eval_every": 0,
    "seed": 0,
}

_POSITIVE: tuple[str, Callable[[float], bool]] = ("a number above 0", lambda value: 0 < value < math.inf)
_UNIT: tuple[str, Callable[[float], bool]] = ("a number from 0 to 1", lambda value: 0 <= value <= 1)
_NOT_NEGATIVE: tuple[str, Callable[[float], bool]] = ("a number, 0 or more,", lambda value: 0 <= value < math.inf)

_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(("max_grad_norm", "cliprange", "cliprange_value", "target", "temperature"), _POSITIVE),
    **dict.fromkeys(("gamma", "lam"), _UNIT),
    **dict.fromkeys(
        ("learning_rate", "value_learning_rate", "vf_coef", "init_kl_coef", "missing_eos_penalty"), _NOT_NEGATIVE
    ),
    "top_p": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
}
