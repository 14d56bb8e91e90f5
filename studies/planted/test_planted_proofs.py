"""The study of proofs leaves out what would have been paid, and writes what came of it."""

from pathlib import Path

import pytest

pytest.importorskip("Box2D")  # before EnvPool: see make_pool

from studies.planted import proofs, run
from whence.lab import read_rows


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_the_episodes_that_would_pay_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hyperparameters = {"n_steps": 512, "batch_size": 64, "n_epochs": 1}
    for name in ("lander", "plain"):
        case = run.CASES[name]._replace(rounds=2, settings={"hyperparameters": hyperparameters})
        monkeypatch.setitem(run.CASES, name, case)
        monkeypatch.setitem(proofs.SETUPS, name, proofs.Setup(2, "influence", 4))
    monkeypatch.setattr(proofs, "SEEDS", 2)
    monkeypatch.setattr(run, "STEPS", 512)
    proofs.main(tmp_path / "out", tmp_path / "runs", "plain/episodes")
    directory = run.RunDirectory.open(tmp_path / "runs" / "plain" / "seed_0")
    whole = proofs.list_rigged("lander", directory, 2, whole=True)
    paid = proofs.list_rigged("lander", directory, 2)
    assert 0 < len(paid.join(whole, on=["round", "record_id"], how="semi")) == len(paid) < len(whole)
    rows = read_rows(tmp_path / "out" / "proofs.parquet", proofs.KEYS).values()
    assert {row["records"] for row in rows} == {len(whole)}
    assert {row["seed"] for row in rows} == {-1, 0, 1}
    lines = (tmp_path / "out" / "proofs.md").read_text().splitlines()
    assert [line.startswith("| plain | episodes | ") for line in lines].count(True) == 1
