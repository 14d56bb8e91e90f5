"""What a score is, held against arithmetic on paper, against training without a record, and against misuse."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sb3_contrib import MaskablePPO
from stable_baselines3 import A2C as A2C_OF_SB3
from stable_baselines3 import PPO
from torch import Tensor, nn

import whence
from helpers.gradients import two_records
from helpers.toys import Softmax, categorical_view, mlp_view, model, records_for, softmax_view
from whence import Action, PPOClip, RecordBatch, Return, attribute
from whence.sb3 import collect
from whence.scores.attribution import score_targets

ENGINES = ["loop", "ghost", "forward"]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_records_of_a_softmax_policy_on_paper(engine: str) -> None:
    # grad f = 1/2 [2 (1/2, -1/2) + 1/2 (-1, 1)] = (1/4, -1/4)
    view, records = softmax_view(Softmax()), two_records()
    raw = attribute(view, records, target=Return(), objective=PPOClip(advantage_norm="none"), engine=engine)
    # grad l_0 = (1, -1), grad l_1 = (-1/2, 1/2): products 1/2 and -1/4.
    assert raw.scores.tolist() == pytest.approx([0.5, -0.25])
    # Normalised with Bessel's correction: mean 1.25, std 0.75 * sqrt(2), so +-1/sqrt(2).
    # grad l_0 = 1/sqrt(2) (1/2, -1/2), grad l_1 = -1/sqrt(2) (-1, 1): products sqrt(2)/8 and sqrt(2)/4.
    normalised = attribute(view, records, target=Return(), engine=engine)
    assert normalised.scores.tolist() == pytest.approx([2**0.5 / 8, 2**0.5 / 4])


@pytest.mark.parametrize("engine", ENGINES)
def test_action_target_on_paper(engine: str) -> None:
    # f = log pi(0 | s = 3): grad f = (3/2, -3/2). With grad l as above: 3 and -3/2.
    view, objective = softmax_view(Softmax()), PPOClip(advantage_norm="none")
    target = Action(torch.tensor(3.0), torch.tensor(0))
    scores = attribute(view, two_records(), target=target, objective=objective, engine=engine).scores
    assert scores.tolist() == pytest.approx([3, -1.5])
    # The mean over (s = 3, a = 0) and (s = 1, a = 1): grad f = 1/2 [(3/2, -3/2) + (-1/2, 1/2)] = (1/2, -1/2).
    target = Action(torch.tensor([3.0, 1.0]), torch.tensor([0, 1]))
    scores = attribute(view, two_records(), target=target, objective=objective, engine=engine).scores
    assert scores.tolist() == pytest.approx([1, -0.5])


def step_without(view: whence.ModuleView, records: RecordBatch, left_out: int | None, eta: float, mean: bool) -> float:
    """Return the target after one plain SGD step on the records, with one of them left out."""
    params = {name: p.detach().clone().requires_grad_() for name, p in view.parameters().items()}
    inputs = view.prepare(records)
    values = PPOClip(advantage_norm="none")(view(params, inputs), records)
    weights = torch.ones(len(records), dtype=torch.float64)
    if left_out is not None:
        weights[left_out] = 0
    loss = -(weights * values).sum() / (weights.sum() if mean else 1)
    gradients = torch.autograd.grad(loss, list(params.values()))
    after = {name: p - eta * g for (name, p), g in zip(params.items(), gradients, strict=True)}
    return float(Return()(view, after, records).detach())


@pytest.mark.parametrize("mean", [False, True])
def test_score_is_the_limit_of_leaving_the_record_out_of_one_sgd_step(mean: bool) -> None:
    view = mlp_view(dtype=torch.float64)
    records = records_for(view, 10, dtype=torch.float64)
    scores = attribute(view, records, target=Return(), objective=PPOClip(advantage_norm="none")).scores
    expected = (scores - scores.mean()) / 9 if mean else scores
    for record in (0, 4, 9):
        errors = []
        for eta in (4e-4, 2e-4, 1e-4):
            change = step_without(view, records, None, eta, mean) - step_without(view, records, record, eta, mean)
            errors.append(change / eta - float(expected[record]))
        assert abs(errors[-1]) < 0.05 * float(expected.abs().max())
        assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.02)
        assert errors[2] / errors[1] == pytest.approx(0.5, abs=0.02)


def test_an_action_is_known_by_its_observation_and_mask_too() -> None:
    assert repr(Action(3, 2)) == "Action(3, 2)"
    assert repr(Action(torch.tensor(3), 2)) == repr(Action(3, torch.tensor(2)))
    assert repr(Action([0.5, 1], 2, [True, False])) == "Action([0.5, 1.0], 2, [True, False])"
    image = torch.arange(48.0).reshape(4, 4, 3)
    shown = repr(Action({"image": image, "x": 1}, 0))
    assert re.fullmatch(r"Action\(\{'image': 4x4x3 numbers [0-9a-f]{8}, 'x': 1\}, 0\)", shown)
    assert shown == repr(Action({"image": image.numpy().astype("uint8"), "x": 1}, 0))
    assert shown != repr(Action({"image": image.flip(0), "x": 1}, 0))
    assert repr(Action(0, 0, [True] * 20)) != repr(Action(0, 0, [True] * 19 + [False]))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (0.7, r"Action\(\) is 0\.7, .*int64"),
        ([0.0, 0.7, 1.0], r"is \[0\.0, 0\.7, 1\.0\], and"),
        (float("nan"), "is nan, and"),
    ],
)
def test_an_action_that_would_be_cut_to_a_whole_number_is_refused(action: object, message: str) -> None:
    view = mlp_view()
    records = records_for(view)
    observation = records.observations[:3] if isinstance(action, list) else records.observations[0]
    with pytest.raises(whence.WhenceError, match=message):
        attribute(view, records, target=Action(observation, action))
    whole = attribute(view, records, target=Action(records.observations[0], 2.0)).scores
    torch.testing.assert_close(whole, attribute(view, records, target=Action(records.observations[0], 2)).scores)


@pytest.mark.parametrize(
    ("space", "inside", "outside", "named"),
    [
        ("discrete", 2, 3, r"3, .*Discrete\(3\)"),
        ("discrete", [0, 2], [0, -1], r"-1, .*Discrete\(3\)"),
        ("multidiscrete", [1, 2], [2, 2], r"\[2, 2\], .*MultiDiscrete\(\[2 3\]\)"),
        ("multibinary", [0, 1, 1], [0, 2, 1], r"\[0, 2, 1\], .*MultiBinary\(3\)"),
        ("box", [2.5, -9.0], None, ""),  # policies sample beyond the bounds
    ],
)
def test_an_action_outside_the_policys_space_is_refused(space: str, inside: Any, outside: Any, named: str) -> None:
    toy = model(action=space)
    records = collect(toy)
    observation = records.observations[:2] if space == "discrete" and isinstance(inside, list) else torch.zeros(5)
    assert attribute(toy.policy, records, target=Action(observation, inside)).scores.isfinite().all()
    if outside is not None:
        with pytest.raises(whence.WhenceError, match=rf"Action\(\) .* action {named}"):
            attribute(toy.policy, records, target=Action(observation, outside))


def test_bfloat16_is_scored_and_shown() -> None:
    view = mlp_view(dtype=torch.bfloat16)
    records = records_for(view, dtype=torch.bfloat16)
    influence = attribute(view, records, target=Return())
    assert influence.scores.dtype == torch.bfloat16
    assert influence.to_polars()["score"].to_list() == influence.scores.tolist()
    assert "24 records" in repr(influence)
    assert len(whence.IIF(1).select(records, influence).reasons) == 24


DRAWS = settings(max_examples=20, deadline=None)
SEEDS = st.integers(0, 2**31)


def draw_records(seed: int, n: int = 24) -> tuple[whence.ModuleView, RecordBatch]:
    torch.manual_seed(seed)
    view = mlp_view(dtype=torch.float64)
    return view, records_for(view, n, dtype=torch.float64)


@DRAWS
@given(SEEDS, st.integers(2, 30), st.sampled_from([*ENGINES]))
def test_targets_add(seed: int, n: int, engine: str) -> None:
    view, records = draw_records(seed, n)
    action = Action(records.observations[:2], records.actions[:2])
    parts = attribute(view, records, target={"a": Return(), "b": action}, engine=engine)
    whole = attribute(view, records, target=lambda v, p, r: Return()(v, p, r) + action(v, p, r), engine=engine)
    torch.testing.assert_close((parts["a"] + parts["b"]).scores, whole.scores)


@DRAWS
@given(SEEDS, st.integers(2, 30), st.integers(1, 40), st.sampled_from(["none", "buffer"]), st.sampled_from([*ENGINES]))
def test_permuting_records_permutes_scores_whatever_the_chunks(
    seed: int, n: int, chunk_size: int, norm: str, engine: str
) -> None:
    view, records = draw_records(seed, n)
    order = torch.randperm(n)
    settings: dict[str, Any] = {"objective": PPOClip(advantage_norm=norm), "engine": engine}  # type: ignore[arg-type]
    scores = attribute(view, records, target=Return(), **settings).scores
    permuted = score_targets(view, records.take(order), {"": Return()}, chunk_size=chunk_size, **settings)[""]
    torch.testing.assert_close(permuted.scores, scores[order])
    assert permuted.record_ids.tolist() == order.tolist()


def test_provenance_says_what_was_done() -> None:
    view = mlp_view()
    records = records_for(view)
    influence = attribute(view, records, target=Return())
    assert (influence.target, influence.engine) == ("Return()", "ghost")
    assert "ghost rule" in influence.engine_reason
    assert influence.provenance.parameters == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert influence.provenance.records == records.fingerprint
    assert set(influence.provenance.versions) == {"whence", "torch"}


def test_top_and_bottom_order_ties_by_id() -> None:
    about = attribute(mlp_view(), records_for(mlp_view()), target=Return()).provenance
    influence = whence.Influence(torch.tensor([1.0, -2.0, 1.0, -2.0]), torch.tensor([8, 6, 4, 2]), about)
    assert influence.top(3).record_ids.tolist() == [4, 8, 2]
    assert influence.bottom(2).record_ids.tolist() == [2, 6]
    assert influence.bottom(2).scores.tolist() == [-2, -2]
    assert influence.to_polars()["score"].to_list() == [1, -2, 1, -2]
    with pytest.raises(whence.InvalidInfluence, match="k is 0"):
        influence.top(0)


def test_influences_of_other_records_or_objectives_do_not_add() -> None:
    view = mlp_view()
    records = records_for(view)
    mine = attribute(view, records, target=Return())
    with pytest.raises(whence.InvalidInfluence, match="differ in their objective"):
        mine + attribute(view, records, target=Return(), objective=whence.A2C())
    with pytest.raises(whence.InvalidInfluence, match="differ in their records"):
        mine + attribute(view, records_for(view), target=Return())
    with pytest.raises(whence.InvalidInfluence, match="differ in their record_ids"):
        mine.top(3) + mine.bottom(3)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_a_target_that_depends_on_no_parameter_is_refused(engine: str) -> None:
    def constant(view: object, params: object, records: RecordBatch) -> Tensor:
        return records.advantages.mean()

    view = mlp_view()
    records = records_for(view)
    with pytest.raises(whence.WhenceError, match="constant depends on no"):
        attribute(view, records, target=constant, engine=engine)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": Return}, "target is <class"),
        ({"target": "return"}, "target is 'return'"),
        ({"target": {}}, "empty mapping"),
        ({"target": lambda v, p, r: p["0.weight"]}, r"returned a tensor of shape \(8, 5\); a scalar"),
        ({"target": lambda v, p, r: 3.0}, "returned 3.0; a scalar tensor"),
        ({"target": Return(), "engine": "gost"}, "engine is 'gost'.*ghost"),
        ({"target": Return(), "memory": 99}, "memory is 99 bytes, .*24 records"),
        ({"target": Return(), "memory": 0}, "memory is 0"),
        ({"target": Return(), "memory": "2GB"}, "memory is '2GB'"),
        ({"target": Return(), "objective": lambda o, r: o.log_prob.mean()}, "one value per record"),
        ({"target": Return(), "objective": PPOClip(vf_coef=0.5)}, "needs `values` and `returns`"),
        ({"target": Action(torch.zeros(4), torch.tensor(0))}, r"observation of Action\(\) has shape \(4,\)"),
        ({"target": Action(torch.zeros(2, 5), torch.zeros(3))}, r"different sizes, \[2, 3\]"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    view = mlp_view()
    with pytest.raises(whence.WhenceError, match=message):
        attribute(view, records_for(view), **arguments)  # type: ignore[call-overload]


def test_policies_that_cannot_be_read_are_refused() -> None:
    records = records_for(mlp_view())
    with pytest.raises(whence.Unsupported, match=r"linear\.Linear.*stable_baselines3.*whence\.ModuleView"):
        attribute(nn.Linear(5, 3), records, target=Return())
    frozen = nn.Linear(5, 3).requires_grad_(False)
    with pytest.raises(whence.WhenceError, match=r"\(Linear\) has no trainable parameter"):
        attribute(categorical_view(frozen), records, target=Return())
    wide = whence.ModuleView(nn.Linear(5, 3), lambda module, inputs: module(inputs["observations"]))
    with pytest.raises(whence.WhenceError, match=r"`log_prob` of shape \(\d+, 3\) for \d+ records"):
        attribute(wide, records, target=Return())


@pytest.mark.parametrize("algorithm", [PPO, A2C_OF_SB3, MaskablePPO])
def test_an_algorithm_in_the_place_of_its_policy_is_refused(algorithm: Any) -> None:
    toy = model(algorithm)
    records = collect(toy)
    with pytest.raises(whence.Unsupported, match=rf"a {algorithm.__name__} algorithm.*model\.policy"):
        attribute(toy, records, target=Return())


@pytest.mark.parametrize("observation", ["vector", "dict"])
def test_a_rollout_buffer_in_the_place_of_records_is_refused(observation: str) -> None:
    toy = model(observation=observation)
    kind = "DictRolloutBuffer" if observation == "dict" else "RolloutBuffer"
    remedy = r"whence\.sb3\.collect\(model\).*whence\.sb3\.snapshot\(model\)"
    with pytest.raises(whence.InvalidRecords, match=rf"records is a {kind}; .*{remedy}"):
        attribute(toy.policy, toy.rollout_buffer, target=Return())
    with pytest.raises(whence.InvalidRecords, match="records is a dict; a RecordBatch"):
        attribute(toy.policy, {"observations": []}, target=Return())  # type: ignore[call-overload]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_gradient_that_is_not_finite_names_the_parameter(engine: str) -> None:
    view = mlp_view()

    def broken(view: whence.PolicyView, params: dict[str, Tensor], records: RecordBatch) -> Tensor:
        return (params["2.bias"] * torch.tensor([1.0, float("nan"), 1.0])).sum()

    with pytest.raises(whence.NonFinite, match=r"target broken .*`2\.bias`"):
        attribute(view, records_for(view), target=broken, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_score_that_is_not_finite_names_record_and_parameter(engine: str) -> None:
    view = mlp_view()
    records = records_for(view)
    bad = records.with_columns({"record_ids": 100 + torch.arange(len(records))})
    bad.log_probs[7] = -1e4  # the ratio overflows
    bad.advantages[7] = -1.0  # ... on the side that is not clipped
    with pytest.raises(whence.NonFinite, match=r"record 107 is not finite.*`0\.weight`"):
        attribute(view, bad, target=Return(), objective=PPOClip(advantage_norm="none"), engine=engine)


class Remembering(nn.Sequential):
    """A policy that stores its distribution, as those of rsl_rl and skrl do."""

    distribution: torch.distributions.Categorical | None = None

    def act(self, observations: Tensor) -> torch.distributions.Categorical:
        self.distribution = torch.distributions.Categorical(logits=self(observations), validate_args=False)
        self.calls = getattr(self, "calls", 0) + 1
        return self.distribution


@pytest.mark.parametrize("engine", [*ENGINES, "vmap"])
@pytest.mark.parametrize("has_acted", [False, True])
def test_what_a_forward_pass_stores_is_dropped(engine: str, has_acted: bool) -> None:
    torch.manual_seed(0)
    policy = Remembering(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def outputs(policy: Remembering, inputs: dict[str, Tensor]) -> Tensor:
        log_probs: Tensor = policy.act(inputs["observations"]).log_prob(inputs["actions"])
        return log_probs

    view = whence.ModuleView(policy, outputs)
    records = records_for(mlp_view())
    if has_acted:
        policy.act(records.observations)
    before = dict(vars(policy))
    expected = attribute(categorical_view(nn.Sequential(*policy)), records, target=Return()).scores
    scores = attribute(view, records, target=Return(), engine=engine).scores
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert vars(policy) == before
    assert policy.distribution is before.get("distribution")
