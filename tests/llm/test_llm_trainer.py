"""PPO on a tiny language model: what trains is what was selected, and nothing else."""

import copy
import random
import shutil
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from importlib.metadata import version

import datasets
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM

from helpers.gradients import clip_surrogate
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
    make_config,
    make_model,
    make_tokenizer,
    make_trainer,
    one_flat_group,
    same,
    train,
    vowels,
)
from helpers.toys import assert_close
from whence import KeepAll, MaxVariance, NonPositive, RandomDrop, WhenceError, ZeroVariance
from whence.core import RunDirectoryError
from whence.engines.memory import measure_bytes
from whence.llm.base import Reference, WithValueHead, make_rows
from whence.llm.base.settings import describe_reward, describe_rows, describe_settings
from whence.llm.ppo import PPOTrainer, make_rollout, ppo_round
from whence.llm.ppo import trainer as trainer_module
from whence.llm.ppo.ppo_round import optimise
from whence.llm.scores import TokenReturn, ValidationLoss, evaluate_rows, in_step, score
from whence.llm.text import generate
from whence.llm.text.prompts import tokenize_prompts
from whence.runs import RunDirectory, checkpoints, lock_directory
from whence.selection import ScoreAll


def evaluate_responses(model, responses, config):
    names = ("input_ids", "attention_mask", "response_mask")
    rows = make_rows(**{name: getattr(responses, name) for name in names})
    return evaluate_rows(model, rows, config.temperature, config.generation_batch_size)


def test_keeping_all_is_training_without_a_rule_and_changes_the_model(tmp_path):
    trainings = [train(tmp_path / str(number), rule) for number, rule in enumerate((None, KeepAll(), ScoreAll()))]
    end, *others = (copy_state(trainer) for trainer, _ in trainings)
    assert all(same(end, other) for other in others)
    assert not same(copy_state(make_trainer(tmp_path / "untrained")), end)
    trainer, rounds = trainings[0]
    first, second = trainer.metrics
    assert [first["round"], second["round"]] == [1, 2]
    assert {"reward", "kl", "train/value_loss", "train/approx_kl", "dropped_share"} <= first.keys()
    assert first["kl"] == pytest.approx(0, abs=1e-5)  # the policy is still the model that it began as
    assert second["kl"] != pytest.approx(0, abs=1e-5)
    assert len(rounds) == 2


UNSCORED += [RandomDrop(like=UNSCORED[0]), RandomDrop(like=UNSCORED[1])]
"""Rules that keep half of a batch of eight rewarded by `one_flat_group`, and need no scores."""


@pytest.mark.parametrize("rule", UNSCORED, ids=repr)
def test_rows_dropped_without_scores_cost_no_pass(tmp_path, rule, monkeypatch):
    sizes, model = [], make_model()
    model.register_forward_pre_hook(
        lambda model, args, columns: sizes.append(len(columns["input_ids"]) * model.training), with_kwargs=True
    )
    _, rounds = train(tmp_path, rule, model, num_generations=4, rounds=1, reward=one_flat_group)
    ((rollout, influence, _, row),) = rounds
    assert len(set(rollout.responses.prompts[:4])) == len(set(rollout.responses.prompts[4:])) == 1
    assert influence is None
    assert row["kept"] == 4
    assert sum(sizes) == 2 * 4  # two epochs


def test_a_round_that_keeps_nothing_takes_no_step_and_advice_is_logged(tmp_path, caplog):
    trainer = make_trainer(tmp_path, Keep([]))
    before = copy_state(trainer)
    metrics = trainer.train()
    assert same(before, copy_state(trainer))
    assert metrics[0]["kept"] == 0
    assert metrics[0]["train/policy_gradient_loss"] is None
    messages = [record.getMessage() for record in caplog.records if record.name == "whence"]
    assert sum("of the records were dropped" in message for message in messages) == 1


