import math

import pytest
import torch

from whence import A2C, InvalidRecords, Outputs, PPOClip, RecordBatch, WhenceError
from whence.core import as_objective


def batch(advantages: list[float], **more: object) -> RecordBatch:
    n = len(advantages)
    return RecordBatch(
        observations=torch.zeros(n, 1),
        actions=torch.zeros(n),
        log_probs=torch.zeros(n, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        **more,
    )


def of_ratios(ratios: list[float], **more: torch.Tensor) -> Outputs:
    return Outputs(torch.tensor(ratios, dtype=torch.float64).log(), **more)


def test_clipped_surrogate_by_hand() -> None:
    # rho:       1.5          0.5          1.5         0.5        1.1
    # A:         2            2            -1          -1         3
    # rho A:     3            1            -1.5        -0.5       3.3
    # clipped:   1.2*2 = 2.4  0.8*2 = 1.6  1.2*-1      0.8*-1     3.3
    # minimum:   2.4          1            -1.5        -0.8       3.3
    records = batch([2, 2, -1, -1, 3])
    values = PPOClip(advantage_norm="none")(of_ratios([1.5, 0.5, 1.5, 0.5, 1.1]), records)
    assert values.tolist() == pytest.approx([2.4, 1, -1.5, -0.8, 3.3])


def test_entropy_and_value_terms_by_hand() -> None:
    doubles = {"dtype": torch.float64}
    records = batch([1, 1], values=torch.tensor([0.0, 0.0], **doubles), returns=torch.tensor([1.0, -1.0], **doubles))
    outputs = of_ratios([1, 1], value=torch.tensor([0.5, 2.0], **doubles), entropy=torch.tensor([0.2, 0.4], **doubles))
    # 1 + 0.1 * H - 0.5 * (R - V)^2:  1 + 0.02 - 0.5 * 0.25 = 0.895;  1 + 0.04 - 0.5 * 9 = -3.46
    objective = PPOClip(ent_coef=0.1, vf_coef=0.5, advantage_norm="none")
    assert objective(outputs, records).tolist() == pytest.approx([0.895, -3.46])
    # Values may move by 0.2 only: 0.2 and 0.2. 1.02 - 0.5 * 0.64 = 0.7;  1.04 - 0.5 * 1.44 = 0.32
    clipped = PPOClip(ent_coef=0.1, vf_coef=0.5, clip_range_vf=0.2, advantage_norm="none")
    assert clipped(outputs, records).tolist() == pytest.approx([0.7, 0.32])


def test_minus_log_prob_stands_in_for_a_missing_entropy() -> None:
    outputs = Outputs(torch.tensor([math.log(0.25)], dtype=torch.float64))
    value = A2C(ent_coef=0.1, advantage_norm="none")(outputs, batch([2]))
    assert value.tolist() == pytest.approx([2 * math.log(0.25) - 0.1 * math.log(0.25)])


@pytest.mark.parametrize("objective", [PPOClip, A2C])
def test_normalisation_over_the_buffer_has_bessels_correction(objective: type[PPOClip] | type[A2C]) -> None:
    # 1, 2, 6: mean 3, deviations -2, -1, 3, variance (4 + 1 + 9) / 2 = 7.
    prepared = objective().prepare(batch([1, 2, 6]))
    assert prepared.advantages.tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5])
    assert objective().prepare(batch([5])).advantages.tolist() == [5]  # one record has no standard deviation
    assert objective(advantage_norm="none").prepare(batch([1, 2, 6])).advantages.tolist() == [1, 2, 6]


def test_clip_range_is_first_and_outputs_are_read_as_coefficients_ask() -> None:
    assert PPOClip(0.1) == PPOClip(clip_range=0.1)
    assert PPOClip().reads == {"log_prob"}
    assert PPOClip(vf_coef=0.5).reads == {"log_prob", "value"}
    assert A2C(ent_coef=0.1).reads == {"log_prob", "entropy"}


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(WhenceError, match=r"advantage_norm is 'bufer'.*buffer"):
        PPOClip(advantage_norm="bufer")  # type: ignore[arg-type]
    with pytest.raises(InvalidRecords, match="needs `values` and `returns`"):
        PPOClip(vf_coef=0.5).prepare(batch([1, 2]))
    with pytest.raises(WhenceError, match="objective is <class"):
        as_objective(PPOClip)  # type: ignore[arg-type]
    with pytest.raises(WhenceError, match="objective is 'ppo'"):
        as_objective("ppo")  # type: ignore[arg-type]
