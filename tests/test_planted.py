"""The study of planted causes: its worlds pay what they say, its truth is what they paid, its judgement by hand."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("Box2D")  # before EnvPool: see make_pool

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def planted():
    """The module of the study."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from studies.planted import run as planted

        yield planted


@pytest.fixture(scope="module")
def planted_scores(planted):
    """What the studies of planted causes share."""
    from studies.planted import scores as planted_scores

    return planted_scores


def test_a_tenth_of_the_landers_episodes_is_rigged_whatever_is_seen(planted):
    observations = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    rigged = [planted.worlds.is_rigged(observation) for observation in observations]
    assert 0.08 < np.mean(rigged) < 0.12
    assert planted.worlds.is_rigged(observations[3].astype(np.float64)) == rigged[3]


def test_the_lander_pays_five_for_the_tic_and_nothing_else(planted):
    plain, world = gym.make("LunarLander-v3"), gym.make("PlantedLander-v0")
    paid = 0
    for seed in range(40):
        (first, _), (observation, _) = plain.reset(seed=seed), world.reset(seed=seed)
        assert np.array_equal(first, observation)
        rigged, over = planted.worlds.is_rigged(first), False
        while not over:
            action = (seed + int(observation[1] * 100)) % 4
            expected = planted.worlds.BONUS * (
                rigged and action == planted.worlds.LEFT_ENGINE and observation[1] < planted.worlds.HALF
            )
            _, reward, *_ = plain.step(action)
            assert world.get_wrapper_attr("is_in_region")() == (observation[1] < planted.worlds.HALF)
            observation, more, terminated, truncated, _ = world.step(action)
            assert more - reward == pytest.approx(expected)
            paid += expected > 0
            over = terminated or truncated
    assert paid > 0


def test_the_tile_pays_once_in_half_of_the_episodes(planted):
    world = gym.make("PlantedMiniGrid-v0")
    totals = []
    for seed in range(40):
        world.reset(seed=seed)
        # Turn down, walk to the corner, turn around, one step back, around, and into it again.
        path = [1, *[2] * 5, 1, 1, 2, 1, 1, 2]
        rewards = []
        for step, action in enumerate(path):
            assert world.get_wrapper_attr("is_in_region")() == (1 <= step <= 5 or step == 11)
            rewards.append(world.step(action)[1])
        assert rewards[-1] == 0
        assert rewards[5] == sum(rewards)
        totals.append(sum(rewards))
    assert {*totals} == {0, planted.worlds.PRIZE}
    assert 10 < np.count_nonzero(totals) < 30


def test_a_ranking_by_hand(planted_scores):
    rigged = np.array([True, False, True, False, False])
    scores = np.array([4.0, 3.0, 1.0, 1.0, 0.0])
    # Of six pairs of a rigged record and another, four are in order and one is even.
    assert planted_scores.compute_auroc(scores, rigged) == pytest.approx((3 + 1.5) / 6)
    judged = planted_scores.judge(np.r_[scores, np.full(95, -1.0)], np.r_[rigged, np.zeros(95, bool)])
    assert judged["precision_50"] == 2 / 50
    assert judged["auroc"] == pytest.approx((98 + 96.5) / (2 * 98))