@pytest.mark.parametrize(("mini_batch_size", "accumulation"), [(8, 1), (2, 4), (3, 3)])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
def test_the_step_is_that_of_the_kept_rows_alone(tmp_path, mini_batch_size, accumulation, weights, monkeypatch):
    positions, gradients, rollouts = [1, 4, 6], [], []
    trainer = make_trainer(
        tmp_path,
        Keep(positions, weights),
        mini_batch_size=mini_batch_size,
        gradient_accumulation_steps=accumulation,
        ppo_epochs=1,
        rounds=1,
        on_rollout=lambda rollout, *rest: rollouts.append(rollout),
    )
    start = copy.deepcopy(trainer.model)
    step = trainer.optimizer.step

    def noting(*args, **kwargs):
        gradients.append({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})
        return step(*args, **kwargs)

    monkeypatch.setattr(trainer.optimizer, "step", noting)
    trainer.train()
    assert len(gradients) == 1
    rows = rollouts[0].rows.take(torch.tensor(positions))
    given = rows.observations
    prompt = given["input_ids"].shape[1] - given["response_mask"].shape[1]
    places = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found = start(given["input_ids"], given["attention_mask"], places)
    response = given["input_ids"][:, prompt:]
    log_probs = found.logits[:, prompt - 1 : -1].log_softmax(-1).gather(2, response[..., None])[..., 0]
    values, total, mask = found.value[:, prompt - 1 : -1], 0.0, given["response_mask"]
    factors = torch.tensor(weights or [1.0, 1.0, 1.0])
    for row in range(3):
        own = mask[row]
        old, advantages = (given[name][row][own] for name in ("log_probs", "advantages"))
        clipped = clip_surrogate(log_probs[row][own], old, advantages).mean()
        error = 0.5 * (values[row][own] - given["returns"][row][own]).square().mean()
        total = total - factors[row] * (clipped - 0.1 * error) / factors.sum()
    total.backward()
    assert_close(gradients[0], {name: p.grad for name, p in start.named_parameters()}, 1e-9, relative=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_dropout_is_off_wherever_a_model_holds_its_probability(tmp_path, lora):
    class Spatial(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drops_tokens, self.dropout_name = torch.nn.Dropout2d(0.5), True, "half"

    drops = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.5)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}
    sizes |= {"vocab_size": 12, "ffn_dim": 24, "word_embed_proj_dim": 16, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**sizes, **drops))
    model.spatial = Spatial()
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "v_proj"]))
    trained = make_trainer(tmp_path, model=model).model
    spatial = next(module for module in trained.modules() if isinstance(module, Spatial))
    assert (spatial.layer.p, spatial.drops_tokens, spatial.dropout_name) == (0.0, True, "half")
    ids = torch.randint(2, 12, (3, 8))
    first, second = (trained.train()(ids, torch.ones_like(ids)).logits for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, trained.eval()(ids, torch.ones_like(ids)).logits)
    other = make_trainer(tmp_path / "other", model=OPTForCausalLM(OPTConfig(**sizes, **drops)), disable_dropout=False)
    layer = other.model.language_model.model.decoder.layers[0]
    assert (layer.dropout, layer.self_attn.dropout) == (0.5, 0.5)


class Level(Enum):
    HIGH = "high"


@dataclass
class Options:
    level: Level = Level.HIGH
    api_key: str = "hidden"


def test_settings_in_json_types():
    settings = {"options": Options(), "sizes": (1, 2.5, None), "names": {"b", "a"}, "limit": float("inf"), 3: vowels}
    settings |= {"array": np.array([1, 2]), "tensor": torch.tensor(0.5)}
    assert describe_settings(settings) == {
        "options": {"level": "high"},
        "sizes": [1, 2.5, None],
        "names": ["a", "b"],
        "limit": "inf",
        "3": "helpers.language_training.vowels",
        "array": [1, 2],
        "tensor": 0.5,
    }
    secrets = {"token": 1, "hub_token": 1, "OPENAI_API_KEY": 1, "password": 1, "use_auth_token": 1}
    assert describe_settings(secrets | {"max_new_tokens": 2, "eos_token": "x"}) == {
        "max_new_tokens": 2,
        "eos_token": "x",
    }
    assert describe_settings("http://me:hidden@host:80/path") == "http://host:80/path"
    assert describe_reward(partial(vowels, factor=2)) == {
        "call": "helpers.language_training.vowels",
        "args": [],
        "kwargs": {"factor": 2},
    }
    assert describe_reward(Options()) == "test_llm_trainer.Options"
    assert describe_reward(make_model()).startswith("transformers.models.llama.modeling_llama.LlamaForCausalLM")


def test_digests_of_rows():
    rows = [{"prompt": f"{number}"} for number in range(2500)]
    whole = describe_rows(rows)
    assert whole["rows"] == 2500
    assert describe_rows(datasets.Dataset.from_list(rows)) == whole
    assert describe_rows(rows[::-1])["digest"] != whole["digest"]
    assert describe_rows([*rows[:3], {"prompt": "other"}, *rows[4:]])["digest"] != whole["digest"]
    assert describe_rows([])["rows"] == 0
    assert describe_rows(None) is None


