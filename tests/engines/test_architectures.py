"""Architectures such as other libraries test (Opacus, dattri, kronfluence, functorch), against plain autograd."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import whence
from whence import Return, Unsupported
from whence.engines import Refused
from whence.scores.attribution import score_targets

# As many steps as records, so that axes may be taken for each other.
RECORDS = LENGTH = 6
READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector": lambda x: x[:, :4],
    "image": lambda x: x.reshape(-1, 2, LENGTH, 4),
    "sequence": lambda x: x.reshape(-1, LENGTH, 8)[..., :4],
    "tokens": lambda x: (4 * x[:, :LENGTH]).long() % 8,
}
Run = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A head on what `run(parts, x)` makes of the observations, which are read as `kind`; parts are named a, b, c."""

    def __init__(self, kind: str, run: Run, parts: tuple[Callable[[], Any], ...]) -> None:
        super().__init__()
        for name, part in zip("abc", parts, strict=False):
            setattr(self, name, part())
        self.kind, self.run, self.head = kind, run, nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self, READERS[self.kind](x)).tanh().flatten(1))


def square() -> nn.Linear:
    return nn.Linear(4, 4)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(0.5 * torch.randn(*shape, dtype=dtype))


def call(net: Any, x: Tensor) -> Tensor:
    return net.a(x)


