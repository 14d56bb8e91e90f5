"""Cheap scores under Adam, each against a plain formula by autograd on a tiny policy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.recorded_rounds import model_of, recorded
from studies.faithfulness import adam, scores
from studies.faithfulness.scores import list_cheap_scores
from studies.faithfulness.smoothed import SoftClip
from studies.shared import read_list
from whence import PPOClip, Return
from whence.core import Outputs

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


class Plain:
    """A tiny policy in double precision, and the sums that scores are made of, a record at a time."""

    def __init__(self) -> None:
        self.model = model_of("Adam", ent_coef=0.01, max_grad_norm=0.5, learning_rate=0.02)
        self.recording = recorded(self.model)
        self.states = {"last": self.model.policy.optimizer.state}  # of the very optimiser that trained
        names = {name: parameter for name, parameter in self.model.policy.named_parameters()}
        self.last_metric = self.metric(lambda name: self.states["last"][names[name]])
        self.first_metric = self.metric(lambda name: self.recording.optimizer.state[name])
        self.policy = self.model.policy.double()
        records = self.recording.records
        self.observations, self.actions = records.observations.double(), records.actions.flatten()
        self.advantages, self.old = records.advantages.double(), records.log_probs.double()
        self.normalised = (self.advantages - self.advantages.mean()) / (self.advantages.std() + 1e-8)

    def metric(self, state_of: Any) -> Tensor:
        parts = []
        for name in self.recording.start:
            state = state_of(name)
            root = (state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))).sqrt()
            parts.append((1 / (root + self.recording.optimizer.settings["eps"])).flatten())
        return torch.cat(parts)

    def at(self, point: str) -> None:
        tensors = self.recording.start if point == "first" else self.recording.end
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                parameter.copy_(tensors[name])

    def outputs(self) -> tuple[Tensor, Tensor]:
        _, log_probs, entropy = self.policy.evaluate_actions(self.observations, self.actions)
        return log_probs, entropy

    def gradient(self, value: Tensor) -> Tensor:
        parameters = list(self.policy.parameters())
        parts = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).flatten() if part is None else part.flatten()
                for p, part in zip(parameters, parts, strict=True)
            ]
        )

    def ascent(self, point: str) -> Tensor:
        self.at(point)
        return self.gradient((self.outputs()[0] * self.advantages).mean())

    def score(self, point: str, vector: Tensor, width: float | None = None) -> Tensor:
        self.at(point)
        log_probs, entropy = self.outputs()
        ratios = (log_probs - self.old).exp()
        values = torch.minimum(ratios * self.normalised, ratios.clamp(0.8, 1.2) * self.normalised) + 0.01 * entropy
        if width is not None:
            records = replace(self.recording.records, advantages=self.normalised, log_probs=self.old)
            soft = SoftClip(ent_coef=0.01, advantage_norm="none", width=width)
            values = soft(Outputs(log_prob=log_probs, entropy=entropy), records)
        return torch.stack([self.gradient(value) @ vector for value in values])


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


@pytest.fixture(scope="module")
def cheap(plain: Plain) -> Any:
    plain.at("first")
    functions = list_cheap_scores(plain.model.policy, plain.recording, target=Return(), seed=5, dtype=torch.float64)
    return {name: function() for name, function in functions.items()}


def agree(values: Tensor, expected: Tensor) -> bool:
    return torch.allclose(values, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
