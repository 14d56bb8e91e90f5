"""Choosing completions inside TRL's own steps, against TRL's trainers, choosing before the steps, and the loop."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from languages import language_model, shaken
from test_llm_trainer import ScoreAndKeepAll, make_model, make_tokenizer
from test_llm_trl import make_trainer
from whence import Selection
from whence.llm import ValidationLoss


class KeepTwoOfThree:
    """Keeps the same rows whether they are scored or not, some with twice the weight."""

    def __init__(self, *, scored):
        self.needs_influence = scored

    def select(self, records, influence=None, progress=None):
        keep = records.ids % 3 > 0
        weights = keep * (1.0 + records.ids % 2)
        return Selection(keep, weights, [None if kept else "a third" for kept in keep.tolist()])


def make_target():
    return ValidationLoss.of([{"prompt": "ab", "completion": "cc"}], make_tokenizer())


def train(folder, kind, style, rule, **settings):
    model = make_model()  # which seeds the generator
    if style == "gpt2":
        model = language_model("gpt2", vocabulary=12)
    elif style == "lora":
        model = shaken(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")))
    plain = {"optim": "sgd", "max_grad_norm": 0.5}  # Adam turns rounding errors of vanishing gradients into steps
    trainer = make_trainer(kind, folder, rule, model=model, **plain | settings)
    trainer.train()
    return trainer


def assert_close(one, other, tolerance=1e-6):
    expected = dict(other.model.named_parameters())
    for name, parameter in one.model.named_parameters():
        assert torch.allclose(parameter, expected[name], rtol=0, atol=tolerance), name


ONE_PASS = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
SHORT = [
    ("grpo", "llama", {"loss_type": "dapo", "num_iterations": 2}),
    ("grpo", "gpt2", {"loss_type": "bnpo", "gradient_checkpointing": False, **ONE_PASS}),
    ("rloo", "lora", {}),
]
LONG = [
    (kind, style, {**loss, "num_iterations": iterations, **passes})
    for kind, losses in (("grpo", ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")), ("rloo", ("",)))
    for loss in ({"loss_type": loss} if loss else {} for loss in losses)
    for style in ("llama", "gpt2", "lora")
    for iterations, passes in ((1, ONE_PASS), (2, {}))
]


@pytest.mark.parametrize(
    ("kind", "style", "settings"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_a_step_that_chooses_is_that_of_choosing_before_it(tmp_path, kind, style, settings):
    settings = {"max_steps": 2 * settings.get("num_iterations", 1), **settings}
    before = train(tmp_path, kind, style, KeepTwoOfThree(scored=False), **settings)
    chosen = train(tmp_path, kind, style, KeepTwoOfThree(scored=True), target=make_target(), **settings)
    assert chosen.influence.engine == "in_step"
    assert torch.equal(chosen.selection.weights, before.selection.weights)
    assert chosen.selection.reasons == before.selection.reasons
    assert_close(chosen, before)
    if (kind, style, settings) in LONG:
        chosen = train(tmp_path, kind, style, ScoreAndKeepAll(), **settings)
        assert_close(chosen, train(tmp_path, kind, style, None, own=False, **settings))