def test_advantages_are_of_the_whole_rollout(tmp_path):
    model = WithValueHead(make_model())
    torch.nn.init.normal_(model.value_head.weight)
    config = make_config(tmp_path, gamma=0.9, missing_eos_penalty=0.7)
    tokenizer = make_tokenizer()
    torch.manual_seed(3)
    responses = generate(model.language_model, tokenizer, tokenize_prompts(tokenizer, PROMPTS, config, 32), config)
    assert 0 < responses.ended.sum() < len(PROMPTS)
    reference = Reference(make_model(seed=1))
    rollout = make_rollout(model, reference, responses, vowels, 0.3, config)
    mask, mine = responses.response_mask, evaluate_responses(model, responses, config)
    with reference.activate(model) as start:
        theirs = evaluate_responses(start, responses, config).log_prob
    assert float((mine.log_prob - theirs)[mask].abs().max()) > 0.01
    raw = []
    for row in range(len(PROMPTS)):
        own = mask[row]
        penalty, values = 0.3 * (mine.log_prob - theirs)[row][own], [*mine.value[row][own].tolist(), 0.0]
        rewards = (-penalty).tolist()
        rewards[-1] += vowels([""], [responses.texts[row]])[0] - 0.7 * (not responses.ended[row])
        later, estimates = 0.0, []
        for at in reversed(range(len(rewards))):
            later = rewards[at] + 0.9 * values[at + 1] - values[at] + 0.9 * 0.95 * later
            estimates.insert(0, later)
        raw.append(torch.tensor(estimates))
    everything = torch.cat(raw)
    for row, estimates in enumerate(raw):
        expected = (estimates - everything.mean()) / everything.std()
        found = rollout.rows.observations["advantages"][row]
        assert torch.allclose(found[mask[row]], expected, atol=1e-4)
        assert not found[~mask[row]].any()
        returns = rollout.rows.observations["returns"][row][mask[row]]
        assert torch.allclose(returns, estimates + mine.value[row][mask[row]], atol=1e-4)
    assert rollout.rewards.tolist() == vowels(PROMPTS, responses.texts)


@pytest.mark.parametrize("trained_before", [pytest.param(False, marks=pytest.mark.long), True])
def test_with_an_adapter_the_reference_is_the_model_at_the_start(tmp_path, trained_before):
    base = make_model()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=not trained_before)
    adapted = get_peft_model(copy.deepcopy(base), config)
    ids = torch.tensor([[2, 3, 4, 5]])
    expected = (adapted if trained_before else base)(ids).logits.detach()
    trainer, _ = train(tmp_path, NonPositive(), adapted)
    with trainer.reference.activate(trainer.model.language_model) as start:
        assert torch.allclose(start(ids).logits, expected, atol=1e-6)
    assert not torch.allclose(trainer.model.language_model(ids).logits, expected, atol=1e-4)
    frozen = {n: p for n, p in trainer.model.language_model.named_parameters() if "lora" not in n}
    for name, tensor in frozen.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(tensor, before[plain]), name


def test_what_was_saved_is_loaded(tmp_path):
    trainer, _ = train(tmp_path / "out")
    trainer.save_model()
    loaded = WithValueHead(LlamaForCausalLM.from_pretrained(tmp_path / "out" / "model"))
    loaded.load_value_head(tmp_path / "out" / "model")
    ids, mask = torch.tensor([[2, 3, 4]]), torch.ones(1, 3, dtype=torch.long)
    ours, theirs = trainer.model.eval()(ids, mask), loaded.eval()(ids, mask)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-6)
    assert torch.allclose(ours.value, theirs.value, atol=1e-6)
    with pytest.raises(WhenceError, match="cannot be read as safetensors"):
        loaded.load_value_head(tmp_path)


SETTINGS = {"rounds": 5, "save_every": 1, "adap_kl_ctrl": True, "refresh_target_every": 4}


def make_noisy_trainer(folder, rule=None, **more):
    """Return a trainer whose reward, rule, held-out prompts and model all draw at random."""
    random.seed(0)
    arguments = {"model": make_model(attention_dropout=0.3), "held_out": ["jj", "e"], "sample_prompts": ["ab"]}
    settings = {**SETTINGS, "disable_dropout": False, **arguments, **more}
    evaluate = settings.pop("evaluate", lambda model, tokenizer: {"drawn": float(torch.rand(()))})
    return make_trainer(folder, rule or Drawing(), evaluate=evaluate, **{"reward": Noisy(), **settings})


