import errno
import json
import math
import os
import resource
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from filelock import FileLock
from polars.testing import assert_frame_equal
from safetensors.torch import save_file

import whence.runs.files
import whence.scores.influence
from whence.core import InvalidInfluence, RunDirectoryError, write_atomically
from whence.runs import Checkpoint, RunDirectory, list_checkpoints, time_stage
from whence.runs.checkpoints import choose_checkpoints, save_checkpoint
from whence.runs.locks import lock_run
from whence.runs.recorder import flatten_seconds
from whence.scores.influence import Influence, Provenance

CONFIG = {"env": "FrozenLake-v1", "rounds": 3, "hyperparameters": {"max_grad_norm": "inf", "n_steps": 64}}


def records(n=4):
    return pl.DataFrame(
        {
            "record_id": np.arange(n),
            "observation": np.arange(n * 2, dtype=np.float32).reshape(n, 2),
            "step": pl.Series([None, *range(1, n)], dtype=pl.Int64),
            "keep": [True, False] * (n // 2),
            "reason": [None, "lowest"] * (n // 2),
        }
    )


def files(path):
    found = (file for file in path.rglob("*") if file.is_file() and file.name not in (".lock", ".signature"))
    return sorted(str(file.relative_to(path)) for file in found)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", CONFIG)


class TestRoundTrips:
    def test_what_create_wrote_open_reads(self, tmp_path):
        created = RunDirectory.create(tmp_path / "a" / "b", CONFIG, versions={"torch": "2.6"})
        reopened = RunDirectory.open(tmp_path / "a" / "b")
        assert reopened.config == created.config == CONFIG
        assert reopened.versions == created.versions == {"torch": "2.6"}
        assert reopened.path == tmp_path / "a" / "b"

    @pytest.mark.parametrize(("name", "other"), [("lake[1]", "lake1"), ("l?ke", "lake"), ("l*ke", "lake")])
    def test_a_path_is_no_pattern(self, tmp_path, name, other):
        for place, number in ((other, 77), (name, 1)):
            run = RunDirectory.create(tmp_path / place, CONFIG)
            run.append("metrics", {"round": number})
            run.write_round("records", number, records(2 * number))
        assert run.table("metrics").rows() == [(1,)]
        assert run.rounds() == [1]
        assert_frame_equal(run.round("records", 1), records(2))

    def test_rows_need_not_have_the_same_keys(self, run):
        run.append("metrics", {"round": 1})
        run.append("metrics", {"round": 2, "train/loss": 0.25})
        run.append("metrics", {"train/loss": 0.5, "round": 3})
        assert run.table("metrics").to_dicts() == [
            {"round": 1, "train/loss": None},
            {"round": 2, "train/loss": 0.25},
            {"round": 3, "train/loss": 0.5},
        ]

    def test_rounds_are_those_with_records_in_order(self, run):
        assert run.rounds() == []
        for number in (10, 9, 100_000):
            run.write_round("records", number, records())
        run.write_round("episodes", 1, records())
        run.write_policy(2, {"w": torch.ones(1)})
        for stray in ("round_old.parquet", "round_3.parquet", "round_00003.bak.parquet", "ground_00003.parquet"):
            (run.path / "records" / stray).touch()
        assert run.rounds() == [9, 10, 100_000]

    def test_policies_come_back_bit_for_bit(self, run):
        weight = torch.randn(3, 4, requires_grad=True)
        tensors = {"w": weight, "turned": weight.detach().clone().T, "n": torch.tensor(3), "d": torch.randn(2).double()}
        run.write_policy(7, tensors)
        tensors_read = RunDirectory.open(run.path).policy(7)
        assert set(tensors_read) == set(tensors)
        for name, tensor in tensors.items():
            assert tensors_read[name].dtype == tensor.dtype
            assert torch.equal(tensors_read[name], tensor)
            assert not tensors_read[name].requires_grad


class TestCreate:
    def test_a_run_is_replaced_when_asked(self, run):
        for table in ("metrics", "timings", "evaluations"):
            run.append(table, {"round": 1})
        for folder in ("records", "episodes"):
            run.write_round(folder, 1, records())
        run.write_policy(1, {"w": torch.ones(1)})
        again = RunDirectory.create(run.path, CONFIG | {"rounds": 9}, versions={"torch": "another"}, overwrite=True)
        assert files(run.path) == ["config.json"]
        assert again.config["rounds"] == 9
        assert again.versions == {"torch": "another"}
        again.append("metrics", {"round": 5})
        assert again.table("metrics").rows() == [(5,)]

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"rounds": 4}, r"rounds was 3, now 4"),
            ({"drop": 0.5}, r"drop was not set, now 0\.5"),
            (
                {"hyperparameters": {"n_steps": 2048}},
                r"hyperparameters\.max_grad_norm was 'inf', now not set; hyperparameters\.n_steps was 64, now 2048",
            ),
            ({"env": "Acrobot-v1", "rounds": 4}, r"env was 'FrozenLake-v1', now 'Acrobot-v1'; rounds was 3, now 4"),
        ],
    )
    def test_another_config_is_refused_and_what_differs_is_named(self, run, changed, message):
        run.append("metrics", {"round": 1})
        before = (run.path / "config.json").read_bytes()
        with pytest.raises(RunDirectoryError, match=rf"another configuration \({message}\).*Choose another directory"):
            run.check_same(CONFIG | changed)
        with pytest.raises(RunDirectoryError, match="a run with 1 finished rounds and no checkpoint"):
            RunDirectory.create(run.path, CONFIG | changed)
        assert (run.path / "config.json").read_bytes() == before
        assert run.table("metrics").rows() == [(1,)]

    def test_changes_beyond_the_fifth_are_counted(self, run):
        run.check_same(CONFIG | {"env_kwargs": {}})  # an empty table of settings is none
        with pytest.raises(RunDirectoryError, match=r"setting_4 was not set, now 4; and 3 more\)"):
            run.check_same(CONFIG | {f"setting_{place}": place for place in range(8)})

    def test_a_run_that_wrote_nothing_is_replaced_by_any_other(self, run):
        RunDirectory.create(run.path, {"env": "Acrobot-v1"})
        assert RunDirectory.open(run.path).config == {"env": "Acrobot-v1"}
        assert files(run.path) == ["config.json"]

    @pytest.mark.parametrize("name", ["thesis.tex", "thesis.tmp", ".thesis"])
    def test_a_directory_with_foreign_files_is_refused_and_left_alone(self, tmp_path, name):
        (tmp_path / name).write_text("ten years of work")
        with pytest.raises(RunDirectoryError, match=r"holds no config\.json.*new or empty directory"):
            RunDirectory.create(tmp_path, CONFIG)
        assert files(tmp_path) == [name]
        assert (tmp_path / name).read_text() == "ten years of work"

    @pytest.mark.parametrize(
        ("value", "stored"),
        [
            *((math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), ({2, 1}, ["1", "2"]), (np.float32(1), 1.0)),
            *((Path("a/b"), "a/b"), (np.arange(2), [0, 1]), ((1, (2.5, None)), [1, [2.5, None]])),
            (math.hypot, "math.hypot"),
        ],
    )
    def test_what_json_lacks_is_described(self, tmp_path, value, stored):
        created = RunDirectory.create(tmp_path, {"hyperparameters": {"max_grad_norm": value}})
        created.check_same({"hyperparameters": {"max_grad_norm": value}})
        for run in (created, RunDirectory.open(tmp_path)):
            assert run.config == {"hyperparameters": {"max_grad_norm": stored}}
        with pytest.raises(RunDirectoryError, match="max_grad_norm was"):
            created.check_same({"hyperparameters": {"max_grad_norm": 0.5}})


