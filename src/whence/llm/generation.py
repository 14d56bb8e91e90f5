"""Prompts into tokens, and tokens into responses."""

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
        attention_mask: (n, P + R) 1 where there is a token.
        response_mask: (n, R) True at the tokens of the response, its end-of-text token included.
        ended: (n,) whether the response ends by itself.
        prompts: the prompts' texts, as the model reads them.
        texts: the responses, without special tokens.
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
        WhenceError: says which token to set.
    """
    if tokenizer.pad_token_id is None:
        raise WhenceError(
            "The tokenizer has no pad token, so rows of different lengths cannot stand side by side. Set one: "
            "tokenizer.pad_token = tokenizer.eos_token."
        )
    if tokenizer.eos_token_id is None:
        raise WhenceError("The tokenizer has no end-of-text token, so no response could end. Set tokenizer.eos_token.")


def tokenized(tokenizer: Any, prompts: Sequence[Prompt], config: PPOConfig, context: int | None) -> list[list[int]]:
    """Return the token ids of each prompt; messages go through the tokenizer's chat template.

    Args:
        tokenizer: of Transformers.
        prompts: texts or chats.
        config: says how long prompts and responses may be.
        context: tokens that the model can read; None: without limit.

    Raises:
        WhenceError: a prompt is empty, or leaves no room for its response; the prompt's number is named.
    """
    most = config.max_prompt_length
    if context is not None:
        room = context - config.max_new_tokens
        if room < 1:
            raise WhenceError(
                f"max_new_tokens is {config.max_new_tokens}, and the model reads {context} tokens in all, so that no "
                "prompt would fit before a response. Lower max_new_tokens."
            )
        most = room if most is None else min(most, room)
    found = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = list(tokenizer(prompt)["input_ids"])
        else:
            ids = list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        if not ids or (most is not None and len(ids) > most):
            raise WhenceError(
                f"Prompt {number} has {len(ids)} tokens; from 1 to {most} are needed, so that it and a response of "
                f"{config.max_new_tokens} fit into the model's context. Shorten or drop it, or lower max_new_tokens."
            )
        found.append(ids)
    return found


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
        prompt_ids: from `tokenized`; the same in every process.
        config: says how responses are drawn.
        processes: which draw a part each, and get all.
    """
    width = max(map(len, prompt_ids))
    size, own = config.generation_batch_size, prompt_ids[processes.own(len(prompt_ids))]
    chunks = [own[first : first + size] for first in range(0, len(own), size)]
    with eval_mode(model.modules()):
        parts = [_drawn(model, tokenizer, chunk, width, config) for chunk in chunks]
    response = processes.gathered(torch.cat(parts), len(prompt_ids))
    mask, ended = _until_the_end(response[:, width:], _ends(model, tokenizer))
    prompt_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]).to(response.device)
    ids = torch.cat([response[:, :width], torch.where(mask, response[:, width:], tokenizer.pad_token_id)], dim=1)
    texts = [
        tokenizer.decode(row[own], skip_special_tokens=True) for row, own in zip(ids[:, width:], mask, strict=True)
    ]
    prompts = [tokenizer.decode(list(own), skip_special_tokens=True) for own in prompt_ids]
    return Responses(ids, torch.cat([prompt_mask, mask.long()], dim=1), mask, ended, prompts, texts)


def _drawn(model: Any, tokenizer: Any, prompt_ids: Sequence[Sequence[int]], width: int, config: PPOConfig) -> Tensor:
    """Return prompts and responses, (n, width + max_new_tokens), padded on the left and on the right."""
    pad, device = tokenizer.pad_token_id, next(model.parameters()).device
    longest = max(map(len, prompt_ids))  # of these alone: one long prompt elsewhere is not to cost all others
    padded = torch.tensor([[pad] * (longest - len(ids)) + list(ids) for ids in prompt_ids], device=device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    ends = _ends(model, tokenizer)
    with torch.no_grad(), _plain_settings(model):
        found: Tensor = model.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=config.max_new_tokens,
            do_sample=True,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            pad_token_id=pad,
            eos_token_id=ends,
        )
    # Where all responses have ended, generation stops early.
    missing = longest + config.max_new_tokens - found.shape[1]
    return torch.nn.functional.pad(found, (width - longest, missing), value=pad)


@contextmanager
def _plain_settings(model: Any) -> Iterator[None]:
    """Leave out what a model's own settings would do to the draws: its log-probs know nothing of a penalty."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = getattr(inner, "generation_config", None)
    inner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = own


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and those that the model's settings name."""
    config = getattr(model, "generation_config", None)
    theirs = getattr(config, "eos_token_id", None)
    theirs = [] if theirs is None else [theirs] if isinstance(theirs, int) else list(theirs)
    return list(dict.fromkeys([tokenizer.eos_token_id, *theirs]))


def _until_the_end(tokens: Int[Tensor, "n R"], ends: Sequence[int]) -> tuple[Bool[Tensor, "n R"], Bool[Tensor, " n"]]:
    """Return a mask of the tokens up to and with the first that ends the response, and whether there is one."""
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    before = is_end.long().cumsum(dim=1) - is_end.long()
    return before == 0, is_end.any(dim=1)
