"""Rollouts that trainers wrote to files: their formats, and scores at a checkpoint as the trainer's own."""

import gc
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import decoders
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from helpers.language_training import CHAT, make_model, make_tokenizer
from helpers.trl_training import make_trainer, reward
from whence import RunDirectory, ScoreAll, WhenceError
from whence.cli.app import app
from whence.core import RecordBatch, RunDirectoryError
from whence.findings import find
from whence.llm import GroupObjective, SequenceReturn, language_view, rollout_scores
from whence.llm.rollout_scores import add_advantages, read_steps, score_rollouts
from whence.stored.language.rounds import make_stored_rows
from whence.stored.language.tasks import load_checkpoint

ROWS = [
    {"input": "ab", "output": "cde", "score": 1.0, "step": 1, "gts": "x"},
    {"input": "ab", "output": "a", "score": 0.0, "step": 1, "gts": "y"},
    {"input": "cd", "output": "bb", "score": 0.5, "step": 2, "gts": "x"},
    {"input": "cd", "output": "e", "score": None, "step": 2, "gts": "y"},
]


def write_lines(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_as_verl(folder: Path, run: Path, number: int) -> Path:
    """Write a round in the form of verl's rollout_data_dir, which has no advantages."""
    table = RunDirectory.open(run).round("records", number)
    names = {"prompt": "input", "response": "output", "reward": "score"}
    rows = table.select(list(names)).rename(names).with_columns(gts=pl.lit("x"), step=number).to_dicts()
    return write_lines(folder, f"{number}.jsonl", rows)


@pytest.mark.parametrize(
    ("kind", "beta"), [pytest.param("trl", 0.0, marks=pytest.mark.long), ("trl", 0.5), ("verl", 0.5)]
)
def test_scores_of_a_trainers_files_are_those_of_its_training(tmp_path: Path, kind: str, beta: float) -> None:
    trainer = make_trainer(
        *("grpo", tmp_path / "trl", ScoreAll()),
        run=tmp_path / "run",
        select="before",
        target=SequenceReturn(),
        beta=beta,
        use_bias_correction_kl=kind == "trl",
        reward_funcs=lambda prompts, completions, **columns: [100 * r for r in reward(prompts, completions)],
        log_completions=True,
        logging_strategy="steps",
        logging_steps=1,
        generation_kwargs={"suppress_tokens": [0]},  # of which texts show nothing
    )
    policy = make_model()  # which is the trainer's before its first step
    trainer.processing_class.backend_tokenizer.decoder = decoders.Fuse()
    trainer.train()
    files = tmp_path / "trl" / "completions" if kind == "trl" else write_as_verl(tmp_path / "verl", tmp_path / "run", 1)
    settings: dict[str, Any] = {"reference": make_model(seed=1), "beta": beta} if beta else {}
    if kind == "verl":
        settings = {"reference": make_model(seed=1), "objective": GroupObjective("sum", beta)}
    run = score_rollouts(files, policy, make_tokenizer(), tmp_path / "scored", max_tokens=5, **settings)
    expected, table = (RunDirectory.open(path).round("records", 1) for path in (tmp_path / "run", run.path))
    for name in ("prompt_ids", "response_ids", "group_id", "reward"):
        assert table[name].to_list() == expected[name].to_list(), name
    # Of so large rewards the deviation plus 1e-4, by which TRL divides them, is that plus 1e-6, by which verl does.
    scores = torch.tensor(expected["score"].to_list())
    largest = float(scores.abs().max())
    torch.testing.assert_close(torch.tensor(table["score"].to_list()), scores, rtol=0, atol=1e-4 * largest)
    assert table["info.step"].to_list() == [1] * 8
    if beta:  # the divergence has a part in the scores
        with pytest.raises(WhenceError, match="a divergence has a weight above 0 and a model"):
            score_rollouts(files, policy, make_tokenizer(), tmp_path / "none", beta=beta)
        plain = score_rollouts(files, policy, make_tokenizer(), tmp_path / "plain", max_tokens=5)
        others = torch.tensor(plain.round("records", 1)["score"].to_list())
        assert (others - scores).abs().max() > 0.01 * largest


def test_a_score_leaves_out_the_rows_own_vote(tmp_path: Path) -> None:
    model = make_model().eval()
    run = score_rollouts(write_lines(tmp_path / "in", "1.jsonl", ROWS[:2]), model, make_tokenizer(), tmp_path / "run")
    table = run.round("records", 1)
    gradients = []
    for prompt, response in zip(table["prompt_ids"], table["response_ids"], strict=True):
        ids = torch.tensor([[*prompt, *response]])
        log_probs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])
        parts = torch.autograd.grad(log_probs.sum(), list(language_view(model).parameters().values()))
        gradients.append(torch.cat([part.flatten() for part in parts]))
    one, other = table["advantage"].to_list()
    product = one * other * float(gradients[0] @ gradients[1])
    assert table["score"].to_list() == pytest.approx([product, product], rel=1e-4)
    assert table["response_ids"].to_list() == [[4, 5, 6, 1], [2, 1]]
    assert one == pytest.approx(0.5 / (0.5**0.5 + 1e-6))


