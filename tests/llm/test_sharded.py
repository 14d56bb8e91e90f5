"""Scores of models whose parameters several processes hold in shards, against the plain loop over the whole model."""

import json

import pytest

from helpers.launching import run_script
from helpers.scripts.sharded_processes import CASES
from helpers.scripts.shards_trl import check_trainings

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=[2, 4])
def sharded_run(request, tmp_path_factory):
    """Run sharded_processes.py in several processes, and return what each wrote."""
    folder = tmp_path_factory.mktemp("sharded")
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(request.param)]
    run_script(launcher, "sharded_processes.py", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_scores_are_those_of_the_whole_model(sharded_run):
    for results in sharded_run:
        assert len(results["scores"]) == len(CASES[len(sharded_run)]) * 6
        for case, result in results["scores"].items():
            assert result["apart"] < 1e-4, case
            assert result["same selection"], case


def test_trls_trainers_score_and_train_under_fsdp2_as_without_scores(tmp_path):
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_script(launcher, "shards_trl.py", tmp_path, ACCELERATE_USE_CPU="0")
    check_trainings(tmp_path, {"grpo fsdp2", "rloo fsdp2"})


def test_what_needs_whole_parameters_is_refused(sharded_run):
    for results in sharded_run:
        refusals = results["refusals"]
        assert "every process scores its own records" in refusals["no sum"]
        assert "engine is 'forward', and the parameters are in shards" in refusals["engine"]
        assert "give the most records of a pass, chunk_size" in refusals["memory"]
        assert "tokens' parts of scores need them whole" in refusals["tokens"]
        assert "depends on no trainable parameter" in refusals["constant"]
