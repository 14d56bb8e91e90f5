"""Choosing completions inside TRL's own steps, against TRL's trainers, choosing before the steps, and the loop."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from helpers.language_training import make_model, refuse
from helpers.languages import language_model, shaken
from helpers.toys import assert_close
from helpers.trl_training import count_rows, make_target, make_trainer
from whence import NonPositive, Selection, Unsupported
from whence.engines import TrainingPass
from whence.llm.trl import in_step
from whence.llm.trl.completions import measure_denominator, take_rows
from whence.llm.trl.in_step import PassChooser
from whence.selection import ScoreAll


class KeepTwoOfThree:
    """Keeps the same rows whether they are scored or not, some with twice the weight."""

    def __init__(self, *, scored):
        self.needs_influence = scored

    def select(self, records, influence=None, progress=None):
        keep = records.ids % 3 > 0
        weights = keep * (1.0 + records.ids % 2)
        return Selection(keep, weights, [None if kept else "a third" for kept in keep.tolist()])


def assert_equal_models(one, other, tolerance=1e-6):
    assert_close(*(dict(trainer.model.named_parameters()) for trainer in (one, other)), tolerance)


def train(folder, kind, style, rule, **settings):
    model = make_model()  # which seeds the generator
    if style == "gpt2":
        model = language_model("gpt2", vocabulary=12)
    elif style == "lora":
        model = shaken(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")))
    # Adam turns the rounding errors of vanishing gradients into steps.
    trainer = make_trainer(kind, folder, rule, model=model, optim="sgd", **settings)
    trainer.train()
    return trainer


ONE_PASS = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
SHORT = [
    ("grpo", "llama", {"loss_type": "dapo", "num_iterations": 2, "beta": 0.5}),  # weights are of the divergence, too
    ("rloo", "lora", {}),
]
LONG = [("grpo", "gpt2", {"loss_type": "bnpo", "max_grad_norm": 0.01, "gradient_checkpointing": False, **ONE_PASS})]
LONG += [
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
    assert_equal_models(chosen, before)
    if (kind, style, settings) in LONG[1:]:
        chosen = train(tmp_path, kind, style, ScoreAll(), **settings)
        assert_equal_models(chosen, train(tmp_path, kind, style, None, own=False, **settings))


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.long)])
def test_a_pass_that_is_refused_trains_plainly(tmp_path, kind, monkeypatch):
    settings = {"target": make_target(), "num_iterations": 2, "max_steps": 4}
    plain, calls = train(tmp_path, kind, "llama", None, own=False, **settings), itertools.count()
    backward = TrainingPass.backward
    monkeypatch.setattr(TrainingPass, "backward", lambda *args: backward(*args) if next(calls) % 2 == 0 else refuse())
    trainer = train(tmp_path, kind, "llama", ScoreAll(), **settings)
    assert trainer.influence.scores.count_nonzero() == 4
    assert_equal_models(trainer, plain)


@pytest.mark.parametrize("select", [None, pytest.param("before", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_generation": 4, "max_steps": 4},
        {"entropy_coef": 0.1},
        *(
            pytest.param({name: value}, marks=pytest.mark.long)
            for name, value in (
                *(("loss_type", "bnpo"), ("top_entropy_quantile", 0.5), ("delta", 0.9)),
                ("off_policy_mask_threshold", 0.5),
            )
        ),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_all_rows_are_scored_and_train_where_none_may_be_dropped(tmp_path, settings, select, monkeypatch, caplog):
    settings = {"max_steps": 2, **settings}
    with pytest.raises(Unsupported, match="Completions cannot be selected"):
        train(tmp_path, "grpo", "llama", NonPositive(), **settings)
    ends, end = [], PassChooser.end
    monkeypatch.setattr(PassChooser, "end", lambda chooser: ends.append(chooser) or end(chooser))
    scored = train(tmp_path, "grpo", "llama", ScoreAll(), select=select, **settings)
    assert_equal_models(scored, train(tmp_path, "grpo", "llama", None, own=False, **settings), tolerance=0)
    # The two rows that are compared at first share an entropy bonus, and differ from one alone; a quantile of their
    # entropies may differ, too, and then that is said.
    refused = "entropy_coef" in settings or ("top_entropy_quantile" in settings and "on two rows" in caplog.text)
    in_step = select is None and not refused
    assert len(ends) == (2 if in_step else 0)  # one for each generation batch
    assert scored.influence.engine == ("in_step" if in_step else "ghost")
    assert len(scored.rows) == 4 * settings.get("steps_per_generation", 2)
    advantages = scored.rows.advantages
    # In the step a delta below 1 clips positive advantages at once, and what is clipped has no gradient.
    has_gradient = advantages < 0 if in_step and "delta" in settings else advantages != 0
    assert torch.equal(scored.influence.scores != 0, has_gradient)


SEVERAL_STEPS = {"steps_per_generation": 4}
OWN_GRADIENTS = [{}, {"loss_type": "bnpo", **SEVERAL_STEPS}]
OWN_GRADIENTS += [pytest.param(each, marks=pytest.mark.long) for each in ({"loss_type": "dr_grpo"}, SEVERAL_STEPS)]
OWN_GRADIENTS += [
    pytest.param(
        {"loss_type": loss, "steps_per_generation": steps, "num_iterations": iterations}, marks=pytest.mark.long
    )
    for loss in ("dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
    for steps in (2, 4, 6)
    for iterations in (1, 2)
]


@pytest.mark.parametrize("settings", OWN_GRADIENTS, ids=str)
def test_the_default_target_is_the_last_batchs_own_gradient_of_all_its_rows(tmp_path, settings):
    """Of several steps on a batch each has its rows at the parameters before it, by TRL's loss of each row alone."""
    steps = settings.get("steps_per_generation", 2) // 2
    passes = []
    rule = ScoreAll() if steps > 1 or settings.get("loss_type") == "bnpo" else NonPositive()
    trainer = make_trainer(
        "grpo", tmp_path, rule, optim="sgd", max_steps=steps * settings.get("num_iterations", 1), **settings
    )
    compute_loss, chooser = trainer._compute_trl_loss, trainer.chooser

    def watch(model, inputs):
        if chooser.is_open and chooser._is_confirmed and torch.is_grad_enabled() and model.training:
            passes.append(
                (
                    {n: p.detach().clone() for n, p in model.named_parameters()},
                    {n: c.clone() if hasattr(c, "clone") else c for n, c in inputs.items()},
                )
            )
        return compute_loss(model, inputs)

    trainer._compute_trl_loss = watch
    trainer.train()
    trainer._compute_trl_loss = compute_loss
    total, count = {name: torch.zeros_like(p) for name, p in trainer.model.named_parameters()}, 0
    for state, inputs in passes:
        trainer.model.load_state_dict(state)
        for place in range(len(inputs["completion_ids"])):
            row = take_rows(inputs, torch.tensor([place]))
            trainer.model.zero_grad()
            (compute_loss(trainer.model, row) * measure_denominator(trainer, row)).backward()
            for name, parameter in trainer.model.named_parameters():
                total[name] -= parameter.grad
            count += 1
    assert count == 4 * settings.get("steps_per_generation", 2)
    for name, expected in total.items():
        assert torch.allclose(trainer.chooser.gradient[name], expected / count, rtol=1e-4, atol=1e-5), name


