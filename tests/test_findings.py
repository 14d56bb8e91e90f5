"""What findings say of tables made by hand, each with one thing wrong, and of noise."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from whence.findings.agreement import find_action_faults, find_reward_faults
from whence.findings.episodes import (
    find_harm,
    find_limit_as_end,
    find_loops,
    find_paid_again,
    find_scaled_copies,
    find_unpaid_ends,
)
from whence.findings.evidence import Evidence
from whence.findings.finding import Finding
from whence.findings.finding_search import DETECTORS
from whence.findings.learning import find_critic_faults, find_settings
from whence.findings.observations import find_clipped, find_constant, find_repeated
from whence.findings.subgroups import Condition, cut, search, sharpen

COPIES, EPISODES, LENGTH = 4, 25, 30
N = COPIES * EPISODES * LENGTH
STEP = np.arange(N) % LENGTH
EPISODE = np.arange(N) // LENGTH
COPY = EPISODE // EPISODES


def healthy(seed: int = 0, push: float = 0.4) -> Evidence:
    """A point on a line that actions push; it is paid for coming nearer to 0. Episodes are cut after 30 steps."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, 3, N)
    place, speed = np.zeros(N), np.zeros(N)
    for i in range(N):
        if STEP[i] == 0:
            place[i], speed[i] = rng.normal(size=2)
        else:
            speed[i] = 0.9 * speed[i - 1] + push * (actions[i - 1] - 1) + 0.3 * rng.normal()
            place[i] = place[i - 1] + 0.2 * speed[i]
    reward = np.append(np.abs(place[:-1]) - np.abs(place[1:]), 0.0) - 0.01 * actions
    ends = np.where(STEP == LENGTH - 1, "truncated", "")
    reward[ends != ""] = 0.3 * rng.normal(size=COPIES * EPISODES)
    value = rng.normal(size=N)
    columns: dict[str, Any] = {
        "record_id": np.arange(N, dtype=float),
        "round": 1.0 + EPISODE % EPISODES // 5,
        "env_index": COPY.astype(float),
        "episode_id": EPISODE.astype(float),
        "step": STEP.astype(float),
        "reward": reward,
        "value": value,
        "return": value + rng.normal(size=N),
        "advantage": rng.normal(size=N),
        "score": rng.standard_t(4, size=N),
    }
    features = {"place": place, "speed": speed, "colour": rng.normal(size=N)}
    return Evidence({}, pl.DataFrame(), columns, actions, ["push back", "wait", "push forth"], features, features, ends)


def with_column(evidence: Evidence, **columns: Any) -> Evidence:
    return replace(evidence, columns={**evidence.columns, **columns})


def with_features(evidence: Evidence, **features: Any) -> Evidence:
    features = {**evidence.features, **features}
    return replace(evidence, features=features, shown=features)


def reverse_rewards(_: Evidence) -> Evidence:
    """Where an action pushes hard, the next observation tells it, and the prediction learns the wrong sign as well."""
    evidence = healthy(push=0.2)
    is_wrong = (evidence.actions == 2) & (evidence.features["speed"] > 0.3)
    return with_column(evidence, reward=np.where(is_wrong, -1, 1) * evidence.columns["reward"])


def lose_rewards(evidence: Evidence) -> Evidence:
    is_wrong = (evidence.actions == 0) & (evidence.columns["round"] >= 4)
    return with_column(evidence, reward=np.where(is_wrong, 0, evidence.columns["reward"]))


def swap_actions(evidence: Evidence) -> Evidence:
    return replace(evidence, actions=np.where(COPY == 2, 2 - evidence.actions, evidence.actions))


def repeat_observations(evidence: Evidence) -> Evidence:
    shown = np.arange(N) - STEP % 2
    return with_features(evidence, **{name: values[shown] for name, values in evidence.features.items()})


def pay_again(evidence: Evidence) -> Evidence:
    reward = evidence.columns["reward"].copy()
    starts = np.flatnonzero((STEP == 0) & (EPISODE % EPISODES > 0))
    reward[starts] += reward[starts - 1]
    return with_column(evidence, reward=reward)


def end_early(evidence: Evidence) -> Evidence:
    """Half of the episodes end with −10, the others where the colour is above 2, as any step."""
    is_last = STEP == LENGTH - 1
    colour = np.where(is_last & (EPISODE % 2 == 0), 2.5, np.minimum(evidence.features["colour"], 2.4))
    reward = np.where(is_last, np.where(EPISODE % 2 == 0, 0.01, -10.0), evidence.columns["reward"])
    ended = replace(evidence, ends=np.where(is_last, "terminated", ""))
    return with_features(with_column(ended, reward=reward), colour=colour)


def farm(evidence: Evidence) -> Evidence:
    """Half of the episodes end after 10 steps with 1; the others stand at one place and earn 0.2 at each step."""
    is_short = EPISODE % 2 == 0
    taken = ~is_short | (STEP < 10)
    reward = np.where(is_short, (STEP == 9) * 1.0, 0.2)
    ends = np.where(is_short & (STEP == 9), "terminated", np.where(~is_short & (STEP == LENGTH - 1), "truncated", ""))
    place = np.where(is_short, evidence.features["place"], 1.0)
    other = with_features(
        with_column(replace(evidence, ends=ends), reward=reward), place=place, speed=place, colour=place
    )
    columns = {name: values[taken] for name, values in other.columns.items()}
    features = {name: values[taken] for name, values in other.features.items()}
    return replace(
        other, columns=columns, features=features, shown=features, actions=other.actions[taken], ends=ends[taken]
    )


