"""Products of gradients of log pi, against gradients made record by record by plain autograd."""

from typing import Any

import pytest
import torch
from torch import nn

from languages import language_model, rows_for
from test_leave_one_out import POLICIES, materialise
from toys import categorical_view, model, moved, records_for
from whence import RecordBatch
from whence.core import as_view
from whence.gradient_products import multiply_gradients
from whence.llm import language_view
from whence.sb3 import collect

EXACT = 1e-5


def compare(view: Any, records: RecordBatch, examples: RecordBatch, **settings: Any) -> None:
    products = multiply_gradients(view, records, examples, **settings)
    one, other = (materialise(as_view(view), each, lambda outputs, i: outputs.log_prob) for each in (records, examples))
    expected = other @ one.T
    assert (products.products - expected).abs().max() <= EXACT * expected.abs().max()
    assert (products.norms - one.norm(dim=1)).abs().max() <= EXACT * one.norm(dim=1).max()
    cosines = nn.functional.cosine_similarity(other[:, None], one[None], dim=2)
    assert (products.cosines() - cosines).abs().max() <= EXACT


@pytest.mark.parametrize("policy", [*POLICIES, "dict", "multi"])
def test_agents(policy: str) -> None:
    more = {"dict": {"observation": "dict"}, "multi": {"action": "multidiscrete"}}
    toy = model(n_envs=2, n_steps=16, **(POLICIES | more)[policy])
    records = moved(collect(toy))
    compare(toy.policy, records, records.take(slice(3, 15)))
    compare(toy.policy, records, records.take(slice(3, 15)), chunk_size=7)


@pytest.mark.parametrize("style", ["gpt2", "qwen2"])  # both with tied embeddings
def test_languages(style: str) -> None:
    language = language_model(style)
    rows = rows_for(language)
    compare(language_view(language), rows, rows.take(slice(1, 3)), chunk_size=2)


class Unruled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class Sorted(nn.Linear):
    """A layer that torch.func cannot batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + float(x.detach().sum() > 1e9))


@pytest.mark.parametrize("layer", [Unruled, Sorted])
def test_layers_without_a_rule(layer: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    view = categorical_view(nn.Sequential(layer(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    records = records_for(view, 20)
    compare(view, records, records.take(slice(0, 4)))