def test_rows_dropped_in_the_first_step_cost_later_ones_no_pass(tmp_path, monkeypatch):
    sizes = count_rows(monkeypatch)
    rule = KeepTwoOfThree(scored=True)
    train(tmp_path, "rloo", "llama", rule, target=make_target(), num_iterations=2, max_steps=2)
    assert sizes[:4] == [1, 2, 4, 4]  # a plain pass on one row and a recorded one on two are compared at first
    assert sum(sizes[4:]) == 5


def change_saved_tensors(known):
    class Changed(known):
        @staticmethod
        def forward(ctx, *args):
            columns = known.forward(ctx, *args)
            ctx.save_for_backward(*ctx.to_save, columns[0])
            return columns

        @staticmethod
        def backward(ctx, *gradients):
            names = ("compute_dtype", "chunk_size", "kernel_args", "needs_input_grad")
            kept = {name: getattr(ctx, name) for name in names}
            return known.backward(SimpleNamespace(saved_tensors=ctx.saved_tensors[:-1], **kept), *gradients)

    return Changed


CHANGES = {
    "has no attribute 'backward'": lambda known: SimpleNamespace(apply=known.apply),
    "too many values to unpack": change_saved_tensors,
    "lm_head.weight` differs": None,
}


@pytest.mark.parametrize(
    ("message", "rewards"),
    [
        *((message, "plain") for message in CHANGES),
        *(pytest.param(message, "flat", marks=pytest.mark.long if CHANGES[message] else ()) for message in CHANGES),
    ],
)
def test_where_trls_output_layer_is_another_rows_are_chosen_before(tmp_path, monkeypatch, caplog, message, rewards):
    known, gradient, settings = find_function(), in_step._sum_rows, {}
    if (change := CHANGES[message]) is not None:
        monkeypatch.setattr(in_step.trl_utils, in_step._NAME, change(known))
    else:
        monkeypatch.setattr(in_step, "_sum_rows", lambda *args: {n: 1.01 * t for n, t in gradient(*args).items()})
    if rewards == "flat":  # rows are compared even if none of the batch has an advantage
        settings["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    chosen = train(tmp_path, "grpo", "llama", KeepTwoOfThree(scored=True), **settings)
    assert caplog.text.count("passes of their own") == 1
    assert message in caplog.text
    assert (chosen.chooser, chosen.influence.engine) == (None, "ghost")
    assert_equal_models(chosen, train(tmp_path, "grpo", "llama", KeepTwoOfThree(scored=False), **settings))


def find_function():
    return pytest.importorskip("trl.kernels").ChunkedLogProbFunction  # since TRL 1.16


def test_accelerates_backward_pass_is_put_back_if_a_rule_fails(tmp_path):
    class Failing(KeepTwoOfThree):
        def select(self, *args):
            raise ArithmeticError

    trainer = make_trainer("grpo", tmp_path, Failing(scored=True), target=make_target())
    with pytest.raises(ArithmeticError):
        trainer.train()
    assert "backward" not in vars(trainer.accelerator)
