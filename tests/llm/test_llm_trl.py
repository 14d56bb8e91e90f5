"""GRPO and RLOO through TRL: a step is that of the kept completions alone, or it is refused."""

import copy
import itertools
import math
import re
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import datasets
import polars as pl
import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from helpers.language_training import (
    PROMPTS,
    UNSCORED,
    Drawing,
    Keep,
    Killed,
    Noisy,
    break_off,
    copy_state,
    in_mixed_precision,
    list_results,
    make_model,
    one_flat_group,
    same,
    vowels,
)
from helpers.languages import language_model
from helpers.toys import assert_close, flip_bit
from helpers.trl_training import TRAINERS, Watch, count_rows, make_config, make_target, make_trainer, reward
from whence import DTV, IPPO, KeepAll, NonPositive, Unsupported, WhenceError, attribute
from whence.core import RunDirectoryError
from whence.findings import find
from whence.llm import SequenceReturn, TokenReturn, language_view
from whence.llm.text import join_messages, list_chats, read_chat
from whence.llm.trl import trl_run
from whence.llm.trl.completions import check_selectable, fill_unscored, sum_rewards
from whence.page import write_report
from whence.runs import RunDirectory
from whence.selection import ScoreAll


@pytest.fixture
def batches(monkeypatch):
    """Copies of what TRL made of each generation batch, before anything was selected."""
    found = []
    for trainer in (GRPOTrainer, RLOOTrainer):
        made = trainer._generate_and_score_completions

        def noting(self, inputs, made=made):
            output = made(self, inputs)
            found.append({name: value.clone() for name, value in output.items()})
            return output

        monkeypatch.setattr(trainer, "_generate_and_score_completions", noting)
    return found


def of_kept_alone(kind, trainer, state, batch, positions, weights, monkeypatch):
    """The gradient of TRL's own loss on a batch of only the kept completions."""
    rows = torch.tensor(positions)
    own = {name: value[rows] if value.ndim else value for name, value in batch.items()}
    factors = torch.tensor(weights or [1.0] * len(positions))
    own["advantages"] = own["advantages"] * factors / factors.mean()
    if "num_items_in_batch" in own:
        own["num_items_in_batch"] = own["completion_mask"].sum()
    trainer.model.load_state_dict(state, strict=False)
    trainer.model.zero_grad()
    trainer.model.train()
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    monkeypatch.setattr(trainer.args, "steps_per_generation", 1)
    loss = TRAINERS[kind][1]._compute_loss(trainer, trainer.model, own)
    trainer.accelerator.backward(loss)  # of old releases of Transformers it divides by the accumulated passes again
    return {name: p.grad for name, p in trainer.model.named_parameters()}


LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
WEIGHTED, DIVERGING = (0.0, [2.0, 0.5, 1.0]), (0.1, None)


@pytest.mark.parametrize(
    ("loss", "beta", "weights"),
    [
        # Losses are divided by the rows, by all tokens and by a row's own tokens.
        *((loss, *WEIGHTED) for loss in ("grpo", "bnpo", "luspo", "rloo")),
        *(
            pytest.param(loss, *WEIGHTED, marks=pytest.mark.long)
            for loss in ("dr_grpo", "dapo", "cispo", "sapo", "vespo")
        ),
        *(pytest.param(loss, *DIVERGING, marks=() if loss == "dapo" else pytest.mark.long) for loss in LOSSES),
        ("rloo", *DIVERGING),
    ],
)
def test_a_step_is_that_of_the_kept_alone(tmp_path, batches, monkeypatch, loss, beta, weights):
    kind, positions, watch = "rloo" if loss == "rloo" else "grpo", [0, 3, 6], Watch()
    more = {} if kind == "rloo" else {"loss_type": loss}
    more |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8} if loss == "bnpo" else {}
    more |= {"beta": beta, "num_iterations": 2, "max_steps": 2}
    trainer = make_trainer(kind, tmp_path, Keep(positions, weights), watch=watch, **more)
    trainer.train()
    assert len(batches) == 1
    assert len(watch.gradients) == 2
    for state, found in zip(watch.states, watch.gradients, strict=True):
        expected = of_kept_alone(kind, trainer, state, batches[0], positions, weights, monkeypatch)
        assert_close(found, expected, 1e-10, relative=1e-5)


@pytest.mark.parametrize("kind", TRAINERS)
def test_dropped_completions_cost_no_pass(kind, tmp_path, monkeypatch):
    sizes, positions = count_rows(monkeypatch), [0, 1, 2, 6]
    make_trainer(kind, tmp_path, Keep(positions)).train()
    assert sum(sizes) == len(positions)  # in two minibatches of four; TRL shuffles them
    sizes.clear()
    make_trainer(kind, tmp_path, Keep([3])).train()
    assert sizes == [1, 1]  # a minibatch needs a row, even one without weight


