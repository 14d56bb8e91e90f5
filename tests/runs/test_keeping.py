"""What a run directory keeps: nothing of a run is removed but by `overwrite`, and a row costs little."""

import importlib
import io
import logging
import os
import resource
import shutil
import sys
from contextlib import nullcontext

import polars as pl
import pytest
import torch
from typer.testing import CliRunner

from helpers.resuming import MODELS, RULE, STEPS, assert_same_model, assert_same_run, contents, total, train
from whence import RunDirectory, cli
from whence.cli.terminal import find_round, print_line
from whence.core import RunDirectoryError, WhenceError
from whence.runs import RunRecorder, read_vocabulary
from whence.sb3 import InfluenceCallback


def learn(path, steps, **options):
    MODELS["walk"]().learn(steps, callback=InfluenceCallback(RULE, run=path, save_every=2, **options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The model and the run of a training that nothing interrupts."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return train(MODELS["walk"], path), path


@pytest.fixture
def broken_off(tmp_path):
    """A run with a checkpoint after its second round, which was interrupted in its fourth."""
    train(MODELS["walk"], tmp_path / "run", until=0.7, save_every=2)
    assert RunDirectory.open(tmp_path / "run").rounds() == [1, 2, 3]
    return tmp_path / "run"


def test_a_lost_table_deletes_nothing(broken_off, whole, caplog):
    (broken_off / "metrics.parquet").unlink()
    before = contents(broken_off)
    with caplog.at_level(logging.WARNING, logger="whence"):
        model = train(MODELS["walk"], broken_off, save_every=2)
    assert "holds 0 of 2 rows: a file of metrics was lost" in caplog.text
    assert_same_model(model, whole[0])
    assert {name: content for name, content in before.items() if "config" not in name}.items() <= contents(
        broken_off
    ).items()
    assert RunDirectory.open(broken_off).table("metrics")["round"].to_list() == [3, 4, 5]


def refuse_total(path):
    learn(path, STEPS)


def refuse_settings(path):
    MODELS["schedule"]().learn(5 * STEPS, callback=InfluenceCallback(RULE, run=path))


def lose_checkpoints(path):
    shutil.rmtree(path / "checkpoints")
    learn(path, 5 * STEPS)


def lose_tables_and_checkpoints(path):
    RunDirectory.open(path).note(save_every=1)  # else it may have been broken off before its first checkpoint
    (path / "metrics.parquet").unlink()
    lose_checkpoints(path)


def fail_later(path):
    model = MODELS["walk"]()
    model.env.step_wait = lambda: pytest.fail("the environment is broken")
    learn_with = InfluenceCallback(RULE, run=path, save_every=2)
    try:
        model.learn(total(model), callback=learn_with)
    except BaseException as failure:
        raise RunDirectoryError("holds a run") from failure


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (refuse_total, r"holds a run of 64 steps, more than the 32 of this learn\(\)"),
        (lose_checkpoints, "holds a run with 3 finished rounds and no checkpoint to go on from"),
        *((start, "holds a run") for start in (refuse_settings, lose_tables_and_checkpoints, fail_later)),
    ],
)
def test_a_start_that_is_refused_or_fails_deletes_nothing(broken_off, start, message):
    before = contents(broken_off)
    with pytest.raises(RunDirectoryError, match=message):
        start(broken_off)
    after = contents(broken_off)
    changed = {name for name, content in before.items() if after.get(name) != content}
    assert changed <= {"metrics.parquet", "config.json"}  # which the test itself changes


def test_a_first_round_that_was_broken_off_is_not_deleted_by_another_run(whole, tmp_path):
    train(MODELS["walk"], tmp_path, until=0.3)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "metrics.parquet").unlink()
    with pytest.raises(RunDirectoryError, match="another configuration"):
        refuse_settings(tmp_path)
    with pytest.raises(RunDirectoryError, match="0 finished rounds"):
        RunDirectory.create(tmp_path, {"env": "another"})
    model = train(MODELS["walk"], tmp_path)  # the same run starts with its first round
    assert_same_model(model, whole[0])


