"""Workflows run what the repository has, with actions of a version, few permissions and no secrets."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(".github/workflows/*.yml"))}


def list_steps(name: str) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(WORKFLOWS[name])["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def test_there_are_three() -> None:
    assert [*WORKFLOWS] == ["docs", "release", "tests"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_commands_are_there(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in list_steps(name):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step["uses"])
        for target in re.findall(r"\bmake (\S+)", step.get("run", "")):
            assert f"\n{target}:" in makefile
        for script in re.findall(r"\bbash (\S+)", step.get("run", "")):
            assert (ROOT / script).is_file()
    assert "secrets" not in WORKFLOWS[name]


@pytest.mark.parametrize(("name", "rights"), [("docs", {"pages": "write"}), ("release", {})])
def test_only_the_job_that_publishes_may_write(name: str, rights: dict[str, str]) -> None:
    jobs = yaml.safe_load(WORKFLOWS[name])["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write", **rights}
    assert jobs["build"]["permissions"] == {"contents": "read"}


def test_nothing_is_released_untested() -> None:
    assert yaml.safe_load(WORKFLOWS["release"])["jobs"]["build"]["needs"] == "tests"
    assert yaml.safe_load(WORKFLOWS["tests"])["permissions"] == {"contents": "read"}


def test_the_site_that_is_published_is_the_one_that_is_built() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nmarkdown_extensions")[0])
    (upload,) = [step for step in list_steps("docs") if "upload-pages" in step.get("uses", "")]
    assert upload["with"]["path"] == site["site_dir"]
