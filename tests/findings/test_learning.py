"""What detectors of copies, of changes and of learning see: a fault, its healthy twin, and what only looks like it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from whence.findings.detectors import learning, parts
from whence.findings.evidence import Evidence
from whence.findings.finding import CannotTellError
from whence.findings.settings import log_new_advice

COPIES, ROUNDS, EPISODES, LENGTH = 4, 12, 4, 25
N = COPIES * ROUNDS * EPISODES * LENGTH
STEP = np.arange(N) % LENGTH
EPISODE = np.arange(N) // LENGTH
ROUND = 1 + EPISODE % (ROUNDS * EPISODES) // EPISODES
COPY = EPISODE // (ROUNDS * EPISODES)
LAST = STEP == LENGTH - 1
LATE = ROUND >= 7


def healthy(**columns: Any) -> Evidence:
    """Four environments, twelve rounds; a place that actions push to the right, and is paid; it learns slowly."""
    rng = np.random.default_rng(0)
    actions = rng.integers(0, 2, N)
    place = np.zeros(N)
    for i in range(N):
        place[i] = rng.normal() if STEP[i] == 0 else place[i - 1] + 0.5 * actions[i - 1] + 0.3 * rng.normal() - 0.2
    values = place + 0.02 * ROUND
    named: dict[str, Any] = {
        "record_id": np.arange(N),
        "round": ROUND,
        "env_index": COPY,
        "step": STEP,
        "episode_id": EPISODE,
    }
    named |= {"reward": 1 + 0.3 * values + rng.normal(size=N), "value": values, "return": values + rng.normal(size=N)}
    features = {"place": place, "colour": rng.normal(size=N)}
    metrics = {
        "round": np.arange(1, ROUNDS + 1),
        "train/approx_kl": np.full(ROUNDS, 0.01),
        "train/entropy_loss": np.linspace(-1.4, -0.1, ROUNDS),
        "episode_return": np.linspace(0.0, 9.0, ROUNDS),
        "train/n_updates": np.arange(ROUNDS) * 1000,
        "train/learning_rate": np.full(ROUNDS, 3e-4),
        "kept": np.full(ROUNDS, 400),
    }
    settings = {"n_epochs": 10, "n_steps": 100, "gamma": 0.99, "batch_size": 64}
    return Evidence(
        config={"n_envs": COPIES, "env_wrappers": [{}], "hyperparameters": settings},
        metrics=pl.DataFrame(metrics),
        columns={name: np.asarray(column, dtype=float) for name, column in {**named, **columns}.items()},
        actions=actions,
        action_names=["wait", "push"],
        features=features,
        blocks={name: column[:, None] for name, column in features.items()},
        ends=np.where(LAST, "terminated", ""),
    )


TWIN = healthy()
REWARD, PLACE = TWIN.columns["reward"], TWIN.features["place"]


def see(place: Any) -> Evidence:
    return replace(TWIN, features={**TWIN.features, "place": place})


def select(rows: Any) -> Evidence:
    """Return some of the twin's records; the last of each episode ends it."""
    parts: Any = {name: {key: x[rows] for key, x in getattr(TWIN, name).items()} for name in ("columns", "features")}
    is_last = np.append(np.diff(EPISODE[rows]) > 0, True)
    return replace(TWIN, **parts, actions=TWIN.actions[rows], ends=np.where(is_last, "terminated", ""))


def measure(**metrics: Any) -> Evidence:
    return replace(TWIN, metrics=TWIN.metrics.with_columns(**{name: pl.Series(x) for name, x in metrics.items()}))


def configure(**settings: Any) -> Evidence:
    return replace(TWIN, config={**TWIN.config, "hyperparameters": {**TWIN.config["hyperparameters"], **settings}})


Look = Callable[[Evidence], Any]

SWAPPED = replace(TWIN, actions=np.where(COPY == 3, 1 - TWIN.actions, TWIN.actions))

SPARSE = np.where(LAST & (EPISODE % 9 == 0), 1.0, 0.0)
PAID = np.abs(REWARD) + 0.01
SIGN = np.sign(REWARD)

