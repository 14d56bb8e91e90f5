"""Faults of the mathematics, put into the sources one at a time: a named test must fail for each.

The faults are in tests/faults.toml. Each is tried in a fork of one process that has imported the libraries and not
whence, so that it costs as much as its test; the sources on the disk stay as they are.
"""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "src" / "whence"
OPTIONS = ["-x", "-p", "no:cacheprovider", "-p", "pytest_timeout", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
LIBRARIES = [
    *("filelock", "hypothesis", "jaxtyping", "lazy_loader", "polars", "pytest_timeout", "safetensors.torch"),
    *("sb3_contrib", "scipy.stats", "torch._dynamo"),
]
"""What is imported once, for all faults."""
RAN = 100
"""What is added to pytest's exit code."""


@dataclass(frozen=True)
class Fault:
    """One fault: `before` becomes `after` in a file below src/whence, and `test` must notice."""

    name: str
    file: str
    before: str
    after: str
    test: str


FAULTS = [Fault(**row) for row in tomllib.loads((TESTS / "faults.toml").read_text(encoding="utf-8"))["fault"]]


class FaultyModule(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds and loads the module of a fault, and no other."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        name = ".".join(("whence", *Path(fault.file).with_suffix("").parts)).removesuffix(".__init__")
        super().__init__(name, str(SOURCES / fault.file))

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname: str) -> Any:
        text = self.get_data(self.path).decode()
        return compile(text.replace(self.fault.before, self.fault.after), self.path, "exec")


def run_tests(fault: Fault | None, tests: list[str]) -> None:
    """Run tests in this process, which has not imported whence yet, and exit with pytest's code."""
    assert "whence" not in sys.modules
    gc.freeze()  # a collection would look through all libraries, and copy their pages
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if fault is not None:
        sys.meta_path.insert(0, FaultyModule(fault))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = pytest.main([*OPTIONS, *(f"{TESTS / test}" for test in tests)])
    os._exit(RAN + int(code))  # a process that fails by itself ends with 1, which is pytest's code for failed tests


@pytest.fixture(scope="module")
def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context


def fork(forks: Any, fault: Fault | None, tests: list[str]) -> int:
    process = forks.Process(target=run_tests, args=(fault, tests))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.long  # the suite says so as well, in another process
def test_the_named_tests_pass_without_a_fault(forks: Any) -> None:
    assert fork(forks, None, sorted({fault.test for fault in FAULTS})) == RAN + pytest.ExitCode.OK


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS])
def test_a_fault_is_noticed(forks: Any, fault: Fault) -> None:
    assert fault.before in (SOURCES / fault.file).read_text(encoding="utf-8")
    assert fork(forks, fault, [fault.test]) == RAN + pytest.ExitCode.TESTS_FAILED


def test_faults_are_few() -> None:
    assert len(FAULTS) <= 40
