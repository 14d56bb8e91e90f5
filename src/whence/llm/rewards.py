"""What responses are worth: functions of the user's, or a classifier of Transformers."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.errors import WhenceError
from whence.guards import eval_mode

Reward: TypeAlias = Callable[..., Sequence[float]]
"""`reward(prompts, responses)` returns a number for each response.

Further arguments get the columns of the prompts' data set that have their names, one value for each response;
`**columns` gets all.
"""

Columns: TypeAlias = Mapping[str, Sequence[Any]]
"""What else is known of each prompt, by name."""

NO_COLUMNS: Columns = MappingProxyType({})


def combine_rewards(rewards: Sequence[Reward], weights: Sequence[float] | None) -> Reward:
    """Return the weighted sum of several rewards; every one is checked as it comes.

    Args:
        rewards: one or more.
        weights: of each; None: 1.

    Raises:
        WhenceError: no reward, or another number of weights.
    """
    if not rewards:
        raise WhenceError("No reward was given; pass a function of prompts and responses, or several.")
    for one in rewards:
        if not callable(one):
            raise WhenceError(f"A reward is {one!r}; a function of (prompts, responses) is needed.")
    factors = [1.0] * len(rewards) if weights is None else [float(weight) for weight in weights]
    if len(factors) != len(rewards):
        raise WhenceError(
            f"{len(factors)} reward weights were given for {len(rewards)} rewards; one for each is needed."
        )

    def reward(prompts: Sequence[str], responses: Sequence[str], /, **columns: Sequence[Any]) -> Sequence[float]:
        total = torch.zeros(len(responses), dtype=torch.float64)
        for one, factor in zip(rewards, factors, strict=True):
            total += factor * compute_rewards(one, prompts, responses, columns)
        return total.tolist()

    return reward


def compute_rewards(
    reward: Reward, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NO_COLUMNS
) -> Float[Tensor, " n"]:
    """Return a reward's numbers, (n,) float64.

    Args:
        reward: a function of the user's.
        prompts: texts.
        responses: to each.
        columns: what else is known of each prompt.

    Raises:
        WhenceError: not as many as responses, or one that is not finite, the first such response being shown; or the
            reward needs a column that there is not.
    """
    given, name = {name: columns[name] for name in find_columns(reward, columns)}, _name(reward)
    found = torch.as_tensor(list(reward(prompts, responses, **given)), dtype=torch.float64).reshape(-1)
    if len(found) != len(responses):
        raise WhenceError(f"The reward {name} returned {len(found)} numbers for {len(responses)} responses.")
    if not torch.isfinite(found).all():
        at = int((~torch.isfinite(found)).nonzero()[0])
        value = "NaN" if math.isnan(found[at]) else str(float(found[at]))
        raise WhenceError(
            f"The reward {name} is {value} for response {at}, {responses[at][:80]!r}; a finite number is needed: look "
            "at how it treats empty or malformed responses."
        )
    return found


def find_columns(reward: Reward, columns: Collection[str]) -> list[str]:
    """Return the names of the columns that a reward's arguments ask for, after those for prompts and responses.

    Raises:
        WhenceError: it needs one that there is not.
    """
    called: Any = reward.forward if isinstance(reward, nn.Module) else reward
    try:
        arguments = list(inspect.signature(called).parameters.values())
    except ValueError:  # written in C, and silent about its arguments
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    first = [one for one in arguments if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)][:2]
    further = [one for one in arguments if one not in first]
    needed = [one.name for one in further if one.default is one.empty and one.kind in named]
    if missing := [name for name in needed if name not in columns]:
        raise WhenceError(
            f"The reward {_name(reward)} asks for {missing[0]!r}, and the data set has no such column. Besides the "
            f"prompt it has: {', '.join(columns) or 'none'}."
        )
    # A function of (*args, **kwargs) hands on what it gets, most likely to one that asks for nothing.
    if len(first) == 2 and any(one.kind is one.VAR_KEYWORD for one in further):
        taken = {one.name for one in first if one.kind is one.POSITIONAL_OR_KEYWORD}
        return [name for name in columns if name not in taken]
    return [one.name for one in further if one.kind in named and one.name in columns]


def _name(reward: Reward) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


def classifier(model: Any, tokenizer: Any, *, label: str | int | None = None, batch_size: int = 32) -> Reward:
    """Return the reward of a sequence classifier of Transformers: the raw logit of a label, on the response alone.

    Args:
        model: for sequence classification.
        tokenizer: its own.
        label: name or number of the label; None: the only one there is.
        batch_size: responses at a time.

    Raises:
        WhenceError: a model with several labels, and none or an unknown one was chosen.
    """
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    if label is None and len(names) > 1:
        raise WhenceError(f"The reward model has {len(names)} labels, {', '.join(names)}: choose one with label=.")
    chosen = 0 if label is None else label if isinstance(label, int) else _number(label, names)
    if not 0 <= chosen < len(names):
        raise WhenceError(f"label is {label}; the reward model has labels 0 to {len(names) - 1}: {', '.join(names)}.")

    def reward(prompts: Sequence[str], responses: Sequence[str]) -> Sequence[float]:
        found: list[float] = []
        device = next(model.parameters()).device
        for first in range(0, len(responses), batch_size):
            texts = list(responses[first : first + batch_size])
            inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
            with torch.no_grad(), eval_mode(model.modules()):
                found += model(**inputs).logits[:, chosen].float().tolist()
        return found

    return reward


def _number(label: str, names: Sequence[str]) -> int:
    if label not in names:
        raise WhenceError(f"The reward model has no label {label!r}; its labels are {', '.join(names)}.")
    return names.index(label)
