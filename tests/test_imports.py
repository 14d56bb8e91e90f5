"""Which module imports which: no circles, and nothing heavy where a command has to start fast."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from whence.cli.app import COMMANDS, LLM_COMMANDS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("whence", include_external_packages=False, cache_dir=None)


def test_there_is_no_circle_of_imports_inside_functions_or_for_types_either(graph):
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    order = list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the circle
    assert len(order) == len(graph.modules)


def test_imports_inside_functions_and_for_types_are_seen(graph):
    # Otherwise the test above would hold for too little.
    assert "whence.selection" in graph.find_modules_directly_imported_by("whence.lab.arms")
    assert "whence.llm.trl.trainers" in graph.find_modules_directly_imported_by("whence.lab.language.training")


def test_every_module_of_floors_0_to_2_is_in_the_contract_that_keeps_libraries_out(graph):
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contract = next(one for one in config["contracts"] if one["name"].startswith("floors 0 to 2"))
    names = ("cli", "lab", "page", "audits", "causes", "findings", "stored", "sb3", "llm")
    above = {f"whence.{name}" for name in names}
    assert set(contract["source_modules"]) == graph.find_children("whence") - above


def test_every_annotated_shape_is_of_a_class():
    """NumPy's `NDArray[...]` is no class from 2.5 on, and jaxtyping then fails where a module is imported."""
    arrays = set()
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"]
        dtypes = {name.name for node in imports for name in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in dtypes:
                arrays.add(ast.unparse(node.slice.elts[0]))
    assert arrays == {"Tensor", "np.ndarray"}


def loaded_by(code: str) -> set[str]:
    """Return the modules that are loaded after some code ran in a new interpreter."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1].split())


def test_a_command_is_imported_when_it_is_called():
    loaded = loaded_by("from whence.cli import app\ntry: app(['list', 'arms'])\nexcept SystemExit: pass")
    modules = {
        f"whence.cli.commands.{place.partition(':')[0]}" for place in (*COMMANDS.values(), *LLM_COMMANDS.values())
    }
    assert loaded & modules == {"whence.cli.commands.list_command"}


STEPS = {
    "scoring": "import whence; whence.attribute",
    "a configuration": "from whence.lab.agents import RunConfig; from whence.stored.language import LanguageConfig\n"
    "RunConfig(env='CartPole-v1', arm='iif', seed=0)\n"
    "LanguageConfig('ippo', 0, algorithm='grpo').rounds",
    "commands": "\n".join({f"import whence.cli.commands.{place.partition(':')[0]}" for place in COMMANDS.values()}),
}
"""What one interpreter does, step after step; what it has loaded is noted after each."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Return the modules that are loaded after each of the steps."""
    code = "\n".join(["import sys", *(f"{step}\nprint(*sys.modules)" for step in STEPS.values())])
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(zip(STEPS, ({*line.split()} for line in out.splitlines()), strict=True))


def test_commands_load_no_library_that_language_models_alone_need(loaded):
    assert "whence.cli.commands.report_command" in loaded["commands"]
    assert not loaded["commands"] & {"transformers", "trl", "datasets", "accelerate", "peft"}


HEAVY = {"torch", "polars", "scipy", "stable_baselines3", "gymnasium", "transformers", "plotly", "jinja2"}


def test_help_and_lists_load_nothing_heavy():
    lines = (["--help"], ["llm", "--help"], ["list"], ["list", "arms", "--all"])
    loaded = loaded_by(
        "\n".join(f"from whence.cli import app\ntry: app({line})\nexcept SystemExit: pass" for line in lines)
    )
    assert "whence.cli.commands.list_command" in loaded
    assert not loaded & HEAVY


def test_scoring_loads_neither_statistics_nor_fsdp(loaded):
    slow = {"scipy", "torch.distributed.fsdp", "torch.distributed.tensor"}
    assert "whence.scores.attribution" in loaded["scoring"]
    assert not loaded["scoring"] & slow


def test_a_configuration_loads_no_trainer(loaded):
    trainers = {f"whence.{name}" for name in ("lab.agents.training", "lab.language.training", "sb3.callback")}
    assert "whence.stored.language" in loaded["a configuration"]
    assert not loaded["a configuration"] & (trainers | {"whence.llm.ppo.trainer", "trl", "transformers"})
