"""Files that are damaged anywhere: what reads them returns, or says in an error of whence's what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toys import model
from whence import IIF, Influence, Return, RoundRecording, RunDirectory, WhenceError, attribute
from whence.moments import find_moments
from whence.sb3 import InfluenceCallback, collect

FILES = ["config.json", "metrics.parquet", "records/round_00001.parquet", "policies/round_00001.safetensors"]
FILES += ["recordings/round_00001.safetensors", "scores.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round, with scores in a file."""
    path = tmp_path_factory.mktemp("damaged") / "run"
    toy = model()
    toy.learn(32, callback=InfluenceCallback(IIF(0.5), run=path, recordings=[1]))
    attribute(toy.policy, collect(toy), target=Return()).save(path / "scores.safetensors")
    return path


def read(path: Path, name: str) -> Any:
    """Read one file of a run, as the library does."""
    if name == "scores.safetensors":
        return Influence.load(path / name)
    directory = RunDirectory.open(path)
    readers: dict[str, Callable[[], Any]] = {
        "config.json": lambda: directory.config,
        "metrics.parquet": lambda: directory.table("metrics"),
        "records/round_00001.parquet": lambda: find_moments(directory.round("records", 1), lowest=True, most=3),
        "policies/round_00001.safetensors": lambda: directory.policy(1),
        "recordings/round_00001.safetensors": lambda: RoundRecording.load(directory.round_path("recordings", 1)),
    }
    return readers[name]()


def read_damaged(path: Path, name: str, content: bytes) -> None:
    """Read a file with other content: an error that is not whence's own fails the test."""
    before = (path / name).read_bytes()
    try:
        (path / name).write_bytes(content)
        read(path, name)
    except WhenceError:
        pass
    finally:
        (path / name).write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_whole_files_are_read(run: Path, name: str) -> None:
    read(run, name)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bytes_that_are_cut_off_or_changed(run: Path, name: str, data: st.DataObject) -> None:
    content = bytearray((run / name).read_bytes())
    start = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(64, len(content) - 1)))
    if data.draw(st.booleans()):
        del content[start:]
    else:
        part = data.draw(st.binary(min_size=1, max_size=8))
        content[start : start + len(part)] = part
    read_damaged(run, name, bytes(content))


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(["format", "version", "config", "versions", "digest"]), value=JSON)
def test_a_configuration_of_other_values(run: Path, key: str, value: Any) -> None:
    document = json.loads((run / "config.json").read_text(encoding="utf-8"))
    read_damaged(run, "config.json", json.dumps({**document, key: value}).encode())
