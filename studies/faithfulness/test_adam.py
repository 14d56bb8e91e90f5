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
from whence import Return
from whence.core import Outputs

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


class Plain:
    """A tiny policy in double precision, and the sums that scores are made of, a record at a time."""

    def __init__(self) -> None:
        self.model = model_of("Adam", ent_coef=0.01, max_grad_norm=0.5, learning_rate=0.02)
        self.recording = recorded(self.model)
        parameters, trained = dict(self.model.policy.named_parameters()), self.model.policy.optimizer.state
        self.metrics = {
            "first": self.metric(lambda name: self.recording.optimizer.state[name]),
            "last": self.metric(lambda name: trained[parameters[name]]),  # of the very optimiser that trained
        }
        self.policy = self.model.policy.double()
        records = self.recording.records
        self.observations, self.actions = records.observations.double(), records.actions.flatten()
        self.advantages, self.old = records.advantages.double(), records.log_probs.double()
        self.normalised = (self.advantages - self.advantages.mean()) / (self.advantages.std() + 1e-8)

    def metric(self, state_of: Any) -> Tensor:
        parts = []
        for state in map(state_of, self.recording.start):
            root = (state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))).sqrt()
            parts.append((1 / (root + self.recording.optimizer.settings["eps"])).flatten())
        return torch.cat(parts)

    def at(self, point: str) -> None:
        tensors = self.recording.start if point == "first" else self.recording.end
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                parameter.copy_(tensors[name])

    def outputs(self, positions: Any = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        policy, inputs = self.policy, self.policy.mlp_extractor(self.observations[positions])
        every = policy.action_net(inputs[0]).log_softmax(dim=1)
        log_probs = every.gather(1, self.actions[positions, None].long())[:, 0]
        return log_probs, -(every.exp() * every).sum(dim=1), policy.value_net(inputs[1])[:, 0]

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
        log_probs, entropy, _ = self.outputs()
        ratios = (log_probs - self.old).exp()
        values = torch.minimum(ratios * self.normalised, ratios.clamp(0.8, 1.2) * self.normalised) + 0.01 * entropy
        if width is not None:
            records = replace(self.recording.records, advantages=self.normalised, log_probs=self.old)
            soft = SoftClip(ent_coef=0.01, advantage_norm="none", width=width)
            values = soft(Outputs(log_prob=log_probs, entropy=entropy), records)
        return torch.stack([self.gradient(value) @ vector for value in values])

    def loss(self, positions: Tensor, weights: Tensor) -> Tensor:
        """Return PPO's loss of a minibatch of the round, at parameters at which no ratio is clipped."""
        records, total = self.recording.records, weights.sum()
        log_probs, entropy, values = self.outputs(positions)
        raw = self.advantages[positions]
        mean = (weights * raw).sum() / total
        deviation = ((weights * (raw - mean) ** 2).sum() / (total - 1)).sqrt()
        gains = (log_probs - self.old[positions]).exp() * (raw - mean) / (deviation + 1e-8) + 0.01 * entropy
        errors = (records.returns.double()[positions] - values) ** 2
        return -(weights * (gains - 0.5 * errors)).sum() / total

    def clipped(self, positions: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of the loss as a step takes it, as a function of the weights."""
        loss = self.loss(positions, weights)
        gradient = torch.cat(
            [part.flatten() for part in torch.autograd.grad(loss, list(self.policy.parameters()), create_graph=True)]
        )
        return gradient * (0.5 / (gradient.norm() + 1e-6)).clamp(max=1)


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


def test_products_at_both_ends(plain: Plain, cheap: Any) -> None:
    first, last = plain.ascent("first"), plain.ascent("last")
    metrics = {"": torch.ones_like(first), ", metric": plain.metrics["first"], ", last metric": plain.metrics["last"]}
    starts = {name: plain.score("first", metric * first) for name, metric in metrics.items()}
    ends = {name: plain.score("last", metric * last) for name, metric in metrics.items()}
    assert agree(cheap["snapshot"], starts[""])
    assert agree(cheap["metric"], starts[", metric"])
    for name in metrics:
        assert agree(cheap["two ends" + name], (starts[name] + ends[name]) / 2)
    softs = {name: plain.score("last", metrics[name] * last, 0.05) for name in ("", ", last metric")}
    for name, soft in softs.items():
        assert agree(cheap["last" + name], ends[name])
        assert agree(cheap["last" + name + ", soft edge"], soft)
        assert not agree(soft, ends[name])  # some ratios are past the edge
        assert agree(cheap["two ends" + name + ", soft edge"], (starts[name] + soft) / 2)
    to_the_end = plain.score("first", last)
    assert agree(cheap["target's end"], (to_the_end + ends[""]) / 2)
    assert not agree(to_the_end, starts[""])
    vector = metrics[", last metric"] * last
    both = (plain.score("first", vector) + softs[", last metric"]) / 2
    assert agree(cheap["target's end, last metric, soft edge"], both)


def test_the_metric_of_first_steps_is_that_of_their_end(plain: Plain, cheap: Any) -> None:
    assert len(plain.recording.steps) < scores.FIRST_STEPS  # so that these are all of the tiny round
    assert agree(cheap["metric, first steps"], plain.score("first", plain.metrics["last"] * plain.ascent("first")))


def test_the_metric_of_orders_is_of_their_minibatches(plain: Plain, cheap: Any, monkeypatch: Any) -> None:
    ascent, orders = plain.ascent("first"), []
    shuffle = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *args, **more: orders.append(shuffle(*args, **more)) or orders[-1])
    functions = list_cheap_scores(plain.model.policy, plain.recording, target=Return(), seed=5, dtype=torch.float64)
    values = functions["metric, orders"]()
    assert len(orders) == scores.METRIC_ORDERS
    assert not torch.equal(*orders)
    ones = torch.ones(16, dtype=torch.float64)
    gradients = torch.stack([plain.clipped(part, ones).detach() for order in orders for part in order.split(16)])
    assert gradients.norm(dim=1).max() == pytest.approx(0.5, abs=1e-5)  # one is clipped at least
    metric = 1 / (gradients.square().mean(dim=0).sqrt() + plain.recording.optimizer.settings["eps"])
    assert agree(values, plain.score("first", metric * ascent))
    assert torch.equal(values, cheap["metric, orders"])


def test_one_step_is_the_derivative_of_adams_on_all_records(plain: Plain, cheap: Any) -> None:
    ascent, settings = plain.ascent("first"), plain.recording.optimizer.settings
    state = {
        key: torch.cat(
            [plain.recording.optimizer.state[name][key].double().flatten() for name in plain.recording.start]
        )
        for key in ("exp_avg", "exp_avg_sq")
    }
    count = 1 + float(next(iter(plain.recording.optimizer.state.values()))["step"])
    weights = torch.ones(64, dtype=torch.float64, requires_grad=True)
    gradient = plain.clipped(torch.arange(64), weights)
    mean = (0.9 * state["exp_avg"] + 0.1 * gradient) / (1 - 0.9**count)
    square = (0.999 * state["exp_avg_sq"] + 0.001 * gradient**2) / (1 - 0.999**count)
    move = -settings["lr"] * mean / (square.sqrt() + settings["eps"])
    (expected,) = torch.autograd.grad(move @ ascent, weights)
    assert agree(cheap["one step"], expected)


@pytest.mark.long
def test_a_round_is_studied_once_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hyperparameters": {"n_steps": 64, "batch_size": 32, "n_epochs": 2}}
    monkeypatch.setitem(adam.OPTIMIZERS, "adam", {"optimizer": "Adam", **small})
    for name, value in {
        "ROUNDS": {"frozenlake": (2,)},
        "HALVES": 3,
        "DRAWS": (2,),
        "SEEDS": range(120, 122),
        "REPEATS": 1,
    }.items():
        monkeypatch.setattr(adam, name, value)
    for seed in (120, 121):
        adam.study_seed("frozenlake", seed, tmp_path, tmp_path / "runs", again=False)
    rows = read_list(tmp_path / "adam.parquet", adam.KEYS)
    assert [(row["seed"], row["round"]) for row in rows] == [(120, 2), (121, 2)]
    with monkeypatch.context() as patch:
        for name in ("study", "score_smoothed", "attribute_round"):
            patch.setattr(adam, name, pytest.fail)
        adam.study_seed("frozenlake", 120, tmp_path, tmp_path / "runs", again=False)  # nothing is done twice
        adam.study_seed("frozenlake", 120, tmp_path, tmp_path / "runs", again=True)
    adam.write_tables(tmp_path)
    figures = [{row["score"]: row["lds"] for row in content["scores"]} for content in rows]
    again = {row["score"]: row["lds"] for row in read_list(tmp_path / "adam.parquet", adam.KEYS)[0]["scores"]}
    assert again == figures[0]
    assert [*figures[0]][-2:] == ["unrolled", "smoothed, 2 draws"]
    assert np.shape(rows[0]["outcomes"]) == (2, 3)
    gain = np.mean([each["two ends"] - each["snapshot"] for each in figures])
    page = (tmp_path / "adam.md").read_text(encoding="utf-8").splitlines()
    line = next(text for text in page if text.startswith("| two ends |"))  # that of the means; the next is of rounds
    assert f"| {gain:.3f} [".replace("-", "−") in line
