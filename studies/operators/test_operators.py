"""Operators do what they say, and nothing at size 0."""

from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box

from studies.operators.cells import CURVES, ENVIRONMENTS, Cell, list_cells
from studies.operators.faults import ONLY, Fault, Task
from studies.operators.operators import OPERATORS
from studies.operators.samples import Sample, list_traits, play, read_entries, write_entries

NAMES = ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1")
TOTAL = 300


class Row(NamedTuple):
    before: Any
    after: Any
    reward: float
    terminated: bool
    truncated: bool


@pytest.fixture(scope="module")
def samples() -> dict[str, Sample]:
    return {name: play(gym.make(name), steps=1_000) for name in NAMES}


def plant(samples: dict[str, Sample], name: str, operator: str, size: float | None = None, copy: int = 0) -> Task:
    """Return a task with an operator's fault, of its default size if there is none."""
    env, row = gym.make(name), OPERATORS[operator]
    size = row.sizes[0] if size is None else size
    return Task(env, (row.fault or Fault)(samples[name], env.action_space, size, copy, 3, TOTAL))


def roll(env: gym.Env[Any, Any], steps: int = TOTAL) -> list[Row]:
    """Take the same actions in any environment of a space; its first episode has the same seed."""
    rng, rows = np.random.default_rng(0), []
    before, _ = env.reset(seed=5)
    for _ in range(steps):
        is_box = isinstance(env.action_space, Box)
        action = np.array([rng.uniform(-2, 2)], np.float32) if is_box else np.int64(rng.integers(2))
        after, reward, terminated, truncated, _ = env.step(action)
        rows.append(Row(before, after, float(reward), terminated, truncated))
        before = env.reset()[0] if terminated or truncated else after
    return rows


def pair(samples: dict[str, Sample], name: str, operator: str, **how: Any) -> tuple[list[Row], list[Row], Task]:
    """Return steps without and with a fault, and the task that has it."""
    task = plant(samples, name, operator, **how)
    return roll(gym.make(name)), roll(task), task


def are_equal(rows: list[Row], others: list[Row]) -> bool:
    return all(np.array_equal(*each) for row, other in zip(rows, others, strict=True) for each in zip(row, other))  # noqa: B905


def stack(rows: list[Row], field: str) -> Any:
    return np.array([getattr(row, field) for row in rows])


@pytest.mark.parametrize("name", [*NAMES[:2], pytest.param(NAMES[2], marks=pytest.mark.long)])
@pytest.mark.parametrize("operator", [name for name, row in OPERATORS.items() if row.fault])
def test_a_fault_is_there_and_is_not_at_size_0(samples: dict[str, Sample], name: str, operator: str) -> None:
    if set(OPERATORS[operator].needs.split()) - {"repeats"} - list_traits(gym.make(name), samples[name]):
        pytest.skip("cannot be planted here")
    plain, same, task = pair(samples, name, operator, size=0.0, copy=ONLY)
    assert are_equal(plain, same)
    assert task.tally["touched"] == 0
    # Actions of this test never reach FrozenLake's goal, and its episodes are shorter than any limit.
    if name == "FrozenLake-v1" and (OPERATORS[operator].about == "reward" or operator == "short-limit"):
        return
    task, again = (plant(samples, name, operator, copy=ONLY) for _ in range(2))
    spiked = set(range(4 * TOTAL)) if "spike" in operator else set()
    for each in (task, again):
        vars(each._fault)["moments"] = spiked
    assert are_equal(roll(task), roll(again))
    assert 0 < task.tally["touched"] <= task.tally["steps"] == TOTAL


@pytest.mark.parametrize(("operator", "factor"), [("sign", -1), ("unpaid", 0)])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_rewards_change_in_their_place_alone(samples: dict[str, Sample], name: str, operator: str, factor: int) -> None:
    plain, faulty, task = pair(samples, name, operator)
    place = task._fault.describe()
    there = stack(plain, "before")[:, place["entry"]] > place["bound"]
    assert np.array_equal(stack(faulty, "reward"), np.where(there, factor, 1) * stack(plain, "reward"))
    assert 0.05 < there.mean() < 0.5
    assert task.tally["touched"] == there.sum()


