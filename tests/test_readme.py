"""What the README shows is what runs."""

import re
from functools import partialmethod
from pathlib import Path

import pytest
from stable_baselines3 import PPO

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.timeout(30)
def test_the_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (block,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    # Rounds of 2,048 records and ten epochs would show nothing more.
    learn = PPO.learn
    monkeypatch.setattr(PPO, "__init__", partialmethod(PPO.__init__, n_epochs=1))
    block = block.replace("n_steps=2048", "n_steps=256")
    monkeypatch.setattr(PPO, "learn", lambda self, steps, **settings: learn(self, steps // 8, **settings))
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "record_id" in shown
    assert "…" not in shown  # all of the records that it asks for
    assert len(list((tmp_path / "runs/readme/records").glob("*.parquet"))) == 10


def test_the_commands_are_the_makefiles() -> None:
    shown = "\n".join(blocks("bash"))
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in shown
        assert f"\n{target}:" in makefile