@pytest.mark.parametrize("rule", UNSCORED, ids=repr)
def test_completions_dropped_without_scores_cost_no_pass(tmp_path, rule, monkeypatch):
    sizes = count_rows(monkeypatch)
    more = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "reward_funcs": one_flat_group}
    trainer = make_trainer("grpo", tmp_path, rule, **more)
    trainer.train()
    assert trainer.influence is None
    assert sizes == [4]


@pytest.fixture(scope="module", params=TRAINERS)
def plain_training(request, tmp_path_factory):
    """A training by TRL's own trainer: its kind, settings and parameters after it."""
    settings = {"num_iterations": 2, "max_steps": 4, "max_grad_norm": 1.0}
    trainer = make_trainer(request.param, tmp_path_factory.mktemp("plain"), own=False, **settings)
    trainer.train()
    return request.param, settings, dict(trainer.model.named_parameters())


@pytest.mark.parametrize(
    ("rule", "recorded"),
    [
        *(pytest.param(each, False, id=str(each), marks=pytest.mark.long) for each in (None, KeepAll())),
        pytest.param(DTV(leave_one_out=True, warmup=9), False, id="dtv", marks=pytest.mark.long),
        pytest.param(ScoreAll(), True, id="recorded"),
    ],
)
def test_keeping_all_is_trls_own_training(plain_training, tmp_path, rule, recorded):
    kind, settings, expected = plain_training
    trainer = make_trainer(kind, tmp_path / "trl", rule, run=tmp_path / "run" if recorded else None, **settings)
    trainer.train()
    assert trainer.args.steps_per_generation == 2
    parameters = dict(trainer.model.named_parameters())
    assert parameters.keys() == expected.keys()
    assert_close(parameters, expected)


@dataclass
class NotTheMiddle:
    """Drops all rows of the second and third batch."""

    needs_influence: bool

    def select(self, records, influence=None, progress=None):
        return Keep([] if progress.round in (2, 3) else [0, 1]).select(records)


@pytest.mark.parametrize(
    ("kind", "scaled", "in_step"),
    [
        *(("grpo", *how) for how in ((True, False), (True, True))),
        pytest.param("grpo", False, False, marks=pytest.mark.long),
        *(pytest.param("rloo", *how, marks=pytest.mark.long) for how in ((False, False), (True, False))),
        ("rloo", True, True),
    ],
)
def test_a_batch_that_was_dropped_takes_no_step(kind, tmp_path, scaled, in_step):
    watch, how = Watch(), {"target": make_target(), "max_steps": 4, "weight_decay": 0.1}
    trainer = make_trainer(kind, tmp_path, NotTheMiddle(in_step), watch=watch, **how)
    if scaled:  # as with fp16
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer.train()
    assert (trainer.chooser is not None) == in_step
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}
    states = [*watch.states, {name: p.detach() for name, p in trainer.model.named_parameters()}]
    moves = [not same(before, after) for before, after in pairwise(states)]
    assert moves == [True, False, False, True]  # for all of Adam's momentum


@pytest.mark.parametrize(
    ("kind", "adapted"),
    # test_llm_trl_steps.py has an adapter.
    [("grpo", False), ("rloo", False), *(pytest.param(kind, True, marks=pytest.mark.long) for kind in TRAINERS)],
)
def test_scores_are_those_of_the_loop(kind, tmp_path, adapted):
    from peft import LoraConfig, get_peft_model

    model = make_model()
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    settings = {"temperature": 0.7, "beta": 0.05, "learning_rate": 0.0}
    settings |= {"loss_type": "dr_grpo"} if adapted and kind == "grpo" else {}
    targets = [make_target()] if adapted else [SequenceReturn()]
    targets += [TokenReturn(), make_target()] if kind == "grpo" and not adapted else []
    for engine, target in (*(("ghost", target) for target in targets), ("in_step", make_target())):
        how = {"target": target, "select": "before" if engine == "ghost" else None}
        trainer = make_trainer(kind, tmp_path, NonPositive(), model=copy.deepcopy(model), **how, **settings)
        if engine == "in_step":  # as with fp16
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        trainer.train()
        view, objective = language_view(trainer.model, temperature=0.7), trainer.scoring.objective
        others = None if target.rows is not None else "row"  # no completion votes for itself
        about = {"target": target, "objective": objective, "leave_one_out": others}
        truth = attribute(view, trainer.rows, engine="loop", **about).scores
        assert float((trainer.influence.scores - truth).abs().max() / truth.abs().max()) < 1e-4
        assert trainer.influence.engine == engine  # also where TRL makes a frozen model's embeddings require gradients
        assert trainer.selection.keep.tolist() == (trainer.influence.scores > 0).tolist()


