"""What passes take, measured without weights, is what they take."""

import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config

from test_llm_trainer import make_model, make_trainer, optimise_on, score_rows, vowels
from whence.engines.memory import measure_bytes
from whence.errors import Unsupported
from whence.experiments import LanguageConfig
from whence.experiments.llm.estimate import _measure_scoring, _plan_trl, estimate_run
from whence.experiments.llm.tasks import load_task
from whence.llm import SequenceReturn, TokenPPO, ValidationLoss, make_rows
from whence.llm.footprint import (
    BatchShape,
    _fake_tensors,
    count_bytes,
    measure_generating_pass,
    measure_reading_pass,
    measure_training_pass,
    skip_weights,
)
from whence.llm.generation import generate, tokenize_prompts
from whence.llm.model import WithValueHead
from whence.llm.rollout import evaluate_responses, make_rollout
from whence.llm.scoring import Scoring, score

SHAPE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
PROMPT = "abcde"


def adapted(model):
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def imagined(lora=False):
    with skip_weights():
        model = AutoModelForCausalLM.from_config(make_model(**SHAPE).config)
        return adapted(model) if lora else model


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The laboratory is made once for all of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.parametrize("lora", [False, True])
def test_a_pass_holds_what_it_was_said_to(tmp_path, lora):
    model = adapted(make_model(**SHAPE)) if lora else make_model(**SHAPE)
    settings = {"batch_size": 64, "mini_batch_size": 16, "ppo_epochs": 1, "rounds": 1, "generation_batch_size": 64}
    trainer = make_trainer(tmp_path, model=model, **settings)
    config, language_model = trainer.config, trainer.model.language_model
    prompts = tokenize_prompts(trainer.tokenizer, [PROMPT] * 64, config, 32)
    responses = generate(language_model, trainer.tokenizer, prompts, config)
    rows = make_rollout(trainer.model, trainer.reference, responses, vowels, 0.1, config).rows
    generator = torch.Generator().manual_seed(0)
    optimise_on(trainer, rows, generator)  # the first one makes Adam's state, which is counted apart
    own = imagined(lora)
    with skip_weights():
        whole = WithValueHead(own)
    response = responses.response_mask.shape[1]

    trained = measure_training_pass(whole, BatchShape(16, len(PROMPT), response)).bytes
    assert trained == pytest.approx(max(measure_bytes(lambda: optimise_on(trainer, rows, generator))), rel=0.04)
    read = measure_reading_pass(whole, BatchShape(64, len(PROMPT), response)).bytes
    assert read == pytest.approx(
        max(measure_bytes(lambda: evaluate_responses(trainer.model, responses, config))), rel=0.04
    )
    drawn = measure_generating_pass(own, BatchShape(64, len(PROMPT), response)).bytes
    held = max(measure_bytes(lambda: generate(language_model, trainer.tokenizer, prompts, config)))
    assert held <= drawn <= 1.4 * held  # prompts are read and responses kept, but not at the same time


@pytest.mark.parametrize("kind", ["sequence", "validation"])
def test_scoring_in_parts_holds_a_pass_and_the_targets_gradient(tmp_path, kind):
    trainer = make_trainer(tmp_path, model=make_model(**SHAPE), batch_size=64, mini_batch_size=8, rounds=1)
    config = trainer.config
    prompts = tokenize_prompts(trainer.tokenizer, [PROMPT] * 64, config, 32)
    responses = generate(trainer.model.language_model, trainer.tokenizer, prompts, config)
    rows = make_rollout(trainer.model, trainer.reference, responses, vowels, 0.1, config).rows
    target = SequenceReturn()
    if kind == "validation":
        target = ValidationLoss.of([{"prompt": PROMPT, "completion": "cdcd"}] * 40, trainer.tokenizer)
    score_rows(trainer, rows, target)
    held = max(measure_bytes(lambda: score_rows(trainer, rows, target)))
    with skip_weights():
        whole = WithValueHead(imagined())
    response = responses.response_mask.shape[1]
    gradients = count_bytes(whole, trained=True)
    told = measure_training_pass(whole, BatchShape(8, len(PROMPT), response)).bytes + gradients
    if kind == "validation":  # sixteen at a time, beside the gradient so far
        told = max(told, measure_training_pass(whole, BatchShape(16, len(PROMPT), 5)).bytes + gradients)
    assert held <= 1.02 * told
    assert held > 0.8 * told


