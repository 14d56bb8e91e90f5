"""A few damaged inputs for every reader; `python -m benchmarks.fuzz results/reliability` reads a hundred thousand."""

import json
from pathlib import Path

import pytest

from benchmarks import fuzz
from benchmarks.fuzz_bench import Bench, Escaped
from benchmarks.fuzz_commands import Finding, Trained, call_command, stop_before_training
from benchmarks.fuzz_readers import READERS, attempt
from whence import WhenceError

ROOT = Path(__file__).parent.parent
COUNTS = {"pages": 1, "commands on damaged runs": 6, "prompts": 2}
"""Inputs of the readers that take long."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Small real runs and files of every kind."""
    return Bench.create(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", READERS)
def test_a_reader_survives_what_is_damaged(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(bench.work)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with stop_before_training():
        part = fuzz.read_inputs(bench, name, seed=3, first=0, count=COUNTS.get(name, 20))
    assert part["findings"] == []
    assert part["slowest"] < fuzz.MOST_SECONDS


class TestTheFuzzerItself:
    def test_equal_seeds_give_equal_damage(self, bench: Bench) -> None:
        import random

        texts = []
        for _ in range(2):
            for name in bench.files("agent/"):
                bench.damage(name, random.Random(f"5/{name}"))
            # Without checkpoints: safetensors writes several texts of a header in any order.
            files = [path for path in sorted(bench.stage.rglob("*")) if path.parent.name != "checkpoints"]
            texts.append([path.read_bytes() for path in files if path.suffix in (".json", ".safetensors")])
            bench.restore()
        assert texts[0] == texts[1]

    def test_it_notices_what_is_changed_around_the_run(self, bench: Bench) -> None:
        one = bench.root / "sentinel" / "one.txt"
        one.write_text("touched")
        with pytest.raises(Escaped, match=r"sentinel/one\.txt"):
            bench.check_around()
        bench.open()

    def test_it_notices_other_errors(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(bench: Bench, rng: object) -> None:
            raise KeyError("column")

        monkeypatch.setitem(READERS, "failing", (1, fail))  # type: ignore[arg-type]
        assert "KeyError" in fuzz.read_inputs(bench, "failing", 0, 0, 2)["findings"][1]["what"]

    def test_an_error_has_to_say_something(self) -> None:
        def fail() -> None:
            raise WhenceError("no")

        with pytest.raises(Finding, match="says nothing"):
            attempt(fail)

    def test_a_command_does_not_train(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(bench.work)
        with stop_before_training():
            call_command(["train", "CartPole-v1", "--rounds", "1", "--run", "new"])
        assert not (bench.work / "new").exists()
        assert issubclass(Trained, BaseException)


def test_the_stored_figures_are_of_enough_inputs() -> None:
    content = json.loads((ROOT / "results" / "reliability" / "fuzz.json").read_text(encoding="utf-8"))
    assert content["inputs"] >= 100_000
    assert content["failures"] == 0
    assert set(content["readers"]) == set(READERS)
    page = (ROOT / "results" / "reliability" / "fuzz.md").read_text(encoding="utf-8")
    assert fuzz.list_figures(content) in page
    assert fuzz.list_readers(content) in page