class TestOpen:
    @pytest.mark.parametrize(("place", "reason"), [("", r"holds no config\.json"), ("not/there", "is not there")])
    def test_no_config(self, tmp_path, place, reason):
        with pytest.raises(RunDirectoryError, match=rf"{reason}.*passed as run= or --run"):
            RunDirectory.open(tmp_path / place)

    @pytest.mark.parametrize(
        ("document", "marked"),
        [
            (
                {"format": "whence-run", "version": 1, "config": {"rule": "IIF(drop=0.125, warmup=0)"}, "versions": {}},
                "is marked as version 1; .* reads 'whence-run', versions 2 and 3",
            ),
            ({"format": "other", "version": 3, "config": {}, "versions": {}}, "is marked 'other'.*no run directory"),
            ({"config": {}, "versions": {}}, "is marked None"),
            ([1, 2], "holds list as JSON"),
            ("whence-run", "holds str as JSON"),
        ],
    )
    def test_another_format_or_version(self, tmp_path, document, marked):
        (tmp_path / "config.json").write_text(json.dumps(document))
        with pytest.raises(RunDirectoryError, match=marked):
            RunDirectory.open(tmp_path)


class TestWhatIsNotThere:
    @pytest.mark.parametrize("name", ["records", "episodes"])
    def test_a_missing_round_names_the_rounds_there(self, run, name):
        for number in (2, 3, 11):
            run.write_round("records", number, records())
        with pytest.raises(RunDirectoryError, match=rf"{name}.round_00012\.parquet is not there; .* rounds 2 to 11\."):
            run.round(name, 12)


