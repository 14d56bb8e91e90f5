"""Options that several commands have, those that are fields of a configuration, and what the values of both name."""

import inspect
import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from functools import partial
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import typer

from whence import core
from whence.core import WhenceError

if TYPE_CHECKING:
    from stable_baselines3 import PPO

    from whence.runs import RunDirectory

AGENTS, LANGUAGE = "Agents", "Language models"
"""Headings of the help, over options for the runs of one kind, which a command refuses for the other."""

optional = partial(typer.Option, show_default=False)
agents_option = partial(optional, rich_help_panel=AGENTS)
language_option = partial(optional, rich_help_panel=LANGUAGE)

Env: TypeAlias = Annotated[
    str | None,
    typer.Argument(help="A Gymnasium environment: an id, such as LunarLander-v3, or module:Id.", show_default=False),
]
On: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Where the runs are made: local, in processes of this machine; or ray, on the cluster that RAY_ADDRESS "
        "names. Without RAY_ADDRESS, a Ray is started on this machine."
    ),
]
Workers: TypeAlias = Annotated[int | None, optional(help="Runs at a time. (default: one per core)")]
Overwrite: TypeAlias = Annotated[
    bool, typer.Option("--overwrite", help="Delete what the directory holds of it, and start anew.")
]
Target: TypeAlias = Annotated[
    Literal["return", "action"],
    typer.Option(help="What the scores are of: return, or action (of --record, or of the two below)."),
]
Observation: TypeAlias = Annotated[str | None, optional(help="For the target action: one observation.", metavar="JSON")]
Action: TypeAlias = Annotated[str | None, optional(help="For the target action: one action.", metavar="JSON")]
Record: TypeAlias = Annotated[
    int | None, optional(help="For the target action: what was done in this record of the round.")
]
Engine: TypeAlias = Annotated[str, typer.Option(help="How scores are computed; see `whence list engines`.")]
ReplayEnv: TypeAlias = Annotated[
    str | None,
    agents_option("--env", help="The environment: an id, module:Id, or module:function. (default: the run's)"),
]


def register_policy(name: str | None) -> str | None:
    """Let a run's policy be built of a class that the user names, "module:Class"."""
    if name is not None:
        from whence.sb3 import episodes, models

        try:
            models.register_policy_class(episodes.find_object(name))
        except (ImportError, AttributeError) as failure:
            raise WhenceError(f"--policy is {name!r}; module:Class is needed: {failure}.") from None
    return name


PolicyClass: TypeAlias = Annotated[
    str | None,
    agents_option(
        "--policy",
        help="Your own class of the policy, or of its features extractor: module:Class.",
        callback=register_policy,
    ),
]
EpisodeSeed: TypeAlias = Annotated[
    int | None, agents_option(help="The decision: of an episode played with this seed, (default: 0)", min=0)
]
Step: TypeAlias = Annotated[
    int | None, agents_option(help="at this step. (default: the one whose action's probability rose most)", min=0)
]
InState: TypeAlias = Annotated[
    str | None, agents_option("--observation", help="The decision: in this observation,", metavar="JSON")
]
TakenAction: TypeAlias = Annotated[str | None, agents_option("--action", help="this action.", metavar="JSON")]
Round: TypeAlias = Annotated[int | None, optional(help="The round, from 1. (default: that of --record, or the last)")]
Prompt: TypeAlias = Annotated[list[str] | None, language_option(help="The answer: to this prompt,", metavar="TEXT")]
Response: TypeAlias = Annotated[
    list[str] | None, language_option(help="this response. Repeat both for more examples.", metavar="TEXT")
]
Trust: TypeAlias = Annotated[
    bool,
    typer.Option("--trust", help="Run what the run names, such as its environment, even if you did not make it here."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
FailOn: TypeAlias = Annotated[
    Literal["wrong", "unusual"] | None,
    optional(help="End with exit code 3 if any finding has this rank or a worse one, even if it is not printed."),
]


def parse_json(option: str, text: str | None, example: str, kind: type = object) -> Any:
    """Return the value of an option that takes JSON, of a kind and like an example; None if it is not given."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise WhenceError(
            f"{option} is {reprlib.repr(text)}, which is not JSON ({error}). Write it as {example}."
        ) from None
    if not isinstance(value, kind):
        raise WhenceError(f"{option} is {reprlib.repr(value)}; a JSON object is needed, such as {example}.")
    return value


def parse_action(observation: str | None, action: str | None) -> dict[str, Any]:
    """Return the arguments of the target action from `Observation` and `Action`, without those that are not given."""
    values = {
        "observation": parse_json("--observation", observation, "14, '[0.1, 0.2]' or '{\"key\": [1, 2]}'"),
        "action": parse_json("--action", action, "2 or '[0.5, -0.5]'"),
    }
    return {name: value for name, value in values.items() if value is not None}


def parse_decision(observation: str | None, action: str | None, model: "PPO") -> "core.Action":
    """Return the target of an observation and an action, both as JSON and in the model's spaces."""
    from whence.stored.agents import check_action  # help is shown without torch

    if observation is None or action is None:
        raise WhenceError("An action is named by --record ID, or by both --observation and --action, as JSON.")
    target = core.Action(**parse_action(observation, action))
    check_action(target, model.observation_space, model.action_space)
    return target


def find_round(run: "RunDirectory", number: int | None, record: int | None) -> int:
    """Return the round asked for: by its number, by a record in it, or the last."""
    rounds = run.require_rounds()
    if number is not None:
        return number
    if record is None:
        whole = set(run.rounds("policies")) or rounds  # of large policies not every round's is kept
        return max((each for each in rounds if each in whole), default=rounds[-1])
    for candidate in reversed(rounds):
        if record in run.round("records", candidate)["record_id"]:
            return candidate
    raise WhenceError(
        f"No round of {run.path} holds record {record}; it holds rounds {rounds[0]} to {rounds[-1]}. See the moments "
        "of a round with: whence show RUN --bottom 10"
    )


_ROUNDS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6})(?::([0-9]{1,6}))?)?")


