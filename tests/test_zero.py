"""Scores of models in shards by DeepSpeed's ZeRO stage 3, against the plain loop over the whole model."""

import json

import pytest

from launching import run_script

pytest.importorskip("deepspeed", reason="DeepSpeed has to be compiled, so it is not among the extras of the tests")


@pytest.fixture(scope="module")
def zero_run(tmp_path_factory):
    """Run zero_processes.py in two processes, and return what each wrote."""
    folder = tmp_path_factory.mktemp("zero")
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_script(launcher, "zero_processes.py", folder, ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_scores_and_training_are_those_of_the_whole_model(zero_run):
    for results in zero_run:
        assert len(results) == 4 * 11
        for case, result in results.items():
            assert result["apart"] < 1e-4, case
            assert result["same selection"], case
