"""The catalogue of wrong inputs, and its page: `python tests/catalogue.py` writes docs/reference/errors.md."""

import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reference" / "errors.md"

HEAD = """# Errors

What goes wrong, and what whence says: what came, what is needed, how to fix it. Search this page
for the words that you see. `…` stands for text of other libraries, or for a list that is cut off.

- The command ends with exit code 2 and shows no traceback; `whence --debug COMMAND` shows one.
- The library raises subclasses of `whence.WhenceError`, which is a `ValueError`.
- A test makes each of these mistakes and compares the message. The page is made of the test's
  table, `tests/catalogue.toml` in the source tree, by `python tests/catalogue.py`.
"""

GROUPS = {
    "Training": "Of `whence train`.",
    "Comparing": "Of `whence compare` and `whence sweep`.",
    "Sweep files": "The files of `whence sweep`.",
    "Environments": "Environments that are wrong while a run trains.",
    "Language models": "Of `whence llm train`, `whence llm compare` and `whence llm why`.",
    "Reading runs": "Commands that read a run or a comparison.",
    "Python": "Calls of the library: `view` is a policy's view, `records` are its records.",
}
"""The page's parts, with what they are of."""


@dataclass(frozen=True)
class Wrong:
    """One mistake: a command line, a sweep file, an environment or a call, and the whole message.

    Attributes:
        title: the mistake.
        group: the page's part.
        message: what is said, in one line; "…" stands for any text.
        command: arguments of the command, as a shell reads them.
        sweep: the text of a sweep file.
        environment: what is wrong in an environment.
        python: an expression.
        exit_code: of the command.
    """

    title: str
    group: str
    message: str
    command: str | None = None
    sweep: str | None = None
    environment: str | None = None
    python: str | None = None
    exit_code: int = 2

    @property
    def done(self) -> str:
        """What was done, as the page shows it."""
        if self.command is not None:
            return f"whence {self.command}"
        if self.environment is not None:
            return f"whence train ENV, where ENV has {self.title}"
        return str(self.sweep or self.python).strip()


def load_catalogue() -> list[Wrong]:
    """Return the catalogue, in the order of its file."""
    table = tomllib.loads((HERE / "catalogue.toml").read_text(encoding="utf-8"))
    return [Wrong(**row) for row in table["wrong"]]


def describe_page(catalogue: Sequence[Wrong]) -> str:
    """Return the page of a catalogue."""
    parts = [HEAD]
    for group, about in GROUPS.items():
        parts.append(f"\n## {group}\n\n{about}\n")
        for wrong in (each for each in catalogue if each.group == group):
            done = "\n".join(line for text in wrong.done.splitlines() for line in textwrap.wrap(text, 98) or [""])
            said = textwrap.fill(wrong.message, 96, initial_indent="> ", subsequent_indent="> ", break_on_hyphens=False)
            parts.append(f"\n{wrong.title[:1].upper()}{wrong.title[1:]}:\n\n```text\n{done}\n\n{said}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(describe_page(load_catalogue()), encoding="utf-8")
