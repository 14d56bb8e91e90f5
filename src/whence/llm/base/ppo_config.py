"""The settings of a PPO training of a language model."""

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field

from whence.core import WhenceError
from whence.validation import Count, Natural, NotNegative, Positive, Unit, settings


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
        max_prompt_length: the most tokens of a prompt; longer ones are refused. None: what the model's context leaves.
        chat_template_kwargs: further arguments of the tokenizer's chat template for prompts that are chats.
        temperature: sampling temperature; the policy that trains is the one at this temperature.
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the likeliest tokens that hold this much probability.
        missing_eos_penalty: subtracted from the reward of a response that does not end; None: nothing.
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
    gamma: Unit = 1.0
    lam: Unit = 0.95
    init_kl_coef: NotNegative = 0.04
    adap_kl_ctrl: bool = True
    target: Positive = 6.0
    refresh_target_every: Count | None = None
    horizon: Count = 10_000
    max_new_tokens: Count = 32
    max_prompt_length: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: Positive = 1.0
    top_k: Natural = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    missing_eos_penalty: NotNegative | None = None
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
