"""Tokenize prompts, and generate responses to them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import GenerationConfig

from whence.errors import WhenceError
from whence.guards import eval_mode
from whence.llm.config import PPOConfig
from whence.llm.processes import ONE, Processes

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a chat, each with "role" and "content"."""


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


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot pad or end a response.

    Raises:
        WhenceError: the message names the token to set.
    """
    if tokenizer.pad_token_id is None:
        raise WhenceError(
            "The tokenizer has no pad token, so rows of different lengths cannot form a batch. Set one: "
            "tokenizer.pad_token = tokenizer.eos_token."
        )
    if tokenizer.eos_token_id is None:
        raise WhenceError("The tokenizer has no end-of-text token, so no response could end. Set tokenizer.eos_token.")


def tokenize_prompts(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: PPOConfig,
    context: int | None,
    response_setting: str = "max_new_tokens",
) -> list[list[int]]:
    """Return the token ids of each prompt; messages go through the tokenizer's chat template.

    Args:
        tokenizer: a tokenizer of Transformers.
        prompts: texts or chats.
        config: the settings that limit the lengths of prompts and responses.
        context: tokens that the model can read; None: no limit.
        response_setting: the trainer's name of the setting that limits a response, for messages.

    Raises:
        WhenceError: a prompt is empty, or leaves no room for its response; the message has the prompt's number.
    """
    longest = _longest_prompt(config, context, response_setting)
    rows = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = list(tokenizer(prompt)["input_ids"])
        else:
            ids = list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        if not ids or (longest is not None and len(ids) > longest):
            raise WhenceError(
                f"Prompt {number} has {len(ids)} tokens; from 1 to {longest} are needed, so that it and a response of "
                f"{config.max_new_tokens} fit into the model's context. Shorten or drop it, or lower "
                f"{response_setting}."
            )
        rows.append(ids)
    return rows


def _longest_prompt(config: PPOConfig, context: int | None, response_setting: str) -> int | None:
    """Return the most tokens that a prompt may have; None: no limit."""
    if context is None:
        return config.max_prompt_length
    remaining = context - config.max_new_tokens
    if remaining < 1:
        raise WhenceError(
            f"{response_setting} is {config.max_new_tokens}, and the model reads {context} tokens in all, so that no "
            f"prompt would fit before a response. Lower {response_setting}."
        )
    return remaining if config.max_prompt_length is None else min(config.max_prompt_length, remaining)


def context_length(model: Any) -> int | None:
    """Return the number of tokens that a model can read; None: its configuration does not say."""
    length: int | None = getattr(model.config, "max_position_embeddings", None)
    return length


def generate(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[Sequence[int]],
    config: PPOConfig,
    processes: Processes = ONE,
) -> Responses:
    """Draw a response to each prompt from torch's global generator; the model is left in its mode.

    Args:
        model: a causal language model of Transformers.
        tokenizer: its tokenizer.
        prompt_ids: the prompts from `tokenize_prompts`, the same in every process.
        config: the sampling settings.
        processes: the processes; each draws a part of the responses, and gets all of them.
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

    Args:
        tokenizer: a tokenizer of Transformers.
        ids: the tokens.
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


def _generate_chunk(
    model: Any, tokenizer: Any, prompt_ids: Sequence[Sequence[int]], width: int, config: PPOConfig
) -> Tensor:
    """Return prompts and responses, (n, width + max_new_tokens), padded on the left and on the right."""
    pad, device = tokenizer.pad_token_id, next(model.parameters()).device
    longest = max(map(len, prompt_ids))  # in this chunk: a long prompt elsewhere does not slow it down
    padded = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompt_ids], device=device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    end_tokens = _list_end_tokens(model, tokenizer)
    with torch.no_grad(), _ignore_model_settings(model):
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


@contextmanager
def _ignore_model_settings(model: Any) -> Iterator[None]:
    """Ignore a model's own generation settings: log-probs would not account for a penalty on repetitions."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = getattr(inner, "generation_config", None)
    inner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = before


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
