"""Rollouts of (steps, environments) become records, row by row."""

import numpy as np
import torch

from whence import RecordBatch
from whence.lab.rules import TDErrorPriority, compute_td_errors, monte_carlo_advantages, number_visits, td_errors
from whence.scores.moments import find_moments

STARTS = torch.tensor([[True, False], [False, False], [False, True], [True, False]])


def make_rollout(**changed):
    """Four steps of two environments; every number is 10 times the step plus the environment."""
    numbers = 10.0 * torch.arange(4)[:, None] + torch.arange(2)
    columns = {
        "observations": {"x": torch.stack([numbers, -numbers], dim=-1)},
        "actions": numbers.long(),
        "log_probs": -numbers,
        "advantages": numbers + 0.5,
    }
    return columns | changed


def test_rows_are_those_of_flattened_columns():
    columns = make_rollout(values=torch.rand(4, 2), episode_starts=STARTS)
    records = RecordBatch.from_rollout(**columns, gamma=0.9, gae_lambda=0.8)
    assert records.log_probs.tolist() == [0, -1, -10, -11, -20, -21, -30, -31]
    keep = torch.arange(8) % 3 == 0
    kept = records.take(keep)
    assert torch.equal(kept.values, columns["values"].flatten(0, 1)[keep])
    assert torch.equal(kept.observations["x"], columns["observations"]["x"].flatten(0, 1)[keep])
    assert records.env_index.tolist() == [0, 1] * 4
    assert records.ids.tolist() == list(range(8))
    assert (records.gamma, records.gae_lambda) == (0.9, 0.8)


def test_episodes_by_hand():
    records = RecordBatch.from_rollout(**make_rollout(episode_starts=STARTS))
    # Environment 0: an episode of three steps, and the beginning of another. Environment 1: two steps of an episode
    # that began before the rollout, then another episode.
    assert records.steps.reshape(4, 2).tolist() == [[0, -1], [1, -1], [2, 0], [0, 1]]
    ids = records.episode_ids.reshape(4, 2)
    assert (ids[0, 0] == ids[1, 0] == ids[2, 0]) & (ids[0, 1] == ids[1, 1]) & (ids[2, 1] == ids[3, 1])
    assert len({int(ids[0, 0]), int(ids[3, 0]), int(ids[0, 1]), int(ids[2, 1])}) == 4
    assert RecordBatch.from_rollout(**make_rollout()).episode_ids is None


def test_td_errors_and_visits_do_not_depend_on_the_order_of_environments():
    generator = np.random.default_rng(0)
    advantages, rewards, values = (torch.tensor(generator.normal(size=(4, 2))) for _ in range(3))
    actions = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]])
    columns = {"advantages": advantages, "rewards": rewards, "values": values, "actions": actions}
    columns |= {"observations": torch.zeros(4, 2, 1), "episode_starts": STARTS}
    records = RecordBatch.from_rollout(**make_rollout(**columns), gamma=0.9, gae_lambda=0.8)
    by_environment = records.take(torch.arange(8).reshape(4, 2).T.flatten())
    arrays = (by_environment.advantages.numpy(), by_environment.episode_starts.numpy(), np.repeat([0, 1], 4))
    expected = td_errors(*arrays, gamma=0.9, gae_lambda=0.8)
    np.testing.assert_array_equal(compute_td_errors(records).reshape(4, 2).T.ravel(), expected)
    np.testing.assert_array_equal(compute_td_errors(by_environment), expected)
    mine, theirs = (monte_carlo_advantages(*number_visits(each, "a test")) for each in (records, by_environment))
    np.testing.assert_allclose(mine.reshape(4, 2).T.ravel(), theirs, rtol=1e-12)
    weights = TDErrorPriority(0.5).select(records).weights
    assert torch.equal(weights.reshape(4, 2).T.flatten(), TDErrorPriority(0.5).select(by_environment).weights)


def test_moments_are_stretches_of_one_environments_episode():
    records = RecordBatch.from_rollout(**make_rollout(episode_starts=STARTS))
    scores = torch.tensor([[-3.0, 9.0], [-2.9, 9.0], [-2.8, 9.0], [9.0, 9.0]]).flatten()
    table = records.to_polars().with_columns(score=scores.numpy())
    (moment,) = find_moments(table, lowest=True, most=1)
    assert (moment.env_index, moment.first_step, moment.last_step) == (0, 0, 2)
