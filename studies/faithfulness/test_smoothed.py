"""Scores averaged over trainings on random halves, across a soft edge of the clip range."""

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from helpers.recorded_rounds import model_of, recorded
from studies.faithfulness import smoothed
from studies.faithfulness.smoothed import SoftClip, derivatives, draw_derivatives, draw_trainings, score_smoothed
from whence import Return
from whence.core import Outputs
from whence.engines.memory import measure_bytes
from whence.lab.rounds import open_round, step
from whence.lab.rounds.replay import Minibatch

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


@pytest.fixture(scope="module", params=[pytest.param("SGD with momentum", marks=pytest.mark.long), "Adam"])
def gentle(request):
    """A round whose ratios stay far from the edge."""
    model = model_of(request.param, learning_rate=1e-4, max_grad_norm=0.5)
    return model, recorded(model)


def records_at(ratio, advantage):
    class Records:
        log_probs, advantages = torch.zeros(1), torch.tensor([advantage])

    return Outputs(torch.tensor([np.log(ratio)], dtype=torch.float32, requires_grad=True)), Records


@pytest.mark.parametrize("advantage", [2.0, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.78, 0.8, 0.83, 1.0, 1.17, 1.2, 1.22, 1.5])
def test_the_soft_edge_by_hand(advantage, ratio):
    outputs, records = records_at(ratio, advantage)
    value = SoftClip(clip_range=0.2, advantage_norm="none", width=0.05)(outputs, records)
    (gradient,) = torch.autograd.grad(value.sum(), outputs.log_prob)
    past = (ratio - 1.2) if advantage > 0 else (0.8 - ratio)
    assert float(gradient) == pytest.approx(advantage * ratio / (1 + np.exp(past / 0.05)), rel=1e-4, abs=1e-6)


def test_the_derivative_of_each_training_with_a_sharp_edge(gentle):
    model, recording = gentle
    round = open_round(model.policy, recording, dtype=torch.float64)
    draws = draw_trainings(round, 3, 0.5, 1)

    def end(weights, row):
        point = round.start
        for positions in draws.steps:
            index = positions[row]
            records = round.records.take(index)
            inputs = {key: tensor[index] for key, tensor in round.inputs.items()}
            point = step(round, point, Minibatch(index, records, inputs), weights[index])
        return Return()(round.view, round.unflatten(point.params), round.records)

    expected = []
    for row in range(3):
        weights = draws.weights[row].clone().requires_grad_()
        expected.append(torch.autograd.grad(end(weights, row), weights)[0])
    expected = torch.stack(expected)
    for interval in (1, 2, 4, 6):
        by_epoch = derivatives(round, draws, Return(), interval, 0.0)
        assert by_epoch.shape == (3, 3, 64)  # epochs, trainings, records
        assert torch.allclose(by_epoch.sum(dim=0), expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    assert float(expected.abs().max()) > 0


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("noise", [1.0, 50.0], ids=["alike", "wild"])
def test_each_side_counts_by_its_standard_error(gentle, monkeypatch, count, noise):
    model, recording = gentle
    round, rng = open_round(model.policy, recording, dtype=torch.float64), np.random.default_rng(4)
    inside = draw_trainings(round, count, 0.5, 0).weights.numpy() > 0
    values = rng.normal(size=(3, count, 64)) * np.where(inside, 1.0, noise)
    # Memory is measured by the first; then trainings go one by one.
    parts = iter([values[:, :1], *np.split(values, count, axis=1)])
    monkeypatch.setattr(smoothed, "derivatives", lambda *args: torch.from_numpy(next(parts)))
    scores = smoothed.average_sides(*draw_derivatives(round, Return(), count, 0, memory=1), 0.0).numpy()

    def error(mask):
        errors = []
        for record in range(64):
            of_record = values[:, mask[:, record], record].sum(axis=0)
            if len(of_record) > 1:
                errors.append(of_record.var(ddof=1) / len(of_record))
        return np.mean(errors) if errors else None

    errors = [error(inside), error(~inside)]
    weights = [1.0, 1.0] if None in errors else [one**-0.5 for one in errors]
    for record in range(64):
        sides = [(w, mask[:, record]) for w, mask in zip(weights, (inside, ~inside), strict=True)]
        means = [(w, values[:, mask, record].sum(axis=0).mean()) for w, mask in sides if mask.any()]
        assert scores[record] == pytest.approx(sum(w * mean for w, mean in means) / sum(w for w, _ in means), rel=1e-9)


@pytest.mark.parametrize(("trim", "by_scipy"), [(0.25, lambda one: trim_mean(one, 0.25)), (0.5, np.median)])
def test_a_trimmed_mean_is_that_of_scipy(trim, by_scipy):
    rng = np.random.default_rng(0)
    values, side = rng.standard_cauchy(size=(17, 30)), rng.random((17, 30)) < 0.5
    side[:, 0] = False
    means, _ = smoothed.average_trimmed(torch.from_numpy(values), torch.from_numpy(side), trim)
    assert means[0] == 0
    expected = [by_scipy(values[side[:, column], column]) for column in range(1, 30)]
    assert np.allclose(means[1:], expected, rtol=1e-9)


def test_trainings_go_in_parts_where_memory_is_short(gentle, monkeypatch):
    model, recording = gentle
    sizes = []

    def count_trainings(round, draws, target, interval, width=smoothed.WIDTH):
        sizes.append(len(draws.weights))
        return derivatives(round, draws, target, interval, width)

    monkeypatch.setattr(smoothed, "derivatives", count_trainings)
    settings = {"target": Return(), "draws": 5}
    one_by_one = score_smoothed(model.policy, recording, memory=1, **settings)
    assert sizes[1:] == [1] * 5  # the first is measured
    together = score_smoothed(model.policy, recording, **settings)
    assert sizes[7:] == [5]
    assert torch.allclose(one_by_one, together, rtol=0, atol=1e-5 * float(together.abs().max()))


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.long), 3])
def test_memory_is_held(gentle, at_once, monkeypatch):
    monkeypatch.setattr(smoothed, "MARGIN", 1)
    model, recording = gentle
    sizes = []
    take = smoothed.Draws.take
    monkeypatch.setattr(smoothed.Draws, "take", lambda draws, chosen: sizes.append(chosen.stop) or take(draws, chosen))
    settings = {"target": Return(), "draws": 6}
    score_smoothed(model.policy, recording, memory=10**9, **settings)
    memory = at_once * (10**9 // sizes[0])
    peak = max(measure_bytes(lambda: score_smoothed(model.policy, recording, memory=int(1.01 * memory), **settings)))
    assert sizes[1] == at_once
    assert 0.5 * memory < peak <= 1.5 * memory  # subsets and orders of all trainings come on top
