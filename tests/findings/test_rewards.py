"""Findings on a language model's rewards."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from whence.findings.finding import CHANCE
from whence.findings.gamed_rewards import find_gamed_rewards

ROUNDS, PROMPTS, RESPONSES = 16, 4, 6


def make_run(*, explains: float = 0.0, correct: float = 0.0, start: float = 0.1, since: int = 9) -> Any:
    """A run whose reward functions pay with chances that change from a round on."""
    generator = np.random.default_rng(0)

    def make_round(kind: str, number: int) -> pl.DataFrame:
        size = PROMPTS * RESPONSES
        changes = {"reward.explains": (0.1, explains), "reward.correct": (start, correct)}
        chances = {name: first + change * (number >= since) for name, (first, change) in changes.items()}
        paid = {name: (generator.random(size) < chance).astype(float) for name, chance in chances.items()}
        ids = {"record_id": np.arange(size) + number * size, "prompt": np.repeat([*"abcd"], RESPONSES)}
        return pl.DataFrame({**ids, "advantage": generator.normal(size=size), **paid})

    return SimpleNamespace(rounds=lambda: [*range(1, ROUNDS + 1)], round=make_round)


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"explains": 0.8, "correct": -0.6, "start": 0.7}, "`explains` rises while `correct` falls"),
        ({"explains": 0.8}, "`explains` rises while `correct` stays low"),
        ({"correct": 0.8}, "`correct` rises while `explains` stays low"),
    ],
)
def test_what_rises_alone_is_named_with_its_round_and_responses(changes, title):
    (finding,) = find_gamed_rewards(make_run(**changes))
    about = int(finding.title.rpartition(" ")[2])
    assert finding.title.startswith(f"{title}, since about round")
    assert 7 <= about <= 10
    assert finding.round in range(8, 11)
    assert set(finding.record_ids) <= set(range(finding.round * 24, finding.round * 24 + 24))
    assert finding.p < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {},  # nothing is learned
        {"explains": 0.8, "correct": 0.8},  # both are learned
        {"explains": 0.8, "start": 0.9},  # the other is high from the start
        {"explains": 0.3},  # what rises may only come first
    ],
)
def test_a_sound_run_gets_no_line(changes):
    assert find_gamed_rewards(make_run(**changes)) == []


def make_early_run(seed: int, chances: Any) -> Any:
    """A run of 16 groups of 8 responses a round, to prompts that are easy and hard, of such chances of rewards."""
    generator = np.random.default_rng(seed)

    def make_round(number: int) -> pl.DataFrame:
        shift = generator.normal(size=16).repeat(8)
        odds = {name: np.log(chance / (1 - chance)) + shift for name, chance in chances(number).items()}
        paid = {name: (generator.random(128) < 1 / (1 + np.exp(-each))).astype(float) for name, each in odds.items()}
        ids = {"record_id": np.arange(128) + 128 * number, "group_id": np.arange(16).repeat(8), "prompt": "p"}
        return pl.DataFrame({**ids, "advantage": generator.normal(size=128), **paid})

    rounds = {number: make_round(number) for number in range(1, 17)}
    return SimpleNamespace(rounds=lambda: [*rounds], round=lambda kind, number: rounds[number])


SEEDS = pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])


@SEEDS
def test_a_reward_that_the_first_rounds_lose_is_named(seed):
    run = make_early_run(
        seed,
        lambda number: {
            "reward.right": {1: 0.1, 2: 0.05}.get(number, 0.006),
            "reward.grader": min(0.9, 0.2 * number - 0.15),
        },
    )
    (finding,) = find_gamed_rewards(run)
    assert re.match(r"`grader` rises while `right` falls, since about round [12]$", finding.title)
    assert re.match(r"From (round 1|rounds 1 to 2) to rounds 13 to 16, ", finding.evidence)
    assert finding.p <= CHANCE


@SEEDS
def test_first_rounds_like_the_others_are_not_named(seed):
    run = make_early_run(
        seed,
        lambda number: {"reward.right": 0.1 + 0.01 * number, "reward.format": min(0.95, 0.3 * number), "reward.a": 0.5},
    )
    assert find_gamed_rewards(run) == []
