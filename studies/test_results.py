"""Committed results: every table is what its command makes of the rows, and every interval of a text is in a table."""

import functools
import importlib
import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from studies.shared import read_list, write_line
from whence import lab
from whence.lab import kept_runs, load_sweep, read_rows, summarise_sweep, write_rows, write_tables
from whence.runs import RunDirectory

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"

MAKERS = {
    "paper": "selection.seconds",
    "faithfulness/pays": "",  # a sweep, as the paper is
    "faithfulness": "faithfulness.tables faithfulness.adam",
    "practice": "practice.tables",
    "diagnosis": "diagnosis.tables",
    "benchmarks": "benchmarks.tables",
    "scoring": "scoring.tables",
    "planted": "planted.tables planted.proofs",
    "verdicts": "verdicts.tables",
    "loophole": "loophole.tables",
    "hunt": "hunt.tables",
    "healthy": "healthy.tables",
    "operators": "operators.tables operators.audits",
    "doorkey": "practice.doorkey",
    "selection": "selection.tables",
    **{f"llm/{path.parent.name}": "llm.tables" for path in sorted(RESULTS.glob("llm/*/curves.parquet"))},
}
"""The modules whose `write_tables` make the pages of a study; those of a sweep are made by `whence table`, too."""

SLOW = "practice", "faithfulness", "faithfulness/pays", "healthy"
"""Studies whose pages are made again in long tests."""
NEEDED = {"llm": "transformers", "scoring": "trl", "selection": "trl", "hunt": "minigrid", "planted": "Box2D"}
STATIC = ("README.md", "history.md", "judges.md", "groups.md", "estimators.md", "penalty.md", "shards.md", "real.md")
"""Pages that no command makes from rows."""


@functools.cache
def summarise(study: str) -> tuple[Any, Any]:
    """Return a sweep's results and their summary, which several tests read."""
    results = load_sweep(RESULTS / study)
    return results, summarise_sweep(results)


def make_pages(study: str, out: Path) -> None:
    """Make the pages of a study from its rows."""
    if study in ("paper", "faithfulness/pays"):
        write_tables(*summarise(study), out)
    for name in MAKERS[study].split():
        importlib.import_module(f"studies.{name}").write_tables(out)


@pytest.mark.filterwarnings("ignore:Precision loss occurred in moment calculation:RuntimeWarning")
@pytest.mark.parametrize(
    "study",
    [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in MAKERS],
)
def test_pages_are_those_of_the_rows(study: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDED.get(study.split("/")[0], "whence"))
    shutil.copytree(RESULTS / study, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md", "pays"))
    make_pages(study, tmp_path)
    pages = [page for page in (RESULTS / study).glob("*.md") if page.name not in STATIC]
    assert pages
    for page in pages:
        assert (tmp_path / page.name).read_bytes() == page.read_bytes()


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
    results, summary = summarise("paper")
    # The text compares the first three seeds where an arm has no more.
    known = {*list_intervals(summary), *list_intervals(summarise_sweep(first_three(results)))}
    known |= read_intervals((RESULTS / "practice/tables.md").read_text(encoding="utf-8"))
    assert read_intervals((RESULTS / "paper/README.md").read_text(encoding="utf-8")) <= known


@pytest.mark.long
def test_every_interval_of_faithfulness_is_one_of_the_rows() -> None:
    from studies.faithfulness import tables

    folder = RESULTS / "faithfulness"
    written = [
        (folder / name).read_text(encoding="utf-8") for name in ("history.md", "judges.md", "estimators.md", "adam.md")
    ]
    known = read_intervals("\n".join(written).replace("-", "−"))
    for node in (
        tables.summarise(folder),
        summarise("faithfulness/pays")[1],
        json.loads((folder / "costs.json").read_text(encoding="utf-8")),
        read_list(folder / "datamodels.parquet", ("env", "optimizer")),
    ):
        known |= {*list_intervals(node)}
    assert read_intervals((folder / "README.md").read_text(encoding="utf-8")) - known == set()


@pytest.mark.parametrize(
    ("study", "first", "last"),
    [
        ("practice", "# ", "no end"),
        ("doorkey", "# ", "no end"),
        ("selection", "- **Question 2**", "\n## "),
        ("selection", "## A pretrained model", "no end"),
    ],
)
def test_every_interval_of_a_study_is_in_its_tables(study: str, first: str, last: str) -> None:
    text = (RESULTS / study / "README.md").read_text(encoding="utf-8")
    front = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    quoted = "\n".join(line for line in front if f"results/{study}" in line)
    intervals = read_intervals(text.partition(first)[2].partition(last)[0])
    assert intervals
    known = read_intervals((RESULTS / study / "tables.md").read_text(encoding="utf-8"))
    assert (intervals | read_intervals(quoted)) - known == set()


def test_a_run_of_the_paper_repeats(tmp_path: Path) -> None:
    kept = summarise("paper")[0]["frozenlake"]["iif"][3]
    lab.run(replace(kept.config, rounds=1), tmp_path / "run")
    again = RunDirectory.open(tmp_path / "run").table("evaluations")["test_return"].to_list()
    assert again == kept.tables["evaluations"]["test_return"].to_list()[:2]


def test_the_demo_is_three_seeds_of_frozenlake() -> None:
    (demo,) = json.loads((RESULTS / "demo/summary.json").read_text(encoding="utf-8")).values()
    lake = first_three(summarise("paper")[0])["frozenlake"]
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

    monkeypatch.setattr(kept_runs, "write_rows", put_slowly)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, (3, 0, 12, 1)))
    assert [*read_rows(tmp_path / "rows.parquet", ["seed"])] == [(0,), (1,), (3,), (12,)]
