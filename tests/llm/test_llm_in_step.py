"""PPOTrainer choosing inside the step: its scores are the loop's, its steps those of the rows that are kept."""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import spearmanr
from torch import nn

from helpers.language_training import (
    copy_state,
    in_mixed_precision,
    make_model,
    make_tokenizer,
    make_trainer,
    refuse,
    train,
)
from helpers.toys import assert_close
from whence import NonPositive, Selection, WhenceError, attribute
from whence.engines import TrainingPass
from whence.llm import language_view
from whence.llm.scores import SequenceReturn, TokenPPO, ValidationLoss, in_step
from whence.selection import ScoreAll

DEMONSTRATIONS = [{"prompt": "ab", "completion": "cc"}, {"prompt": "c", "completion": "aei"}] * 3


def demonstrations():
    return ValidationLoss.of(DEMONSTRATIONS, make_tokenizer(), batch_size=2)


def make_lora():
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(make_model(tie_word_embeddings=True), config)


def make_checkpointed():
    model = make_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


SETTINGS = {
    "accumulation, clipping": {"mini_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "checkpointed": {"model": make_checkpointed, "mini_batch_size": 3},
    "adapter on tied embeddings": {"model": make_lora},
    "scaled gradients": {"mini_batch_size": 2},
    "passes that are refused": {"mini_batch_size": 2, "gradient_accumulation_steps": 2},
}


# Those below take the same steps with accumulation; test_training_pass.py and test_llm_trl_steps.py have adapters.
REPEATED = "accumulation, clipping", "adapter on tied embeddings"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in REPEATED else ()) for name in SETTINGS]
)
def test_keeping_all_is_plain_ppo(name, tmp_path, monkeypatch):
    target = demonstrations if name == "checkpointed" else None
    settings = SETTINGS[name] | {"rounds": 2}
    make = settings.pop("model", make_model)
    scaled, refused = name == "scaled gradients", name == "passes that are refused"
    rule = ScoreAll() if scaled or refused else None  # whose steps the other names compare with those of none
    plain, others = train(tmp_path / "plain", rule, model=make(), **settings)
    if refused:  # every second pass, without the comparison before the first
        calls, backward = itertools.count(), TrainingPass.backward
        monkeypatch.setattr(
            TrainingPass, "backward", lambda *args: backward(*args) if next(calls) % 2 == 0 else refuse()
        )
    arguments = {"model": make(), "target": target and target(), "scaled": scaled}
    trainer, rounds = train(tmp_path / "in step", ScoreAll(), **arguments, **settings)
    assert [influence is not None for _, influence, *_ in rounds] == [target is not None, True]
    assert rounds[1][1].provenance.engine == "in_step"
    scored = rounds[1][1].scores != 0
    assert scored.sum() == (4 if refused else 8)
    if rule is not None:
        assert torch.allclose(rounds[1][1].scores[scored], others[1][1].scores[scored], rtol=1e-4)
    assert_close(copy_state(trainer), copy_state(plain), 1e-5)


class ByRecord:
    """Keep some records, with weights."""

    needs_influence = True

    def __init__(self, weights):
        self.weights = weights

    def select(self, records, influence, progress):
        weights = torch.tensor([self.weights.get(number % 8, 0.0) for number in records.ids.tolist()])
        return Selection(weights > 0, weights, [None if weight else "for the test" for weight in weights.tolist()])


@pytest.mark.parametrize(
    ("weights", "size", "passes"),
    [({1: 1.0, 4: 1.0, 6: 1.0}, 8, 1), ({1: 0.5, 4: 2.0, 6: 1.0}, 2, 4), ({}, 8, 1)],
)
def test_both_ways_take_the_same_step_on_the_same_rows(weights, size, passes, tmp_path):
    trained = {}
    for select in ("before", "in_step"):
        settings = {"mini_batch_size": size, "gradient_accumulation_steps": passes, "rounds": 1, "ppo_epochs": 2}
        settings |= {"select": select, "target": demonstrations()}
        trainer, rounds = train(tmp_path / select, ByRecord(weights), **settings)
        trained[select] = copy_state(trainer), rounds[0][2], trainer.metrics[0]
    (one, selection, row), (other, expected, metrics) = trained["in_step"], trained["before"]
    assert selection.weights.equal(expected.weights)
    assert list(selection.reasons) == list(expected.reasons)
    for name in ("kept", "train/policy_gradient_loss", "train/value_loss", "train/approx_kl", "reward_kept"):
        if row[name] is not None or weights:
            assert row[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6)
    assert_close(one, other, 1e-5)


