"""The prompts that a trainer draws from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from whence.errors import WhenceError
from whence.llm.config import PPOConfig
from whence.llm.generation import Prompt, tokenize_prompts
from whence.llm.rewards import Columns, Reward, find_columns


@dataclass(frozen=True, eq=False)
class Prompts:
    """Tokenized prompts, with further columns of their data set.

    Attributes:
        ids: token ids of each prompt.
        columns: the data set's other columns that rewards ask for, by name.
    """

    ids: Sequence[Sequence[int]]
    columns: Columns = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a prompt's ids, and what the further columns hold for it."""
        return {"ids": list(self.ids[number]), **{name: column[number] for name, column in self.columns.items()}}

    def take(self, numbers: Sequence[int]) -> "Prompts":
        """Return the prompts of these numbers, in their order."""
        columns = {name: [column[number] for number in numbers] for name, column in self.columns.items()}
        return Prompts([self.ids[number] for number in numbers], columns)


def read_prompts(
    dataset: Sequence[Prompt] | Any,
    tokenizer: Any,
    config: PPOConfig,
    context: int | None,
    rewards: Sequence[Reward] = (),
    response_setting: str = "max_new_tokens",
) -> Prompts:
    """Return texts, chats, or a data set with a column "prompt", as prompts.

    Args:
        dataset: the texts, chats or data set.
        tokenizer: the model's tokenizer.
        config: the settings that limit the lengths of prompts and responses.
        context: tokens that the model can read; None: no limit.
        rewards: the rewards; only the columns that their arguments name are read.
        response_setting: the trainer's name of the setting that limits a response, for messages.

    Raises:
        WhenceError: a prompt does not fit, or there is no column "prompt", or none that a reward asks for.
    """
    names = list_columns(dataset)
    needed = {name for reward in rewards for name in find_columns(reward, names)}
    source: Any = dataset
    texts = list(dataset if getattr(dataset, "column_names", None) is None else source["prompt"])
    ids = tokenize_prompts(tokenizer, texts, config, context, response_setting)
    return Prompts(ids, {name: list(source[name]) for name in names if name in needed})


def list_columns(dataset: Any) -> list[str]:
    """Return the names of a data set's columns other than "prompt"; a list has none.

    Raises:
        WhenceError: there is no column "prompt".
    """
    names = getattr(dataset, "column_names", None)
    if names is None:
        return []
    if "prompt" not in names:
        raise WhenceError(f"The data set has the columns {', '.join(names)}; a column 'prompt' is needed: rename one.")
    return [name for name in names if name != "prompt"]
