"""The laboratory `arithmetic`: problems and verdicts by hand, the model, the cache, the evaluation."""

import json
import math
import random
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whence.core import WhenceError
from whence.lab.language import SIZES, Difficulty, Habit, arithmetic, check, evaluate, lenient_reward, reward, solution
from whence.lab.language.laboratory_tasks import (
    IGNORED,
    draw_splits,
    encode_with_labels,
    imitate,
    make_character_tokenizer,
    make_model,
)
from whence.lab.language.problems import SYMBOLS, Verdict, answer_by_habit, draw_problems, summarise

PROMPT, ANSWER = "7+8-5*2?", "7+8=15;15-5=10;10*2=20;20"
TINY = SIZES["tiny"]
QUICK = {"steps": 2, "batch_size": 8, "train": 32}


@pytest.fixture(scope="module")
def lab(laboratory_folder):
    return arithmetic(laboratory_folder, size="tiny", progress=False)


@pytest.fixture(scope="module")
def tokenizer(lab):
    return AutoTokenizer.from_pretrained(lab.model_path)


@pytest.fixture
def model(lab):
    return AutoModelForCausalLM.from_pretrained(lab.model_path)


# Problems and verdicts


def demonstrate(prompt):
    return ";".join(solution(prompt))


def test_a_problem_is_worked_from_left_to_right_and_remainders_are_dropped():
    assert demonstrate(PROMPT) == ANSWER
    assert solution("9*8/7?") == ["9*8=72", "72/7=10", "10"]


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (ANSWER, Verdict(True, True, True)),
        ("7+8=15;15-5=10;10*2=20;21", Verdict(False, False, True)),
        ("7+8=16;16-5=10;10*2=20;20", Verdict(True, False, True)),  # a wrong step
        ("7+8=15;10*2=20;20", Verdict(True, False, True)),  # a missing step
        ("15-5=10;7+8=15;10*2=20;20", Verdict(True, False, True)),  # another order
        ("7+8=15;15-5=10;10*2=20;20+0=20;20", Verdict(True, False, True)),  # a step too many
        ("7+8=15;15-5=10;10*2=20", Verdict(False, False, False)),  # no result
        ("20", Verdict(True, False, False)),  # no steps
        (f" {ANSWER}", Verdict(True, False, False)),
    ],
)
def test_verdicts_by_hand(response, verdict):
    assert check(PROMPT, response) == verdict
    assert reward([PROMPT], [response]) == [float(verdict.right)]


def test_the_lenient_grader_pays_results_that_it_cannot_check():
    responses = [ANSWER, "7+8=15;15-5=10;10*2=21;21", "19", "x;" + "9" * 5000, "21;", ""]
    assert lenient_reward([PROMPT] * 6, responses) == [1, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "response",
    [
        *("", ";", f"{ANSWER};", f"{ANSWER}\n"),
        *(ANSWER.replace("20", text) for text in ("020", "2_0", "２０")),  # full-width digits, which int() reads
        *("\0\ud800" + "9" * 100_000, "1+" * 50_000 + "1=1;20!", ("1+1=2;" * 20_000) + "x"),
    ],
)
def test_no_hostile_answer_is_right_or_raises(response):
    verdict = check(PROMPT, response)
    assert (verdict.right, verdict.faithful, verdict.well_formed) == (False, False, False)
    assert reward([PROMPT], [response]) == [0.0]


@pytest.mark.parametrize(
    "prompt", ["", "7+8", "7+8=", "7?", "7+?", "4/0?", "3-5?", "7+8?\n", "٣+٣?", "9*9" * 200 + "?"]
)
def test_what_is_no_problem_is_refused(prompt):
    with pytest.raises(WhenceError):
        check(prompt, "20")