WRITES = {
    "table": lambda run: run.append("metrics", {"round": 2}),
    "records": lambda run: run.write_round("records", 2, pl.DataFrame({"record_id": [2]})),
    "policy": lambda run: run.write_policy(2, {"w": torch.ones(1)}),
    "note": lambda run: run.note(more=1),
    "checkpoint": lambda run: RunRecorder(run, save_every=1).save_checkpoint(2, dict),
    "another object": lambda run: RunDirectory(run.path, {}, {}).append("evaluations", {"round": 2}),
}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_directory_that_was_deleted_under_its_writer_gets_nothing(tmp_path, write, again):
    run = RunDirectory.create(tmp_path / "run", {"seed": 1})
    run.append("metrics", {"round": 1})
    shutil.rmtree(run.path)
    if again:  # as another process does
        run.path.mkdir()
        (run.path / ".lock").touch()
        (run.path / "config.json").write_text("of another run")
    before = contents(run.path)
    with pytest.raises(
        RunDirectoryError, match=r"run was deleted, moved or replaced while .* Start this training again"
    ):
        WRITES[write](run)
    assert contents(run.path) == before
    assert run.path.exists() == again


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_what_a_lock_leads_to_is_left_alone(tmp_path, link):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    (tmp_path / "run").mkdir()
    getattr(tmp_path / "run" / ".lock", link)(tmp_path / "thesis.tex")
    with (
        nullcontext() if link == "hardlink_to" else pytest.raises(RunDirectoryError, match="is a link to another file")
    ):
        RunDirectory.create(tmp_path / "run", {})
    assert (tmp_path / "thesis.tex").read_text() == "ten years of work"


def test_rows_of_later_rounds_give_way(tmp_path):
    run = RunDirectory.create(tmp_path, {})
    for number in range(1, 8):
        run.append("metrics", {"round": number, "odd": None if number % 2 else 0.5, f"of {number // 4}": number})
        assert RunDirectory.open(tmp_path).table("metrics").equals(run.table("metrics"))
    run.release()
    run = RunDirectory.open(tmp_path)
    for number in (8, 5):  # goes on, once after an earlier round
        run.append("metrics", {"round": number})
        assert run.table("metrics")["round"].to_list() == [*range(1, number + 1)]


def test_a_round_with_records_is_whole(whole, tmp_path, monkeypatch):
    write = RunDirectory.write_round

    def break_off(self, name, number, table):
        if (name, number) == ("episodes", 3):
            raise KeyboardInterrupt
        write(self, name, number, table)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "write_round", break_off)
        with pytest.raises(KeyboardInterrupt):
            train(MODELS["walk"], tmp_path / "parts")
    assert RunDirectory.open(tmp_path / "parts").rounds() == [1, 2]
    train(MODELS["walk"], tmp_path / "parts")
    assert_same_run(tmp_path / "parts", whole[1])


