"""Every engine is right on every architecture of Transformers that was tried."""

import pytest
import torch

from studies.llm.architectures import ARCHITECTURES, CASES, Case, measure

WHOLE = Case(adapter=False, told=True, dtype=torch.float32)
FEW = {("mixtral", WHOLE): "forward", ("gemma3_text", WHOLE): "ghost", ("gpt2", WHOLE._replace(told=False)): "ghost"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if (name, case) in FEW else pytest.mark.long)
        for name in ARCHITECTURES
        for case in CASES
    ],
)
def test_scores_are_those_of_plain_autograd(name: str, case: Case) -> None:
    measured = measure(name, case)
    assert measured.error <= measured.bound
    assert measured.engine == FEW.get((name, case), measured.engine)
    assert measured.engine != "loop"