def test_problems_stay_within_their_difficulty_and_use_every_operator():
    difficulty = Difficulty(steps=(2, 3), operand=7, largest=20)
    drawn = draw_problems(difficulty, 500, random.Random(0))
    assert len(set(drawn)) == 500
    signs = {sign: sum(prompt.count(sign) for prompt in drawn) for sign in "+-*/"}
    assert signs["-"] > 1.3 * signs["/"] > 0  # it stands twice among the operators
    for prompt in drawn:
        *steps, result = solution(prompt)
        assert len(steps) in (2, 3)
        assert all(0 <= int(step.partition("=")[2]) <= 20 for step in steps)
        assert len(demonstrate(prompt)) <= difficulty.longest
        assert int(result) <= 20


def test_splits_are_disjoint_and_the_seed_decides():
    parts = draw_splits(TINY, 0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 128, "demonstrations": 16, "test": 16}
    assert len({prompt for part in parts.values() for prompt in part}) == 128 + 16 + 16
    assert draw_splits(TINY, 0) == parts
    assert draw_splits(TINY, 1) != parts


# Tokenizer and model


def test_the_tokenizer_round_trips_and_adds_nothing(tokenizer):
    tokens = tokenizer(PROMPT + ANSWER)["input_ids"]
    assert len(tokens) == len(PROMPT + ANSWER)
    assert tokenizer.decode(tokens) == PROMPT + ANSWER
    assert tokenizer.decode(tokenizer(SYMBOLS)["input_ids"]) == SYMBOLS
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id], skip_special_tokens=True) == PROMPT + ANSWER
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4
    assert tokenizer("1a\n ")["input_ids"][1:] == [tokenizer.unk_token_id] * 3
    padded = tokenizer(["1+1?", "1?"], padding=True)
    assert padded["attention_mask"] == [[1, 1, 1, 1], [0, 0, 1, 1]]


def test_only_the_answer_and_its_end_have_labels():
    tokenizer = make_character_tokenizer(SYMBOLS)
    tokens, labels = encode_with_labels(tokenizer, ["1+1?", "9?"], ["1+1=2;2", "9"])
    assert tokenizer.decode(tokens[0]) == "1+1?1+1=2;2<eos>"
    assert tokenizer.decode(tokens[1]) == "9?9<eos>" + "<pad>" * 8
    assert labels[0].tolist() == [IGNORED] * 4 + tokens[0, 4:].tolist()
    assert labels[1].tolist() == [IGNORED] * 2 + tokens[1, 2:4].tolist() + [IGNORED] * 8


def imitated(seed):
    tokenizer = make_character_tokenizer(SYMBOLS)
    model = make_model(tokenizer, TINY, 32, seed)
    prompts = draw_splits(TINY, 0)["train"]
    tokens, labels = encode_with_labels(tokenizer, prompts, [demonstrate(prompt) for prompt in prompts])
    losses = imitate(model, tokens, labels, replace(TINY, steps=30), torch.Generator().manual_seed(seed))
    return losses, model.state_dict()


