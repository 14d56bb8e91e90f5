"""`whence view`."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from whence.cli.commands.report_command import find_runs
from whence.cli.console import print_line
from whence.cli.options import ReplayEnv
from whence.errors import WhenceError
from whence.page.moment_view import CONTINUATIONS


def view(
    run: Annotated[Path, typer.Argument(help="A run directory, or the directory of a comparison.")],
    other: Annotated[
        Path | None, typer.Argument(help="Another run, to be shown side by side.", show_default=False)
    ] = None,
    env: ReplayEnv = None,
    host: Annotated[str, typer.Option(help="An address of this machine; no other is served.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 picks a free one.", min=0, max=65535)] = 0,
    continuations: Annotated[
        int,
        typer.Option(help="Fresh rollouts by which an opened record's advantage is measured; 0: none.", min=0),
    ] = CONTINUATIONS,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
) -> None:
    """Serve the page of a run on this machine, live while training goes on, until Ctrl-C.

    Every round, record and frame can be opened. Nothing is written, and no other machine is answered.

    Example: whence view runs/lander
    """
    try:
        from whence.page.server import serve
    except ModuleNotFoundError as missing:
        raise WhenceError(f"whence view needs {missing.name}. Install whence[cli].") from None

    runs = [explored for path in (run, other) if path is not None for explored in find_runs(path, env)]

    def announce(url: str) -> None:
        print_line(f"{url}  (Ctrl-C ends it)")
        if browser:
            webbrowser.open(url)

    serve(runs, host=host, port=port, continuations=continuations, on_start=announce)
    print_line("Ended.")
