"""Options that several commands have."""

import re
from typing import Annotated, Any, TypeAlias

import typer

from whence.cli.console import parse_json, parse_json_object
from whence.errors import WhenceError
from whence.experiments.rl import arms
from whence.experiments.rl.presets import presets

Env: TypeAlias = Annotated[
    str | None,
    typer.Argument(help="A Gymnasium environment: an id, such as LunarLander-v3, or module:Id.", show_default=False),
]
Preset: TypeAlias = Annotated[
    str | None,
    typer.Option(help=f"A built-in set-up instead of ENV. Known: {', '.join(presets())}.", show_default=False),
]
EnvKwargs: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help='Passed to gymnasium.make, as JSON: {"map_name": "8x8"}. Merged with the preset\'s.',
        metavar="JSON",
        show_default=False,
    ),
]
PoolKwargs: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The same for EnvPool, by its names: for presets that collect or evaluate there.",
        metavar="JSON",
        show_default=False,
    ),
]
Rounds: TypeAlias = Annotated[
    int | None, typer.Option(help="Rollouts to train on. (default: the preset's, or 50)", show_default=False)
]
Drop: TypeAlias = Annotated[
    float | None,
    typer.Option(
        help="The share to drop; with iif, of the records below 0. (default: the preset's, or 0.125)",
        show_default=False,
    ),
]
Warmup: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Rounds at the start in which nothing is dropped. (default: 0)", show_default=False),
]
NEnvs: TypeAlias = Annotated[
    int | None, typer.Option(help="Environments stepped side by side. (default: 1)", show_default=False)
]
On: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Where the runs are made: local, in processes of this machine; or ray, on the cluster that RAY_ADDRESS "
        "names. Without RAY_ADDRESS, a Ray is started on this machine."
    ),
]
Overwrite: TypeAlias = Annotated[
    bool, typer.Option("--overwrite", help="Delete what the directory holds of it, and start anew.")
]
Target: TypeAlias = Annotated[
    str, typer.Option(help="What the scores are of: return, or action (of --record, or of the two below).")
]
Observation: TypeAlias = Annotated[
    str | None, typer.Option(help="For the target action: one observation.", metavar="JSON", show_default=False)
]
Action: TypeAlias = Annotated[
    str | None, typer.Option(help="For the target action: one action.", metavar="JSON", show_default=False)
]
Record: TypeAlias = Annotated[
    int | None,
    typer.Option(help="For the target action: what was done in this record of the round.", show_default=False),
]
Engine: TypeAlias = Annotated[
    str | None,
    typer.Option(help="How scores are computed; see `whence list engines`. (default: auto)", show_default=False),
]
ReplayEnv: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--env",
        help="The environment to play episodes in: an id, or module:Id. (default: the run's)",
        show_default=False,
    ),
]
Draws: TypeAlias = Annotated[
    int, typer.Option(help="Trainings that the score 'smoothed' averages; under Adam 64 predict better.", min=1)
]

Memory: TypeAlias = Annotated[
    float, typer.Option(help="GiB that scoring and training may hold at a time, estimated before the start.", min=0.0)
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def describe_arms() -> str:
    """Return the help text on arms."""
    return f"{', '.join(arms.ARMS)}; `whence list arms` tells what they do."


def parse_env_settings(env_kwargs: str | None, pool_kwargs: str | None) -> dict[str, Any]:
    """Return the fields of a run that `EnvKwargs` and `PoolKwargs` set.

    Raises:
        WhenceError: one is no JSON object.
    """
    return {
        "env_kwargs": parse_json_object("--env-kwargs", env_kwargs, """'{"map_name": "8x8"}'"""),
        "pool_kwargs": parse_json_object("--pool-kwargs", pool_kwargs, """'{"vehicles_count": 10}'"""),
    }


def parse_action(observation: str | None, action: str | None) -> dict[str, Any]:
    """Return the arguments of the target action from `Observation` and `Action`, without those that are not given.

    Raises:
        WhenceError: one is not JSON.
    """
    texts = {
        "observation": (observation, "14, '[0.1, 0.2]' or '{\"key\": [1, 2]}'"),
        "action": (action, "2 or '[0.5, -0.5]'"),
    }
    return {name: parse_json(f"--{name}", text, example) for name, (text, example) in texts.items() if text is not None}


_ROUNDS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6})(?::([0-9]{1,6}))?)?")


def parse_rounds(option: str, text: str | None) -> list[int]:
    """Return the rounds that an option names, each once and in their order: 5,20 or 10-50 or 10-150:10.

    Raises:
        WhenceError: the text names no rounds.
    """
    if text is None:
        return []
    rounds: set[int] = set()
    for part in text.split(","):
        if (match := _ROUNDS.fullmatch(part.strip())) is None:
            raise WhenceError(
                f"{option} is {text!r}; whole numbers or ranges of up to six digits, separated by commas, are needed, "
                "such as 5,20 or 10-50 or, for every tenth, 10-150:10."
            )
        first, last, every = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or every < 1:
            raise WhenceError(
                f"{option} has the range {part.strip()}; it goes from a round to a later one, in steps of at least 1: "
                "10-50 or 10-150:10."
            )
        rounds.update(range(first, last + 1, every))
    return sorted(rounds)
