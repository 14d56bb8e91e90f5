"""Scores of models in shards by DeepSpeed's ZeRO stage 3, against the plain loop over the whole model."""

import json

import pytest

from helpers.launching import run_script
from helpers.scripts.shards_trl import check_trainings

pytest.importorskip("deepspeed", reason="DeepSpeed has to be compiled, so it is not among the extras of the tests")


def run_in_two_processes(script, folder):
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_script(launcher, script, folder, ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")


def test_scores_and_training_are_those_of_the_whole_model(tmp_path):
    run_in_two_processes("zero_processes.py", tmp_path)
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(results) == 4 * 11
        for case, result in results.items():
            assert result["apart"] < 1e-4, case
            assert result["same selection"], case


def test_trls_trainers_score_and_train_as_without_scores(tmp_path):
    run_in_two_processes("zero_trl.py", tmp_path)
    check_trainings(tmp_path, {"grpo 3", "rloo 3", "grpo 2"})
