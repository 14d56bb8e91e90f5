"""Prompts, as a trainer draws from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from whence.errors import WhenceError
from whence.llm.config import PPOConfig
from whence.llm.generation import Prompt, tokenized
from whence.llm.rewards import Columns, Reward, find_columns

NO_PROMPTS = "There are no prompts to draw responses to."


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts in tokens, with what their data set says of each besides.

    Attributes:
        ids: token ids of each.
        columns: what rewards ask for of the data set's other columns.
    """

    ids: Sequence[Sequence[int]]
    columns: Columns = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, chosen: Sequence[int]) -> "Prompts":
        """Return the prompts of these numbers, in their order."""
        columns = {name: [column[at] for at in chosen] for name, column in self.columns.items()}
        return Prompts([self.ids[at] for at in chosen], columns)


def read_prompts(
    given: Sequence[Prompt] | Any,
    tokenizer: Any,
    config: PPOConfig,
    context: int | None,
    rewards: Sequence[Reward] = (),
) -> Prompts:
    """Return texts, chats, or a data set with a column "prompt", as prompts.

    Args:
        given: what the user has.
        tokenizer: of the model.
        config: says how long prompts and responses may be.
        context: tokens that the model can read; None: without limit.
        rewards: of which the columns are that they ask for; others are not read.

    Raises:
        WhenceError: one does not fit, there is no column "prompt", or none that a reward asks for.
    """
    names = list_columns(given)
    asked = {name for reward in rewards for name in find_columns(reward, names)}
    held: Any = given
    texts = list(given if getattr(given, "column_names", None) is None else held["prompt"])
    ids = tokenized(tokenizer, texts, config, context)
    return Prompts(ids, {name: list(held[name]) for name in names if name in asked})


def list_columns(given: Any) -> list[str]:
    """Return the names of a data set's columns besides "prompt"; a list has none.

    Raises:
        WhenceError: there is no column "prompt".
    """
    names = getattr(given, "column_names", None)
    if names is None:
        return []
    if "prompt" not in names:
        raise WhenceError(f"The data set has the columns {', '.join(names)}; a column 'prompt' is needed: rename one.")
    return [name for name in names if name != "prompt"]