def read_optimizer(trainer):
    state = trainer.optimizer.optimizer.state
    return {f"{n}/{key}": value for n, p in trainer.model.named_parameters() for key, value in state[p].items()}


PLACES = {
    "generation": (trainer_module, "generate", 6),  # twice a round, and the held-out prompts after the others
    "rewards": (trainer_module, "make_rollout", 5),
    "scoring": (in_step, "compute_target_gradient", 2),
    "optimisation": (ppo_round, "value_loss", 10),
    "writing records": (trainer_module, "make_response_table", 3),
    "evaluation": (trainer_module, "write_evaluation", 4),  # the first is of the start model
    "writing a checkpoint": (checkpoints, "write_tensor_file", 3),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that was not interrupted, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_noisy_trainer(folder)
    trainer.train()
    return trainer, folder


class TestGoingOn:
    @pytest.mark.parametrize(
        "place", [pytest.param(place, marks=() if place == "optimisation" else pytest.mark.long) for place in PLACES]
    )
    def test_a_training_that_was_broken_off_goes_on_as_if_not(self, whole, tmp_path, place, monkeypatch):
        *where, count = PLACES[place]
        with monkeypatch.context() as patch:
            break_off(patch, where, count)
            broken = make_noisy_trainer(tmp_path)
            with pytest.raises(Killed):
                broken.train()
        again = make_noisy_trainer(tmp_path)
        metrics = again.train()
        assert same(copy_state(whole[0]), copy_state(again))
        assert same(read_optimizer(whole[0]), read_optimizer(again))
        assert metrics == whole[0].metrics
        assert list_results(tmp_path) == list_results(whole[1])
        files = sorted(file.name for file in (tmp_path / "checkpoints").iterdir())
        assert files == ["round_00004.safetensors", "round_00005.safetensors"]

    def test_a_finished_run_is_left_as_it_is(self, whole, caplog):
        before = {file: file.read_bytes() for file in whole[1].rglob("*.parquet")}
        again = make_noisy_trainer(whole[1])
        assert again.train() == whole[0].metrics
        assert same(copy_state(whole[0]), copy_state(again))  # as the trainer that trained it
        assert before == {file: file.read_bytes() for file in whole[1].rglob("*.parquet")}
        assert "finished: nothing is trained" in caplog.text

    def test_a_damaged_checkpoint_is_passed_over(self, whole, tmp_path, caplog):
        folder = shutil.copytree(whole[1], tmp_path / "run")
        last, config = folder / "checkpoints" / "round_00005.safetensors", folder / "config.json"
        last.write_bytes(last.read_bytes()[:-1])
        config.write_text(config.read_text().replace(version("torch"), "9.9"))
        again = make_noisy_trainer(folder)
        again.train()
        assert "going on after round 4 of 5" in caplog.text
        assert RunDirectory.open(folder).notes["resumed"][0]["after_round"] == 4  # with another version of torch
        assert same(copy_state(whole[0]), copy_state(again))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"learning_rate": 0.5}, r"learning_rate was 0\.01, now 0\.5"),
            ({"rounds": 4}, r"rounds is 4, and .* has 5 rounds already"),
            ({"model": make_model(hidden_size=32)}, "parameters was"),
            ({"reward": vowels, "rounds": 6}, r"rewards was .*Noisy.*, now .*vowels'\]"),
            ({"prompts": ["ab", "cde", "f", "ghij", "bb"], "rounds": 6}, "data.prompts.digest was"),
            ({"held_out": ["ab", "bb"], "rounds": 6}, "data.held_out.digest was"),
        ],
    )
    def test_other_inputs_are_another_run_and_change_nothing(self, whole, change, message):
        folder = whole[1]
        files = {file: file.read_bytes() for file in folder.rglob("*.*")}
        other = make_noisy_trainer(folder, **change)
        before = copy_state(other)
        with pytest.raises(RunDirectoryError, match=message):
            other.train()
        assert same(before, copy_state(other))
        assert files == {file: file.read_bytes() for file in folder.rglob("*.*")}

    def test_the_scale_of_gradients_goes_on(self, tmp_path):
        first, again = (train(tmp_path, scaled=True, save_every=1)[0] for _ in range(2))
        assert first.accelerator.scaler.get_scale() > 64
        assert again.accelerator.scaler.state_dict() == first.accelerator.scaler.state_dict()

    def test_more_rounds_go_on_and_overwriting_starts_anew(self, tmp_path):
        for rounds in (1, 2):
            make_trainer(tmp_path, rounds=rounds, save_every=1).train()
        trainer = make_trainer(tmp_path, rounds=1, learning_rate=0.5)
        with pytest.raises(RunDirectoryError, match="overwrite=True"):
            trainer.train()
        other = make_trainer(tmp_path, rounds=1, learning_rate=0.5)
        assert len(other.train(overwrite=True)) == 1
        assert RunDirectory.open(tmp_path).rounds() == [1]
        with pytest.raises(WhenceError, match="Build model and trainer anew"):
            other.train(overwrite=True)

    def test_checkpoints_are_asked_for_by_number(self, tmp_path):
        make_trainer(tmp_path / "none", save_every=0).train()
        assert not (tmp_path / "none" / "checkpoints").exists()
        with pytest.raises(RunDirectoryError, match="no checkpoint to go on from"):
            make_trainer(tmp_path / "none", save_every=0).train()
        make_trainer(tmp_path / "some", rounds=3, save_every=2, keep_checkpoints=9).train()
        assert checkpoints.list_checkpoints(tmp_path / "some") == [2, 3]
        with pytest.raises(RunDirectoryError, match="Another process is writing"), lock_directory(tmp_path / "some"):
            make_trainer(tmp_path / "some", rounds=4).train()


