"""A catalogue of what people get wrong, each with what they are told: what came, what is needed, how to fix it."""

import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN

import whence
from catalogue import GROUPS, PAGE, Wrong, describe_page, load_catalogue
from toys import Toy, categorical_view, mlp_view, model, records_for
from whence import IIF, Action, PPOClip, RecordBatch, Return, RunDirectory, WhenceError, attribute, cli
from whence.experiments import LanguageConfig, RunConfig, read_sweep
from whence.sb3 import InfluenceCallback, collect, snapshot

Told = tuple[int, str, str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Call the command in this process; returns exit code, stdout and stderr, without line breaks and frames."""

    def call(*arguments: object) -> Told:
        monkeypatch.setattr(sys, "argv", ["whence", *map(str, arguments)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        out, err = (" ".join(text.replace("│", " ").split()) for text in capsys.readouterr())
        return int(code or 0), out, err

    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that are wrong in one way each."""
    path = tmp_path_factory.mktemp("runs")
    toy = model()
    toy.learn(32, callback=InfluenceCallback(IIF(0.5), run=path / "script"))
    (path / "empty").mkdir()
    (path / "file").write_text("no directory")
    (path / "broken").mkdir()
    (path / "broken" / "config.json").write_text('{"format": "whence-run", "ver')
    (path / "other").mkdir()
    (path / "other" / "config.json").write_text(json.dumps({"format": "whence-run", "version": 99}))
    RunDirectory.create(path / "begun", {"env": "CartPole-v1"})
    RunDirectory.create(path / "comparison" / "runs" / "ppo" / "seed_0", {"env": "CartPole-v1", "arm": "ppo"})
    (path / "sweep" / "curves").mkdir(parents=True)
    (path / "sweep" / "curves.parquet").touch()
    (path / "torn").mkdir()
    (path / "torn" / "comparison.json").write_text('[{"env": "Fro')
    (path / "taken").mkdir()
    (path / "taken" / "thesis.tex").write_text("do not lose")
    lake = ["train", "FrozenLake-v1", "--n-steps", "32", "--batch-size", "32", "--rounds", "2"]
    for name in ("lake", "bare", "cut"):
        sys.argv = ["whence", *lake, "--run", str(path / name)]
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
    table = RunDirectory.open(path / "bare").round("records", 2)
    table.drop("observation").write_parquet(path / "bare" / "records" / "round_00002.parquet")
    (path / "cut" / "records" / "round_00002.parquet").write_bytes(b"PAR1 and no more")
    for name in ("retyped", "evil", "grafted"):
        shutil.copytree(path / "lake", path / name)
    retyped = table.with_columns(pl.col("record_id").cast(pl.String))
    retyped.write_parquet(path / "retyped" / "records" / "round_00002.parquet")
    document = json.loads((path / "evil" / "config.json").read_text())
    document["config"]["env"] = "antigravity:Lake-v1"
    (path / "evil" / "config.json").write_text(json.dumps(document))
    grafted = RunDirectory.open(path / "grafted")
    grafted.write_policy(2, {**grafted.policy(2), "action_net.bias": torch.zeros(9)})
    return path


CATALOGUE = load_catalogue()


def choose(kind: str) -> Any:
    """Return the mistakes of a kind, as parameters of a test."""
    return pytest.mark.parametrize("wrong", [pytest.param(w, id=w.title) for w in CATALOGUE if getattr(w, kind)])


def said(wrong: Wrong, text: str) -> bool:
    """Return whether a text is a mistake's whole message."""
    plain = " ".join(text.translate({ord(char): " " for char in "│╭╮╰╯─"}).split()).removeprefix("Error: ")
    pattern = ".*".join(re.escape(part.strip()) for part in wrong.message.split("…"))
    return re.fullmatch(pattern, plain) is not None


@choose("command")
def test_commands(
    wrong: Wrong, command: Callable[..., Told], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = sorted(runs.rglob("*"))
    code, out, err = command(*shlex.split(str(wrong.command)))
    assert code == wrong.exit_code
    assert said(wrong, err), err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(runs.rglob("*")) == before  # nothing was begun
    assert not (tmp_path / "whence").exists()  # no small model was trained for it


@choose("sweep")
def test_sweep_files(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(str(wrong.sweep), encoding="utf-8")
    with pytest.raises(WhenceError) as raised:
        read_sweep(Path("sweep.toml"))
    assert said(wrong, str(raised.value)), raised.value


class Odd(gym.Env[Any, Any]):
    """An environment that is wrong in one way."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.fault == "raises":
            raise OSError("the simulator has gone")
        reward = math.nan if self.fault == "reward" else 1.0
        observation = np.full(2, math.inf if self.fault == "observation" else 0.5, np.float32)
        return observation, reward, False, False, {}


@pytest.fixture
def odd() -> Iterator[None]:
    gym.register("Odd-v0", Odd)
    yield
    del gym.registry["Odd-v0"]


@pytest.mark.filterwarnings("ignore:.*WARN")  # Gymnasium's own checks see it too
@choose("environment")
def test_environments(wrong: Wrong, odd: None, command: Callable[..., Told], tmp_path: Path) -> None:
    settings = ["--n-steps", "16", "--batch-size", "16", "--rounds", "2", "--run", tmp_path / "run"]
    code, _, err = command("train", "Odd-v0", "--env-kwargs", json.dumps({"fault": wrong.environment}), *settings)
    assert said(wrong, err.partition("Error: ")[2]), err
    assert code == wrong.exit_code
    assert "Traceback" not in err
    assert RunDirectory.open(tmp_path / "run").rounds() == []


def test_debug_shows_the_traceback(odd: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = ["--run", str(tmp_path / "run")]
    monkeypatch.setattr(
        sys, "argv", ["whence", "--debug", "train", "Odd-v0", "--env-kwargs", '{"fault": "raises"}', *run]
    )
    with pytest.raises(WhenceError, match="the simulator has gone") as raised:
        cli.main()
    assert isinstance(raised.value.__cause__, OSError)


def columns(**changed: Any) -> dict[str, Any]:
    zeros = torch.zeros(4)
    return {
        "observations": torch.zeros(4, 5),
        "actions": zeros.long(),
        "log_probs": zeros,
        "advantages": zeros,
    } | changed


TOLD: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(Action, IIF, PPOClip, RecordBatch, Return, RunConfig, LanguageConfig, InfluenceCallback),
        *(attribute, categorical_view, collect, columns, snapshot),
    )
} | {"whence": whence, "math": math, "pl": pl, "torch": torch}
"""What the calls of the catalogue import."""


def make_names(code: str) -> dict[str, Any]:
    """Return what a call of the catalogue names and does not make itself."""
    view, toy = mlp_view(), model()
    records = records_for(view)
    names = {"view": view, "model": toy, "records": records, "other_records": records_for(view, 5)}
    names |= {"network": torch.nn.Linear(5, 3)}
    if "influence" in code:
        names["influence"] = attribute(view, records, target=Return())
    if "trained" in code:
        names["trained"] = model().learn(32)
    if "dqn" in code:
        names["dqn"] = DQN("MlpPolicy", Toy(), buffer_size=10)
    return names


@choose("python")
def test_calls(wrong: Wrong, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    with pytest.raises(WhenceError) as raised:
        eval(str(wrong.python), {**TOLD, **make_names(str(wrong.python))})  # noqa: S307
    assert said(wrong, str(raised.value)), raised.value


def test_the_catalogue_is_long_and_on_its_page() -> None:
    assert len(CATALOGUE) >= 80
    assert len({(wrong.group, wrong.title) for wrong in CATALOGUE}) == len(CATALOGUE)
    assert {wrong.group for wrong in CATALOGUE} == set(GROUPS)
    assert PAGE.read_text(encoding="utf-8") == describe_page(CATALOGUE), "run: python tests/catalogue.py"