def test_a_place_has_its_share_of_steps_and_of_rewards(samples: dict[str, Sample]) -> None:
    for size in (0.02, 0.2, 0.5):
        for name in ("CartPole-v1", "Pendulum-v1"):
            assert samples[name].find_place(size, np.random.default_rng(0)).share == pytest.approx(size, abs=0.01)
    lake = samples["FrozenLake-v1"]
    place = lake.find_place(0.2, np.random.default_rng(0))
    assert lake.rewards[lake.before[:, 0] > place.bound].sum() >= 0.1 * lake.rewards.sum() > 0


def test_actions_are_exchanged_in_their_place_or_copy(samples: dict[str, Sample]) -> None:
    task = plant(samples, "CartPole-v1", "swap")
    entry, bound = (task._fault.describe()[name] for name in ("entry", "bound"))
    for value in (bound - 1, bound + 1):
        before = np.full(4, bound - 1)
        before[entry] = value
        assert [task._fault._act(action, before) for action in (0, 1)] == ([1, 0] if value > bound else [0, 1])
    for copy in range(3):
        taken = plant(samples, "Pendulum-v1", "copy-swap", copy=copy)._fault._act(np.array([1.5]), None)
        assert taken == [-1.5 if copy == ONLY else 1.5]


@pytest.mark.parametrize("late", [1, 2, 3])
def test_actions_rewards_and_observations_are_late(samples: dict[str, Sample], late: int) -> None:
    delay = plant(samples, "CartPole-v1", "delay", size=late)
    delay.reset()
    assert [delay._fault._act(action, None) for action in range(5)] == [max(0, number - late) for number in range(5)]
    plain, faulty, _ = pair(samples, "CartPole-v1", "late-observation", size=late)
    end = next(number for number, row in enumerate(plain) if row.terminated)
    seen = [plain[0].before, *stack(plain, "after")[: end + 1]]
    expected = [seen[max(0, number - late)] for number in range(end + 2)]
    assert np.array_equal([faulty[0].before, *stack(faulty, "after")[: end + 1]], expected)
    plain, faulty, _ = pair(samples, "Pendulum-v1", "late-reward", size=late)
    assert np.array_equal(stack(faulty, "reward")[:200], [*[0] * late, *stack(plain, "reward")[: 200 - late]])
    assert stack(faulty, "reward")[200 : 200 + late].tolist() == [0] * late


def test_entries_are_changed_alone(samples: dict[str, Sample]) -> None:
    for operator, size, value in [
        ("zero", 1, lambda values: 0),
        ("unscaled-observation", 99, lambda values: np.float32(100) * values),
        ("copy-observation", 1, lambda values: 2 * values),
        ("frozen", 1, lambda values: values[0]),
    ]:
        plain, faulty, task = pair(samples, "CartPole-v1", operator, size=size, copy=ONLY)
        end = 1 + next(number for number, row in enumerate(plain) if row.terminated)
        expected = np.stack([plain[0].before, *stack(plain, "after")[:end]])
        entry = task._fault.describe()["entry"]
        expected[:, entry] = value(expected[:, entry])
        assert np.stack([faulty[0].before, *stack(faulty, "after")[:end]]) == pytest.approx(expected, rel=1e-5)


def test_a_changed_view_leaves_the_true_observation(samples: dict[str, Sample]) -> None:
    """An observation of doubles is not changed in place: faults and counts need what is there."""
    before = np.arange(3.0)
    entries = read_entries(before)
    entries[:] = 7
    assert before.tolist() == [0, 1, 2]


def test_entries_go_into_any_form_of_observation() -> None:
    parts = {"b": np.array([[1, 2], [3, 4]], np.uint8), "a": np.array([0.5], np.float32)}
    assert read_entries(parts).tolist() == [0.5, 1, 2, 3, 4]
    changed = write_entries(parts, np.array([1.5, 300.0, -4, 2.6, 4]))
    assert (changed["a"].tolist(), changed["b"].tolist()) == ([1.5], [[255, 0], [3, 4]])
    assert changed["b"].dtype == np.uint8
    assert write_entries(np.int64(3), np.zeros(1)) == 0


