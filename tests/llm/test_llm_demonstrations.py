"""Trusted answers in tokens, and what the tokens of a data set are refused for."""

import pytest
from tokenizers.processors import TemplateProcessing

from helpers.language_training import CHAT, make_tokenizer
from whence.core import InvalidRecords, WhenceError
from whence.llm import PPOConfig, ValidationLoss
from whence.llm.text.prompts import encode_pair, tokenize_prompts

ROWS = [{"prompt": "ab", "completion": "cc"}, {"prompt": "cde", "completion": "a"}]


def encode(rows, tokenizer, **settings):
    columns = ValidationLoss.of(rows, tokenizer, **settings).rows.observations
    return [columns[name] for name in ("input_ids", "attention_mask", "response_mask")]


def test_prompts_stand_left_and_responses_right():
    ids, attended, mask = encode(ROWS, make_tokenizer())
    assert ids.tolist() == [[0, 2, 3, 4, 4, 1], [4, 5, 6, 2, 1, 0]]
    assert attended.tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]
    assert mask.tolist() == [[True, True, True], [True, True, False]]


def test_an_end_that_a_tokenizer_appends_ends_no_prompt():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    assert tokenizer("ab")["input_ids"] == [2, 3, 1]
    rows = [*ROWS, {"prompt": "ab</s>", "completion": "cc</s>"}]
    plain = encode(ROWS, make_tokenizer())[0]
    assert encode(ROWS, tokenizer)[0].tolist() == plain.tolist()
    assert encode(rows, tokenizer)[0][2].tolist() == [2, 3, 1, 4, 4, 1]
    config = PPOConfig("unused", max_new_tokens=2)
    assert tokenize_prompts(tokenizer, ["ab", "ab</s>"], config, None) == [[2, 3], [2, 3, 1]]


def test_a_chat_goes_through_its_template():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    row = {"prompt": [{"role": "user", "content": "ab"}], "completion": [{"role": "assistant", "content": "cc"}]}
    ids, _, mask = encode([row], tokenizer)
    assert ids.tolist() == [[2, 3, 11, 4, 4, 1]]
    assert mask.tolist() == [[True, True, True]]
    tokenizer.chat_template = "{% if brief %}i{% endif %}" + CHAT
    ids, _, _ = encode([row], tokenizer, chat_template_kwargs={"brief": True})
    config = PPOConfig("unused", max_new_tokens=2, chat_template_kwargs={"brief": True})
    assert ids.tolist() == [[10, 2, 3, 11, 4, 4, 1]]
    assert tokenize_prompts(tokenizer, [row["prompt"]], config, None) == [[10, 2, 3, 11]]
    tokenizer.chat_template = CHAT.replace("m['content']", "m['content'][:1]")
    with pytest.raises(WhenceError, match="are not to be found"):
        encode([row], tokenizer)


TURNS = (
    "{% for message in messages %}{{ 'i' if message.role == 'user' else 'j' }}"
    "{{ 'e' if message.role == 'assistant' and loop.last }}{{ message.content }}</s>g{% endfor %}"
    "{% if add_generation_prompt %}j{% endif %}"
)


def test_what_the_template_and_others_say_does_not_count():
    """The template puts an `e` before the last answer, as if it had been thought, and a `g` after each message."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TURNS
    said = [("assistant", "ab"), ("tool", "cd"), ("assistant", "a"), ("user", "b"), ("assistant", "e")]
    row = {
        "prompt": [{"role": "user", "content": "dd"}],
        "completion": [{"role": role, "content": content} for role, content in said],
    }
    (ids,), _, (mask,) = encode([row], tokenizer)
    text = "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))
    assert text == "idd</s>gjab</s>gjcd</s>gja</s>gib</s>gje</s>"
    trained = ids[-len(mask) :][mask].tolist()
    assert "".join(tokenizer.convert_ids_to_tokens(trained)) == "ab</s>a</s>e</s>"


def test_an_answer_is_its_text_however_the_template_writes_it():
    """The template puts an `e` before an answer, as if it had been thought, and writes a text in parts as nothing."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TURNS
    prompt, answer = [{"role": "user", "content": "dd"}], {"role": "assistant", "content": ""}
    parts = {**answer, "content": [{"type": "text", "text": "ab"}]}
    pairs = [encode_pair(0, {"prompt": prompt, "completion": each}, tokenizer, None) for each in ([answer], "ab")]
    assert [tokenizer.decode(pair.response).replace(" ", "") for pair in pairs] == ["</s>", "ab</s>"]
    tokenizer.chat_template = TURNS.replace("message.content", "(message.content if message.content is string else '')")
    pair = encode_pair(0, {"prompt": prompt, "completion": [parts]}, tokenizer, None)
    assert tokenizer.decode(pair.response).replace(" ", "") == "ab</s>"


@pytest.mark.parametrize("about", [{"tool_calls": [{"function": {"name": "add"}}]}, {"reasoning_content": "b"}])
def test_what_a_template_leaves_out_of_an_answer_is_no_answer(about):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TURNS
    rows = [
        {"prompt": [{"role": "user", "content": "d"}], "completion": [{"role": "assistant", "content": "", **about}]}
    ]
    with pytest.raises(WhenceError, match="not to be found"):
        encode(rows, tokenizer)


def test_what_is_cut_off_counts_for_nothing(caplog):
    _, _, mask = encode(ROWS, make_tokenizer(), max_length=3)
    assert mask.tolist() == [[True], [False]]
    assert "1 of 2 demonstrations have no response token" in caplog.text
    with pytest.raises(InvalidRecords, match=r"response_mask is False .* 2 demonstrations"):
        ValidationLoss.of(ROWS, make_tokenizer(), max_length=2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no demonstrations"),
        ([{"prompt": "a", "answer": "b"}], "holds prompt, answer; the columns 'prompt' and 'completion'"),
        (["text"], "holds a str; the columns"),
        ([{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}], "a text and a chat"),
    ],
)
def test_other_data_sets_are_refused(rows, message):
    with pytest.raises(WhenceError, match=message):
        encode(rows, make_tokenizer())


def test_a_tokenizer_without_a_pad_token_is_refused():
    with pytest.raises(WhenceError, match="no pad_token"):
        encode(ROWS, make_tokenizer(pad=False))
