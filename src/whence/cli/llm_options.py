"""Options and arguments that the commands of `whence llm` share."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import typer

from whence.cli.console import parse_json_object
from whence.errors import WhenceError
from whence.experiments.llm.arms import LANGUAGE_ARMS
from whence.experiments.llm.settings import TASKS
from whence.experiments.shared import STANDARD

NONE = "none"
"""The name of the standard arm on the command line; results use the standard arm's own."""

SELECTIONS = tuple(NONE if arm == STANDARD else arm for arm in LANGUAGE_ARMS)

_PANEL = "A model and data of your own"

Task: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"A laboratory that makes its own small model and problems: {', '.join(TASKS)}.", show_default=False
    ),
]
Size: TypeAlias = Annotated[str, typer.Option(help="Of the laboratory: small, tiny for a look, large for a GPU.")]
Dtype: TypeAlias = Annotated[str, typer.Option(help="Of the model's parameters: float32 or bfloat16.")]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Directory or id of a causal language model of Transformers.", rich_help_panel=_PANEL, show_default=False
    ),
]
Dataset: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Directory, file or id of a data set with the column prompt.", rich_help_panel=_PANEL, show_default=False
    ),
]
Reward: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Function of (prompts, responses) that returns numbers, as file.py:name or module:name; further "
        "arguments get the data set's columns of their names.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
RewardModel: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="In its place: directory or id of a sequence classifier, whose logit is the reward.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
RewardLabel: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Which of its labels, where it has several.", rich_help_panel=_PANEL, show_default=False),
]
Demonstrations: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Data set with the columns prompt and completion, for the target validation.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TestDataset: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Data set whose prompts the model is measured on.", rich_help_panel=_PANEL, show_default=False),
]
TestReward: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Function, as for --reward, that it is measured by. (default: the reward)",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Lora: TypeAlias = Annotated[
    int, typer.Option(help="Rank of a LoRA adapter to train in place of the whole model; 0: the whole model.", min=0)
]
HeldOut: TypeAlias = Annotated[
    int, typer.Option(help="Prompts set aside, over whose responses the target is taken in every round.", min=0)
]
Layers: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Score by some layers alone, which costs less: a number of last blocks, or names of parameters, such "
        "as `*.lora_*`. (default: all)",
        show_default=False,
    ),
]
RefreshTargetEvery: TypeAlias = Annotated[
    int, typer.Option(help="Rounds from one computation of the target's gradient to the next.", min=1)
]
Algorithm: TypeAlias = Annotated[str, typer.Option(help="ppo, or TRL's grpo or rloo.")]
Settings: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help='Settings of whence.llm.PPOConfig, or TRL\'s GRPOConfig or RLOOConfig, as JSON: {"learning_rate": 1e-5}.',
        metavar="JSON",
        show_default=False,
    ),
]
Rounds: TypeAlias = Annotated[
    int | None, typer.Option(help="Rollouts to train on. (default: the task's, or 100)", show_default=False)
]


def arm_name(selection: str, target: str | None) -> str:
    """Return the arm of a selection and a target."""
    selection = STANDARD if selection == NONE else selection
    return selection if target is None else f"{selection}-{target}"


def choose_task(task: str | None, source: Mapping[str, Any]) -> str | None:
    """Return the task; the first one if neither a task nor a model is named."""
    return task or (None if any(source.values()) else next(iter(TASKS)))


def parse_layers(text: str | None) -> int | str | None:
    """Return the layers that --layers names: a number of last blocks, or a pattern."""
    return int(text) if text is not None and text.isdecimal() else text


def parse_settings(text: str | None, rounds: int | None) -> dict[str, Any]:
    """Return the settings that --settings and --rounds set.

    Raises:
        WhenceError: --settings is no JSON object, or the rounds are given twice.
    """
    values = parse_json_object("--settings", text, """'{"learning_rate": 1e-5}'""") or {}
    if rounds is not None and "rounds" in values:
        raise WhenceError("Give --rounds or the setting rounds in --settings, not both.")
    return values | ({} if rounds is None else {"rounds": rounds})