def test_steps_of_files_in_the_order_of_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_lines(tmp_path / "in", "10.jsonl", [{**row, "step": 10} for row in ROWS[:2]])
    write_lines(folder, "2.jsonl", ROWS)
    pl.DataFrame(ROWS[:1]).rename({"input": "prompt"}).with_columns(other=2.0).write_parquet(folder / "3.parquet")
    steps = list(read_steps(folder))
    assert [(step["step"][0], len(step)) for step in steps] == [(1, 3), (2, 2), (10, 2)]
    assert steps[0]["info.gts"].to_list() == ["x", "y", "x"]
    scattered = [{"prompt": f"{number % 3}", "completion": "a", "reward": number} for number in range(9)]
    monkeypatch.setattr(rollout_scores, "ROUND", 4)
    parts = list(read_steps(write_lines(tmp_path / "long", "a.jsonl", scattered) / "a.jsonl"))
    assert [part["group_id"].to_list() for part in parts] == [[0, 1, 2, 0], [1, 2, 0, 1], [2]]
    assert [a for part in parts for a in part["advantage"]] == pytest.approx(
        [-1.0] * 3 + [0.0] * 3 + [1.0] * 3, abs=1e-5
    )


@pytest.mark.parametrize("suffix", [pytest.param("jsonl", marks=pytest.mark.long), "parquet"])
def test_no_more_than_a_few_steps_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(rollout_scores, "ROUND", 16)
    rows, model = [{**ROWS[place % 2], "input": "ab"[place // 8 % 2], "step": 1} for place in range(160)], make_model()
    file = write_lines(tmp_path / "in", "rows.jsonl", [{**row, "step": None} for row in rows]) / "rows.jsonl"
    if suffix == "parquet":
        pl.DataFrame(rows).drop("step").write_parquet(file.with_suffix(".parquet"))
        file.unlink()
    sizes: list[int] = []

    def count(number: int, _: int) -> None:
        gc.collect()
        objects = gc.get_objects()
        tables = [each for each in objects if isinstance(each, pl.DataFrame) and "prompt" in each.columns]
        sizes.append(sum(map(len, [*tables, *(each for each in objects if isinstance(each, RecordBatch))])))

    run = score_rollouts(tmp_path / "in", model, make_tokenizer(), tmp_path / "run", on_round=count)
    assert len(sizes) == 10
    assert run.table("metrics")["records"].to_list() == [16] * 10
    assert max(sizes) <= 8 * 16  # of 160


def test_advantages_from_rewards() -> None:
    tables = [
        pl.DataFrame({"prompt": ["a", "a", "b"], "reward": [1.0, None, 5.0]}),
        pl.DataFrame({"prompt": ["a", "b"], "reward": [1.0, 4.0]}),
        pl.DataFrame(
            {"prompt": [[{"role": "user", "content": "a"}]] * 2, "reward": [0.0, 1.0], "advantage": [2.0, 3.0]}
        ),
    ]
    scored = [add_advantages(table) for table in tables]
    assert [table["advantage"].to_list() for table in scored] == [[0, 0, 0], [-1.5, 1.5], [2, 3]]
    assert [table["group_id"].to_list() for table in scored] == [[0, 0, 1], [0, 1], [0, 0]]


def test_what_was_broken_off_goes_on(tmp_path: Path) -> None:
    folder, model = write_lines(tmp_path / "in", "1.jsonl", ROWS), make_model()

    def stop(number: int, rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_rollouts(folder, model, make_tokenizer(), tmp_path / "run", on_round=stop)
    numbers: list[int] = []
    run = score_rollouts(
        folder, model, make_tokenizer(), tmp_path / "run", on_round=lambda number, _: numbers.append(number)
    )
    whole = score_rollouts(folder, model, make_tokenizer(), tmp_path / "whole")
    assert numbers == [2]
    assert all(run.round("records", number).equals(whole.round("records", number)) for number in (1, 2))
    assert run.table("metrics").equals(whole.table("metrics"))
    with pytest.raises(RunDirectoryError, match="temperature"):
        score_rollouts(folder, model, make_tokenizer(), tmp_path / "run", temperature=0.7)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "a", "output": "b", "score": 1}],
            "line 1 has no column 'prompt or input or input_prompt' for the prompt",
        ),
        ([{"prompt": "a", "response": "b", "note": "c"}], "line 1 has no reward: name its column"),
        (
            [{"prompt": "a" * 99, "response": "b", "reward": 1}],
            "1 rows of more than the 32 tokens that the model reads",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(WhenceError, match=message):
        score_rollouts(write_lines(tmp_path / "in", "1.jsonl", rows), make_model(), make_tokenizer(), tmp_path / "run")
    (tmp_path / "in" / "1.jsonl").write_text("no JSON")
    with pytest.raises(WhenceError, match="cannot be read as JSON lines"):
        next(read_steps(tmp_path / "in"))
    with pytest.raises(WhenceError, match="holds no rollouts"):
        next(read_steps(tmp_path / "missing"))


def test_the_command(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    folder, run = write_lines(tmp_path / "in", "1.jsonl", ROWS), str(tmp_path / "run")
    arguments = ["llm", "score", str(folder), "--model", str(tmp_path / "model"), "--run", run]
    output = CliRunner().invoke(app, [*arguments, "--column", "reward=score"]).output
    assert "4 rows in 2 rounds" in output
    parts = json.loads(CliRunner().invoke(app, ["why", run, "--round", "1", "--record", "0", "--json"]).output)
    score = RunDirectory.open(run).round("records", 1)["score"][0]
    assert sum(token["part"] for token in parts["tokens"]) == pytest.approx(score, rel=1e-4)
    assert [row["record"] for row in (*parts["pulls"]["with"], *parts["pulls"]["against"])] == [1]
    for more, message in (
        (["--column", "rewrd=score"], "WHAT=NAME is needed"),
        (["--target", "validation"], "go together"),
    ):
        assert message in str(CliRunner().invoke(app, [*arguments, *more]).exception)


def test_an_adapter_is_loaded_with_its_base_and_scored_alone(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    make_tokenizer().save_pretrained(tmp_path / "adapter")
    folder = write_lines(tmp_path / "in", "1.jsonl", ROWS[:2])
    expected = score_rollouts(folder, adapted, make_tokenizer(), tmp_path / "expected").round("records", 1)
    run = score_rollouts(folder, *load_checkpoint(str(tmp_path / "adapter"), "float32"), tmp_path / "run")
    assert run.round("records", 1)["score"].to_list() == pytest.approx(expected["score"].to_list(), rel=1e-5)
    assert expected["score"].abs().min() > 0  # type: ignore[operator]


def test_what_tools_say_has_no_part_in_scores(tmp_path: Path) -> None:
    """Against autograd over the tokens of the assistant alone; a stored round is built again with them."""
    tokenizer, model = make_tokenizer(), make_model().eval()
    tokenizer.chat_template = CHAT
    said = [("ab", "cc", "de"), ("e", "abc", "a")]
    turns = [[("assistant", a), ("tool", tool), ("assistant", b)] for a, tool, b in said]
    rows = [
        {
            "prompt": [{"role": "user", "content": "dd"}],
            "completion": [{"role": role, "content": text} for role, text in turn],
            "reward": float(place),
            "step": 1,
        }
        for place, turn in enumerate(turns)
    ]
    run = score_rollouts(write_lines(tmp_path / "in", "1.jsonl", rows), model, tokenizer, tmp_path / "run")
    table = run.round("records", 1)
    assert table["tokens"].to_list() == [5, 3]
    gradients = []
    for (a, tool, b), ids, prompt in zip(said, table["response_ids"], table["prompt_ids"], strict=True):
        counts = [*[1] * len(a), *[0] * (len(tool) + 1), *[1] * (len(b) + 1)]  # a `j` before the second answer
        whole = torch.tensor([[*prompt, *ids]])
        log_probs = (
            model(whole).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, whole[0, len(prompt) :, None])
        )
        parts = torch.autograd.grad((log_probs.flatten() * torch.tensor(counts)).sum(), [*model.parameters()])
        gradients.append(torch.cat([part.flatten() for part in parts]))
    product = -float(gradients[0] @ gradients[1]) * table["advantage"][0] ** 2
    assert table["score"].to_list() == pytest.approx([product, product], rel=1e-4)
    mask = make_stored_rows(table, tokenizer, "cpu").observations["response_mask"]
    assert mask.sum(1).tolist() == [5, 3]
    assert tokenizer.decode(table["response_ids"][0]).replace(" ", "") == "abccjde</s>"


def test_token_ids_of_one_side_and_prompts_that_are_ids_alone(tmp_path: Path) -> None:
    tokenizer, chat = make_tokenizer(), [{"role": "user", "content": "a"}]
    tokenizer.chat_template = CHAT
    ids, answer = {"response_ids": [3, 1]}, {"response": "b"}
    rows = [{"prompt": "a", **ids}, {"prompt": chat, **ids}, {"prompt_ids": [2], **answer}]
    rows += [{"prompt": None, "prompt_ids": [5], **ids}, {"prompt": None, "prompt_ids": [6], **ids}]
    rows = [{**row, "reward": place % 2} for place, row in enumerate(rows)]
    run = score_rollouts(write_lines(tmp_path / "in", "1.jsonl", rows), make_model(), tokenizer, tmp_path / "run")
    table = run.round("records", 1)
    assert table["response_ids"].to_list() == [[3, 1]] * 5
    assert [table["prompt_ids"][place].to_list() for place in (0, 2, 3)] == [[2], [2], [5]]
    assert (
        table["prompt_ids"][1].to_list() == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    )
    assert table["group_id"].n_unique() == 5


def test_rows_that_the_template_refuses_or_the_model_cannot_read_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    )
    answer = [{"role": "assistant", "content": "b"}]
    rows = [{"prompt": [{"role": role, "content": "a"}], "response": answer} for role in ("system", "user")]
    rows += [{"prompt_ids": [1], "response_ids": [9999]}, {"prompt": "a", "response": "b"}]
    rows = [{**row, "reward": place, "step": 1} for place, row in enumerate(rows)]
    run = score_rollouts(write_lines(tmp_path / "in", "1.jsonl", rows), make_model(), tokenizer, tmp_path / "run")
    assert run.round("records", 1)["record_id"].to_list() == [1, 3]
    assert "1 rows whose messages the chat template does not write" in caplog.text
    assert "1 rows with token ids that the model does not have" in caplog.text


def score_with_log_probs(folder: Path, *, text: bool = False) -> RunDirectory:
    """Score two rollouts whose file has log-probs, of which the first are those of the model."""
    model, prompt, responses = make_model(), [3, 4], [[5, 6, 7], [8, 9]]
    rows = []
    for response in responses:
        ids = torch.tensor([[*prompt, *response]])
        log_probs = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])
        rows.append({"prompt_ids": prompt, "response_ids": response, "logprobs": log_probs.flatten().tolist()})
    rows[1]["logprobs"] = [each - 0.75 for each in rows[1]["logprobs"]]
    rows = [row | {"reward": float(place)} for place, row in enumerate(rows)]
    if text:
        rows = [{"input": "ab", "output": "cde", "score": 1.0, "logprobs": [-1.0, -2.0]}, *ROWS[1:2]]
    return score_rollouts(write_lines(folder / "files", "1.jsonl", rows), model, make_tokenizer(), folder / "run")


def test_the_samplers_log_probs_are_compared_with_the_checkpoints(tmp_path: Path) -> None:
    run = score_with_log_probs(tmp_path)
    table = run.round("records", 1)
    assert table["sampler_difference"].to_list() == pytest.approx([0.0, 0.75], abs=1e-5)
    for trained, sampled, gap in zip(
        table["token_log_probs"], table["token_sampler_log_probs"], (0.0, 0.75), strict=True
    ):
        assert (trained - sampled).to_list() == pytest.approx([gap] * len(trained), abs=1e-5)
    (finding,) = (one for one in find(run) if "sampler" in one.title)
    assert finding.rank == "unusual"  # the checkpoint may be another than the sampler's
    assert finding.record_ids[0] == 1
    assert "40% of the tokens" in finding.evidence


def test_log_probs_without_token_ids_are_a_column_like_others(tmp_path: Path) -> None:
    table = score_with_log_probs(tmp_path, text=True).round("records", 1)
    assert "sampler_difference" not in table.columns
    assert table["info.logprobs"][0] == "[-1.0, -2.0]"