def test_a_step_of_several_passes_holds_gradients_from_the_first_on(tmp_path, cache):
    settings = {"batch_size": 32, "mini_batch_size": 4, "ppo_epochs": 1, "rounds": 1}
    held = {}
    for passes in (1, 4):
        trainer = make_trainer(
            tmp_path / str(passes), model=make_model(**SHAPE), gradient_accumulation_steps=passes, **settings
        )
        prompts = tokenize_prompts(trainer.tokenizer, [PROMPT] * 32, trainer.config, 32)
        responses = generate(trainer.model.language_model, trainer.tokenizer, prompts, trainer.config)
        rows = make_rollout(trainer.model, trainer.reference, responses, vowels, 0.1, trainer.config).rows
        generator = torch.Generator().manual_seed(0)
        optimise_on(trainer, rows, generator)
        held[passes] = max(measure_bytes(partial(optimise_on, trainer, rows, generator)))
    with skip_weights():
        whole = WithValueHead(imagined())
    told = measure_training_pass(whole, BatchShape(4, len(PROMPT), responses.response_mask.shape[1])).bytes
    assert held[1] == pytest.approx(told, rel=0.1)
    assert held[4] == pytest.approx(told + count_bytes(whole, trained=True), rel=0.1)
    of = {
        passes: estimate_run(LanguageConfig("ppo", 0, size="tiny", settings={"gradient_accumulation_steps": passes}))
        for passes in (1, 4)
    }
    more = of[4].stages["optimisation"] - of[1].stages["optimisation"]
    assert more == 4 * of[1].trained


def test_operations_by_hand():
    own, rows = imagined(), BatchShape(4, 5, 7)
    tokens, width, wide = 12, 64, 160
    keys = width // own.config.num_attention_heads * own.config.num_key_value_heads
    layers = 3 * 2 * tokens * (2 * width * width + 2 * width * keys + 3 * width * wide)
    logits = 2 * (7 + 1) * width * own.config.vocab_size
    # Some releases also turn positions by a product, once for all rows.
    assert measure_reading_pass(own, rows).flops == pytest.approx(4 * (layers + logits), rel=2e-4)
    assert measure_training_pass(own, rows).flops == pytest.approx(3 * 4 * (layers + logits), rel=2e-4)


def test_the_model_is_left_as_it_was_made():
    with skip_weights():
        model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
        model.tie_weights()
    before = {name: (id(tensor), tensor.shape) for name, tensor in model.named_parameters()}
    assert model.lm_head.weight is model.transformer.wte.weight
    with _fake_tensors(model):
        assert model.lm_head.weight is model.transformer.wte.weight
        assert sum(p.numel() for p in model.parameters()) == sum(shape.numel() for _, shape in before.values())
    measure_training_pass(model, BatchShape(1, 1, 1))
    assert {name: (id(tensor), tensor.shape) for name, tensor in model.named_parameters()} == before
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers()))


def test_mixed_precision_takes_less_for_activations():
    rows = BatchShape(64, 5, 27)
    single, mixed = (
        measure_training_pass(imagined(True), rows),
        measure_training_pass(imagined(True), rows, torch.bfloat16),
    )
    assert 0.4 * single.bytes < mixed.bytes < 0.9 * single.bytes
    assert mixed.flops == single.flops


def test_activations_that_are_computed_again_are_not_held():
    with skip_weights():
        model = AutoModelForCausalLM.from_config(make_model(**SHAPE | {"num_hidden_layers": 8}).config)
    whole = measure_training_pass(model, BatchShape(32, 5, 7))
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    again = measure_training_pass(model.train(), BatchShape(32, 5, 7))
    assert again.bytes < 0.5 * whole.bytes
    assert 1.2 * whole.flops < again.flops < 1.4 * whole.flops


def test_a_model_that_looks_at_numbers_is_named():
    class Looks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

        def forward(self, input_ids, attention_mask, position_ids):
            return bool(self.weight.sum() > 0)

    with skip_weights():
        model = Looks()
    with pytest.raises(Unsupported, match="Looks cannot be measured without its weights"):
        measure_reading_pass(model, BatchShape(1, 1, 1))