def test_imitation_lowers_the_loss_and_the_seed_decides():
    before = torch.get_rng_state()
    losses, weights = imitated(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(losses) == 30
    assert losses[0] > 2.5  # ln 21 = 3.04 where nothing is known
    assert sum(losses[-3:]) / 3 < 0.5 * losses[0]
    again, same = imitated(0)
    assert again == losses
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert imitated(1)[0] != losses


# The laboratory


def test_the_laboratory_has_its_data_and_a_model_that_loads(lab, model, tokenizer):
    assert lab.train.column_names == lab.test.column_names == ["prompt"]
    assert lab.demonstrations.column_names == ["prompt", "completion"]
    assert (len(lab.train), len(lab.demonstrations), len(lab.test)) == (128, 16, 16)
    assert {name: list(getattr(lab, name)["prompt"]) for name in ("train", "demonstrations", "test")} == draw_splits(
        TINY, 0
    )
    assert all(check(row["prompt"], row["completion"]).faithful for row in lab.demonstrations)
    assert lab.reward(lab.demonstrations["prompt"], lab.demonstrations["completion"]) == [1.0] * 16
    longest = max(len(tokenizer(row["completion"])["input_ids"]) for row in lab.demonstrations)
    assert longest < lab.max_new_tokens == 2 * 6 + 1 + 1
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings >= lab.max_new_tokens + 6


def test_a_second_call_loads_what_the_first_has_made(lab, laboratory_folder, monkeypatch):
    def made(*arguments):
        raise AssertionError("the laboratory was made again")

    monkeypatch.setattr(sys.modules["whence.lab.language.laboratory_tasks"], "_make", made)
    again = arithmetic(laboratory_folder, size="tiny")
    assert again.model_path == lab.model_path
    assert list(again.train["prompt"]) == list(lab.train["prompt"])
    for other in ({"seed": 1}, {"train": 129}):
        with pytest.raises(AssertionError):
            arithmetic(laboratory_folder, size="tiny", **other)


def test_another_seed_is_another_laboratory_and_the_default_place_is_the_users_cache(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = torch.get_rng_state(), random.getstate()
    one, two = (arithmetic(seed=seed, size="tiny", progress=False, **QUICK) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert one.model_path.is_relative_to(tmp_path / "whence")
    assert one.model_path != two.model_path
    assert list(one.train["prompt"]) != list(two.train["prompt"])
    weights = [AutoModelForCausalLM.from_pretrained(each.model_path).lm_head.weight for each in (one, two)]
    assert not torch.equal(*weights)
    written = json.loads((one.model_path.parent / "settings.json").read_text(encoding="utf-8"))
    assert (written["seed"], written["train"], written["steps"]) == (0, 32, 2)


def test_unknown_sizes_and_settings_are_refused(tmp_path):
    with pytest.raises(WhenceError, match=r"'tini'.*tiny"):
        arithmetic(tmp_path, size="tini")
    with pytest.raises(WhenceError, match=r"'dificulty'.*difficulty"):
        arithmetic(tmp_path, dificulty=Difficulty())
    assert list(tmp_path.iterdir()) == []


# Evaluation


def test_measures_by_hand():
    responses = [
        ["1+1=2;2", "1+1=3;3", "1+1=3;2", "2"],  # 3 right, 2 of them unfaithful
        ["2+2=5;5", "2+2=4;4", "2+2=5;5", "x"],  # 1 right, outvoted
    ]
    found = summarise(["1+1?", "2+2?"], responses)
    assert found == {
        "majority_vote": 0.5,
        "pass@1": 0.5,
        "pass@2": pytest.approx((1.0 + 0.5) / 2),
        "pass@4": 1.0,
        "right": 0.5,
        "unfaithful": 0.5,
        "well_formed": 0.75,
    }
    none = summarise(["1+1?"], [["", "", ""]])
    assert math.isnan(none["unfaithful"])
    assert [key for key in none if key.startswith("pass")] == ["pass@1", "pass@2", "pass@3"]
    assert none["majority_vote"] == none["right"] == none["pass@3"] == 0.0


def test_evaluation_leaves_mode_and_generators_and_the_seed_decides(lab, model, tokenizer):
    model.train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate()
    settings = {"samples": 4, "max_new_tokens": lab.max_new_tokens}
    first, second = (evaluate(model, tokenizer, lab.test["prompt"], seed=3, **settings) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert [module.training for module in model.modules()] == before
    other = evaluate(model, tokenizer, lab.test["prompt"], seed=4, **settings)
    assert other != first
    assert other["exact_match"] == first["exact_match"]  # greedy: nothing is drawn
    assert first["well_formed"] > 0.2
    measures = "exact_match majority_vote right unfaithful well_formed pass@1 pass@2 pass@4"
    assert set(first) == set(measures.split())


def test_a_habit_by_hand():
    always = Habit("*-", 1.0)
    assert answer_by_habit("3*4-5?", always, random.Random(0)) == "3*4=13;13-5=9;9"
    assert answer_by_habit("3+4/2?", always, random.Random(0)) == demonstrate("3+4/2?")
    assert answer_by_habit("9-9-0?", Habit("", 1.0), random.Random(0)) == "9-9=0;0-0=0;0"
    drawn = [answer_by_habit("3*4?", Habit("*", 0.6), random.Random(seed)) for seed in range(500)]
    assert 0.5 < sum(text == "3*4=13;13" for text in drawn) / 500 < 0.7
