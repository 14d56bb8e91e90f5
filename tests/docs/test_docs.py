"""What the documentation shows is what runs."""

import importlib
import importlib.util
import re
import shlex
import sys
from contextlib import closing
from functools import partialmethod
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from stable_baselines3 import PPO

from helpers.launching import run_one_by_one
from whence import RunDirectory, cli
from whence.cli.app import COMMANDS as TOP_COMMANDS
from whence.cli.app import LLM_COMMANDS, load_command
from whence.core import policies
from whence.engines import auto, rules
from whence.lab import read_sweep
from whence.lab.arms import ARMS, read_presets

pytest.importorskip("Box2D")  # before EnvPool: see Pool.make

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
} | {"README": (ROOT / "README.md").read_text(encoding="utf-8")}
COMMANDS = {name: load_command(name, home) for name, home in TOP_COMMANDS.items()} | {
    f"llm {name}": load_command(name, home) for name, home in LLM_COMMANDS.items()
}

LONG_PAGES = ("reference/command", "guide/tuning", "guide/llm", "guide/trust", "guide/compare", "guide/filter")
LONG_PAGES += ("index", "guide/diff", "guide/reliability", "guide/rollouts", "guide/scale")

STEPS = 64
"""Of an environment in a round, for the commands; rounds of the pages have 2048 records."""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], flags=re.DOTALL | re.MULTILINE)


def command_lines(page, language="bash"):
    """The arguments of the `whence ...` lines in the page's blocks."""
    lines = "\n".join(blocks(page, language)).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line) for line in lines]
    return [join_names(shlex.split(line, comments=True)[1:]) for line in lines if line.startswith("whence ")]


def join_names(arguments):
    """Make one of a group and its command."""
    both = " ".join(arguments[:2])
    return [both, *arguments[2:]] if both in COMMANDS else arguments


def sweep_files(page):
    """The page's sweep files, each with the name that its commands call it by."""
    names = dict.fromkeys(arguments[0] for name, *arguments in command_lines(page) if name == "sweep")
    return list(zip(names, blocks(page, "toml"), strict=True))


def directories_of(name, arguments):
    """The directory that a command writes, if it writes one."""
    options = dict(pairwise(arguments))
    if name in ("compare", "sweep", "llm compare"):
        default = {"compare": "out/compare", "llm compare": "out/llm"}.get(name) or f"out/{Path(arguments[0]).stem}"
        return [options.get("--out", default)]
    if name not in ("train", "llm train"):
        return []
    env = read_presets()[options["--preset"]]["env"] if "--preset" in options else options.get("--task", arguments[0])
    return [options.get("--run", f"runs/{env}-{options.get('--selection', 'iif')}-seed0")]


def written_places(page):
    """Pairs of a directory or a file, and what the page writes there: a command, a script or a file's text."""
    for name, *arguments in command_lines(page) + command_lines(page, "text"):
        command = " ".join([name, *arguments]).replace(" --overwrite", "")
        yield from ((directory, command) for directory in directories_of(name, arguments))
    writing = re.compile(r"(?:\brun=|PPOConfig\(|\brun\(config, |compare\(runs, )(?:Path\()?\"([^\"]+)\"")
    for number, block in enumerate(blocks(page, "python"), start=1):
        yield from ((directory, f"{page}, script {number}") for directory in writing.findall(block))
    yield from sweep_files(page)