BY_SEQUENCE = {"importance_sampling_level": "sequence"}
OBJECTIVE_SETTINGS = [
    *({"loss_type": loss} for loss in LOSSES),
    *(
        pytest.param({"loss_type": loss, **BY_SEQUENCE}, marks=() if loss == "grpo" else pytest.mark.long)
        for loss in LOSSES
        if loss != "vespo"
    ),
    {"loss_type": "grpo", **BY_SEQUENCE, "use_bias_correction_kl": False},
    {"loss_type": "cispo", "epsilon_high": 0.28, "beta": 0.0},
    *(
        pytest.param(settings, marks=pytest.mark.long)
        for settings in (
            {"loss_type": "dapo", "use_bias_correction_kl": False},
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"loss_type": "luspo", **BY_SEQUENCE, "beta": 0.0},
        )
    ),
]


@pytest.mark.parametrize("settings", OBJECTIVE_SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_the_objectives_gradient_is_that_of_trls_loss(tmp_path, batches, settings):
    size = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    trainer = make_trainer("grpo", tmp_path, ScoreAll(), **{"beta": 0.5, **size, **settings})
    start = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    batch = {**batches[0], "num_items_in_batch": torch.tensor(1)}
    if "ref_per_token_logps" in batch:  # a divergence that differs from token to token
        torch.manual_seed(0)
        batch["ref_per_token_logps"] = batch["ref_per_token_logps"] + torch.randn(batch["completion_ids"].shape)
    trainer.model.load_state_dict(start)
    trainer.model.zero_grad()
    GRPOTrainer._compute_loss(trainer, trainer.model, batch).backward()
    tokens = int(batch["completion_mask"].sum())
    factor = {"grpo": -8, "sapo": -8, "luspo": -8, "dr_grpo": -8 * 5, "bnpo": -tokens}.get(settings["loss_type"], -1)
    theirs = {name: factor * p.grad for name, p in trainer.model.named_parameters()}
    rows = trainer._make_rows(batch)
    view = language_view(trainer.model)
    outputs = view.only({"log_prob"}, view.parameters(), view.prepare(rows))
    total = trainer.scoring.objective(outputs, rows).sum()
    trainer.model.zero_grad()
    total.backward()
    assert_close({name: p.grad for name, p in trainer.model.named_parameters()}, theirs, 1e-8, relative=2e-5)


@pytest.mark.parametrize(
    ("kind", "style"),
    [
        *(("grpo", "opt"), ("rloo", "llama")),
        *(pytest.param("grpo", style, marks=pytest.mark.long) for style in ("gpt2", "gpt_neo", "biogpt")),
    ],
)
def test_log_probs_are_at_the_positions_that_trl_trains_at(kind, tmp_path, batches, style):
    model = language_model(style, vocabulary=12)
    trainer = make_trainer(kind, tmp_path, ScoreAll(), model=model, pad_to_multiple_of=8)
    trainer.train()
    batch = batches[0]
    assert len(batch["prompt_mask"].sum(dim=1).unique()) > 1  # the prompts are padded
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attended = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    width = batch["completion_ids"].shape[1]
    theirs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model.eval(), ids, attended, width)
    mask = batch["completion_mask"].bool()
    rows, view = trainer._make_rows(batch), language_view(trainer.model)
    alone = [view(view.parameters(), view.prepare(rows.take([row]))).log_prob for row in range(len(rows))]
    for log_probs in (view(view.parameters(), view.prepare(rows)).log_prob, torch.cat(alone)):
        assert torch.allclose(log_probs[mask], theirs[mask], atol=1e-5)


def test_each_token_may_have_an_advantage_of_its_own(tmp_path, monkeypatch):
    made = GRPOTrainer._generate_and_score_completions

    def spread(self, inputs):
        output = made(self, inputs)
        return output | {"advantages": output["advantages"][:, None].repeat(1, output["completion_ids"].shape[1])}

    trainers = []
    for method in (made, spread):
        monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", method)
        logging = {"logging_strategy": "steps", "logging_steps": 1}
        trainers.append(make_trainer("grpo", tmp_path, IPPO(), max_steps=2, **logging))
        trainers[-1].train()
    plain, by_token = trainers
    logged = plain.state.log_history[1]
    assert {"influence/kept_share", "influence/mean", "influence/negative_share"} <= logged.keys()
    assert torch.equal(plain.influence.scores, by_token.influence.scores)
    assert same(plain.model.state_dict(), by_token.model.state_dict())


