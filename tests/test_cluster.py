"""Runs on a Ray cluster: what nodes send, what home makes of it, and a node that is killed midway."""

import errno
import importlib.util
import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from whence import cli
from whence.errors import RunDirectoryError, Unsupported, WhenceError
from whence.experiments import (
    LanguageConfig,
    cluster,
    comparison,
    configure,
    is_finished,
    node,
    parcels,
    read_sweep,
    run,
    run_sweep,
)
from whence.experiments.cluster import RETRIES, check_address, check_place
from whence.experiments.llm import training
from whence.experiments.node import list_versions, make_scratch_folder, train_on_node
from whence.experiments.parcels import apply_changes, list_files, pack_changes, pack_files, unpack_files
from whence.guards import preserve_rng_state
from whence.runs import RunDirectory
from whence.runs.checkpoints import checkpoint_path
from whence.runs.files import lock_directory

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path):
    """A directory with three files, and two that are not sent."""
    path = tmp_path / "node"
    for name, text in {"config.json": "{}", "records/round_1": "one", "records/round_2": "two"}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    (path / ".lock").touch()
    (path / "records" / ".round_3.17.tmp").write_text("half")
    return path


def read_all(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


SENT = {"config.json": b"{}", "records/round_1": b"one", "records/round_2": b"two"}


class TestParcels:
    def test_a_directory_arrives_without_its_lock_and_what_is_half_written(self, folder, tmp_path):
        unpack_files(pack_files(folder, list_files(folder)), tmp_path / "home")
        assert read_all(tmp_path / "home") == SENT

    def test_only_what_changed_is_sent(self, folder, tmp_path):
        stamps, archive, removed = pack_changes(folder, {})
        assert removed == []
        home = tmp_path / "home"
        apply_changes(home, archive, removed)
        inode = (home / "config.json").stat().st_ino
        (folder / "records" / "round_1").unlink()
        (folder / "records" / "round_2").write_text("more")
        _, archive, removed = pack_changes(folder, stamps)
        assert zipfile.ZipFile(io.BytesIO(archive)).namelist() == ["records/round_2"]
        assert removed == ["records/round_1"]
        apply_changes(home, archive, removed)
        assert read_all(home) == {"config.json": b"{}", "records/round_2": b"more"}
        assert (home / "config.json").stat().st_ino == inode
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    def test_a_file_system_without_links_gets_copies(self, folder, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        apply_changes(folder, pack_files(tmp_path, []), [])
        assert read_all(folder) == SENT

    def test_a_file_that_is_linked_is_replaced_and_not_written_into(self, folder, tmp_path):
        os.link(folder / "config.json", tmp_path / "other")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "config.json").write_text("changed")
        unpack_files(pack_files(tmp_path / "new", ["config.json"]), folder)
        assert (tmp_path / "other").read_text() == "{}"

    @pytest.mark.parametrize("name", ["../stolen", "/tmp/whence-stolen", "records/../../stolen", "."])
    def test_a_file_whose_place_is_outside_is_refused(self, folder, name):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr(name, "")
        with pytest.raises(RunDirectoryError, match="whose place is outside of it"):
            unpack_files(content.getvalue(), folder)
        assert not (folder.parent / "stolen").exists()

    def test_damage_leaves_the_old_directory(self, folder, tmp_path):
        damaged = pack_files(folder, list_files(folder)).replace(b"one", b"eno")
        home = tmp_path / "home"
        shutil.copytree(folder, home)
        before = read_all(home)
        with pytest.raises(RunDirectoryError, match="is damaged"):
            apply_changes(home, damaged, ["config.json"])
        assert read_all(home) == before
        apply_changes(home, pack_files(folder, list_files(folder)), [])  # what is left of the first is no obstacle
        assert read_all(home) == SENT

    def test_a_full_disk_is_explained(self, folder, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(parcels, "unpack_files", refuse)
        with pytest.raises(RunDirectoryError, match="home cannot be written: No space left on device"):
            apply_changes(tmp_path / "home", b"", [])


@pytest.fixture
def job(tmp_path):
    config = configure(
        env="FrozenLake-v1",
        arm="iif",
        rounds=4,
        eval_episodes=2,
        hyperparameters={"n_steps": 64, "batch_size": 32, "n_epochs": 1},
    )
    return config, tmp_path / "runs" / "seed_0"


@pytest.fixture
def on_node(monkeypatch, tmp_path):
    """Let this process be a node."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(logging.getLogger("whence"), "setLevel", lambda level: None)
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))

    def start(job, *, files=None, versions=None, save_seconds=60.0):
        config, home = job
        return train_on_node(config.to_json(), str(home), files, versions or list_versions(), save_seconds)

    return start


def results(path):
    """What a run holds, without what differs between equal runs; checkpoints are written as time allows."""
    others = ("timings.parquet", ".lock")
    return {name: text for name, text in read_all(path).items() if name not in others and "checkpoints" not in name}


EXITS = (3, 3), (None, 0), ("no display", 1)
"""What sys.exit() is called with, and the exit code that a process has then."""


class TestNode:
    def test_a_run_comes_home_as_if_it_had_been_made_there(self, on_node, job, tmp_path):
        with preserve_rng_state():
            run(job[0], tmp_path / "here")
        *rounds, files, end = on_node(job)
        assert rounds == [("round", number, None) for number in range(5)]
        assert end == ("ended", None, "")
        apply_changes(job[1], *files[1:])
        assert is_finished(*job)
        assert results(job[1]) == results(tmp_path / "here")
        assert [path for path in (tmp_path / f"whence-{os.getuid()}").iterdir() if path.is_dir()] == []

    def test_a_language_models_run_comes_home_as_if_it_had_been_made_there(self, on_node, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        settings = {"rounds": 2, "batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 1}
        config = LanguageConfig("iif", 0, task="arithmetic", size="tiny", test_problems=8, samples=2, settings=settings)
        job = config, tmp_path / "runs" / "seed_0"
        with preserve_rng_state():
            training.run(config, tmp_path / "here")
        *_, files, end = on_node(job)
        assert end == ("ended", None, "")
        apply_changes(job[1], *files[1:])
        assert training.is_finished(*job)
        assert results(job[1]) == results(tmp_path / "here")

    def test_a_lost_run_goes_on_from_its_last_copy(self, on_node, job, tmp_path):
        with preserve_rng_state():
            run(job[0], tmp_path / "here")
        events = on_node(job, save_seconds=0.0)
        for kind, content, more in events:
            if kind == "files":
                apply_changes(job[1], content, more)
            elif content == 3:
                break
        events.close()
        assert not is_finished(*job)
        files = pack_files(job[1], list_files(job[1]))
        again = [*on_node(job, files=files)]
        assert again[0][:2] in (("round", 1), ("round", 2))
        apply_changes(job[1], *again[-2][1:])
        assert results(job[1]) == results(tmp_path / "here")

    def test_a_failure_is_told_with_homes_path(self, on_node, job, monkeypatch):
        def fail(config, path, on_round):
            path.mkdir()
            (path / "begun").touch()
            raise RunDirectoryError(f"{path} is no run")

        monkeypatch.setattr(node, "runner_of", lambda config: SimpleNamespace(run=fail))
        files, (kind, message, text) = on_node(job)
        assert files[0] == "files"
        assert (kind, message) == ("ended", f"{job[1]} is no run")
        assert "in fail" in text

    @pytest.mark.parametrize(
        ("failure", "message"),
        [
            *((SystemExit(code), f"exit code {number} before the run did") for code, number in EXITS),
            (GeneratorExit("odd"), "GeneratorExit: odd"),
        ],
    )
    def test_a_run_that_ends_its_process_is_reported(self, on_node, job, monkeypatch, failure, message):
        def end(config, path, on_round):
            on_round(0, {})
            raise failure

        monkeypatch.setattr(node, "runner_of", lambda config: SimpleNamespace(run=end))
        started, (kind, reason, text) = on_node(job)
        assert started == ("round", 0, None)
        assert kind == "ended"
        assert reason.endswith(message)
        assert "in end" in text

    def test_another_version_is_refused(self, on_node, job):
        ((kind, message, _),) = on_node(job, versions={**list_versions(), "torch": "1.0"})
        assert kind == "ended"
        assert f"has torch {torch.__version__.partition('+')[0]}" in message
        assert "has 1.0. Install the same on both." in message

    def test_what_a_killed_process_left_is_removed_and_nothing_else(self, tmp_path, monkeypatch):
        monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))
        with make_scratch_folder() as first:
            left = first.with_name("left")
            left.mkdir()
            (left / ".lock").touch()
            with make_scratch_folder() as second:
                assert first.exists()
                assert not left.exists()
            assert not second.exists()


class RayError(Exception):
    pass


class Lost(RayError):
    pass


class FakeRay:
    """What is used of Ray, in this process: each run's events are those of the next script for its place."""

    def __init__(self, scripts):
        self.scripts, self.inputs, self.cancelled, self.most = scripts, [], [], 0
        names = ("WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "ObjectLostError", "LocalRayletDiedError")
        self.exceptions = SimpleNamespace(RayError=RayError, **dict.fromkeys(names, Lost))

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 2.0}

    def options(self, **settings):
        return self

    def remote(self, settings, home, files, versions, save_seconds):
        self.inputs.append((home, files))
        return iter(self.scripts[Path(home).name].pop(0))

    def wait(self, streams, num_returns=1, timeout=None):
        self.most = max(self.most, len(streams))
        return streams[:1], streams[1:]

    def get(self, event):
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self, stream, force):
        self.cancelled.append((stream, force))


@pytest.fixture
def dispatch(job, tmp_path):
    """Dispatch runs by names and scripts to a fake of Ray; returns it and what is yielded."""

    def dispatch(workers=None, on_round=lambda place, rounds: None, **scripts):
        ray = FakeRay(scripts)
        jobs = [(job[0], tmp_path / "runs" / name) for name in scripts]
        return ray, cluster._Dispatch(ray, ray, jobs, workers, on_round).run()

    return dispatch


DONE = ("ended", None, "")
SWEEP = """
[[experiment]]
name = "lake"
env = "FrozenLake-v1"
arms = ["ppo"]
seeds = 1
"""


class TestDispatch:
    def test_a_lost_run_is_handed_out_again_with_the_files_that_came_home(self, dispatch, folder, tmp_path):
        checkpoint_path(folder, 1).parent.mkdir()
        checkpoint_path(folder, 1).touch()
        archive = pack_files(folder, ["records/round_1", "checkpoints/round_00001.safetensors"])
        ray, ends = dispatch(one=[[("files", archive, []), Lost()], [DONE]])
        assert [*ends] == [(0, None)]
        (_, first), (home, second) = ray.inputs
        assert first is None
        assert home == str(tmp_path / "runs" / "one")
        assert set(zipfile.ZipFile(io.BytesIO(second)).namelist()) == {
            "records/round_1",
            "checkpoints/round_00001.safetensors",
        }

    @pytest.mark.parametrize("checkpoint", [None, "checkpoints/round_00001.safetensors", "trl/checkpoint-2/state"])
    def test_a_lost_run_starts_anew_without_a_checkpoint(self, dispatch, folder, tmp_path, checkpoint):
        names = ["records/round_1"]
        if checkpoint is not None:
            (folder / checkpoint).parent.mkdir(parents=True)
            (folder / checkpoint).touch()
            names.append(checkpoint)
        again = ("files", pack_files(folder, ["records/round_2"]), [])
        ray, ends = dispatch(one=[[("files", pack_files(folder, names), []), Lost()], [again, Lost()], [DONE]])
        assert [*ends] == [(0, None)]
        inputs = [None if files is None else zipfile.ZipFile(io.BytesIO(files)).namelist() for _, files in ray.inputs]
        if checkpoint is None:
            assert inputs == [None, None, None]
            assert list((tmp_path / "runs").iterdir()) == []
        else:
            assert inputs[0] is None
            assert list(map(sorted, inputs[1:])) == [sorted(names), sorted([*names, "records/round_2"])]

    def test_a_lost_run_keeps_rounds_that_were_there_before(self, dispatch, folder, tmp_path):
        shutil.copytree(folder, tmp_path / "runs" / "one")
        (tmp_path / "runs" / "one" / "config.json").unlink()
        ray, ends = dispatch(one=[[Lost()], [DONE]])
        assert [*ends] == [(0, None)]
        first, second = (files for _, files in ray.inputs)
        assert first == second is not None

    @pytest.mark.parametrize("loss", [[Lost()], []])
    def test_it_is_given_up_in_the_end(self, dispatch, loss):
        ray, ends = dispatch(one=[loss] * (RETRIES + 1), two=[[DONE]])
        ends = dict(ends)
        assert ends[1] is None
        assert "its node or its process was lost 4 times" in ends[0]
        assert len(ray.inputs) == RETRIES + 2

    def test_what_ray_cannot_run_is_reported_at_once(self, dispatch):
        ray, ends = dispatch(one=[[RayError("The task failed\nModuleNotFoundError: No module named 'whence'")]])
        ((place, message),) = ends
        assert place == 0
        assert message.startswith("Ray could not run it: ModuleNotFoundError: No module named 'whence' (traceback: ")
        assert len(ray.inputs) == 1

    def test_the_runs_own_failure_is_reported_and_not_repeated(self, dispatch, tmp_path):
        file = tmp_path / "runs" / "one.error.txt"
        ray, ends = dispatch(one=[[("ended", "It diverged.", "Traceback: here")]])
        assert [*ends] == [(0, f"It diverged. (traceback: {file})")]
        assert file.read_text() == "Traceback: here"
        assert len(ray.inputs) == 1
        _, ends = dispatch(one=[[DONE]])
        assert [*ends] == [(0, None)]
        assert not file.exists()

    def test_files_that_cannot_be_written_end_that_run_alone(self, dispatch):
        ray, ends = dispatch(one=[[("files", b"no archive", []), Lost()]], two=[[DONE]])
        ends = dict(ends)
        assert "is damaged" in ends[0]
        assert ends[1] is None
        assert [force for _, force in ray.cancelled] == [False]

    def test_rounds_are_reported_and_workers_are_a_limit(self, dispatch):
        calls = []
        scripts = {name: [[("round", 0, None), ("round", 1, None), DONE]] for name in "abc"}
        ray, ends = dispatch(1, lambda *call: calls.append(call), **scripts)
        assert [*ends] == [(0, None), (1, None), (2, None)]
        assert calls == [(place, rounds) for place in range(3) for rounds in range(2)]
        assert ray.most == 1

    def test_a_finished_run_is_not_handed_out(self, dispatch, job, tmp_path):
        with preserve_rng_state():
            run(job[0], tmp_path / "runs" / "one")
        calls = []
        ray, ends = dispatch(None, lambda *call: calls.append(call), one=[])
        assert [*ends] == [(0, None)]
        assert calls == [(0, job[0].rounds)]
        assert ray.inputs == []

    def test_a_directory_of_something_else_is_reported(self, dispatch, tmp_path):
        RunDirectory.create(tmp_path / "runs" / "one", {"env": "CartPole-v1"}).release()
        ray, ends = dispatch(one=[])
        ((_, message),) = ends
        assert "holds a run of another configuration" in message
        assert ray.inputs == []

    def test_runs_under_way_are_cancelled_when_the_caller_breaks_off(self, dispatch):
        def interrupt(place, rounds):
            raise KeyboardInterrupt

        ray, ends = dispatch(None, interrupt, one=[[("round", 0, None), Lost()]], two=[[Lost()]])
        with pytest.raises(KeyboardInterrupt):
            next(ends)
        assert [force for _, force in ray.cancelled] == [False, False]


class FakeCluster(FakeRay):
    """A Ray that this process connects to, and what it calls, in order.

    Args:
        resources: of the cluster.
        connected: whether this process is connected to it already.
        scripts: see `FakeRay`.
    """

    def __init__(self, resources, *, connected=False, **scripts):
        super().__init__(scripts)
        self.resources, self.connected, self.calls = resources, connected, []

    def is_initialized(self):
        return self.connected

    def init(self, *address, **settings):
        self.calls.append("init")
        self.connected = True

    def shutdown(self):
        self.calls.append("shutdown")
        self.connected = False

    def cluster_resources(self):
        return self.resources

    def remote(self, *job, **settings):
        return super().remote(*job) if job else lambda function: self

    def cancel(self, stream, force):
        self.calls.append("cancel")
        super().cancel(stream, force)


@pytest.fixture
def join(monkeypatch):
    """Put a fake in the place of Ray, at an address or started here."""
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def join(ray, address):
        os.environ["RAY_ADDRESS"] = address
        monkeypatch.setitem(sys.modules, "ray", ray)

    for module in (comparison, sys.modules["whence.experiments.sweep"]):
        monkeypatch.setattr(module, "check_place", lambda on: None)
    return join


class TestConnecting:
    def test_runs_under_way_end_before_the_connection_does(self, dispatch, join, job, tmp_path):
        ray = FakeCluster({"CPU": 2.0}, one=[[DONE]], two=[[Lost()]])
        join(ray, "auto")
        jobs = [(job[0], tmp_path / "runs" / name) for name in ("one", "two")]
        with cluster.run_all_on_ray(jobs, None, lambda place, rounds: None) as ends:
            assert (ray.calls, ray.inputs) == (["init"], [])
            assert next(ends) == (0, None)
        assert ray.calls == ["init", "cancel", "shutdown"]

    def test_a_comparison_deletes_nothing_where_there_is_no_cluster(self, join, job, tmp_path):
        config = replace(job[0], arm="ppo")
        path = comparison.run_path(tmp_path, config)
        RunDirectory.create(path, config.to_json()).release()
        (path / "records").mkdir()
        (path / "records" / "round_00001.parquet").touch()
        (tmp_path / "summary.json").touch()
        before = read_all(path)
        join(FakeCluster({}), "127.0.0.1:99999")
        with pytest.raises(WhenceError, match="There is no Ray cluster"):
            comparison.compare([config], tmp_path, overwrite=True, on="ray")
        assert read_all(path) == before
        assert (tmp_path / "summary.json").exists()

    def test_a_sweep_deletes_nothing_where_there_is_no_cluster(self, join, tmp_path):
        (tmp_path / "lake.toml").write_text(SWEEP)
        (planned,) = read_sweep(tmp_path / "lake.toml")
        path = planned.run_path(tmp_path / "out")
        RunDirectory.create(path, {**planned.config.to_json(), "rounds": 99}).release()
        before = read_all(path)
        join(FakeCluster({}), "127.0.0.1:99999")
        with pytest.raises(WhenceError, match="There is no Ray cluster"):
            run_sweep([planned], tmp_path / "out", None, on="ray")
        assert read_all(path) == before

    @pytest.mark.parametrize(("address", "connected"), [("auto", False), ("", True)])
    def test_a_cluster_without_a_gpu_is_warned_of(self, join, job, caplog, address, connected):
        jobs = [(replace(job[0], device="cuda"), job[1])]
        for resources, needs_gpu in (({"GPU": 1.0}, True), ({"CPU": 2.0}, False)):
            join(FakeCluster(resources, connected=connected), address)
            with cluster.run_all_on_ray(jobs if needs_gpu else [job], None, lambda place, rounds: None):
                pass
        assert caplog.messages == []
        join(FakeCluster({"CPU": 2.0}, connected=connected), address)
        with cluster.run_all_on_ray(jobs, None, lambda place, rounds: None):
            pass
        ((name, level, message),) = caplog.record_tuples
        assert (name, level) == ("whence", logging.WARNING)
        assert "no node of the Ray cluster has one: the run waits until one joins. `ray status`" in message

    def test_a_ray_that_is_started_here_without_a_gpu_is_refused(self, join, job):
        ray = FakeCluster({"CPU": 2.0})
        join(ray, "")
        jobs = [(replace(job[0], device="cuda"), job[1])]
        with (
            pytest.raises(WhenceError, match="Ray finds none on this machine"),
            cluster.run_all_on_ray(jobs, None, lambda place, rounds: None),
        ):
            pytest.fail("it is connected")
        assert ray.calls == ["init", "shutdown"]

    def test_a_comparison_goes_there_as_well(self, job, monkeypatch, tmp_path):
        calls = []

        def run_nothing(jobs, workers, on_round):
            calls.append((jobs, workers))
            return nullcontext(iter([(0, "no node")]))

        monkeypatch.setattr(comparison, "run_all_on_ray", run_nothing)
        monkeypatch.setattr(comparison, "check_place", lambda on: None)
        with pytest.raises(WhenceError, match="seed 0, failed: no node"):
            comparison.compare([replace(job[0], arm="ppo", drop=0.5)], tmp_path, workers=3, on="ray")
        ((((config, path),), workers),) = calls
        assert (config.arm, path, workers) == ("ppo", tmp_path / "runs" / "ppo" / "seed_0", 3)

    def test_a_language_model_gets_a_gpu_where_the_cluster_has_one(self, job):
        language = LanguageConfig("ppo", 0, task="arithmetic")
        for resources, gpus in (({"CPU": 4.0}, False), ({"CPU": 4.0, "GPU": 2.0}, True)):
            assert cluster._takes_gpu(language, resources) is gpus
            assert not cluster._takes_gpu(replace(language, settings={"use_cpu": True}), resources)
            assert not cluster._takes_gpu(job[0], resources)
            assert cluster._takes_gpu(replace(job[0], device="cuda"), resources)

    def test_ray_that_is_not_installed(self, monkeypatch, tmp_path):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(Unsupported, match=r"needs Ray, which is not installed: .* pip install '\.\[ray\]'"):
            run_sweep([], tmp_path / "out", None, on="ray")
        assert not (tmp_path / "out").exists()
        check_place("local")

    @pytest.mark.parametrize("command", ["sweep", "compare", "llm compare"])
    def test_what_ray_prints_is_no_part_of_the_json(self, command, monkeypatch, tmp_path, capsys):
        def print_and_fail(jobs, workers, on_round):
            print("(raylet) A node has been marked dead.")
            return nullcontext((place, "no node") for place in range(len(jobs)))

        monkeypatch.setattr(sys.modules["whence.experiments.sweep"], "run_all_on_ray", print_and_fail)
        monkeypatch.setattr(comparison, "run_all_on_ray", print_and_fail)
        monkeypatch.setattr(comparison, "run_all", lambda *_: iter([(0, "made here")]))
        (tmp_path / "lake.toml").write_text(SWEEP)
        monkeypatch.setattr(training, "prepare", lambda config: None)
        arguments = {
            "sweep": ["sweep", tmp_path / "lake.toml"],
            "compare": ["compare", "CartPole-v1", "--seeds", 1],
            "llm compare": ["llm", "compare", "--task", "arithmetic", "--arms", "none", "--seeds", 1],
        }
        line = [*arguments[command], "--on", "ray", "--out", tmp_path / "out", "--json"]
        monkeypatch.setattr(sys, "argv", ["whence", *map(str, line)])
        with pytest.raises(SystemExit):
            cli.main()
        shown = capsys.readouterr()
        assert "marked dead" in shown.err
        assert "marked dead" not in shown.out
        if command == "sweep":
            assert json.loads(shown.out)["failures"] == {"lake/ppo/seed_0": "no node"}

    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("ray://head:10001", "of Ray Client, which streams no results"),
            ("head", "HOST:PORT is needed"),
            ("head:", "HOST:PORT is needed"),
            ("127.0.0.1:99999", "There is no Ray cluster at RAY_ADDRESS=127.0.0.1:99999"),
        ],
    )
    def test_addresses_that_cannot_be_used(self, address, message):
        with pytest.raises(WhenceError, match=message):
            check_address(address)

    def test_an_address_where_nothing_answers(self):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(WhenceError, match="Start one with `ray start --head`"):
                check_address(address)
            listener.listen()
            check_address(address)
        check_address("auto")

    @pytest.mark.long
    def test_a_ray_that_is_started_here_is_for_this_machine_alone(self):
        pytest.importorskip("ray")
        script = """
from whence.experiments.cluster import _connect, check_place
check_place("ray")
with _connect(1, needs_gpu=False) as ray:
    (node,) = ray.nodes()
    print(node["NodeManagerAddress"], node["Resources"]["CPU"], ray.get_runtime_context().gcs_address)
assert not ray.is_initialized()
"""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        address, cores, gcs = done.stdout.split()
        assert (address, cores) == ("127.0.0.1", "1.0")
        assert gcs.startswith("127.0.0.1:")


