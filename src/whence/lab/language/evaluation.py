"""Evaluation of a model's answers: the share that is right, and by which steps."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from whence.core import preserve_rng_state
from whence.lab.language.problems import answer, check, solution
from whence.llm.base import PPOConfig
from whence.llm.text import generate


def evaluate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    samples: int = 8,
    max_new_tokens: int = 64,
    seed: int = 0,
    batch_size: int = 64,
) -> dict[str, float]:
    """Answer each problem once by the likeliest tokens and several times by sampling, and judge the answers.

    The global generators and the model's mode are unchanged.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer, with a pad token.
        prompts: the problems.
        samples: sampled answers to each problem.
        max_new_tokens: the most tokens of an answer.
        seed: seed of the sampling.
        batch_size: answers generated at a time.

    Returns:
        "exact_match": share of the likeliest answers with the right result; and the measures of `summarise`.
    """
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    config = PPOConfig("runs/evaluated", max_new_tokens=max_new_tokens, generation_batch_size=batch_size)
    with preserve_rng_state():
        likeliest = generate(model, tokenizer, ids, replace(config, top_k=1)).texts
        torch.manual_seed(seed)
        sampled = generate(model, tokenizer, [one for one in ids for _ in range(samples)], config).texts
    right = [check(prompt, response).right for prompt, response in zip(prompts, likeliest, strict=True)]
    responses = [sampled[first : first + samples] for first in range(0, len(sampled), samples)]
    return {"exact_match": sum(right) / len(right)} | summarise(prompts, responses)


def summarise(prompts: Sequence[str], responses: Sequence[Sequence[str]]) -> dict[str, float]:
    """Measure several answers to each problem, equally many.

    Returns:
        "majority_vote": share of problems whose most frequent result is right; the first result wins a tie.
        "pass@k", for k = 1, 2, 4, ... and the number of answers: chance that one of k answers is right, estimated
        without bias (Chen et al., arXiv 2107.03374, equation 1).
        "right", "well_formed": shares of all answers.
        "unfaithful": share of the right answers that do not have the right steps; NaN if none is right.
    """
    samples = len(responses[0])
    pairs = list(zip(prompts, responses, strict=True))
    verdicts = [[check(prompt, response) for response in answers] for prompt, answers in pairs]
    flat = [verdict for of_problem in verdicts for verdict in of_problem]
    right = [verdict for verdict in flat if verdict.right]
    won = [_vote(answers) == solution(prompt)[-1] for prompt, answers in pairs]
    wrong = [sum(not verdict.right for verdict in of_problem) for of_problem in verdicts]
    sizes = sorted({2**power for power in range(samples.bit_length())} | {samples})
    return {
        "majority_vote": sum(won) / len(won),
        **{f"pass@{k}": sum(1.0 - math.comb(w, k) / math.comb(samples, k) for w in wrong) / len(wrong) for k in sizes},
        "right": len(right) / len(flat),
        "unfaithful": sum(not verdict.faithful for verdict in right) / len(right) if right else math.nan,
        "well_formed": sum(verdict.well_formed for verdict in flat) / len(flat),
    }


def _vote(responses: Sequence[str]) -> str | None:
    """Return the most frequent result, the first of equals; answers without a result have no vote."""
    votes = Counter(result for response in responses if (result := answer(response)) is not None)
    return votes.most_common(1)[0][0] if votes else None
