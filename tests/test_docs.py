"""What the documentation shows is what runs."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import whence
from whence import cli, policies
from whence.engines import auto, rules
from whence.experiments import ARMS, HYPERPARAMETERS, PARTS, PLAIN, read_sweep

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
_TOP = typer.main.get_command(cli.app).commands
COMMANDS = {
    name: command
    for top, group in _TOP.items()
    for name, command in (
        {f"{top} {inner}": one for inner, one in group.commands.items()} if hasattr(group, "commands") else {top: group}
    ).items()
}

# What makes the commands of the first page quick; the last value of an option counts.
TINY = {
    "train": "--rounds 2 --n-steps 64 --n-epochs 1",
    "compare": "--arms ppo,iif --seeds 1 --rounds 1 --eval-episodes 2 --workers 1",
}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], flags=re.DOTALL | re.MULTILINE)


def commands(page):
    """The arguments of the `whence ...` lines in the page's shell blocks."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [named(shlex.split(line, comments=True)[1:]) for line in lines if line.startswith("whence ")]


def named(arguments):
    """Make one of a group and its command."""
    inner = " ".join(arguments[:2])
    return [inner, *arguments[2:]] if inner in COMMANDS else arguments


def spoken(page):
    """The arguments of every `whence ...` in the page's text."""
    return [named(shlex.split(code)) for code in re.findall(r"`whence ([^`\n]+)`", PAGES[page])]


def options(command):
    return {option for parameter in COMMANDS[command].params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty directory, and what a page registers is forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policies, "_VIEWS", dict(policies._VIEWS))
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # SB3 warns of small policies on a GPU
    engines = set(auto._ENGINES)
    yield tmp_path
    for name in set(auto._ENGINES) - engines:
        del auto._ENGINES[name]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_blocks_run_one_after_the_other(page, elsewhere):
    names = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{page}.md, block {number}", "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_shell_blocks_hold_commands_that_parse(page):
    for name, *arguments in commands(page):
        COMMANDS[name].make_context(name, arguments)


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_named_in_the_text_are_there(page):
    for arguments in spoken(page):
        name = next((argument for argument in arguments if not argument.startswith("--")), None)
        known = options(name) if name in COMMANDS else {"--debug", "--version", "--help"}
        assert name in (*COMMANDS, "COMMAND", None), arguments
        assert {argument for argument in arguments if argument.startswith("--")} <= known, arguments


def test_each_command_has_a_section_that_names_its_options_and_no_others():
    section = r"^## whence (\w+(?: \w+)?)\n(.*?)(?=^## |\Z)"
    sections = re.findall(section, PAGES["command"], flags=re.DOTALL | re.MULTILINE)
    assert [name for name, _ in sections] == list(COMMANDS)
    of_ppo = {f"--{name.replace('_', '-')}" for name in HYPERPARAMETERS}  # by SB3's names, not one by one
    for name, text in sections:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
        assert named <= options(name), name
        assert {option for option in options(name) if option.startswith("--")} - of_ppo - {"--json", "--help"} <= named


def test_the_sweep_file_can_be_run(tmp_path):
    (file,) = blocks("command", "toml")
    (tmp_path / "lake.toml").write_text(file, encoding="utf-8")
    assert {run.group for run in read_sweep(tmp_path / "lake.toml")} == {"lake", "lake-clipped"}


def test_the_arms_are_listed():
    section = PAGES["command"].partition("## The arms")[2]
    parts = [part for alike in PARTS for part in alike]
    assert re.findall(r"^\| `([\w.-]+)` \|", section, flags=re.MULTILINE) == [*PLAIN, *parts]
    named = re.findall(r"`((?:iif|mean)-[\w-]+)`", section)
    assert named
    assert {*named} <= ARMS.keys()


@pytest.mark.timeout(180)
def test_the_first_pages_commands_run(elsewhere, monkeypatch, capsys):
    said = []
    for name, *arguments in commands("index"):
        tiny = shlex.split(TINY.get(name, ""))
        monkeypatch.setattr(sys, "argv", ["whence", name, *arguments, *tiny])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said.append(capsys.readouterr().out)
        assert end.value.code == 0, said
    doctor, train, of_round, of_action, compare = said
    for text, shown in ((doctor, "All engines agree with the loop."), (train, "Page: runs/lake/report.html")):
        assert shown in text
        assert shown in PAGES["index"]
    for text in (of_round, of_action):
        assert "The 3 lowest: training on them lowers the target" in text
    assert "out/demo/report.html" in compare
    assert (elsewhere / "runs/lake/report.html").exists()
    assert (elsewhere / "out/demo/report.html").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages, by name; a warning fails the build."""
    if any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("the documentation is built where the extra `docs` is installed")
    path = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", path],
        **{"cwd": ROOT, "capture_output": True, "text": True, "env": os.environ | {"NO_MKDOCS_2_WARNING": "1"}},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return {page.stem: page.read_text(encoding="utf-8") for page in path.glob("*.html")}


def test_the_pages_build_and_load_nothing_from_elsewhere(site):
    assert set(PAGES) <= set(site)
    for name, page in site.items():
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^>]*>", page), name
        assert "--8<--" not in page, name


def test_every_public_name_is_on_the_api_page(site):
    exported = re.findall(r"import (\w+) as \1$", Path(whence.__file__).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert "attribute" in exported
    assert [name for name in exported if f'id="whence.{name}"' not in site["api"]] == []
