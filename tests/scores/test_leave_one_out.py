"""Scores by the other units alone, and the mean objective as target, against gradients made record by record."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.gradients import EXACT, POLICIES, clip_surrogate, clipped, materialise, two_records
from helpers.languages import language_model, rows_for, tokens
from helpers.toys import Softmax, categorical_view, difference, mlp_view, model, moved, records_for, softmax_view
from whence import Action, MeanObjective, PPOClip, RecordBatch, Return, WhenceError, attribute
from whence.core import as_view, label_units
from whence.llm import SequenceReturn, TokenPPO, TokenReturn, language_view
from whence.llm.scores import GroupObjective, Scoring, row_scores, score
from whence.sb3 import collect
from whence.scores.attribution import score_targets

SHOWN = ("box", "record"), ("cnns", "record"), ("cnn", "episode")


def leave_out(objective: Tensor, target: Tensor, weights: Tensor, units: Tensor) -> Tensor:
    """Return each record's product with the mean over the other units' records."""
    others = (units[:, None] != units[None]).double() * weights
    return ((others @ target / others.sum(1, keepdim=True)) * objective).sum(1)


@pytest.mark.parametrize(
    ("policy", "unit"),
    [
        pytest.param(policy, unit, marks=() if (policy, unit) in SHOWN else pytest.mark.long)
        for policy in POLICIES
        for unit in ("record", "episode")
    ],
)
def test_other_units_judge_as_materialised_gradients_say(policy: str, unit: Any) -> None:
    toy = model(n_envs=2, n_steps=16, **POLICIES[policy])
    records, view = moved(collect(toy)), as_view(toy.policy)
    units, episodes = label_units(records, unit), label_units(records, "episode")
    shares = 1 / episodes.bincount()[episodes].double()
    surrogate = materialise(view, records, clipped(records))
    entropy = materialise(view, records, lambda outputs, i: 0.01 * outputs.entropy)
    weighed = materialise(view, records, lambda outputs, i: outputs.log_prob * records.advantages[i])
    cases: dict[str, tuple[Any, Tensor, Tensor]] = {
        "return": (Return(), weighed, torch.ones(len(records)).double()),
        "mean": (MeanObjective(), surrogate, torch.ones(len(records)).double()),
        "episodes": (MeanObjective("episode"), surrogate, shares),
    }
    for of_objective, objective in ((surrogate + entropy, PPOClip(ent_coef=0.01)), (surrogate, PPOClip())):
        settings: Any = {"target": {name: case[0] for name, case in cases.items()}, "objective": objective}
        whole = attribute(view, records, **settings)
        others = attribute(view, records, leave_one_out=unit, **settings)
        for name, (_, gradients, weights) in cases.items():
            expected = of_objective @ (weights @ gradients / weights.sum())
            assert (whole[name].scores - expected).abs().max() <= EXACT * expected.abs().max(), name
            expected = leave_out(of_objective, gradients, weights, units)
            assert (others[name].scores - expected).abs().max() <= EXACT * expected.abs().max(), name
            assert others[name].provenance.target == f"{cases[name][0]!r} over the other {unit}s"


# Both with tied embeddings.
@pytest.mark.parametrize("style", ["gpt2", pytest.param("qwen2", marks=pytest.mark.long)])
def test_rows_of_language_models_are_judged_by_the_other_rows(style: str) -> None:
    network = language_model(style).eval().double()  # a row's own part may be a hundred times the rest
    rows, view = rows_for(network, tokens(7)), language_view(network)
    columns: Any = rows.observations
    mask, lengths = columns["response_mask"], columns["response_mask"].sum(1).clamp(min=1)

    def ppo(outputs: Any, i: int) -> Tensor:
        terms = clip_surrogate(outputs.log_prob[0], columns["log_probs"][i], columns["advantages"][i])
        return (terms * mask[i]).sum() / lengths[i]

    of_tokens = materialise(view, rows, lambda o, i: (o.log_prob[0] * columns["advantages"][i]).sum())
    of_rows = materialise(view, rows, lambda o, i: o.log_prob.sum() * rows.advantages[i])
    ones, units = torch.ones(len(rows)).double(), torch.arange(len(rows))
    group = of_tokens / lengths[:, None]  # at ratios of 1
    for objective, gradients in ((TokenPPO(ent_coef=0.0), materialise(view, rows, ppo)), (GroupObjective(), group)):
        cases = {
            "sequence": (SequenceReturn(), of_rows, ones),
            "token": (TokenReturn(), of_tokens / lengths[:, None], mask.sum(1).double()),
            "mean": (MeanObjective("row"), gradients, ones),
        }
        targets: Any = {name: case[0] for name, case in cases.items()}
        found = {
            engine: attribute(view, rows, target=targets, objective=objective, engine=engine, leave_one_out="row")
            for engine in ("ghost", "loop")
        }
        parts: Any = {"engine": "ghost", "chunk_size": 3, "leave_one_out": "row"}
        found["parts"] = score_targets(view, rows, targets, objective=objective, **parts)
        for name, (_, of_target, weights) in cases.items():
            expected = leave_out(gradients, of_target, weights, units)
            for engine, scored in found.items():
                assert (scored[name].scores - expected).abs().max() <= EXACT * expected.abs().max(), (name, engine)


def test_the_divergence_is_no_part_of_the_mean_objective() -> None:
    network = language_model("gpt2")
    rows, view = rows_for(network), language_view(network)
    columns = {**rows.observations, "ref_log_probs": rows.observations["log_probs"]}
    rows, policy_part = rows.with_columns({"observations": columns}), GroupObjective()

    def mean(view: Any, params: Any, records: Any) -> Tensor:
        return policy_part(view(params, view.prepare(records)), records).mean()

    for beta in (0.0, 0.5):
        scored = attribute(
            view, rows, target={"": MeanObjective("row"), "f": mean}, objective=GroupObjective(beta=beta)
        )
        assert difference(scored[""], scored["f"]) <= EXACT


def test_by_hand() -> None:
    view, records = softmax_view(Softmax()), two_records()
    settings: Any = {"objective": PPOClip(advantage_norm="none")}
    # The records' gradients are (1, -1) and (-1/2, 1/2), of the objective and of the target; see test_attribution.
    for target in (Return(), MeanObjective()):
        assert attribute(view, records, target=target, **settings).scores.tolist() == pytest.approx([0.5, -0.25])
        others = attribute(view, records, target=target, leave_one_out="record", **settings)
        assert others.scores.tolist() == pytest.approx([-1, -1])
        one = records.with_columns({"episode_ids": torch.zeros(2, dtype=torch.int64)})
        assert attribute(view, one, target=target, leave_one_out="episode", **settings).scores.tolist() == [0, 0]


def test_a_record_without_others_that_have_a_gradient_scores_zero() -> None:
    view = mlp_view((5, 64, 3))
    records, scores = records_for(view), []
    for i in range(8):
        alone = records.with_advantages(torch.where(torch.arange(24) == i, records.advantages, 0.0))
        others = attribute(view, alone, target=Return(), leave_one_out="record", objective=PPOClip(ent_coef=0.1))
        scores.append(float(others.scores[i]))
    assert scores == [0] * 8


def test_a_parameter_with_a_mask_and_folds_of_the_mean_objective() -> None:
    torch.manual_seed(0)
    view = categorical_view(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))
    records = records_for(view).with_columns({"episode_ids": torch.arange(24) // 4})
    halved = attribute(view, records, target=MeanObjective(), folds=3)
    assert halved.errors is not None
    mask = (torch.rand(8, 5) < 0.5).float()
    view.module[0].weight.register_hook(lambda gradient: gradient * mask)  # type: ignore[index, union-attr]
    ghost, loop = (
        attribute(view, records, target=MeanObjective(), leave_one_out="record", engine=engine).scores
        for engine in ("ghost", "loop")
    )
    torch.testing.assert_close(ghost, loop)


@pytest.mark.parametrize(
    ("target", "leave_one_out"),
    [
        *((SequenceReturn(), "row"), (TokenReturn(), None), (MeanObjective(), "row"), ("rows", None)),
        *(pytest.param(SequenceReturn(), None, marks=pytest.mark.long),),
        *(pytest.param(target, "row", marks=pytest.mark.long) for target in (TokenReturn(), "rows")),
        pytest.param(MeanObjective(), None, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_rows_without_a_signal_cost_no_pass_and_score_0(
    target: Any, leave_one_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, sizes = language_model("llama").double(), list[int]()
    rows = rows_for(network, tokens(7))
    scoring = Scoring(target, GroupObjective("sum"), 1.0, "auto", None, 3, leave_one_out=leave_one_out)
    if target == "rows":
        scoring = replace(scoring, target=SequenceReturn(rows_for(network)))

    def silence(factors: Tensor) -> RecordBatch:
        columns = {**rows.observations, "advantages": rows.observations["advantages"] * factors[:, None]}
        return rows.with_columns({"observations": columns, "advantages": rows.advantages * factors})

    some, flat = silence(torch.tensor([1, 0, 1, 0, 0, 1, 1])), silence(torch.zeros(7))
    network.register_forward_pre_hook(lambda m, args, kw: sizes.append(len(kw["input_ids"])), with_kwargs=True)
    assert not score(network, flat, scoring).scores.any()
    score(network, some, scoring)  # engines are compared at first
    sizes.clear()
    influence, passed = score(network, some, scoring), sum(sizes)
    sizes.clear()
    monkeypatch.setattr(row_scores, "_find_signal", lambda rows, scoring: torch.ones(len(rows), dtype=torch.bool))
    expected = score(network, some, scoring)
    assert passed < sum(sizes)
    assert (influence.scores - expected.scores).abs().max() <= EXACT * expected.scores.abs().max()
    assert influence.scores.count_nonzero() == 3  # the last response is empty
    assert torch.equal(influence.record_ids, rows.ids)
    assert influence.provenance.records == expected.provenance.records


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": Action(torch.zeros(5), 1)}, r"Action.* is none: pass Return\(\)"),
        ({"target": Return(), "folds": 3}, "folds is 3 and leave_one_out is 'record'"),
        ({"target": Return(), "leave_one_out": "rows"}, "unit is 'rows'"),
        ({"target": Return(), "leave_one_out": "episode"}, "episodes begin: pass episode_ids"),
    ],
)
def test_what_has_no_meaning_is_refused(settings: dict[str, Any], message: str) -> None:
    view = categorical_view(nn.Linear(5, 3))
    with pytest.raises(WhenceError, match=message):
        attribute(view, records_for(view), **{"leave_one_out": "record", **settings})
    with pytest.raises(WhenceError, match=r"MeanObjective\(\) .* scoring"):
        MeanObjective()(view, view.parameters(), records_for(view))
