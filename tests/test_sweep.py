"""Sweeps: what a file asks for, what is refused, what is left when a run fails or the sweep is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import pytest
import torch
from stable_baselines3 import PPO
from typer.testing import CliRunner

from whence import IIF, KeepAll
from whence.cli import app
from whence.errors import RunDirectoryError, WhenceError
from whence.experiments import configure, load_sweep, read_sweep, sweep
from whence.experiments.controls import MatchedUpdate
from whence.experiments.environments import training_env
from whence.experiments.training import make_model
from whence.sb3 import InfluenceCallback

LAKE = """
[[experiment]]
name = "lake"
env = "FrozenLake-v1"
env_kwargs = { desc = ["SFF", "FFF", "FHG"], is_slippery = true }
arms = ["ppo", "iif"]
seeds = 2
drop = [0.5, 1.0]
rounds = 2
eval_episodes = 20
hyperparameters = { n_steps = 64, batch_size = 32, n_epochs = 2, learning_rate = 0.01 }
"""


class Quiet:
    """Takes note of what it is told."""

    def __init__(self):
        self.kept_runs, self.told, self.ends = [], [], {}

    def kept(self, planned):
        self.kept_runs.append(planned.name)

    def rounds(self, planned, done):
        self.told.append((planned.name, done))

    def ended(self, planned, failure):
        self.ends[planned.name] = failure


def written(folder, text):
    path = folder / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return path


def curves(out):
    return {str(file.relative_to(out)): file.read_bytes() for file in (out / "curves").rglob("*.json")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep that nothing befell."""
    folder = tmp_path_factory.mktemp("whole")
    assert sweep(read_sweep(written(folder, LAKE)), folder / "out", Quiet()) == {}
    return folder / "out"


