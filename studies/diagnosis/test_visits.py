"""What a rollout's repeated visits measure, with numbers worked out by hand."""

import numpy as np
import pytest

from helpers.toys import model
from studies.diagnosis.visits import measure_by_visits, monte_carlo_errors
from whence import InvalidRecords
from whence.sb3 import collect


def test_errors_of_monte_carlo_advantages_by_hand() -> None:
    # One state. Action 0 returns 1 and 3, action 1 returns 8 and 8; the mean is 5. With an episode each, the deviations
    # of Q(action 0) - V are (1-2)/2 - (1-5)/4 = 1/2, (3-2)/2 - (3-5)/4 = 1 and, for the other action, twice -3/4.
    returns, states, actions = np.array([1.0, 3.0, 8.0, 8.0]), np.zeros(4, int), np.array([0, 0, 1, 1])
    errors = monte_carlo_errors(returns, states, actions, np.arange(4))
    assert errors[0] ** 2 == pytest.approx(4 / 3 * (0.25 + 1 + 2 * 0.5625))
    # Records 1 and 2 in one episode: their deviations add up before they are squared.
    shared = monte_carlo_errors(returns, states, actions, np.array([0, 1, 1, 2]))
    assert shared[0] ** 2 == pytest.approx(3 / 2 * (0.25 + 0.0625 + 0.5625))


def test_errors_are_unknown_where_there_is_nothing_to_compare() -> None:
    returns, states = np.array([1.0, 3.0, 8.0, 5.0, 6.0, 0.0]), np.array([0, 0, 0, 1, 1, 0])
    actions, episodes = np.array([0, 0, 1, 1, 1, 1]), np.array([4, 4, 5, 5, 6, 7])
    errors = monte_carlo_errors(returns, states, actions, episodes)
    # Action 0 of state 0 is of one episode; state 1 has one action.
    assert np.isnan(errors).tolist() == [True, True, False, True, True, False]


def test_visits_of_a_rollout_are_counted() -> None:
    toy = model(observation="discrete", n_envs=2, n_steps=64, gamma=0.9)
    records = collect(toy)
    visited = measure_by_visits(records)
    pairs = [(int(state), int(action)) for state, action in zip(records.observations, records.actions, strict=True)]
    assert visited.visits.tolist() == [pairs.count(pair) for pair in pairs]
    at = [index for index, pair in enumerate(pairs) if pair[0] == pairs[0][0]]
    others = [index for index in at if pairs[index] == pairs[0]]
    returns = visited.advantages[others[0]] + visited.values[at[0]]
    assert visited.values[at] == pytest.approx(visited.values[at[0]])
    assert visited.advantages[others] == pytest.approx(returns - visited.values[at[0]])
    with pytest.raises(InvalidRecords, match="discrete actions"):
        measure_by_visits(collect(model(action="box", n_steps=32)))
