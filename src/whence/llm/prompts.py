"""Prompts, as a trainer draws from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whence.errors import WhenceError
from whence.llm.config import PPOConfig
from whence.llm.generation import Prompt, tokenized


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts in tokens, with what their data set says of each besides.

    Attributes:
        ids: token ids of each.
        columns: the data set's other columns, by name; rewards get those that they ask for.
    """

    ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, chosen: Sequence[int]) -> "Prompts":
        """Return the prompts of these numbers, in their order."""
        columns = {name: [column[at] for at in chosen] for name, column in self.columns.items()}
        return Prompts([self.ids[at] for at in chosen], columns)


def prompts_of(given: Sequence[Prompt] | Any, tokenizer: Any, config: PPOConfig, context: int | None) -> Prompts:
    """Return texts, chats, or a data set with a column "prompt", as prompts.

    Args:
        given: what the user has.
        tokenizer: of the model.
        config: says how long prompts and responses may be.
        context: tokens that the model can read; None: without limit.

    Raises:
        WhenceError: there is none, one does not fit, or there is no column "prompt".
    """
    names: Sequence[str] | None = getattr(given, "column_names", None)
    if names is None:
        return Prompts(tokenized(tokenizer, list(given), config, context))
    if "prompt" not in names:
        raise WhenceError(f"The data set has the columns {', '.join(names)}; a column 'prompt' is needed: rename one.")
    held: Any = given
    columns = {name: list(held[name]) for name in names if name != "prompt"}
    return Prompts(tokenized(tokenizer, list(held["prompt"]), config, context), columns)
