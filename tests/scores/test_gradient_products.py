"""Products of gradients of log pi, against gradients made record by record by plain autograd."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.gradients import POLICIES, materialise
from helpers.languages import language_model, rows_for
from helpers.toys import categorical_view, model, moved, records_for
from whence import RecordBatch
from whence.core import NonFinite, as_view
from whence.llm import language_view
from whence.sb3 import collect
from whence.scores import gradient_products
from whence.scores.gradient_products import multiply_gradients

EXACT = 1e-5


def compare(view: Any, records: RecordBatch, examples: RecordBatch, **settings: Any) -> None:
    products = multiply_gradients(view, records, examples, **settings)
    one, other = (materialise(as_view(view), each, lambda outputs, i: outputs.log_prob) for each in (records, examples))
    expected = other @ one.T
    assert (products.products - expected).abs().max() <= EXACT * expected.abs().max()
    assert (products.norms - one.norm(dim=1)).abs().max() <= EXACT * one.norm(dim=1).max()
    cosines = nn.functional.cosine_similarity(other[:, None], one[None], dim=2)
    assert (products.cosines() - cosines).abs().max() <= EXACT


@pytest.fixture
def by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the products by layers, whose faults another way would hide."""
    way = gradient_products._multiply_by_layers
    monkeypatch.setattr(gradient_products, "_choose_way", lambda problem, examples: way(examples))


@pytest.mark.usefixtures("by_layers")
@pytest.mark.parametrize("policy", [*POLICIES, "multi"])
def test_agents(policy: str) -> None:
    toy = model(n_envs=2, n_steps=8, **(POLICIES | {"multi": {"action": "multidiscrete"}})[policy])
    records = moved(collect(toy))
    compare(toy.policy, records, records.take(slice(3, 9)), chunk_size=256 if policy == "mlp" else 7)


@pytest.mark.usefixtures("by_layers")
@pytest.mark.parametrize("style", ["gpt2", "qwen2"])  # both with tied embeddings
def test_languages(style: str) -> None:
    language = language_model(style)
    rows = rows_for(language)
    compare(language_view(language), rows, rows.take(slice(1, 3)), chunk_size=2)


class Unruled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class Reversed(nn.Sequential):
    """A layer whose calls have the records in another order."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(nn.Linear(*sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flip(0)).flip(0)


@pytest.mark.parametrize("layer", [nn.Linear, Unruled, Reversed])
def test_another_way_takes_over(layer: Any) -> None:
    torch.manual_seed(0)
    view = categorical_view(nn.Sequential(layer(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    records = records_for(view, 20)
    compare(view, records, records.take(slice(0, 4)))


def test_a_mask_on_gradients_counts() -> None:
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    network[0].weight.register_hook(lambda gradient: gradient * (torch.arange(5) < 3))
    view = categorical_view(network)
    records = records_for(view, 20)
    compare(view, records, records.take(slice(0, 4)))


def test_what_is_not_finite_is_named() -> None:
    view = categorical_view(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    records = records_for(view, 20)
    records.observations[7] = torch.inf
    with pytest.raises(NonFinite, match="record 7"):
        multiply_gradients(view, records, records.take(slice(0, 4)))