class TestWrittenAtomically:
    def test_the_old_file_is_there_until_the_new_one_is_whole(self, tmp_path):
        path = tmp_path / "a" / "b.txt"
        with write_atomically(path) as temporary:
            temporary.write_text("old")
            assert not path.exists()
        with write_atomically(path) as temporary:
            assert temporary.parent == path.parent  # a rename is atomic within one file system only
            temporary.write_text("new")
            assert path.read_text() == "old"
        assert path.read_text() == "new"
        assert files(tmp_path) == ["a/b.txt"]

    @staticmethod
    def fail_halfway(path, failure):
        with write_atomically(path) as temporary:
            temporary.write_text("half of the n")
            raise failure

    @pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("there", [True, False])
    def test_a_failure_leaves_what_was_there_and_nothing_else(self, tmp_path, failure, there):
        path = tmp_path / "b.txt"
        if there:
            path.write_text("old")
        with pytest.raises(failure):
            self.fail_halfway(path, failure)
        assert files(tmp_path) == (["b.txt"] if there else [])
        assert not there or path.read_text() == "old"

    @pytest.mark.parametrize(
        ("failure", "raised"), [(OSError, RunDirectoryError), (KeyboardInterrupt, KeyboardInterrupt)]
    )
    def test_a_run_and_an_influence_stay_what_they_were_when_a_write_fails(self, run, monkeypatch, failure, raised):
        def list_writes(number):
            scores = torch.full((1,), float(number))
            return (
                lambda: run.append("metrics", {"round": number}),
                lambda: run.write_round("records", 1, records(2 * number)),
                lambda: run.write_policy(1, {"w": scores}),
                lambda: influence(scores).save(run.path / "round.influence"),
            )

        def write_half(target, content):
            with target.open("wb") as file:
                file.write(content[: len(content) // 2])
            raise failure("No space left on device")

        for write in list_writes(1):
            write()
        before = files(run.path)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", write_half)
            patch.setattr(whence.runs.files, "save_file", lambda tensors, target, metadata: write_half(target, b"half"))
            for write in list_writes(2):
                with pytest.raises(raised):
                    write()
        assert files(run.path) == before
        assert run.table("metrics").rows() == [(1,)]
        assert_frame_equal(run.round("records", 1), records(2))
        assert run.policy(1)["w"].item() == Influence.load(run.path / "round.influence").scores.item() == 1
        run.append("metrics", {"round": 3})
        assert run.table("metrics").rows() == [(1,), (3,)]  # the row that failed is not written with the next one


class TestRefusedWrites:
    WRITES = (
        lambda run: RunDirectory.create(run.path, CONFIG),
        lambda run: run.append("metrics", {"round": 1, "note": "x" * 10_000}),
        lambda run: run.write_round("records", 1, records(2000)),
        lambda run: run.write_policy(1, {"w": torch.zeros(10_000)}),
    )

    @pytest.mark.parametrize("write", WRITES[1:])
    def test_a_full_disk_is_named_with_what_to_do(self, run, write):
        before = files(run.path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # the system refuses longer files, as a quota does
        try:
            with pytest.raises(RunDirectoryError, match=r"cannot be written: .*File too large"):
                write(run)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert files(run.path) == before

    @pytest.mark.parametrize("write", WRITES)
    def test_a_directory_that_may_not_be_written(self, run, monkeypatch, write):
        def refuse(path, *options, **more):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(Path, "touch", refuse)
        with pytest.raises(RunDirectoryError, match=r"cannot be written: Permission denied\. Free space"):
            write(run)

    def test_an_error_that_is_not_the_systems_stays_what_it_is(self, run):
        with pytest.raises(RuntimeError, match="share memory"):
            run.write_policy(1, dict.fromkeys(("a", "b"), torch.ones(3)))


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        run = RunDirectory.create(tmp_path / "run", CONFIG)
        run.append("metrics", {"round": 1})
        run.write_round("records", 1, records())
        run.write_policy(1, {"w": torch.ones(3)})
        influence(torch.ones(1)).save(run.path / "influence.safetensors")
    finally:
        os.umask(before)
    written = [run.path / file for file in files(run.path)]
    assert len(written) == 5
    assert {stat.S_IMODE(file.stat().st_mode) for file in written} == {mode}


def influence(scores, ids=None, **about):
    provenance = {"target": "Return()", "objective": "PPOClip()", "engine": "ghost", "engine_reason": "all layers"}
    return Influence(
        scores,
        torch.arange(len(scores)) if ids is None else ids,
        Provenance(**provenance | {"parameters": ("a.weight", "a.bias")} | about),
    )


class TestInfluenceOnDisk:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_round_trip(self, tmp_path, dtype):
        saved = influence(
            torch.randn(6, dtype=dtype)[::2],  # not contiguous
            torch.tensor([7, 3, 2**40]),
            records="ab12",
            versions={"torch": "2.6"},
        )
        saved.save(tmp_path / "new" / "round.safetensors")
        loaded = Influence.load(tmp_path / "new" / "round.safetensors")
        assert loaded.provenance == saved.provenance
        assert isinstance(loaded.provenance.parameters, tuple)
        assert loaded.scores.dtype == dtype
        assert torch.equal(loaded.scores, saved.scores)
        assert torch.equal(loaded.record_ids, saved.record_ids)
        assert files(tmp_path) == ["new/round.safetensors"]

    def test_what_was_loaded_still_adds_to_what_was_not(self, tmp_path):
        saved = influence(torch.tensor([1.0, 2.0]), records="ab12")
        saved.save(tmp_path / "i")
        assert (Influence.load(tmp_path / "i") + saved).scores.tolist() == [2.0, 4.0]
        with pytest.raises(InvalidInfluence, match="differ in their records"):
            Influence.load(tmp_path / "i") + influence(torch.tensor([1.0, 2.0]), records="cd34")

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "whence-influence", "version": "2"}])
    def test_a_foreign_file_is_refused(self, tmp_path, metadata):
        tensors = {"scores": torch.ones(2), "record_ids": torch.arange(2)}
        save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
        with pytest.raises(InvalidInfluence, match=r"model\.safetensors does not hold what Influence\.save"):
            Influence.load(tmp_path / "model.safetensors")


