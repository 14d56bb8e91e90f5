"""Runs through all detectors: a healthy one, one with a fault that the command names, and one of many environments."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from whence.cli.commands.findings_command import findings
from whence.findings import find
from whence.findings.evidence import Evidence, make_evidence
from whence.findings.inspection import measure
from whence.runs import RunDirectory

COPIES, EPISODES, LENGTH, ROUNDS = 4, 25, 30, 5
N = COPIES * EPISODES * LENGTH
STEP, EPISODE = np.arange(N) % LENGTH, np.arange(N) // LENGTH
COPY = EPISODE // EPISODES
NAMES = {"actions": ["push back", "wait", "push forth"], "observations": ["place", "speed"]}


def make_run(path: Path, swapped: int | None = None) -> RunDirectory:
    """Store a point on a line that actions push, paid for coming nearer to 0; in one copy they push the other way."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 3, N)
    place, speed = np.zeros(N), np.zeros(N)
    for i in range(N):
        if STEP[i] == 0:
            place[i], speed[i] = rng.normal(size=2)
        else:
            push = (actions[i - 1] - 1) * (-1 if COPY[i] == swapped else 1)
            speed[i] = 0.9 * speed[i - 1] + push + 0.3 * rng.normal()
            place[i] = place[i - 1] + 0.2 * speed[i]
    reward = np.append(np.abs(place[:-1]) - np.abs(place[1:]), 0.0)
    reward[STEP == LENGTH - 1] = 0.3 * rng.normal(size=COPIES * EPISODES)
    value = rng.normal(size=N)
    columns = {"record_id": np.arange(N), "env_index": COPY, "episode_id": EPISODE, "step": STEP, "action": actions}
    columns |= {"reward": reward, "value": value, "return": value + rng.normal(size=N)}
    ends = np.where(STEP == LENGTH - 1, "truncated", "")
    table = pl.DataFrame({**columns, "observation": np.stack([place, speed], axis=1), "end": ends})
    run = RunDirectory.create(path, {"names": NAMES, "action_space": {"type": "Discrete", "n": 3}})
    for number in range(1, ROUNDS + 1):
        run.write_round("records", number, table.filter(pl.Series(number == 1 + EPISODE % EPISODES // ROUNDS)))
    return run


def test_nothing_stands_out_in_a_healthy_run(tmp_path: Path) -> None:
    assert [finding.title for finding in find(make_run(tmp_path / "run"))] == []


def test_a_run_is_read_with_its_names_and_named_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", swapped=2)
    findings(run.path, json=True)
    content = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = (one for one in content if "swapped" in one["title"])
    assert "push back" in finding["title"]
    assert "environment 2" in finding["title"]
    assert set(finding["record_ids"]) <= set(np.flatnonzero(COPY == 2).tolist())
    findings(run.path)
    assert f"{content.index(finding) + 1}. {finding['rank']}: {finding['title']}." in capsys.readouterr().out


MANY, SHORT = 1_000, 5


@pytest.fixture(scope="module")
def crowd() -> Evidence:
    """1,000 environments of 50 steps in ten episodes; only environment 734 pays five times as much."""
    n = MANY * 10 * SHORT
    rng, episodes = np.random.default_rng(0), np.arange(n) // SHORT
    copies, steps = episodes // 10, np.arange(n) % SHORT
    columns = {"record_id": np.arange(n), "round": 1 + episodes % 10, "episode_id": episodes, "env_index": copies}
    columns |= {"step": steps, "action": rng.integers(0, 2, n), "value": rng.normal(size=n)}
    columns |= {"reward": rng.uniform(1, 2, n) * np.where(copies == 734, 5, 1), "return": rng.normal(size=n)}
    ends = np.where(steps == SHORT - 1, "truncated", "")
    table = pl.DataFrame({**columns, "observation": rng.normal(size=(n, 3)), "end": ends})
    evidence = make_evidence(table, {}, pl.DataFrame())
    assert evidence is not None
    return evidence


def test_of_many_environments_the_odd_one_is_seen_in_seconds(crowd: Evidence) -> None:
    measure(crowd.thin(2_000))  # what is imported at first
    start = time.process_time()
    measured = measure(crowd)
    assert time.process_time() - start < 10
    assert "environment 734" in measured["rewards of copies"].title
    assert measured["rewards of copies"].statistic > 10 * measured["observations of copies"].statistic


def test_a_sample_has_whole_episodes_in_the_order_of_time(crowd: Evidence) -> None:
    sample = crowd.thin(40_000)
    assert len(sample) == 40_000
    assert (np.bincount(sample.episodes) == SHORT).all()
    assert (sample.has_next == (sample.columns["step"] < SHORT - 1)).all()
    assert len(np.unique(sample.columns["env_index"])) > 0.9 * MANY
    rows = sample.columns["record_id"].astype(int)
    assert (sample.features["x0"] == crowd.features["x0"][rows]).all()
    assert len(sample.thin(40_000)) == 40_000


def test_a_number_that_varies_by_rounding_alone_is_no_state(crowd: Evidence) -> None:
    rounded = np.where(np.arange(len(crowd)) % 2, 0.1, np.nextafter(0.1, 1))
    with_rounded = replace(crowd, features={**crowd.features, "rounded": rounded})
    assert with_rounded.state.shape == crowd.state.shape == (len(crowd), 3)
