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

from whence.cli.console import errors, make_printable, print_line
from whence.cli.failures import explain_failure
from whence.errors import WhenceError


class Command(NamedTuple):
    """A command that is imported when it is called.

    Attributes:
        function: where its function is, as "module:function" of `whence.cli`.
        about: the first sentence of that function's docstring.
    """

    function: str
    about: str


COMMANDS: Mapping[str, Command] = {
    "train": Command("train:train", "Train PPO on the records that help, and keep what happened in a run directory."),
    "compare": Command(
        "compare:compare",
        "Train each arm on each seed, and tell how many rounds and how much time it saves compared with plain PPO.",
    ),
    "sweep": Command(
        "sweep:sweep", "Run many comparisons from one file: environments, arms, shares to drop and seeds."
    ),
    "table": Command(
        "table:table",
        "Tabulate what a sweep has finished, next to LDA's figures: tables.md, summary.json and curves as SVG.",
    ),
    "attribute": Command("attribute:attribute", "Tell which records of a round raised a target, and which lowered it."),
    "show": Command(
        "show:show", "Show one moment of a run: what the agent saw and did, what it scored, and what the round changed."
    ),
    "diagnose": Command("diagnose:diagnose", "Tell whether the advantages were wrong in the records that harm."),
    "phases": Command(
        "phases:phases",
        "Tell when a behaviour arose and from which records: its probability, its scores' roughness, its phases.",
    ),
    "why": Command(
        "why:why",
        "Tell what taught the present policy a decision: the moments of all rounds that raised its probability.",
    ),
    "view": Command("view:view", "Serve the page of a run on this machine, live while training goes on, until Ctrl-C."),
    "report": Command("report:report", "Write the page of a run or a comparison: one HTML file that needs no network."),
    "list": Command("list:list_", "Name the arms, presets, engines and targets there are."),
    "counterfactual": Command(
        "counterfactual:counterfactual",
        "Train a recorded round again without records, and tell how well each score predicts what comes of it.",
    ),
    "intervene": Command(
        "intervene:intervene",
        "Train recorded rounds again without the records that score below 0, and tell what that does to test returns.",
    ),
    "doctor": Command(
        "doctor:doctor",
        "Check this installation: versions, extras, and every engine against the plain loop on small networks.",
    ),
}

LLM_COMMANDS: Mapping[str, Command] = {
    "train": Command("llm_train:train", "Train a language model on the responses that help, with PPO, GRPO or RLOO."),
    "compare": Command(
        "llm_compare:compare",
        "Train each selection on each seed, and tell what it gains and costs compared with training on every response.",
    ),
    "why": Command(
        "llm_why:why",
        "Show which tokens of a response its score comes from; or what taught the model an answer.",
    ),
}

_STYLE: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False, "rich_markup_mode": "markdown"}


def _make_lazy_group(commands: Mapping[str, Command]) -> type[TyperGroup]:
    """Return the class of a group whose commands are imported when they are called, and not for its help."""

    class LazyGroup(TyperGroup):
        """A group whose help shows the commands' first sentences."""

        _formats_help = False

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if self._formats_help or cmd_name not in commands:
                return super().get_command(ctx, cmd_name)
            return load_command(cmd_name, commands[cmd_name])

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self._formats_help = True
            try:
                super().format_help(ctx, formatter)
            finally:
                self._formats_help = False

        def invoke(self, ctx: Any) -> Any:
            # Commands that say more than this on Ctrl-C end before it.
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                errors.print("Interrupted.")
                raise typer.Exit(130) from None

    return LazyGroup


def load_command(name: str, command: Command) -> Any:
    """Import a command's module and return it as Typer makes it."""
    module, _, function = command.function.partition(":")
    single = typer.Typer(**_STYLE)
    single.command(name)(getattr(import_module(f"whence.cli.{module}"), function))
    loaded = get_command(single)
    loaded.name = name
    return loaded


def _add_placeholders(group: typer.Typer, commands: Mapping[str, Command]) -> None:
    """Add the names and first sentences that a group's help lists."""
    for name, command in commands.items():
        group.command(name, help=command.about)(lambda: None)


app = typer.Typer(
    cls=_make_lazy_group(COMMANDS),
    help="Which records of a rollout helped the policy, which harmed it; and training on the right ones.",
    epilog="Begin with: whence train CartPole-v1 --selection iif. The documentation is in docs/ of the source tree.",
    no_args_is_help=True,
    **_STYLE,
)
llm = typer.Typer(
    cls=_make_lazy_group(LLM_COMMANDS),
    help="Post-train a language model with PPO, GRPO or RLOO on the responses that help.",
    no_args_is_help=True,
    **_STYLE,
)
_add_placeholders(app, COMMANDS)
_add_placeholders(llm, LLM_COMMANDS)
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
    """Read the options that stand before the command."""
    _state["debug"] = debug


_state = {"debug": False}


def main() -> None:
    """Run the command. Errors are shown without a traceback, unless --debug asks for one."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, so that workers end too
    try:
        app()
    except Exception as error:
        if _state["debug"]:
            raise
        message = str(error) if isinstance(error, WhenceError) else explain_failure(error)
        if message is not None:
            _print_error(message)
            sys.exit(2)
        _print_error(
            f"{type(error).__name__}: {error}".strip()
            + "\nThis is no error that whence expects: `whence --debug ...` shows where it arose."
        )
        sys.exit(1)


def _print_error(message: str) -> None:
    errors.print(f"[bold red]Error[/]: {escape(make_printable(message))}", highlight=False, soft_wrap=True)
