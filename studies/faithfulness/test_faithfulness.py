"""A round of a tiny FrozenLake, studied from end to end, and means by hand."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats

from studies.faithfulness import run, tables
from studies.faithfulness.means import over_seeds
from studies.faithfulness.rows import read_rounds
from whence import Return
from whence.lab.rounds import METHODS, compute_lds, draw_subsets
from whence.runs import RunDirectory
from whence.stored.agents import load_recording


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, RunDirectory]]:
    out, runs = (tmp_path_factory.mktemp(name) for name in ("results", "runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.OPTIMIZERS, "sgd", {"hyperparameters": {"n_steps": 64, "batch_size": 32, "n_epochs": 2}})
        patch.setitem(run.SETUPS, ("frozenlake", "sgd"), run.Setup("lda-code/frozenlake", (2,), 2))
        small = {"SUBSETS": 3, "TEST_EPISODES": 4}
        for name, value in small.items():
            patch.setattr(run, name, value)
        job = run.Job("frozenlake", "sgd", 0)
        for _ in range(2):
            run.study_run(job, out, runs)  # nothing is done twice
        tables.write_tables(out)
        yield out, RunDirectory.open(runs / job.name)


def test_a_round_is_studied_from_end_to_end(results: tuple[Path, RunDirectory]) -> None:
    out, directory = results
    (content,) = read_rounds(out, "round")
    model, recording = load_recording(directory, 2)
    names = [*run.compute_scores(model.policy, recording, target=Return()), run.SMOOTHED]
    assert names == ["snapshot", "crossfit", *METHODS, "advantage", "td-error", "random", "smoothed, middle half of 64"]
    lds = pl.DataFrame(content["lds"], infer_schema_length=None)
    scores = {key: rows["score"].to_list() for key, rows in lds.group_by("truth", "outcome", "share")}
    places = [("target", 0.5), ("surrogate", 0.5), ("evaluated", 0.5), ("target", 0.9), ("surrogate", 0.9)]
    assert scores == {(truth, *place): names for truth in ("recorded", "reshuffled") for place in places}
    changes = read_rounds(out, "intervention")[0]["interventions"]
    assert [row["variant"] for row in changes] == ["full", "filtered", "random"]
    # What is stored is enough to hold another score against the same trainings.
    advantages = recording.records.advantages.double().numpy()
    seed = run.Job("frozenlake", "sgd", 0).chance(2)
    for share, truth, outcome, figure in (
        lds.filter(score="advantage").select("share", "truth", "outcome", "lds").rows()
    ):
        keep = draw_subsets(64, share, 3, torch.Generator().manual_seed(seed)).double().numpy()
        stored = np.mean(content["outcomes"][str(share)][truth][outcome], axis=0)
        assert compute_lds(keep @ advantages, stored)["lds"] == pytest.approx(figure, abs=1e-5)
    assert (out / "tables.md").read_text(encoding="utf-8").count("\n## ") > 8


def test_rounds_are_chosen_and_seeds_are_drawn() -> None:
    seeds = {0: [0.2, 0.4, None], 1: [0.5, 0.7, 0.9], 2: [0.1, 0.1, 0.1]}
    rows = [{"seed": seed, "lds": value, "ceiling": 0.5} for seed, values in seeds.items() for value in values]
    figures = over_seeds(pl.DataFrame(rows), "lds")
    means = [0.3, 0.7, 0.1]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(means), scale=stats.sem(means))
    assert [figures[name] for name in ("mean", "low", "high")] == pytest.approx([np.mean(means), low, high])
    assert over_seeds(pl.DataFrame(rows), "lds", "ceiling")["mean"] == pytest.approx(2 * np.mean(means))
