"""DTV: by hand, against its formulas with gradients made record by record, and in the trainers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.gradients import EXACT, clip_surrogate, clipped, materialise
from helpers.languages import language_model, rows_for, tokens
from helpers.toys import Softmax, model, softmax_view
from whence import DTV, IIF, Influence, PPOClip, Progress, RandomDrop, RecordBatch, Return, WhenceError, attribute
from whence.core import as_view, label_units
from whence.llm import SequenceReturn, TokenPPO, language_view
from whence.llm.scores import Scoring, score
from whence.sb3 import InfluenceCallback
from whence.selection import find_scorer

PLAIN = PPOClip(advantage_norm="none")


def scored(rule: DTV, gradients: list[float], **columns: Any) -> tuple[RecordBatch, Influence]:
    """Return records whose gradients are these numbers times (1/2, -1/2), so that products are half the numbers'."""
    records = RecordBatch(
        observations=torch.ones(len(gradients)),
        actions=torch.zeros(len(gradients), dtype=torch.int64),
        log_probs=torch.full((len(gradients),), 0.5).log(),
        advantages=torch.tensor(gradients),
        **columns,
    )
    return records, rule.score(records, PLAIN, partial(attribute, softmax_view(Softmax())))


@pytest.mark.parametrize(
    ("leave_one_out", "scores", "keep"),
    [
        # The episodes' means are 3, -2 and 1, of which the last is cut where the rollout begins, and has another's id.
        (False, [2 / 3, 4 / 3, -1 / 3, -1, 1 / 3], [True, True, False, False, True]),
        # The others' means are -1/2, 2 and 1/2.
        (True, [-1 / 2, -1, -1, -3, 1 / 4], [False, False, False, False, True]),
    ],
)
def test_episodes_by_hand(leave_one_out: bool, scores: list[float], keep: list[bool]) -> None:
    rule = DTV(leave_one_out=leave_one_out, warmup=1)
    episodes, environments = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([0, 0, 0, 0, 1])
    records, influence = scored(rule, [2.0, 4.0, -1.0, -3.0, 1.0], episode_ids=episodes, env_index=environments)
    assert influence.scores.tolist() == pytest.approx(scores)
    selection = rule.select(records, influence, Progress(2))
    assert selection.keep.tolist() == keep
    whose = "others" if leave_one_out else "units"
    assert selection.reasons[2] == f"gradient of its episode opposes the mean of the {whose}"
    assert rule.select(records, influence, Progress(1)).keep.all()


@pytest.mark.parametrize(
    ("leave_one_out", "scores", "keep"),
    [
        # The prompts' means are 2/3, -5 and 1/2.
        (False, [2 / 3, -1 / 3, 1 / 3, 25 / 2, 1 / 2, -1 / 4], [1, 0, 1, 1, 1, 0]),
        # A response without others scores 0; of two that oppose each other the better stays, here the later one.
        (True, [0, -3 / 4, 1 / 4, 0, -1, -1], [1, 0, 1, 1, 0, 1]),
    ],
)
def test_responses_by_hand(leave_one_out: bool, scores: list[float], keep: list[int]) -> None:
    rule, groups = DTV(unit="row", leave_one_out=leave_one_out), torch.tensor([7, 7, 7, 4, 9, 9])
    records, influence = scored(rule, [2.0, -1.0, 1.0, -5.0, 2.0, -1.0], group_ids=groups)
    assert influence.scores.tolist() == pytest.approx(scores)
    assert influence.provenance.records == records.fingerprint
    assert rule.select(records, influence).keep.int().tolist() == keep
    control = RandomDrop(like=rule)
    assert find_scorer(control) is rule
    assert int(control.select(records, influence).keep.sum()) == sum(keep)
    # Without several responses to a prompt, all are compared with each other.
    alone = scored(rule, [2.0, -1.0, 1.0], group_ids=torch.arange(3))[1].scores
    assert alone.tolist() == scored(rule, [2.0, -1.0, 1.0], group_ids=torch.zeros(3).long())[1].scores.tolist()


def by_formulas(gradients: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """Return each unit's DTV and DTV-Loo."""
    counts = units.bincount()[:, None]
    means = torch.zeros(len(counts), gradients.shape[1]).double().index_add(0, units, gradients) / counts
    products, size = means @ means.mean(0), len(means)
    return products, size / (size - 1) * (products - means.square().sum(1) / size)


def test_episodes_of_ppo_score_as_materialised_gradients_say() -> None:
    for leave_one_out in (False, True):
        toy = model(n_envs=3, n_steps=16, ent_coef=0.1)  # which is no part of the gradients
        callback = InfluenceCallback(DTV(leave_one_out=leave_one_out))
        state = {name: tensor.clone() for name, tensor in toy.policy.state_dict().items()}
        toy.learn(48, callback=callback)
        toy.policy.load_state_dict(state)
        records, influence = callback.round.records, callback.round.influence
        units = label_units(records, "episode")
        assert units.max() > 3
        expected = by_formulas(materialise(as_view(toy.policy), records, clipped(records)), units)[leave_one_out]
        found = torch.zeros(len(expected)).double().index_add(0, units, influence.scores.double()) / units.bincount()
        assert (found - expected).abs().max() <= EXACT * expected.abs().max()
        assert torch.equal(callback.round.selection.keep, (expected >= 0)[units])


def test_rows_of_a_language_model_score_as_materialised_gradients_say() -> None:
    network = language_model("gpt2").eval().double()
    rows, view = rows_for(network, tokens(7, empty=False), spread=0.1), language_view(network)
    groups, columns = torch.tensor([0, 1, 0, 1, 1, 0, 0]), rows.observations
    rows = rows.with_columns({"group_ids": groups})
    mask = columns["response_mask"]

    def clipped_mean(outputs: Any, i: int) -> Tensor:
        terms = clip_surrogate(outputs.log_prob[0], columns["log_probs"][i], columns["advantages"][i])
        return (terms * mask[i]).sum() / mask[i].sum()

    gradients = materialise(view, rows, clipped_mean)
    scoring = Scoring(SequenceReturn(), TokenPPO(ent_coef=0.1), 1.0, "auto", None, 3)
    for leave_one_out in (False, True):
        influence = score(network, rows, scoring, DTV(leave_one_out=leave_one_out))
        for group in (0, 1):
            members = groups == group
            expected = by_formulas(gradients[members], torch.arange(int(members.sum())))[leave_one_out]
            assert (influence.scores[members] - expected).abs().max() <= EXACT * expected.abs().max()


def test_a_target_beside_the_rules_own_is_refused() -> None:
    with pytest.raises(WhenceError, match=r"DTV\(.*\) .* leave out target=Return\(\)"):
        InfluenceCallback(DTV(), target=Return())
    assert repr(InfluenceCallback(RandomDrop(like=DTV())).target) == "MeanObjective(unit=None)"
    assert InfluenceCallback(IIF(0.5)).target == Return()
