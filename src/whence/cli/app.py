"""The application: its commands, each loaded when it is called, and how its errors end."""

import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from whence.cli.console import errors, print_line
from whence.errors import WhenceError


class Home(NamedTuple):
    """Where a command's function is, as "module:function" of `whence.cli`, and its first sentence."""

    function: str
    about: str


COMMANDS: Mapping[str, Home] = {
    "train": Home("train:train", "Train PPO on the records that help, and keep what happened in a run directory."),
    "compare": Home(
        "compare:compare",
        "Train each arm on each seed, and tell how many rounds and how much time it saves compared with plain PPO.",
    ),
    "sweep": Home("sweep:sweep", "Run many comparisons from one file: environments, arms, shares to drop and seeds."),
    "table": Home(
        "table:table",
        "Tabulate what a sweep has finished, beside LDA's figures: tables.md, summary.json and curves as SVG.",
    ),
    "diff": Home(
        "diff:diff",
        "Compare a sweep's runs with those of another directory, value by value, and tell which differ and from when "
        "on.",
    ),
    "attribute": Home("attribute:attribute", "Tell which records of a round raised a target, and which lowered it."),
    "report": Home("report:report", "Write the page of a run or a comparison: one HTML file that needs no network."),
    "list": Home("list:list_", "Name the arms, presets, engines and targets there are."),
    "counterfactual": Home(
        "counterfactual:counterfactual",
        "Train a recorded round again without records, and tell how well each score predicts what comes of it.",
    ),
    "intervene": Home(
        "intervene:intervene",
        "Train recorded rounds again without the records that score below 0, and tell what that does to test returns.",
    ),
    "doctor": Home(
        "doctor:doctor",
        "Check this installation: versions, extras, and every engine against the plain loop on small networks.",
    ),
}

LLM_COMMANDS: Mapping[str, Home] = {
    "train": Home("llm_train:train", "Train a language model on the responses that help, with PPO, GRPO or RLOO."),
    "compare": Home(
        "llm_compare:compare",
        "Train each selection on each seed, and tell what it gains and costs compared with training on every response.",
    ),
}

_STYLE: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False, "rich_markup_mode": "markdown"}


def _lazy_group(homes: Mapping[str, Home]) -> type[TyperGroup]:
    """Return a group whose commands are imported when they are called, and not for its help."""

    class LazyGroup(TyperGroup):
        """Commands, of which the help shows the first sentences alone."""

        _lists = False

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if self._lists or cmd_name not in homes:
                return super().get_command(ctx, cmd_name)
            return load_command(cmd_name, homes[cmd_name])

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self._lists = True
            try:
                super().format_help(ctx, formatter)
            finally:
                self._lists = False

        def invoke(self, ctx: Any) -> Any:
            # Commands that say more on Ctrl-C than this do so themselves.
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                errors.print("Interrupted.")
                raise typer.Exit(130) from None

    return LazyGroup


def load_command(name: str, home: Home) -> Any:
    """Return a command, importing its module."""
    module, _, function = home.function.partition(":")
    alone = typer.Typer(**_STYLE)
    alone.command(name)(getattr(import_module(f"whence.cli.{module}"), function))
    command = get_command(alone)
    command.name = name
    return command


def _add_commands(group: typer.Typer, homes: Mapping[str, Home]) -> None:
    for name, home in homes.items():
        group.command(name, help=home.about)(lambda: None)


app = typer.Typer(
    cls=_lazy_group(COMMANDS),
    help="Which records of a rollout helped the policy, which harmed it; and training on the right ones.",
    epilog="Begin with: whence train CartPole-v1 --selection iif. The documentation is in docs/ of the source tree.",
    no_args_is_help=True,
    **_STYLE,
)
llm = typer.Typer(
    cls=_lazy_group(LLM_COMMANDS),
    help="Post-train a language model with PPO, GRPO or RLOO on the responses that help.",
    no_args_is_help=True,
    **_STYLE,
)
_add_commands(app, COMMANDS)
_add_commands(llm, LLM_COMMANDS)
app.add_typer(llm, name="llm")


def _show_version(show: bool) -> None:
    if show:
        print_line(f"whence {version('whence')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options that stand before the command."""
    _state["debug"] = debug


_state = {"debug": False}


def main() -> None:
    """Run the command. Errors are shown without a traceback, unless --debug asks for one."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, so that workers end too
    try:
        app()
    except WhenceError as error:
        if _state["debug"]:
            raise
        errors.print(f"[bold red]Error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        if _state["debug"]:
            raise
        text = f"{type(error).__name__}: {error}".strip()
        again = "This is no error that whence expects: `whence --debug ...` shows where it arose."
        errors.print(f"[bold red]Error[/]: {escape(text)}\n{again}", highlight=False, soft_wrap=True)
        sys.exit(1)