DEMONSTRATION = [{"prompt": "a", "completion": "b"}]


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (ZeroVariance(), {}, r"selects by group; the units here are record, row\. PPOConfig\(num_generations=8\)"),
        (RandomDrop(like=MaxVariance(2)), {}, "selects by group"),
        (NonPositive(unit="episode"), {}, "selects by episode; the units here are record, row"),
        (NonPositive, {}, "pass an instance"),
        (NonPositive(), {"held_out": []}, "There are 0 held-out prompts; give one"),
        (NonPositive(), {"held_out": ["jj"], "target": vowels}, "use SequenceReturn"),
        (
            NonPositive(),
            {"held_out": ["jj"], "target": ValidationLoss.of(DEMONSTRATION, make_tokenizer())},
            "use SequenceReturn",
        ),
        (None, {"num_generations": 3}, "batch_size is 8, of which num_generations=3 is no divisor"),
    ],
)
def test_what_is_refused(tmp_path, rule, settings, message):
    with pytest.raises(WhenceError, match=message):
        make_trainer(tmp_path, rule, **settings)


def test_no_pad_token(tmp_path):
    with pytest.raises(WhenceError, match="no pad_token"):
        PPOTrainer(make_config(tmp_path), make_model(), make_tokenizer(pad=False), vowels, PROMPTS)


def test_a_run_directory_tells_of_every_round(tmp_path):
    def measured(model, tokenizer):
        torch.rand(3)
        return {"exact_match": float(model.training)}

    settings = {"select": "before", "rounds": 3, "ppo_epochs": 1}
    trainer, rounds = train(tmp_path, NonPositive(), evaluate=measured, eval_every=2, **settings)
    run = RunDirectory.open(tmp_path)
    assert run.config["kind"] == "language"
    assert run.config["ppo"]["mini_batch_size"] == 4
    assert run.table("evaluations")["round"].to_list() == [0, 2, 3]
    assert run.rounds() == [1, 2, 3]
    metrics, timings = run.table("metrics"), run.table("timings")
    assert metrics["round"].to_list() == timings["round"].to_list() == [1, 2, 3]
    for stage in ("generation", "forward", "scoring", "optimisation"):
        assert (timings[f"{stage}_wall"] > 0).all()
    for number, (rollout, influence, selection, row) in enumerate(rounds, start=1):
        table = run.round("records", number)
        assert table["response"].to_list() == list(rollout.responses.texts)
        assert table["score"].to_list() == pytest.approx(influence.scores.tolist())
        assert table["keep"].to_list() == selection.keep.tolist()
        assert table["record_id"][0] == 8 * (number - 1)
        assert torch.equal(rollout.rows.rewards, rollout.rewards)
        groups, prompts = table["group_id"].to_list(), list(rollout.responses.prompts)
        assert len(set(zip(groups, prompts, strict=True))) == len(set(groups)) == len(set(prompts))
        kept = table.filter("keep")["reward"]
        assert row["reward_kept"] == pytest.approx(kept.mean()) if len(kept) else row["reward_kept"] is None
        assert row["reward"] == pytest.approx(table["reward"].mean())
    alone, _ = train(tmp_path / "alone", NonPositive(), **settings)
    assert same(copy_state(trainer), copy_state(alone))  # measuring draws nothing of training's


