"""The application that the commands belong to, and how its errors end."""

import signal
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from whence.cli.output import errors, line
from whence.errors import WhenceError


class _Commands(TyperGroup):
    """Commands that say more on Ctrl-C than this do so themselves."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            errors.print("Interrupted.")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Which records of a rollout helped the policy, which harmed it; and training on the right ones.",
    epilog="Begin with: whence train CartPole-v1 --selection iif. The documentation is in docs/ of the source tree.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)


def _show_version(asked: bool) -> None:
    if asked:
        line(f"whence {version('whence')}")
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
