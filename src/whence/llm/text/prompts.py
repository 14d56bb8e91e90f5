"""Prompts and demonstrations: texts, chats and data sets, as tokens."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import polars as pl
from jinja2 import TemplateError

from whence.core import WhenceError, first_line
from whence.llm.base import PPOConfig
from whence.llm.text.rewards import Columns, Reward, find_columns

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a chat, each with "role" and "content"."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raise WhenceError for a tokenizer that cannot pad rows of different lengths, or end a response."""
    for name in ("pad_token", "eos_token"):
        if getattr(tokenizer, name) is None:
            raise WhenceError(f"The tokenizer has no {name}. Set tokenizer.{name}; for padding the eos_token serves.")


def tokenize_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], config: PPOConfig, context: int | None
) -> list[list[int]]:
    """Return the token ids of each prompt; messages go through the tokenizer's chat template.

    `context` are the tokens that the model can read; None: no limit.

    Raises:
        WhenceError: a prompt is empty, or leaves no room for its response; the message has the prompt's number.
    """
    remaining = math.inf if context is None else context - config.max_new_tokens
    longest = remaining if config.max_prompt_length is None else min(config.max_prompt_length, remaining)
    rows = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            ids = _encode(tokenizer, prompt)
        else:
            ids = _apply_template(tokenizer, prompt, config.chat_template_kwargs, add_generation_prompt=True)
        if not 1 <= len(ids) <= longest:
            raise WhenceError(
                f"Prompt {number} has {len(ids)} tokens; from 1 to {longest} are needed: the model reads {context} "
                f"tokens in all, {config.max_new_tokens} for a response. Shorten or drop it, or lower max_new_tokens "
                "(of TRL: max_completion_length)."
            )
        rows.append(ids)
    return rows


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return a text's tokens without the end-of-text token that some tokenizers append, which would end the row."""
    end = tokenizer.eos_token_id
    ids, plain = (list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (True, False))
    appended, written = (len(list(takewhile(lambda token: token == end, reversed(each)))) for each in (ids, plain))
    return ids[: len(ids) - max(0, appended - written)]


def _apply_template(
    tokenizer: Any,
    messages: Sequence[Any],
    settings: Mapping[str, Any] | None,
    *,
    add_generation_prompt: bool,
    tokenize: bool = True,
) -> Any:
    """Return the tokens or the text of a chat's messages, and refuse what the template itself does."""
    mode = {"add_generation_prompt": add_generation_prompt, "tokenize": tokenize, "return_dict": tokenize}
    try:
        output = tokenizer.apply_chat_template(list(messages), **{**(settings or {}), **mode})
    except (TemplateError, TypeError) as error:
        raise WhenceError(f"The tokenizer's chat template cannot write these messages: {first_line(error)}.") from error
    return list(output["input_ids"]) if tokenize else output


def context_length(model: Any) -> int | None:
    """Return the number of tokens that a model can read; None: its configuration does not say."""
    length: int | None = getattr(model.config, "max_position_embeddings", None)
    return length


@dataclass(frozen=True, eq=False)
class Prompts:
    """Tokenized prompts: the token ids of each, and the data set's other columns that rewards ask for, by name."""

    ids: Sequence[Sequence[int]]
    columns: Columns = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a prompt's ids, and what the further columns hold for it."""
        return {**{name: column[number] for name, column in self.columns.items()}, "ids": list(self.ids[number])}

    def take(self, numbers: Sequence[int]) -> "Prompts":
        """Return the prompts of these numbers, in their order."""
        columns = {name: [column[number] for number in numbers] for name, column in self.columns.items()}
        return Prompts([self.ids[number] for number in numbers], columns)


