"""`whence train`, and what the other commands make of its run directory."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from typer.testing import CliRunner, Result

from helpers.toys import copy_signed
from whence import Return, RunDirectory, RunDirectoryError, attribute, cli
from whence.engines import ENGINES
from whence.lab import attribute_round
from whence.lab.agents.run_config import TARGETS
from whence.lab.arms import ARMS, read_presets
from whence.sb3 import model_objective
from whence.stored.agents import load_recording, load_round
from whence.stored.agents.rounds import measure_returns

LAKE = ["FrozenLake-v1", "--n-steps", "64", "--batch-size", "32", "--n-epochs", "2", "--optimizer", "SGD"]


def whence(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def parsed(text: str) -> Any:
    """Read JSON as the standard has it, which knows no NaN and no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds of a small run."""
    path = tmp_path_factory.mktemp("runs") / "lake"
    found = whence("train", *LAKE, "--rounds", 3, "--eval-episodes", 4, "--seed", 2, "--drop", 0.25, "--run", path)
    assert found.exit_code == 0, found.output
    assert f"Run:  {path}\nPage: {path / 'report.html'}" in found.output
    assert "FrozenLake-v1, iif, seed 2: 3 rounds done. Last round: test return" in found.output
    return path


def test_a_run_holds_what_was_asked_for(lake: Path) -> None:
    run = RunDirectory.open(lake)
    asked = {"env": "FrozenLake-v1", "arm": "iif", "seed": 2, "drop": 0.25, "rounds": 3, "eval_episodes": 4}
    assert asked.items() <= run.experiment.items()
    assert run.experiment["hyperparameters"] == {"n_steps": 64, "batch_size": 32, "n_epochs": 2}
    assert run.rounds() == [1, 2, 3]
    assert run.table("evaluations").height == 4
    assert run.table("metrics")["episode_return"].null_count() < 3
    assert (lake / "report.html").stat().st_size > 100_000
    assert run.config["hyperparameters"]["learning_rate"] == 3e-4
    page = (lake / "report.html").read_text()
    assert "<h3>experiment</h3>" in page
    assert "gae_lambda" in page


def test_what_is_not_finite_is_null_in_json(lake: Path, tmp_path: Path) -> None:
    copy_signed(lake, tmp_path / "run")
    table = RunDirectory.open(lake).table("metrics")
    odd = {"q50": float("nan"), "q95": float("inf")}
    table.with_columns(**{name: pl.lit(value) for name, value in odd.items()}).write_parquet(
        tmp_path / "run" / "metrics.parquet"
    )
    asked = ("train", *LAKE, "--rounds", 3, "--eval-episodes", 4, "--seed", 2, "--drop", 0.25, "--json")
    found = whence(*asked, "--run", tmp_path / "run")
    last = parsed(found.stdout)["last_round"]
    assert [last[name] for name in (*odd, "round")] == [None, None, 3]


def test_settings_reach_the_run_and_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    more = ["--policy-kwargs", '{"net_arch": [8]}', "--env-kwargs", '{"is_slippery": false}', "--n-envs", 2]
    more += ["--normalize-advantage", "false", "--max-grad-norm", "inf", "--warmup", 1, "--engine", "forward"]
    more += ["--target", "action", "--observation", 3, "--action", 2, "--eval-episodes", 0]
    content = parsed(whence("train", *LAKE, "--timesteps", 200, *more, "--run", tmp_path, "--json").stdout)
    assert content["config"]["rounds"] == content["last_round"]["round"] == 2  # 200 steps need two rounds of 128
    assert content["run"] == str(tmp_path)
    run = RunDirectory.open(tmp_path)
    config = run.experiment
    assert (config["policy_kwargs"], config["env_kwargs"]) == ({"net_arch": [8]}, {"is_slippery": False})
    assert (config["hyperparameters"]["normalize_advantage"], config["n_envs"]) == (False, 2)
    assert (config["hyperparameters"]["max_grad_norm"], config["engine"]) == ("inf", "forward")
    assert (config["target"], config["target_args"]) == ("action", {"observation": 3, "action": 2})
    assert run.table("metrics")["kept"].to_list()[0] == 128
    assert run.policy(1)["mlp_extractor.policy_net.0.weight"].shape == (8, 16)


def test_rounds_are_recorded_where_asked(lake: Path, tmp_path: Path) -> None:
    asked = ["train", *LAKE, "--rounds", 2, "--eval-episodes", 0, "--run", tmp_path / "run", "--record-rounds"]
    assert whence(*asked, "1,2").exit_code == 0
    run = RunDirectory.open(tmp_path / "run")
    _, records = load_round(run, 2)
    model, recording = load_recording(run, 2)
    assert torch.equal(recording.records.log_probs, records.log_probs)
    scores = attribute_round(model.policy, recording, target=Return()).scores
    assert len(scores) == 64
    assert bool((scores != 0).any())
    with pytest.raises(RunDirectoryError, match=r"Round 2 of .* was not recorded\. Recorded rounds: none\."):
        load_recording(RunDirectory.open(lake), 2)
    for rounds, said in (("3", "Round 3 cannot be recorded: the run has rounds 1 to 2"), ("1,b", "whole numbers")):
        assert said in str(whence(*asked, rounds).exception)
    same = [*LAKE, "--rounds", 3, "--eval-episodes", 4, "--seed", 2, "--drop", 0.25, "--run", lake]
    refused = whence("train", *same, "--record-rounds", 1)
    assert "finished without a recording of round 1" in str(refused.exception)


def test_tests_of_parameters_are_the_runs_evaluations(lake: Path) -> None:
    run = RunDirectory.open(lake)
    model, _ = load_round(run, 2)
    before = {name: tensor.clone() for name, tensor in model.policy.state_dict().items()}
    with measure_returns(run, model, 2, episodes=200, seed=3) as measure:
        untrained, again = (measure(run.policy(number), 0) for number in (1, 1))
        assert untrained == again
        bias = {"action_net.bias": torch.tensor([50.0, 0, 0, 0])}
        assert untrained > measure(run.policy(1) | bias, 0) == 0  # it stays at the left wall
        assert any(measure(run.policy(1), repetition) != untrained for repetition in (1, 2, 3))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.policy.state_dict().items())


@pytest.mark.parametrize("env", ["FrozenLake-v1", pytest.param("CartPole-v1", marks=pytest.mark.long), "Pendulum-v1"])
def test_a_round_is_scored_again_as_it_was(env: str, lake: Path, tmp_path: Path) -> None:
    if env != "FrozenLake-v1":
        settings = ("--n-steps", 32, "--batch-size", 32, "--rounds", 3, "--eval-episodes", 0)
        settings = (*settings, "--selection", "nonpositive")
        whence("train", env, *settings, "--run", tmp_path)
    run = RunDirectory.open(lake if env == "FrozenLake-v1" else tmp_path)
    for number in (1, 3):
        model, records = load_round(run, number)
        scores = attribute(model.policy, records, target=Return(), objective=model_objective(model)).scores
        assert torch.equal(scores, torch.tensor(run.round("records", number)["score"].to_list()))
        assert records.ids.tolist() == run.round("records", number)["record_id"].to_list()


def test_any_field_of_a_comparison_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def enough(configs: Any, *_: Any, **__: Any) -> None:
        planned.extend(configs)
        raise KeyboardInterrupt

    monkeypatch.setattr("whence.lab.compare", enough)
    monkeypatch.setitem(sys.modules, "envpool", None)
    asked = ["compare", "--preset", "lda-code/acrobot", "--seeds", 1, "--arms", "ppo,iif"]
    said = "Or play in Gymnasium's environments: --collect-with gymnasium --evaluate-with gymnasium"
    assert said in str(whence(*asked).exception)
    asked += ["--evaluate-with", "gymnasium", "--engine", "loop", "--gamma", 1]
    whence(*asked)
    assert [config.arm for config in planned] == ["ppo", "iif"]
    for config in planned:
        assert (config.evaluate_with, config.engine, config.optimizer) == ("gymnasium", "loop", "SGD")
        assert (config.hyperparameters["gamma"], config.hyperparameters["n_steps"]) == (1, 2048)


def test_what_an_environment_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    said = str(whence("train", "LunarLander-v3").exception)
    assert said.startswith("The environment 'LunarLander-v3' cannot be made: ")
    assert "gymnasium[box2d]" in said


def test_attribute_shows_both_ends(lake: Path) -> None:
    found = whence("attribute", lake, "--round", 2, "--top", 3)
    assert found.exit_code == 0, found.output
    assert f"Round 2 of {lake}: 64 records, target Return(), engine ghost" in found.output
    content = parsed(whence("attribute", lake, "--round", 2, "--top", 3, "--json").stdout)
    table = RunDirectory.open(lake).round("records", 2).sort("score", "record_id")
    assert [row["record_id"] for row in content["lowest"]] == table["record_id"].to_list()[:3]
    assert content["highest"][0]["score"] == pytest.approx(table["score"].max())
    assert {"observation", "action", "advantage", "step", "episode_id"} <= content["lowest"][0].keys()


def test_attribute_explains_the_action_of_a_record(lake: Path) -> None:
    table = RunDirectory.open(lake).round("records", 3)
    record, observation, action = table.row(5)[0], table["observation"][5], table["action"][5]
    by_record = parsed(whence("attribute", lake, "--target", "action", "--record", record, "--json").stdout)
    by_hand = ("--observation", observation, "--action", action, "--json")
    same = parsed(whence("attribute", lake, "--target", "action", *by_hand).stdout)
    for one in (by_record, same):
        assert one.pop("target").startswith("Action(")
    assert by_record == same


def test_attribute_writes_all_scores(lake: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "scores.parquet"
    assert f"All scores: {out}" in whence("attribute", lake, "--out", out).output
    scores = RunDirectory.open(lake).round("records", 3)["score"].to_list()
    assert pl.read_parquet(out)["score"].to_list() == pytest.approx(scores, rel=1e-6)


def test_list_names_all_there_is() -> None:
    content = parsed(whence("list", "--json").stdout)
    assert content.keys() == {"schema", "arms", "arms of language models", "presets", "engines", "targets"}
    assert list(content["arms"]) == list(ARMS)
    assert content["arms of language models"]["zero-variance"].items() >= {"unit": "group", "needs": "groups"}.items()
    assert list(content["presets"]) == list(read_presets())
    assert list(content["engines"]) == ["auto", *ENGINES]
    assert list(content["targets"]) == list(TARGETS)
    about = content["presets"]
    assert about["lda-code/frozenlake"] == "FrozenLake-v1, 50 rounds, SGD, unclipped"
    assert about["paper/frozenlake"] == "FrozenLake-v1, 50 rounds, SGD, clipped to 0.5"
    assert len({*about.values()}) == len(about)  # no two look alike
    assert "what the paper prints: gradients clipped" in whence("list", "presets").output
    text = whence("list", "arms").output
    assert all(name in text for name in ("negative-random", "zero-variance", "none"))
    assert "ghost" not in text


STAGES = {
    "collection": ("stable_baselines3.common.buffers", "RolloutBuffer.compute_returns_and_advantage"),
    "scoring": ("whence.sb3.callback", "attribute"),
    "writing": ("whence.runs", "RunDirectory.write_policy"),
    "optimisation": ("torch.nn.utils", "clip_grad_norm_"),
    "evaluation": ("whence.lab.agents.training", "measure_return"),
}


# The run of one that is stopped in its second collection or optimisation has the files of one stopped in scoring.
@pytest.mark.parametrize(
    "stage",
    [pytest.param(name, marks=pytest.mark.long if name in ("collection", "optimisation") else ()) for name in STAGES],
)
def test_a_run_that_is_stopped_at_any_stage_can_be_read(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = STAGES[stage]
    *owner, name = name.split(".")
    holder = importlib.import_module(module)
    holder = getattr(holder, owner[0]) if owner else holder
    function, calls = getattr(holder, name), []

    def stop_at_second_call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, stop_at_second_call)
        found = whence("train", *LAKE, "--rounds", 5, "--eval-episodes", 4, "--run", tmp_path)
    assert found.exit_code != 0
    assert len(calls) == 2
    run = RunDirectory.open(tmp_path)
    assert len(run.rounds()) < 5
    for number in run.rounds():
        assert run.round("records", number).height == 64
    for table in ("metrics", "timings", "evaluations"):
        run.table(table)  # type: ignore[arg-type]
    assert whence("report", tmp_path).exit_code == 0
    assert not list(tmp_path.rglob("*.tmp"))