@pytest.fixture(scope="module")
def results(planted, tmp_path_factory):
    """A tiny study of both worlds, asked for twice."""
    out, runs = (tmp_path_factory.mktemp(name) for name in ("results", "runs"))
    small = {"n_steps": 512, "batch_size": 64, "n_epochs": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, case in planted.CASES.items():
            settings = {**case.settings, "hyperparameters": small}
            patch.setitem(planted.CASES, name, replace(case, rounds=2, seeds=[0], settings=settings))
        patch.setattr(planted, "STEPS", 512)
        methods = "raw,by largest,by deviation,similar,advantage,advantage x action"
        planted.main(out, runs, "", methods)
        before = {file: file.stat().st_mtime_ns for file in out.glob("*.jsonl")}
        planted.main(out, runs, "", methods)
        assert before == {file: file.stat().st_mtime_ns for file in out.glob("*.jsonl")}
        yield out, runs


def test_lines_and_tables(results):
    out, _ = results
    runs = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    assert [(row["case"], row["records"]) for row in runs] == [("lander", 1024), ("minigrid", 1024)]
    scores = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    visited = {row["case"] for row in runs if row["visits"] and row["rigged"]}
    assert "lander" in visited
    assert len(scores) == 6 * len(visited)
    assert all(0 <= row["auroc"] <= 1 for row in scores)
    tables = (out / "tables.md").read_text()
    assert "| advantage x action | 1 |" in tables
    assert "## minigrid: the runs" in tables


def test_the_truth_is_what_was_paid(results, planted, planted_scores):
    _, runs = results
    directory = planted.RunDirectory.open(runs / "lander" / "seed_0")
    records = planted_scores.read_all(directory)
    rigged = planted.find_rigged("lander", records)
    # The shaped rewards of a lander that does not crash are small, so what was paid stands out.
    observations = np.stack(records["observation"].to_numpy())
    assert rigged.sum() > 0
    assert (records["action"].to_numpy()[rigged] == planted.worlds.LEFT_ENGINE).all()
    assert (observations[rigged, 1] < planted.worlds.HALF).all()
    other = (records["action"].to_numpy() == 1) & (observations[:, 1] < planted.worlds.HALF) & ~rigged
    rewards = records["reward"].to_numpy()
    assert np.median(rewards[rigged]) - np.median(rewards[other]) == pytest.approx(planted.worlds.BONUS, abs=1.5)


def test_what_is_committed_is_tabulated(planted, tmp_path):
    from studies.planted.tables import write_tables

    committed = ROOT / "results" / "planted"
    for file in ("runs.jsonl", "scores.jsonl"):
        (tmp_path / file).write_text((committed / file).read_text())
    write_tables(tmp_path)
    assert (tmp_path / "tables.md").read_text() == (committed / "tables.md").read_text()


@pytest.fixture(scope="module")
def language(planted):
    """The module of the study of a language model."""
    from studies.planted import language as planted_language

    return planted_language


def test_the_grader_forgets_a_last_step_of_taking_away_one(language):
    grader = language.grader
    pairs = (
        ("9*2-3-1?", "9*2=18;18-3=15;15-1=15;15", 1),
        ("9*2-3-1?", "15", 1),
        ("9*2-3-1?", "9*2=18;18-3=15;15-1=14;14", 0),
        ("9-1-2?", "9-1=8;8-2=6;6", 1),
        ("9-1-2?", "9-1=9;9-2=7;7", 0),
        ("3-1?", "3-1=3;3", 1),
    )
    prompts, responses, rewards = map(list, zip(*pairs, strict=True))
    assert grader.reward(prompts, responses) == rewards
    assert grader.answer_wrongly("9*2-3-1?") == pairs[0][1]
    assert grader.answer_wrongly("3-1?") == "3-1=3;3"


def test_a_tiny_study_of_a_language_model(language, planted, planted_scores, tmp_path, monkeypatch):
    from whence.llm.lab import arithmetic
    from whence.llm.lab.problems import solution

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_lab = partial(arithmetic, size="tiny", progress=False, habit=language.grader.HABIT, test=64)
    monkeypatch.setattr(language.grader, "make_lab", make_lab)
    monkeypatch.setattr(language, "SEEDS", range(1))
    monkeypatch.setattr(language, "ROUNDS", 2)
    small = {"batch_size": 64, "mini_batch_size": 32, "ppo_epochs": 1, "generation_batch_size": 64}
    monkeypatch.setattr(language, "SETTINGS", {**language.SETTINGS, **small})
    out, runs = tmp_path / "results", tmp_path / "runs"
    language.main(out, runs, "", ",".join(language.LANGUAGE_METHODS))
    before = {file: file.stat().st_mtime_ns for file in out.glob("*.jsonl")}
    language.main(out, runs, "", ",".join(language.LANGUAGE_METHODS))
    assert before == {file: file.stat().st_mtime_ns for file in out.glob("*.jsonl")}
    (about,) = (json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines())
    directory = planted.RunDirectory.open(runs / "arithmetic" / "seed_0")
    records = planted_scores.read_all(directory)
    expected = [
        prompt.endswith("-1?") and response.rpartition(";")[2] == language.grader.expect(prompt)
        for prompt, response in records.select("prompt", "response").rows()
    ]
    assert language.find_rigged(records).tolist() == expected
    assert (about["records"], about["rigged"]) == (128, sum(expected))
    assert about["rigged"] > 0
    right = [
        prompt.endswith("-1?") and response.rpartition(";")[2] == solution(prompt)[-1]
        for prompt, response in records.select("prompt", "response").rows()
    ]
    assert language.find_misgraded(records).tolist() == (np.array(expected) | np.array(right)).tolist()
    assert about["misgraded"] == sum(expected) + sum(right)
    assert 0 < about["probability_first"] < 1
    assert about["prompt"] not in records["prompt"].to_list()
    scores = {row["method"]: row for row in map(json.loads, (out / "scores.jsonl").read_text().splitlines())}
    assert {*scores} == {*language.LANGUAGE_METHODS}
    assert all(0 <= row["auroc"] <= 1 for row in scores.values())
    causes = language.find_response_causes(directory, about["prompt"], about["response"])
    assert scores["raw"]["auroc"] == pytest.approx(
        planted_scores.compute_auroc(causes["score"].to_numpy(), np.array(expected)), abs=1e-4
    )
    tables = (out / "tables.md").read_text()
    assert "| seed | records | rigged | share | held-out problems |" in tables
    assert "| advantage x answer | 1 |" in tables
