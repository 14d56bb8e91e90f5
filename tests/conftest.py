import gc

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _frozen_imports() -> None:
    """What was imported is no garbage: each training of Transformers' looks through every object, for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Each test draws its own numbers, the same in every run and in every order."""
    torch.manual_seed(0)
