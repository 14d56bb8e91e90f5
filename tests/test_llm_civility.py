"""The laboratory `civility`: its phrases by hand, its models, and that training makes them civil."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from whence.errors import WhenceError
from whence.llm import PPOConfig, PPOTrainer, classifier
from whence.llm.lab import civility, phrases
from whence.llm.lab.civility import LONGEST, answer_prompts, measure_answers


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return civility(tmp_path_factory.mktemp("cache"), size="tiny", progress=False)


@pytest.fixture(scope="module")
def model(lab):
    return AutoModelForCausalLM.from_pretrained(lab.model_path)


@pytest.fixture(scope="module")
def tokenizer(lab):
    return AutoTokenizer.from_pretrained(lab.model_path)


def test_what_is_rude_by_hand():
    assert phrases.is_rude("you fool .")
    assert phrases.is_rude("thank you , the bill is fine . get lost .")
    assert not phrases.is_rude("you fooled me . get a bus .")
    assert not phrases.is_rude("please help me , dear .")


def test_moods_decide_how_much_is_rude():
    generator = random.Random(0)
    for mood, share in phrases.MOODS.items():
        text = f"the {mood} clerk says to the guest about the bill :"
        assert phrases.mood_of(text) == mood
        rude = sum(phrases.is_rude(phrases.draw_reply(text, generator)) for _ in range(2000)) / 2000
        assert rude == pytest.approx(1 - (1 - share) ** 2, abs=0.04)
    with pytest.raises(WhenceError, match="no prompt of the civility laboratory"):
        phrases.mood_of("7+8?")


def test_labels_say_whether_there_is_a_rude_sentence():
    for collection in (phrases.REWARDED, phrases.JUDGED):
        texts, labels = phrases.draw_labelled(500, random.Random(1), collection)
        assert [int(phrases.is_rude(text)) for text in texts] == labels
        assert 0.4 < sum(labels) / 500 < 0.6
    seen = {
        word for text in phrases.draw_labelled(2000, random.Random(1), phrases.REWARDED)[0] for word in text.split()
    }
    judged = {
        word for text in phrases.draw_labelled(2000, random.Random(1), phrases.JUDGED)[0] for word in text.split()
    }
    assert "parrot" in judged - seen
    assert "liar" in seen - judged
    with pytest.raises(WhenceError, match="places from 0 to 5"):
        phrases.Collection((7,))


def test_every_word_has_a_token_and_every_text_fits(tokenizer):
    generator = random.Random(2)
    for _ in range(500):
        text = phrases.draw_prompt(generator)
        spoken = phrases.draw_reply(text, generator)
        ids = tokenizer(f"{text} {spoken}")["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == f"{text} {spoken}"
        assert len(tokenizer(spoken)["input_ids"]) < LONGEST


def test_the_model_speaks_and_the_classifiers_tell(lab, model, tokenizer):
    texts = answer_prompts(model, tokenizer, lab.test["prompt"], seed=0)
    assert texts == answer_prompts(model, tokenizer, lab.test["prompt"], seed=0)
    found = measure_answers(lab, texts)
    assert found["rude"] == sum(map(phrases.is_rude, texts)) / len(texts)
    for path, collection in ((lab.reward_path, phrases.REWARDED), (lab.judge_path, phrases.JUDGED)):
        tell = classifier(AutoModelForSequenceClassification.from_pretrained(path), tokenizer, label="toxic")
        held_out, labels = phrases.draw_labelled(200, random.Random(9), collection)
        logits = torch.tensor(tell([""] * 200, held_out))
        rude = torch.tensor(labels, dtype=torch.bool)
        assert float(logits[rude].mean() - logits[~rude].mean()) > 0.5


def test_held_out_and_test_speakers_are_never_calm(lab):
    assert "calm" not in {phrases.mood_of(text) for text in (*lab.held_out["prompt"], *lab.test["prompt"])}
    assert "calm" in {phrases.mood_of(text) for text in lab.train["prompt"]}


def test_the_same_seed_makes_the_same_laboratory(lab, tmp_path):
    again = civility(tmp_path, size="tiny", progress=False)
    for path, other in ((lab.model_path, again.model_path), (lab.judge_path, again.judge_path)):
        assert (path / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert lab.train["prompt"] == again.train["prompt"]
    with pytest.raises(WhenceError, match="no size 'huge'"):
        civility(tmp_path, size="huge")


def test_the_reward_can_be_raised(lab, tokenizer, tmp_path):
    reward = classifier(AutoModelForSequenceClassification.from_pretrained(lab.reward_path), tokenizer, label="neutral")
    settings = {"rounds": 8, "batch_size": 64, "mini_batch_size": 32, "learning_rate": 2e-3, "init_kl_coef": 0.0}
    config = PPOConfig(str(tmp_path), max_new_tokens=LONGEST, disable_tqdm=True, adap_kl_ctrl=False, **settings)
    start = AutoModelForCausalLM.from_pretrained(lab.model_path)
    metrics = PPOTrainer(config, start, tokenizer, reward, lab.train).train()
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.3
