"""What whence relies on in torch beyond its documentation."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import batchnorm, dropout
from torch.utils import _python_dispatch, _pytree

from helpers.contracts import check_each, takes

LINEAR, CONV, X = nn.Linear(2, 1), nn.Conv2d(1, 2, 3, padding=(1, 2)), torch.ones(1, 1, 4, 4)
HOOKED = nn.Parameter(torch.ones(1))
HOOKED.register_hook(str), HOOKED.register_post_accumulate_grad_hook(str)


def runs_callbacks_after_all_gradients() -> bool:
    layer, counts = nn.Linear(2, 1), []
    queue = torch.autograd.Variable._execution_engine.queue_callback
    layer.bias.register_hook(
        lambda _: queue(lambda: counts.append(sum(p.grad is not None for p in layer.parameters())))
    )
    layer(torch.ones(1, 2)).sum().backward()
    return counts == [2]


PRIVATE = {
    "_parameters": lambda: {**LINEAR._parameters} == dict(LINEAR.named_parameters()),
    "_buffers": lambda: {**nn.BatchNorm1d(1)._buffers}.keys() == {"running_mean", "running_var", "num_batches_tracked"},
    "_backward_hooks": lambda: [*HOOKED._backward_hooks.values()] == [str],
    "_post_accumulate_grad_hooks": lambda: [*HOOKED._post_accumulate_grad_hooks.values()] == [str],
    "_version": lambda: (x := torch.ones(1))._version + 1 == x.add_(1)._version,
    "_current_level": lambda: forward_ad._current_level == -1,
    "_execution_engine": runs_callbacks_after_all_gradients,
    "_foreach_mul_": lambda: torch._foreach_mul_([x := torch.ones(2)], 3.0) and x.tolist() == [3, 3],
    "_foreach_norm": lambda: [float(each) for each in torch._foreach_norm([torch.ones(4), 2 * X])] == [2, 8],
    "_conv_forward": lambda: CONV._conv_forward(X, CONV.weight, CONV.bias).equal(CONV(X)),
    "_reversed_padding_repeated_twice": lambda: [*CONV._reversed_padding_repeated_twice] == [2, 2, 1, 1],
    "_all_weights": lambda: (
        nn.LSTM(1, 1)._all_weights == [["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]]
    ),
    "_orig_mod": lambda: torch.compile(LINEAR)._orig_mod is LINEAR,
    "_BatchNorm": lambda: {nn.BatchNorm1d, nn.BatchNorm2d} <= {*batchnorm._BatchNorm.__subclasses__()},
    "_DropoutNd": lambda: {nn.Dropout, nn.Dropout2d} <= {*dropout._DropoutNd.__subclasses__()},
    "_python_dispatch": lambda: takes(_python_dispatch.TorchDispatchMode.__torch_dispatch__, "func types args kwargs"),
    "_pytree": lambda: _pytree.tree_leaves({"a": (1, [2])}) == [1, 2] == _pytree.tree_map_only(str, int, ["1", 2]),
}

test_private = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")(check_each(PRIVATE))