FAULTS: dict[str, tuple[Look, Evidence, float, str]] = {
    "a copy's rewards": (
        parts.look_at_rewards_of_copies,
        healthy(reward=np.where(COPY == 2, 3, 1) * REWARD),
        1,
        "environment 2",
    ),
    "a copy's sign": (
        parts.look_at_rewards_of_copies,
        healthy(reward=np.where(COPY == 2, -1, 1) * REWARD),
        1,
        "environment 2",
    ),
    "a copy's lengths": (parts.look_at_rewards_of_copies, select((COPY != 1) | (STEP < 5)), 1, "environment 1"),
    "a copy's offset": (parts.look_at_observations_of_copies, see(PLACE + 9 * (COPY == 3)), 1, "environment 3"),
    "a copy's moves": (
        parts.look_at_observations_of_copies,
        SWAPPED,
        1,
        "do the opposite in environment 3: their effect on the observation's entry place",
    ),
    "opposite rewards": (parts.look_at_changes_of_rewards, healthy(reward=np.where(LATE, -1, 1) * PAID), 8, "round 7"),
    "rewards without a sign": (
        parts.look_at_changes_of_rewards,
        healthy(reward=np.where(LATE, 3, 1) * SIGN),
        8,
        "The size of every reward changes at round 7: from 1 to 1 before it, from 3 to 3",
    ),
    "rare rewards": (
        parts.look_at_changes_of_rewards,
        healthy(reward=np.where(LATE, 0.5, 1) * SPARSE),
        2.5,
        "Every reward other than 0 changes at round 7: from 1 to 1 before it, from 0.5 to 0.5",
    ),
    "a new unit": (
        parts.look_at_changes_of_observations,
        see(np.where(LATE, 57, 1) * PLACE),
        1,
        "The observation's entry place changes at round 7",
    ),
    "an offset": (
        parts.look_at_changes_of_observations,
        see(PLACE + 5 * LATE),
        2,
        "The observation's entry place changes at round 7",
    ),
    "one start, and another": (parts.look_at_changes_of_observations, see(np.where(STEP, PLACE, LATE)), 5, "round 7"),
    "a spike": (learning.look_at_outliers, healthy(reward=np.where(np.arange(N) == 930, 1e6, REWARD)), 5, "1e+06"),
    "spikes": (learning.look_at_outliers, healthy(reward=np.where(np.arange(N) % 999 == 30, 1e6, REWARD)), 5, "but 5"),
    "spikes amid nothing": (learning.look_at_outliers, healthy(reward=SPARSE + 50 * (np.arange(N) == 930)), 1.5, "50"),
    "no reward": (learning.look_at_equal_rewards, healthy(reward=np.zeros(N)), 2, "reward than 0"),
    "an idle critic": (learning.look_at_critic, healthy(value=np.full(N, PLACE.mean())), 0.5, "explains 0%"),
    "steps of nothing": (
        learning.look_at_small_steps,
        measure(**{"train/approx_kl": np.full(ROUNDS, 1e-8)}),
        5,
        "1e-08",
    ),
    "large returns": (
        learning.look_at_small_steps,
        replace(healthy(**{"return": np.full(N, 9e5)}), metrics=TWIN.metrics.with_columns(**{"train/approx_kl": 1e-8})),
        5,
        "Rewards are large, and the policy hardly moves: by 1e-08 nats a round; returns are of size 9e+05",
    ),
    "steps too far": (learning.look_at_large_steps, measure(**{"train/approx_kl": np.full(ROUNDS, 0.9)}), 1.5, "0.9"),
    "lost entropy": (learning.look_at_entropy, measure(episode_return=np.ones(ROUNDS)), 0.5, "from 1.4 to"),
    "short rounds": (learning.look_at_settings, configure(n_steps=16), 1.5, "are 64 records"),
    "a rate": (
        learning.look_at_settings,
        measure(**{"train/learning_rate": np.full(ROUNDS, 0.1)}),
        0.9,
        "0.1 is too high",
    ),
    "too slow": (learning.look_at_settings, measure(**{"train/learning_rate": np.full(ROUNDS, 1e-7)}), 1, "too low"),
    "entropy for all": (learning.look_at_settings, configure(ent_coef=1.0), 0.9, "`ent_coef` is 1"),
    "a short sight": (learning.look_at_settings, configure(gamma=0.5), 2, "looks 2 steps ahead"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_and_its_twin_is_not(name: str) -> None:
    look, fault, least, words = FAULTS[name]
    sight = look(fault)
    assert sight.statistic > least, sight
    assert words in sight.title, sight
    assert look(TWIN).statistic < least / 3


GROWN = REWARD * (0.5 + ROUND / ROUNDS)
FAST = REWARD + 6 * np.exp(-ROUND / 1.5)
ODD = REWARD + 3 * (ROUND == 6)
FEW = np.where(np.isin(np.arange(N), np.flatnonzero(LAST & (COPY == 0))[[1, 2, 3, 31, 32, 33]]), 1.0 + LATE, 0.0)
RARE = np.where(LAST & (EPISODE == 9), 1e4, REWARD)
NOISE = np.random.default_rng(1).normal(size=N)
EACH_STEP = select(STEP < 2 + EPISODE % 20)
EACH_STEP = replace(EACH_STEP, columns={**EACH_STEP.columns, "reward": np.ones(len(EACH_STEP))})

HARMLESS: dict[str, tuple[Look, Evidence]] = {
    "what is learned in all environments": (parts.look_at_rewards_of_copies, healthy(reward=GROWN)),
    "rewards that grow": (parts.look_at_changes_of_rewards, healthy(reward=GROWN)),
    "a fast beginning": (parts.look_at_changes_of_rewards, healthy(reward=FAST)),
    "a larger reward, that is learned": (
        parts.look_at_changes_of_rewards,
        healthy(reward=SPARSE * np.where(LATE & (COPY > 0), 2, 1)),
    ),
    "three rewards, and then larger ones": (parts.look_at_changes_of_rewards, healthy(reward=FEW)),
    "one odd round": (parts.look_at_changes_of_rewards, healthy(reward=ODD)),
    "a place that a policy seeks out": (parts.look_at_changes_of_observations, see(PLACE + 5 * (LATE & (STEP > 0)))),
    "one start": (parts.look_at_changes_of_observations, see(np.where(STEP, PLACE + 5 * LATE, 1.0))),
    "starts alike up to rounding": (parts.look_at_changes_of_observations, see(np.where(STEP, PLACE, 1e-12 * LATE))),
    "a rare success at an end": (learning.look_at_outliers, healthy(reward=RARE)),
    "rare rewards as large as those of ends": (
        learning.look_at_outliers,
        healthy(reward=SPARSE + (np.arange(N) == 930)),
    ),
    "one reward a step, of episodes that differ": (learning.look_at_equal_rewards, EACH_STEP),
    "returns that nothing predicts": (learning.look_at_critic, healthy(**{"value": np.zeros(N), "return": NOISE})),
    "convergence": (learning.look_at_small_steps, measure(**{"train/approx_kl": [0.01] * 3 + [1e-9] * (ROUNDS - 3)})),
    "settings at the end of the range": (
        learning.look_at_settings,
        replace(configure(ent_coef=0.1), metrics=TWIN.metrics.with_columns(**{"train/learning_rate": pl.lit(9e-3)})),
    ),
    "short episodes under a small γ": (learning.look_at_settings, configure(gamma=0.7)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_a_fault_is_not_seen(name: str) -> None:
    look, evidence = HARMLESS[name]
    assert look(evidence).statistic < 0.5


def test_a_reward_that_is_collected_in_loops() -> None:
    is_short, stays = EPISODE % 2 == 0, {name: np.where(EPISODE % 2, 1.0, x) for name, x in TWIN.features.items()}
    rows = ~is_short | (STEP < 10)
    reward = np.where(is_short, STEP == 9, 0.2)[rows]
    farm = replace(select(rows), features={name: x[rows] for name, x in stays.items()})
    ends = np.where(is_short & (STEP == 9), "terminated", np.where(LAST, "truncated", ""))[rows]
    farm = replace(farm, columns={**farm.columns, "reward": reward}, ends=ends)
    sight = learning.look_at_loops(farm)
    assert sight.statistic == pytest.approx(np.log2(5))
    assert "A reward of 0.2 is collected again" in sight.title
    places = {f"bit {bit}": ((STEP >> bit) % 2)[rows].astype(float) for bit in range(5)}
    assert learning.look_at_loops(replace(farm, features=places)).statistic == 0  # each step is at a place of its own


def test_one_step_a_round_has_no_divergence() -> None:
    idle = measure(**{"train/approx_kl": np.zeros(ROUNDS), "kept": np.full(ROUNDS, 64)})
    settings = {**idle.config["hyperparameters"], "n_epochs": 1}
    with pytest.raises(CannotTellError, match="no divergence"):
        learning.look_at_small_steps(replace(idle, config={"hyperparameters": settings}))


UNKNOWN: dict[str, tuple[Look, Evidence]] = {
    "there is one environment": (parts.look_at_rewards_of_copies, select(COPY == 0)),
    "agents of one world": (parts.look_at_rewards_of_copies, replace(TWIN, config={"env_wrappers": []})),
    "16 episodes of 4 environments are too few": (parts.look_at_rewards_of_copies, select(ROUND == 1)),
    "8 episodes begin in 2 rounds": (parts.look_at_changes_of_observations, select((ROUND < 3) & (EPISODE % 4 < 1))),
    "rewards are 0, the others alike": (learning.look_at_outliers, healthy(reward=np.arange(N) == 930)),
    "no observation, value or return": (learning.look_at_critic, healthy(value=np.full(N, np.nan))),
    "returns of size 9e.05": (learning.look_at_critic, healthy(**{"return": np.full(N, 9e5)})),
    "few updates": (learning.look_at_critic, measure(**{"train/n_updates": np.arange(ROUNDS) * 10})),
    "not PPO's": (learning.look_at_settings, configure(n_epochs=None)),
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_cannot_be_told(reason: str) -> None:
    look, evidence = UNKNOWN[reason]
    with pytest.raises(CannotTellError, match=reason):
        look(evidence)


def test_small_steps_are_no_warning_while_a_run_trains(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"round": number, "train/approx_kl": 1e-3, "train/explained_variance": 0.0} for number in range(1, 20)]
    log_new_advice(rows, {}, set())
    assert not caplog.records