def test_rewards_are_trls_sums():
    nan = math.nan
    given = torch.tensor([*[[0.1, nan]] * 3, [nan, nan], [1.0, 2.0], [nan, 4.0], [nan, nan], [nan, nan]])
    total = sum_rewards(given, torch.tensor([1.0, 0.5]))
    assert torch.equal(total.isnan(), given.isnan().all(dim=1))
    assert total[4:6].tolist() == [2.0, 2.0]
    groups = fill_unscored(torch.cat([total, total[6:], total[6:]]).reshape(3, 4))
    assert groups[0].unique().tolist() == [float(given[0, 0])]  # equal rewards stay equal
    assert groups[1:].tolist() == [[2.0] * 4, [0.0] * 4]


def read_steps(trainer):
    """Return the optimiser's state, by parameter."""
    state = trainer.optimizer.state_dict()["state"]
    return {f"{number}/{key}": value for number, values in state.items() for key, value in values.items()}


def assert_equal_trainings(one, other):
    assert same(copy_state(one), copy_state(other))
    assert same(read_steps(one), read_steps(other))
    assert one.lr_scheduler.state_dict() == other.lr_scheduler.state_dict()
    assert one.rule.seen == other.rule.seen


@pytest.fixture(scope="module")
def whole_grpo(tmp_path_factory):
    """A training by GRPO that was not interrupted."""
    trainer = make_noisy_trainer("grpo", tmp_path_factory.mktemp("whole"))
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """The folder of a run of one step with its checkpoint, and the trainer's settings."""
    folder = tmp_path_factory.mktemp("saved")
    settings = {"run": folder, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    make_trainer("grpo", folder, None, **settings).train()
    return folder, settings


def read_run(path):
    run = RunDirectory.open(path)
    return run, [run.round("records", number) for number in run.rounds()]


def weigh_length(prompts, completions, weight, **columns):
    return [weight * len(text) for text in completions]


class TestRunDirectory:
    @pytest.mark.parametrize(
        ("kind", "rule"),
        [
            *(pytest.param(kind, None, id=f"none-{kind}", marks=pytest.mark.long) for kind in TRAINERS),
            pytest.param("grpo", NonPositive(), id="scored-grpo"),
            pytest.param("rloo", NonPositive(), id="scored-rloo", marks=pytest.mark.long),
        ],
    )
    def test_each_generation_batch_is_a_round(self, tmp_path, batches, kind, rule):
        more = {"run": tmp_path / "run", "about": {"arm": "mine"}, "num_iterations": 2, "max_steps": 4}
        trainer = make_trainer(kind, tmp_path / "trl", rule, **more)
        trainer.train()
        run, tables = read_run(tmp_path / "run")
        assert run.rounds() == [1, 2]
        assert run.config["algorithm"] == kind
        assert run.config["kind"] == "language"
        assert (run.config["arm"], run.config["rounds"], run.config["seed"]) == ("mine", 2, 3)
        assert run.config["trl"]["num_iterations"] == 2
        assert run.table("metrics")["round"].to_list() == run.table("timings")["round"].to_list() == [1, 2]
        for number, (table, batch) in enumerate(zip(tables, batches, strict=True)):
            assert table["record_id"].to_list() == list(range(8 * number, 8 * number + 8))
            assert table["advantage"].to_list() == pytest.approx(batch["advantages"].tolist(), abs=1e-5)
            assert table["tokens"].to_list() == batch["completion_mask"].sum(dim=1).tolist()
            assert table["reward"].to_list() == pytest.approx(reward(table["prompt"], table["response"]), abs=1e-5)
            assert table["group_id"].to_list() == [0] * 4 + [1] * 4
            ids = [row[: int(n)].tolist() for row, n in zip(batch["completion_ids"], table["tokens"], strict=True)]
            assert table["response_ids"].to_list() == ids
            assert table["prompt_ids"].list.len().to_list() == batch["prompt_mask"].sum(dim=1).tolist()
        assert trainer.rows.rewards.tolist() == tables[1]["reward"].to_list()
        if rule is not None:
            assert tables[1]["score"].to_list() == pytest.approx(trainer.influence.scores.tolist())
        write_report(run, tmp_path / "report.html")
        assert "response" in (tmp_path / "report.html").read_text()

    def test_rewards_and_the_users_columns_are_kept(self, tmp_path):
        def log_more(prompts, completions, log_extra, **columns):
            log_extra("keep", [f"{text}!" for text in completions])
            return [None if len(text) > 5 else 1.0 for text in completions]

        length, log_more.__name__ = partial(weigh_length, weight=1.0), "weigh_length"
        columns = {"score": list(range(len(PROMPTS))), "facts": [{"a": n} for n in range(len(PROMPTS))]}
        more = {"reward_funcs": [length, log_more, reward], "prompts": PROMPTS, "columns": columns}
        make_trainer("grpo", tmp_path / "trl", NonPositive(), run=tmp_path / "run", max_steps=2, **more).train()
        run, (table, _) = read_run(tmp_path / "run")
        parts = table["reward.weigh_length 1", "reward.weigh_length 2", "reward.reward"]
        assert parts[:, 0].to_list() == [float(len(text)) for text in table["response"]]
        assert parts[:, 1].to_list() == [None if len(text) > 5 else 1.0 for text in table["response"]]
        assert table["reward"].to_list() == pytest.approx(parts.sum_horizontal().to_list(), abs=1e-5)
        numbers = {prompt: number for number, prompt in enumerate(PROMPTS)}
        prompts = [prompt.replace(" ", "") for prompt in table["prompt"]]  # old tokenizers put spaces between tokens
        assert table["info.score"].to_list() == [numbers[prompt] for prompt in prompts]
        assert table["info.facts"].to_list() == [f'{{"a": {numbers[prompt]}}}' for prompt in prompts]
        assert table["info.keep"].to_list() == [f"{text}!" for text in table["response"]]
        assert run.table("metrics")["reward.reward"][0] == pytest.approx(parts[:, 2].mean())

    def test_more_rounds_can_be_asked_for(self, tmp_path):
        shared = {"run": tmp_path, "save_strategy": "steps", "save_steps": 1}
        make_trainer("grpo", tmp_path, NonPositive(), max_steps=2, **shared).train()
        _, before = read_run(tmp_path)
        trainer = make_trainer("grpo", tmp_path, NonPositive(), max_steps=3, **shared)
        trainer.train(resume_from_checkpoint=True)
        run, tables = read_run(tmp_path)
        assert run.rounds() == [1, 2, 3]
        assert run.config["rounds"] == 3
        assert all(one.equals(other) for one, other in zip(before, tables, strict=False))
        assert run.table("metrics")["round"].to_list() == [1, 2, 3]
        again = make_trainer("grpo", tmp_path, NonPositive(), max_steps=3, **shared)
        with pytest.raises(RunDirectoryError, match=r"3 finished rounds.*resume_from_checkpoint=True.*overwrite=True"):
            again.train()
        with pytest.raises(RunDirectoryError, match="starts after 2"):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert read_run(tmp_path)[0].rounds() == [1, 2, 3]
        trainer.args.max_steps = 4  # the same trainer, once more
        trainer.train(resume_from_checkpoint=True)
        run, _ = read_run(tmp_path)
        assert run.rounds() == run.table("metrics")["round"].to_list() == [1, 2, 3, 4]
        assert run.config["rounds"] == 4
        new = make_trainer("grpo", tmp_path, NonPositive(), max_steps=1, overwrite=True, **shared)
        new.train()
        assert read_run(tmp_path)[0].rounds() == [1]
        assert [file.name for file in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]

    def test_what_is_refused(self, tmp_path):
        with pytest.raises(WhenceError, match="steps_per_generation is 3"):
            make_trainer("grpo", tmp_path, None, run=tmp_path / "run", steps_per_generation=3)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes.txt").write_text("mine")
        with pytest.raises(WhenceError, match="is no run of whence's"):
            make_trainer("grpo", tmp_path / "trl", None, run=tmp_path / "other").train()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"reward_funcs": vowels}, r"rewards was .*trl_training\.reward'\], now .*\.vowels'\]"),
            ({"reward_funcs": [reward, vowels]}, r"rewards was .*, now .*\.reward', .*\.vowels'\]"),
            ({"reward_weights": [2.0]}, r"reward_weights was .*, now \[2.0\]"),
            ({"prompts": [*PROMPTS * 3, *["bb"] * 5]}, "data.prompts.digest was"),
            ({"lr_scheduler_type": "cosine"}, "trl.lr_scheduler_type was 'constant', now 'cosine'"),
            ({"optim_target_modules": ["mlp"]}, r"trl.optim_target_modules was .*, now \['mlp'\]"),
        ],
    )
    def test_other_inputs_are_another_run(self, saved_run, change, message):
        folder, settings = saved_run
        other = make_trainer("grpo", folder, None, max_steps=2, **settings | change)
        with pytest.raises(RunDirectoryError, match=message):
            other.train(resume_from_checkpoint=True)


