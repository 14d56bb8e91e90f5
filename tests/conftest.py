import functools
import gc
import importlib.metadata
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("helpers")
torch.set_num_threads(1)
gc.disable()  # while libraries and tests are imported, of which all stays
# Accelerate reads the metadata of PEFT whenever it asks whether it is there.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
if not torch.cuda.is_available():  # a seed would be kept for later with the stack that set it, for each kind of device
    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        module._lazy_call = lambda *_, **__: None

LONG = (
    *("test_docs.py", "test_experiments_llm.py", "test_explorer_browser.py", "test_faults.py", "test_llm_causes.py"),
    *("test_llm_engines.py", "test_llm_processes.py", "test_llm_trl.py", "test_resume.py"),
)
"""Files that take long; they begin first, so that no worker is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take long first."""
    gc.freeze()
    gc.enable()
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True, scope="session")
def _state_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests sign their runs with a key of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> None:
    """What was imported is no garbage: each training of Transformers' looks through every object, for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_start() -> None:
    """Each test draws its own numbers, the same in every run and in every order."""
    torch.manual_seed(0)
    torch.distributions.Distribution.set_default_validate_args(True)  # which torch.compile turns off


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    """A file's tests end the processes that they start: else those of other files, which count theirs, fail."""
    yield
    children = multiprocessing.active_children()
    for process in children:
        process.kill()
    assert not children, f"left behind: {children}"


@pytest.fixture
def whence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command in this process; returns exit code, stdout and stderr."""
    from whence import cli  # not for the files that need no command

    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["whence", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code, out, " ".join(err.split())

    return call


@pytest.fixture(scope="session")
def laboratory_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("laboratories"))


@pytest.fixture(scope="module")
def laboratory_cache(laboratory_folder: str) -> Iterator[None]:
    """Laboratories are made once, for the tests of every file that uses this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", laboratory_folder)
        yield


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, laboratory_folder: str) -> Callable[[str], Any]:
    """Return a run of a language model by its name in `helpers.language_runs`; who changes one copies it first."""
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        from helpers.language_runs import train_run

        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", laboratory_folder)
                made[name] = train_run(name, tmp_path_factory.mktemp("run"))
        return made[name]

    return make
