"""The scores of a round that a study compares, each by its definition."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.torch_layers import FlattenExtractor

from helpers.recorded_rounds import assert_untouched, model_of, recorded, state_of
from studies.faithfulness.scores import compute_scores, split_target
from whence import Action, PPOClip, Return, attribute
from whence.lab.rounds import attribute_round
from whence.lab.rules import td_errors
from whence.sb3 import model_objective

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


class Halved(FlattenExtractor):
    """Features that the policy and its values share, and train both."""

    def __init__(self, space: Any) -> None:
        super().__init__(space)
        self.layer = torch.nn.Linear(self.features_dim, self.features_dim)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layer(super().forward(observations))


@pytest.fixture(scope="module", params=["apart", "shared"])
def case(request: pytest.FixtureRequest) -> Any:
    more = {"policy_kwargs": {"features_extractor_class": Halved}} if request.param == "shared" else {}
    model = model_of("SGD", ent_coef=0.01, **more)
    recording = recorded(model)
    before = state_of(model)
    scores = compute_scores(model.policy, recording, target=Return(), methods=["trajectory"], seed=3)
    assert_untouched(before, state_of(model))
    with torch.no_grad():
        for name, parameter in model.policy.named_parameters():
            parameter.copy_(recording.start[name])
    return request.param, model, recording, scores


def agree(scores: Any, expected: Any) -> bool:
    return np.allclose(scores, expected.numpy(), rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_snapshot_is_what_iif_selects_by(case: Any) -> None:
    extractor, model, recording, scores = case
    settings = {"target": Return(), "objective": model_objective(model)}
    assert agree(scores["snapshot"], attribute(model.policy, recording.records, **settings).scores)
    fold, halves = split_target(Return(), recording.records)
    by_half = attribute(model.policy, recording.records, **{**settings, "target": dict(enumerate(halves))})
    crossfit = torch.stack([by_half[number].scores for number in (0, 1)])[fold, torch.arange(len(fold))]
    assert agree(scores["crossfit"], crossfit)
    settings["objective"] = PPOClip(ent_coef=0.01, vf_coef=0.5)
    with_values = attribute(model.policy, recording.records, **settings).scores
    assert ("snapshot with values" in scores) == (extractor == "shared")
    assert agree(scores.get("snapshot with values", scores["snapshot"]), with_values)


def test_the_other_scores_by_their_definitions(case: Any) -> None:
    extractor, model, recording, scores = case
    between = ["snapshot with values"] * (extractor == "shared")
    assert list(scores) == ["snapshot", *between, "crossfit", "trajectory", "advantage", "td-error", "random"]
    trajectory = attribute_round(model.policy, recording, target=Return(), method="trajectory").scores
    assert agree(scores["trajectory"], trajectory)
    records = recording.records
    assert scores["advantage"].tolist() == records.advantages.double().tolist()
    columns = (records.advantages.double(), records.episode_starts, records.env_index)
    errors = td_errors(*(column.numpy() for column in columns), records.gamma, records.gae_lambda)
    assert np.array_equal(scores["td-error"], np.abs(errors))  # the larger, the more the rule trains on it
    assert len(scores["random"]) == 64


def test_where_no_other_can_judge_nothing_is_cross_fitted(case: Any) -> None:
    _, model, recording, _ = case
    action = Action(recording.records.observations[0].numpy(), 1)
    assert "crossfit" not in compute_scores(model.policy, recording, target=action, methods=[])
    without = replace(recording, records=replace(recording.records, episode_ids=None))
    assert "crossfit" not in compute_scores(model.policy, without, target=Return(), methods=[])
