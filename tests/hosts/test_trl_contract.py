"""What whence relies on in TRL: a release that changes it fails here, by name, before anything is trained wrongly."""

import inspect
import re
import tempfile
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from helpers.contracts import check_each
from helpers.trl_training import TRAINERS, make_trainer
from run_versions import OLDEST
from whence import NonPositive, Unsupported
from whence.llm.scores import ROW_LOSSES, TOKEN_LOSSES
from whence.llm.trl import completions, in_step
from whence.llm.trl.completions import SCALE

ROOT = Path(__file__).parents[2]
HELD = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}


def keeps_what_the_layer_needs():
    """Tell whether log-probs, gradients and products of a layer, 5 tokens by 2 units, are those of a plain layer."""
    pytest.importorskip("trl.kernels")  # since TRL 1.16
    weight, bias = torch.linspace(-1, 2, 10).reshape(5, 2), torch.linspace(0, 1, 5)
    head = in_step.FusedHead(SimpleNamespace(weight=nn.Parameter(weight), bias=nn.Parameter(bias)))
    hidden, targets = torch.linspace(-1, 1, 6).reshape(3, 2).requires_grad_(), torch.tensor([4, 0, 2])
    numbers, g = torch.tensor([[0, -1], [1, 2]]), torch.tensor([[1.0, 0.0], [2.0, -1.0]])
    logits = nn.functional.linear(hidden, head.weight, head.bias) / 0.5
    log_probs = logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((log_probs * g[numbers >= 0]).sum(), (head.weight, head.bias))
    with head.replace((numbers >= 0).long()):
        outputs = in_step.trl_utils._ChunkedLogProbFunction.apply(hidden, head.weight, head.bias, targets, 0.5, 2)
    with torch.no_grad():
        gradient = in_step._sum_rows(head, numbers, g, None)
        product = in_step._multiply(head, dict(zip(("weight", "bias"), expected, strict=True)), numbers, g).sum()
    square = torch.stack([each.square().sum() for each in expected]).sum()
    computed = outputs[0], gradient["weight"], gradient["bias"], product
    pairs = zip(computed, (log_probs, *expected, square), strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, atol=1e-5) for one, other in pairs)


@cache
def train_once(kind):
    """Return a trainer after a step of two passes, and the generation batch that TRL made for it."""
    batches, make_batch = [], TRAINERS[kind][1]._generate_and_score_completions

    def note(self, inputs):
        batches.append(make_batch(self, inputs))
        return batches[-1]

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(TRAINERS[kind][1], "_generate_and_score_completions", note)
        trainer = make_trainer(kind, Path(folder), NonPositive())
        trainer.train()
    return trainer, batches[0]


def read_both(name):
    return [getattr(train_once(kind)[0], name) for kind in TRAINERS]


PRIVATE = {
    "_ChunkedLogProbFunction": keeps_what_the_layer_needs,
    "_backward_tile": keeps_what_the_layer_needs,
    "_step": lambda: read_both("_step") == [2, 2],  # a new batch is drawn at multiples of a batch's passes
    "_buffered_inputs": lambda: [len(parts) for parts in read_both("_buffered_inputs")] == [2, 2],
    # The table that rounds are read from, and the metrics that scores stand in.
    "_logs": lambda: all(
        {"prompt", "completion", "rewards", "advantages", "extra"} <= {*t} for t in read_both("_logs")
    ),
    "_metrics": lambda: all({*metrics} == {"train", "eval"} for metrics in read_both("_metrics")),
    "_tokenizer": lambda: all(each.eos_token_id == 1 for each in read_both("_tokenizer")),
}

test_private = check_each(PRIVATE)


def test_every_loss_type_is_known():
    source = inspect.getsource(GRPOTrainer)
    named = set(re.findall(r'loss_type [!=]= "(\w+)"', source))
    for several in re.findall(r"loss_type in [\[(](.*?)[\])]", source):
        named |= set(re.findall(r'"(\w+)"', several))
    # luspo's and sapo's branches are among them: a loss type that is added has to be looked at first.
    assert named == {*ROW_LOSSES, *TOKEN_LOSSES}


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_batch_that_is_edited(kind):
    trainer, batch = train_once(kind)
    assert batch.keys() >= HELD | ({"num_items_in_batch"} if kind == "grpo" else {"old_logps"})
    assert batch["advantages"].shape == (len(batch["prompt_ids"]),)
    assert batch["completion_mask"].shape == batch["completion_ids"].shape
    # What a run notes of a pass.
    tokens = [torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask")]
    keep = {"logits_to_keep": batch["completion_ids"].shape[1], "compute_entropy": True}
    log_probs, entropies, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, *tokens, **keep)
    assert log_probs.shape == entropies.shape == batch["completion_ids"].shape


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
    extras = project["project"]["optional-dependencies"]
    bounds = [*project["project"]["dependencies"], *extras["sb3"], *extras["llm"]]
    oldest = dict(one.partition(",")[0].split(">=") for one in bounds)
    for name, version in OLDEST.items():
        assert version in (oldest[name], f"{oldest[name]}.0"), name


def test_a_release_without_a_name_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.delattr(RLOOTrainer, "_calculate_rewards")
    with pytest.raises(Unsupported, match=r"trl .* has no `_calculate_rewards`"):
        make_trainer("rloo", tmp_path, NonPositive())
    monkeypatch.setattr(completions, "TRAINER_ATTRIBUTES", ["_buffered_parts"])
    with pytest.raises(Unsupported, match=r"trl .* has no `_buffered_parts`"):
        make_trainer("grpo", tmp_path, NonPositive())
