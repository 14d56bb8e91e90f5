"""Finders that were held against those of `whence why`, and lost: for agents, and for language models.

Each scores records by `advantage x similarity`. All are made in one pass over a run.

- direction: `advantage x <grad log pi_i, mean gradient of the examples> / |grad log pi_i|`.
- clusters: gradients are projected on those of the anchors, some records of a round, and clustered by direction and
  sign of advantage (k-means). A cluster scores by the mean of `nearest` over its records, and these by themselves.
- nearest-trained: `nearest` at the trained policy for all records.
- similar, similar-hidden: `exp(-|z - z_target|^2 / d)` of observations z in units of their standard deviation, or of
  the trained policy's last hidden layer; its sign is -1 for another action.
- embedding: the cosine of mean last hidden states of a response and the one in question, at the trained policy.
- hidden: the difference of mean hidden states of examples and counter-examples, projected on.
"""

from typing import Any

import numpy as np
import polars as pl
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor

from studies.planted.scores import Floats
from whence.causes.ranking import average_nearest
from whence.core import RecordBatch, eval_mode, named_leaves
from whence.llm import WithValueHead, language_view
from whence.sb3.policy import actor_critic_view
from whence.scores.gradient_products import GradientProducts

ANCHORS, CLUSTERS = 32, 50
"""Records that gradients are projected on, and clusters."""


def draw_anchors(records: RecordBatch) -> RecordBatch:
    """Return some records of a round, on whose gradients those of all rounds are projected."""
    return records.take(torch.as_tensor(np.random.default_rng(0).permutation(len(records))[:ANCHORS]))


def take_examples(products: GradientProducts, index: slice) -> GradientProducts:
    """Return the products with some of the examples."""
    return GradientProducts(products.products[index], products.example_norms[index], products.norms)


class GradientFinders:
    """Gathers round after round what `direction` and `clusters` need."""

    def __init__(self) -> None:
        self._advantages: list[Tensor] = []
        self._direction: list[Tensor] = []
        self._nearest: list[Tensor] = []
        self._projections: list[Tensor] = []

    def add(self, of_examples: GradientProducts, of_anchors: GradientProducts, advantages: Tensor) -> None:
        """Add a round's records: their products with the examples and with the anchors."""
        self._advantages.append(advantages.double())
        self._direction.append(of_examples.products.mean(0) / of_examples.norms.clamp(min=1e-12))
        self._nearest.append(average_nearest(of_examples.cosines()))
        self._projections.append(of_anchors.cosines().T)

    def score(self) -> dict[str, Floats]:
        """Return the scores of all records by method."""
        advantages, nearest = torch.cat(self._advantages), torch.cat(self._nearest)
        scores = advantages * nearest
        directions = (torch.cat(self._projections) * advantages.sign()[:, None]).numpy()
        directions /= np.linalg.norm(directions, axis=1, keepdims=True).clip(1e-12)
        _, labels = kmeans2(directions, CLUSTERS, minit="++", rng=0)
        means = pl.DataFrame({"label": labels, "score": scores.numpy()}).select(pl.col("score").mean().over("label"))
        # Clusters first, and within a cluster the records by themselves.
        clusters = means.to_series().to_numpy() + 1e-6 * scores.numpy()
        return {"direction": (advantages * torch.cat(self._direction)).numpy(), "clusters": clusters}


def score_projected(hidden: Tensor, examples: Tensor, counter_examples: Tensor) -> Floats:
    """Return hidden states less their mean, projected on the difference of means of examples and counter-examples."""
    difference = examples.mean(0) - counter_examples.mean(0)
    scores: Floats = ((hidden - hidden.mean(0)) @ difference / difference.norm()).double().numpy()
    return scores


def read_hidden(policy: Any, records: RecordBatch) -> Tensor:
    """Return the activations of an agent's last hidden layer, (n, d)."""
    inputs = actor_critic_view(policy).prepare(records)
    with torch.no_grad(), eval_mode(policy.modules()):
        hidden: Tensor = policy.mlp_extractor.forward_actor(policy.pi_features_extractor(inputs["observations"]))
    return hidden.float()


def read_observed(policy: Any, records: RecordBatch) -> Tensor:
    """Return observations as rows of numbers, as the policy's network reads them, (n, d)."""
    observations = actor_critic_view(policy).prepare(records)["observations"]
    return torch.cat([leaf.reshape(len(records), -1).float() for _, leaf in named_leaves(observations)], dim=1)


def compare_states(states: Tensor, examples: Tensor) -> Floats:
    """Return each state's similarity with the mean example; axes on which no state differs are left out."""
    deviations = states.std(dim=0)
    differs = deviations > 0
    distances = ((states - examples.mean(0))[:, differs] / deviations[differs]).square().sum(dim=1)
    similarities: Floats = torch.exp(-distances / max(1, int(differs.sum()))).double().numpy()
    return similarities


def embed_rows(model: Any, rows: RecordBatch, *, batch_size: int = 16) -> Tensor:
    """Return the mean of the last hidden states over the tokens of each row, of prompt and response.

    The model may have a value head.
    """
    view = language_view(model)
    language_model = model.language_model if isinstance(model, WithValueHead) else model
    parts = []
    with torch.no_grad(), eval_mode(model.modules()):
        for first in range(0, len(rows), batch_size):
            inputs: Any = view.prepare(rows.take(slice(first, first + batch_size)))
            columns = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
            hidden = language_model(**columns, output_hidden_states=True, use_cache=False).hidden_states[-1].float()
            mask = inputs["attention_mask"][:, :, None].float()
            parts.append(((hidden * mask).sum(dim=1) / mask.sum(dim=1)).cpu())
    return torch.cat(parts)
