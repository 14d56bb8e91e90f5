"""Responses: generated to prompts, and to a few sample prompts at each evaluation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import GenerationConfig

from whence.core import eval_mode, preserve_attributes, preserve_rng_state
from whence.llm.base import ONE, PPOConfig, Processes, get_base_model
from whence.llm.text.prompts import Prompts
from whence.llm.text.rewards import Reward, compute_rewards
from whence.runs import RunDirectory


@dataclass(frozen=True, eq=False)
class Responses:
    """Prompts with a response each.

    Attributes:
        input_ids: (n, P + R) prompts, padded on the left, then responses, padded on the right.
        attention_mask: (n, P + R) 1 at tokens, 0 at padding.
        response_mask: (n, R) True at the tokens of the response, including its end-of-text token.
        ended: (n,) whether the response ends with an end-of-text token.
        prompts: the prompts' texts, as the model reads them.
        texts: the responses' texts, without special tokens.
    """

    input_ids: Int[Tensor, "n L"]
    attention_mask: Int[Tensor, "n L"]
    response_mask: Bool[Tensor, "n R"]
    ended: Bool[Tensor, " n"]
    prompts: Sequence[str]
    texts: Sequence[str]


def generate(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[Sequence[int]],
    config: PPOConfig,
    processes: Processes = ONE,
) -> Responses:
    """Draw a response to each prompt from torch's global generator; the model is left in its mode.

    Each process, which has the ids of all prompts, draws a part of the responses, and gets all of them.
    """
    width, size = max(map(len, prompt_ids)), config.generation_batch_size
    local_ids = prompt_ids[processes.part(len(prompt_ids))]
    chunks = [local_ids[first : first + size] for first in range(0, len(local_ids), size)]
    with eval_mode(model.modules()):
        parts = [_generate_chunk(model, tokenizer, chunk, width, config) for chunk in chunks]
    tokens = processes.gather(torch.cat(parts), len(prompt_ids))
    mask, ended = _mask_until_end(tokens[:, width:], _list_end_tokens(model, tokenizer))
    prompt_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]).to(tokens.device)
    input_ids = torch.cat([tokens[:, :width], torch.where(mask, tokens[:, width:], tokenizer.pad_token_id)], dim=1)
    texts = [
        tokenizer.decode(row[row_mask], skip_special_tokens=True)
        for row, row_mask in zip(input_ids[:, width:], mask, strict=True)
    ]
    prompts = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in prompt_ids]
    return Responses(input_ids, torch.cat([prompt_mask, mask.long()], dim=1), mask, ended, prompts, texts)


def split_text(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to a text, special tokens included; joined they are the whole text.

    A character that several tokens spell belongs to the last of them.
    """
    texts: list[str] = []
    # A token is decoded after the few before it: some tokenizers write a token at a text's beginning in another way.
    first, done = 0, 0
    for end in range(1, len(ids) + 1):
        before, text = (tokenizer.decode(list(ids[first:stop])) for stop in (done, end))
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):  # half a character
            texts.append("")
            continue
        texts.append(text[len(before) :])
        first, done = done, end
    return texts


def list_vocabulary(tokenizer: Any) -> list[str]:
    """Return the text of each token id by itself; half a character is the replacement character."""
    ids = list(range(len(tokenizer)))
    texts = tokenizer.batch_decode([[each] for each in ids], clean_up_tokenization_spaces=False)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    # SentencePiece writes no space before the first word of a text.
    begins = [str(piece).startswith("\N{LOWER ONE EIGHTH BLOCK}") for piece in pieces]
    return [f" {text.lstrip()}" if begin else text for begin, text in zip(begins, texts, strict=True)]


def _generate_chunk(
    model: Any, tokenizer: Any, prompt_ids: Sequence[Sequence[int]], width: int, config: PPOConfig
) -> Tensor:
    """Return prompts and responses, (n, width + max_new_tokens), padded on the left and on the right."""
    pad, device = tokenizer.pad_token_id, next(model.parameters()).device
    longest = max(map(len, prompt_ids))  # in this chunk: a long prompt elsewhere does not slow it down
    padded = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompt_ids], device=device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    end_tokens, inner = _list_end_tokens(model, tokenizer), get_base_model(model)
    with torch.no_grad(), preserve_attributes([inner]):
        # Not the model's own settings: log-probs would not account for a penalty on repetitions.
        inner.generation_config = GenerationConfig()
        tokens: Tensor = model.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens,
            do_sample=True,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            pad_token_id=pad,
            eos_token_id=end_tokens,
        )
    # Generation stops early if all responses have ended.
    missing = longest + config.max_new_tokens - tokens.shape[1]
    return torch.nn.functional.pad(tokens, (width - longest, missing), value=pad)


def _list_end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and those in the model's settings."""
    config = getattr(model, "generation_config", None)
    of_model = getattr(config, "eos_token_id", None)
    of_model = [] if of_model is None else [of_model] if isinstance(of_model, int) else list(of_model)
    return list(dict.fromkeys([tokenizer.eos_token_id, *of_model]))


def _mask_until_end(
    tokens: Int[Tensor, "n R"], end_tokens: Sequence[int]
) -> tuple[Bool[Tensor, "n R"], Bool[Tensor, " n"]]:
    """Return a mask of each row's tokens through its first end token, and whether the row has one."""
    is_end = torch.isin(tokens, torch.tensor(end_tokens, device=tokens.device))
    before = is_end.long().cumsum(dim=1) - is_end.long()
    return before == 0, is_end.any(dim=1)


def answer_prompts(model: Any, tokenizer: Any, prompts: Prompts, reward: Reward, config: PPOConfig) -> pl.DataFrame:
    """Answer prompts by the likeliest tokens, without a change of the model's mode or of generators.

    Returns:
        A row for each prompt: `prompt`, `response` and `reward`.

    Raises:
        WhenceError: see `compute_rewards`.
    """
    with preserve_rng_state(), torch.no_grad():
        answers = generate(model, tokenizer, prompts.ids, replace(config, top_k=1, top_p=1.0, temperature=1.0))
        rewards = compute_rewards(reward, answers.prompts, answers.texts, prompts.columns)
    return pl.DataFrame({"prompt": answers.prompts, "response": answers.texts, "reward": rewards.tolist()})


Evaluate = Callable[[Any, Any], Mapping[str, float]]
"""`evaluate(language_model, tokenizer)` measures the model; numbers by name."""


def write_evaluation(
    directory: RunDirectory,
    number: int,
    model: Any,
    tokenizer: Any,
    *,
    prompts: Prompts | None,
    reward: Reward,
    config: PPOConfig,
    evaluate: Evaluate | None,
) -> dict[str, float]:
    """Write a model's answers to sample prompts and its measures after a round, without changing training's draws.

    Returns the measures. Round 0 is before the first; without prompts none are answered, and without `evaluate` nothing
    is measured.
    """
    if prompts:
        directory.write_round("answers", number, answer_prompts(model, tokenizer, prompts, reward, config))
    if evaluate is None:
        return {}
    with preserve_rng_state():
        measures = dict(evaluate(model, tokenizer))
    directory.append("evaluations", {"round": number, **measures})
    return measures