def test_a_process_that_was_forked_after_polars_was_used_says_so(tmp_path):
    RunDirectory.create(tmp_path / "run", {}).append("metrics", {"round": 1})
    reading, writing = os.pipe()
    if not (child := os.fork()):
        messages = []
        for use in (lambda: RunDirectory.open(tmp_path / "run").table("metrics"), lambda: learn(tmp_path / "new", 64)):
            try:
                use()
            except RunDirectoryError as refusal:
                messages.append(str(refusal))
        os.write(writing, "\n".join(messages).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    first, second = os.read(reading, 10_000).decode().split("\n")
    assert first == second
    assert 'Start it by multiprocessing.get_context("spawn"), SubprocVecEnv(..., start_method="spawn")' in first


def test_too_many_open_files_have_a_remedy(tmp_path):
    run = RunDirectory.create(tmp_path, {})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:  # the next file would get its number, whatever other tests have left open
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), limits[1]))
    try:
        with pytest.raises(RunDirectoryError, match=r"Too many open files\. Raise the limit of open files \(ulimit -n"):
            run.append("metrics", {"round": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_last_round_is_one_whose_policy_is_kept(tmp_path):
    run = RunDirectory.create(tmp_path, {})
    for number in (1, 2, 3, 4):
        run.write_round("records", number, pl.DataFrame({"record_id": [number]}))
    assert find_round(run, None, None) == 4
    run.write_policy(3, {"w": torch.ones(1)})
    assert find_round(run, None, None) == 3
    assert find_round(run, 4, None) == 4


def test_a_terminal_without_a_character_gets_another(monkeypatch):
    app = importlib.import_module("whence.cli.app")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(app, "app", lambda: print_line("0.1 ± 0.2"))
    monkeypatch.setattr(app.signal, "signal", lambda *handler: None)
    app.main()
    stream.flush()
    assert stream.buffer.getvalue() == b"0.1 ? 0.2\n"


@pytest.mark.parametrize(
    "path",
    ["a" * 300, "/".join(["a" * 200] * 25), "file", "file/run", "link/records"],
)
def test_what_the_file_system_refuses_is_named_before_training(tmp_path, path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "link")
    model = MODELS["walk"]()
    with pytest.raises(RunDirectoryError, match=f"{tmp_path}/{path[:50]}"):
        model.learn(STEPS, callback=InfluenceCallback(run=tmp_path / path))
    assert model.num_timesteps == 0


@pytest.mark.parametrize("folder", ["records", "policies", "checkpoints"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_folder_that_cannot_be_written_is_named_before_training(tmp_path, folder, kind):
    learn(tmp_path / "run", STEPS)
    shutil.rmtree(tmp_path / "run" / folder)
    (tmp_path / "run" / folder).symlink_to(tmp_path / "gone") if kind == "link" else (tmp_path / "run" / folder).touch()
    before = contents(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"run/{folder} cannot be written"):
        learn(tmp_path / "run", 2 * STEPS, overwrite=True)
    assert contents(tmp_path) == before


def test_a_path_that_leaves_no_room_for_the_names_of_files_is_refused(tmp_path):
    length = os.pathconf(tmp_path, "PC_PATH_MAX")
    parts = "/".join(["a" * 200] * ((length - len(str(tmp_path))) // 201))
    path = tmp_path / parts / ("a" * (length - len(str(tmp_path / parts)) - 40))
    model = MODELS["walk"]()
    with pytest.raises(RunDirectoryError, match=r"/\w+ cannot be written: File name too long"):
        model.learn(STEPS, callback=InfluenceCallback(run=path))
    assert model.num_timesteps == 0


def test_a_path_that_no_system_has_is_refused():
    with pytest.raises(WhenceError, match="pass the directory's path"):
        RunRecorder("a\0b")


def test_a_recorder_writes_where_it_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = RunRecorder("run")
    monkeypatch.chdir("/")
    recorder.begin({"seed": 1}, versions={})
    recorder.write_round(1, pl.DataFrame({"record_id": [1]}))
    assert RunDirectory.open(tmp_path / "run").rounds() == [1]


def test_a_vocabulary_is_of_the_run_that_replaces_another(tmp_path):
    for texts in (["a"], ["b", "c"]):
        recorder = RunRecorder(tmp_path)
        recorder.begin({"seed": 1}, versions={}, overwrite=True)
        recorder.plan_vocabulary(lambda texts=texts: texts)
        recorder.write_round(1, pl.DataFrame({"record_id": [1]}))
        assert read_vocabulary(tmp_path) == texts


def test_rounds_of_other_columns_are_read_as_one_table(tmp_path):
    run = RunDirectory.create(tmp_path / "a [run]*", {"seed": 1})
    with pytest.raises(RunDirectoryError, match="holds no rounds"):
        run.scan()
    tables = [
        {"record_id": [1, 2], "info.x": [True, False], "seen": [[1.0], [2.0]]},
        {"info.x": [1, 2], "bootstrap": [None, 0.5], "record_id": [3, 4]},
        {"record_id": [5], "info.x": [0.25], "score": [1.5]},
    ]
    for number, table in zip((1, 2, 10), tables, strict=True):
        run.write_round("records", number, pl.DataFrame(table))
    rows = run.scan().collect()
    assert rows.columns == ["round", "record_id", "info.x", "seen", "bootstrap", "score"]
    assert rows["round"].to_list() == [1, 1, 2, 2, 10]
    assert rows["info.x"].to_list() == [1, 0, 1, 2, 0.25]
    assert rows["score"].to_list() == [None] * 4 + [1.5]
    with run.round_path("records", 2).open("r+b") as file:
        file.seek(40)
        file.write(b"\xff\x00\xff")
    with pytest.raises(RunDirectoryError, match="is damaged"):
        run.scan()


def test_a_run_without_policies_is_named_by_what_needs_them(tmp_path):
    learn(tmp_path, STEPS)
    shutil.rmtree(tmp_path / "policies")
    for arguments in (["--episode-seed", "3"], ["--record", "3"], []):
        answer = CliRunner().invoke(cli.app, ["why", str(tmp_path), *arguments])
        assert answer.exit_code
        assert "policies" in str(answer.exception)
        assert isinstance(answer.exception, RunDirectoryError)