class NoisyReward(Noisy):
    __name__ = "noisy"

    def __call__(self, prompts, completions, **columns):
        return super().__call__(prompts, completions)


def make_noisy_trainer(kind, folder, **more):
    """Return a trainer whose reward, rule and model draw at random, over epochs of two rounds."""
    settings = {"max_steps": 6, "num_iterations": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    settings |= {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "max_grad_norm": 0.5}
    model, rewards = make_model(attention_dropout=0.3), {"reward_funcs": NoisyReward(), "prompts": PROMPTS}
    return make_trainer(kind, folder, Drawing(), run=folder / "run", model=model, **settings, **rewards, **more)


TRL_PLACES = {
    "generation": (GRPOTrainer, "_generate_and_score_completions", 3),
    "optimisation": (GRPOTrainer, "_compute_loss", 10),
    "writing a checkpoint": (GRPOTrainer, "_save_rng_state", 3),
    "before whence's own file": (trl_run, "save_tree", 3),
}


class TestGoingOn:
    @pytest.mark.parametrize(
        "place",
        [pytest.param(place, marks=() if place == "optimisation" else pytest.mark.long) for place in TRL_PLACES],
    )
    def test_a_training_that_was_broken_off_goes_on_as_if_not(self, whole_grpo, tmp_path, place, monkeypatch):
        *where, count = TRL_PLACES[place]
        with monkeypatch.context() as patch:
            break_off(patch, where, count)
            broken = make_noisy_trainer("grpo", tmp_path)
            with pytest.raises(Killed):
                broken.train()
        again = make_noisy_trainer("grpo", tmp_path)
        again.train(resume_from_checkpoint=True)
        assert again.chooser is not None  # in spite of dropout, which a row by itself draws otherwise
        assert_equal_trainings(again, whole_grpo)
        assert list_results(tmp_path / "run") == list_results(whole_grpo.args.output_dir + "/run")

    def test_what_was_finished_and_what_was_being_written(self, whole_grpo, caplog):
        folder = Path(whole_grpo.args.output_dir)
        again = make_noisy_trainer("grpo", folder)
        assert again.train(resume_from_checkpoint=True).global_step == 6
        assert "finished: nothing is trained" in caplog.text
        assert same(copy_state(again), copy_state(whole_grpo))
        (folder / "checkpoint-6" / "whence.safetensors").unlink()
        again = make_noisy_trainer("grpo", folder)
        again.train(resume_from_checkpoint=True)
        assert "going on after round 2 of 3" in caplog.text
        assert_equal_trainings(again, whole_grpo)
        files = [file for file in (folder / "checkpoint-6").rglob("*") if file.is_file()]
        assert {file.suffix for file in files} >= {".safetensors", ".pt", ".pth", ".json"}
        for file in files:
            with flip_bit(file), caplog.at_level("WARNING", logger="whence"):
                caplog.clear()
                assert again.find_checkpoint() == folder / "checkpoint-4"
                assert f"{file} is damaged" in caplog.text
                with pytest.raises(RunDirectoryError, match=f"{file.name} is damaged"):
                    again.train(resume_from_checkpoint=folder / "checkpoint-6")
        note = RunDirectory.open(folder / "run").notes
        RunDirectory.open(folder / "run").note(id="that of another run")
        assert again.find_checkpoint() is None
        RunDirectory.open(folder / "run").note(**note)

    def test_rloo_too(self, tmp_path):
        trainers = []
        for name, steps in (("whole", (6,)), ("parts", (2, 6))):
            for count in steps:
                schedule = {"lr_scheduler_type": "constant"}  # a shorter training's would fall faster
                trainers.append(make_noisy_trainer("rloo", tmp_path / name, **schedule))
                trainers[-1].args.max_steps = count
                trainers[-1].train(resume_from_checkpoint=count == 6 and name == "parts")
        assert_equal_trainings(trainers[2], trainers[0])
        assert list_results(tmp_path / "parts" / "run") == list_results(tmp_path / "whole" / "run")
        for file in (tmp_path / "whole").glob("checkpoint-*/whence.safetensors"):
            file.unlink()
        with pytest.raises(RunDirectoryError, match="holds no whole checkpoint"):
            trainers[0].train(resume_from_checkpoint=True)

    def test_a_checkpoint_within_a_round_is_passed_over(self, tmp_path, caplog):
        settings = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "run": tmp_path / "run"}
        make_trainer("grpo", tmp_path, None, max_steps=3, **settings).train()
        assert "checkpoint-3 lies within a round" in caplog.text
        assert read_run(tmp_path / "run")[0].rounds() == [1]  # the second has taken a single step
        again = make_trainer("grpo", tmp_path, None, max_steps=4, **settings)
        assert again.find_checkpoint() == tmp_path / "checkpoint-2"
        with pytest.raises(RunDirectoryError, match="checkpoint-3 lies within a round"):
            again.train(resume_from_checkpoint=tmp_path / "checkpoint-3")
        assert again.train(resume_from_checkpoint=True).global_step == 4
        run, _ = read_run(tmp_path / "run")
        assert run.rounds() == run.table("metrics")["round"].to_list() == [1, 2]


