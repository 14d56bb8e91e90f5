"""What MkDocs adds to the pages while it builds them: the commands' reference, from the commands themselves."""

import re
from typing import Any

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from whence.cli.app import app

MARK = "<!-- commands -->"


def describe_commands() -> str:
    """Return a section for each command: its docstring, its arguments and its options."""
    group = get_command(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="whence"), name="whence")
    sections = re.sub(r"^#+ `(whence [^`]+)`", r"## \1", text, flags=re.MULTILINE)
    return sections[sections.index("## whence ") :]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the commands in the place of their mark."""
    return markdown.replace(MARK, describe_commands()) if MARK in markdown else markdown