def test_views_are_clipped_lost_and_the_same(samples: dict[str, Sample]) -> None:
    plain, faulty, _ = pair(samples, "CartPole-v1", "clip", size=0.2)
    ranges = np.quantile(samples["CartPole-v1"].before, [0.1, 0.9], axis=0)
    assert stack(faulty, "after") == pytest.approx(np.clip(stack(plain, "after"), *ranges))
    faulty = roll(plant(samples, "CartPole-v1", "dropout", size=0.3))
    assert 0.2 < (stack(faulty, "after") == 0).all(axis=1).mean() < 0.4
    faulty = roll(plant(samples, "CartPole-v1", "constant"))
    assert len(np.unique(stack(faulty, "after"), axis=0)) == 1
    faulty = roll(plant(samples, "Pendulum-v1", "stale", size=0.5))
    repeated = (stack(faulty, "after") == stack(faulty, "before")).all(axis=1).mean()
    assert 0.4 < repeated < 0.6


def test_episodes_end_as_they_should_not(samples: dict[str, Sample]) -> None:
    plain, faulty, _ = pair(samples, "Pendulum-v1", "limit-as-end")
    assert (stack(plain, "truncated").sum(), stack(faulty, "truncated").sum()) == (1, 0)
    assert np.array_equal(stack(faulty, "terminated"), stack(plain, "truncated"))
    faulty = roll(plant(samples, "Pendulum-v1", "short-limit"))
    assert np.flatnonzero(stack(faulty, "terminated")).tolist() == [99, 199, 299]
    faulty = roll(plant(samples, "Pendulum-v1", "episodes-shrink"))
    assert np.flatnonzero(stack(faulty, "terminated")).tolist() == [*range(150, 300)]
    task = plant(samples, "Pendulum-v1", "early-end", size=0.4)
    faulty, place = roll(task), task._fault.describe()
    ended = stack(faulty, "terminated")
    there = stack(faulty, "after")[:, place["entry"]] > place["bound"]
    assert 0 < ended.sum() < there.sum()
    assert there[ended].all()
    assert 0.02 < stack(roll(plant(samples, "Pendulum-v1", "random-end")), "terminated").mean() < 0.09


def test_rewards_change_in_size_copy_and_time(samples: dict[str, Sample]) -> None:
    for operator, copy, expected in [
        ("copy-reward", 0, [1] * TOTAL),
        ("copy-reward", ONLY, [10] * TOTAL),
        ("reward-change", 0, [1] * 150 + [-1] * 150),
        ("no-reward", 0, [0] * TOTAL),
        ("unscaled-reward", 0, [100_001] * TOTAL),
    ]:
        assert stack(roll(plant(samples, "CartPole-v1", operator, copy=copy)), "reward").tolist() == expected
    plain, faulty, _ = pair(samples, "Pendulum-v1", "paid-again")
    assert faulty[200].reward == plain[200].reward + plain[199].reward
    assert stack(faulty, "reward")[201:].tolist() == stack(plain, "reward")[201:].tolist()
    rewards = np.concatenate(
        [stack(roll(plant(samples, "CartPole-v1", "reward-spike", copy=copy)), "reward") for copy in range(4)]
    )
    assert (rewards == 1e6).sum() == 3
    assert (rewards == 1).sum() == 4 * TOTAL - 3


def test_resets_repeat_and_actions_are_dead_or_wide(samples: dict[str, Sample]) -> None:
    task = plant(samples, "CartPole-v1", "same-seed")
    assert np.array_equal(task.reset()[0], task.reset(seed=1)[0])
    dead = plant(samples, "Pendulum-v1", "dead-stretch")._fault
    assert [dead._act(np.array([action]), None).item() for action in (-2, -0.5, 0.5, 1.9)] == [-2, -0.5, 0, 0]
    wide = plant(samples, "Pendulum-v1", "wide-range")
    assert wide.action_space == Box(0.0, 3000.0, (1,), np.float32)
    assert [wide._fault._act(np.array([action]), None).item() for action in (0, 1500, 3000)] == [-2, 0, 2]


def test_the_first_runs_have_every_operator_and_all_have_their_place() -> None:
    cells = [*list_cells()]
    assert len(ENVIRONMENTS) == 14
    assert [cell.operator for cell in cells[: len(OPERATORS)]] == [*OPERATORS]
    first = cells[: len(OPERATORS) * len(ENVIRONMENTS)]
    assert len({(cell.environment, cell.operator) for cell in first}) == len(first)
    assert {cell.environment for cell in cells[len(first) :] if cell.operator != "none"} == {*CURVES}
    assert len({cell.place_run(Path()) for cell in cells}) == len({*cells}) == len(cells)
    assert Cell("a", "sign", 0.2).key == Cell("a", "sign", 0.5).key != Cell("a", "sign", 0.2, 1).key
