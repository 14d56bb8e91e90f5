"""The suite of what scoring costs: its cells, resuming, estimates and other libraries' scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import whence
from studies.benchmarks import engines, libraries, peers, policies, recording, run, timing
from studies.benchmarks.cells import Cell, Setting, choose, measure_cells, read_results
from studies.benchmarks.subjects import Subject
from whence.core import WhenceError

TINY = "width-8"
"""A policy with 64 records, which the suite does not measure."""


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(policies.RL, TINY, 64)
        yield policies.make_subject(TINY, "cpu")


def test_a_cell_brings_the_smaller_ones_of_its_row() -> None:
    cells = run.list_cells()
    names = [cell.name for cell in choose(cells, "mlp/ghost/16384, errors/cartpole")]
    assert names == ["mlp/ghost/512", "mlp/ghost/2048", "mlp/ghost/16384", "errors/cartpole"]
    with pytest.raises(WhenceError, match=r"--only names 'mlp/gost/2048', which is no cell\. .*mlp/ghost/2048.*"):
        choose(cells, "mlp/gost/2048")


def test_a_finished_cell_is_not_measured_again(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def measure(setting: Setting) -> dict[str, Any]:
        calls.append([*setting.results])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {"seconds": {"median": 1.0}, "estimated": "time"}

    cells = [Cell(name, "engines", measure) for name in ("one", "two")]
    with pytest.raises(KeyboardInterrupt):
        measure_cells(tmp_path, cells, "cpu", 1)
    for _ in range(2):
        measure_cells(tmp_path, cells, "cpu", 1)
    assert calls == [[], ["one"], ["one"]]  # it sees what others result
    assert list(read_results(tmp_path)["cpu"]) == ["one", "two"]


def test_a_device_that_is_not_there_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=r"device is 'cuda', but torch .* finds 0 GPUs"):
        run.main(tmp_path / "out", device="cuda", only=None, repeats=1, show=False)


def test_a_row_is_scored_and_its_memory_counted(subject: Subject) -> None:
    result = engines.measure_engine(TINY, "ghost", 64, Setting("cpu", 2))
    assert result["seconds"]["turns"] == result["ratio"]["turns"] == 2
    assert 0 < result["peak"]["tensors"] < result["budget"]
    assert result["parameters"] == subject.parameters


def test_what_would_take_too_long_is_estimated_in_proportion() -> None:
    line = {"plain": {"median": 1.0}, "record_bytes": 8, "parameters": 9, "budget": 2**28}
    times = {512: 4.0, 2048: 20.0}
    results = {f"mlp/loop/{n}": {**line, "records": n, "seconds": {"median": times[n]}} for n in times}
    result = engines.measure_engine("mlp", "loop", 16384, Setting("cpu", 1, results))
    assert (result["estimated"], result["estimated_from"]) == ("time", [512, 2048])
    assert result["seconds"]["median"] == pytest.approx(160)
    assert timing.fit_exponent([1, 10, 100], [2, 20, 200]) == pytest.approx(1)


@pytest.mark.parametrize("name", libraries.PEERS)
def test_a_peers_scores_are_those_of_whence(name: str, subject: Subject) -> None:
    peer = libraries.PEERS[name]
    if peer.of_language:
        subject = policies.make_subject("gpt-1M-lora", "cpu")
    if not libraries.is_installed(peer):
        pytest.skip(f"{peer.module} is not installed")
    # Linear layers, which kronfluence reads alone, are all that this policy has.
    truth = whence.attribute(subject.policy, subject.records(64), **subject.scoring)
    with peers.silence():
        scores = peer.run(subject.question(64))
    assert peers.measure_difference(scores.double(), truth.scores.double()) < 1e-5


def test_a_peer_and_whence_take_turns_on_the_same_records(subject: Subject) -> None:
    result = peers.compare(libraries.PEERS["torch-vmap"], subject, 64, Setting("cpu", 2))
    assert result["difference"] < 1e-5
    assert result["seconds"]["turns"] == result["ratio"]["turns"] == 2


def test_a_training_pass_makes_the_scores_of_attribute() -> None:
    subject = policies.make_subject("gpt-1M", "cpu")
    truth = whence.attribute(subject.policy, subject.records(8), **subject.scoring).scores
    question = subject.question(8)
    assert peers.measure_difference(peers.make_step(question)(), truth) < 1e-5
    recorded = {name: parameter.grad for name, parameter in question.model.named_parameters()}
    peers.run_plain_step(question)
    for name, parameter in question.model.named_parameters():
        torch.testing.assert_close(recorded[name], parameter.grad)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind == "scored" else ()) for kind in recording.KINDS]
)
def test_what_recording_costs_is_measured(kind: str) -> None:
    threads = torch.get_num_threads()
    result = recording.measure(kind, rounds=2, num_envs=8)
    torch.set_num_threads(threads)
    assert result["seconds"] > 0
    assert result["mebibytes"] > 50