def read_prompts(
    dataset: Sequence[Prompt] | Any,
    tokenizer: Any,
    config: PPOConfig,
    context: int | None,
    reward: Reward | None = None,
) -> Prompts:
    """Return texts, chats, or a data set with a column "prompt", or the rows of one, each a dict, as prompts.

    Of further columns those are read that the arguments of `reward` name. See `tokenize_prompts`.

    Raises:
        WhenceError: a prompt does not fit, or there is no column "prompt", or none that the reward asks for.
    """
    source: Any = dataset
    if getattr(source, "column_names", None) is None:
        source = list(source)  # of a streaming data set, too
        if source and isinstance(source[0], Mapping):
            source = {name: [row.get(name) for row in source] for name in source[0]}
    names = list_columns(source)
    needed = [] if reward is None else find_columns(reward, names)
    ids = tokenize_prompts(tokenizer, list(source if isinstance(source, list) else source["prompt"]), config, context)
    return Prompts(ids, {name: list(source[name]) for name in names if name in needed})


def list_columns(dataset: Any) -> list[str]:
    """Return a data set's columns besides "prompt", which a dict or a data set must have; a list has none."""
    names = list(dataset) if isinstance(dataset, Mapping) else getattr(dataset, "column_names", None)
    if names is None:
        return []
    if "prompt" not in names:
        raise WhenceError(f"The data set has the columns {', '.join(names)}; a column 'prompt' is needed: rename one.")
    return [name for name in names if name != "prompt"]


class Tokens(NamedTuple):
    """The token ids of a prompt and of a response, and which of the response's the model wrote itself."""

    prompt: list[int]
    response: list[int]
    mask: list[bool]


def encode_pair(number: int, row: Any, tokenizer: Any, settings: Mapping[str, Any] | None) -> Tokens:
    """Return the tokens of a demonstration's, or a rollout's, prompt and completion: a text, or messages of a chat.

    Of a chat's completion the model wrote what the messages of the assistant say, each up to its end-of-text token.
    What the chat template puts around them, and the messages of tools and users, stand in the response and do not
    count. A completion that does not end gets an end.
    """
    if not isinstance(row, Mapping) or not {"prompt", "completion"} <= row.keys():
        content = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise WhenceError(
            f"Demonstration {number} holds {content}; the columns 'prompt' and 'completion' are needed: rename yours."
        )
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and not isinstance(completion, str):
        raise WhenceError(
            f"Demonstration {number} has a text and a chat for prompt and completion; two of a kind are needed."
        )
    if isinstance(prompt, str):
        prompt_ids = _encode(tokenizer, prompt)
    else:
        prompt_ids = _apply_template(tokenizer, prompt, settings, add_generation_prompt=True)
    pieces = [(completion, True)]
    if not isinstance(completion, str):
        write = partial(_apply_template, tokenizer, settings=settings, tokenize=False)
        pieces = _split_chat(prompt, completion, write, tokenizer.eos_token)
    if not pieces:
        raise WhenceError(
            f"Demonstration {number}: in the text of the tokenizer's chat template the messages of the completion are "
            "not to be found, so that prompt and response cannot be separated. Apply the template yourself, and pass "
            "texts."
        )
    ids, mask = list[int](), list[bool]()
    for text, counts in pieces:
        piece = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        ids, mask = [*ids, *piece], [*mask, *[counts] * len(piece)]
    if ids[-1:] != [tokenizer.eos_token_id]:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    return Tokens(prompt_ids, ids, mask)


_THOUGHTS = ("reasoning_content", "thinking")


