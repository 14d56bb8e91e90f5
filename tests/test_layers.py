"""Scores by some layers: those of the gradients in these layers alone, and no derivatives below them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toys import categorical_view, difference, model, moved, records_for
from whence import ModuleView, RecordBatch, Return, WhenceError, attribute
from whence.attribution import score_targets
from whence.engines import ENGINES
from whence.layers import choose_parameters, find_blocks, restrict_view
from whence.sb3 import collect


class Tower(nn.Module):
    """Blocks between an input and an output layer."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(blocks))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


def tower(blocks: int = 4) -> tuple[ModuleView, RecordBatch]:
    view = categorical_view(Tower(blocks).double())
    return view, moved(records_for(view, dtype=torch.float64))


def by_hand(view: ModuleView, records: RecordBatch, names: list[str]) -> Tensor:
    """Return each record's product over some parameters, by plain autograd, record by record."""
    params = dict(view.module.named_parameters())

    def gradient(value: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(value, [params[name] for name in names], retain_graph=True))

    advantages = records.advantages
    normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    log_probs = view(params, view.prepare(records)).log_prob
    of_target = gradient((log_probs * advantages).mean())
    ratio = (log_probs - records.log_probs).exp()
    objective = torch.minimum(ratio * normal, ratio.clamp(0.8, 1.2) * normal)
    return torch.stack(
        [sum((g * t).sum() for g, t in zip(gradient(each), of_target, strict=True)) for each in objective]
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layers", [1, 3, "last.*", ["first.weight", "blocks.2.*"]])
def test_scores_are_products_of_these_layers_gradients(engine: str, layers: Any) -> None:
    view, records = tower()
    names = {
        1: ["blocks.3.weight", "blocks.3.bias"],
        3: [f"blocks.{n}.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias")],
        "last.*": ["last.weight", "last.bias"],
    }.get(layers if isinstance(layers, int | str) else None, ["first.weight", "blocks.2.weight", "blocks.2.bias"])
    for chunk_size in (None, 7):
        part = restrict_view(view, layers)
        influence = score_targets(part, records, {"": Return()}, engine=engine, chunk_size=chunk_size)[""]
        torch.testing.assert_close(influence.scores, by_hand(view, records, names))
        assert influence.provenance.parameters == tuple(names)


def test_a_stable_baselines_policy_and_several_targets() -> None:
    built = model()
    policy, records = built.policy, moved(collect(built))
    targets = {"return": Return(), "log": lambda view, params, rows: view(params, view.prepare(rows)).log_prob.mean()}
    some = attribute(policy, records, target=targets, layers=["action_net.*", "mlp_extractor.policy_net.*"])
    for name, target in targets.items():
        # All parameters that log-probs depend on are of these layers.
        assert difference(some[name], attribute(policy, records, target=target)) < 1e-6
    with_errors = attribute(policy, records, target=Return(), layers="action_net.*", folds=4)
    alone = attribute(policy, records, target=Return(), layers="action_net.*")
    assert with_errors.scores.equal(alone.scores)
    assert with_errors.errors is not None
    assert (with_errors.errors > 0).any()


def test_no_graph_is_kept_below_the_layers() -> None:
    view, records = tower()
    needs_gradient = []
    view.module.blocks[1].register_forward_hook(lambda module, args, out: needs_gradient.append(out.requires_grad))
    attribute(view, records, target=Return(), layers=2)
    assert needs_gradient
    assert not any(needs_gradient)
    needs_gradient.clear()
    attribute(view, records, target=Return(), layers=3)
    assert any(needs_gradient)


def test_nothing_of_the_policy_changes() -> None:
    view, records = tower()
    parameters = dict(view.module.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    attribute(view, records, target=Return(), layers=2)
    after = dict(view.module.named_parameters())
    assert all(after[name] is parameters[name] and after[name].equal(before[name]) for name in parameters)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in after.values())
    # A view of some layers reads what the others are now.
    part = restrict_view(view, 1)
    with torch.no_grad():
        parameters["first.bias"].add_(1.0)
    inputs = view.prepare(records)
    assert part(part.parameters(), inputs).log_prob.equal(view(view.parameters(), inputs).log_prob)


def test_blocks_are_the_longest_list_that_is_in_no_other() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))

    module = nn.ModuleDict(
        {
            "heads": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)),
            "layers": nn.ModuleList([Expert(), Expert(), Expert()]),
        }
    )
    path, blocks = find_blocks(module)
    assert (path, len(blocks)) == ("layers", 3)
    names = choose_parameters(module, dict(module.named_parameters()), 1)
    assert names == [f"layers.2.experts.{n}.{kind}" for n in range(9) for kind in ("weight", "bias")]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (0, r"layers is 0; a number from 1 to 4, the blocks of `blocks`, is needed"),
        (5, "layers is 5; a number from 1 to 4"),
        ("head.*", r"pattern 'head\.\*', which no trainable parameter's name matches\. Names are first\.weight, "),
        (["last.*", "x"], "pattern 'x'"),
    ],
)
def test_layers_that_are_not_there_are_refused(layers: Any, message: str) -> None:
    view, records = tower()
    with pytest.raises(WhenceError, match=message):
        attribute(view, records, target=Return(), layers=layers)


class Squared(Return):
    """A target whose derivatives in the outputs depend on them."""

    linear = False

    def from_outputs(self, outputs: Any, records: RecordBatch) -> Tensor:
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
