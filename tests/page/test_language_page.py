"""A language model's run: rewards that are gamed, what its rows hold of tokens, and a chat's turns."""

import json

import numpy as np
import polars as pl
import pytest
import torch

from whence.findings import find
from whence.findings.gamed_rewards import find_onset
from whence.llm.base import average_rows, list_signals
from whence.llm.text import list_chats
from whence.page import ExploredRun, build_round, describe_runs
from whence.page.content.responses import describe_text, list_turns
from whence.runs import RunDirectory, write_flag


def run_of(path, make_columns, rounds=12):
    """Rounds of eight responses to eight prompts; `make_columns(round, generator)` returns their numbers."""
    run, generator = RunDirectory.create(path, {"kind": "language"}), np.random.default_rng(0)
    for number in range(1, rounds + 1):
        ids = np.arange(64)
        table = {"record_id": 64 * number + ids, "prompt": [f"p{at // 8}" for at in ids], "response": ["r"] * 64}
        columns = {name: np.asarray(values, float) for name, values in make_columns(number, generator).items()}
        run.write_round("records", number, pl.DataFrame(table | columns))
        run.append("metrics", {"round": number, **{name: values.mean() for name, values in columns.items()}})
    return run


def hack(number, generator):
    """From round 5 on ever more responses trick one reward, and lose the other."""
    tricks = generator.random(64) < np.clip((number - 4) / 6, 0, 0.9)
    right = ~tricks & (generator.random(64) < 0.6)
    return {"reward.right": right, "reward.long": np.where(tricks, 1.0, 0.2), "info.level": np.arange(64) // 8}


class TestGamedRewards:
    def test_which_reward_since_when_and_by_which_responses(self, tmp_path):
        run = run_of(tmp_path / "run", hack)
        (finding,) = find(run)
        assert finding.next_command == f"whence view {run.path}"
        assert finding.title == "`long` rises while `right` falls, since about round 4"
        assert "`long` goes from 0.2 to 0.9" in finding.evidence
        assert finding.kind == "reward"
        assert finding.p < 1e-6
        rows = run.round("records", finding.round).filter(pl.col("record_id").is_in(finding.record_ids))
        assert rows["reward.long"].to_list() == [1.0] * len(finding.record_ids)
        assert rows["reward.right"].sum() == 0
        assert 5 <= finding.round <= 9
        page = describe_runs([ExploredRun(run)], [[1, finding.round, 12]])["runs"][0]
        assert page["opens"]["round"] == finding.round
        assert [curve["name"] for curve in page["curves"]] == ["right", "long", "level"]

    def test_a_number_that_a_reward_logged_falls(self, tmp_path):
        def columns(number, generator):
            rows = hack(number, generator)
            falls = {"info.accuracy": rows["reward.right"], "info.level": np.full(64, 12.0 - number)}
            return {"reward": rows["reward.long"], **falls}

        (finding,) = find(run_of(tmp_path, columns))
        assert finding.title.startswith("`reward` rises while `accuracy` falls")  # not the data set's `level`

    def test_the_onset_is_where_curves_begin_to_part(self):
        flat, ramp = np.zeros(10), np.arange(1, 6) / 5
        rises = np.concatenate([flat, ramp, np.ones(5)])
        assert find_onset(rises, -rises) == 9
        assert find_onset(rises, np.zeros(20)) == 9


class TestSignals:
    def test_numbers_by_hand(self):
        mask = torch.tensor([[True, True, False], [True, False, True]])
        unknown = torch.tensor([[-1.0, -3.0, 9.0], [-2.0, 9.0, torch.nan]])
        series = list_signals(
            *(mask, [2, 3]),
            log_probs=unknown,
            entropies=unknown.abs(),
            ref_log_probs=torch.tensor([[-2.0, -2.0, 0.0], [-4.0, 0.0, 0.0]]),
            ratios=torch.tensor([[1.0, 1.5, 1.0], [0.7, 1.0, torch.nan]]),
            clip=(0.8, 1.2),
        )
        table = pl.DataFrame(series)
        assert table["token_log_probs"].to_list() == [[-1.0, -3.0], [-2.0, None, None]]
        assert table["entropy"].to_list() == [2.0, 2.0]
        assert table["divergence"].to_list() == [0.0, 2.0]
        assert table["clip_share"].to_list() == [0.5, 1.0]
        means = average_rows(table.with_columns(pl.Series("reward.a", [1.0, None]), pl.Series("info.text", ["x", "y"])))
        assert means == {"kl": 1.0, "train/clip_fraction": 0.75, "train/entropy_loss": -2.0, "reward.a": 1.0}

    def test_tokens_of_a_row(self):
        row = {"response": "ab", "response_ids": [0, 5]}
        row |= {"token_log_probs": [-1.0, None], "token_ref_log_probs": [-3.0, -1.0]}
        tokens = describe_text(row, ["a", "b"])["tokens"]
        assert tokens == {"texts": ["a", "<5>"], "log_probs": [-1, None], "divergence": [2, None]}
        assert describe_text(row, [])["tokens"] is None


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


class TestTurns:
    def test_messages_keep_their_roles_and_calls(self):
        chat = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
        (series,) = list_chats({"prompt": [chat, "plain"], "response": ["a", "b"]})
        assert series.name == "chat.prompt"
        assert series[1] is None
        assert list_turns({"chat.prompt": series[0]}, "prompt") == [
            {"role": "user", "text": "2+3?"},
            {"role": "assistant", "calls": ['add({"a": 2})'], "text": ""},
        ]

    @pytest.mark.parametrize(
        ("text", "turns"),
        [
            ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", [("user", "hi")]),
            ("<|start_header_id|>system<|end_header_id|>\n\nbe<|eot_id|>", [("system", "be")]),
            ("<start_of_turn>model\nyes<end_of_turn>\n<start_of_turn>user\nno", [("model", "yes"), ("user", "no")]),
            ("plain", None),
        ],
    )
    def test_templates(self, text, turns):
        expected = turns and [{"role": role, "text": said} for role, said in turns]
        assert list_turns({"prompt": text}, "prompt") == expected
        # A decoded prompt has lost what its tokens still say.
        assert list_turns({"prompt": "lost", "prompt_ids": [0]}, "prompt", [text]) == expected

    def test_a_response_begins_with_the_assistant(self):
        said = "one<|im_end|>\n<|im_start|>tool\n5<|im_end|>"
        assert list_turns({"response": said}, "response") == [
            {"role": "assistant", "text": "one"},
            {"role": "tool", "text": "5"},
        ]


def test_a_round_has_prompts_scores_per_token_and_a_word_on_sizes(tmp_path):
    def columns(number, generator):
        advantages, tokens = generator.normal(size=64), generator.integers(1, 50, 64)
        scores = np.abs(advantages) * tokens * generator.choice([-1, 1], 64)
        return {"reward": advantages, "advantage": advantages, "tokens": tokens, "score": scores}

    run = ExploredRun(run_of(tmp_path / "run", columns, rounds=1))
    shown = build_round(run, 1)
    assert shown["trust"][0]["level"] == "fair"
    assert "rank correlation of 1.00: they say little more" in shown["trust"][0]["text"]
    table = run.round(1).table
    assert table["score_per_token"].to_list() == pytest.approx((table["score"] / table["tokens"]).to_list())
    spreads = [prompt["spread"] for prompt in shown["prompts"]]
    assert spreads == sorted(spreads, reverse=True)
    assert sorted(record for prompt in shown["prompts"] for record in prompt["records"]) == table["record_id"].to_list()
    write_flag(run.directory.path, 1, 70, "odd")
    (flag,) = json.loads(json.dumps(run.list_flags()))
    assert (flag["record_id"], flag["note"], flag["response"]) == (70, "odd", "r")