def test_continuing_forgets_what_came_later(tmp_path):
    config = {"seed": 1, "rounds": 3, "ppo": {"gamma": 0.5, "save_every": 1}}
    run = RunDirectory.create(tmp_path / "run", config, versions={"torch": "9"})
    for number in (1, 2, 3):
        run.append("metrics", {"round": number})
        run.append("timings", {"round": number, "cpu": 1.0})
        run.write_round("records", number, pl.DataFrame({"record_id": [number]}))
        run.write_round("answers", number, pl.DataFrame({"prompt": ["?"]}))
    (tmp_path / "run" / "records" / ".round_00004.parquet.4711.tmp").write_text("half")
    longer = {"seed": 1, "rounds": 5, "ppo": {"gamma": 0.5, "save_every": 2}}
    after = {"start": Checkpoint(2, {}, tmp_path), "overwrite": True}
    again = RunDirectory.begin(tmp_path / "run", longer, may_change=["rounds", "ppo.save_every"], **after)
    assert again.rounds() == [1, 2, 3]  # until something is written
    assert again.table("metrics")["round"].to_list() == [1, 2]
    again.append("metrics", {"round": 3})
    assert again.rounds() == again.rounds("answers") == [1, 2]
    assert len(list((tmp_path / "run" / "records").iterdir())) == 2  # nor what a killed process left
    assert again.table("metrics")["round"].to_list() == [1, 2, 3]
    assert again.table("timings")["round"].to_list() == [1, 2]
    assert RunDirectory.open(tmp_path / "run").config == longer
    assert again.versions == {"torch": "9"}
    with pytest.raises(RunDirectoryError, match=r"ppo\.gamma was 0\.5, now 0\.6"):
        RunDirectory.begin(tmp_path / "run", {**longer, "ppo": {"gamma": 0.6, "save_every": 2}}, **after)
    with pytest.raises(RunDirectoryError, match=r"none is not there\. Did you mean .*/run\?"):
        RunDirectory.open(tmp_path / "none")


