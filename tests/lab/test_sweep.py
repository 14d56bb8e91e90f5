"""Sweeps: what a file asks for, what is refused, and what is left when a run fails or the sweep is killed."""

import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from helpers.dying import report_and_die
from helpers.launching import Recorder, run_one_by_one
from helpers.toys import copy_signed
from whence.cli import app
from whence.core import RunDirectoryError, WhenceError, atomic_files, preserve_rng_state
from whence.lab import KEYS, cluster, comparison, load_sweep, read_sweep, run_sweep, workers
from whence.lab.agents import configure, make_training_env, plan_comparison, run
from whence.lab.agents.training import make_curve, make_model
from whence.lab.arms import read_presets
from whence.lab.efficiency import rounds_to
from whence.lab.kept_runs import read_rows, write_rows
from whence.lab.workers import run_all
from whence.runs import RunDirectory, lock_directory

LAKE = """
[[experiment]]
name = "lake"
env = "FrozenLake-v1"
env_kwargs = { desc = ["SFF", "FFF", "FHG"], is_slippery = true }
arms = ["ppo", "iif"]
seeds = 2
drop = [0.125, 1.0]
rounds = 2
eval_episodes = 4
hyperparameters = { n_steps = 64, batch_size = 32, n_epochs = 2, learning_rate = 0.01 }
"""


def write_sweep(folder, text):
    path = folder / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return path


def read_curves(out, kind="curves"):
    """The rows of a sweep's results, or of its timings, as JSON, by the names of their runs."""
    rows = read_rows(out / f"{kind}.parquet", KEYS)
    return {"{}/{}/seed_{}".format(*key): json.dumps(row, sort_keys=True) for key, row in rows.items()}


def edit_lines(out, kind, edit):
    """Replace the rows of a sweep's results or timings by what `edit(name, row)` returns: a row or None."""
    rows = [edit(name, json.loads(text)) for name, text in read_curves(out, kind).items()]
    write_rows(out / f"{kind}.parquet", [row for row in rows if row is not None])


def edit_run(out, kind, name, edit):
    """Let `edit(line)` change one run's line, or return what replaces it."""

    def edit_one(run, line):
        return line if run != name or (replaced := edit(line)) is None else replaced

    edit_lines(out, kind, edit_one)


def delete_runs(out, *names):
    for kind in ("curves", "timings"):
        edit_lines(out, kind, lambda name, line: None if name in names else line)


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory):
    """A sweep that nothing befell. Its runs are made in this process; others are held against them."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "run_all", run_one_by_one)
        assert run_sweep(read_sweep(write_sweep(folder, LAKE)), folder / "out", Recorder()) == {}
    return folder / "out"


@pytest.fixture
def planned(tmp_path):
    """The runs of the sweep's file."""
    return read_sweep(write_sweep(tmp_path, LAKE))


@pytest.fixture
def in_process(monkeypatch):
    """Run in this process, one after another."""
    monkeypatch.setattr(cluster, "run_all", run_one_by_one)


@pytest.fixture
def sweep_copy(finished_sweep, tmp_path):
    """A copy of the finished sweep, to be changed."""
    return copy_signed(finished_sweep, tmp_path / "copy")


