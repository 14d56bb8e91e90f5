"""What whence relies on in TRL: a release that changes it fails here, by name, before anything is trained wrongly."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from helpers.trl_training import TRAINERS, make_trainer
from whence import NonPositive
from whence.llm.trl import supported_settings as trl_settings
from whence.llm.trl.completions import SCALE

ROOT = Path(__file__).parents[2]
HELD = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}


@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_the_methods_that_are_extended(trainer):
    assert list(inspect.signature(trainer._generate_and_score_completions).parameters) == ["self", "inputs"]
    assert list(inspect.signature(trainer._compute_loss).parameters) == ["self", "model", "inputs"]
    parameters = list(inspect.signature(trainer.training_step).parameters)
    assert parameters == ["self", "model", "inputs", "num_items_in_batch"]


def test_every_loss_type_is_known():
    source = inspect.getsource(GRPOTrainer)
    named = set(re.findall(r'loss_type [!=]= "(\w+)"', source))
    for several in re.findall(r"loss_type in [\[(](.*?)[\])]", source):
        named |= set(re.findall(r'"(\w+)"', several))
    # luspo's and sapo's branches are among them: a loss type that is added has to be looked at first.
    assert named == {*trl_settings.ROW_LOSSES, *trl_settings.TOKEN_LOSSES}


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_batch_that_is_edited(kind, tmp_path, monkeypatch):
    seen = []
    made = TRAINERS[kind][1]._generate_and_score_completions

    def noting(self, inputs):
        found = made(self, inputs)
        seen.append((self, found))
        return found

    monkeypatch.setattr(TRAINERS[kind][1], "_generate_and_score_completions", noting)
    trainer = make_trainer(kind, tmp_path, NonPositive())
    trainer.train()
    (_, batch) = seen[0]
    assert batch.keys() >= HELD | ({"num_items_in_batch"} if kind == "grpo" else {"old_logps"})
    assert batch["advantages"].shape == (len(batch["prompt_ids"]),)
    assert batch["completion_mask"].shape == batch["completion_ids"].shape
    # The table that rounds are read from, and the metrics that scores stand in.
    assert {"prompt", "completion", "rewards", "advantages"} <= set(trainer._logs)
    assert set(trainer._metrics) == {"train", "eval"}


def test_what_is_added_to_a_batch_follows_its_rows():
    rows = {
        "completion_ids": torch.arange(8).reshape(4, 2),
        SCALE: torch.arange(4.0),
        "num_items_in_batch": torch.tensor(8),
    }
    shuffled = shuffle_sequence_dict(rows)
    assert torch.equal(shuffled["completion_ids"][:, 0] // 2, shuffled[SCALE].long())
    parts = split_tensor_dict(shuffled, 2)
    assert [len(part[SCALE]) for part in parts] == [2, 2]
    assert [int(part["num_items_in_batch"]) for part in parts] == [8, 8]
    # Rows that do not divide are cut off without a word, which is why none is ever removed.
    assert sum(len(part["completion_ids"]) for part in split_tensor_dict({"completion_ids": torch.zeros(5, 2)}, 2)) == 4


def test_the_settings_that_are_looked_at():
    for config in (GRPOConfig, RLOOConfig):
        known = set(config.__dataclass_fields__)
        assert {"steps_per_generation", "num_iterations", "beta", "generation_batch_size", "temperature"} <= known
    assert {
        *("loss_type", "entropy_coef", "top_entropy_quantile", "off_policy_mask_threshold", "use_liger_kernel"),
        *("vllm_importance_sampling_correction", "use_bias_correction_kl", "router_aux_loss_coef"),
    } <= set(GRPOConfig.__dataclass_fields__)


def test_the_oldest_that_is_supported_is_the_one_that_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    oldest = dict(one.split(">=") for one in project["project"]["optional-dependencies"]["llm"])
    for name in ("transformers", "trl"):
        assert f" {name}=={oldest[name]} " in makefile, name
