import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Each test draws its own numbers, the same in every run and in every order."""
    torch.manual_seed(0)
