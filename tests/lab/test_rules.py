"""Advantages and TD errors read back from a rollout, with numbers worked out by hand and against SB3's own GAE."""

from typing import Any

import numpy as np
import pytest
import torch
from sb3_contrib import RecurrentPPO

from helpers.toys import model
from whence import InvalidRecords, RecordBatch, Unsupported, WhenceError
from whence.lab.rules import AdvantageMismatch, TDErrorPriority
from whence.lab.visits import monte_carlo_advantages, number_states, returns_to_go, td_errors
from whence.sb3 import InfluenceCallback, collect

# Two environments of three steps; the first begins a second episode at its last step.
STARTS = np.array([True, False, True, False, False, False])
ENVS = np.array([0, 0, 0, 1, 1, 1])


def test_td_errors_by_hand() -> None:
    advantages = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    # gamma lambda = 0.25. Record 1 ends its episode, 2 and 5 end their environments' rollouts.
    expected = [1 - 0.25 * 2, 2, 4, 8 - 0.25 * 16, 16 - 0.25 * 32, 32]
    assert td_errors(advantages, STARTS, ENVS, gamma=0.5, gae_lambda=0.5).tolist() == expected


def test_returns_to_go_by_hand() -> None:
    rewards = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    advantages, values = np.array([9.0, 9, 0.5, 9, 9, 7]), np.array([9.0, 9, 0.25, 9, 9, 1])
    # Discount 0.5: 2 ends an episode; the rollout's last records return advantage + value, 0.75 and 8.
    expected = [1 + 0.5 * 2, 2, 0.75, 4 + 0.5 * (5 + 0.5 * 8), 5 + 0.5 * 8, 8]
    assert returns_to_go(rewards, advantages, values, STARTS, ENVS, gamma=0.5).tolist() == expected


def test_monte_carlo_advantages_by_hand() -> None:
    # State 7: action 0 returns 1 and 3, action 1 returns 8; their mean is 4. State 2 has one action.
    returns = np.array([1.0, 3.0, 8.0, 5.0])
    estimates = monte_carlo_advantages(returns, np.array([7, 7, 7, 2]), np.array([0, 0, 1, 1]))
    assert estimates.tolist() == [2 - 4, 2 - 4, 8 - 4, 0]


@pytest.mark.parametrize("n_envs", [1, 3])
def test_sb3s_advantages_are_made_of_these_td_errors(n_envs: int) -> None:
    def collect_columns(gae_lambda: float) -> list[Any]:
        records = collect(model(n_envs=n_envs, n_steps=32, gamma=0.9, gae_lambda=gae_lambda))
        columns = [getattr(records, name).double().numpy() for name in ("advantages", "rewards", "values")]
        return [*columns, records.episode_starts.numpy(), records.env_index.numpy()]

    advantages, rewards, values, starts, envs = collect_columns(0.8)
    deltas = td_errors(advantages, starts, envs, 0.9, 0.8)
    for at in range(len(deltas) - 1):
        if envs[at] == envs[at + 1]:  # r + gamma V(s') - V(s), without V(s') where the episode ends
            following = 0 if starts[at + 1] else values[at + 1]
            assert deltas[at] == pytest.approx(rewards[at] + 0.9 * following - values[at], abs=1e-4)
    # With lambda 1, advantage + value is the return to go.
    advantages, rewards, values, starts, envs = collect_columns(1.0)
    returns = returns_to_go(rewards, advantages, values, starts, envs, 0.9)
    np.testing.assert_allclose(returns, advantages + values, atol=1e-4)


def batch(**changed: Any) -> RecordBatch:
    """Six records of one environment, one state, and the returns 6, 5, ..., 1 (gamma 0): action 0 is the better one."""
    columns: dict[str, Any] = {
        "observations": torch.zeros(6, 2),
        "actions": torch.tensor([0, 0, 0, 1, 1, 1]),
        "log_probs": torch.zeros(6),
        "advantages": torch.tensor([-1.0, -4.0, 1.0, 2.0, 0.5, 1.0]),
        "rewards": torch.tensor([6.0, 5, 4, 3, 2, 1]),
        "values": torch.zeros(6),
        "episode_starts": torch.tensor([True, False, False, False, False, False]),
        "env_index": torch.zeros(6, dtype=torch.int64),
        "gamma": 0.0,
        "gae_lambda": 1.0,
    }
    return RecordBatch(**(columns | changed))


