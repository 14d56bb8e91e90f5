"""The study of phases: the graph and its roughness, the segments of a curve, and one run end to end."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from studies.phases.phases import rank_rises, read_behaviour, trace_phases
from studies.phases.roughness import (
    Segment,
    compute_roughness,
    expect_roughness,
    link_similar,
    median_distance,
    name_pattern,
    split_curve,
)
from studies.phases.run import main
from whence import RunDirectory
from whence.lab.agents import configure, run
from whence.stored.agents import load_round

LINE = np.array([[0.0], [1.0], [3.0]])
VALUES = np.array([1.0, 0.5, 0.0])


def test_roughness_of_three_nodes_by_hand() -> None:
    # Distances 1, 2 and 3, so σ is 2.
    near, far, farthest = math.exp(-1 / 4), math.exp(-4 / 4), math.exp(-9 / 4)
    by_hand = (near * 0.25 + far * 0.25 + farthest * 1) / (near + far + farthest)
    assert compute_roughness(link_similar(LINE, 2), VALUES) == pytest.approx(by_hand, rel=1e-12)


def test_a_pair_counts_once_if_either_is_the_others_neighbour() -> None:
    graph = link_similar(LINE, 1)  # the third's neighbour is the second, whose neighbour is the first
    assert list(zip(graph.first, graph.second, strict=True)) == [(0, 1), (1, 2)]
    assert graph.weights == pytest.approx([math.exp(-1 / 4), math.exp(-1)])


def test_the_expected_roughness_is_the_mean_over_all_permutations() -> None:
    embeddings, values = np.array([[0.0], [1.0], [1.5], [4.0]]), np.array([0.1, 1.0, 0.4, 0.7])
    graph = link_similar(embeddings, 2)
    every = [compute_roughness(graph, np.array(order)) for order in itertools.permutations(values)]
    assert expect_roughness(values) == pytest.approx(np.mean(every), rel=1e-12)


def test_distances_of_mostly_equal_states() -> None:
    assert median_distance(np.array([[0.0]] * 9 + [[2.0]])) == 2.0
    assert median_distance(np.zeros((5, 2))) == 1.0


def test_segments_of_a_made_curve() -> None:
    noise = np.random.default_rng(0).normal(size=37) / 20
    segments = split_curve(np.r_[np.full(10, 3.0), np.full(7, 2.0), np.full(20, 1.0)] + noise)
    assert [(segment.start, segment.end) for segment in segments] == [(0, 10), (10, 17), (17, 37)]
    assert [segment.level for segment in segments] == pytest.approx([3, 2, 1], abs=0.05)


@pytest.mark.parametrize("curve", [[], [1.0], [1.0, 9.0, 1.0, 9.0, 9.0], [2.0] * 30])
def test_short_and_constant_curves_are_one_segment(curve: list[float]) -> None:
    assert split_curve(np.array(curve)) == ([Segment(0, len(curve), float(np.mean(curve)))] if curve else [])


def test_patterns() -> None:
    assert name_pattern([3, 2, 1]) == "three phases"
    assert name_pattern([3, 1, 2]) == name_pattern([2, 3, 1]) == name_pattern([2, 1]) == "one fall"
    assert name_pattern([1]) == name_pattern([1, 2]) == name_pattern([2, 1, 3]) == "no fall"


def test_rises_by_hand() -> None:
    curves = np.array([[0.1, 0.1, 0.9, 0.5], [0.5, 0.7, 0.5, 0.5], [0.9, 0.5, 0.1, 0.5]])
    # A steady rise of 0.8; a rise of 0.4 over steps of 0.8; a steady fall; nothing.
    assert rank_rises(curves) == pytest.approx([0.8, 0.4 * 0.4 / 0.8, -0.8, 0])


@pytest.mark.long
def test_one_run_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"n_steps": 128, "n_epochs": 2, "batch_size": 64}
    run(configure(env="CartPole-v1", rounds=4, eval_episodes=0, hyperparameters=settings), tmp_path / "run")
    directory = RunDirectory.open(tmp_path / "run")
    _, records = load_round(directory, 4)
    record = int(records.ids[0])
    history = trace_phases(directory, read_behaviour(directory, record), neighbours=10)
    # The policy that collected the record is that of its round.
    assert history.rounds["log_prob"][3] == pytest.approx(float(records.log_probs[0]), abs=1e-5)
    assert history.rounds["log_prob_after"].to_list()[:3] == history.rounds["log_prob"].to_list()[1:]
    row = history.rounds.row(3, named=True)
    assert row["relative"] == pytest.approx(row["roughness"] / row["expected"])
    main(tmp_path / "run", record=record, neighbours=10)
    text = (tmp_path / "run.phases.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.startswith(text)
    assert f"| {history.phases[0].first}–{history.phases[0].last} | {history.phases[0].roughness:.3g} |" in text