def test_trackers_are_told(tmp_path, monkeypatch):
    begun, told = [], []
    trainer = make_trainer(*(tmp_path, NonPositive()), evaluate=lambda model, tokenizer: {"exact_match": 0.5})
    object.__setattr__(trainer.config, "report_to", ("tensorboard",))  # which need not be installed for this test
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setattr(trainer.accelerator, "init_trackers", lambda name, config: begun.append((name, config)))
    monkeypatch.setattr(trainer.accelerator, "log", lambda values, step: told.append((step, values)))
    trainer.train()
    ((name, config),) = begun
    assert name == "mine"
    assert config["learning_rate"] == 1e-2
    assert [step for step, _ in told] == [0, 1, 1, 2, 2]
    rounds = [values for _, values in told if "reward" in values]
    assert {"dropped_share", "train/approx_kl", "seconds/scoring", "kl_coef"} <= rounds[0].keys()
    assert all(isinstance(value, int | float) for values in rounds for value in values.values())
    assert told[0][1] == {"test/exact_match": 0.5}


def test_a_models_own_settings_do_not_change_its_draws(tmp_path):
    model, tokenizer, config = make_model(), make_tokenizer(), make_config(tmp_path)
    prompts = tokenize_prompts(tokenizer, PROMPTS, config, 32)
    found = []
    for penalty in (None, 50.0):
        model.generation_config.repetition_penalty = penalty
        torch.manual_seed(0)
        found.append(generate(model, tokenizer, prompts, config).input_ids)
        assert model.generation_config.repetition_penalty == penalty
    assert torch.equal(*found)


def test_held_out_prompts_are_answered_anew_in_every_round(tmp_path, monkeypatch):
    found, draw = [], PPOTrainer._draw_held_out
    monkeypatch.setattr(PPOTrainer, "_draw_held_out", lambda *args: found.append(draw(*args)) or found[-1])
    trainer, rounds = train(tmp_path / "held", ScoreAll(), held_out=["ba", "jj", "e"], target=TokenReturn())
    assert [len(rows) for rows in found] == [3, 3]
    held = found[0].observations
    width = held["input_ids"].shape[1] - held["response_mask"].shape[1]
    ids, attended = (held[name][:, :width] for name in ("input_ids", "attention_mask"))
    prompts = [row[mask.bool()].tolist() for row, mask in zip(ids, attended, strict=True)]
    assert prompts == [[3, 2], [11, 11], [6]]
    assert not torch.equal(found[0].actions, found[1].actions)
    advantages = held["advantages"][held["response_mask"]]
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)  # whitened over these rows
    assert "TokenReturn(3 rows" in rounds[0][1].target
    plain, _ = train(tmp_path / "plain")
    assert same(copy_state(trainer), copy_state(plain))  # and training's own draws are as they were


def test_prompts_of_a_shorter_chunk_end_where_others_do(tmp_path):
    tokenizer, config = make_tokenizer(), make_config(tmp_path, generation_batch_size=1)
    ids = tokenize_prompts(tokenizer, ["ab", "ghij", "f"], config, 32)
    found = generate(make_model(), tokenizer, ids, config)
    width = max(map(len, ids))
    for row, attended, own in zip(found.input_ids, found.attention_mask, ids, strict=True):
        assert row[width - len(own) : width].tolist() == own
        assert attended[:width].tolist() == [0] * (width - len(own)) + [1] * len(own)
        assert attended[width] == 1


