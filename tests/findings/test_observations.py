"""What detectors see of observations and episodes made by hand: with a fault, and with what looks like it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from whence.findings.detectors.episodes import (
    look_at_equal_starts,
    look_at_first_rewards,
    look_at_fixed_length,
    look_at_limit,
    look_at_paid_again,
    look_at_short_episodes,
    look_at_unforeseen_ends,
)
from whence.findings.detectors.observations import (
    look_at_clipped_observations,
    look_at_equal_observations,
    look_at_idle_entries,
    look_at_late_observations,
    look_at_lost_entries,
    look_at_lost_observations,
    look_at_outlying_observations,
    look_at_repeats,
    look_at_scales,
    look_at_stops,
)
from whence.findings.evidence import Evidence, summarise
from whence.findings.finding import CannotTellError
from whence.findings.inspection import measure_one

COPIES, EPISODES, LENGTH = 4, 25, 30
N = COPIES * EPISODES * LENGTH
STEP, EPISODE = np.arange(N) % LENGTH, np.arange(N) // LENGTH
COPY = EPISODE // EPISODES
LAST = STEP == LENGTH - 1
FIFTH = np.random.default_rng(2).integers(1, LENGTH, COPIES * EPISODES)[EPISODE] == STEP
FLAGS = {f"flag {i}": (EPISODE % EPISODES < 8) & (i == STEP // 2) for i in range(20)}


def make_run() -> Evidence:
    """Return a run: a point that noise pushes, an entry that is noise alone, and one that shows the end."""
    rng = np.random.default_rng(0)
    pushes = rng.normal(size=(COPIES * EPISODES, LENGTH))
    speed = np.cumsum(pushes, axis=1)
    place = np.cumsum(speed, axis=1) / 10
    columns = {"record_id": np.arange(N), "round": 1 + EPISODE % EPISODES // 5, "env_index": COPY, "step": STEP}
    columns |= {"episode_id": EPISODE, "reward": rng.normal(size=N)}
    evidence = Evidence(
        {"max_episode_steps": LENGTH, "observation_space": {"type": "Box", "low": [-99.0], "high": [99.0]}},
        *(pl.DataFrame(), {name: np.asarray(values, dtype=float) for name, values in columns.items()}),
        *(rng.integers(0, 2, N), ["left", "right"], {}, {}, np.where(LAST, "terminated", "")),
    )
    entries = {"speed": speed.ravel(), "place": place.ravel(), "noise": rng.normal(size=N), "alarm": LAST * 1.0}
    return with_entries(evidence, **entries)


def with_entries(evidence: Evidence, **entries: Any) -> Evidence:
    blocks = {**evidence.blocks, **{name: np.asarray(values)[:, None] for name, values in entries.items()}}
    return replace(evidence, blocks=blocks, features=summarise(blocks))


def show(rows: Any) -> Callable[[Evidence], Evidence]:
    """Return what shows the observations of other records."""
    return lambda run: with_entries(run, **{name: block[rows, 0] for name, block in run.blocks.items()})


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Evidence], Evidence]:
    """Return what changes an entry."""
    return lambda run: with_entries(run, **{name: change(run.blocks[name][:, 0].copy())})


def pick(share: float) -> Any:
    return np.random.default_rng(1).random(N) < share


def wait(share: float) -> Any:
    """Return the records that are shown where each step may show the one before."""
    return np.where(pick(share) & (STEP > 0), np.arange(N) - 1, np.arange(N))


def stand(run: Evidence) -> Evidence:
    """Let all stand still at a third of the steps, and continue from there."""
    moves = ~pick(1 / 3) | (STEP == 0)
    rows = EPISODE * LENGTH + (np.cumsum(moves) - np.cumsum(moves)[EPISODE * LENGTH])
    return show(rows)(run)


def end_at(ends: Any) -> Callable[[Evidence], Evidence]:
    """Return what ends episodes at more records."""

    def change(run: Evidence) -> Evidence:
        starts = np.append(True, (ends | LAST)[:-1])
        first = np.flatnonzero(starts)[np.cumsum(starts) - 1]
        columns = {**run.columns, "step": np.arange(N) - first, "episode_id": np.cumsum(starts)}
        return replace(run, columns=columns, ends=np.where(ends | LAST, "terminated", ""))

    return change


def pay(rewards: Any, again: float = 0.0) -> Callable[[Evidence], Evidence]:
    """Return what pays these rewards, and part of the last one once more after the reset."""
    repeated = np.append(0.0, (rewards * LAST)[:-1]) * (EPISODE % EPISODES > 0)
    return lambda run: replace(run, columns={**run.columns, "reward": rewards + again * repeated})


CHANCY = np.random.default_rng(2).normal(size=N) * np.where(LAST, 9, 1)
DRIFT = 9.0 * (EPISODE % EPISODES // 5) + 50 * COPY


def register(limit: int | None) -> Callable[[Evidence], Evidence]:
    """Return what registers a time limit, and hides the end."""
    return lambda run: replace(edit("alarm", lambda x: 0 * x)(run), config={"max_episode_steps": limit})


FAULTS: dict[str, tuple[Any, float, Callable[[Evidence], Evidence]]] = {
    "equal": (look_at_equal_observations, 3.0, show(np.zeros(N, dtype=int))),
    "equal in each environment": (look_at_equal_observations, 3.0, show(COPY * EPISODES * LENGTH)),
    "lost": (look_at_lost_observations, 0.8, show(np.where(pick(0.1), 0, np.arange(N)))),
    "stale": (look_at_repeats, 0.2, show(wait(0.1))),
    "every second step": (look_at_repeats, 0.9, show(np.arange(N) - STEP % 2)),
    "late": (look_at_late_observations, 1.5, show(np.arange(N) - (STEP > 0))),
    "stopped in a copy": (look_at_stops, 2.0, edit("speed", lambda x: np.where(COPY == 2, 0.5, x))),
    "stopped late": (look_at_stops, 2.0, edit("speed", lambda x: np.where((COPY == 2) & (EPISODE > 65), 0.5, x))),
    "lost entry": (look_at_lost_entries, 0.8, edit("place", lambda x: np.where(pick(0.1), -40.0, x))),
    "lost amid": (look_at_lost_entries, 0.8, edit("noise", lambda x: np.where(pick(0.1), 0.0, x))),
    "outlying": (look_at_outlying_observations, 2.0, edit("noise", lambda x: np.where(np.arange(N) == 77, 1e4, x))),
    "unscaled": (look_at_scales, 2.5, edit("noise", lambda x: 1e4 * x)),
    "all unscaled": (
        look_at_scales,
        2.5,
        lambda run: with_entries(run, **{k: 1e6 * run.blocks[k][:, 0] for k in run.blocks}),
    ),
    "zero": (look_at_idle_entries, 3.0, edit("noise", lambda x: 0 * x)),
    "frozen": (look_at_idle_entries, 3.0, edit("noise", lambda x: x[np.arange(N) - STEP])),
    "equal starts": (look_at_equal_starts, 2.0, show(np.where(STEP == 0, COPY * EPISODES * LENGTH, np.arange(N)))),
    "shrunk": (look_at_short_episodes, 1.4, end_at((COPY == 1) & (EPISODE > 40))),
    "limit": (look_at_limit, 1.0, edit("alarm", lambda x: 0 * x)),
    "random ends": (look_at_unforeseen_ends, 0.6, end_at(pick(0.1))),
    "fixed length": (look_at_fixed_length, 1.0, register(None)),
    "a length below the limit": (look_at_limit, 1.0, register(99)),
    "late rewards": (look_at_first_rewards, 1.5, pay(np.where(STEP, CHANCY, 0.0))),
    "paid again": (look_at_paid_again, 0.6, pay(CHANCY, 0.3)),
    "paid again, all alike": (look_at_paid_again, 5.0, pay(np.ones(N), 1.0)),
}

HARMLESS: dict[str, tuple[Any, float, Callable[[Evidence], Evidence]]] = {
    "a state that lasts": (look_at_lost_observations, 0.2, show(np.where(STEP % 12 < 8, 0, np.arange(N)))),
    "a known state": (look_at_repeats, 0.1, show(np.where(STEP % 12 < 8, 0, np.arange(N)))),
    "standing still": (look_at_repeats, 0.1, stand),
    "a value that comes once an episode": (look_at_lost_entries, 0.3, edit("noise", lambda x: np.where(FIFTH, 0.0, x))),
    "a value that lasts": (look_at_lost_entries, 0.3, edit("noise", lambda x: np.where(STEP % 12 < 4, 0.0, x))),
    "a bound": (look_at_lost_entries, 0.3, edit("noise", lambda x: np.maximum(x, 0.0))),
    "stock runs out": (look_at_clipped_observations, 0.01, edit("noise", lambda x: np.maximum(x, 0.0))),
    "an indicator": (look_at_idle_entries, 0.1, edit("noise", lambda x: 0 * x + 1)),
    "a parameter": (look_at_idle_entries, 0.1, edit("noise", lambda x: 0 * x + 0.2)),
    "a block of indicators": (
        look_at_idle_entries,
        0.1,
        lambda run: with_entries(run, red=np.zeros(N), blue=np.zeros(N)),
    ),
    "a declared limit": (look_at_clipped_observations, 0.01, edit("speed", lambda x: np.clip(50 * x, -99, 99))),
    "an empty stock of known prices": (
        look_at_repeats,
        0.1,
        lambda run: with_entries(
            show(np.where(FIFTH | np.roll(FIFTH, 1), 0, np.arange(N)))(run), price=np.sin(EPISODE)
        ),
    ),
    "rare flags": (look_at_stops, 0.1, lambda run: with_entries(run, **FLAGS)),
    "a switch": (look_at_stops, 0.5, edit("noise", lambda x: x > 3.0)),
    "one start": (look_at_equal_starts, 0.1, show(np.where(STEP == 0, 0, np.arange(N)))),
    "a clock that shows": (look_at_limit, 0.3, edit("noise", lambda x: STEP / LENGTH)),
    "ends at a place": (look_at_unforeseen_ends, 0.3, lambda run: end_at(run.blocks["noise"][:, 0] > 1.5)(run)),
    "rewards that are rare": (look_at_first_rewards, 0.1, pay(1.0 * (STEP % 12 == 11))),
    "rewards that drift": (look_at_paid_again, 0.1, pay(CHANCY + DRIFT)),
    "two short ones": (look_at_short_episodes, 0.5, end_at(np.isin(np.arange(N), [300, 301]))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_and_its_healthy_twin_is_not(name):
    look, least, plant = FAULTS[name]
    sight = look(plant(make_run()))
    assert sight.statistic > least
    assert sight.title
    assert measure_one(look, make_run()).statistic < least / 2


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_like_a_fault_is_not(name):
    look, most, change = HARMLESS[name]
    assert look(change(make_run())).statistic < most


def test_the_place_is_named():
    stopped, lost = (look(plant(make_run())) for look, _, plant in (FAULTS["stopped in a copy"], FAULTS["lost amid"]))
    assert "speed stops: it never changes in the last 750 records of environment 2" in stopped.title
    assert (stopped.mask == (COPY == 2)).all()
    assert "noise is lost now and then" in lost.title
    assert "exactly 0" in lost.title


def test_only_a_length_that_is_registered_is_called_the_limit():
    at_limit, below = (look_at_limit(register(limit)(make_run())) for limit in (LENGTH, 99))
    assert "A time limit is reported as an end: 100 episodes" in at_limit.title
    assert "A fixed length, as of a time limit, is reported as an end: 100 episodes" in below.title
    assert "the registered limit is 99 steps" in below.evidence


def test_clipping_counts_at_both_ends_and_under_vec_normalize():
    run = make_run()
    clipped = edit("speed", lambda x: np.clip(x, -1, 1))(edit("noise", lambda x: np.clip(x, -1, 1))(run))
    assert look_at_clipped_observations(clipped).statistic > 0.1
    normalised = {name: np.clip(block, -0.5, 0.5) for name, block in run.blocks.items()}
    config = {"VecNormalize": {"clip_obs": 0.5}}
    sight = look_at_clipped_observations(replace(run, config=config, normalised=normalised))
    assert sight.statistic > 0.1
    assert "`clip_obs`" in sight.title


def test_a_speed_that_an_action_at_its_bound_sets_is_not_clipped():
    actions = np.clip(np.random.default_rng(3).normal(size=(N, 1)), -1, 1)
    run = replace(make_run(), actions=actions)
    clipped = edit("speed", lambda x: np.clip(x, -1, 1))(run)
    for taken in (actions, np.hstack([actions, np.zeros((N, 1))]), np.sign(actions)):
        assert look_at_clipped_observations(replace(run, actions=taken)).statistic < 0.01
        assert look_at_clipped_observations(replace(clipped, actions=taken)).statistic > 0.05
    is_set = edit("speed", lambda x: np.where(STEP > 0, np.roll(2 * actions[:, 0], 1), 0.1))(run)
    assert look_at_clipped_observations(is_set).statistic < 0.01


def test_agents_of_one_world_may_have_entries_without_a_use():
    stopped = FAULTS["stopped in a copy"][2](make_run())
    assert look_at_stops(replace(stopped, config={"env_wrappers": []})).statistic < 0.5


def test_what_cannot_be_told_says_why():
    discrete = replace(make_run(), config={"observation_space": {"type": "Discrete", "n": 9}})
    for look in (look_at_equal_observations, look_at_repeats, look_at_unforeseen_ends):
        with pytest.raises(CannotTellError, match="few states"):
            look(discrete)
    with pytest.raises(CannotTellError, match="hardly vary"):
        look_at_unforeseen_ends(end_at(pick(0.1))(show(COPY * EPISODES * LENGTH)(make_run())))
    indicators = replace(make_run(), blocks={"door": 1.0 * pick(0.5)[:, None], "key": 1.0 * LAST[:, None]})
    with pytest.raises(CannotTellError, match="no entry is continuous"):
        look_at_repeats(indicators)
    alone = replace(make_run(), columns={**make_run().columns, "env_index": np.zeros(N)})
    with pytest.raises(CannotTellError, match="one environment"):
        look_at_equal_starts(alone)
    for look in (look_at_short_episodes, look_at_limit):  # whose loop does not tell where episodes end
        with pytest.raises(CannotTellError, match="no end of an episode is known"):
            look(replace(make_run(), ends=np.full(N, "")))
    with pytest.raises(CannotTellError, match="no time limit"):
        look_at_limit(replace(make_run(), config={}))
    with pytest.raises(CannotTellError, match="limit is registered"):
        look_at_fixed_length(make_run())
    with pytest.raises(CannotTellError, match="same reward"):
        look_at_paid_again(pay(1.0 - LAST)(make_run()))
    with pytest.raises(CannotTellError, match="not stored"):
        look_at_limit(replace(make_run(), blocks={}))
