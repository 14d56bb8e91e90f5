"""What makes scores of language models cheaper: fewer layers, mixed precision."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from languages import language_model, rows_for
from test_llm_trainer import make_model, make_trainer
from test_llm_trl import make_trainer as make_trl_trainer
from whence import NonPositive, WhenceError, attribute
from whence.layers import choose_parameters, find_blocks
from whence.llm import SequenceReturn, TokenPPO, TokenReturn, language_view, score_tokens
from whence.llm.base import Processes, WithValueHead
from whence.llm.ppo import trainer as trainer_module
from whence.llm.scores import Scoring, score

EXACT = 1e-6


def make_scoring(**more: Any) -> Scoring:
    settings = {
        "target": SequenceReturn(),
        "objective": TokenPPO(),
        "temperature": 1.0,
        "engine": "auto",
        "memory": None,
    }
    return Scoring(**settings | {"chunk_size": 2, "layers": 1} | more)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_blocks_are_those_of_the_language_model_next_to_a_vision_tower(adapted: bool, head: bool) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    vision = CLIPVisionConfig(num_hidden_layers=5, image_size=8, patch_size=4, **sizes)
    text = LlamaConfig(num_hidden_layers=3, vocab_size=50, **sizes)
    model: Any = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=49)
    )
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model = WithValueHead(model) if head else model
    path, blocks = find_blocks(model)
    assert path.endswith("language_model.layers")
    assert len(blocks) == 3
    with pytest.raises(WhenceError, match=r"from 1 to 3, the blocks of `.*language_model\.layers`"):
        choose_parameters(model, dict(model.named_parameters()), 4)
    for block in range(1, 3):  # as in models whose blocks are of several classes
        blocks[block] = torch.nn.Identity()
    with pytest.raises(WhenceError, match="has no ModuleList of several"):
        find_blocks(model)


@pytest.mark.parametrize("style", ["gpt2", "qwen3"])
@pytest.mark.parametrize("lora", [None, 0.1])
def test_scores_of_the_last_block(style: str, lora: float | None) -> None:
    model = WithValueHead(language_model(style, lora=lora).eval())
    rows = rows_for(model)
    whole = attribute(
        language_view(model), rows, target=SequenceReturn(), objective=TokenPPO(), layers=1, engine="loop"
    )
    influence = score(model, rows, make_scoring(target=SequenceReturn(rows)))
    assert apart(influence.scores, whole.scores) < EXACT
    assert all(".1." in name for name in influence.provenance.parameters)


def test_parts_of_tokens_sum_to_scores_of_the_same_layers() -> None:
    model = language_model("qwen2").eval()
    rows = rows_for(model)
    parts = score_tokens(model, rows, target=SequenceReturn(), layers=1)
    assert apart(parts.sum(dim=1), score(model, rows, make_scoring()).scores) < 1e-5


class TestTraining:
    def test_layers_that_are_not_there_are_refused_before_training(self, tmp_path):
        with pytest.raises(WhenceError, match="layers is 3; a number from 1 to 2"):
            make_trainer(tmp_path, NonPositive(), layers=3)
        with pytest.raises(WhenceError, match=r"pattern '\*lora\*'"):
            make_trainer(tmp_path, NonPositive(), layers="*lora*")

    @pytest.mark.parametrize("kind", ["grpo", "rloo"])
    def test_trainers_of_trl(self, kind, tmp_path):
        trainer = make_trl_trainer(kind, tmp_path, NonPositive(), target=TokenReturn(), layers=1)
        batches, score_rows = [], trainer._score_rows

        def score_and_compare(rows):
            influence = score_rows(rows)
            exact = attribute(
                language_view(trainer.model, temperature=trainer.temperature), rows, target=trainer.scoring.target,
                objective=trainer.scoring.objective, layers=1, engine="loop",
            )  # fmt: skip
            batches.append(apart(influence.scores, exact.scores))
            return influence

        trainer._score_rows = score_and_compare
        trainer.train()
        assert batches
        assert max(batches) < 1e-4


class TestAutocast:
    def test_scores_in_bfloat16(self, tmp_path, monkeypatch):
        distances = []

        def score_and_compare(model, rows, scoring):
            influence = score(model, rows, scoring)
            exact = score(model, rows, replace(scoring, autocast=False))
            distances.append(apart(influence.scores, exact.scores))
            return influence

        monkeypatch.setattr(trainer_module, "score", score_and_compare)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = make_trainer(tmp_path, NonPositive(), autocast=True)
        trainer.train()
        AcceleratorState._reset_state(reset_partial_state=True)
        assert 1e-4 < max(distances) < 0.1
        assert trainer._run.directory.config["autocast"] is True

    def test_float16_is_refused(self):
        accelerator = SimpleNamespace(mixed_precision="fp16", distributed_type=DistributedType.NO)
        with pytest.raises(WhenceError, match="which is float16: small gradients would be 0 there"):
            make_scoring(processes=Processes(accelerator), autocast=True).check(make_model())
