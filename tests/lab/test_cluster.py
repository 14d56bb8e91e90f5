"""Runs on a Ray cluster: what a node sends, what home makes of it, and a node that is killed midway."""

import importlib.util
import json
import logging
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.resuming import contents
from whence.core import RunDirectoryError, Unsupported, WhenceError, preserve_rng_state
from whence.lab import cluster, comparison, read_sweep, run_sweep, runner_of
from whence.lab.agents import configure, run
from whence.lab.cluster import RETRIES, apply_changes, check_start, list_files, read_files, train_on_node
from whence.runs import RunDirectory
from whence.stored.language import LanguageConfig


@pytest.fixture
def folder(tmp_path):
    """A directory with three files, and two that are not sent."""
    path = tmp_path / "node"
    apply_changes(path, {"config.json": b"{}", "records/round_1": b"one", "records/round_2": b"two"}, [])
    for name in (".lock", "records/.round_3.17.tmp"):
        (path / name).touch()
    return path


def read_all(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class TestFiles:
    def test_what_changed_is_put_in_place_and_nothing_else(self, folder, tmp_path):
        home = tmp_path / "home"
        apply_changes(home, read_files(folder, list_files(folder)), [])
        assert read_all(home) == {"config.json": b"{}", "records/round_1": b"one", "records/round_2": b"two"}
        inode = (home / "config.json").stat().st_ino
        os.link(home / "records" / "round_2", tmp_path / "other")
        apply_changes(home, {"records/round_2": b"more"}, ["records/round_1"])
        assert read_all(home) == {"config.json": b"{}", "records/round_2": b"more"}
        assert (home / "config.json").stat().st_ino == inode
        assert (tmp_path / "other").read_text() == "two"
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.fixture
def job(tmp_path):
    hyperparameters = {"n_steps": 64, "batch_size": 32, "n_epochs": 1}
    config = configure(env="FrozenLake-v1", arm="iif", rounds=4, eval_episodes=2, hyperparameters=hyperparameters)
    return config, tmp_path / "runs" / "seed_0"


@pytest.fixture(autouse=True)
def _this_process_is_a_node(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(logging.getLogger("whence"), "setLevel", lambda level: None)
    monkeypatch.setattr(cluster, "_make_queue", lambda ray: ray.queue)


class RayError(Exception):
    pass


class Lost(RayError):
    pass


class FakeQueue(list):
    """Events that wait; `put` loses the node once a round is reported that is among `losses`."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    def put(self, event):
        self.append(event)
        if event[1] == "round" and self.losses and event[2] == self.losses[0]:
            del self.losses[0]
            raise KeyboardInterrupt

    def qsize(self):
        return len(self)

    def get_nowait_batch(self, count):
        events, self[:count] = self[:count], []
        return events


class FakeRay:
    """What is used of Ray: a cluster of this process alone, where a task runs as it is submitted.

    Args:
        task: called in place of `train_on_node`; None: that itself.
        losses: rounds after which a run loses its node, one after the other.
        resources: of the cluster.
    """

    def __init__(self, task=None, losses=(), resources=None):
        self.queue, self.task, self.calls = FakeQueue([*losses]), task or train_on_node, []
        self.resources = resources or {"CPU": 2.0}
        names = ("WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "ObjectLostError")
        self.exceptions = SimpleNamespace(RayError=RayError, **dict.fromkeys(names, Lost))
        self.most = 0

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return self.resources

    def remote(self, *job, **settings):
        if not job or job[0] is train_on_node:
            return lambda function: self
        self.calls.append(job)
        try:
            with preserve_rng_state():
                result = self.task(*job)
        except KeyboardInterrupt:
            result = Lost()
        except RayError as failure:
            result = failure
        self.most += 1
        return result, self.most

    def options(self, **settings):
        self.settings = settings
        return self

    def wait(self, tasks, num_returns=1, timeout=None):
        return tasks[:1], tasks[1:]

    def get(self, task):
        if isinstance(task[0], Exception):
            raise task[0]
        return task[0]

    def cancel(self, task, force):
        self.calls.append(force)


@pytest.fixture
def dispatch(job):
    def dispatch(ray, on_round=lambda place, rounds: None, jobs=(job,)):
        return cluster._Dispatch(ray, jobs, None, on_round).run()

    return dispatch


class TestDispatch:
    @pytest.mark.parametrize("save_seconds", [0.0, pytest.param(60.0, marks=pytest.mark.long)])
    def test_a_run_that_lost_its_node_ends_with_the_same_bits(self, dispatch, job, tmp_path, monkeypatch, save_seconds):
        monkeypatch.setattr(cluster, "SAVE_SECONDS", save_seconds)
        with preserve_rng_state():
            run(job[0], tmp_path / "here")
        ray, rounds = FakeRay(losses=[1, 3]), []
        assert [*dispatch(ray, on_round=lambda place, count: rounds.append(count))] == [(0, None)]
        start = rounds[6]
        assert rounds == [0, 1, 0, 1, 2, 3, *range(start, 5)]  # the first loss was before any checkpoint
        assert (start > 0) == (save_seconds == 0)
        assert contents(job[1]) == contents(tmp_path / "here")
        assert RunDirectory.open(job[1]).is_trusted
        assert [*dispatch(FakeRay(), on_round=lambda place, count: rounds.append(count))] == [(0, None)]
        assert rounds[-2:] == [4, 4]  # a finished run is not repeated

    @pytest.mark.usefixtures("laboratory_cache")
    def test_a_language_models_run_comes_home_as_if_it_had_been_made_there(self, dispatch, tmp_path):
        settings = {"rounds": 1, "batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 1}
        config = LanguageConfig("iif", 0, task="arithmetic", size="tiny", test_problems=8, samples=2, settings=settings)
        with preserve_rng_state():
            runner_of(config).run(config, tmp_path / "here", lambda *_: None)
        assert [*dispatch(FakeRay(), jobs=[(config, tmp_path / "there")])] == [(0, None)]
        assert contents(tmp_path / "there") == contents(tmp_path / "here")

    def test_it_is_given_up_in_the_end(self, dispatch):
        ray = FakeRay(losses=[0] * (RETRIES + 1))
        ((_, message),) = dispatch(ray)
        assert "its node or its process was lost 4 times (Lost)" in message
        assert len(ray.calls) == RETRIES + 1

    def test_a_node_that_counts_as_lost_is_not_listened_to(self, dispatch, job):
        def send_late(queue, sender, *_):
            if sender == (0, 0):
                return Lost()
            return queue.append(((0, 0), "files", {"late": b""}, []))

        assert [*dispatch(FakeRay(send_late))] == [(0, None)]
        assert not job[1].exists()

    @pytest.mark.parametrize(
        ("failure", "message"),
        [
            (RunDirectoryError("HERE is no run"), "HOME is no run"),
            (ZeroDivisionError("odd"), "ZeroDivisionError: odd"),
            (SystemExit(3), "SystemExit: 3"),
        ],
    )
    def test_the_runs_own_failure_is_reported_and_not_repeated(self, dispatch, job, monkeypatch, failure, message):
        def fail(config, path, on_round):
            path.mkdir(exist_ok=True)
            (path / "begun").touch()
            failure.args = tuple(str(each).replace("HERE", str(path)) for each in failure.args)
            raise failure

        monkeypatch.setattr(cluster, "runner_of", lambda config: SimpleNamespace(run=fail))
        ray, file = FakeRay(), job[1].with_name("seed_0.error.txt")
        assert [*dispatch(ray)] == [(0, f"{message.replace('HOME', str(job[1]))} (traceback: {file})")]
        assert "in fail" in file.read_text()
        assert len(ray.calls) == 1
        assert (job[1] / "begun").exists()

    def test_what_ray_cannot_run_is_reported_at_once(self, dispatch):
        def refuse(*_):
            raise RayError("The task failed\nModuleNotFoundError: No module named 'whence'")

        ((_, message),) = dispatch(FakeRay(refuse))
        assert message.startswith("Ray could not run it: ModuleNotFoundError: No module named 'whence' (traceback: ")

    def test_runs_under_way_are_ended_when_the_caller_breaks_off(self, dispatch, job):
        def interrupt(place, rounds):
            raise KeyboardInterrupt

        ray = FakeRay(lambda queue, sender, *_: queue.put((sender, "round", 0)))
        with pytest.raises(KeyboardInterrupt):
            next(dispatch(ray, on_round=interrupt))
        assert ray.calls[1:] == [False, True]

    def test_a_gpu_is_asked_for_where_one_is_needed(self, dispatch, job, caplog):
        language = LanguageConfig("ppo", 0, task="arithmetic")
        on_gpu, on_cpu = replace(job[0], device="cuda"), replace(language, settings={"use_cpu": True})
        for gpus, expected in ((0.0, (0, 1, 0, 0)), (2.0, (0, 1, 1, 0))):
            for config, count in zip((job[0], on_gpu, language, on_cpu), expected, strict=True):
                ray = FakeRay(lambda *_: None, resources={"GPU": gpus})
                assert [*dispatch(ray, jobs=[(config, job[1])])] == [(0, None)]
                assert ray.settings["num_gpus"] == count
        (message,) = caplog.messages
        assert "needs a GPU, and waits until a node with one joins" in message


SWEEP = '[[experiment]]\nname = "lake"\nenv = "FrozenLake-v1"\narms = ["ppo"]\nseeds = 1\n'


class TestConnecting:
    @pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", "127.0.0.1:99999", "127.0.0.1:1"])
    def test_nothing_is_deleted_where_there_is_no_cluster(self, job, tmp_path, monkeypatch, address):
        pytest.importorskip("ray")
        monkeypatch.setenv("RAY_ADDRESS", address)
        config = replace(job[0], arm="ppo")
        path = comparison.run_path(tmp_path, config)
        RunDirectory.create(path, config.to_json()).release()
        (tmp_path / "lake.toml").write_text(SWEEP)
        (planned,) = read_sweep(tmp_path / "lake.toml")
        other = planned.run_path(tmp_path / "out")
        RunDirectory.create(other, {**planned.config.to_json(), "rounds": 99}).release()
        before = read_all(path), read_all(other)
        with pytest.raises(WhenceError, match=f"No Ray cluster at RAY_ADDRESS={address} lets this process in"):
            comparison.compare([config], tmp_path, overwrite=True, on="ray")
        with pytest.raises(WhenceError, match="Ray uses this machine alone"):
            run_sweep([planned], tmp_path / "out", None, on="ray")
        assert (read_all(path), read_all(other)) == before

    def test_ray_that_is_not_installed(self, monkeypatch, tmp_path):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(Unsupported, match=r"needs Ray, which is not installed: .* pip install '\.\[ray\]'"):
            run_sweep([], tmp_path / "out", None, on="ray")
        assert not (tmp_path / "out").exists()
        check_start(None, "local")

    def test_what_ray_prints_is_no_part_of_the_json(self, whence, monkeypatch, tmp_path):
        def print_and_fail(jobs, workers, on, on_round):
            print("(raylet) A node has been marked dead.")
            return nullcontext((place, "no node") for place in range(len(jobs)))

        monkeypatch.setattr(sys.modules["whence.lab.comparison"], "start_jobs", print_and_fail)
        (tmp_path / "lake.toml").write_text(SWEEP)
        _, out, err = whence("sweep", tmp_path / "lake.toml", "--on", "ray", "--out", tmp_path / "out", "--json")
        assert "marked dead" in err
        assert json.loads(out)["failures"] == {"lake/ppo/seed_0": "no node"}


@pytest.mark.long
def test_a_sweep_over_two_nodes_one_of_which_is_killed(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from studies.cluster import run as study

    monkeypatch.undo()  # of what makes this process a node
    monkeypatch.setattr(cluster, "SAVE_SECONDS", 0.0)
    file = tmp_path / "sweep.toml"
    file.write_text(study.SWEEP.format(seeds=1, rounds=12))
    runs = [planned for planned in read_sweep(file) if planned.label != "mean"]
    with study.start_cluster(2) as (ray_cluster, nodes):
        watch = study.Killer(ray_cluster, nodes, after=0, rounds=4)
        assert run_sweep(runs, tmp_path / "ray", watch, on="ray") == {}
    assert watch.killed is not None
    ((name, (done, start)),) = watch.starts.items()
    assert 0 < start <= done < 12, name
    study.run_here(runs, tmp_path / "local")
    assert study.read_lines(tmp_path / "ray") == study.read_lines(tmp_path / "local")
    assert len(study.read_lines(tmp_path / "ray")) == len(runs)
    assert not (tmp_path / "ray" / "runs" / "lake" / "iif" / "seed_0").exists()
