"""A pass of training that scores its rows, against plain backward passes: gradients of any weights, and scores."""

import contextlib

import pytest
import torch
from torch import nn

from helpers.languages import language_model, tokens
from whence.engines import Refused, covered_layers, record_training_pass
from whence.llm.base.language_view import register_rules

ROWS = 6


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def language_loss(model, *, positions=True, precision=None):
    """Return rows -> loss: the weighted sum of a batch's losses, with a denominator that does not depend on them."""
    columns = tokens(ROWS, empty=False)
    ids, advantages = columns["input_ids"], torch.randn(ROWS)
    places = {"position_ids": (columns["attention_mask"].cumsum(1) - 1).clamp(min=0)} if positions else {}

    def compute(weights):
        autocast = contextlib.nullcontext() if precision is None else torch.autocast("cpu", dtype=precision)
        with autocast:
            inputs = {"input_ids": ids, "attention_mask": columns["attention_mask"], **places}
            log_probs = model(**inputs, use_cache=False).logits[:, -5:-1].float().log_softmax(-1)
        chosen = log_probs.gather(-1, ids[:, -4:, None]).squeeze(-1) * columns["response_mask"]
        return -(chosen.sum(1) * advantages * weights).sum() / 7

    return compute


def plain_gradient(model, compute, weights):
    model.zero_grad()
    compute(weights).backward()
    gradient = {name: p.grad.clone() for name, p in trained(model).items() if p.grad is not None}
    model.zero_grad()
    return gradient


def score_plainly(model, compute, target):
    """Return each row's product with the target's gradient, by a pass of its own."""
    alone = [plain_gradient(model, compute, one) for one in torch.eye(ROWS)]
    return -torch.stack([sum((tensor * target[key]).sum() for key, tensor in row.items()) for row in alone])


def take_pass(model, compute, target=None):
    register_rules(model)
    layers = covered_layers(dict(model.named_modules()), trained(model))
    with record_training_pass(layers, trained(model), ROWS) as step:
        loss = compute(torch.ones(ROWS))
    return step, step.backward(loss, target)


def difference(gradient, expected):
    assert gradient.keys() == expected.keys()
    largest = max(tensor.abs().max() for tensor in expected.values())
    return float(max((gradient[name] - tensor).abs().max() for name, tensor in expected.items()) / largest)


def make_case(name):
    torch.manual_seed(1)
    if name == "convolutions":
        layers = nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)
        model, x, sizes = nn.Sequential(*layers), torch.randn(ROWS, 2, 4, 4), torch.randn(ROWS)
        return model, lambda weights: (model(x).tanh().sum(1) * sizes * weights).sum() / 3
    style, _, kind = name.partition(" ")
    model = language_model(style, lora=0.0 if kind == "lora" else None)
    if kind == "checkpointed":
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, language_loss(model, positions=kind != "shared positions")


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gpt2 shared positions", "gpt2 lora", "gpt2 checkpointed", "llama", "llama lora", "qwen3"),
        "convolutions",
    ],
)
def test_gradients_of_any_weights_and_scores_are_those_of_plain_passes(name):
    model, compute = make_case(name)
    target = {key: torch.randn_like(parameter) for key, parameter in trained(model).items()}
    expected = score_plainly(model, compute, target)
    for weights in (torch.ones(ROWS), torch.tensor([2.0, 0, 2, 2, 0, 0]), torch.rand(ROWS), torch.zeros(ROWS)):
        step, scores = take_pass(model, compute, target)
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        total = {}
        step.add_gradient(weights, total)
        if weights.any():
            gradient = {key: p.grad for key, p in trained(model).items() if p.grad is not None}
            assert difference(gradient, plain_gradient(model, compute, weights)) < 1e-6
        else:
            assert all(parameter.grad is None for parameter in model.parameters())
        assert difference(total, plain_gradient(model, compute, torch.ones(ROWS))) < 1e-6


def test_passes_add_up_and_the_gradients_have_the_layout_of_plain_ones():
    model, compute = make_case("gpt2")
    expected = plain_gradient(model, compute, torch.ones(ROWS))
    for _ in range(2):
        take_pass(model, compute)[0].add_gradient(torch.full((ROWS,), 0.5))
    assert difference({key: p.grad for key, p in trained(model).items()}, expected) < 1e-6
    assert all(parameter.grad.is_contiguous() for parameter in model.parameters())


def test_under_autocast_gradients_are_the_plain_ones_and_scores_as_good_as_its_precision():
    model, _ = make_case("gpt2")
    compute = language_loss(model, precision=torch.bfloat16)
    target = {key: torch.randn_like(parameter) for key, parameter in trained(model).items()}
    expected = score_plainly(model, compute, target)
    step, scores = take_pass(model, compute, target)
    step.add_gradient(torch.ones(ROWS))
    gradient = {key: p.grad for key, p in trained(model).items()}
    assert difference(gradient, plain_gradient(model, compute, torch.ones(ROWS))) < 1e-2
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))


class Scaled(nn.Module):
    """A linear layer whose output is scaled by a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.layer(x) * self.scale


def test_a_pass_that_cannot_be_taken_apart_is_refused_and_its_graph_still_serves_a_plain_backward_pass():
    model, x = Scaled(), torch.randn(ROWS, 3)
    for compute, message in (
        (lambda: model(x).sum(), "`scale` is used outside its layer"),
        (lambda: model.layer(x).sum() + model.layer.weight.sum(), "`layer.weight` is used outside its layer"),
        (lambda: model.layer(x[:, None].flatten(0, 1)[:2]).sum(), "on \\(2, 3\\) for 6 records"),
    ):
        layers = covered_layers(dict(model.named_modules()), trained(model))
        with record_training_pass(layers, trained(model), ROWS) as step:
            loss = compute()
        with pytest.raises(Refused, match=message):
            step.backward(loss, None)
        loss.backward()
    model.scale.register_hook(lambda gradient: gradient)
    with record_training_pass(layers, trained(model), ROWS) as step:
        loss = model.layer(x).sum()
    with pytest.raises(Refused, match="hook on the parameter `scale`"):
        step.backward(loss, None)
