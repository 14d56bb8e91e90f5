"""What is seen of rewards and actions in places of tables made by hand, with one thing wrong, and of look-alikes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import polars as pl
import pytest

from whence.findings.detectors.actions import look_at_dead_stretches, look_at_late_actions, look_at_swaps
from whence.findings.detectors.reward_effects import look_at_late_rewards, look_at_rewards
from whence.findings.evidence import Evidence
from whence.findings.finding import CannotTellError, Sight

look_at_rewards_of_parts = partial(look_at_rewards, in_parts=True)
look_at_missing_rewards = partial(look_at_rewards, is_missing=True)

COPIES, EPISODES, LENGTH = 4, 25, 30
N = COPIES * EPISODES * LENGTH
STEP = np.arange(N) % LENGTH
EPISODE = np.arange(N) // LENGTH
COPY = EPISODE // EPISODES
ROUND = 1 + EPISODE % EPISODES // 5

Where = Callable[[Evidence], Any]


@cache  # nobody changes what it returns
def make(swapped: Where | None = None, delay: int = 0, *, is_box: bool = False, dead: float = 2.0) -> Evidence:
    """A point on a line that actions push; paid for coming nearer to 0, less the price of a push forth.

    Where `swapped`, pushes go the other way; actions act so many steps late, and those beyond `dead` as it does.
    """
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, N) if is_box else rng.integers(0, 3, N)
    pushes = actions if is_box else actions - 1.0
    place, speed = np.zeros(N), np.zeros(N)
    for i in range(N):
        if STEP[i] == 0:
            place[i], speed[i] = rng.normal(size=2)
            continue
        push = pushes[i - 1 - delay] if STEP[i] > delay else 0.0
        push = min(push, dead)
        is_swapped = swapped is not None and swapped({"copy": COPY[i], "round": ROUND[i], "speed": speed[i - 1]})
        speed[i] = 0.9 * speed[i - 1] + (-1 if is_swapped else 1) * push + 0.1 * rng.normal()
        place[i] = 0.9 * place[i - 1] + 0.2 * speed[i]
    reward = np.append(place[:-1] ** 2 - place[1:] ** 2, 0.0) - 0.05 * (pushes > 0)
    columns: dict[str, Any] = {"record_id": np.arange(N), "round": ROUND, "env_index": COPY, "step": STEP}
    columns = {name: np.asarray(column, dtype=float) for name, column in columns.items()}
    columns |= {"episode_id": EPISODE, "reward": reward}
    features = {"place": place, "speed": speed, "colour": rng.normal(size=N)}
    names = ["push"] if is_box else ["back", "wait", "forth"]
    blocks = {name: values[:, None] for name, values in features.items()}
    ends = np.where(STEP == LENGTH - 1, "truncated", "")
    taken = actions[:, None] if is_box else actions
    return Evidence({}, pl.DataFrame(), columns, taken, names, features, blocks, ends)


def pay(change: Callable[[Any], Any], where: Where) -> Evidence:
    """Change rewards somewhere."""
    evidence = make()
    rewards = evidence.columns["reward"]
    paid = np.where(where(evidence), change(rewards), rewards)
    return replace(evidence, columns={**evidence.columns, "reward": paid})


def with_rewards(rewards: Callable[[Evidence], Any]) -> Evidence:
    evidence = make()
    return replace(evidence, columns={**evidence.columns, "reward": rewards(evidence)})


def is_middle(evidence: Evidence) -> Any:
    return (evidence.features["place"] >= 0.2) & (evidence.features["place"] < 1.2)


def is_third(evidence: Evidence) -> Any:
    return COPY == 2


def is_late(evidence: Evidence) -> Any:
    return ROUND >= 4


Look = Callable[[Evidence], Sight]
FAULTS: dict[str, tuple[Look, Callable[[], Evidence], list[str]]] = {
    "sign": (look_at_rewards, lambda: pay(np.negative, is_middle), ["opposite sign", "place", "−1|-1|-0.9"]),
    "sign of an action": (
        look_at_rewards,
        lambda: pay(lambda r: -r, lambda e: (e.features["place"] > 0.5) & (e.actions == 2)),
        ["opposite sign", "action forth", "place"],
    ),
    "doubled in a copy": (
        look_at_rewards_of_parts,
        lambda: pay(lambda r: 2 * r, is_third),
        ["larger", "environment 2"],
    ),
    "missing": (look_at_missing_rewards, lambda: pay(np.zeros_like, is_middle), ["missing", "place"]),
    "sign of a copy": (look_at_rewards_of_parts, lambda: pay(np.negative, is_third), ["opposite", "environment 2"]),
    "halved late": (look_at_rewards_of_parts, lambda: pay(lambda r: r / 3, is_late), ["smaller", "from round 4 on"]),
    "late reward": (
        look_at_late_rewards,
        lambda: with_rewards(lambda e: np.roll(e.features["colour"], 1)),
        ["late by 1 step:"],
    ),
    "swapped": (
        look_at_swaps,
        lambda: make(lambda one: one["copy"] == 2),
        ["Actions back and forth are swapped", "environment 2"],
    ),
    "reversed": (
        look_at_swaps,
        lambda: make(lambda one: one["round"] >= 4, is_box=True),
        ["axis push acts in reverse", "from round 4 on"],
    ),
    "dead stretch of an axis": (
        look_at_dead_stretches,
        partial(make, is_box=True, dead=0.2),
        ["axis", "nothing where push ≥ 0.2|nothing where push ≥ 0.1", "in 4"],
    ),
    "late action": (look_at_late_actions, partial(make, delay=1), ["late, by 1 step:"]),
    "later action": (look_at_late_actions, partial(make, delay=2), ["late, by 2 steps:"]),
}


@cache
def look_at_healthy(look: Look, *, is_box: bool) -> Sight:
    return look(make(is_box=is_box))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_far_above_its_healthy_twin(name: str) -> None:
    look, plant, words = FAULTS[name]
    sight, healthy = look(plant()), look_at_healthy(look, is_box="axis" in words[0])
    assert sight.statistic > 0.7 > 0.4 > healthy.statistic, (sight, healthy.statistic)
    for word in words:
        assert any(each in sight.title for each in word.split("|")), sight.title
    assert sight.kind
    assert sight.evidence
    assert sight.advice


def test_an_axis_of_whole_numbers_has_no_stretch() -> None:
    evidence = make(is_box=True)
    signs = np.sign(evidence.actions)
    with pytest.raises(CannotTellError, match="whole numbers"):
        look_at_dead_stretches(replace(evidence, actions=signs))
    both = np.hstack([evidence.actions, signs])
    assert look_at_dead_stretches(replace(evidence, actions=both, action_names=["push", "sign"])).statistic < 0.4


def test_what_little_an_earlier_action_moves_does_not_make_it_late() -> None:
    """The sun's way is known without actions, but for a little that follows the action before."""
    evidence = make(lambda one: one["copy"] == 3)
    angles, little = STEP * 2 * np.pi / LENGTH, 0.03 * np.roll(evidence.actions - 1.0, 2)
    features = {**evidence.features, "east": np.sin(angles) + little, "north": np.cos(angles) + little}
    blocks = {name: values[:, None] for name, values in features.items()}
    assert look_at_late_actions(replace(evidence, features=features, blocks=blocks)).statistic == 0


