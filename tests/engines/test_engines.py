"""Each engine against the plain loop over records, and what an engine must refuse rather than get wrong."""

import itertools
from typing import Any

import pytest
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from torch import Tensor, nn

import whence
from helpers.toys import categorical_view, difference, mlp_view, model, moved, records_for
from whence import A2C, Action, PPOClip, Return, attribute
from whence.engines import LayerRule, Refused, register_rule
from whence.sb3 import InfluenceCallback, collect
from whence.scores.attribution import score_targets

OBSERVATIONS = ("vector", "image", "discrete", "multidiscrete", "multibinary", "dict")
ACTIONS = ("discrete", "box", "multidiscrete", "multibinary", "gsde", "squashed")


TURNS = [*zip(OBSERVATIONS, ACTIONS, itertools.cycle((True, False)), strict=False)]
CELLS = [
    # In long tests all cells are held against SB3's own loss, in test_sb3_loss.py. Here, each observation and action
    # stands in a cell, by turns with sharing and without; the rest is long.
    pytest.param(*cell, marks=() if cell[1:] in TURNS else pytest.mark.long)
    for cell in (
        *itertools.product([PPO], OBSERVATIONS, ACTIONS, [True, False]),
        *itertools.product([MaskablePPO], ("vector", "dict"), ("discrete", *ACTIONS[2:4]), [True, False]),
    )
]
ENGINES_BESIDE_LOOP = ("ghost", "forward", "vmap")
OBJECTIVES = [PPOClip(), PPOClip(ent_coef=0.1, vf_coef=0.5, clip_range_vf=0.3), A2C(ent_coef=0.1, vf_coef=0.5)]


@pytest.mark.parametrize(("algorithm", "observation", "action", "shared"), CELLS)
def test_sb3_policies_score_as_the_loop_does(algorithm: Any, observation: str, action: str, shared: bool) -> None:
    # More than the 16 records on which memory is measured, and few: the loop takes each by itself.
    policy_model = model(algorithm, observation=observation, action=action, shared=shared, n_steps=18, batch_size=6)
    records = collect(policy_model)
    few = records.take(slice(0, 3))
    targets = {"return": Return(), "action": Action(few.observations, few.actions, few.action_masks)}
    # Ratios are 1 as collected; moved away from there, some records are clipped and others not.
    away = moved(records)
    ratios = (records.log_probs - away.log_probs).exp()
    assert 0 < ((ratios - 1).abs() > 0.2).sum() < len(records)
    # How many records fit into memory is measured for the first objective in every second cell: it takes longer than
    # scoring.
    chunk_sizes = (None if shared else 6, 9, 18)
    cases = [*zip((records, away, away), OBJECTIVES, chunk_sizes, strict=True)]
    for batch, objective, chunk_size in cases if observation == "vector" else cases[:2]:
        truth = score_targets(policy_model.policy, batch, targets, engine="loop", objective=objective, chunk_size=18)
        assert truth["return"].scores.abs().max() > 1e-4
        # Time and again on the same policy: what went before must have left nothing behind.
        for engine in ENGINES_BESIDE_LOOP:
            settings = {"objective": objective, "chunk_size": chunk_size}
            scored = score_targets(policy_model.policy, batch, targets, engine=engine, **settings)
            for name in targets:
                assert difference(scored[name], truth[name]) <= 1e-5, (engine, name, objective)
        # One target takes another way through the ghost engine than several do.
        alone = score_targets(policy_model.policy, batch, {"": Return()}, engine="ghost", **settings)[""]
        assert difference(alone, truth["return"]) <= 1e-5, objective
    assert attribute(policy_model.policy, records, target=Return()).engine == "ghost"


def against_loop(view: whence.ModuleView, records: whence.RecordBatch, engine: str = "ghost", **more: object) -> None:
    truth = score_targets(view, records, {"": Return()}, engine="loop", **more)[""]
    # One target and several take different ways through the ghost engine.
    several = score_targets(view, records, {"once": Return(), "again": Return()}, engine=engine, **more)
    for scored in (score_targets(view, records, {"": Return()}, engine=engine, **more)[""], several["again"]):
        assert difference(scored, truth) <= 1e-5
    assert truth.scores.abs().max() > 1e-3


@pytest.mark.parametrize("advantage", [0.0, 1e-30])
def test_records_that_the_target_gives_no_weight_are_scored_all_the_same(advantage: float) -> None:
    view = mlp_view()
    records = records_for(view)
    advantages = records.advantages.clone()
    advantages[3] = advantage
    against_loop(view, records.with_advantages(advantages))


