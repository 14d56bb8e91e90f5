"""A catalogue of what people get wrong, each with what they are told: what came, what is needed, how to fix it."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN

import whence
from toys import Toy, categorical_view, mlp_view, model, records_for
from whence import IIF, Action, PPOClip, RecordBatch, Return, RunDirectory, WhenceError, attribute, cli
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
    (path / "comparison" / "runs").mkdir(parents=True)
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
    return path


LAKE_ACTION = ["train", "FrozenLake-v1", "--target", "action", "--observation", "3", "--action"]

COMMANDS = {
    "unknown environment": (
        ["train", "CartPol-v1"],
        "No environment 'CartPol-v1' is registered.*Did you mean CartPole",
    ),
    "environment of a missing module": (["train", "absent:Lake-v1"], "cannot be made.*No module named 'absent'"),
    "neither environment nor preset": (["train"], "Give either an environment, such as LunarLander-v3, or --preset"),
    "environment and preset": (["train", "CartPole-v1", "--preset", "lda-code/frozenlake"], "not both, not none"),
    "unknown preset": (["train", "--preset", "frozenlake"], "Did you mean paper/frozenlake, lda-code/frozenlake"),
    "unknown selection": (["train", "CartPole-v1", "--selection", "iff"], "The arm 'iff' is unknown. Did you mean iif"),
    "share above 1": (["train", "CartPole-v1", "--drop", "50"], r"drop is 50.0; it is the share.*in \(0, 1\]"),
    "share of 0": (["train", "CartPole-v1", "--drop", "0"], r"drop is 0.0; it is the share.*in \(0, 1\]"),
    "negative warm-up": (["train", "CartPole-v1", "--warmup", "-1"], "warmup is -1; it is a number of rounds, 0 or"),
    "no rounds": (["train", "CartPole-v1", "--rounds", "0"], "rounds is 0; at least 1 is needed"),
    "rounds and time steps": (["train", "CartPole-v1", "--rounds", "2", "--timesteps", "9"], "--rounds or --timesteps"),
    "one evaluation episode": (
        ["train", "CartPole-v1", "--eval-episodes", "1"],
        "a standard error needs 2, and 0 make",
    ),
    "negative seed": (["train", "CartPole-v1", "--seed", "-3"], "seed is -3; at least 0 is needed"),
    "unknown engine": (
        ["train", "CartPole-v1", "--engine", "gohst"],
        "The engine 'gohst' is unknown. Did you mean ghos",
    ),
    "unknown target": (
        ["train", "CartPole-v1", "--target", "retrun"],
        "The target 'retrun' is unknown. Did you mean ret",
    ),
    "action without observation": (["train", "CartPole-v1", "--target", "action"], "needs --observation and --action"),
    "observation without action": (["train", "CartPole-v1", "--observation", "3"], "belong to the target action"),
    "an action that is cut off": ([*LAKE_ACTION, "0.7"], r"The action of the target is 0.7; .*one of Discrete\(4\)"),
    "an action there is not": ([*LAKE_ACTION, "9"], r"The action of the target is 9; .*one of Discrete\(4\)"),
    "more actions than observations": ([*LAKE_ACTION, "[0, 1]"], "not as many actions as observations"),
    "an observation there is not": (
        ["train", "FrozenLake-v1", "--target", "action", "--observation", "99", "--action", "0"],
        r"The observation of the target is 99; .*one of Discrete\(16\)",
    ),
    "an observation too short": (
        ["train", "CartPole-v1", "--target", "action", "--observation", "[0, 0]", "--action", "0"],
        r"The observation of the target is \[0, 0\]; .*one of Box\(",
    ),
    "a share for plain PPO": (
        ["train", "CartPole-v1", "--selection", "ppo", "--drop", "0.5"],
        "drop has no effect with ppo. Leave it out, or take an arm that reads it: iif, mean, negative-random,",
    ),
    "a share for a rule without": (
        ["train", "CartPole-v1", "--selection", "nonpositive", "--drop", "0.5"],
        "drop has no effect with nonpositive",
    ),
    "a warm-up for a rule without": (
        ["train", "CartPole-v1", "--selection", "td-error", "--warmup", "2"],
        "warmup has no effect with td-error. .*reads it: iif, mean, nonpositive,",
    ),
    "a target where nothing is scored": (
        ["train", "FrozenLake-v1", "--selection", "advantage-1", "--target", "return"],
        "target has no effect with advantage-1. .*reads it: iif,",
    ),
    "an engine where nothing is scored": (
        ["train", "CartPole-v1", "--selection", "ppo", "--engine", "loop"],
        "engine has no effect with ppo",
    ),
    "a comparison's share that no arm reads": (
        ["compare", "CartPole-v1", "--arms", "ppo,nonpositive", "--drop", "0.5"],
        "drop has no effect with ppo, nonpositive",
    ),
    "no JSON": (["train", "CartPole-v1", "--env-kwargs", "{map: 8x8}"], r"--env-kwargs is .*not JSON.*Write it as"),
    "JSON but no object": (["train", "CartPole-v1", "--env-kwargs", "[1]"], r"--env-kwargs is \[1\]; a JSON object"),
    "no JSON for EnvPool": (["train", "CartPole-v1", "--pool-kwargs", "{a: 1}"], "--pool-kwargs is .*not JSON"),
    "settings of evaluations that training would not have": (
        ["compare", "--preset", "lda-code/acrobot", "--env-kwargs", '{"render_mode": "rgb_array"}'],
        r"would reach Gymnasium's environments and not EnvPool's.* evaluates with envpool. Pass pool_kwargs \(--po",
    ),
    "Gymnasium's settings for EnvPool": (
        ["train", "--preset", "lda-code/highway", "--env-kwargs", '{"lanes_count": 3}'],
        r"run is in EnvPool's environments only. Pass pool_kwargs \(--pool-kwargs\) instead",
    ),
    "EnvPool's settings for Gymnasium": (
        ["train", "CartPole-v1", "--pool-kwargs", '{"max_episode_steps": 9}'],
        r"run is in Gymnasium's environments only. Pass env_kwargs \(--env-kwargs\) instead",
    ),
    "argument the environment lacks": (["train", "CartPole-v1", "--env-kwargs", '{"gravitation": 9}'], "gravitation"),
    "argument the policy lacks": (["train", "CartPole-v1", "--policy-kwargs", '{"arch": [8]}'], "refuses.*'arch'"),
    "unknown policy": (["train", "CartPole-v1", "--policy", "MplPolicy"], "'MplPolicy' is unknown. Did you mean MlpP"),
    "policy of images on a vector": (["train", "CartPole-v1", "--policy", "CnnPolicy"], "refuses.*NatureCNN only with"),
    "unknown optimiser": (
        ["train", "CartPole-v1", "--optimizer", "Adm"],
        "The optimizer 'Adm' is unknown. Did you mea",
    ),
    "a rollout of one": (["train", "CartPole-v1", "--n-steps", "1"], "refuses.*must be greater than 1"),
    "a device there is not": (
        ["train", "CartPole-v1", "--device", "gpu"],
        "device is 'gpu', which torch does not know. Pass cpu",
    ),
    "a hyper-parameter that is no number": (["train", "CartPole-v1", "--gamma", "high"], "Invalid value for '--gamma'"),
    "a truth value that is none": (["train", "CartPole-v1", "--use-sde", "maybe"], "Invalid value for '--use-sde'"),
    "an option there is not": (["train", "CartPole-v1", "--learning-rat", "1"], "No such option.*--learning-rate"),
    "spaces SB3 does not take": (
        ["train", "Blackjack-v1"],
        "Stable-Baselines3 reads no Tuple. Register the environment with a wrapper",
    ),
    "TensorBoard missing": (["train", "CartPole-v1", "--tensorboard", "tb"], r"pip install '.\[tensorboard\]'"),
    "a directory with other files": (["train", "CartPole-v1", "--run", "taken"], "no run of whence's. Choose a new or"),
    "a directory of another run": (
        ["train", "CartPole-v1", "--run", "lake"],
        "another configuration .*env was 'Frozen",
    ),
    "comparison without the standard": (["compare", "CartPole-v1", "--arms", "iif"], "lack 'ppo'.*Add it"),
    "comparison without evaluations": (
        ["compare", "CartPole-v1", "--eval-episodes", "0"],
        "compared by their test ret",
    ),
    "comparison of no seeds": (["compare", "CartPole-v1", "--seeds", "0"], "seeds is 0; at least 1 is needed, and 2"),
    "comparison without workers": (["compare", "CartPole-v1", "--workers", "0"], "workers is 0; at least 1"),
    "no run directory": (["attribute", "nowhere"], "nowhere holds no config.json, so it is no run directory"),
    "a file for a run directory": (["attribute", "file"], "file holds no config.json, so it is no run directory"),
    "a run without rounds": (["attribute", "begun"], "begun holds no rounds yet"),
    "a round there is not": (["attribute", "lake", "--round", "7"], "round_00007.parquet is not there.*rounds 1 to 2"),
    "a record there is not": (["attribute", "lake", "--target", "action", "--record", "9"], "go from 32 to 63"),
    "a record for the return": (
        ["attribute", "lake", "--record", "40"],
        "belong to the target action; the target is re",
    ),
    "an action without a state": (
        ["attribute", "lake", "--target", "action"],
        "needs --record ID, or --observation an",
    ),
    "an observation of another shape": (
        ["attribute", "lake", "--target", "action", "--observation", "[[1, 2]]", "--action", "1"],
        r"The observation of the target is \[\[1, 2\]\]; it has to be one of Discrete\(16\), or several",
    ),
    "an action that would be cut off": (
        ["attribute", "lake", "--target", "action", "--observation", "3", "--action", "0.7"],
        r"The action of the target is 0.7; .*one of Discrete\(4\)",
    ),
    "an observation the environment lacks": (
        ["attribute", "lake", "--target", "action", "--observation", "99", "--action", "0"],
        r"The observation of the target is 99; .*one of Discrete\(16\)",
    ),
    "a file of unknown kind": (["attribute", "lake", "--out", "scores.xls"], "has to end in .parquet, .csv or .safete"),
    "no record to show": (["attribute", "lake", "--top", "0"], "Invalid value for '--top'"),
    "a run written by a script": (
        ["attribute", "script"],
        "an environment that Gymnasium has no id for.*--env",
    ),
    "a damaged table": (["attribute", "cut"], "round_00002.parquet cannot be read as Parquet"),
    "a damaged configuration": (["report", "broken"], "is not readable as JSON.*restore it, or run again"),
    "a run of another version": (["report", "other"], "version 99; this version of whence reads 'whence-run', version"),
    "a page of nothing": (["report", "empty"], "empty holds no config.json"),
    "an unfinished comparison": (["report", "comparison"], "not finished. Run its `whence compare` again"),
    "a damaged comparison": (
        ["report", "torn"],
        "comparison.json is not readable as JSON.*finished runs are not repea",
    ),
    "something there is none of": (["list", "engine"], "There are no 'engine' to list. Did you mean engines"),
    "a command there is not": (["trian"], "No such command 'trian'"),
}


@pytest.mark.parametrize(("arguments", "message"), COMMANDS.values(), ids=COMMANDS)
def test_commands(
    arguments: list[str], message: str, command: Callable[..., Told], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    before = sorted(runs.rglob("*"))
    code, out, err = command(*arguments)
    assert code == 2
    assert matches(message, err), err
    assert "Traceback" not in err
    assert out == ""
    assert sorted(runs.rglob("*")) == before  # nothing was begun


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
@pytest.mark.parametrize(
    ("fault", "message", "exit_code"),
    [
        ("reward", "Round 1: `reward` is nan in record 0 .*Find out where the number arises", 2),
        ("observation", "Round 1: `observation` is inf in record 1 .*a wrapper of the environment", 2),
        ("raises", r"'Odd-v0' fails in step\(\): OSError: the simulator has gone.*`whence --debug", 2),
    ],
)
def test_environments(
    fault: str, message: str, exit_code: int, odd: None, command: Callable[..., Told], tmp_path: Path
) -> None:
    settings = ["--n-steps", "16", "--batch-size", "16", "--rounds", "2", "--run", tmp_path / "run"]
    code, _, err = command("train", "Odd-v0", "--env-kwargs", json.dumps({"fault": fault}), *settings)
    assert matches(message, err), err
    assert code == exit_code
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


def scored() -> tuple[RecordBatch, whence.Influence]:
    view = mlp_view()
    records = records_for(view)
    return records, attribute(view, records, target=Return())


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "columns of different lengths": (
        lambda: RecordBatch(**columns(values=torch.zeros(3))),
        r"`values` has shape \(3,\)",
    ),
    "no record": (lambda: RecordBatch(**columns(log_probs=[])), "needs at least one record"),
    "a column of two axes": (lambda: RecordBatch(**columns(advantages=torch.zeros(4, 1))), "one number per record"),
    "an id twice": (
        lambda: RecordBatch(**columns(record_ids=[1, 2, 2, 3])),
        "holds 2 2 times; each record needs an id",
    ),
    "a negative id": (lambda: RecordBatch(**columns(record_ids=[0, -1, 2, 3])), "holds -1; ids are integers >= 0"),
    "a NaN": (lambda: RecordBatch(**columns(advantages=[0.0, math.nan, 0.0, 0.0])), "is nan at record 1"),
    "a policy of no known kind": (lambda: attribute(torch.nn.Linear(5, 3), scored()[0], target=Return()), "ModuleView"),
    "a target that is a class": (lambda: attribute(mlp_view(), scored()[0], target=Return), r"instance: Return\(\)"),  # type: ignore[arg-type]
    "a target that is text": (lambda: attribute(mlp_view(), scored()[0], target="return"), "target is 'return'; pass"),  # type: ignore[call-overload]
    "no target": (lambda: attribute(mlp_view(), scored()[0], target={}), "empty mapping; name at least one"),
    "an objective that is a class": (
        lambda: attribute(mlp_view(), scored()[0], target=Return(), objective=PPOClip),  # type: ignore[arg-type]
        r"pass an instance: PPOClip\(\)",
    ),
    "an engine there is not": (
        lambda: attribute(mlp_view(), scored()[0], target=Return(), engine="fast"),
        "one of auto, ghost",
    ),
    "a chunk of none": (lambda: attribute(mlp_view(), scored()[0], target=Return(), chunk_size=0), "chunk_size is 0"),
    "too little memory": (lambda: attribute(mlp_view(), scored()[0], target=Return(), memory=99), "memory is 99 bytes"),
    "a frozen policy": (
        lambda: attribute(categorical_view(torch.nn.Linear(5, 3).requires_grad_(False)), scored()[0], target=Return()),
        "no trainable parameter",
    ),
    "an action and two states": (
        lambda: attribute(mlp_view(), scored()[0], target=Action(torch.zeros(2, 5), torch.tensor([1]))),
        "sets of different sizes",
    ),
    "an action there is not": (
        lambda: attribute(model().policy, collect(model()), target=Action(torch.zeros(5), 9)),
        r"got the action 9, which is not in the policy's action space, Discrete\(3\)",
    ),
    "half an action": (
        lambda: attribute(mlp_view(), scored()[0], target=Action(torch.zeros(5), 0.5)),
        "holds 0.5, but the records' are int64, which would make it 0",
    ),
    "weights that leave nothing": (
        lambda: whence.Selection(torch.ones(2, dtype=torch.bool), torch.zeros(2), [None, None]),
        "keeps 2 of 2 records and gives all of them weight 0",
    ),
    "no record taken": (lambda: scored()[0].take(slice(0, 0)), "leave none of the 24 records"),
    "a clip range of 0": (lambda: PPOClip(clip_range=0), "clip_range is 0; it must be greater than 0"),
    "an unknown normalisation": (lambda: PPOClip(advantage_norm="bufer"), "Did you mean buffer"),  # type: ignore[arg-type]
    "values that are missing": (
        lambda: attribute(mlp_view(), scored()[0], target=Return(), objective=PPOClip(vf_coef=0.5)),
        "needs `values` and `returns`.*set vf_coef=0",
    ),
    "a share above 1": (lambda: IIF(1.5), r"drop is 1.5; it is the share of records to drop, in \(0, 1\]"),
    "scores of other records": (
        lambda: IIF().select(records_for(mlp_view(), 5), scored()[1]),
        "scores of other records than the 5 to select from",
    ),
    "no scores": (lambda: IIF().select(scored()[0], None), "needs an influence: pass attribute"),
    "a buffer that is not full": (lambda: snapshot(model()), "holds 0 of 32 steps.*on_rollout_end"),
    "a buffer that was trained on": (lambda: snapshot(trained()), r"flattened by train\(\)"),
    "an algorithm without rollouts": (lambda: collect(off_policy()), "DQN is not supported: it is not on-policy"),
    "a rule that is a class": (lambda: InfluenceCallback(IIF), "rule is .*pass an instance"),  # type: ignore[arg-type]
    "an unknown way with the last minibatch": (lambda: InfluenceCallback(IIF(), last="skip"), "last is 'skip'"),  # type: ignore[arg-type]
}


def trained() -> Any:
    toy = model()
    toy.learn(32)
    return toy


def off_policy() -> Any:
    return DQN("MlpPolicy", Toy(), buffer_size=10)


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_calls(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(WhenceError) as raised:
        call()
    assert matches(message, str(raised.value)), raised.value


def test_the_catalogue_is_long() -> None:
    assert len(COMMANDS) + len(CALLS) >= 40


def matches(pattern: str, text: str) -> bool:
    return re.search(pattern, " ".join(text.split())) is not None