def test_a_run_is_told_by_what_it_does(cache):
    def of(arm="iif", **more):
        return estimate_run(LanguageConfig(arm, 0, size="tiny", **more))

    whole, with_adapter, unscored = of(), of(lora=2), of("ppo")
    assert whole.trained == whole.parameters
    assert whole.stays["start model"] == whole.stays["weights"] - 4 * 33  # which has a value head
    assert whole.stays["Adam"] == 8 * whole.parameters
    assert with_adapter.stays["start model"] == 0
    assert with_adapter.trained < with_adapter.parameters / 5
    assert "scoring" not in unscored.stages
    assert whole.peak == sum(whole.stays.values()) + max(whole.stages.values())
    # Two epochs of steps beside one pass of scoring, with a batch of 32 at once.
    assert whole.flops["optimisation"] == pytest.approx(2 * whole.flops["scoring"])
    assert whole.flops["generation"] == pytest.approx(whole.flops["forward"] / 2, rel=0.02)
    # Of demonstrations, which are read besides; of held-out prompts, to which responses are drawn besides.
    trusted, apart = of("ippo"), of("iif-held-out", held_out=16)
    assert trusted.flops["scoring"] > whole.flops["scoring"]
    assert apart.prompts == whole.prompts - 16
    assert apart.flops["held_out"] == pytest.approx(1.5 * whole.flops["forward"] / 2, rel=0.1)
    assert of(layers=1).flops["scoring"] < 0.7 * whole.flops["scoring"]
    assert of(layers="auto").flops == whole.flops
    group, last = (of(algorithm="grpo", layers=layers).flops["scoring"] for layers in ("*.layers.1.*", 1))
    assert last == pytest.approx(group)  # hidden states are at hand in PPO alone
    assert whole.stages["evaluation"] > 0
    twice = of(settings={"batch_size": 64})
    assert all(twice.flops[stage] == pytest.approx(2 * flops, rel=1e-2) for stage, flops in whole.flops.items())
    assert (whole.prompts, whole.response_tokens) == (128, 14)
    assert set(whole.to_json()) == {*vars(whole), "peak"}


@pytest.mark.parametrize("layers", [1, 2, "*.layers.3.*", "*.self_attn.*", ["*.layers.1.mlp.*", "*lm_head*"], None])
@pytest.mark.parametrize(
    ("lora", "kind"),
    [
        (False, "sequence"),
        pytest.param(True, "validation", marks=pytest.mark.long),
        pytest.param(False, "validation", marks=pytest.mark.long),
        pytest.param(True, "sequence", marks=pytest.mark.long),
    ],
)
def test_the_work_of_scoring_follows_the_layers(layers, lora, kind):
    settings = SHAPE | {"num_hidden_layers": 5}
    model = make_model(**settings)
    if lora:
        model = adapted(model)
        layers = ["*.layers.1.mlp.*"] if isinstance(layers, list) else layers
        torch.manual_seed(0)
    ids = torch.randint(2, 12, (64, 16))
    tokens = {"attention_mask": torch.ones_like(ids), "response_mask": torch.ones(64, 6, dtype=torch.bool)}
    columns = dict.fromkeys(("log_probs", "advantages"), torch.ones(64, 6))
    rows = make_rows(input_ids=ids, **tokens, **columns)
    demonstrations = ValidationLoss(ids[:32], *(column[:32] for column in tokens.values()))
    target = SequenceReturn() if kind == "sequence" else demonstrations
    scoring = Scoring(target, TokenPPO(), 1.0, "ghost", None, 8, layers=layers)
    score(model, rows, scoring)  # the first one checks the layers' axes, which is counted apart
    with FlopCounterMode(display=False) as counter:
        score(model, rows, scoring)
    with skip_weights():
        empty_model = AutoModelForCausalLM.from_config(make_model(**settings).config)
        empty_model = adapted(empty_model) if lora else empty_model
    shape = BatchShape(8, 10, 6)
    target_shape = None if kind == "sequence" else replace(shape, rows=32)
    estimate = _measure_scoring(empty_model.eval(), shape, 64, target_shape, None, layers=layers).flops
    assert estimate == pytest.approx(counter.get_total_flops(), rel=0.05)
    assert all(p.requires_grad == (not lora or "lora" in name) for name, p in empty_model.named_parameters())


def test_an_adapter_is_added_without_a_warning_of_old_names(cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_task(LanguageConfig("iif", 0, size="tiny", lora=2), weights=False)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_recomputation_is_read_by_either_name(name):
    fields = ("generation_batch_size", "max_completion_length", "per_device_train_batch_size", "num_iterations")
    others = dict.fromkeys((*fields, "beta", "gradient_accumulation_steps", "disable_dropout"), 1)
    plan = _plan_trl(SimpleNamespace(**others, **{name: True}), LanguageConfig("iif", 0, algorithm="grpo"))
    assert plan.recomputes


def test_group_trainers_hold_a_reference_only_for_a_divergence(cache):
    def of(**settings):
        return estimate_run(LanguageConfig("iif", 0, size="tiny", algorithm="grpo", settings=settings))

    plain, held_back = of(), of(beta=0.1)
    assert (plain.stays["start model"], plain.stages["forward"]) == (0, 0)
    assert held_back.stays["start model"] == held_back.stays["weights"]
    assert held_back.flops["forward"] > 0
    again = of(gradient_checkpointing=True)
    assert again.stages["generation"] == plain.stages["generation"]  # which keeps keys and values all the same
    assert again.flops["optimisation"] > 1.2 * plain.flops["optimisation"]
