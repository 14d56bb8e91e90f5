"""PPO's arithmetic on responses, by hand."""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from whence import WhenceError
from whence.llm.base import PPOConfig
from whence.llm.ppo.ppo_round import steer_kl_coef
from whence.llm.scores import gae, reward_tokens, whiten
from whence.llm.text import compute_rewards, find_columns
from whence.llm.text.generation import _mask_until_end

MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def test_whitening_is_over_all_response_tokens():
    values = torch.tensor([[1.0, 2.0, 3.0], [6.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    # Of 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 3.
    spread = math.sqrt(14 / 3)
    expected = torch.tensor([[-2 / spread, -1 / spread, 0.0], [3 / spread, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.allclose(whiten(values, MASK), expected, atol=1e-6)
    single = torch.tensor([[True, False, False]])
    assert whiten(values[:1], single).tolist() == [[1.0, 0.0, 0.0]]


def test_the_reward_is_at_the_last_token():
    penalty = torch.tensor([[0.1, 0.2, 0.3], [0.4, 9.0, 9.0], [9.0, 9.0, 9.0]])
    found = reward_tokens(torch.tensor([1.0, 2.0, 3.0]), penalty, MASK)
    expected = torch.tensor([[-0.1, -0.2, 0.7], [1.6, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.allclose(found, expected)


def test_advantages_by_hand():
    rewards = torch.tensor([[0.0, 1.0, 2.0], [3.0, 50.0, 50.0]])
    values = torch.tensor([[0.5, 0.25, 1.0], [1.0, 70.0, 70.0]])
    mask = MASK[:2]
    # The last: 2 - 1 = 1. Before it: 1 + 0.9 * 1 - 0.25 = 1.65, and 0.9 * 0.8 * 1 = 0.72 more. The first:
    # 0 + 0.9 * 0.25 - 0.5 = -0.275, and 0.72 * 2.37 more.
    expected = [[-0.275 + 0.72 * 2.37, 2.37, 1.0], [2.0, 0.0, 0.0]]
    assert torch.allclose(gae(rewards, values, mask, 0.9, 0.8), torch.tensor(expected))


def test_the_divergences_weight_is_steered():
    assert steer_kl_coef(0.1, 99.0, PPOConfig("out", adap_kl_ctrl=False)) == 0.1
    config = PPOConfig("out", target=6.0, horizon=10_000, batch_size=256)
    # Twice the target, clipped to 0.2 too much; then a tenth too little.
    assert steer_kl_coef(0.1, 12.0, config) == pytest.approx(0.1 * (1 + 0.2 * 256 / 10_000))
    assert steer_kl_coef(0.1, 5.4, config) == pytest.approx(0.1 * (1 - 0.1 * 256 / 10_000))


def test_a_response_ends_with_its_first_end():
    tokens = torch.tensor([[5, 2, 7, 2], [5, 6, 7, 8], [3, 0, 0, 0], [5, 6, 7, 2]])
    mask, ended = _mask_until_end(tokens, [2, 3])
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert ended.tolist() == [True, False, True, True]


class TestRewards:
    def test_columns_go_to_those_that_ask_for_them(self):
        columns = {"answer": ["1", "2"], "level": [3, 4], "prompts": ["x", "y"]}
        texts = ["a", "b"], ["1", "1"]
        assert compute_rewards(lambda p, r: [0.0, 0.0], *texts, columns).tolist() == [0, 0]

        def right(prompts, responses, answer, *, level=0, other=7):
            assert (prompts, level, other) == (["a", "b"], [3, 4], 7)
            return [float(one == due) for one, due in zip(responses, answer, strict=True)]

        def counted(prompts, responses, **rest):
            assert rest == {"answer": ["1", "2"], "level": [3, 4]}
            return [len(rest), len(rest)]

        assert compute_rewards(right, *texts, columns).tolist() == [1, 0]
        assert compute_rewards(counted, *texts, columns).tolist() == [2, 2]
        assert find_columns(right, columns) == ["answer", "level"]
        assert find_columns(lambda *given, **named: [0.0], columns) == []  # what a decorator leaves of a signature
        assert find_columns(lambda p, r, /, **named: [0.0], columns) == list(columns)

        class Judge(torch.nn.Module):
            def forward(self, prompts, responses, level):
                return [float(one) for one in level]

        assert compute_rewards(Judge(), ["a", "b"], ["1", "1"], columns).tolist() == [3, 4]
        with pytest.raises(WhenceError, match=r"right asks for 'answer'.*: none"):
            find_columns(right, {})
        with pytest.raises(WhenceError, match=r"it has: level\."):
            compute_rewards(right, ["a"], ["1"], {"level": [3]})

    @pytest.mark.parametrize(
        ("made", "message"),
        [
            (lambda p, r: [1.0], "returned 1 numbers for 2 responses"),
            (lambda p, r: [1.0, math.nan], "is NaN for response 1, 'no'"),
            (lambda p, r: [math.inf, 1.0], "is inf for response 0, 'yes'"),
            (lambda p, r: None, "<lambda> returned None; .*2 numbers"),
            (lambda p, r: [1.0, None], r"<lambda> returned \[1.0, None\]; .* 0.0 where"),
            (lambda p, r: ["good", 1.0], r"<lambda> returned \['good', 1.0\]"),
        ],
    )
    def test_what_is_no_reward(self, made, message):
        with pytest.raises(WhenceError, match=message):
            compute_rewards(made, ["a", "b"], ["yes", "no"])

    def test_numbers_in_any_form(self):
        for values in ([1, 2.0], (1, 2), torch.tensor([1, 2]), torch.tensor([[1.0], [2.0]]), np.array([1, 2])):
            assert compute_rewards(lambda p, r, values=values: values, ["a", "b"], ["c", "d"]).tolist() == [1, 2]
        assert compute_rewards(lambda p, r: (float(text) for text in r), ["a"], ["3"]).tolist() == [3]

    def test_an_error_names_the_reward_and_its_line(self):
        def lookup(prompts, responses):
            return [{"yes": 1.0}[text] for text in responses]  # the line that is named

        class Judge(torch.nn.Module):
            def forward(self, prompts, responses, factor=1):
                return lookup(prompts, responses)

        with open(__file__, encoding="utf-8") as file:
            line = next(number for number, text in enumerate(file, start=1) if "# the line that is named" in text)
        place = re.escape(f"in {__file__}, line {line}: KeyError: 'no'")
        for reward, name in ((lookup, "lookup"), (partial(Judge(), factor=2), "partial"), (Judge(), "Judge")):
            with pytest.raises(WhenceError, match=f"The reward {name} failed {place}") as caught:
                compute_rewards(reward, ["a", "b"], ["yes", "no"])
            assert isinstance(caught.value.__cause__, KeyError)

    def test_errors_of_whence_pass_through(self):
        def refuse(prompts, responses):
            raise WhenceError("no prompt of the laboratory")

        with pytest.raises(WhenceError, match=r"^no prompt of the laboratory$"):
            compute_rewards(refuse, ["a"], ["b"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 1}, "batch_size is 1; at least 2"),
        ({"rounds": 2.5}, "rounds is 2.5; a whole number"),
        ({"rounds": True}, "rounds is True; a whole number"),
        ({"learning_rate": -1e-5}, "learning_rate is -1e-05; at least 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"cliprange": 0}, "cliprange is 0; a number above 0"),
        ({"top_p": 1.5}, "top_p is 1.5; at most 1"),
        ({"gamma": "1"}, "gamma is '1'; a number"),
    ],
)
def test_settings_that_cannot_be(wrong, message):
    with pytest.raises(WhenceError, match=message):
        PPOConfig("out", **wrong)


def test_settings_are_json():
    assert PPOConfig("out", report_to=("tensorboard",)).to_json()["report_to"] == ["tensorboard"]