@pytest.mark.long
def test_a_sweep_over_two_nodes_one_of_which_is_killed(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.cluster import run as study

    file = tmp_path / "sweep.toml"
    file.write_text(study.SWEEP.format(seeds=1, rounds=12))
    runs = [planned for planned in read_sweep(file) if planned.label != "mean"]
    monkeypatch.setattr(cluster, "SAVE_SECONDS", 0.0)
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


def test_a_node_that_does_not_start_is_the_error_and_its_cluster_ends(monkeypatch):
    """Of the study's cluster, with a Ray that starts no node."""
    monkeypatch.syspath_prepend(str(ROOT))
    from studies.cluster import run as study

    class Cluster:
        shut_down = False

        def __init__(self, **settings):
            pass

        def add_node(self, **settings):
            raise RuntimeError("no node")

        def shutdown(self):
            Cluster.shut_down = True

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", SimpleNamespace(Cluster=Cluster))
    with patch.dict(os.environ):
        os.environ.pop("RAY_ADDRESS", None)
        with pytest.raises(RuntimeError, match="no node"), study.start_cluster(1):
            pytest.fail("the cluster is there")
    assert Cluster.shut_down


def test_lock_is_of_this_process(tmp_path):
    with lock_directory(tmp_path):
        assert node._is_locked(tmp_path)
    assert not node._is_locked(tmp_path)


def test_what_is_said_of_forty_runs_is_what_they_gave():
    folder = ROOT / "results" / "cluster"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    text = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    assert summary["equal"] == summary["results"] == summary["runs"] == 40
    assert summary["failures"] == {}
    ((name, start),) = summary["started_again"].items()
    assert f"{summary['equal']} of {summary['runs']} results" in text
    assert f"after {summary['killed_after']} runs" in text
    assert f"`{name}`, in round {start['rounds_done'] + 1} of {summary['settings']['rounds']}" in text
    assert f"on after round {start['went_on_after']}" in text
