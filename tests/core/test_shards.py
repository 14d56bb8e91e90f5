"""Parameters in shards are recognised and released: FSDP2's, and stand-ins that look as ZeRO-3 leaves them."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn

from whence.core import ModuleView
from whence.engines import is_in_shards, release_whole, whole_shape
from whence.engines.rules import rule_for
from whence.llm.base.language_view import register_rules


class TinyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def put_in_shards(parameter, *, whole=False, persists=False):
    """Give a parameter what ZeRO-3 gives it; `whole` ones are those that a pass has filled."""
    parameter.ds_shape, parameter.ds_persist = parameter.shape, persists
    parameter.ds_status = SimpleNamespace(name="AVAILABLE" if whole else "NOT_AVAILABLE")
    parameter.ds_active_sub_modules = {3} if whole else set()
    parameter.released = []

    def partition(param_list):
        assert not any(each.ds_active_sub_modules for each in param_list)  # ZeRO refuses these
        for each in param_list:
            each.released.append(True)

    parameter.partition = partition
    if not whole:
        parameter.data = torch.empty(0)
    return parameter


@pytest.fixture
def one_process():
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_layer_of_fsdp2_is_recognised_and_released():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    layer = nn.Linear(3, 2)
    assert not is_in_shards(layer.parameters())
    fully_shard(layer, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
    assert is_in_shards(layer.parameters())
    view = ModuleView(layer, lambda module, x: module(x)[:, 0])
    view({name: torch.zeros_like(each) for name, each in view.parameters().items()}, torch.ones(1, 3))
    assert not isinstance(layer.weight, DTensor)  # the outermost module's stay whole, and a view puts none in place
    release_whole(layer.modules())
    assert isinstance(layer.weight, DTensor)


def test_parameters_in_shards_are_told_by_what_zero_gives_them():
    layer = nn.Linear(3, 2)
    assert not is_in_shards(layer.parameters())
    put_in_shards(layer.weight)
    assert is_in_shards(layer.parameters())
    assert layer.weight.shape == (0,)
    assert whole_shape(layer.weight) == (2, 3)
    assert whole_shape(layer.bias) == (2,)


def test_only_what_a_pass_left_whole_is_released():
    layers = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(4))
    states = [{"whole": True}, {"whole": True, "persists": True}, {"whole": False}]
    for layer, state in zip(layers, states, strict=False):
        put_in_shards(layer.weight, **state)
    release_whole(layers.modules())
    assert [getattr(layer.weight, "released", None) for layer in layers] == [[True], [], [], None]


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_norm_is_known_without_its_weight(in_shards):
    layer = TinyRMSNorm()
    x, g = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    weight_gradient = torch.autograd.grad((layer(x) * g).sum(), layer.weight)[0]
    if in_shards:
        put_in_shards(layer.weight)
    register_rules(layer)
    rule = rule_for(layer)
    assert torch.allclose(rule.gradient(layer, x, g, torch.ones(2))["weight"], weight_gradient, atol=1e-6)
