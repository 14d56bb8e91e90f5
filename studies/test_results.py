"""Committed results: every table is what its command makes of the rows, and every interval of a text is in a table."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from studies.benchmarks import tables as benchmarks
from studies.diagnosis import tables as diagnosis
from studies.faithfulness import tables as faithfulness
from studies.loophole.tables import write_tables as write_loophole
from studies.planted.tables import write_tables as write_planted
from studies.practice import doorkey
from studies.practice import tables as practice
from studies.selection import seconds
from studies.selection import tables as selection
from studies.stored import write_line
from whence import lab
from whence.lab import load_sweep, read_rows, rowfile, summarise_sweep, write_rows, write_tables
from whence.runs import RunDirectory

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def write_sweep_tables(out: Path) -> None:
    results = load_sweep(out)
    write_tables(results, summarise_sweep(results), out)


def write_paper_tables(out: Path) -> None:
    write_sweep_tables(out)
    seconds.main(out)


def write_language_tables(out: Path) -> None:
    pytest.importorskip("transformers")
    from studies.llm import tables

    tables.main([out])


def write_scoring_tables(out: Path) -> None:
    pytest.importorskip("trl")
    from studies.scoring import tables

    tables.main(out)


def write_hunt_tables(out: Path) -> None:
    pytest.importorskip("minigrid")
    from studies.hunt import tables

    tables.write_tables(out)


def write_selection_tables(out: Path) -> None:
    pytest.importorskip("trl")
    from studies.selection import penalty

    penalty.write_tables(out)
    selection.write_tables(out)


MAKERS: dict[str, Callable[[Path], object]] = {
    "paper": write_paper_tables,
    "faithfulness/pays": write_sweep_tables,
    "practice": practice.write_tables,
    "diagnosis": diagnosis.main,
    "benchmarks": benchmarks.main,
    "scoring": write_scoring_tables,
    "planted": write_planted,
    "loophole": write_loophole,
    "hunt": write_hunt_tables,
    "doorkey": doorkey.write_tables,
    "selection": write_selection_tables,
    **{f"llm/{path.parent.name}": write_language_tables for path in sorted(RESULTS.glob("llm/*/curves.parquet"))},
}


@pytest.mark.filterwarnings("ignore:Precision loss occurred in moment calculation:RuntimeWarning")
@pytest.mark.parametrize(
    "study", [pytest.param(name, marks=pytest.mark.long if name == "practice" else ()) for name in MAKERS]
)
def test_tables_are_those_of_the_rows(study: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*.md", "pays")
    shutil.copytree(RESULTS / study, tmp_path, dirs_exist_ok=True, ignore=ignored)
    MAKERS[study](tmp_path)
    for made in (tmp_path / "tables.md", *tmp_path.glob("seconds.md"), *tmp_path.glob("penalty.md")):
        assert made.read_bytes() == (RESULTS / study / made.name).read_bytes()


def list_intervals(node: Any) -> Iterator[str]:
    """List every figure with an interval of a summary: as text, as a share, as a return and as a correlation."""
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from list_intervals(value)
    for point in ("mean", "null", "lds", "median") if isinstance(node, dict) else ():
        bounds = ("null_low", "null_high") if point == "null" else ("low", "high")
        if all(isinstance(node.get(key), float) for key in (point, *bounds)):
            for form in (".1%", ".0%", ".3g", ".3f", ".1f", ".0f"):
                mean, low, high = (f"{node[key]:{form}}".replace("-", "−") for key in (point, *bounds))
                yield f"{mean} [{low}, {high}]"


def read_intervals(text: str) -> set[str]:
    """Return the intervals of a text, with the zero before the point."""
    found = re.findall(r"−?[\d.,]+%? \[−?[\d.,]+%?, −?[\d.,]+%?\]", " ".join(text.split()))
    return {re.sub(r"(?<![\d.])\.", "0.", interval) for interval in found}


def first_three(results: Any) -> Any:
    return {
        group: {label: {seed: run for seed, run in runs.items() if seed < 3} for label, runs in labels.items()}
        for group, labels in results.items()
    }


def test_every_interval_of_the_papers_text_is_one_of_the_runs() -> None:
    results = load_sweep(RESULTS / "paper")
    # The text compares the first three seeds where an arm has no more.
    known = {*list_intervals(summarise_sweep(results)), *list_intervals(summarise_sweep(first_three(results)))}
    known |= read_intervals((RESULTS / "practice/tables.md").read_text(encoding="utf-8"))
    assert read_intervals((RESULTS / "paper/README.md").read_text(encoding="utf-8")) <= known


@pytest.mark.long
def test_every_interval_of_faithfulness_is_one_of_the_rows(tmp_path: Path) -> None:
    folder = RESULTS / "faithfulness"
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    faithfulness.main(tmp_path)
    assert (tmp_path / "tables.md").read_bytes() == (folder / "tables.md").read_bytes()
    written = [(folder / name).read_text(encoding="utf-8") for name in ("judges.md", "estimators.md")]
    known = read_intervals("\n".join(written).replace("-", "−"))
    for name in ("summary.json", "costs.json"):
        known |= {*list_intervals(json.loads((tmp_path / name).read_text(encoding="utf-8")))}
    known |= {*list_intervals(summarise_sweep(load_sweep(folder / "pays")))}
    known |= {*list_intervals([*read_rows(folder / "datamodels.parquet", ("env", "optimizer")).values()])}
    assert read_intervals((folder / "README.md").read_text(encoding="utf-8")) - known == set()


@pytest.mark.parametrize("page", ["README.md", "results/practice/README.md"])
def test_every_interval_of_practice_is_in_its_tables(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    text = "\n".join(lines if "results" in page else [line for line in lines if "results/practice" in line])
    assert read_intervals(text) <= read_intervals((RESULTS / "practice/tables.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("study", "first", "last"),
    [
        ("doorkey", "# DoorKey", "no end"),
        ("selection", "- **Question 2**", "\n## "),
        ("selection", "## A pretrained model", "no end"),
    ],
)
def test_every_interval_of_a_study_is_in_its_tables(study: str, first: str, last: str) -> None:
    text = (RESULTS / study / "README.md").read_text(encoding="utf-8")
    intervals = read_intervals(text.partition(first)[2].partition(last)[0])
    assert intervals
    assert intervals - read_intervals((RESULTS / study / "tables.md").read_text(encoding="utf-8")) == set()


def test_a_run_of_the_paper_repeats(tmp_path: Path) -> None:
    kept = load_sweep(RESULTS / "paper")["frozenlake"]["iif"][3]
    lab.run(replace(kept.config, rounds=1), tmp_path / "run")
    again = RunDirectory.open(tmp_path / "run").table("evaluations")["test_return"].to_list()
    assert again == kept.tables["evaluations"]["test_return"].to_list()[:2]


def test_the_demo_is_three_seeds_of_frozenlake() -> None:
    (demo,) = json.loads((RESULTS / "demo/summary.json").read_text(encoding="utf-8")).values()
    lake = first_three(load_sweep(RESULTS / "paper"))["frozenlake"]
    again = summarise_sweep({"lake": {arm: lake[arm] for arm in demo}})["lake"]
    for arm, metrics in demo.items():
        for name in metrics.keys() - {"rt_peak", "rt_peak_paper"}:  # seconds differ from run to run
            assert metrics[name] == again[arm][name], (arm, name)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        {"name": "a", "seed": 1, "table": {"x": [0.1, None], "n": [1, 2]}, "more": {"deep": [{"y": None}]}},
        {"name": "b", "seed": 0, "table": {"x": [1 / 3]}, "more": 3},
    ]
    write_rows(tmp_path / "rows.parquet", rows)
    assert [*read_rows(tmp_path / "rows.parquet", ("name", "seed")).values()] == rows
    types = pl.read_parquet_schema(tmp_path / "rows.parquet")
    assert (types["table/x"], types["table/n"]) == (pl.List(pl.Float64), pl.List(pl.Int64))


def test_writers_of_a_file_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_slowly(path: Path, rows: Any) -> None:
        time.sleep(0.02)  # without the lock, all others read the file now
        write_rows(path, rows)

    def write(seed: int) -> None:
        write_line(tmp_path / "rows.parquet", {"seed": seed, "value": 0.1 + seed}, ["seed"])

    monkeypatch.setattr(rowfile, "write_rows", put_slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, (3, 0, 12, 1)))
    assert [*read_rows(tmp_path / "rows.parquet", ["seed"])] == [(0,), (1,), (3,), (12,)]