def settings(**hyperparameters: Any) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        metrics = pl.DataFrame(
            {"round": range(1, 13), "train/approx_kl": [0.02] * 12, "train/explained_variance": [1e-9] * 12}
        )
        return replace(evidence, metrics=metrics, config={"n_envs": COPIES, "hyperparameters": hyperparameters})

    return change


def harm(evidence: Evidence) -> Evidence:
    is_harmful = (evidence.actions == 2) & (evidence.features["speed"] > 0.3)
    return with_column(evidence, score=np.where(is_harmful, -4.0, 0.0) + evidence.columns["score"])


def mislead_critic(evidence: Evidence) -> Evidence:
    return with_column(evidence, value=evidence.columns["value"] - 4.0 * (evidence.features["place"] > 0.8))


FAULTS: Mapping[str, tuple[Callable[[Evidence], list[Finding]], Callable[[Evidence], Evidence], str]] = {
    "reversed reward": (find_reward_faults, reverse_rewards, r"wrong sign for (?=.*push forth)(?=.*speed ≥)"),
    "lost reward": (find_reward_faults, lose_rewards, r"not paid for (?=.*push back)(?=.*round ≥ 4)"),
    "swapped actions": (find_action_faults, swap_actions, r"swapped, for .*env_index 2"),
    "repeated": (find_repeated, repeat_observations, r"does not change in 5\d% of the steps, mostly at even steps"),
    "constant": (find_constant, lambda e: with_features(e, speed=np.zeros(N)), r"speed never changes: it is 0"),
    "frozen": (
        find_constant,
        lambda e: with_features(e, speed=np.where(COPY == 1, 0.5, e.features["speed"])),
        r"speed never changes: it is 0.5 in all 750 records of env_index 1",
    ),
    "clipped": (
        find_clipped,
        lambda e: with_features(e, place=np.clip(e.features["place"], -0.5, 0.5)),
        r"clipped at a bound: place \(at ±0.5",
    ),
    "limit": (
        find_limit_as_end,
        lambda e: replace(e, ends=np.where(e.ends != "", "terminated", "")),
        r"time limit is taken as an end: 100 episodes are terminated after exactly 30 steps",
    ),
    "early end": (find_unpaid_ends, end_early, r"end early where colour ≥ 2.5: 50% of all ends"),
    "paid again": (find_paid_again, pay_again, r"first step of an episode is paid the last reward"),
    "loop": (find_loops, farm, r"0.2 is collected again and again .* earn 6, those that reach it 1"),
    "scaled copy": (
        find_scaled_copies,
        lambda e: with_column(e, reward=np.where(COPY == 3, 100, 1) * e.columns["reward"]),
        r"env_index 3 are \d+ times as large",
    ),
    "discount": (find_settings, settings(gamma=0.5), r"γ = 0.5 looks 2 steps ahead, while an episode takes 30"),
    "few steps": (find_settings, settings(n_steps=16), r"too few steps: `n_steps` 16 of each of 4 copies make 64"),
    "rate": (find_settings, settings(learning_rate=0.03), r"rate 0.03 is too high: the critic explains nothing"),
    "harm": (find_harm, harm, r"Training on (?=.*speed ≥)(?=.*push forth).* harms"),
    "critic": (find_critic_faults, mislead_critic, r"critic is too low for .*place ≥"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(name: str) -> None:
    detector, plant, title = FAULTS[name]
    finding, *_ = detector(plant(healthy()))
    assert re.search(title, finding.title), finding.title
    assert finding.p <= 0.01
    assert finding.evidence
    assert finding.advice


@pytest.mark.parametrize("seed", range(2))
def test_nothing_stands_out_in_a_healthy_run(seed: int) -> None:
    assert [finding.title for detector in DETECTORS for finding in detector(healthy(seed))] == []


def test_a_search_over_noise_finds_nothing() -> None:
    """Of 60 searches at 5%, at most 8 find something, with a probability of 99%."""
    groups = np.repeat(np.arange(40), 10)
    chances = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        # The noise of an episode's records goes together, as rewards of an episode do.
        column = rng.normal(size=400) + rng.normal(size=40)[groups]
        conditions = [one for name in "abc" for one in cut(name, rng.normal(size=400))]
        chances.append(min(group.p for group in search(column, conditions, groups, seed=seed)))
    assert sum(p <= 0.05 for p in chances) <= 8


def test_a_search_finds_a_pair_of_conditions() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 2000))
    groups = np.repeat(np.arange(100), 20)
    conditions = [*cut("a", a), *cut("b", b), Condition("action", "action 1", rng.random(2000) < 0.5)]
    inside = (a >= np.quantile(a, 0.6)) & (b < np.quantile(b, 0.4))
    best = search(rng.normal(size=2000) - 1.5 * inside, conditions, groups, sign=-1)[0]
    assert {one.column for one in best.conditions} >= {"a", "b"}
    assert best.p < 1e-3
    assert (best.mask & inside).sum() > 0.9 * inside.sum()
    # A finer cut is taken where it is surer.
    column = -1.0 * (a >= np.quantile(a, 0.7)) + 0.1 * b
    rough = search(column, cut("a", a), groups, sign=-1)[0]
    finer = sharpen(rough, column, cut("a", a, 10), groups)
    assert finer.mean - finer.rest < rough.mean - rough.rest