def quoted_commands(page):
    """The arguments of every `whence ...` in the page's text."""
    text = re.sub(r"^```text\n.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)  # what goes wrong
    return [join_names(shlex.split(code)) for code in re.findall(r"`whence ([^`\n]+)`", text)]


def option_names(command):
    return {option for parameter in COMMANDS[command].params for option in (*parameter.opts, *parameter.secondary_opts)}


def shorten(name, arguments):
    """Return a command's arguments with small numbers in the place of large ones."""
    line = shlex.join(arguments)
    if name == "train":
        rounds = 5 if re.search(r"runs/(lake|lander|plain|recorded)( |$)", line) else 1  # a page asks for the fifth
        line = re.sub(r"--rounds \d+", f"--rounds {rounds}", line).replace("--timesteps 500000", "--timesteps 512")
        line = line.replace("--record-rounds 1-10", f"--record-rounds 1-{rounds}")
        line = line.replace("LunarLander-v3", "CartPole-v1")
        line += " --n-epochs 1" + ("" if "n_steps" in line else f" --n-steps {STEPS}")
        line += "" if re.search("--rounds|--timesteps", line) else f" --rounds {rounds}"
        line += " --eval-episodes 2" if "--eval-episodes" in line else ""
    elif name == "compare":
        line += f" --arms ppo,iif --seeds 1 --rounds 1 --eval-episodes 2 --workers 1 --n-steps {STEPS}"
    elif name == "prove":
        line += " --seeds 1" + ("" if "--prompt" in line else " --test-episodes 2")
    elif name == "sweep":
        line += " --workers 1"
    elif name in ("llm train", "llm compare"):
        line += " --size tiny --rounds 1"
        line += " --arms none,iif-sequence --seeds 1 --workers 1" if name == "llm compare" else ""
    return shlex.split(line)


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
@pytest.mark.parametrize(
    "page",
    [
        # The index's is the README's in another environment.
        pytest.param(page, marks=pytest.mark.long if page == "index" else ())
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_the_python_blocks_run_one_after_the_other(page, elsewhere, monkeypatch):
    monkeypatch.setattr("whence.lab.cluster.run_all", run_one_by_one)
    monkeypatch.setattr(PPO, "__init__", partialmethod(PPO.__init__, n_epochs=1))  # ten show nothing more
    names, divisors = {"__name__": "__main__"}, {"n_steps=": 4, "learn(": 4}
    if page == "README":
        divisors = {"n_steps=": 8, "learn(": 32}  # ten rounds instead of forty

    def divide(number):
        return number[1] + str(int(number[2]) // divisors[number[1]])

    for number, block in enumerate(blocks(page, "python"), start=1):
        small = re.sub(r"(n_steps=|learn\()([\d_]+)", divide, block)
        exec(compile(small, f"{page}.md, block {number}", "exec"), names)
    if page == "README":
        assert "score" in RunDirectory.open(elsewhere / "runs/readme").round("records", 10).columns


def test_the_readmes_make_commands_are_the_makefiles():
    shown, makefile = "\n".join(blocks("README", "bash")), (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in shown
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("page", [page for page in PAGES if re.search(r"\b(compare|run_sweep)\(", PAGES[page])])
def test_a_script_that_starts_processes_starts_none_when_these_import_it(page, elsewhere, monkeypatch):
    monkeypatch.setattr("whence.lab.cluster.run_all", lambda *jobs: pytest.fail("a process was started"))
    for block in blocks(page, "python"):
        exec(compile(block, f"{page}.md", "exec"), {"__name__": "__mp_main__"})


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "page",
    [
        # The index, the reference and some guides repeat what others show; two guides train for long.
        pytest.param(page, marks=pytest.mark.long if page in LONG_PAGES else ())
        for page in PAGES
        if command_lines(page)
    ],
)
def test_the_pages_commands_run_one_after_the_other(page, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(
        "whence.lab.comparison.start_jobs",
        lambda jobs, workers, on, on_round: closing(run_one_by_one(jobs, workers, on_round)),
    )
    # The page is served until Ctrl-C.
    monkeypatch.setattr("whence.page.server.serve", lambda runs, *, on_start, **settings: on_start("http://127.0.0.1/"))
    monkeypatch.setattr("webbrowser.open", lambda url: None)
    for name, file in sweep_files(page):
        small = re.sub(r"^(rounds = 20|hyperparameters).*\n", "", file, flags=re.MULTILINE)
        settings = "seeds = 1\nrounds = 1\neval_episodes = 2\nhyperparameters = { n_steps = 64, n_epochs = 1 }"
        small = re.sub(r"^seeds = .*", settings, small, flags=re.MULTILINE)
        (elsewhere / name).write_text(small, encoding="utf-8")
    monkeypatch.setattr("whence.cli.terminal.console.width", 100)
    if page == "guide/record":  # its commands read what its script writes
        exec(compile(blocks(page, "python")[0], page, "exec"), {})
    printed = []
    for name, *arguments in command_lines(page):
        monkeypatch.setattr(sys, "argv", ["whence", *name.split(), *shorten(name, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        assert end.value.code == 0, (name, arguments, shown.out, shown.err)
        printed.append(shown.out)
        for path in re.findall(r"(?:Page|Run): +(\S+)", shown.out):
            assert Path(path).exists()
    if page == "guide/harmful":  # the table of the lowest and the highest looks as it is printed
        table = next(block for block in blocks(page, "text") if "record_id" in block)
        assert outline(table) == outline(printed[2])


def outline(text):
    """The text without its numbers and the lines of its frames, whose widths depend on them."""
    return [re.sub(r"[-\d., ?%e]+|[━─]+", " ", line).strip() for line in text.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_named_in_the_text_are_there(page):
    for arguments in quoted_commands(page) + command_lines(page):
        name = next((argument for argument in arguments if not argument.startswith("--")), None)
        known = option_names(name) if name in COMMANDS else {"--debug", "--version", "--help"}
        assert name in (*COMMANDS, "COMMAND", None), arguments
        assert {argument for argument in arguments if argument.startswith("--")} <= known, arguments


def test_a_reader_of_all_pages_writes_each_directory_once():
    written = [pair for page in PAGES for pair in written_places(page)]
    for command in COMMANDS.values():
        for example in re.findall(r"Example: whence (.+)", command.help):
            name, *arguments = join_names(shlex.split(example))
            written += [(place, " ".join([name, *arguments])) for place in directories_of(name, arguments)]
    places = {place: {what for other, what in written if other == place} for place, _ in written}
    assert len(places) > 30
    assert {place: whats for place, whats in places.items() if len(whats) > 1} == {}


@pytest.mark.parametrize("start", ["README", "index"])
def test_the_first_pages_name_every_guide(start):
    guides = {page for page in PAGES if page.startswith("guide/")}
    assert guides - set(re.findall(r"\]\((?:docs/)?(guide/\w+)\.md\)", PAGES[start])) == set()


@pytest.mark.parametrize("page", PAGES)
def test_prose_fits_an_editor_of_100_columns(page):
    prose = re.sub(r"^ *```.*?^ *```$", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 100 and "|" not in line] == []


def test_each_command_has_a_section_with_its_options(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    hooks = importlib.import_module("hooks")
    sections = re.split(r"^## whence ", hooks.on_page_markdown(hooks.MARK), flags=re.MULTILINE)[1:]
    texts = {text.partition("\n")[0]: text for text in sections}
    assert texts.keys() == {*COMMANDS, "llm"}
    for name in COMMANDS:
        named = set(re.findall(r"^\* `(--[a-z-]+)", texts[name], flags=re.MULTILINE))
        assert {"--help"} < named <= option_names(name) | {"--help"}, name


def test_the_sweep_file_can_be_run(tmp_path):
    (file,) = blocks("reference/command", "toml")
    (tmp_path / "lake.toml").write_text(file, encoding="utf-8")
    assert {run.group for run in read_sweep(tmp_path / "lake.toml")} == {"lake", "lake-clipped"}


def test_the_arms_are_listed():
    section = PAGES["reference/command"].partition("## The arms")[2]
    assert re.findall(r"^\| `([\w.-]+)` \|", section, flags=re.MULTILINE) == [*ARMS]


@pytest.fixture(scope="module")
def site():
    """The pages that `make docs` has built, by name."""
    path = ROOT / "out/site"
    return {
        page.relative_to(path).with_suffix("").as_posix(): page.read_text(encoding="utf-8")
        for page in path.rglob("*.html")
    }


@pytest.mark.site
def test_the_pages_load_nothing_from_elsewhere(site):
    assert PAGES.keys() - {"README"} <= site.keys()
    for name, page in site.items():
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^>]*>", page), name
        assert "--8<--" not in page, name


FACE = ("whence", *(f"whence.{room}" for room in ("sb3", "llm", "llm.trl", "stored", "causes", "lab")))
FACE = (*FACE, "whence.lab.language", "whence.lab.rounds")


def test_the_api_page_documents_exactly_the_face():
    entries = re.findall(r"^::: (\S+)$", (DOCS / "reference/api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(entries) == len(set(entries))
    modules = {name: importlib.import_module(name) for name in FACE}
    public = {f"{name}.{one}" for name, module in modules.items() for one in module.__all__}
    packages = {f"whence.{room}" for room in ("sb3", "llm", "stored", "causes")}
    functions_by_path = {"whence.llm.hooks.slime_filter", "whence.llm.hooks.slime_group_filter"}  # slime names them
    assert {*entries} == public - packages | functions_by_path


@pytest.mark.site
def test_every_name_that_the_pages_import_is_on_the_api_page(site):
    lines = [line for page in PAGES for block in blocks(page, "python") for line in block.splitlines()]
    imports = [match for line in lines if (match := re.match(r"from (whence[\w.]*) import (.+)", line))]
    names = [f"{match[1]}.{name.strip()}" for match in imports for name in match[2].split(",")]
    assert "whence.attribute" in names
    shown = {re.sub(r"(\.\w+)\1$", r"\1", name) for name in re.findall(r'id="([\w.]+)"', site["reference/api"])}
    assert sorted({*names} - shown - {"whence.lab", "whence.stored"}) == []
