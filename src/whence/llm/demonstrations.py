"""Trusted answers to prompts, from a data set to tokens."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from whence.errors import WhenceError
from whence.llm.generation import check_tokenizer

log = logging.getLogger("whence")


class DemonstrationTokens(NamedTuple):
    """m demonstrations: prompts of P tokens padded on the left, responses of R tokens padded on the right."""

    input_ids: Int[Tensor, "m L"]
    attention_mask: Int[Tensor, "m L"]
    response_mask: Bool[Tensor, "m R"]


def encode_demonstrations(dataset: Any, tokenizer: Any, max_length: int | None = None) -> DemonstrationTokens:
    """Return the tokens of demonstrations.

    Args:
        dataset: rows with "prompt" and "completion", texts or messages of a chat, as in TRL's data sets; completions
            that are texts get an end-of-text token.
        tokenizer: the model's tokenizer.
        max_length: the most tokens of a demonstration; longer ones are cut at the end. None: no limit.

    Raises:
        WhenceError: there are no rows, or other columns; or the chat template does not put the completion after the
            prompt.
    """
    check_tokenizer(tokenizer)
    rows = list(dataset)
    if not rows:
        raise WhenceError("There are no demonstrations; give at least one.")
    pairs = [_tokenize(number, row, tokenizer) for number, row in enumerate(rows)]
    if max_length is not None:
        pairs = [(prompt[:max_length], response[: max(0, max_length - len(prompt))]) for prompt, response in pairs]
    if empty := sum(not response for _, response in pairs):
        log.warning("%d of %d demonstrations have no response token that counts.", empty, len(pairs))
    prompt_width, width = max(len(prompt) for prompt, _ in pairs), max(1, *(len(response) for _, response in pairs))
    ids = torch.full((len(pairs), prompt_width + width), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(pairs):
        place = slice(prompt_width - len(prompt), prompt_width + len(response))
        ids[row, place] = torch.tensor([*prompt, *response])
        mask[row, place] = 1
    return DemonstrationTokens(ids, mask, mask[:, prompt_width:].bool())


def _tokenize(number: int, row: Any, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids of a demonstration's prompt and response."""
    if not isinstance(row, Mapping) or not {"prompt", "completion"} <= row.keys():
        content = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise WhenceError(
            f"Demonstration {number} holds {content}; the columns 'prompt' and 'completion' are needed: rename yours."
        )
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        raise WhenceError(
            f"Demonstration {number} has a text and a chat for prompt and completion; two of a kind are needed."
        )
    if isinstance(prompt, str):
        response = tokenizer(completion, add_special_tokens=False)["input_ids"]
        return list(tokenizer(prompt)["input_ids"]), [*response, tokenizer.eos_token_id]
    conversation = [*prompt, *completion]
    prompt_ids, all_ids = (
        list(tokenizer.apply_chat_template(messages, add_generation_prompt=add_prompt, return_dict=True)["input_ids"])
        for messages, add_prompt in ((prompt, True), (conversation, False))
    )
    if all_ids[: len(prompt_ids)] != prompt_ids:
        raise WhenceError(
            f"Demonstration {number}: with the tokenizer's chat template the conversation does not begin with its "
            "prompt, so that prompt and response cannot be separated. Apply the template yourself, and pass texts."
        )
    return prompt_ids, all_ids[len(prompt_ids) :]
