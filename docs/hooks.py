"""What MkDocs adds while it builds: the commands and the names in logs, from the code itself; the gallery's pages."""

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

from whence.cli.app import app
from whence.stored.logs import AGENT_NAMES, LANGUAGE_NAMES, Names

MARK = "<!-- commands -->"
LOGS_MARK = "<!-- names in logs -->"


def describe_commands() -> str:
    """Return a section for each command: its docstring, its arguments and its options."""
    group = get_command(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="whence"), name="whence")
    sections = re.sub(r"^#+ `(whence [^`]+)`", r"## \1", text, flags=re.MULTILINE)
    return sections[sections.index("## whence ") :]


def tabulate_names(title: str, names: Names) -> str:
    """Return a table of the logged names that each column of a run's metrics is read from."""
    rows = [
        f"| `{column}` | {change} | {', '.join(f'`{name}`' for name in logged)} |"
        for (column, change), logged in names.items()
    ]
    return "\n".join([f"### {title}", "", "| column | of a logged x | names |", "| --- | --- | --- |", *rows, ""])


def describe_names() -> str:
    """Return the tables of all names that are read in logs."""
    libraries = {"Stable-Baselines3, CleanRL and rsl_rl": AGENT_NAMES, "TRL, verl and OpenRLHF": LANGUAGE_NAMES}
    return "\n".join(tabulate_names(title, names) for title, names in libraries.items())


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands and the names in logs in the place of their marks."""
    for mark, describe in ((MARK, describe_commands), (LOGS_MARK, describe_names)):
        if mark in markdown:
            markdown = markdown.replace(mark, describe())
    return markdown


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages of the gallery, which `make docs` writes before."""
    for page in sorted(Path("out/gallery").glob("*.html")):
        files.append(File.generated(config, f"gallery/{page.name}", abs_src_path=str(page.resolve())))
    return files
