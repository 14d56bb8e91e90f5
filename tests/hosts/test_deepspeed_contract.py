"""What whence relies on in DeepSpeed's ZeRO stage 3, whose parameters have attributes that no page documents."""

import inspect

import pytest

from helpers.contracts import check_each


def find(name: str) -> bool:
    source = inspect.getsource(pytest.importorskip("deepspeed.runtime.zero.partition_parameters"))
    return f".{name} = " in source and "partition(param_list=None" in source and "AVAILABLE" in source


NAMES = ("ds_status", "ds_shape", "ds_persist", "ds_active_sub_modules")
PRIVATE = {name: lambda name=name: find(name) for name in NAMES}

test_private = check_each(PRIVATE)
