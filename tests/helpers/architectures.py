"""Networks of many architectures, each a part around which a small policy is built, for the tests of engines."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import whence

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


def flatten_rows(net: Any, x: Tensor) -> Tensor:
    return net.a(x.reshape(-1, 1)).reshape(len(x), -1)


def checkpoint_reentrantly(net: Any, x: Tensor) -> Tensor:
    return checkpoint(net.a, x.clone().requires_grad_(), use_reentrant=True)


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


def make_case(kind: str, run: Run, *parts: Callable[[], Any]) -> tuple[nn.Module, whence.RecordBatch]:
    torch.manual_seed(3)
    net, observations = Net(kind, run, parts), torch.randn(RECORDS, LENGTH * 8)
    net(observations)  # lazy layers take their shapes
    numbers = {"log_probs": torch.linspace(-1.5, -0.5, RECORDS), "advantages": torch.randn(RECORDS)}
    return net.eval(), whence.RecordBatch(observations=observations, actions=torch.arange(RECORDS) % 3, **numbers)
