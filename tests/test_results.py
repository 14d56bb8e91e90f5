"""What is committed of the evaluations is what their runs give, and what their texts say is what they gave."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree

import pytest

from whence import experiments
from whence.experiments import load_sweep, summarise_sweep
from whence.runs import RunDirectory

RESULTS = Path(__file__).parent.parent / "results"
PAPER = RESULTS / "paper"
FAITHFULNESS = RESULTS / "faithfulness"
DIAGNOSIS = RESULTS / "diagnosis"
INTERVAL_KEYS = [
    ("mean", "low", "high"),
    ("null", "null_low", "null_high"),
    ("lds", "low", "high"),
    ("median", "low", "high"),
]
INTERVAL = re.compile(r"(−?[\d.,]+%?) \[(−?[\d.,]+%?), (−?[\d.,]+%?)\]")


@pytest.fixture(scope="module")
def results():
    return load_sweep(PAPER)


@pytest.fixture(scope="module")
def summary(results):
    return summarise_sweep(results)


def intervals(node: object) -> Iterator[str]:
    """Every figure with an interval as text, as a share, as a return and as a correlation."""
    if isinstance(node, dict):
        for own in INTERVAL_KEYS:
            if all(isinstance(node.get(key), float) for key in own):
                for form in (".1%", ".0%", ".3g", ".3f", ".1f", ".0f"):
                    mean, low, high = (f"{node[key]:{form}}".replace("-", "−") for key in own)
                    yield f"{mean} [{low}, {high}]"
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from intervals(value)


def said_in(text: str) -> set[str]:
    return {" ".join(m.group(0).split()) for m in INTERVAL.finditer(text)}


def test_the_summary_is_that_of_the_runs(summary):
    assert json.loads((PAPER / "summary.json").read_text(encoding="utf-8")) == summary


def first_three(results):
    return {
        group: {label: {seed: run for seed, run in runs.items() if seed < 3} for label, runs in labels.items()}
        for group, labels in results.items()
    }


def test_every_interval_of_the_text_is_one_of_the_runs(results, summary):
    # Of all seeds, or of the first three, which the text compares where an arm has no more.
    known = {*intervals(summary), *intervals(summarise_sweep(first_three(results)))}
    said = said_in((PAPER / "README.md").read_text(encoding="utf-8"))
    assert len(said) > 50
    assert said <= known, sorted(said - known)


def test_the_summary_of_what_scores_are_worth_is_that_of_the_rounds(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    from studies.faithfulness import tables as faithfulness_tables

    copytree(FAITHFULNESS / "rounds", tmp_path / "rounds")
    copy(FAITHFULNESS / "datamodels.jsonl", tmp_path)
    faithfulness_tables.main(tmp_path, no_pictures=True)
    found, kept = (json.loads((at / "summary.json").read_text(encoding="utf-8")) for at in (tmp_path, FAITHFULNESS))
    assert found == kept
    tables, of_kept = ((at / "tables.md").read_text(encoding="utf-8") for at in (tmp_path, FAITHFULNESS))
    assert of_kept.startswith(tables.rstrip())  # pictures come last


def test_the_tables_of_judges_are_those_of_the_rounds(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    from studies.faithfulness import judge_tables

    (tmp_path / "rounds").mkdir()
    copy(FAITHFULNESS / "rounds" / "judge.jsonl", tmp_path / "rounds")
    judge_tables.main(tmp_path)
    for name in ("judges.json", "judges.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (FAITHFULNESS / name).read_text(encoding="utf-8"), name


def test_the_summary_of_whether_truth_pays_is_that_of_the_runs():
    pays = FAITHFULNESS / "pays"
    kept = json.loads((pays / "summary.json").read_text(encoding="utf-8"))
    assert kept == summarise_sweep(load_sweep(pays))


def test_every_interval_of_what_scores_are_worth_is_one_of_the_studies():
    text = (FAITHFULNESS / "README.md").read_text(encoding="utf-8")
    # LDS stand in the text without the zero.
    said = {re.sub(r"(?<![\d.])\.", "0.", one) for one in said_in(text)}
    names = ("summary.json", "pays/summary.json", "costs.json", "judges.json")
    files = [FAITHFULNESS / name for name in names]
    documents = [file.read_text(encoding="utf-8") for file in files]
    documents += (FAITHFULNESS / "datamodels.jsonl").read_text(encoding="utf-8").splitlines()
    known = {one for document in documents for one in intervals(json.loads(document))}
    assert len(said) > 50
    assert said <= known, sorted(said - known)


def test_the_summary_of_judged_advantages_is_that_of_the_rounds(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    from studies.diagnosis import tables as diagnosis_tables

    copy(DIAGNOSIS / "rounds.jsonl", tmp_path)
    diagnosis_tables.main(tmp_path)
    for name in ("summary.json", "tables.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (DIAGNOSIS / name).read_text(encoding="utf-8"), name


def test_a_run_begins_again_as_it_did(results, tmp_path):
    kept = results["frozenlake"]["iif"][3]
    experiments.run(replace(kept.config, rounds=2), tmp_path / "run")
    again = RunDirectory.open(tmp_path / "run").table("evaluations")["test_return"].to_list()
    assert again == kept.tables["evaluations"]["test_return"].to_list()[:3]


def test_the_demo_is_three_seeds_of_frozenlake(results):
    (demo,) = json.loads((RESULTS / "demo" / "summary.json").read_text(encoding="utf-8")).values()
    again = summarise_sweep({"lake": {arm: first_three(results)["frozenlake"][arm] for arm in demo}})["lake"]
    for arm, metrics in demo.items():
        for name in metrics.keys() - {"rt_peak", "rt_peak_paper"}:  # seconds differ from run to run
            assert metrics[name] == again[arm][name], (arm, name)