def leave_graph(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = net.a(x).sigmoid()
    return net.a(x) * gate


def differentiate_input(net: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.a(x).tanh().square().sum(), x, create_graph=True)[0]


def scale_gradient(net: Any, x: Tensor) -> Tensor:
    output = net.a(x)
    if output.requires_grad:
        output.register_hook(lambda g: 0.1 * g)
    return output


def in_half(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.a(x).float()


def hooked(register: str, hook: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers = nn.Sequential(square(), square())
        getattr(layers[1], register)(hook)
        return layers

    return make


def overridden() -> nn.Module:
    layer = square()
    forward = layer.forward
    layer.forward = lambda x: forward(x).relu()  # type: ignore[method-assign]
    return layer


class OwnArithmetic(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Straight(torch.autograd.Function):
    """The sign, with the derivative of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


def route(net: Any, x: Tensor) -> Tensor:
    """Send each record to one of two experts, whose batches are shorter."""
    shares = net.c(x).softmax(-1)
    output = torch.zeros_like(x)
    for number, expert in enumerate((net.a, net.b)):
        rows = (shares.argmax(-1) == number).nonzero().flatten()
        output = output.index_add(0, rows, expert(x[rows]) * shares[rows, number, None])
    return output


def sort_rows(net: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return net.a(x[order])[order.argsort()]


def overwrite_input(net: Any, x: Tensor) -> Tensor:
    x = x.clone()
    output = net.a(x)
    x.zero_()
    return output


def flatten_rows(net: Any, x: Tensor) -> Tensor:
    return net.a(x.reshape(-1, 1)).reshape(len(x), -1)


def checkpoint_reentrantly(net: Any, x: Tensor) -> Tensor:
    return checkpoint(net.a, x.clone().requires_grad_(), use_reentrant=True)


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


def tied() -> nn.Module:
    layers = nn.Sequential(nn.Embedding(8, 4, padding_idx=1), nn.Linear(4, 8, bias=False))
    layers[1].weight = layers[0].weight
    return layers


SCORED: dict[str, tuple[Any, ...]] = {
    "weights without a graph": ("vector", leave_graph, square),
    "transformed weight": ("vector", lambda n, x: functional_call(n.a, {"weight": 2 * n.a.weight.tanh()}, x), square),
    "input gradient": ("vector", differentiate_input, square),
    "tensor hook": ("vector", scale_gradient, square),
    "backward hook": ("vector", call, hooked("register_full_backward_hook", lambda _, before, after: (3 * before[0],))),
    "backward pre-hook": ("vector", call, hooked("register_full_backward_pre_hook", lambda _, after: (3 * after[0],))),
    "forward hook": ("vector", call, hooked("register_forward_hook", lambda _, args, output: 2 * output.relu())),
    "own forward": ("vector", call, overridden),
    "own convolution": ("image", call, lambda: OwnArithmetic(2, 3, 3, padding=1)),
    "scripted": ("vector", call, lambda: torch.jit.script(nn.Sequential(square(), nn.Tanh()))),
    "convolution in three dimensions": ("image", lambda n, x: n.a(x[:, None]), lambda: nn.Conv3d(1, 3, 2)),
    "transposed convolution": ("image", call, lambda: nn.ConvTranspose2d(2, 6, 2)),
    "unfolded convolution": ("image", lambda n, x: n.a(F.unfold(x, 2, stride=2).mT), lambda: nn.Linear(8, 4)),
    "tied embedding with padding": ("tokens", call, tied),
    "embedding bag": ("tokens", call, lambda: nn.EmbeddingBag(8, 4, mode="sum")),
    "sparse embedding": ("tokens", call, lambda: nn.Embedding(8, 4, sparse=True)),
    "embedding of bounded norm": ("tokens", call, lambda: nn.Embedding(8, 4, max_norm=0.5)),
    "root mean square norm": ("sequence", call, lambda: nn.RMSNorm(4)),
    "steps first": ("sequence", lambda n, x: n.a(x.transpose(0, 1)).transpose(0, 1), square),
    "attention": ("sequence", lambda n, x: n.a(x, x, x)[0], lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
    "fused attention": ("sequence", lambda n, x: F.scaled_dot_product_attention(*[n.a(x)] * 3), square),
    "transformer": ("sequence", call, lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)),
    "LSTM": ("sequence", lambda n, x: n.a(x)[0][:, -1], lambda: nn.LSTM(4, 4, batch_first=True)),
    "packed sequences": ("sequence", lambda n, x: n.a(pack_sequence([*x]))[1][0], lambda: nn.GRU(4, 4)),
    "cell by cell": ("sequence", lambda n, x: n.a(x[:, 1], n.a(x[:, 0]))[0], lambda: nn.LSTMCell(4, 4)),
    "state space": ("sequence", lambda n, x: (n.a(x) * n.b.sigmoid()).cumsum(1), square, weight(4)),
    "bilinear": ("vector", lambda n, x: n.a(x, x.cos()), lambda: nn.Bilinear(4, 4, 4)),
    "weight norm": ("vector", call, lambda: parametrizations.weight_norm(square())),
    "spectral norm": ("vector", call, lambda: parametrizations.spectral_norm(square())),
    "pruned": ("vector", call, lambda: prune.l1_unstructured(square(), "weight", amount=0.5)),
    "transposed tied weight": ("vector", lambda n, x: n.a(x).tanh() @ n.a.weight, square),
    "a call for nothing": ("vector", lambda n, x: n.a(x) * 0 + F.linear(x, 2 * n.a.weight), square),
    "unused part": ("vector", call, square, square),
    "checkpointed": ("vector", lambda n, x: checkpoint(lambda x: n.a(x).tanh(), x, use_reentrant=False), square),
    "straight through": ("vector", lambda n, x: (y := n.a(x)) + (y.sign() - y).detach(), square),
    "loop alone": ("vector", lambda n, x: Straight.apply(n.a(x)), lambda: nn.Sequential(square(), nn.PReLU(4))),
    "experts": ("vector", route, square, square, lambda: nn.Linear(4, 2)),
    "vectorised inside": ("vector", lambda n, x: vmap(lambda row: n.a.weight @ row)(x), square),
    "adapter": ("vector", lambda n, x: F.linear(x, n.a.weight + n.b @ n.c), square, weight(4, 2), weight(2, 4)),
    "sorted rows": ("vector", sort_rows, square),
    "double precision inside": ("vector", lambda n, x: n.a(x.double()).float(), lambda: square().double()),
    "autocast": ("vector", in_half, square),
    "flattened rows": ("vector", flatten_rows, lambda: nn.Linear(1, 4)),
    "reentrant checkpoint": ("vector", checkpoint_reentrantly, square),
    "half precision inside": ("vector", lambda n, x: n.a(x.bfloat16()).float(), lambda: square().bfloat16()),
}
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
RUNS = (("auto", None), ("auto", 4), ("ghost", None), ("ghost", 4), ("forward", None), ("vmap", 4))
ROUNDED = ("autocast", "half precision inside")

# What depends on the records next to it has no score, and a complex gradient no product.
REFUSED: dict[str, tuple[Any, ...]] = {
    "with the other records": ("vector", lambda n, x: n.a(x - x.mean(0)), square),
    "changes by up to": ("sequence", lambda n, x: n.a(x, x, x)[0], lambda: nn.MultiheadAttention(4, 2)),
    "scale_grad_by_freq=True": ("tokens", call, lambda: nn.Embedding(8, 4, scale_grad_by_freq=True)),
    "view_as_complex": ("vector", lambda n, x: (x.to(n.a.dtype) @ n.a).abs(), weight(4, 4, dtype=torch.complex64)),
}


def log_probs(net: Any, inputs: Any) -> Tensor:
    return net(inputs["observations"]).log_softmax(-1).gather(-1, inputs["actions"][:, None]).squeeze(-1)


def times_advantage(outputs: Any, records: Any) -> Tensor:
    return outputs.log_prob * records.advantages


def cispo(outputs: Any, records: Any) -> Tensor:
    """The log-probability times a ratio that is clipped and has no gradient."""
    with torch.no_grad():
        ratio = (outputs.log_prob - records.log_probs).exp().clamp(max=1.0)
    return ratio * outputs.log_prob * records.advantages


def make_case(kind: str, run: Run, *parts: Callable[[], Any]) -> tuple[nn.Module, whence.RecordBatch]:
    torch.manual_seed(3)
    net, observations = Net(kind, run, parts), torch.randn(RECORDS, LENGTH * 8)
    net(observations)  # lazy layers take their shapes
    numbers = {"log_probs": torch.linspace(-1.5, -0.5, RECORDS), "advantages": torch.randn(RECORDS)}
    return net.eval(), whence.RecordBatch(observations=observations, actions=torch.arange(RECORDS) % 3, **numbers)


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
@pytest.mark.parametrize(("case", "objective"), [*((case, times_advantage) for case in CASES), ("unused part", cispo)])
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
        ("transposed tied weight", "`a.weight` is used outside its layer's own call"),
        ("flattened rows", r"called on \(12, 1\) for 3 records"),
        ("overwritten input", "input was changed in place"),
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
