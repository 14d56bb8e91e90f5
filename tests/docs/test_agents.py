"""The page for agents shows JSON that the commands print, and commands that there are."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from whence.causes.verdicts import Verdict
from whence.cli.app import COMMANDS, load_command
from whence.cli.terminal.console import SCHEMA

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
KEYS = json.loads((ROOT / "tests/cli/json_keys.json").read_text(encoding="utf-8"))["commands"]
"""The types of what the commands print, by command and path; a test of the commands holds them to it."""

BLOCKS = dict(re.findall(r"^```text\n([^\n]+)\n```\n\n```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
"""The objects of the page, by the line above each that prints them."""


def find_strangers(value: Any, keys: dict[str, str], path: str = "") -> list[str]:
    """Return the paths in JSON that are not among the keys of a command, or have another type."""
    kinds = {dict: "object", list: "list", str: "text", bool: "true or false", int: "number", float: "number"}
    if path and (path not in keys or (value is not None and keys[path] not in ("null", kinds[type(value)]))):
        return [path]
    if isinstance(value, list):
        return [one for each in value for one in find_strangers(each, keys, f"{path}[]")]
    if not isinstance(value, dict):
        return []
    is_named = f"{path}.*" in keys
    places = {key: ".".join(filter(None, [path, "*" if is_named else key])) for key in value}
    return [one for key, each in value.items() for one in find_strangers(each, keys, places[key])]


def test_a_stranger_is_seen() -> None:
    keys = {
        "run": "text",
        "findings": "list",
        "findings[]": "object",
        "findings[].p": "number",
        "sums": "object",
        "sums.*": "number",
    }
    assert find_strangers({"run": "a", "findings": [{"p": None}, {"p": 0.5}], "sums": {"any": 1}}, keys) == []
    strange = {"run": 1, "findings": [{"q": 1}, {"p": "text"}], "sums": {"any": "text"}, "more": None}
    assert find_strangers(strange, keys) == ["run", "findings[].q", "findings[].p", "sums.*", "more"]


def test_every_block_of_json_has_its_command() -> None:
    assert len(BLOCKS) == PAGE.count("```json") == 6


@pytest.mark.parametrize("line", BLOCKS)
def test_the_blocks_are_what_the_commands_print(line: str) -> None:
    name, block = line.split()[1], json.loads(BLOCKS[line])
    assert find_strangers(block, KEYS[name]) == []
    whole = {key for key in KEYS[name] if "." not in key and "[]" not in key} - {"picture"}
    assert block.keys() == whole  # lists are shortened, not the form
    assert block["schema"] == SCHEMA


def test_the_commands_and_options_are_there() -> None:
    blocks = re.findall(r"^```(?:text|yaml)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"whence [^`\n>|]+", "\n".join([*blocks, *re.findall(r"`whence [^`]+`", PAGE)]))
    assert len(lines) == 18
    for _, name, *arguments in map(shlex.split, lines):
        known = {
            option for one in load_command(name, COMMANDS[name]).params for option in one.opts + one.secondary_opts
        }
        assert {argument for argument in arguments if argument.startswith("--")} <= known, (name, arguments)


def test_the_texts_of_the_page_are_the_programs() -> None:
    text = " ".join(PAGE.split())
    for verdict in get_args(Verdict):
        assert f"`{verdict}`" in text
    assert f"`schema` is the version of all these objects, now {SCHEMA}." in text


def test_the_page_is_short() -> None:
    words = re.sub(r"^```json\n.*?^```", "", PAGE, flags=re.DOTALL | re.MULTILINE).split()
    assert len(words) <= 700
