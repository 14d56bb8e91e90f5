"""`whence report` and `whence view`: a page in a file, and the same page served."""

import webbrowser
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

import typer

from whence.cli import terminal
from whence.cli.terminal import options
from whence.core import WhenceError
from whence.page import CONTINUATIONS, ExploredRun, write_report
from whence.runs import RunDirectory, find_content

Others: TypeAlias = Annotated[
    list[Path] | None, typer.Argument(help="Further runs, to be compared on one page.", show_default=False)
]


def report(
    path: Annotated[Path, typer.Argument(help="A run directory, or the directory of a comparison.")],
    others: Others = None,
    out: Annotated[Path | None, options.optional(help="The file to write. (default: report.html in PATH)")] = None,
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
    trust: options.Trust = False,
    rounds: Annotated[
        str | None,
        options.optional(
            help="Rounds to embed, such as 1,5,10-50:10. (default: 24 and those of findings; of several runs 12 each)"
        ),
    ] = None,
    json: options.AsJson = False,
) -> None:
    """Write the page of runs or a comparison: one HTML file that needs no network.

    It shows the rounds so far if a run is not finished. `whence view` serves the same page, live, with every record.

    Example: whence report runs/lander
    """
    if others and out is None:
        raise WhenceError("The page of several runs belongs to none of them. Name its file: --out compared.html.")
    out = out or path / "report.html"
    if out.suffix.lower() not in (".html", ".htm") or out.is_dir():
        raise WhenceError(f"--out is {out}; name the file to write, such as {out.stem or 'report'}.html.")
    chosen = None if rounds is None else terminal.parse_rounds("--rounds", rounds)
    with terminal.RoundBar() as bar:
        if not others and find_content(path) == "comparison":
            terminal.require_laboratory("The page of a comparison")
            from whence import lab

            comparison = lab.load_comparison(path, trust=trust)
            lab.write_comparison(comparison, out, env=env, rounds=chosen, on_round=bar.update)
        else:
            runs = _open_runs([path, *(others or ())], env, trust=trust)
            write_report(runs, out, rounds=chosen, on_round=bar.update)
    if json:
        terminal.print_json({"path": str(out)})
    else:
        terminal.print_line(str(out))


def view(
    run: Annotated[Path, typer.Argument(help="A run directory, or the directory of a comparison.")],
    others: Others = None,
    env: options.ReplayEnv = None,
    policy: options.PolicyClass = None,
    trust: options.Trust = False,
    port: Annotated[
        int | None, options.optional(help="0 picks a free one. (default: the run's own)", min=0, max=65535)
    ] = None,
    continuations: Annotated[
        int, typer.Option(help="Fresh rollouts by which an opened record's advantage is measured; 0: none.", min=0)
    ] = CONTINUATIONS,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in the browser.")] = True,
    json: options.AsJson = False,
) -> None:
    """Serve the page of a run on this machine, live while training goes on, until Ctrl-C.

    Every round, record and frame can be opened, and records flagged. No other machine is answered. --json prints one
    line once the page is served.

    Example: whence view runs/lander
    """
    from whence.page import server  # a report needs no server's libraries

    runs = _open_runs([run, *(others or ())], env, trust=trust)

    def announce(url: str) -> None:
        if json:
            content = {"url": url, "port": urlsplit(url).port, "runs": [str(each.directory.path) for each in runs]}
            terminal.print_json(content, indent=None)
        else:
            terminal.print_line(f"{url}  (Ctrl-C ends it)")
        if browser:
            webbrowser.open(url)

    server.serve(runs, port=port, continuations=continuations, on_start=announce)
    if not json:
        terminal.print_line("Ended.")


def _open_runs(paths: list[Path], env: str | None, *, trust: bool) -> list[ExploredRun]:
    """Return runs, and those of comparisons, by names that differ."""
    directories = [RunDirectory.open(each, trust=trust) for path in paths for each in _list_runs(path)]
    runs = [ExploredRun(directory, env=env, about=terminal.describe_training(directory)) for directory in directories]
    if len({each.label for each in runs}) < len(runs):  # lists and figures tell runs apart by their names
        for each in runs:
            each.label = str(each.directory.path)
    return runs


def _list_runs(path: Path) -> list[Path]:
    """Return the directory of a run, or those of a comparison's runs, finished or not."""
    if find_content(path) != "comparison":
        return [path]
    directories = sorted(config.parent for config in (path / "runs").glob("*/seed_*/config.json"))
    if not directories:
        raise WhenceError(f"{path} holds a comparison whose runs are gone. Run its `whence compare` again.")
    return directories