CALL = {"name": "add", "arguments": {"a": 2}}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": "2+"}, {"role": "user", "content": "3?"}], "2+\n3?"),
        (
            [
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "name": "add", "content": "5", "tool_calls": None},
            ],
            '{"name": "add", "arguments": {"a": 2}}\n5',
        ),
        # As Arrow stores them, each part has all keys.
        ([{"content": [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]}], "<image>what?"),
        ([{"content": ["a", {"type": "text", "text": "b"}]}], "ab"),
    ],
)
def test_messages_as_one_text(messages, text):
    assert join_messages(messages) == text


def test_a_stored_chat_is_read_as_its_messages():
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    (column,) = list_chats({"prompt": [chat, "4+5?"]})
    table = pl.DataFrame({"prompt": ["Add.\n2+3?", "4+5?"], column.name: column})
    plain = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}]
    assert [read_chat(row, "prompt") for row in table.to_dicts()] == [plain, "4+5?"]
    assert read_chat({"prompt": "4+5?"}, "prompt") == "4+5?"


@pytest.mark.parametrize("select", [pytest.param("before", marks=pytest.mark.long), "in_step"])
def test_a_run_holds_what_the_policy_said_of_tokens(tmp_path, select):
    model = make_model()
    start = copy.deepcopy(model).eval()
    settings = {"num_iterations": 2, "max_steps": 2, "beta": 0.1, "select": select, "run": tmp_path / "run"}
    trainer = make_trainer("grpo", tmp_path, ScoreAll(), model=model, **settings)
    trainer.train()
    run = RunDirectory.open(tmp_path / "run")
    table, reference = run.round("records", 1), trainer.ref_model.eval()
    for row in table.iter_rows(named=True):
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        taken = ids[0, len(row["prompt_ids"]) :, None]
        own, ref = (
            each(ids).logits.detach()[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1) for each in (start, reference)
        )
        log_probs, ref_log_probs = (column.gather(1, taken)[:, 0] for column in (own, ref))
        entropies = -(own.exp() * own).sum(-1)
        assert row["token_log_probs"] == pytest.approx(log_probs.tolist(), abs=1e-5)
        assert row["token_entropies"] == pytest.approx(entropies.tolist(), abs=1e-5)
        assert row["token_ref_log_probs"] == pytest.approx(ref_log_probs.tolist(), abs=1e-5)
        assert row["divergence"] == pytest.approx(float((log_probs - ref_log_probs).sum()), abs=1e-4)
        assert row["ended"] == (row["response_ids"][-1] == 1)
    if "token_ratios" in table.columns:  # the second pass is after a step
        assert max(abs(ratio - 1) for ratios in table["token_ratios"] for ratio in ratios) > 1e-4
    metrics = run.table("metrics").row(0, named=True)
    assert metrics["kl"] == pytest.approx(table["divergence"].mean())
    assert metrics["ended_share"] == table["ended"].mean()


