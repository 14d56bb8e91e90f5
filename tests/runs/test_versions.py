"""A run directory of each version that is read; both are of one training, by the library that wrote that version."""

from pathlib import Path
from shutil import copytree

import pytest

from whence import RunDirectory, inspect
from whence.core import RunDirectoryError
from whence.page import write_report
from whence.runs.checkpoints import read_latest
from whence.runs.config_file import OLDER, VERSION
from whence.stored import compare_runs

WRITTEN = Path(__file__).with_name("written")

pytestmark = pytest.mark.parametrize("version", [OLDER, VERSION])


@pytest.fixture
def run(version: int, tmp_path: Path) -> RunDirectory:
    return RunDirectory.open(copytree(WRITTEN / f"version_{version}", tmp_path / "run"))


def test_it_is_read(run: RunDirectory, version: int) -> None:
    rule = {"rule": "IIF", "drop": 0.25, "warmup": 0}
    assert run.config["rule"] == rule | ({"unit": "record"} if version == VERSION else {})
    assert run.config["target"] == {"target": "Return"}
    assert run.config["objective"] is None
    assert run.rounds() == [1, 2]
    assert run.round("records", 2)["score"].null_count() == 0
    assert len(inspect(run)) > 30


def test_its_page_is_written(run: RunDirectory) -> None:
    write_report(run, run.path / "report.html")
    assert "IIF(drop=0.25, warmup=0)" in (run.path / "report.html").read_text(encoding="utf-8")


def test_a_training_continues_by_the_version_that_wrote_it(run: RunDirectory, version: int) -> None:
    if version == VERSION:
        latest = read_latest(run.path)
        assert latest is not None
        assert latest.round == 2
    else:
        with pytest.raises(RunDirectoryError, match="Finish the run with the version that wrote it"):
            read_latest(run.path)


def test_runs_of_two_versions_are_compared(run: RunDirectory) -> None:
    comparison = compare_runs(run, RunDirectory.open(WRITTEN / f"version_{VERSION}"))
    assert {each.kind for each in comparison.differences} <= {"setting"}