def write_rounds(path, checkpoint=2):
    """Write a run of two rounds with a checkpoint after one of them, as a process does that then ends."""
    run = RunDirectory.begin(path, {"seed": 1})
    for number in (1, 2):
        run.write_round("records", number, pl.DataFrame({"record_id": [number]}))
        run.append("metrics", {"round": number})
    save_checkpoint(path, checkpoint, {}, keep=2)
    run.release()


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(tmp_path):
    for _ in range(2):
        run = RunDirectory.begin(tmp_path, {"seed": 1})
        assert run.checkpoint is None
        run.append("metrics", {"round": 1})
        run.release()
    run.append("metrics", {"round": 2})
    with pytest.raises(RunDirectoryError, match="2 finished rounds and no checkpoint to go on from"):
        RunDirectory.begin(tmp_path, {"seed": 1})
    assert RunDirectory.open(tmp_path).table("metrics").height == 2


def test_an_interrupted_overwrite_is_not_gone_on_with(tmp_path, monkeypatch):
    write_rounds(tmp_path)
    with monkeypatch.context() as patch:
        removed = []

        def remove(folder, **options):
            removed.append(folder)
            if len(removed) == 2:
                raise KeyboardInterrupt
            shutil.rmtree(folder, **options)

        patch.setattr("whence.runs.files.shutil", SimpleNamespace(rmtree=remove))
        with pytest.raises(KeyboardInterrupt):
            RunDirectory.create(tmp_path, {"seed": 1}, overwrite=True)
    run = RunDirectory.begin(tmp_path, {"seed": 1})
    assert run.checkpoint is None
    assert run.rounds() == list_checkpoints(tmp_path) == []


def test_a_run_that_another_process_wrote_just_now_is_not_written_into(tmp_path, monkeypatch):
    def lock(path):
        if not (path / "config.json").exists():
            with monkeypatch.context() as patch:
                patch.setattr("whence.runs.directory.lock_run", lock_run)
                write_rounds(path)
        return lock_run(path)

    monkeypatch.setattr("whence.runs.directory.lock_run", lock)
    with pytest.raises(RunDirectoryError, match="a run with 2 finished rounds"):
        RunDirectory.create(tmp_path, {"seed": 2})
    assert RunDirectory.open(tmp_path).config == {"seed": 1}


def test_a_checkpoint_is_read_under_the_lock(tmp_path, monkeypatch):
    write_rounds(tmp_path)
    monkeypatch.setattr(
        "whence.runs.directory.read_latest", lambda path: pytest.fail("read while another process writes")
    )
    with FileLock(tmp_path / ".lock"), pytest.raises(RunDirectoryError, match="Another process is writing"):
        RunDirectory.begin(tmp_path, {"seed": 1})


def test_going_on_that_fails_keeps_no_lock(tmp_path):
    write_rounds(tmp_path)
    (tmp_path / "checkpoints" / "round_00002.safetensors").write_text("damaged")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        RunDirectory.begin(tmp_path, {"seed": 1})
    with FileLock(tmp_path / ".lock", blocking=False):
        pass


def test_seconds_of_a_stage_that_is_repeated_add_up(monkeypatch):
    now, seconds = [0.0], {}
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 0.0)
    monkeypatch.setattr("whence.runs.recorder.time", clock)
    with time_stage(seconds, "outer"):
        for duration in (1.0, 2.0):
            now[0] += 4.0
            with time_stage(seconds, "inner"):
                now[0] += duration
    assert flatten_seconds(seconds) == {"inner_cpu": 0, "inner_wall": 3, "outer_cpu": 0, "outer_wall": 8}


def test_the_best_checkpoint_and_those_around_a_fall_stay() -> None:
    """A checkpoint is judged by the round after it; while the return rises, the last two are all."""
    rises = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}
    assert choose_checkpoints([1, 2, 3, 4], rises, 2) == {3, 4}
    falls = rises | {5: 100.0, 6: 90.0, 7: 12.0, 8: 11.0, 9: 12.0, 10: 11.0}
    # The policy after round 4 collects the best round, and the one after round 6 is broken.
    assert choose_checkpoints([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], falls, 2) == {4, 5, 6, 9, 10}
    assert choose_checkpoints([2, 4, 8, 10], falls, 2) == {4, 8, 10}
    assert choose_checkpoints([1, 2, 3], {}, 2) == {2, 3}
    assert choose_checkpoints([1, 2, 3], {1: float("nan"), 2: 5.0, 3: float("nan")}, 2) == {1, 2, 3}
    assert choose_checkpoints([1, 2, 3, 4], {1: 9.0, 2: 5.0, 3: 4.0, 4: 3.0}, 2) == {1, 2, 3, 4}
    assert choose_checkpoints([1, 2, 3], {1: 5.0, 2: 5.0, 3: 5.0}, 2) == {2, 3}