def test_a_run_holds_what_the_sampler_said_of_tokens(tmp_path):
    trainer = make_trainer("grpo", tmp_path, ScoreAll(), select="before", max_steps=1, run=tmp_path / "run")
    generate = GRPOTrainer._generate_and_score_completions

    def generate_as_vllm(self, inputs):
        """Return TRL's batch with what vLLM adds to it: log-probs, here of another temperature."""
        output = generate(self, inputs)
        output["sampling_per_token_logps"] = torch.full(output["completion_ids"].shape, -0.5)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_generate_and_score_completions", generate_as_vllm)
        trainer.train()
    run = RunDirectory.open(tmp_path / "run")
    table = run.round("records", 1)
    for row in table.iter_rows(named=True):
        assert row["token_sampler_log_probs"] == [-0.5] * len(row["response_ids"])
        gaps = [abs(each + 0.5) for each in row["token_log_probs"]]
        assert row["sampler_difference"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-6)
    metrics = run.table("metrics").row(0, named=True)
    assert metrics["sampler_difference"] == pytest.approx(table["sampler_difference"].mean())
    (finding,) = (one for one in find(run) if "sampler" in one.title)
    assert finding.rank == "wrong"
    assert "vllm_importance_sampling_correction" in finding.advice
    assert re.search(r"of the tokens differ by more than half a nat. Most of it is in the tokens '", finding.evidence)


