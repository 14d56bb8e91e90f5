"""The model's answers to a few prompts, by which one sees what training changed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl
import torch

from whence.errors import WhenceError
from whence.guards import preserve_rng_state
from whence.llm.config import PPOConfig
from whence.llm.generation import Prompt, generate
from whence.llm.prompts import Prompts, read_prompts
from whence.llm.rewards import Reward, compute_rewards

MOST_ANSWERS = 64
"""Sample prompts at most: each is answered at every evaluation."""


def read_sample_prompts(
    dataset: Sequence[Prompt] | Any, tokenizer: Any, config: PPOConfig, context: int | None, rewards: Sequence[Reward]
) -> Prompts:
    """Return the prompts that a training answers at each evaluation; see `read_prompts`.

    Raises:
        WhenceError: there are more than `MOST_ANSWERS`, or one is refused.
    """
    prompts = read_prompts(dataset, tokenizer, config, context, rewards)
    if len(prompts) > MOST_ANSWERS:
        raise WhenceError(
            f"sample_prompts has {len(prompts)} prompts; at most {MOST_ANSWERS} are answered at each evaluation. Pass "
            "fewer, and measure the model by `evaluate`."
        )
    return prompts


def answer_prompts(model: Any, tokenizer: Any, prompts: Prompts, reward: Reward, config: PPOConfig) -> pl.DataFrame:
    """Answer prompts by the likeliest tokens, without a change of the model's mode or of generators.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer.
        prompts: the prompts.
        reward: rewards the answers.
        config: the settings of generation, but for sampling.

    Returns:
        A row for each prompt: `prompt`, `response` and `reward`.

    Raises:
        WhenceError: see `compute_rewards`; a reward may be NaN.
    """
    with preserve_rng_state(), torch.no_grad():
        answers = generate(model, tokenizer, prompts.ids, replace(config, top_k=1, top_p=1.0, temperature=1.0))
        rewards = compute_rewards(reward, answers.prompts, answers.texts, prompts.columns, allow_nonfinite=True)
    return pl.DataFrame({"prompt": answers.prompts, "response": answers.texts, "reward": rewards.tolist()})
