"""Files that are damaged or do not fit: what reads them returns, or says in an error of whence's what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from helpers.toys import flip_bit, model
from whence import IIF, Influence, InvalidInfluence, Return, RoundRecording, RunDirectory, WhenceError, attribute
from whence.core import RunDirectoryError
from whence.lab import read_config
from whence.lab.agents import RunConfig
from whence.runs import read_latest
from whence.sb3 import InfluenceCallback, collect
from whence.scores.moments import find_moments
from whence.stored.agents import load_policy
from whence.stored.language import LanguageConfig

RECORDING, SCORES = "recordings/round_00001.safetensors", "scores.safetensors"
FILES = ["config.json", "metrics.parquet", "records/round_00001.parquet", "policies/round_00001.safetensors"]
FILES += [RECORDING, SCORES]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one round, with scores in a file."""
    path = tmp_path_factory.mktemp("damaged") / "run"
    toy = model()
    toy.learn(32, callback=InfluenceCallback(IIF(0.5), run=path, recordings=[1]))
    attribute(toy.policy, collect(toy), target=Return()).save(path / SCORES)
    return path


def read(path: Path, name: str) -> Any:
    """Read one file of a run, as the library does."""
    if name == SCORES:
        return Influence.load(path / name)
    directory = RunDirectory.open(path)
    readers: dict[str, Callable[[], Any]] = {
        "config.json": lambda: directory.config,
        "metrics.parquet": lambda: directory.table("metrics"),
        "records/round_00001.parquet": lambda: find_moments(directory.round("records", 1), lowest=True, most=3),
        "episodes/round_00001.parquet": lambda: directory.round("episodes", 1),
        "checkpoints/round_00001.safetensors": lambda: read_latest(path),
        "policies/round_00001.safetensors": lambda: directory.policy(1),
        RECORDING: lambda: RoundRecording.load(directory.round_path("recordings", 1)),
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
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bytes_that_are_cut_off_or_changed(run: Path, name: str, data: st.DataObject) -> None:
    read(run, name)
    content = bytearray((run / name).read_bytes())
    start = data.draw(st.integers(0, len(content) - 1) | st.integers(0, min(64, len(content) - 1)))
    if data.draw(st.booleans()):
        del content[start:]
    else:
        part = data.draw(st.binary(min_size=1, max_size=8))
        content[start : start + len(part)] = part
    read_damaged(run, name, bytes(content))


@pytest.mark.parametrize("name", [*FILES[1:], "episodes/round_00001.parquet", "checkpoints/round_00001.safetensors"])
def test_a_flipped_bit_is_named(run: Path, name: str) -> None:
    read(run, name)
    content = (run / name).read_bytes()
    mark = content.rindex(b"checksum")
    for place in {*range(0, len(content), len(content) // 40), len(content) - 1, *range(mark, mark + 20)}:
        with flip_bit(run / name, place), pytest.raises(WhenceError, match=rf"{name} (is damaged.*Restore|cannot be)"):
            read(run, name)


def test_texts_that_look_like_a_checksum_are_left_as_they_are(tmp_path: Path) -> None:
    run, text = RunDirectory.create(tmp_path, {}), '{"checksum":"blake2b:' + "0123456789abcdef" * 2 + '"}'
    run.write_round("answers", 1, pl.DataFrame({"answer": [text, "short"]}))
    assert run.round("answers", 1)["answer"].to_list() == [text, "short"]


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@settings(max_examples=60, deadline=None)
@given(key=st.sampled_from(["format", "version", "config", "versions", "digest"]), value=JSON)
def test_a_configuration_of_other_values(run: Path, key: str, value: Any) -> None:
    document = json.loads((run / "config.json").read_text(encoding="utf-8"))
    read_damaged(run, "config.json", json.dumps({**document, key: value}).encode())


def edit(key: str, name: str, value: Any) -> Any:
    """Return a change of one entry of a header's document."""
    return lambda texts, tensors: texts.update({key: json.dumps({**json.loads(texts[key]), name: value})})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (RECORDING, edit("about", "sizes", [1]), r"what RoundRecording\.save writes"),
        (RECORDING, lambda texts, tensors: texts.update(about="["), "header of .* JSON"),
        (SCORES, edit("provenance", "more", 1), "unexpected keyword argument 'more'"),
        (SCORES, lambda texts, tensors: tensors.pop("scores"), "'scores'"),
        (SCORES, lambda texts, tensors: tensors.update(scores=tensors["scores"][:3]), "have the shapes"),
    ],
)
def test_parts_that_do_not_fit(run: Path, name: str, change: Any, message: str) -> None:
    before = (run / name).read_bytes()
    with safe_open(run / name, framework="pt") as file:
        texts, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(texts, tensors)
    del texts["checksum"]
    save_file(tensors, run / name, texts)
    try:
        with pytest.raises((RunDirectoryError, InvalidInfluence), match=message):
            read(run, name)
    finally:
        (run / name).write_bytes(before)


def test_a_policy_of_other_numbers(run: Path) -> None:
    directory, toy = RunDirectory.open(run), model()
    tensors = directory.policy(1)
    for change, message in ((torch.zeros(99), "does not fit"), (tensors["action_net.bias"] * torch.nan, "not finite")):
        directory.write_policy(1, {**tensors, "action_net.bias": change})
        with pytest.raises(RunDirectoryError, match=rf"policy of round 1 .*{message}.*action_net\.bias"):
            load_policy(directory, 1, toy)
    directory.write_policy(1, tensors)


def test_configurations_from_json() -> None:
    agent = {"env": "CartPole-v1", "arm": "iif", "seed": 0}
    assert read_config(agent) == RunConfig.from_json(agent)
    for values, message in (({**agent, "round": 3}, "'round'.*rounds"), ({"env": "CartPole-v1"}, "lacks 'arm'")):
        with pytest.raises(WhenceError, match=message):
            RunConfig.from_json(values)
    for wrong in ([], "x", None, 3):
        with pytest.raises(WhenceError, match="a table of settings"):
            read_config(wrong)
    for name, value in (("arm", 3), ("lora", "4"), ("settings", []), ("dtype", 1), ("model", {}), ("seed", None)):
        with pytest.raises(WhenceError, match=rf"^{name} is .*; .* is needed"):
            LanguageConfig.from_json({"arm": "iif", "seed": 0, name: value})
    with pytest.raises(WhenceError, match="rounds is 'many'"):
        LanguageConfig.from_json({"arm": "iif", "seed": 0, "settings": {"rounds": "many"}})