def parse_rounds(option: str, text: str | None) -> list[int]:
    """Return the rounds that an option names, each once and in their order: 5,20 or 10-50 or 10-150:10."""
    rounds: set[int] = set()
    for part in [] if text is None else text.split(","):
        match = _ROUNDS.fullmatch(part.strip())
        first, last, every = (int(match[1]), int(match[2] or match[1]), int(match[3] or 1)) if match else (0, 0, 0)
        if last < first or every < 1:
            raise WhenceError(
                f"{option} is {text!r}; whole numbers or ranges of up to six digits, separated by commas, are needed, "
                "such as 5,20 or 10-50 or, for every tenth, 10-150:10."
            )
        rounds.update(range(first, last + 1, every))
    return sorted(rounds)


Command: TypeAlias = Callable[..., None]


class FieldOption:
    """An option that sets a field of a configuration, if it is given; below a heading of the help, `panel`.

    `kinds` are the types of the field's values, as a dataclass names them: `Mapping` is given as JSON, several are int
    and str. `about` says what it is, as a phrase. A `default` of None is not named.
    """

    def __init__(
        self, name: str, kinds: Collection[Any], about: str, default: Any = None, panel: str | None = None
    ) -> None:
        self.name, self._kinds = name, [kind for kind in kinds if kind is not type(None)]
        # A pair of flags, --x and --no-x, would leave the help no room at 80 columns.
        shown = {bool: Literal["true", "false"], Mapping: str}
        option: Any = shown.get(self._kinds[0], self._kinds[0]) if len(self._kinds) == 1 else str
        value = str(default).lower() if isinstance(default, bool) else default
        about, _, otherwise = about.rstrip(".").partition("; None: ")
        shown_default = otherwise or ("" if default is None else value)
        ending = f" (default: {shown_default})" if shown_default != "" else ""
        info = typer.Option(
            help=f"{about[:1].upper()}{about[1:]}.{ending}",
            metavar="JSON" if self._kinds == [Mapping] else None,
            rich_help_panel=panel,
            show_default=False,
        )
        self.parameter = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[option | None, info]
        )

    def parse(self, value: Any) -> Any:
        """Return the field's value from the option's."""
        if self._kinds == [Mapping]:
            return parse_json(f"--{self.name.replace('_', '-')}", value, """'{"name": "value"}'""", dict)
        if len(self._kinds) > 1:
            return int(value) if value.isdigit() else value
        return value == "true" if self._kinds == [bool] else value


def make_field_options(
    config: type, *, names: Iterable[str], panel: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> list[FieldOption]:
    """Return options for fields of a dataclass, as its types and its docstring's "Attributes" describe them."""
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(config) or "", re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in entries}
    known, types = {field.name: field for field in fields(config)}, get_type_hints(config)
    options = []
    for name in names:
        kind, default = types[name], defaults.get(name, known[name].default)
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (get_origin(kind) or kind,)
        shown = default if isinstance(default, str | int | float) else None
        options.append(FieldOption(name, kinds, texts[name], shown, panel))
    return options


def with_options(options: Iterable[FieldOption]) -> Callable[[Command], Command]:
    """Give a command options in the place of its last parameter, `**fields`: it is called with all of them."""

    def add(command: Command) -> Command:
        signature = inspect.signature(command)
        first = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [*first, *(option.parameter for option in options)]
        # Typer reads both.
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return add


def parse_fields(options: Iterable[FieldOption], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields whose options have a value."""
    pairs = [(option, values[option.name]) for option in options]
    return {option.name: option.parse(value) for option, value in pairs if value is not None}