def test_the_records_of_a_place_are_marked() -> None:
    evidence = pay(np.negative, is_middle)
    mask, there = look_at_rewards(evidence).mask, is_middle(evidence)
    assert mask is not None
    assert mask.shape == (N,)
    assert (mask & there).sum() > 0.7 * max((mask & evidence.has_next).sum(), (there & evidence.has_next).sum())


LOOKALIKES: dict[str, Callable[[], Evidence]] = {
    "an action with a price in a range": lambda: pay(lambda r: r - 1.0, lambda e: is_middle(e) & (e.actions == 2)),
    "a place that pays more": lambda: pay(lambda r: r + 1.0, is_middle),
    "a place that pays twice": lambda: pay(lambda r: 2 * r, is_middle),
    "a step that pays": lambda: with_rewards(lambda e: e.features["colour"]),
    "rewards that are noise": lambda: pay(lambda r: np.random.default_rng(1).normal(size=N), lambda e: True),
}


@pytest.mark.parametrize(
    "name",
    # The others pay more as well, and in steps alone.
    [pytest.param(name, marks=pytest.mark.long if "twice" in name or "step" in name else ()) for name in LOOKALIKES],
)
def test_what_only_looks_alike_is_no_fault(name: str) -> None:
    evidence = LOOKALIKES[name]()
    for look in (look_at_rewards, look_at_rewards_of_parts, look_at_missing_rewards, look_at_late_rewards):
        assert look(evidence).statistic < 0.4


def test_equal_rewards_and_few_records_cannot_be_told() -> None:
    with pytest.raises(CannotTellError, match="equal"):
        look_at_rewards(pay(np.ones_like, lambda e: True))
    evidence = make()
    ended = {**evidence.columns, "step": np.zeros(N)}
    with pytest.raises(CannotTellError, match="steps"):
        look_at_rewards(replace(evidence, columns=ended))
