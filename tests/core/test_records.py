import numpy as np
import polars as pl
import pytest
import torch

from whence import InvalidRecords, NonFinite, RecordBatch


def columns(n: int = 4, **changes: object) -> dict[str, object]:
    plain = {
        "observations": np.arange(2.0 * n).reshape(n, 2),
        "actions": np.arange(n) % 2,
        "log_probs": np.full(n, -0.7),
        "advantages": np.linspace(-1, 1, n),
    }
    return {**plain, **changes}


def test_columns_are_copied() -> None:
    advantages, image = np.linspace(-1, 1, 4), torch.zeros(4, 2)
    batch = RecordBatch(**columns(advantages=advantages, observations={"image": image}))
    advantages[:] = 9
    image[:] = 9
    assert batch.advantages.tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    assert (batch.observations["image"] == 0).all()


def test_dtypes_of_floating_columns_are_kept_and_whole_numbers_become_floating() -> None:
    batch = RecordBatch(**columns(log_probs=np.zeros(4), advantages=np.zeros(4, np.float32), rewards=[1, 0, 0, 1]))
    assert (batch.log_probs.dtype, batch.advantages.dtype) == (torch.float64, torch.float32)
    assert batch.rewards.dtype == torch.get_default_dtype()


def test_ids_follow_records_through_take() -> None:
    batch = RecordBatch(**columns(record_ids=[7, 3, 9, 1], observations={"a": {"b": torch.arange(4.0)}}))
    part = batch.take(torch.tensor([2, 0]))
    assert part.ids.tolist() == [9, 7]
    assert part.observations["a"]["b"].tolist() == [2, 0]
    assert batch.take(slice(1, 3)).ids.tolist() == [3, 9]
    assert RecordBatch(**columns()).ids.tolist() == [0, 1, 2, 3]


def test_fingerprint_tells_rounds_apart() -> None:
    batch = RecordBatch(**columns())
    assert batch.fingerprint == RecordBatch(**columns()).fingerprint
    assert batch.fingerprint != batch.with_advantages(batch.advantages * 2).fingerprint
    assert batch.fingerprint != RecordBatch(**columns(log_probs=np.full(4, -0.8))).fingerprint
    assert batch.fingerprint != RecordBatch(**columns(record_ids=[0, 1, 3, 2])).fingerprint


def test_table_has_nulls_for_the_unknown_and_arrays_for_vectors() -> None:
    batch = RecordBatch(**columns(actions=np.ones((4, 2)), steps=[-1, -1, 0, 1], episode_ids=[0, 0, 1, 1]))
    table = batch.to_polars(observations=True)
    assert table["step"].to_list() == [None, None, 0, 1]
    assert table["action"].dtype == pl.Array(pl.Float64, 2)
    assert table["observation"].to_list()[1] == [2.0, 3.0]
    assert "reward" not in table.columns
    assert "observation" not in batch.to_polars().columns


@pytest.mark.parametrize("index", [slice(0, 0), torch.zeros(4, dtype=torch.bool), torch.tensor([], dtype=torch.int64)])
def test_taking_no_record_is_refused(index: slice | torch.Tensor) -> None:
    with pytest.raises(InvalidRecords, match=r"take\(\) .* none of the 4 records"):
        RecordBatch(**columns()).take(index)


def test_other_advantages_are_taken_as_they_are() -> None:
    batch = RecordBatch(**columns(record_ids=[10, 20, 30, 40]))
    weights = torch.ones(4, requires_grad=True)
    other = batch.with_advantages(2 * weights)
    assert other.advantages.requires_grad
    assert other.ids.tolist() == [10, 20, 30, 40]
    assert batch.with_advantages(np.array([1, 2, 3, 4])).advantages.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert batch.with_advantages([1, 2, 3, 4]).advantages.is_floating_point()


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (torch.zeros(1), r"shape \(1,\) for 4 records.*\(4,\)"),
        (torch.zeros(5), r"shape \(5,\) for 4 records"),
        (torch.zeros(4, 1), r"shape \(4, 1\) for 4 records"),
        (torch.tensor(0.5), r"shape \(\) for 4 records"),
        (torch.tensor([0, 1, float("nan"), 0]), r"`advantages` is nan at record 30 \(1 of 4"),
        (np.array([0, np.inf, 1, -np.inf]), r"`advantages` is inf at record 20 \(2 of 4"),
    ],
)
def test_other_advantages_that_do_not_fit_are_refused(advantages: object, message: str) -> None:
    batch = RecordBatch(**columns(record_ids=[10, 20, 30, 40]))
    with pytest.raises((InvalidRecords, NonFinite), match=message):
        batch.with_advantages(advantages)


@pytest.mark.parametrize("name", ["advantages", "rewards", "log_probs", "values", "returns", "observations", "actions"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_and_the_record_named(name: str, value: float) -> None:
    column = np.zeros((4, 2)) if name in ("observations", "actions") else np.zeros(4)
    column[2] = value
    with pytest.raises(NonFinite, match=rf"`{name}` is {value}.* at record 30 \(1 of 4"):
        RecordBatch(**columns(**{name: column, "record_ids": [10, 20, 30, 40]}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.zeros(3)}, r"`rewards` has shape \(3,\), but log_probs holds 4 records"),
        ({"observations": {"x": np.zeros((5, 1))}}, r"`observations.x` has shape \(5, 1\)"),
        ({"actions": np.array(1)}, r"`actions` has shape \(\)"),
        ({"values": np.zeros((4, 1))}, r"shape \(4,\) is needed"),
        ({"log_probs": np.zeros(0)}, r"shape \(0,\)"),
        ({"log_probs": np.float64(0)}, r"shape \(\)"),
        ({"record_ids": [1, 2, 2, 3]}, "holds 2 2 times"),
        ({"record_ids": [1, 2, -2, 3]}, "-2 is the least"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRecords, match=message):
        RecordBatch(**columns(**changes))