@pytest.mark.parametrize("as_rows", [pytest.param(lambda data: data, marks=pytest.mark.long), list])
def test_rewards_get_the_columns_of_their_prompts(tmp_path, as_rows):
    seen = []

    def reward(prompts, responses, number):
        seen.append((list(prompts), list(number)))
        return [float(len(text)) for text in responses]

    prompts = datasets.Dataset.from_dict({"prompt": PROMPTS, "number": list(range(len(PROMPTS)))})
    held_out = datasets.Dataset.from_dict({"prompt": ["jj", "e"], "number": [70, 71]})
    config = make_config(tmp_path, rounds=2)
    rest = {"rule": NonPositive(), "held_out": as_rows(held_out)}
    PPOTrainer(config, make_model(), make_tokenizer(), reward, as_rows(prompts), **rest).train()
    numbers = {**dict(zip(PROMPTS, range(len(PROMPTS)), strict=True)), "jj": 70, "e": 71}
    assert len(seen) == 4  # of two rounds, each with a rollout to train on and one for the target
    assert all([numbers[text.replace(" ", "")] for text in texts] == given for texts, given in seen)
    table = RunDirectory.open(tmp_path).round("records", 2)
    assert table["info.number"].to_list() == [numbers[text.replace(" ", "")] for text in table["prompt"]]
    for lacking in ({"prompts": prompts.remove_columns("number")}, {"held_out": held_out.remove_columns("number")}):
        parts = {"prompts": prompts, "held_out": held_out, **lacking}
        with pytest.raises(WhenceError, match="reward asks for 'number', and the data set has no such column"):
            PPOTrainer(config, make_model(), make_tokenizer(), reward, rule=NonPositive(), **parts)


def test_mixed_precision_evaluates_and_trains_in_it_and_scores_as_the_model_is(tmp_path):
    before = copy_state(make_trainer(tmp_path / "untrained"))
    with in_mixed_precision():
        trainer, rounds = train(tmp_path, NonPositive(), select="before")
        assert trainer.accelerator.mixed_precision == "bf16"
    assert all(tensor.dtype == torch.float32 for tensor in copy_state(trainer).values())
    assert not same(before, copy_state(trainer))
    rollout, influence = rounds[0][:2]
    assert trainer.metrics[0]["kl"] == pytest.approx(0, abs=1e-6)  # model and start model are evaluated alike
    assert influence.scores.dtype == torch.float32
    trainer.model.load_state_dict(before)
    exact = evaluate_responses(trainer.model, rollout.responses, trainer.config).log_prob
    mask = rollout.responses.response_mask
    apart = (rollout.rows.observations["log_probs"] - exact)[mask].abs()
    assert 1e-5 < float(apart.max()) < 0.1


@pytest.mark.parametrize("adapted", [pytest.param(False, marks=pytest.mark.long), True])
def test_scoring_holds_no_more_than_a_training_step(tmp_path, adapted):
    model = make_model(hidden_size=64, intermediate_size=160, num_hidden_layers=3)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    settings = {"batch_size": 64, "mini_batch_size": 16, "gradient_accumulation_steps": 2, "ppo_epochs": 1, "rounds": 1}
    trainer = make_trainer(tmp_path, model=model, **settings)
    config = trainer.config
    prompts = tokenize_prompts(trainer.tokenizer, PROMPTS * 13, config, 32)[:64]
    responses = generate(trainer.model.language_model, trainer.tokenizer, prompts, config)
    rows = make_rollout(trainer.model, trainer.reference, responses, vowels, 0.1, config).rows
    scoring = replace(trainer.scoring, engine="ghost", leave_one_out=None)
    score(trainer.model, rows, scoring)  # once before, since the first pass also examines the layers
    peak = max(measure_bytes(lambda: score(trainer.model, rows, scoring)))
    settings = {"config": config, "generator": torch.Generator().manual_seed(0), "processes": trainer.processes}
    step = partial(optimise, trainer.model, trainer.optimizer, rows, KeepAll().select(rows), **settings)
    assert peak <= max(measure_bytes(step))


@pytest.mark.long
def test_rewards_rise(tmp_path):
    settings = {"batch_size": 32, "mini_batch_size": 32, "learning_rate": 3e-3, "init_kl_coef": 0.01}
    metrics = make_trainer(tmp_path, rounds=15, **settings).train()
    early, late = (sum(row["reward"] for row in part) / 3 for part in (metrics[:3], metrics[-3:]))
    assert late > early + 0.5


def test_a_trainer_that_was_stopped_between_two_steps_does_not_stop_the_next(tmp_path):
    trainer = make_trainer(tmp_path, rounds=1)
    trainer.accelerator.sync_gradients = False  # as Accelerate leaves it, for all accelerators of the process
    before = copy_state(trainer)
    try:
        trainer.train()
    finally:
        trainer.accelerator.sync_gradients = True
    assert not same(before, copy_state(trainer))