def test_dropout_is_off_while_scoring() -> None:
    view = categorical_view(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    view.module.eval()
    records = records_for(view)
    expected = attribute(view, records, target=Return()).scores
    view.module.train()
    torch.testing.assert_close(attribute(view, records, target=Return()).scores, expected)
    assert all(module.training for module in view.module.modules())


def test_rules_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    monkeypatch.setattr(whence.engines.rules, "_RULES", dict(whence.engines.rules._RULES))
    view = categorical_view(nn.Sequential(nn.Linear(5, 8), Scale(), nn.Linear(8, 3)))
    records = records_for(view)
    with pytest.raises(Refused, match="Scale"):
        attribute(view, records, target=Return(), engine="ghost")
    rule = LayerRule(
        product=lambda layer, direction, x, g: (g * x * direction["weight"]).sum(1),
        gradient=lambda layer, x, g, weights: {"weight": (g * x * weights[:, None]).sum(0)},
    )
    register_rule(Scale, rule)
    against_loop(view, records)


@pytest.mark.parametrize("engine", ["auto", *ENGINES_BESIDE_LOOP, "loop"])
def test_batch_norm_in_training_mode_is_refused_with_the_reason(engine: str) -> None:
    view = categorical_view(nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), nn.Linear(6, 3)).eval())
    records = records_for(view)
    view.module.train()
    with pytest.raises(whence.Unsupported, match=r"a record alone.*BatchNorm in eval mode"):
        attribute(view, records, target=Return(), engine=engine)
    without = categorical_view(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval())
    with pytest.raises(whence.Unsupported, match="a record alone"):
        attribute(without, records_for(without), target=Return(), engine=engine)


CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SPACES = [("vector", "box"), ("dict", "discrete"), ("image", "gsde")]


@pytest.mark.parametrize(
    ("device", "observation", "action"),
    [
        # On a CPU the cells above score their like.
        *(pytest.param("cpu", *cell, marks=pytest.mark.long) for cell in SPACES),
        *(pytest.param("cuda", *cell, marks=CUDA) for cell in SPACES),
    ],
)
def test_a_models_device_is_where_it_is_scored(device: str, observation: str, action: str) -> None:
    toy = model(observation=observation, action=action, device=device)
    callback = InfluenceCallback(whence.IIF(0.5))
    toy.learn(64, callback=callback)
    records = collect(toy)
    assert records.log_probs.device.type == "cpu"
    few = records.take(slice(0, 2))
    targets = {"return": Return(), "action": Action(few.observations, few.actions)}
    truth = attribute(toy.policy, records, target=targets, engine="loop")
    for engine in ENGINES_BESIDE_LOOP:
        scored = attribute(toy.policy, records, target=targets, engine=engine)
        for name in targets:
            assert scored[name].scores.device.type == "cpu"
            assert difference(scored[name], truth[name]) <= 1e-5
    assert next(toy.policy.parameters()).device.type == device


class Positions(nn.Module):
    """Adds an embedding of the position, which has as many rows as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.out = nn.Embedding(12, 5), nn.Linear(60, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.position(torch.arange(12))).flatten(1))


@pytest.mark.parametrize("count", [11, 12, 24])
@pytest.mark.parametrize("chunk_size", [None, 12])
def test_an_axis_as_long_as_there_are_records_by_chance_is_noticed(count: int, chunk_size: int | None) -> None:
    view = categorical_view(Positions())
    records = records_for(view, count, features=(12, 5))
    assert score_targets(view, records, {"": Return()}, chunk_size=chunk_size)[""].engine == "forward"
    against_loop(view, records, "auto", chunk_size=chunk_size)


def test_an_axis_is_confirmed_for_each_view_of_a_module() -> None:
    network = Positions()

    def without_positions(module: Any, inputs: dict[str, Tensor]) -> Tensor:
        return module.out(inputs["observations"].flatten(1)).log_softmax(-1)[:, 0]

    plain, view = whence.ModuleView(network, without_positions), categorical_view(network)
    records = records_for(view, 12, features=(12, 5))
    assert attribute(plain, records, target=Return()).engine == "ghost"
    assert attribute(view, records, target=Return()).engine == "forward"


class Squared(Return):
    """A target whose derivatives in the outputs depend on them."""

    linear = False

    def from_outputs(self, outputs: Any, records: whence.RecordBatch) -> Tensor:
        return (outputs.log_prob.square() * records.advantages).mean()


@pytest.mark.parametrize("engine", ["ghost", "forward"])
def test_a_linear_target_saves_a_forward_pass(engine: str) -> None:
    view = categorical_view(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    records = moved(records_for(view, n=40, dtype=torch.float64))
    score_targets(view, records, {"": Return()}, engine=engine, chunk_size=10)  # notes what it needs to
    passes, sizes = {}, []
    view.module.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    for target in (Return(), Squared()):
        sizes.clear()
        scores = score_targets(view, records, {"": target}, engine=engine, chunk_size=10)[""].scores
        passes[type(target)] = sum(sizes)
        torch.testing.assert_close(scores, attribute(view, records, target=target, engine="loop").scores)
    assert passes == {Return: 2 * 40 + 1, Squared: 3 * 40}