@pytest.mark.parametrize("target", [None, SequenceReturn, demonstrations, "held out"])
def test_scores_are_those_of_the_loop(target, tmp_path):
    more = {"learning_rate": 0.0, "mini_batch_size": 4, "vf_coef": 0.5, "cliprange_value": 0.1, "model": make_model()}
    more |= {"held_out": ["ba", "e"]} if target == "held out" else {"target": target and target()}
    trainer, rounds = train(tmp_path, NonPositive(), **more)
    objective, view = TokenPPO(vf_coef=0.5, clip_range_vf=0.1), language_view(trainer.model)
    before, rows, influence = rounds[0][0].rows, rounds[1][0].rows, rounds[1][1]

    def own(view, params, records):
        return objective(view(params, view.prepare(before)), before).mean()

    known = {None: own, SequenceReturn: SequenceReturn(before)}.get(target) or trainer.scoring.target
    if target == "held out":
        known = SequenceReturn(trainer._draw_held_out(trainer.held_out, 2, {}))
    exact = attribute(view, rows, target=known, objective=objective, engine="loop").scores
    assert float((influence.scores - exact).abs().max() / exact.abs().max()) < 1e-5
    assert spearmanr(influence.scores, exact).statistic == pytest.approx(1)
    assert rounds[1][2].keep.tolist() == (exact > 0).tolist()


def test_a_gradient_of_the_target_serves_some_rounds(tmp_path, monkeypatch):
    numbers = []
    compute = in_step.compute_target_gradient
    monkeypatch.setattr(
        in_step, "compute_target_gradient", lambda *args: numbers.append(len(trainer.metrics) + 1) or compute(*args)
    )
    for target, expected in ((demonstrations(), [1, 4]), (SequenceReturn(), [1, 3])):
        numbers.clear()
        settings = {"refresh_target_every": 3, "rounds": 4, "ppo_epochs": 1}
        trainer = make_trainer(tmp_path / str(expected[1]), NonPositive(), target=target, **settings)
        trainer.train()
        assert numbers == expected


def test_mixed_precision(tmp_path):
    with in_mixed_precision():
        plain, _ = train(tmp_path / "plain")
        trainer, rounds = train(tmp_path / "in step", ScoreAll())
    assert rounds[1][1] is not None
    assert_close(copy_state(trainer), copy_state(plain), 0.02)


def test_a_gradient_of_0_is_passed_over(tmp_path):
    settings = {"target": SequenceReturn(), "init_kl_coef": 0.0, "vf_coef": 0.0}
    _, rounds = train(tmp_path, NonPositive(), reward=lambda prompts, texts: [0.0] * len(texts), **settings)
    assert [influence for _, influence, *_ in rounds] == [None, None]
    assert all(selection.keep.all() for *_, selection, _ in rounds)


class Gain(nn.Module):
    """A layer without a rule."""

    def __init__(self, layer):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.gain


class Scaled(nn.Module):
    """A layer with a parameter of no layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layer(x) * self.scale


class Flipped(nn.Sequential):
    """A layer that has the rows in another order."""

    def forward(self, x):
        return super().forward(x.flip(0)).flip(0)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (Gain, "rule for the layer `language_model.model.norm`"),
        pytest.param(Scaled, "norm.scale`", marks=pytest.mark.long),
        (Flipped, "on two rows the"),
    ],
)
def test_what_steps_cannot_take_apart_is_scored_before_them(wrap, message, tmp_path, caplog):
    model = make_model()
    model.model.norm = wrap(model.model.norm)
    _, rounds = train(tmp_path, NonPositive(), model=model, ppo_epochs=1)
    assert {influence.provenance.engine for _, influence, *_ in rounds} & {"ghost", "forward", "loop"}
    messages = [record.getMessage() for record in caplog.records if "before the steps" in record.getMessage()]
    assert len(messages) == 1
    assert message in messages[0]
    if wrap is Gain:
        with pytest.raises(WhenceError, match=r"cannot be chosen in the step: .* no rule"):
            make_trainer(tmp_path, NonPositive(), model=model, select="in_step")


class Own(ScoreAll):
    def score(self, records, attribute):
        return None


def test_refusals(tmp_path):
    for rule, more, message in (
        (None, {}, "KeepAll reads no scores"),
        (NonPositive(), {"objective": TokenPPO()}, "another objective"),
        (NonPositive(unit="group"), {"num_generations": 2}, "drops by the group"),
        (Own(), {}, "Own brings its own scores"),
    ):
        with pytest.raises(WhenceError, match=message):
            make_trainer(tmp_path, rule, select="in_step", **more)
    with pytest.raises(WhenceError, match="'in_step', 'before' or None"):
        make_trainer(tmp_path, NonPositive(), select="after")