class TestReading:
    def test_runs_are_arms_times_shares_times_seeds(self, tmp_path):
        runs = read_sweep(written(tmp_path, LAKE))
        names = [f"lake/{label}/seed_{seed}" for seed in (0, 1) for label in ("ppo", "iif", "iif-drop1")]
        assert [run.name for run in runs] == names
        assert [run.config.drop for run in runs[:3]] == [0.5, 0.5, 1.0]
        assert {run.config.hyperparameters["n_steps"] for run in runs} == {64}

    def test_what_experiments_of_a_name_share_is_run_once(self, tmp_path):
        more = LAKE.replace('["ppo", "iif"]', '["ppo", "random"]').replace("seeds = 2", "seeds = [1, 7]")
        names = [run.name for run in read_sweep(written(tmp_path, LAKE + more))]
        assert len(names) == len(set(names))
        assert names[6:] == ["lake/random/seed_1", "lake/random-drop1/seed_1"] + [
            f"lake/{label}/seed_7" for label in ("ppo", "random", "random-drop1")
        ]

    def test_the_papers_sweep_is_sound(self):
        pytest.importorskip("Box2D")  # before EnvPool: see make_pool
        pytest.importorskip("envpool")
        runs = read_sweep(Path(__file__).parent.parent / "results/paper/sweep.toml")
        assert len({run.name for run in runs}) == len(runs)

    @pytest.mark.parametrize(
        ("old", "new", "line", "said"),
        [
            ('arms = ["ppo", "iif"]', 'arms = ["ppo", "iff"]', 6, "The arm 'iff' is unknown. Did you mean iif"),
            ('arms = ["ppo", "iif"]', 'arms = ["iif"]', 3, "lacks the arm 'ppo'"),
            ('arms = ["ppo", "iif"]', "arms = []", 6, "arms is []"),
            ('arms = ["ppo", "iif"]', 'arms = ["ppo", "ppo"]', 6, "names each arm once"),
            ("seeds = 2", "seeds = 0", 7, "seeds is 0"),
            ("seeds = 2", "seeds = [1, 1]", 7, "name each once"),
            ("seeds = 2", 'seeds = "two"', 7, "seeds is 'two'"),
            ("seeds = 2", "", 3, "seeds is None"),
            ("seeds = 2", "seeds = [-1]", 7, "seeds is [-1]"),
            ("[0.5, 1.0]", "[0.5, 2.0]", 8, "2.0"),
            ("[0.5, 1.0]", '"half"', 8, "drop is 'half'"),
            ("rounds = 2", "rounds = 0", 9, "rounds is 0"),
            ("rounds = 2", 'rounds = "two"', 3, "wrong type"),
            ("rounds = 2", "round = 2", 9, "An experiment has no 'round'. Did you mean rounds"),
            ("eval_episodes = 20", "eval_episodes = 0", 10, "eval_episodes is 0"),
            ("learning_rate", "learning_rat", 11, "learning_rat"),
            ('env = "FrozenLake-v1"', 'env = "FrozenLake-v9"', 4, "FrozenLake-v9"),
            ('env = "FrozenLake-v1"', "", 3, "Give either an environment"),
            ('arms = ["ppo", "iif"]', 'arms = ["ppo"]', 8, "drop has no effect with ppo"),
            (
                LAKE[LAKE.index("env = ") : LAKE.index("seeds")],
                'env = "CartPole-v1"\narms = ["ppo", "advantage-1"]\n',
                5,
                "advantage-1 needs discrete observations",
            ),
            ('name = "lake"', 'name = "../lake"', 3, "letters, digits"),
            ("seeds = 2", "seeds = 2\nwarmup = ", 8, "Invalid value"),
            ("[[experiment]]", "[experiment]", 2, "no [[experiment]]"),
            ("[[experiment]]", "workers = 3\n[[experiment]]", 2, "A sweep has no 'workers'"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path, old, new, line, said):
        assert old in LAKE
        path = written(tmp_path, LAKE.replace(old, new))
        with pytest.raises(WhenceError) as refused:
            read_sweep(path)
        assert said in str(refused.value)
        assert re.search(rf"\bline {line}\b", str(refused.value)), refused.value

    def test_a_name_stands_for_one_setting(self, tmp_path):
        with pytest.raises(WhenceError, match=r"line 20: The name 'lake' stands over runs that differ in rounds"):
            read_sweep(written(tmp_path, LAKE + LAKE.replace("rounds = 2", "rounds = 3")))

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(WhenceError, match=r"none\.toml is not there"):
            read_sweep(tmp_path / "none.toml")


class TestRunning:
    def test_it_leaves_curves_and_timings_and_nothing_else(self, whole):
        there = sorted(str(file.relative_to(whole)) for file in whole.rglob("*") if file.is_file())
        names = [f"lake/{label}/seed_{seed}" for label in ("iif", "iif-drop1", "ppo") for seed in (0, 1)]
        assert there == sorted(f"{kind}/{name}.json" for kind in ("curves", "timings") for name in names)
        one = json.loads((whole / "curves/lake/iif/seed_1.json").read_text())
        assert one["config"]["arm"] == "iif"
        assert one["evaluations"]["round"] == [0, 1, 2]
        assert "seconds" not in one

    def test_finished_runs_are_skipped(self, whole, tmp_path):
        before = {file: file.stat().st_mtime_ns for file in whole.rglob("*.json")}
        watch = Quiet()
        sweep(read_sweep(written(tmp_path, LAKE)), whole, watch)
        assert len(watch.kept_runs) == 6
        assert watch.told == []
        assert {file: file.stat().st_mtime_ns for file in whole.rglob("*.json")} == before

    def test_killed_midway_it_goes_on_to_the_same_results(self, whole, tmp_path):
        file, out = written(tmp_path, LAKE), tmp_path / "out"
        command = [sys.executable, "-m", "whence.cli", "sweep", str(file), "--out", str(out), "--workers", "1"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while len(curves(out)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        found = len(curves(out))
        assert 2 <= found < 6
        watch = Quiet()
        assert sweep(read_sweep(file), out, watch) == {}
        assert len(watch.kept_runs) == found
        assert curves(out) == curves(whole)

    def test_a_run_that_fails_is_told_of_and_the_others_go_on(self, whole, tmp_path):
        runs = read_sweep(written(tmp_path, LAKE))
        # Somebody's own files where a run belongs: it refuses to start.
        occupied = tmp_path / "out" / "runs" / "lake" / "iif" / "seed_0"
        occupied.mkdir(parents=True)
        (occupied / "thesis.tex").write_text("mine")
        watch = Quiet()
        failures = sweep(runs, tmp_path / "out", watch, workers=2)
        assert list(failures) == ["lake/iif/seed_0"]
        assert "it is no run of whence's" in failures["lake/iif/seed_0"]
        assert "RunDirectoryError" in (occupied.parent / "seed_0.error.txt").read_text()
        assert (occupied / "thesis.tex").read_text() == "mine"
        assert sorted(watch.ends) == sorted(run.name for run in runs)
        assert [name for name, failure in watch.ends.items() if failure] == ["lake/iif/seed_0"]
        expected = {name: content for name, content in curves(whole).items() if name != "curves/lake/iif/seed_0.json"}
        assert curves(tmp_path / "out") == expected

    def test_a_curve_of_another_run_is_not_taken_for_this_one(self, whole, tmp_path):
        longer = read_sweep(written(tmp_path, LAKE.replace("rounds = 2", "rounds = 3")))
        with pytest.raises(RunDirectoryError, match="its rounds is 2, the sweep's 3"):
            sweep(longer, whole, Quiet())

    @pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "whence-curve", "version": 1}'])
    def test_a_damaged_curve_is_named(self, whole, tmp_path, content):
        file = tmp_path / "out/curves/lake/ppo/seed_0.json"
        file.parent.mkdir(parents=True)
        file.write_text(content)
        timings = tmp_path / "out/timings/lake/ppo/seed_0.json"
        timings.parent.mkdir(parents=True)
        timings.write_bytes((whole / "timings/lake/ppo/seed_0.json").read_bytes())
        with pytest.raises(RunDirectoryError, match=r"seed_0\.json"):
            load_sweep(tmp_path / "out")

    def test_the_command_ends_with_one_where_a_run_failed(self, tmp_path):
        file = written(tmp_path, LAKE.replace("seeds = 2", "seeds = 1").replace("[0.5, 1.0]", "0.5"))
        (tmp_path / "out/runs/lake/iif/seed_0").mkdir(parents=True)
        (tmp_path / "out/runs/lake/iif/seed_0/mine").touch()
        asked = ["sweep", str(file), "--out", str(tmp_path / "out"), "--json"]
        done = CliRunner().invoke(app, asked)
        assert done.exit_code == 1
        assert list(json.loads(done.stdout)["failures"]) == ["lake/iif/seed_0"]
        assert "lake/ppo/seed_0: done in" in done.stderr
        (tmp_path / "out/runs/lake/iif/seed_0/mine").unlink()
        assert CliRunner().invoke(app, asked).exit_code == 0
        assert not list((tmp_path / "out").rglob("*.error.txt"))

    def test_only_names_experiments(self, tmp_path):
        done = CliRunner().invoke(app, ["sweep", str(written(tmp_path, LAKE)), "--only", "lak"])
        assert "has no experiment 'lak'. Did you mean lake?" in str(done.exception)


def trained(callback, rounds=1, optimizer=torch.optim.SGD):
    """A model after some rounds of PPO, and how its parameters moved."""
    model = PPO(
        "MlpPolicy",
        gym.make("CartPole-v1"),
        n_steps=64,
        batch_size=32,
        n_epochs=2,
        seed=0,
        device="cpu",
        learning_rate=0.05,
        vf_coef=0.0,  # else the values' gradient, which is the same in all, would be most of the update
        policy_kwargs={"optimizer_class": optimizer, "net_arch": [8]},
    )
    start = flat(model)
    model.learn(64 * rounds, callback=callback)
    return model, flat(model) - start


def flat(model):
    return torch.cat([parameter.detach().flatten().double() for parameter in model.policy.parameters()])


class TestMatchedUpdate:
    def test_it_goes_where_ppo_goes_as_far_as_the_selection_would(self):
        _, plain = trained(None)
        _, filtered = trained(InfluenceCallback(IIF(drop=1.0)))
        model, matched = trained(MatchedUpdate(IIF(drop=1.0)))
        assert abs(filtered.norm() / plain.norm() - 1) > 0.05  # else there would be nothing to match
        assert float(matched.norm()) == pytest.approx(float(filtered.norm()), rel=1e-5)
        assert float(torch.cosine_similarity(matched, plain, dim=0)) == pytest.approx(1, abs=1e-6)
        assert model._n_updates == 2

    @pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
    def test_where_all_is_kept_it_is_ppo(self, optimizer):
        _, plain = trained(None, rounds=3, optimizer=optimizer)
        _, matched = trained(MatchedUpdate(KeepAll()), rounds=3, optimizer=optimizer)
        assert torch.allclose(matched, plain, rtol=1e-4, atol=1e-7)

    def test_the_factor_is_in_the_metrics(self):
        callback = MatchedUpdate(IIF(drop=1.0))
        _, matched = trained(callback)
        _, plain = trained(None)
        assert callback.metrics[0]["train/update_scale"] == pytest.approx(
            float(matched.norm() / plain.norm()), rel=1e-5
        )


@pytest.mark.parametrize(("arm", "rate"), [("ppo", 0.01), ("ppo-lr-0.5", 0.005), ("ppo-lr-4", 0.04)])
def test_learning_rates_are_scaled(tmp_path, arm, rate):
    config = configure(env="FrozenLake-v1", arm=arm, hyperparameters={"learning_rate": 0.01})
    assert make_model(config, training_env(config)).learning_rate == rate
    default = configure(env="FrozenLake-v1", arm=arm)
    assert make_model(default, training_env(default)).learning_rate == pytest.approx(3e-4 * rate / 0.01)
