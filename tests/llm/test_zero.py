"""Scores of models in shards by DeepSpeed's ZeRO stage 3, against the plain loop over the whole model."""

import json

import pytest

from helpers.launching import run_script

pytest.importorskip("deepspeed", reason="DeepSpeed has to be compiled, so it is not among the extras of the tests")


def run_in_two_processes(script, folder):
    """Run a script in two processes, and return what each wrote."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_script(launcher, script, folder, ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_scores_and_training_are_those_of_the_whole_model(tmp_path):
    for results in run_in_two_processes("zero_processes.py", tmp_path):
        assert len(results) == 4 * 11
        for case, result in results.items():
            assert result["apart"] < 1e-4, case
            assert result["same selection"], case


def test_trls_trainers_score_and_train_as_without_scores(tmp_path):
    for results in run_in_two_processes("zero_trl.py", tmp_path):
        assert results.keys() == {"grpo 3", "rloo 3", "grpo 2"}
        for training, result in results.items():
            assert len(result["scores"]) == 2, training
            assert max(result["scores"]) < 1e-4, training
            assert 0 < result["kept"] < 16, training
            assert result["training"] == 0, training
            assert result["moved by a dropped batch"] == 0, training
