"""Rewards of responses: a user's functions, or a classifier of Transformers."""

import inspect
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.core import NonFinite, WhenceError, eval_mode, first_line

Reward: TypeAlias = Callable[..., Sequence[float]]
"""`reward(prompts, responses)` returns a number for each response.

Further arguments get the columns of the prompts' data set that have their names, with a value for each response;
`**columns` gets all columns.
"""

Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""Further columns of the prompts' data set, by name."""

NO_COLUMNS: Columns = MappingProxyType({})


def compute_rewards(
    reward: Reward, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NO_COLUMNS
) -> Float[Tensor, " n"]:
    """Return a reward's numbers, (n,) float64; `columns` are further ones of the prompts' data set.

    Raises:
        NonFinite: the reward returns a number that is not finite; `record_ids` holds the responses' positions.
        WhenceError: the reward raises an error, asks for a column that does not exist, or returns something else than
            a number for each response.
    """
    arguments, name = {name: columns[name] for name in find_columns(reward, columns)}, _reward_name(reward)
    try:
        values = reward(prompts, responses, **arguments)
        values = list(values) if isinstance(values, Iterable) else values  # a generator may fail only now
    except WhenceError:
        raise
    except Exception as error:
        raise WhenceError(
            f"The reward {name} failed{_locate_error(error)}: {type(error).__name__}: {first_line(error)}. It "
            "is called as reward(prompts, responses) with lists of texts, and has to return a number for each response."
        ) from error
    try:
        rewards = torch.as_tensor(values, dtype=torch.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        raise WhenceError(
            f"The reward {name} returned {values!r:.80}; a list of {len(responses)} numbers is needed, one for each "
            "response: 0.0 where the reward does not apply."
        ) from None
    if len(rewards) != len(responses):
        raise WhenceError(f"The reward {name} returned {len(rewards)} numbers for {len(responses)} responses.")
    broken = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if broken:
        row = broken[0]
        value = "NaN" if math.isnan(rewards[row]) else str(float(rewards[row]))
        raise NonFinite(
            f"The reward {name} is {value} for response {row}, {responses[row][:80]!r}; a finite number is needed: "
            "check how it treats empty or malformed responses.",
            record_ids=broken,
        )
    return rewards


def _locate_error(error: Exception) -> str:
    """Return ' in FILE, line N': the last line that an error went through in the reward's own file."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if not frame.filename.endswith("torch/nn/modules/module.py")]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f" in {frames[0].filename}, line {lines[-1]}" if lines else ""


def find_columns(reward: Reward, columns: Collection[str]) -> list[str]:
    """Return the columns that a reward's arguments name after its first two; a `WhenceError` if one is missing."""
    called: Any = reward.forward if isinstance(reward, nn.Module) else reward
    arguments = list(inspect.signature(called).parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    first = [one for one in arguments if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][:2]
    further = [one for one in arguments if one not in first]
    needed = [one.name for one in further if one.default is one.empty and one.kind in by_name]
    if missing := [name for name in needed if name not in columns]:
        raise WhenceError(
            f"The reward {_reward_name(reward)} asks for {missing[0]!r}, and the data set has no such column. Besides "
            f"the prompt it has: {', '.join(columns) or 'none'}."
        )
    # A function of (*args, **kwargs) forwards its arguments, most likely to one that asks for no columns.
    if len(first) == 2 and any(one.kind is one.VAR_KEYWORD for one in further):
        occupied = {one.name for one in first if one.kind is one.POSITIONAL_OR_KEYWORD}
        return [name for name in columns if name not in occupied]
    return [one.name for one in further if one.kind in by_name and one.name in columns]


def adapt_trl_reward(reward: Reward, chats: Sequence[Any] | None = None) -> Reward:
    """Return a reward of TRL's form, which is called with `completions` by name, as a reward; another one as it is.

    `chats` are the prompts' messages, for a function that gets chats; None: it gets texts.
    """
    parameters = inspect.signature(reward).parameters
    if "completions" not in parameters:
        return reward
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def compute(prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]) -> Sequence[float]:
        arguments = {**columns, "prompts": prompts, "completions": responses}
        if chats is not None:
            completions = [[{"role": "assistant", "content": text}] for text in responses]
            arguments |= {"prompts": chats, "completions": completions}
        return reward(**{name: value for name, value in arguments.items() if takes_all or name in parameters})

    compute.__name__ = _reward_name(reward)
    return compute


def _reward_name(reward: Reward) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


def classifier(model: Any, tokenizer: Any, *, label: str | None = None, batch_size: int = 32) -> Reward:
    """Return the reward of a sequence classifier of Transformers: the raw logit of a label, on the response alone.

    Args:
        model: a sequence classifier.
        tokenizer: its tokenizer.
        label: the label's name; None: the model's only label.
        batch_size: responses at a time.

    Raises:
        WhenceError: the model has several labels, and none or an unknown one is chosen.
    """
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    label = names[0] if label is None and len(names) == 1 else label
    if label not in names:
        raise WhenceError(f"label is {label!r}, and the reward model's labels are {', '.join(names)}: choose one.")
    place = names.index(label)

    def reward(prompts: Sequence[str], responses: Sequence[str]) -> Sequence[float]:
        logits: list[float] = []
        device = next(model.parameters()).device
        for first in range(0, len(responses), batch_size):
            texts = list(responses[first : first + batch_size])
            inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
            with torch.no_grad(), eval_mode(model.modules()):
                logits += model(**inputs).logits[:, place].float().tolist()
        return logits

    return reward