class TestReading:
    def test_runs_are_arms_times_shares_times_seeds(self, planned):
        names = [f"lake/{label}/seed_{seed}" for seed in (0, 1) for label in ("ppo", "iif", "iif-drop1")]
        assert [run.name for run in planned] == names
        assert [run.config.drop for run in planned[:3]] == [0.125, 0.125, 1.0]
        assert {run.config.hyperparameters["n_steps"] for run in planned} == {64}

    def test_what_experiments_of_a_name_share_is_run_once(self, tmp_path):
        more = LAKE.replace('["ppo", "iif"]', '["ppo", "random"]').replace("seeds = 2", "seeds = [1, 7]")
        names = [run.name for run in read_sweep(write_sweep(tmp_path, LAKE + more))]
        assert len(names) == len(set(names))
        assert names[6:] == ["lake/random/seed_1", "lake/random-drop1/seed_1"] + [
            f"lake/{label}/seed_7" for label in ("ppo", "random", "random-drop1")
        ]

    def test_the_papers_sweep_is_sound(self):
        pytest.importorskip("Box2D")  # before EnvPool: see Pool.make
        pytest.importorskip("envpool")
        runs = read_sweep(Path(__file__).parents[2] / "results/paper/sweep.toml")
        assert len({run.name for run in runs}) == len(runs)
        labels = {run.label for run in runs if run.config.arm == "iif"}
        assert labels == {"iif", *(f"iif-drop{share}" for share in ("0.0625", "0.125", "0.25", "0.5", "1"))}

    @pytest.mark.parametrize(
        ("old", "new", "said"),
        [
            ('arms = ["ppo", "iif"]', 'arms = ["ppo", "iff"]', "The arm 'iff' is unknown. Did you mean iif"),
            ('arms = ["ppo", "iif"]', 'arms = ["iif"]', "lacks the arm 'ppo'"),
            ('arms = ["ppo", "iif"]', 'arms = [["ppo"]]', "arms is ['ppo']; text is needed"),
            ("seeds = 2", "seeds = [-1]", "seed is -1"),
            ("[0.125, 1.0]", '"half"', "drop is 'half'; a number or a list is needed"),
            ("rounds = 2", "round = 2", "An experiment has no 'round'. Did you mean rounds"),
            ('name = "lake"', 'name = "../lake"', "name is '../lake'"),
            ("seeds = 2", "seeds = 2\nwarmup = ", "cannot be read as TOML (Invalid value"),
            ("[[experiment]]", "[experiment]", "a list is needed"),
            ("[[experiment]]", "workers = 3\n[[experiment]]", "A sweep has no 'workers'"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_file(self, tmp_path, old, new, said):
        assert old in LAKE
        path = write_sweep(tmp_path, LAKE.replace(old, new))
        with pytest.raises(WhenceError, match=re.escape(said)) as refused:
            read_sweep(path)
        assert str(refused.value).startswith(str(path))

    def test_a_name_stands_for_one_share_of_its_own(self, tmp_path, monkeypatch):
        monkeypatch.setitem(read_presets(), "other", {**read_presets()["lda-code/frozenlake"], "drop": 0.25})
        asked = '[[experiment]]\nname = "lake"\npreset = "{}"\narms = ["ppo", "iif"]\nseeds = 1\n'
        file = write_sweep(tmp_path, asked.format("lda-code/frozenlake") + asked.format("other"))
        with pytest.raises(WhenceError, match=r"The name 'lake' .* differ in drop"):
            read_sweep(file)


class TestRunning:
    def test_it_leaves_curves_and_timings_and_nothing_else(self, finished_sweep):
        files = sorted(str(file.relative_to(finished_sweep)) for file in finished_sweep.rglob("*") if file.is_file())
        assert files == [".lock", "curves.parquet", "timings.parquet"]
        names = [f"lake/{label}/seed_{seed}" for label in ("iif", "iif-drop1", "ppo") for seed in (0, 1)]
        assert [*read_curves(finished_sweep)] == [*read_curves(finished_sweep, "timings")] == names
        line = json.loads(read_curves(finished_sweep)["lake/iif/seed_1"])
        assert (line["config"]["arm"], line["config"]["seed"]) == ("iif", 1)
        assert line["evaluations"]["round"] == [0, 1, 2]
        assert "seconds" not in line

    def test_finished_runs_are_skipped(self, finished_sweep, planned):
        before = {file: file.stat().st_mtime_ns for file in finished_sweep.glob("*.parquet")}
        assert len(before) == 2
        watch = Recorder()
        run_sweep(planned, finished_sweep, watch)
        assert len(watch.skipped) == 6
        assert watch.reports == []
        assert {file: file.stat().st_mtime_ns for file in finished_sweep.glob("*.parquet")} == before

    def test_a_curve_of_another_run_is_not_taken_for_this_one(self, finished_sweep, tmp_path):
        longer = read_sweep(write_sweep(tmp_path, LAKE.replace("rounds = 2", "rounds = 3")))
        with pytest.raises(RunDirectoryError, match="another run: rounds was 2, now 3"):
            run_sweep(longer, finished_sweep, Recorder())

    def test_a_sweep_has_its_directory_to_itself(self, finished_sweep, planned, tmp_path):
        with (
            lock_directory(finished_sweep),
            pytest.raises(RunDirectoryError, match=r"Another process is writing to .*out\. Wait"),
        ):
            run_sweep(planned, finished_sweep, Recorder())
        assert run_sweep(planned, finished_sweep, Recorder()) == {}
        with pytest.raises(RunDirectoryError, match=r"sweep\.toml cannot be written"):
            run_sweep(planned, tmp_path / "sweep.toml", Recorder())

    def test_what_is_no_whole_run_is_that_runs_failure(self, in_process, planned, tmp_path):
        ppo, iif = planned[:2]
        path = ppo.run_path(tmp_path / "out")
        with preserve_rng_state():
            run(ppo.config, path)
        evaluations = RunDirectory.open(path).table("evaluations")
        evaluations.with_columns(test_return=pl.lit(math.nan)).write_parquet(path / "evaluations.parquet")
        watch = Recorder()
        failures = run_sweep([ppo, iif], tmp_path / "out", watch)
        assert re.search(r"test returns are .*nan", failures[ppo.name])
        assert watch.ends == {**failures, iif.name: None}
        assert [*read_curves(tmp_path / "out")] == [*read_curves(tmp_path / "out", "timings")] == [iif.name]

    def test_killed_while_a_file_is_written_the_file_is_as_before(self, in_process, sweep_copy, planned, monkeypatch):
        delete_runs(sweep_copy, "lake/ppo/seed_1")
        before = read_curves(sweep_copy)

        def stop(source, target):
            if Path(target).name == "curves.parquet":  # which are written last
                raise KeyboardInterrupt
            replace_file(source, target)

        replace_file = os.replace
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            with pytest.raises(KeyboardInterrupt):
                run_sweep(planned, sweep_copy, Recorder())
        assert read_curves(sweep_copy) == before
        assert read_curves(sweep_copy, "timings").keys() == before.keys() | {"lake/ppo/seed_1"}
        assert run_sweep(planned, sweep_copy, Recorder()) == {}
        assert len(read_curves(sweep_copy)) == 6

    def test_a_run_directory_that_a_kill_left_is_discarded(self, sweep_copy, planned):
        path = planned[0].run_path(sweep_copy)
        RunDirectory.create(path, planned[0].config.to_json()).release()
        assert run_sweep(planned, sweep_copy, Recorder()) == {}
        assert not path.exists()

    def test_an_interrupted_run_goes_on_to_the_same_results(
        self, in_process, finished_sweep, sweep_copy, planned, caplog
    ):
        delete_runs(sweep_copy, planned[0].name)

        def interrupt(number, metrics):
            if number == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), preserve_rng_state():
            run(planned[0].config, planned[0].run_path(sweep_copy), interrupt)
        assert run_sweep(planned, sweep_copy, Recorder()) == {}
        assert "going on after round 1" in caplog.text
        assert read_curves(sweep_copy) == read_curves(finished_sweep)

    @pytest.mark.parametrize(
        "change",
        [
            lambda curve, timing: curve["evaluations"].update(test_return=[1.0, None, 1.0]),
            lambda curve, timing: timing["microseconds"].pop("scoring_cpu"),
            lambda curve, timing: curve.update(config=3),
            lambda curve, timing: curve["config"].update(rounds=10**15),
        ],
    )
    def test_a_curve_is_whole(self, sweep_copy, change):
        name = "lake/iif/seed_1"
        lines = [json.loads(read_curves(sweep_copy, kind)[name]) for kind in ("curves", "timings")]
        change(*lines)
        for kind, line in zip(("curves", "timings"), lines, strict=True):
            edit_run(sweep_copy, kind, name, lambda _, line=line: line)
        with pytest.raises(RunDirectoryError, match=r"curves\.parquet does not hold a whole run lake/iif/seed_1 \("):
            load_sweep(sweep_copy)

    def test_runs_of_a_name_that_differ_are_not_tabulated(self, sweep_copy):
        edit_run(sweep_copy, "curves", "lake/iif/seed_1", lambda line: line["config"].update(env_kwargs={}))
        with pytest.raises(RunDirectoryError, match=r"lake/iif/seed_1 in .*copy differs .* in env_kwargs"):
            load_sweep(sweep_copy)

    @pytest.mark.parametrize("kind", ["curves", "timings"])
    def test_a_damaged_file_is_named(self, sweep_copy, planned, kind):
        file = sweep_copy / f"{kind}.parquet"
        whole = pl.read_parquet(file)
        damaged = [file.read_bytes()[:-9], b"", whole.drop("seed")]
        for content in damaged:
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                content.write_parquet(file)
            for read in (load_sweep, lambda out: run_sweep(planned, out, Recorder())):
                with pytest.raises(RunDirectoryError, match=rf"{kind}\.parquet cannot be read"):
                    read(sweep_copy)

    @pytest.mark.parametrize(
        ("kind", "share"),
        [
            ("curves", 0.5),
            *(
                pytest.param(*case, marks=pytest.mark.long)
                for case in (("curves", 0), ("timings", 0), ("timings", 0.5))
            ),
        ],
    )
    def test_after_a_power_cut_the_runs_can_be_made_again(self, in_process, sweep_copy, planned, kind, share):
        delete_runs(sweep_copy, *(each.name for each in planned[1:]))
        before, file = read_curves(sweep_copy), sweep_copy / f"{kind}.parquet"
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
        files = "curves.parquet", "timings.parquet"
        with pytest.raises(RunDirectoryError, match=rf"{kind}\.parquet cannot .* delete {files[0]} and {files[1]}"):
            run_sweep(planned[:1], sweep_copy, Recorder())
        for name in files:
            (sweep_copy / name).unlink()
        assert run_sweep(planned[:1], sweep_copy, Recorder()) == {}
        assert read_curves(sweep_copy) == before
        assert load_sweep(sweep_copy)

    def test_a_run_is_deleted_when_its_rows_are_on_disk(self, in_process, planned, tmp_path, monkeypatch):
        events, replace, flush, remove = [], os.replace, atomic_files._flush, shutil.rmtree
        out = tmp_path / "out"

        def see_flush(path):
            flush(path)
            events.append(("flushed", path))

        def see_replace(source, target):
            replace(source, target)
            events.append(("renamed", Path(target)))

        monkeypatch.setattr(atomic_files, "_flush", see_flush)
        monkeypatch.setattr(os, "replace", see_replace)
        monkeypatch.setattr(shutil, "rmtree", lambda path, **rest: (events.append(("deleted", path)), remove(path)))
        assert run_sweep(planned[:1], out, Recorder()) == {}
        deleted = events.index(("deleted", planned[0].run_path(out)))
        for name in ("curves.parquet", "timings.parquet"):
            renamed = events.index(("renamed", out / name))
            assert any(event == "flushed" and name in path.name for event, path in events[:renamed])
            assert ("flushed", out) in events[renamed:deleted]

    def test_the_command_ends_with_one_where_a_run_failed(self, in_process, tmp_path):
        file = write_sweep(tmp_path, LAKE.replace("seeds = 2", "seeds = 1").replace("[0.125, 1.0]", "0.125"))
        (tmp_path / "out/runs/lake/iif/seed_0").mkdir(parents=True)
        (tmp_path / "out/runs/lake/iif/seed_0/mine").touch()  # somebody's own file: the run refuses to start
        command = ["sweep", str(file), "--out", str(tmp_path / "out"), "--json"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1
        assert list(json.loads(done.stdout)["failures"]) == ["lake/iif/seed_0"]
        assert "lake/ppo/seed_0: done in" in done.stderr
        (tmp_path / "out/runs/lake/iif/seed_0/mine").unlink()  # which is still there
        assert CliRunner().invoke(app, command).exit_code == 0

    def test_single_runs_are_made_again_to_the_byte(self, in_process, finished_sweep, tmp_path):
        # What stands in a sweep's directory can be checked from its file, run by run.
        names = "lake/iif/seed_1,lake/ppo"
        command = ["sweep", str(write_sweep(tmp_path, LAKE)), "--only", names, "--out", str(tmp_path / "out"), "--json"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        chosen = ["lake/ppo/seed_0", "lake/ppo/seed_1", "lake/iif/seed_1"]
        assert json.loads(done.stdout)["runs"] == chosen
        again, before = read_curves(tmp_path / "out"), read_curves(finished_sweep)
        assert again == {name: before[name] for name in sorted(chosen)}


class TestComparison:
    def test_all_settings_are_checked_before_anything_runs(self, tmp_path, monkeypatch):
        prepared = []

        def prepare(config):
            prepared.append(config.arm)
            if config.arm == "random":
                raise WhenceError("no such setting")

        runner = SimpleNamespace(prepare=prepare, is_finished=lambda config, path: config.arm == "iif")
        monkeypatch.setattr(comparison, "runner_of", lambda config: runner)
        monkeypatch.setattr(cluster, "run_all", lambda *_: pytest.fail("a run was started"))
        arms = ("ppo", "iif", "random")
        configs = [configure(env="FrozenLake-v1", arm=arm, seed=seed) for seed in (0, 1) for arm in arms]
        with pytest.raises(WhenceError, match="no such setting"):
            comparison.compare(configs, tmp_path / "out")
        assert prepared == ["ppo", "random"]  # each once, and none that is finished
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("arm", "rate"), [("ppo", 0.01), ("ppo-lr-0.5", 0.005), ("ppo-lr-4", 0.04)])
def test_learning_rates_are_scaled(tmp_path, arm, rate):
    config = configure(env="FrozenLake-v1", arm=arm, hyperparameters={"learning_rate": 0.01})
    assert make_model(config, make_training_env(config)).learning_rate == rate
    default = configure(env="FrozenLake-v1", arm=arm)
    assert make_model(default, make_training_env(default)).learning_rate == pytest.approx(3e-4 * rate / 0.01)


def start_comparison(path):
    comparison.compare(plan_comparison(env="FrozenLake-v1", arms=["ppo"], seeds=1, rounds=1), path, overwrite=True)


def start_sweep(path):
    run_sweep(read_sweep(write_sweep(path.parent, LAKE)), path, Recorder())


def start_run(path):
    RunDirectory.create(path, {"rounds": 1}, shared=True, overwrite=True)  # as TRL's trainers do in their output_dir


STARTS = {"run": start_run, "comparison": start_comparison, "sweep": start_sweep}
PLACES = [
    ("", "run"),
    ("runs/ppo/seed_0", "comparison"),
    ("comparison.json", "comparison"),
    ("runs/lake/ppo/seed_0", "sweep"),
    ("curves.parquet", "sweep"),
]


@pytest.mark.parametrize(
    ("wanted", "place", "content"),
    [(wanted, place, content) for wanted in STARTS for place, content in PLACES if content != wanted],
)
def test_a_directory_that_holds_something_else_is_refused_at_the_door(tmp_path, monkeypatch, wanted, place, content):
    monkeypatch.setattr(cluster, "run_all", lambda *_: pytest.fail("a run was started"))
    path = tmp_path / "taken"
    file = path / place
    if file.suffix:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("[]")
    else:
        RunDirectory.create(file, {"env": "FrozenLake-v1"}).release()
    before = sorted(path.rglob("*"))
    with pytest.raises(RunDirectoryError, match=f"taken holds a {content}, and a {wanted} needs"):
        STARTS[wanted](path)
    assert sorted(path.rglob("*")) == before


KILLED = "its process was ended by SIGKILL, perhaps for want of memory: try fewer workers"


class TestWorkers:
    def test_one_that_is_killed_is_reported(self, monkeypatch):
        monkeypatch.setattr(workers, "_work", report_and_die)
        reports = []
        (found,) = run_all([("a run", "its directory")], 1, lambda *report: reports.append(report))
        assert reports == [(0, 1)]
        assert found == (0, KILLED)

    @pytest.mark.long
    def test_one_that_is_killed_in_mid_run_is_reported(self, tmp_path):
        long_run = configure(env="FrozenLake-v1", arm="ppo", rounds=40, eval_episodes=2), tmp_path / "run"

        def kill():
            while not (long_run[1] / "metrics.parquet").exists():  # in mid-run
                time.sleep(0.01)
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid, signal.SIGKILL)

        killing = threading.Thread(target=kill, daemon=True)  # lest a run that fails at once waits for ever
        killing.start()
        (found,) = run_all([long_run], 1, lambda *_: None)
        killing.join()
        assert found == (0, KILLED)

    @pytest.fixture
    def work(self, monkeypatch):
        """A worker's work, in this process: what it sends for a run whose `run` is replaced."""
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(logging.getLogger("whence"), "setLevel", lambda level: None)

        def work(path, run):
            monkeypatch.setattr(workers, "runner_of", lambda config: SimpleNamespace(run=run))
            receiver, sender = multiprocessing.Pipe(duplex=False)
            workers._work(sender, configure(env="FrozenLake-v1", arm="ppo"), path)
            return receiver.recv()

        return work

    def test_a_failure_is_a_sentence_and_its_traceback_a_file_until_the_run_succeeds(self, work, tmp_path):
        def fail(config, path, on_round):
            raise ZeroDivisionError("no records")

        file = tmp_path / "run.error.txt"
        assert work(tmp_path / "run", fail) == ("ended", f"ZeroDivisionError: no records (traceback: {file})")
        assert "in fail" in file.read_text()
        assert work(tmp_path / "run", lambda *_: None) == ("ended", None)
        assert not file.exists()

    @pytest.mark.long
    def test_ctrl_c_does_not_reach_them(self, tmp_path):
        def interrupt(*_):
            while not (workers := multiprocessing.active_children()):
                time.sleep(0.01)
            os.kill(workers[0].pid, signal.SIGINT)  # as a terminal does to all

        job = configure(env="FrozenLake-v1", arm="ppo", rounds=1, eval_episodes=2), tmp_path / "run"
        starting = threading.Thread(target=interrupt)
        starting.start()
        assert [*run_all([job], 1, interrupt)] == [(0, None)]
        starting.join()


def test_rounds_between_evaluations_reach_nothing():
    config = configure(env="CartPole-v1", rounds=3, eval_episodes=2, eval_every=2)
    evaluations = pl.DataFrame({"round": [0, 2, 3], "test_return": [9.0, 5.0, 7.0], "standard_error": [1.0, 2.0, 3.0]})
    timings = pl.DataFrame({f"{stage}_cpu": [1.0] * 3 for stage in ("collection", "scoring", "optimisation")})
    found = make_curve(config, evaluations, timings)
    assert found.returns.tolist() == [9.0, 9.0, 5.0, 7.0]
    assert found.evaluations.tolist() == [2, 3]
    assert rounds_to(found, 6.0) == 3
