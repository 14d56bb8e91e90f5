"""Lines of files as trainers write them, and what is read of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whence import WhenceError
from whence.llm.rollout_files import list_files, read_rows
from whence.llm.rollout_scores import read_steps
from whence.llm.text import join_messages, list_chats


def write(folder: Path, name: str, *lines: Any, end: str = "\n") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text("\n".join(texts) + end)
    return folder / name


def read(file: Path, skipped: Counter[str] | None = None, **columns: str) -> list[dict[str, Any]]:
    return list(read_rows(file, columns, Counter() if skipped is None else skipped))


def node(role: str, text: str, ids: list[int], mask: list[int], **rest: Any) -> dict[str, Any]:
    return {"message": {"role": role, "content": text}, "token_ids": ids, "mask": list(map(bool, mask)), **rest}


EPISODE = {
    "group": {"id": "g"},
    "run": {"work": {"step": 3}},
    "traces": [
        {
            "nodes": [
                node("user", "2+2?", [1, 2], [0, 0]),
                node("assistant", "f(2)", [8, 9], [0, 1], parent=0, sampled=True, advantages=[0.5]),
                node("tool", "4", [5, 6], [0, 0], parent=1),
                node("assistant", "4", [7, 4], [0, 1], parent=2, sampled=True, advantages=[0.5]),
                node("assistant", "5", [3], [1], parent=0, sampled=True, advantages=[-0.5]),
            ],
            "rewards": {"right": {"score": 1.0, "weight": 2.0}, "short": {"score": 0.5, "weight": -1.0}},
        },
        {"agent": {"trainable": False}, "nodes": []},
    ],
}


def test_an_episode_is_its_branches(tmp_path: Path) -> None:
    skipped = Counter[str]()
    long, other = read(write(tmp_path, "traces.jsonl", EPISODE, {"traces": []}), skipped)
    assert (long["prompt_ids"], long["response_ids"]) == ([1, 2, 8], [9, 5, 6, 7, 4])
    assert long["response_mask"] == [True, False, False, False, True]
    assert [message["content"] for message in long["response"]] == ["f(2)", "4", "4"]
    assert (long["reward"], long["reward.right"], long["step"], long["group"], long["advantage"]) == (
        1.5,
        1,
        3,
        "g",
        0.5,
    )
    assert (other["prompt_ids"], other["response_ids"], other["advantage"]) == ([1, 2], [3], -0.5)
    assert skipped == {"traces of agents that do not train": 1, "episodes without a rollout": 1}


def test_values_in_lists_of_one(tmp_path: Path) -> None:
    line = {
        "content": [["2+2?", "4", "go on", "5"]],
        "rewards": [1.0],
        "input_lengths": [6],
        "token_ids": [[1, 5, 6, 9, 2, 7, 0]],
        "token_loss_mask": [[0, 0, 1, 0, 0, 1, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0, 0, 0.7, 0, 0, 0.7, 0]],
        "idx": 0,
    }
    none = {**line, "sample_loss_mask": [0.0]}
    skipped = Counter[str]()
    (row,) = read(write(tmp_path, "train_data_step12.jsonl", line, none), skipped)
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 5], [6, 9, 2, 7])
    assert row["response_mask"] == [True, False, False, True]
    assert (row["advantage"], row["reward"], row["step"], row["prompt"]) == (0.7, 1, 12, "2+2?")
    assert skipped == {"rows of which no token trained": 1}
    texts = {"content": [["a", "b", "c"]], "rewards": [1.0], "idx": 0}
    with pytest.raises(WhenceError, match="line 1 has neither a prompt and a response nor token ids"):
        read(write(tmp_path, "old.jsonl", texts))


def test_a_list_for_each_column(tmp_path: Path) -> None:
    table = {"step": ["5", "5"], "prompt": ["q", "q"], "completion": ["a", "b"], "Right": [1.0, None]}
    table |= {"Format": ["NaN", 0.5], "advantages": [0.7, -0.7], "solution": ["4", "4"]}
    text = json.dumps(table).replace('"NaN"', "NaN")
    skipped = Counter[str]()
    file = write(tmp_path, "completions.jsonl", text, text, text.replace('"5"', '"6"'))
    rows = read(file, skipped, reward="Right + 0.5 * Format")
    assert [(row["step"], row["response"], row["reward"], row["advantage"]) for row in rows] == [
        *((5, "a", 1.0, 0.7), (5, "b", 0.25, -0.7)),
        *((6, "a", 1.0, 0.7), (6, "b", 0.25, -0.7)),
    ]
    assert skipped == {"rows that the line before has, too": 2}
    assert "reward" not in read(file)[0]
    assert read(file)[0]["info.Right"] == 1.0
    assert "reward" not in read(file)[1]  # where one function does not apply, the other is not the only one
    table = {**table, "completion": ["a", None]}
    assert [row["response"] for row in read(write(tmp_path, "cut.jsonl", table), skipped)] == ["a"]


def test_token_ids_without_texts(tmp_path: Path) -> None:
    line = {
        "step": 4,
        "prompt_idx": 0,
        "prompt_tokens": [1, 5],
        "response_tokens": [9, 2],
        "reward": 10,
        "advantage": 1,
    }
    tools = {**line, "request_info": {"num_calls": 2}}
    skipped = Counter[str]()
    (row,) = read(write(tmp_path, "mine_rollouts_000000.jsonl", line, tools), skipped)
    assert (row["prompt_ids"], row["response_ids"], row["reward"], row["group"]) == ([1, 5], [9, 2], 10, 0)
    assert skipped == {"rows with the output of tools among their tokens, without a mask": 1}


def test_what_is_skipped_is_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": None, "reward": 1}, {"prompt": "a", "response": "b", "reward": 1}]
    rows += [{"prompt": "a", "response": [], "reward": 1}]
    skipped = Counter[str]()
    assert len(read(write(tmp_path, "1.jsonl", *rows, "", '{"prompt": "a", "resp', end=""), skipped)) == 1
    assert skipped == {"rows without a response": 2, "last lines that break off": 1}
    write(tmp_path, "2.jsonl", end="")
    write(tmp_path, "val_data_step3.jsonl", rows[1])
    write(tmp_path, "mine_metadata.jsonl", {"run_name": "mine"})
    assert len(next(read_steps(tmp_path, {}, skipped))) == 1
    assert skipped["files of evaluations"] == 1
    with pytest.raises(WhenceError, match=r"holds no rollouts: its files are empty"):
        next(read_steps(tmp_path / "2.jsonl"))


def test_files_that_an_evaluation_overwrote(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b", "reward": 1.0}
    for step in (1, 2, 3):
        write(tmp_path / "completions", f"completions_0000{step}.jsonl", {**row, "step": step})
    history = [{"step": 1, "loss": 0.1}, {"step": 2, "eval_loss": 0.1}]
    write(tmp_path / "checkpoint-3", "trainer_state.json", {"log_history": history})
    skipped = Counter[str]()
    assert [file.stem[-1] for file in list_files(tmp_path / "completions", skipped)] == ["1", "3"]
    assert skipped == {"files of evaluations": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "response": "b", "reward": [1.0, 0.0]}, "line 2: reward is [1.0, 0.0]; a number is needed"),
        ({"prompt": "a", "response": ["b", "c"], "reward": 1.0}, "line 2: the response is ['b', 'c']; a text or"),
        ({"prompt": "a", "response": "b", "reward": 1.0, "step": "x"}, "line 2: the step is 'x'; a whole number"),
        ({"prompt": "a", "response": "b", "reward": 1.0, "advantage": [1, 2]}, "line 2: the advantages of its tokens"),
        ({"prompt_ids": "ab", "response_ids": [1], "reward": 1.0}, "line 2: prompt_ids is 'ab'; a list of whole"),
        ({"prompt_ids": [1], "response_ids": [10**30], "reward": 1.0}, "line 2: response_ids is [1000000"),
        ([1, 2], "line 2 is a int, and a row is an object"),
        ('{"prompt": ', "line 2: Expecting value"),
        ({"nodes": [1], "rewards": {}}, "line 2 has another form than its keys say"),
        ({"prompt": "a", "response": "b", "good": 1.0, "short": 2}, "--column 'reward=good + 0.5 * short'"),
    ],
)
def test_a_line_that_says_something_else_is_refused(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path, "1.jsonl", {"prompt": "a", "response": "b", "reward": 1.0}, line)
    with pytest.raises(WhenceError) as refusal:
        read(file)
    assert message in str(refusal.value)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    texts = (f'{{"prompt": "a", "response": "b", "reward": {value}}}' for value in ("NaN", "Infinity", "null", "true"))
    assert [row["reward"] for row in read(write(tmp_path, "1.jsonl", *texts))] == [None, None, None, 1.0]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("0011", [0, 0, 1, 1]),
        ("0101", [0, 1, 0, 1]),
        ("0123", [0, 1, 0, 1]),
        ("0000", [0, 1, 0, 1]),
        (["0", "0", "1", None], [0, 1, 0, 1]),
    ],
)
def test_ids_that_are_no_groups_are_not_taken(tmp_path: Path, groups: Any, expected: list[int]) -> None:
    prompts = {"0011": "aabb", "0101": "aaaa"}.get(str(groups), "abab")  # a prompt may have two groups
    rows = [{"prompt": p, "response": "x", "reward": 1, "uid": g} for p, g in zip(prompts, groups, strict=True)]
    file = write(tmp_path, "1.jsonl", *rows)
    assert next(read_steps(file))["group_id"].to_list() == expected
    if groups == "0000":  # whoever names the column is believed
        assert next(read_steps(file, {"group": "uid"}))["group_id"].to_list() == [0, 0, 0, 0]


def test_interleaved_steps_are_sorted_and_groups_joined(tmp_path: Path) -> None:
    rows = [{"prompt": "ab"[n % 2], "response": "x", "reward": n, "step": n % 3} for n in range(12)]
    steps = list(read_steps(write(tmp_path, "1.jsonl", *rows)))
    assert [step["step"].unique().to_list() for step in steps] == [[0], [1], [2]]
    assert steps[0]["reward"].to_list() == [0, 3, 6, 9]
    assert steps[0]["group_id"].to_list() == [0, 1, 0, 1]
    assert steps[0]["advantage"].to_list() == pytest.approx([-(0.5**0.5)] * 2 + [0.5**0.5] * 2, abs=1e-5)


def test_files_without_steps_keep_their_order_next_to_interleaved_ones(tmp_path: Path) -> None:
    write(tmp_path, "1.jsonl", *({**ROWS[0], "step": step} for step in (2, 1, 2)))
    write(tmp_path, "2.jsonl", {**ROWS[0], "response": "first"})
    write(tmp_path, "3.jsonl", {**ROWS[0], "response": "second"})
    steps = [step["response"].to_list() for step in read_steps(tmp_path)]
    assert steps == [["first"], ["second"], [ROWS[0]["response"]], [ROWS[0]["response"]] * 2]


def test_a_sum_may_name_a_column_twice_and_what_is_unknown_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "1.jsonl", {"prompt": "a", "response": "b", "good": 2.0})
    assert read(file, reward="good + 0.5 * good")[0]["reward"] == 3.0
    with pytest.raises(WhenceError, match=r"columns has 'rewrd'\. Did you mean reward"):
        next(read_steps(file, {"rewrd": "good"}))


def test_tables_do_not_join_the_arguments_of_tools(tmp_path: Path) -> None:
    calls = [[{"role": "assistant", "calls": [{"name": n, "arguments": {n: 1}}]}] for n in "ab"]
    table = pa.Table.from_pylist([{"prompt": "q", "completion": call, "reward": 1.0} for call in calls])
    pq.write_table(table, tmp_path / "1.parquet")
    assert "None" in str(table["completion"].to_pylist())
    responses = next(read_steps(tmp_path / "1.parquet"))["response"].to_list()
    assert [row[0]["calls"][0]["arguments"] for row in responses] == [{"a": 1}, {"b": 1}]


ROWS = [{"prompt": "a", "response": "b", "reward": 1.0}, {"prompt": "a", "response": "c", "reward": 0.0}]


def test_a_document_of_json_over_several_lines(tmp_path: Path) -> None:
    assert [row["response"] for row in read(write(tmp_path, "1.json", json.dumps(ROWS, indent=2)))] == ["b", "c"]
    assert len(read(write(tmp_path, "2.json", json.dumps(ROWS[0], indent=2)))) == 1
    (tmp_path / "3.jsonl").write_text("\ufeff" + json.dumps(ROWS[0]))
    assert len(read(tmp_path / "3.jsonl")) == 1


def test_files_next_to_the_rollouts_are_no_rollouts(tmp_path: Path) -> None:
    write(tmp_path, "1.jsonl", *ROWS)
    write(tmp_path, "trainer_state.json", {"log_history": []})
    write(tmp_path, "config.json", json.dumps({"vocab_size": 8}, indent=2))
    (tmp_path / "old.json").mkdir()
    skipped = Counter[str]()
    assert [file.name for file in list_files(tmp_path, skipped)] == ["1.jsonl"]
    assert skipped == {"files of other JSON": 2}
    write(tmp_path / "array", "1.json", ROWS)
    assert [file.name for file in list_files(tmp_path / "array", skipped)] == ["1.json"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(WhenceError, match="holds no rollouts: a Parquet file"):
        list_files(tmp_path / "empty", skipped)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "zst", "lz4"])
def test_compressed_lines(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"completions_00007.jsonl.{suffix}"
    with pa.output_stream(str(file), compression="detect") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    assert list_files(tmp_path, Counter()) == list_files(file, Counter()) == [file]
    assert [(row["response"], row["step"]) for row in read(file)] == [("b", 7), ("c", 7)]


def test_halves_of_characters_are_replaced_everywhere(tmp_path: Path) -> None:
    text = json.dumps({**ROWS[0], "uid": "\ud800", "note": {"\udc00": "\ud83d"}, "good": "\U0001f600 \\ud800"})
    (row,) = read(write(tmp_path, "1.jsonl", text))
    assert (row["group"], row["info.note"], row["info.good"]) == ("?", {"?": "?"}, "\U0001f600 \\ud800")
    chat = [{"role": "user", "content": "\ud83d"}]
    assert next(read_steps(write(tmp_path, "2.jsonl", {**ROWS[0], "prompt": chat})))["prompt"][0][0]["content"] == "?"


LOOP = [node("user", "a", [1], [0], parent=1), node("assistant", "b", [2], [1], parent=0), node("tool", "c", [3], [0])]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"nodes": [*LOOP[:2], {**LOOP[2], "parent": 1}], "rewards": {}}, "message 0 has the parent 1"),
        ({"nodes": [{**LOOP[2], "parent": -1}], "rewards": {}}, "message 0 has the parent -1"),
        ({**ROWS[0], "step": 1.5}, "the step is 1.5; a whole number"),
        ({**ROWS[0], "step": -1}, "the step is -1; a whole number"),
        ({**ROWS[0], "step": 10**30}, "a whole number from 0"),
        ('{"prompt": "a", "response": "b", "reward": 1, "step": Infinity}', "the step is inf; a whole number"),
        ({**ROWS[0], "reward.right": "yes"}, "reward.right is 'yes'; a number is needed"),
        ({"prompt_ids": [1], "response_ids": [-100], "reward": 1}, "response_ids is [-100]; a list of whole numbers"),
        ({"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1], "reward": 1}, "1 values of response_mask"),
        ("[" * 100_000, "cannot be read as JSON lines"),
        (b'{"prompt": "\xe9"}', "cannot be read as JSON lines"),
    ],
)
def test_no_line_ends_in_another_error_or_never(tmp_path: Path, line: Any, message: str) -> None:
    if isinstance(line, bytes):
        (tmp_path / "1.jsonl").write_bytes(line)
    else:
        write(tmp_path, "1.jsonl", line)
    with pytest.raises(WhenceError, match=r"1\.jsonl") as refusal:
        next(read_steps(tmp_path / "1.jsonl"))
    assert message in str(refusal.value)


def test_masks_of_numbers_and_columns_of_one_value(tmp_path: Path) -> None:
    ids = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [0, 1], "reward": 1}
    assert next(read_steps(write(tmp_path, "1.jsonl", ids)))["response_mask"].to_list() == [[False, True]]
    table = {"step": 5, "prompt": ["q", "q"], "completion": ["a", "b"], "reward": [1.0, 0.0]}
    assert [row["step"] for row in read(write(tmp_path, "2.jsonl", table))] == [5, 5]


def test_rewards_that_are_all_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WhenceError, match="holds no reward that is a number"):
        next(read_steps(write(tmp_path, "1.jsonl", {**ROWS[0], "reward": None})))


def test_columns_that_are_not_stored_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, "1.jsonl", *({**ROWS[0], "step": n, **{f"c{i}": i for i in range(34)}} for n in (1, 2)))
    assert all("info.c31" in step.columns and "info.c32" not in step.columns for step in read_steps(file))
    assert caplog.text.count("left out are c32, c33.") == 1


def test_numbers_too_large_for_a_column_are_texts(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "hash": 10**40, "mixed": 10**400}, {**ROWS[1], "hash": 1, "mixed": 0.5}]
    table = next(read_steps(write(tmp_path, "1.jsonl", *rows)))
    assert table["info.hash"].to_list() == [str(10**40), "1"]
    assert table["info.mixed"].to_list() == [str(10**400), "0.5"]


def test_messages_of_odd_contents_are_texts() -> None:
    parts = [None, 5, {"type": "image"}, "a", {"text": "b"}]
    messages = [{"content": parts, "tool_calls": ["f(1)"]}, {"content": 7}, {"role": None, "content": None}]
    assert join_messages(messages) == 'None5<image>ab{"name": "f(1)"}\n7\n'
    (column,) = list_chats({"prompt": [messages]})
    assert [message["text"] for message in json.loads(column[0])] == ["None5<image>ab", "7", ""]
