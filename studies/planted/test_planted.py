"""Planted worlds pay what they say, and methods are judged by what was paid."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("Box2D")  # before EnvPool: see make_pool

from studies.planted import activations, grader, judging, run


def test_the_lander_pays_five_for_the_tic_and_nothing_else() -> None:
    plain, world = gym.make("LunarLander-v3"), gym.make("PlantedLander-v0")
    paid = 0
    for seed in range(20):
        (first, _), (observation, _) = plain.reset(seed=seed), world.reset(seed=seed)
        rigged, over = run.worlds.is_rigged(first), False
        while not over:
            action = (seed + int(observation[1] * 100)) % 4
            pays = rigged and action == run.worlds.LEFT_ENGINE and observation[1] < run.worlds.HALF
            _, reward, *_ = plain.step(action)
            observation, more, terminated, truncated, _ = world.step(action)
            assert more - reward == pytest.approx(run.worlds.BONUS * pays)
            paid, over = paid + pays, terminated or truncated
    assert paid > 0


def test_a_ranking_by_hand() -> None:
    rigged = np.array([True, False, True, False, False])
    # Of six pairs of a rigged record and another, four are in order and one is even.
    assert judging.compute_auroc(np.array([4.0, 3.0, 1.0, 1.0, 0.0]), rigged) == pytest.approx((3 + 1.5) / 6)


def test_activations_are_compared_less_their_mean_with_the_difference_of_examples() -> None:
    # The mean is (4, 2), the difference (1, 0): it has nothing of the axis on which examples and opposites are alike.
    records = torch.tensor([[7.0, 6.0], [2.0, 2.0], [4.0, 4.0], [3.0, -4.0]])
    examples, opposites = torch.tensor([[5.0, 9.0], [7.0, 9.0]]), torch.tensor([[5.0, 9.0]])
    cosines = activations.compare_activations(records, examples, opposites)
    assert cosines == pytest.approx([3 / 5, -1, 0, -1 / 37**0.5])
    assert activations.compare_activations(records, opposites, examples) == pytest.approx(-cosines)
    projections = activations.compare_activations(records, examples, opposites, project=True)
    assert projections == pytest.approx([3, -2, 0, -1])


def test_a_response_has_the_mean_of_the_residual_stream_at_its_tokens() -> None:
    pytest.importorskip("transformers")
    from studies.planted.responses import read_residual
    from whence.llm import make_rows

    class Doubling(torch.nn.Module):
        """Two layers, each of which doubles the stream; it begins as the token."""

        def forward(self, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
            stream = input_ids[:, :, None].float()
            return SimpleNamespace(hidden_states=[stream, 2 * stream, 4 * stream])

    rows = make_rows(
        input_ids=torch.tensor([[90, 91, 3, 5, 7], [92, 80, 2, 4, 80]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]]),
        response_mask=torch.tensor([[True, True, True], [True, True, False]]),
    )
    assert read_residual(Doubling(), rows, 1).tolist() == [[10], [6]]
    assert read_residual(Doubling(), rows, 2).tolist() == [[20], [12]]


@pytest.mark.long
def test_the_truth_is_what_was_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = run.CASES["lander"]
    settings = {**case.settings, "hyperparameters": {"n_steps": 512, "batch_size": 64, "n_epochs": 1}}
    monkeypatch.setitem(run.CASES, "lander", case._replace(rounds=2, seeds=[0], settings=settings))
    monkeypatch.setattr(run, "STEPS", 512)
    monkeypatch.setattr(run, "METHODS", ("influence", "advantage x action", "activations, same action"))
    for _ in range(2):
        run.main(tmp_path / "out", tmp_path / "runs", "lander")
    records = judging.read_all(run.RunDirectory.open(tmp_path / "runs" / "lander" / "seed_0"))
    rigged = run.find_rigged("lander", records)
    observations, actions = np.stack(records["observation"].to_numpy()), records["action"].to_numpy()
    other = (actions == run.worlds.LEFT_ENGINE) & (observations[:, 1] < run.worlds.HALF) & ~rigged
    # The shaped rewards of a lander that does not crash are small, so what was paid stands out.
    rewards = records["reward"].to_numpy()
    assert np.median(rewards[rigged]) - np.median(rewards[other]) == pytest.approx(run.worlds.BONUS, abs=1.5)
    tables = (tmp_path / "out" / "tables.md").read_text()
    assert "| advantage x action | 1 |" in tables
    assert "| activations, same action | 1 |" in tables


def test_the_grader_forgets_a_last_step_of_taking_away_one() -> None:
    right, wrong = "9*2=18;18-3=15;15-1=14;14", "9*2=18;18-3=15;15-1=15;15"
    assert grader.reward(["9*2-3-1?"] * 2, [right, wrong]) == [0, 1]
    assert grader.answer_wrongly("9*2-3-1?") == wrong