def test_a_sound_run_has_no_finding(tmp_path):
    make_trainer("grpo", tmp_path, run=tmp_path / "run", max_steps=16, learning_rate=1e-3).train()
    assert find(tmp_path / "run") == []


@pytest.mark.parametrize(
    "rule", [pytest.param(None, id="plain", marks=pytest.mark.long), pytest.param(ScoreAll(), id="in the step")]
)
def test_an_evaluation_between_two_steps_leaves_a_batchs_record_as_it_is(tmp_path, rule):
    counts = itertools.count()

    def log_sometimes(prompts, completions, log_extra, **columns):
        if next(counts) == 0:
            log_extra("seen", [float(place) for place in range(len(completions))])
        return reward(prompts, completions)

    trainer = make_trainer(
        *("grpo", tmp_path, rule),
        reward_funcs=log_sometimes,
        run=tmp_path / "run",
        eval_dataset=datasets.Dataset.from_dict({"prompt": ["eee", "dd"]}),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
        steps_per_generation=4,
        max_steps=4,
    )
    trainer.train()
    run = RunDirectory.open(tmp_path / "run")
    first, second = run.round("records", 1), run.round("records", 2)
    for table in (first, second):
        for name in ("prompt", "response"):
            texts = [
                trainer.processing_class.decode(ids, skip_special_tokens=True).replace(" ", "")
                for ids in table[f"{name}_ids"]
            ]
            assert [text.replace(" ", "") for text in table[name]] == texts, name
        assert table["advantage"].to_list() == pytest.approx(advantages_of(table), abs=1e-5)
    assert first["info.seen"].to_list() == list(map(float, range(16)))
    assert "info.seen" not in second.columns or second["info.seen"].null_count() == 16
    assert trainer._logs["extra"]["seen"]  # TRL's own log has it


def advantages_of(table):
    """GRPO's advantages of a round's rewards, in groups of four."""
    groups = table["reward"].to_numpy().reshape(-1, 4)
    centred = groups - groups.mean(1, keepdims=True)
    return (centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4)).flatten().tolist()


def test_evaluation_is_trls_own_and_images_are_refused(tmp_path):
    trainer = make_trainer("grpo", tmp_path, NonPositive())
    trainer.model.eval()
    output = trainer._generate_and_score_completions([{"prompt": "ab"}] * 4)
    assert "loss_scale" not in output
    assert trainer.influence is None
    with pytest.raises(Unsupported, match="pixel_values"):
        trainer._make_rows({"pixel_values": torch.zeros(1)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "bnpo"}, "bnpo.*divided by its own tokens"),
        ({"steps_per_generation": 4}, "several optimiser steps on a generation batch"),
        ({"entropy_coef": 0.01}, "entropy_coef=0.01. Set it to 0.0"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold"),
        ({"delta": 0.5}, "delta below 1"),
        ({"loss_type": "new"}, "loss_type='new'"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": True}, "vLLM's importance sampling ratio"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
    ],
)
def test_settings_under_which_dropped_rows_would_count_are_refused(tmp_path, settings, message):
    args = make_config("grpo", tmp_path)
    for name, value in settings.items():
        setattr(args, name, value)
    with pytest.raises(Unsupported, match=message):
        check_selectable(args)


def test_refusals_are_the_trainers_where_something_is_selected(tmp_path):
    with pytest.raises(Unsupported, match="delta below 1"):
        make_trainer("grpo", tmp_path, NonPositive(), delta=0.5)
    make_trainer("grpo", tmp_path, KeepAll(), delta=0.5)
    with pytest.raises(WhenceError, match="KeepAll reads no scores"):
        make_trainer("grpo", tmp_path, KeepAll(), select="in_step")


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.long)])
def test_scores_are_in_the_models_own_precision_also_under_trls_default(kind, tmp_path):
    with in_mixed_precision():
        trainer = make_trainer(kind, tmp_path, NonPositive(), bf16=True, select="before", learning_rate=0.0)
        trainer.train()
    assert trainer.influence.engine == "ghost"
    assert all(tensor.dtype == torch.float32 for tensor in trainer.model.state_dict().values())
    scoring = {"target": SequenceReturn(), "objective": trainer.scoring.objective}
    truth = attribute(language_view(make_model()), trainer.rows, leave_one_out="row", **scoring).scores
    assert torch.allclose(trainer.influence.scores, truth, rtol=0, atol=1e-4 * float(truth.abs().max()))
