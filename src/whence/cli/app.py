"""The application: its commands, each loaded when it is called, and how its errors end."""

import ast
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup
from typer.main import get_command

from whence.cli.terminal import HAS_LABORATORY, errors, make_printable, print_line
from whence.core import WhenceError, library_versions

LABORATORY = ("train_command", "sweep_command")
"""The modules of the laboratory's commands, which are absent without it."""


def _list_commands(**places: str) -> Mapping[str, str]:
    """Return the commands that there are, and where the function of each is: "module:function" of the commands."""
    return {name: place for name, place in places.items() if HAS_LABORATORY or not place.startswith(LABORATORY)}


COMMANDS = _list_commands(
    train="train_command:train",
    compare="train_command:compare",
    sweep="sweep_command:sweep",
    table="sweep_command:table",
    attribute="attribute_command:attribute",
    show="show_command:show",
    **{"import": "import_command:import_"},  # a word of Python's
    diff="diff_command:diff",
    findings="findings_command:findings",
    audit="audit_command:audit",
    why="why_command:why",
    view="report_command:view",
    report="report_command:report",
    list="list_command:list_",
    prove="prove_command:prove",
    again="prove_command:again",
)
LLM_COMMANDS = _list_commands(
    train="train_command:train_language", compare="train_command:compare_language", score="llm_score_command:score"
)

_STYLE: dict[str, Any] = {"pretty_exceptions_enable": False, "add_completion": False, "rich_markup_mode": "markdown"}


def _make_lazy_group(commands: Mapping[str, str]) -> type[TyperGroup]:
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


def load_command(name: str, place: str) -> Any:
    """Import a command's module and return it as Typer makes it."""
    module, _, function = place.partition(":")
    single = typer.Typer(**_STYLE)
    single.command(name)(getattr(import_module(f"whence.cli.commands.{module}"), function))
    loaded = get_command(single)
    loaded.name = name
    return loaded


def _make_group(commands: Mapping[str, str], **settings: Any) -> typer.Typer:
    """Return a group with the names and the first sentences of its commands, which its help lists.

    The sentences are read without importing the commands' modules, which may take seconds.
    """
    group = typer.Typer(cls=_make_lazy_group(commands), no_args_is_help=True, **settings, **_STYLE)
    for name, place in commands.items():
        module, _, function = place.partition(":")
        tree = ast.parse((Path(__file__).parent / f"commands/{module}.py").read_text(encoding="utf-8"))
        definitions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        sentence = (ast.get_docstring(definitions[function]) or "").partition("\n\n")[0]
        panel = "Laboratory" if module in LABORATORY else None
        group.command(name, help=sentence, rich_help_panel=panel)(lambda: None)
    return group


_BEGINNING = "Begin with: whence train CartPole-v1 --selection iif. " if HAS_LABORATORY else ""

app = _make_group(
    COMMANDS,
    help="Which records of a rollout helped the policy, which harmed it; and training on the right ones.",
    epilog=f"{_BEGINNING}The documentation is in docs/ of the source tree.",
)
app.add_typer(
    _make_group(LLM_COMMANDS, help="Post-train a language model with PPO, GRPO or RLOO on the responses that help."),
    name="llm",
)


def _show_version(show: bool) -> None:
    if show:
        print_line(f"whence {library_versions(['whence'])['whence']}")
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # where a locale's encoding lacks a character
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, so that workers end too
    try:
        app()
    except Exception as error:
        if _state["debug"]:
            raise
        message = str(error) if isinstance(error, WhenceError) else _explain_failure(error)
        unexpected = (
            f"{type(error).__name__}: {error}".strip()
            + "\nThis is no error that whence expects: `whence --debug ...` shows where it arose."
        )
        text = escape(make_printable(message or unexpected))
        errors.print(f"[bold red]Error[/]: {text}", highlight=False, soft_wrap=True)
        sys.exit(1 if message is None else 2)


def _explain_failure(error: Exception) -> str | None:
    """Return what failed and how to fix it, in words; None if the error is of another kind."""
    if isinstance(error, ModuleNotFoundError):
        return (
            f"Python finds no module {error.name!r}. Install the package that holds it, or add the directory that it "
            f"is in: PYTHONPATH=DIRECTORY whence ..."
        )
    if isinstance(error, OSError):
        path = "A file" if error.filename is None else str(error.filename)
        reason = error.strerror or str(error) or type(error).__name__
        return f"{path} cannot be used: {reason}. Check its name, its permissions and the disk that it is on."
    return None
