"""Training by two processes: scores, selection and steps are those of one."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from helpers.language_training import copy_state, make_trainer
from helpers.launching import run_script
from helpers.scripts.processes import MORE_TARGETS, TARGETS, train
from helpers.scripts.trl_processes import KEPT
from helpers.toys import assert_close
from whence.core import Unsupported, WhenceError
from whence.llm.base.processes import Processes


@pytest.fixture(scope="module")
def two_process_run(tmp_path_factory):
    """The folder of what processes.py writes in two processes."""
    folder = tmp_path_factory.mktemp("two")
    run_script([], "processes.py", folder)
    return folder


@pytest.mark.long
def test_trls_trainers_score_and_select_over_two_processes(tmp_path):
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    run_script([*launcher, "--mixed_precision", "no", "--main_process_port", "0"], "trl_processes.py", tmp_path)
    groups = json.loads((tmp_path / "groups.json").read_text())
    for steps in groups.values():
        for step, in_step in zip(steps, (False, True), strict=True):
            assert step["in_step"] == in_step
            assert [at for at, kept in enumerate(step["kept"]) if kept] == KEPT
            assert step["gradient"] < 1e-5
            assert step["scores"] < 1e-4
            assert step["alike"]


def check_as_one(two_process_run, tmp_path, target):
    """Train by one process as two did."""
    trainer, rounds = train(tmp_path, target, 1)
    theirs = json.loads((two_process_run / f"{target}.json").read_text())
    assert theirs["alike"]
    for mine, other in zip(rounds, theirs["rounds"], strict=True):
        # The first round has no scores as long as there is no round before it to score by.
        scores, others = (torch.tensor(each["scores"] or [0.0, 1.0]) for each in (mine, other))
        assert float((scores - others).abs().max() / scores.abs().max()) < 1e-4
        assert scores.unique().numel() > 1
        assert mine["reward"] == pytest.approx(other["reward"], abs=1e-9)
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert_close(copy_state(trainer), load_file(two_process_run / f"{target}.safetensors"), 1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_two_processes_train_as_one(two_process_run, tmp_path, target):
    check_as_one(two_process_run, tmp_path, target)


@pytest.mark.long
def test_two_processes_train_as_one_for_more_targets(tmp_path):
    run_script([], "processes.py", tmp_path, ACCELERATE_USE_CPU="1", MORE_TARGETS="1")
    for target in MORE_TARGETS:
        check_as_one(tmp_path, tmp_path / "one" / target, target)


def test_two_processes_go_on_as_if_they_had_not_been_broken_off(two_process_run):
    found = json.loads((two_process_run / "resumed.json").read_text())
    assert found["same"]
    assert len(set(found["responses"])) > 2


def test_processes_that_share_parameters_out_are_refused_but_for_fsdp2_and_deepspeed():
    for kind in (DistributedType.FSDP, DistributedType.MEGATRON_LM):
        with pytest.raises(Unsupported, match=r"FSDP2 .*ZeRO .* a copy each"):
            Processes(SimpleNamespace(distributed_type=kind, is_fsdp2=False))
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        with pytest.raises(Unsupported, match="PPOTrainer needs a copy"):
            Processes(SimpleNamespace(distributed_type=kind), need_copies=True)
    Processes(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True))
    Processes(SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, is_fsdp2=False))


def test_a_batch_smaller_than_the_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "number", 9)
    with pytest.raises(WhenceError, match=r"batch_size is 8, .*9 processes"):
        make_trainer(tmp_path)


@pytest.mark.parametrize(("count", "number"), [(7, 2), (8, 2), (5, 4), (3, 3)])
def test_parts_cover_all_rows_and_differ_by_one_at_most(count, number):
    parts = []
    for rank in range(number):
        accelerator = SimpleNamespace(
            distributed_type=DistributedType.MULTI_CPU, num_processes=number, process_index=rank
        )
        parts.append(list(range(count))[Processes(accelerator).part(count)])
    assert [row for part in parts for row in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
