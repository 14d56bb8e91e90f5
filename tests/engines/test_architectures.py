"""Architectures such as other libraries test (Opacus, dattri, kronfluence, functorch), against plain autograd."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from helpers.architectures import LENGTH, RECORDS, SCORED, call, make_case, square, weight
from helpers.toys import log_probs
from whence import Return, Unsupported
from whence.engines import Refused
from whence.scores.attribution import score_targets


def overwrite_input(net: Any, x: Tensor) -> Tensor:
    x = x.clone()
    output = net.a(x)
    x.zero_()
    return output


def draw(layer: nn.Module, frozen: str = "") -> nn.Module:
    """Draw a normalising layer's parameters and statistics at random; one may be frozen."""
    for name, parameter in layer.named_parameters():
        nn.init.normal_(parameter).requires_grad_(name != frozen)
    if isinstance(layer, nn.BatchNorm1d):
        nn.init.normal_(layer.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(layer.running_var, 0.5, 2)  # type: ignore[arg-type]
    return layer


class Renamed(nn.Linear):
    pass


def twice() -> nn.Module:
    layers = nn.ModuleList([square(), square()])
    layers[1].weight = layers[0].weight
    return layers


# Layers with rules, which the ghost engine scores as well.
LAYERS: dict[str, tuple[Any, ...]] = {
    "strided": ("image", call, lambda: nn.Conv2d(2, 4, 3, stride=(2, 1), padding=(0, 2), bias=False)),
    "padded": ("image", call, lambda: nn.Conv2d(2, 4, 3, padding=1)),
    "padded to the same size": ("image", call, lambda: nn.Conv2d(2, 4, 3, padding="same")),
    "circular": ("image", call, lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")),
    "reflected": ("image", call, lambda: nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect")),
    "dilated": ("image", call, lambda: nn.Conv2d(2, 4, 2, dilation=2)),
    "groups": ("image", call, lambda: nn.Conv2d(2, 4, 3, groups=2)),
    "strided sequence": ("sequence", call, lambda: nn.Conv1d(6, 4, 3, stride=2)),
    "circular sequence": ("sequence", call, lambda: nn.Conv1d(6, 4, 3, padding="same", padding_mode="circular")),
    "groups of a sequence": ("sequence", call, lambda: nn.Conv1d(6, 4, 3, groups=2)),
    "layer norm": ("vector", call, lambda: draw(nn.LayerNorm(4))),
    "layer norm of steps": ("sequence", call, lambda: draw(nn.LayerNorm(4))),
    "layer norm of two axes": ("sequence", call, lambda: draw(nn.LayerNorm((6, 4)))),
    "layer norm without a bias": ("sequence", call, lambda: draw(nn.LayerNorm(4, bias=False))),
    "layer norm of a frozen weight": ("sequence", call, lambda: draw(nn.LayerNorm(4), frozen="weight")),
    "layer norm of a frozen bias": ("sequence", call, lambda: draw(nn.LayerNorm(4), frozen="bias")),
    "group norm": ("vector", lambda n, x: n.a(x.clone()), lambda: draw(nn.GroupNorm(2, 4))),
    "group norm of images": ("image", call, lambda: nn.Sequential(nn.Conv2d(2, 6, 1), draw(nn.GroupNorm(3, 6)))),
    "group norm of a frozen weight": ("image", call, lambda: draw(nn.GroupNorm(1, 2), frozen="weight")),
    "batch norm in eval mode": ("vector", call, lambda: draw(nn.BatchNorm1d(4))),
    "batch norm of steps": ("sequence", call, lambda: draw(nn.BatchNorm1d(6))),
    "embedding": ("tokens", call, lambda: nn.Embedding(8, 4)),
    "embedding with padding": ("tokens", call, lambda: nn.Embedding(8, 4, padding_idx=1)),
    "called twice and tied": ("vector", lambda n, x: n.a[1](n.a[0](n.a[0](x).tanh()).tanh()), twice),
    "own parameters": (
        *("vector", lambda n, x: n.a(x) * n.b + n.c["shift"], square, weight(4)),
        lambda: nn.ParameterDict({"shift": weight(4)()}),
    ),
    "frozen": ("vector", lambda n, x: n.b(n.a(x).tanh()), lambda: square().requires_grad_(False), square),
    "in place": ("vector", lambda n, x: n.a(x).relu_(), square),
    "subclass": ("vector", call, lambda: Renamed(4, 4)),
}
EXACT = {
    ("forward", "weights without a graph"),  # which a backward pass leaves out, as it does padding
    *((engine, "tied embedding with padding") for engine in ("forward", "ghost")),
    ("ghost", "state space"),
}
"""Cases that an engine must not refuse; others it may."""
CASES = SCORED | LAYERS
LIKE_ANOTHER = {
    *("padded to the same size", "circular", "reflected", "strided sequence", "circular sequence"),
    *("layer norm of steps", "layer norm without a bias", "layer norm of a frozen bias", "batch norm of steps"),
    *("group norm of a frozen weight", "embedding with padding", "sparse embedding", "embedding of bounded norm"),
    *("forward hook", "backward pre-hook", "unfolded convolution", "steps first", "fused attention", "spectral norm"),
    *("groups of a sequence", "layer norm of two axes", "embedding bag", "own convolution", "pruned", "bilinear"),
    *("packed sequences", "cell by cell", "double precision inside", "half precision inside", "sorted rows"),
}
"""Cases that long tests have, since another case is of their kind."""
RUNS = (("auto", None), ("auto", 4), ("ghost", None), ("ghost", 4), ("forward", None), ("vmap", 4))
ROUNDED = ("autocast", "half precision inside")

# What depends on the records next to it has no score, and a complex gradient no product.
REFUSED: dict[str, tuple[Any, ...]] = {
    "with the other records": ("vector", lambda n, x: n.a(x - x.mean(0)), square),
    "changes by up to": ("sequence", lambda n, x: n.a(x, x, x)[0], lambda: nn.MultiheadAttention(4, 2)),
    "scale_grad_by_freq=True": ("tokens", call, lambda: nn.Embedding(8, 4, scale_grad_by_freq=True)),
    "view_as_complex": ("vector", lambda n, x: (x.to(n.a.dtype) @ n.a).abs(), weight(4, 4, dtype=torch.complex64)),
}


def times_advantage(outputs: Any, records: Any) -> Tensor:
    return outputs.log_prob * records.advantages


def cispo(outputs: Any, records: Any) -> Tensor:
    """The log-probability times a ratio that is clipped and has no gradient."""
    with torch.no_grad():
        ratio = (outputs.log_prob - records.log_probs).exp().clamp(max=1.0)
    return ratio * outputs.log_prob * records.advantages


def read_outputs(net: nn.Module, part: whence.RecordBatch) -> whence.Outputs:
    return whence.Outputs(log_probs(net, {"observations": part.observations, "actions": part.actions}))


def score_by_autograd(
    net: nn.Module, records: whence.RecordBatch, objective: Any, evaluate: Any = read_outputs, target: Any = None
) -> Tensor:
    """Return the products of the gradient of a target's mean with each record's, from the module as it is."""

    def differentiate(value: Tensor) -> Tensor:
        parameters = [p for p in net.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([gradient.to_dense().flatten() for gradient in gradients])

    along = differentiate((target or times_advantage)(evaluate(net, records), records).mean())
    singles = [records.take(slice(i, i + 1)) for i in range(RECORDS)]
    return torch.stack([differentiate(objective(evaluate(net, one), one).sum()) @ along for one in singles])


@pytest.mark.filterwarnings("ignore")  # of TorchScript and sparse gradients
@pytest.mark.parametrize(
    ("case", "objective"),
    [
        *(
            pytest.param(case, times_advantage, marks=pytest.mark.long if case in LIKE_ANOTHER else ())
            for case in CASES
        ),
        ("unused part", cispo),
    ],
)
def test_every_engine_is_right_or_refuses(case: str, objective: Any) -> None:
    net, records = make_case(*CASES[case])
    expected = score_by_autograd(net, records, objective)
    largest = float(expected.abs().max())
    assert largest > 1e-3
    for engine, chunk_size in RUNS:
        settings = {"objective": objective, "engine": engine, "chunk_size": chunk_size}
        exact = (
            engine == "auto" or case in LAYERS or (engine, case) in EXACT or (engine, objective) == ("forward", cispo)
        )
        # Several targets take other ways through the ghost engine.
        targets = {"": Return()} if chunk_size is None else {"": Return(), "again": Return()}
        with suppress(*[] if exact else [Refused]):
            influence = score_targets(whence.ModuleView(net, log_probs), records, targets, **settings)[""]
            assert case != "loop alone" or influence.engine == "loop"
            tolerance = 1e-2 if case in ROUNDED else 1e-5
            assert float((influence.scores - expected).abs().max()) <= tolerance * largest, (engine, chunk_size)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("transposed tied weight", "`a.weight` is used outside its layer"),
        ("flattened rows", r"called on \(12, 1\) for 3 records"),
        ("overwritten input", "changed in place"),
        ("reentrant checkpoint", "ran without a graph"),
        ("loop alone", r"no rule for the layer `a\.1` \(PReLU\); it knows BatchNorm, (\w+, )*Conv1d, "),
        ("own forward", r"no rule for the layer `a` \(Linear\)"),
    ],
)
def test_the_ghost_engine_says_what_it_would_get_wrong(case: str, message: str) -> None:
    net, records = make_case(*(SCORED | {"overwritten input": ("vector", overwrite_input, square)})[case])
    with pytest.raises(Refused, match=message):
        whence.attribute(whence.ModuleView(net, log_probs), records, target=Return(), engine="ghost")
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_what_has_no_score_is_refused(message: str, engine: str) -> None:
    net, records = make_case(*REFUSED[message])
    with pytest.raises(Unsupported, match=message):
        whence.attribute(whence.ModuleView(net, log_probs), records, target=Return(), engine=engine)


class Steps(nn.Module):
    """The log-probability of each action of a sequence, and the value before it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, inputs: Any) -> whence.Outputs:
        latent = self.body(inputs["observations"]).tanh()
        log_probs = self.actor(latent).log_softmax(-1).gather(-1, inputs["actions"][..., None]).squeeze(-1)
        return whence.Outputs(log_probs, self.critic(latent).squeeze(-1))


def v_trace(outputs: Any, records: Any) -> Tensor:
    """IMPALA's objectives of actor and critic (1802.01561, §4): weights and values of V-trace have no gradient."""
    values, rewards = outputs.value, records.observations[..., 0]
    with torch.no_grad():
        ratios = (outputs.log_prob - records.observations[..., 1]).exp().clamp(max=1.0)
        nexts = F.pad(values[:, 1:], (0, 1))
        errors, corrections = ratios * (rewards + 0.9 * nexts - values), [torch.zeros(len(values))]
        for step in reversed(range(LENGTH)):
            corrections.insert(0, errors[:, step] + 0.9 * ratios[:, step] * corrections[0])
        advantages = ratios * (rewards + 0.9 * (nexts + torch.stack(corrections[1:], 1)) - values)
        targets = values + torch.stack(corrections[:-1], 1)
    return (advantages * outputs.log_prob - 0.5 * (targets - values).square()).sum(1)


@pytest.mark.parametrize("engine", ["auto", "ghost", "forward", "vmap", "loop"])
def test_v_traces_weights_have_no_gradient(engine: str) -> None:
    torch.manual_seed(3)
    net, observations = Steps(), torch.randn(RECORDS, LENGTH, 4)
    numbers = {"log_probs": torch.zeros(RECORDS), "advantages": torch.randn(RECORDS)}
    records = whence.RecordBatch(observations=observations, actions=torch.randint(3, (RECORDS, LENGTH)), **numbers)
    view = whence.ModuleView(net, lambda net, inputs: net(inputs))

    def sum_steps(outputs: Any, records: Any) -> Tensor:
        return outputs.log_prob.sum(1) * records.advantages

    def target(view: Any, params: Any, records: Any) -> Tensor:
        return sum_steps(view(params, view.prepare(records)), records).mean()

    expected = score_by_autograd(net, records, v_trace, lambda net, part: net(view.prepare(part)), sum_steps)
    scores = whence.attribute(view, records, target=target, objective=v_trace, engine=engine).scores
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