def _split_chat(
    prompt: Sequence[Any], completion: Sequence[Any], write: Callable[..., str], end: str
) -> list[tuple[str, bool]]:
    """Return a completion's text in pieces, and whether the model wrote each; none if the template's text hides them.

    The template writes the conversation before each answer, and with it. Some write earlier messages anew, such as
    without their thoughts, so what lies between two answers is looked for where the first one ends.
    """
    pieces, messages, written, last = list[tuple[str, bool]](), [*prompt, *completion], "", 0
    answers = [n for n in range(len(prompt), len(messages)) if messages[n].get("role") == "assistant"]
    for place in answers:
        before = write(messages[:place], add_generation_prompt=True)
        whole = write(messages[: place + 1], add_generation_prompt=False)
        if pieces:
            start = len(written) if before.startswith(written) else _find_end(before, pieces[-1][0], messages[last + 1])
            if start is None:
                return []
            pieces.append((before[start:], False))
        generated = _read_generated(messages[place])
        # The end token may have the text in its name.
        limit = whole.rfind(end) if end in whole[len(written) :] else len(whole)
        text = (generated or "").strip()
        begin = whole.rfind(text, 0, limit) if text else -1
        if generated is not None and begin >= 0:
            stop = begin + len(text)
            if whole.startswith(end, stop):
                generated, stop = generated + end, stop + len(end)
        elif whole.startswith(before) and _is_written(messages[place], whole[len(before) :]):
            form, separator, _ = whole[len(before) :].partition(end)
            generated = (form if generated is None else generated) + separator
            stop = len(before) + len(form) + len(separator)
        else:
            return []
        pieces.append((generated, True))
        written, last = whole[:stop], place
    return pieces


def _read_generated(message: Mapping[str, Any]) -> str | None:
    """Return what the model wrote of a message that is a text alone; None: the template alone knows the form."""
    if any(message.get(name) for name in ("tool_calls", *_THOUGHTS)):
        return None
    return join_messages([{"content": message.get("content")}])


def _is_written(message: Mapping[str, Any], text: str) -> bool:
    """Return whether a template's text has a message's thoughts and calls of tools, which some templates leave out."""
    parts = [*map(message.get, _THOUGHTS), *(call.get("name") for call in _list_calls(message))]
    return all(part.strip() in text for part in parts if isinstance(part, str))


def _find_end(text: str, generated: str, following: Mapping[str, Any]) -> int | None:
    """Return where a message ends in a conversation's text of which the template has written the beginning anew."""
    place = text.rfind(generated.strip(), 0, max(0, text.rfind((_read_generated(following) or "").strip())))
    return None if place < 0 else place + len(generated.strip())


def join_messages(text: Any) -> str:
    """Return a text, or a chat's messages as one text, a line each: their contents, and their calls of tools as JSON.

    A part of a message that is no text, such as an image, is named in angle brackets.
    """
    return text if isinstance(text, str) else "\n".join(map(_join_parts, text))


def read_chat(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's text, or the messages of `list_chats` if it is a chat's; their calls of tools are not restored."""
    chat = row.get(f"chat.{name}")
    if chat is None:
        return row[name]
    return [{"role": message["role"], "content": message["text"]} for message in json.loads(chat)]


def list_chats(columns: Mapping[str, Sequence[Any]]) -> list[pl.Series]:
    """Return columns `chat.NAME` with the messages of those that are chats, as JSON: role, text and calls of tools."""
    chats = {}
    for name, values in columns.items():
        if any(not isinstance(value, str) for value in values):
            chats[name] = [None if isinstance(v, str) else json.dumps(list(map(_write_message, v))) for v in values]
    return [pl.Series(f"chat.{name}", texts, dtype=pl.String) for name, texts in chats.items()]


def _write_message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [f"{call.get('name')}({_write_arguments(call.get('arguments'))})" for call in _list_calls(message)]
    about = {"role": str(message.get("role", "")), "name": message.get("name"), "calls": calls}
    plain = {"content": message.get("content")}
    return {name: value for name, value in about.items() if value} | {"text": join_messages([plain])}


def _write_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)


def _join_parts(message: Mapping[str, Any]) -> str:
    content = message.get("content") or []
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [
        part.get("text") or f"<{part.get('type', 'part')}>" if isinstance(part, Mapping) else part for part in parts
    ]
    return "".join([*map(str, texts), *(json.dumps(call, default=str) for call in _list_calls(message))])


def _list_calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a message's calls of tools; one that is a text, as some trainers write it, is a name."""
    calls = [call if isinstance(call, Mapping) else {"name": call} for call in message.get("tool_calls") or []]
    return [call.get("function", call) for call in calls]