def dropped(order: Any, share: float, *advantages: float) -> list[int]:
    changed = {"advantages": torch.tensor(advantages)} if advantages else {}
    return (~AdvantageMismatch(order, drop=share).select(batch(**changed)).keep).nonzero().flatten().tolist()


def test_records_that_disagree_with_their_return_are_dropped() -> None:
    # The estimates are 5 - 3.5 = 1.5 and 2 - 3.5 = -1.5 (the last return is advantage + value = 1). Records 0, 1, 3, 4
    # and 5 have the other sign; floor(0.5 * 5) = 2 go. Distances: 2.5, 5.5, 3.5, 2, 2.5; products: -1.5, -6, -3, ...
    assert dropped("distance", 0.5) == dropped("product", 0.5) == [1, 3]
    assert AdvantageMismatch(drop=0.5).select(batch()).reasons[1] == "advantage of another sign than the return shows"
    # Record 0 lies far from its estimate where products cannot tell: its advantage is 0.
    assert dropped("distance", 0.4, 0.0, 1.0, 1.0, 1.0, -1.0, 1.0) == [3]
    assert dropped("distance", 0.7, 0.0, 1.0, 1.0, 0.25, -1.0, 1.0) == [3, 5]
    assert dropped("product", 0.4, 0.0, 1.0, 1.0, 0.25, -1.0, 1.0) == [5]


def test_td_errors_rank_the_records() -> None:
    # gamma 0: TD errors are the advantages; of the equal ones (records 0, 2 and 5) the lower id goes first.
    selection = TDErrorPriority().select(batch())
    ranks = torch.tensor([3.0, 1.0, 4.0, 2.0, 6.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(selection.weights, ranks**-0.6)
    assert selection.keep.all()
    assert TDErrorPriority(exponent=0).select(batch()).uniform


def test_states_are_told_apart_by_their_bytes() -> None:
    image = torch.tensor([[1, 2], [1, 2], [1, 3]], dtype=torch.uint8)
    base = {"actions": torch.zeros(3), "log_probs": torch.zeros(3), "advantages": torch.zeros(3)}
    numbers = number_states(RecordBatch(observations={"image": image, "id": torch.tensor([5, 5, 5])}, **base))
    assert numbers[0] == numbers[1] != numbers[2]
    numbers = number_states(RecordBatch(observations=torch.tensor([3, 4, 3]), **base))
    assert numbers[0] == numbers[2] != numbers[1]


@pytest.mark.parametrize(
    ("rule", "changed", "message"),
    [
        (AdvantageMismatch(), {"rewards": None}, "AdvantageMismatch needs rewards"),
        (AdvantageMismatch(), {"gamma": None}, "needs gamma"),
        (AdvantageMismatch(), {"actions": torch.zeros(6, 2)}, r"discrete actions.*shape \(6, 2\) and torch.float32"),
        (TDErrorPriority(), {"gae_lambda": None}, "needs gae_lambda"),
        (TDErrorPriority(), {"env_index": None, "episode_starts": None}, "needs episode_starts, env_index"),
    ],
)
def test_what_is_missing_is_named(rule: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecords, match=message):
        rule.select(batch(**changed))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(WhenceError, match="order is 'distanc'"):
        AdvantageMismatch("distanc")  # type: ignore[arg-type]
    with pytest.raises(WhenceError, match="exponent is -1"):
        TDErrorPriority(-1)
    with pytest.raises(WhenceError, match="drop is 0"):
        AdvantageMismatch(drop=0)


def test_a_draw_by_weights_is_refused_for_a_recurrent_policy() -> None:
    recurrent = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=32, batch_size=16, device="cpu")
    with pytest.raises(Unsupported, match="drawn by weights"):
        recurrent.learn(32, callback=InfluenceCallback(TDErrorPriority()))
    assert not recurrent.policy.optimizer.state  # no step was taken
