"""The full-size recipes of docs/guide/llm.md: their data, their rewards, and their commands without weights."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from transformers import GPTNeoConfig, LlamaConfig, RobertaConfig

from test_examples import script
from test_llm_trainer import make_tokenizer
from whence.llm.lab.model import make_character_tokenizer

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guide" / "llm.md").read_text(encoding="utf-8")
SOLUTION = "She has 16-3-4=<<16-3-4=9>>9 eggs.\nShe makes 9*2=$<<9*2=18>>18.\n#### 18"
TEXT = "abcdefghij " * 4


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory for the page's commands: data as the examples write it, and models' configurations."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "examples").symlink_to(ROOT / "examples")
    solved = [{"question": f"How many eggs, {number}?", "answer": SOLUTION} for number in range(430)]
    # A character is a token here: problems of up to 255 tokens, solutions of 300.
    solved += [{"question": f"{number:0237d}", "answer": "b" * 291 + "\n#### 18"} for number in range(100)]
    lines(folder / "hub" / "gsm8k" / "train.jsonl", solved)
    lines(folder / "hub" / "gsm8k" / "test.jsonl", solved[:7])
    gsm8k, detoxification = script("gsm8k"), script("detoxification")
    gsm8k.main(folder / "data" / "gsm8k", dataset=str(folder / "hub" / "gsm8k"), trusted=512)
    make_character_tokenizer("abcdefghij ").save_pretrained(folder / "reads")
    rude = [
        {"prompt": {"text": TEXT, "toxicity": how}, "continuation": {"text": " " + TEXT}}
        for how in [0.9] * 2000 + [0.1, None]
    ]
    lines(
        folder / "hub" / "rude" / "train.jsonl",
        [*rude, {"prompt": {"text": "a", "toxicity": 1.0}, "continuation": {"text": "b"}}],
    )
    lines(
        folder / "hub" / "wiki" / "test.jsonl",
        [
            {"comment_text": text, "label": label}
            for text, label in [("abc", 1), ("ij", 0), ("", 1), ("ab" * 129, 1), ("ab" * 128, 1)]
        ],
    )
    with pytest.raises(typer.BadParameter):
        gsm8k.main(folder / "data" / "nothing", dataset=str(folder / "hub" / "gsm8k"), trusted=530)
    detoxification.main(
        folder / "data" / "detox",
        str(folder / "hub" / "rude"),
        str(folder / "hub" / "wiki"),
        str(folder / "reads"),
        toxicity=0.3,
        tested=400,
        longest=256,
    )
    LlamaConfig(
        hidden_size=2048, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, intermediate_size=5632
    ).save_pretrained(folder / "models" / "rho-gsm8k")
    make_tokenizer().save_pretrained(folder / "models" / "rho-gsm8k")
    neo = GPTNeoConfig(hidden_size=2560, num_layers=32, num_heads=20, attention_types=[[["global", "local"], 16]])
    judge = RobertaConfig(id2label={0: "nothate", 1: "hate"}, label2id={"nothate": 0, "hate": 1})
    for name, config in (
        ("EleutherAI/gpt-neo-2.7B", neo),
        ("facebook/roberta-hate-speech-dynabench-r4-target", judge),
    ):
        model = folder / "cache" / f"models--{name.replace('/', '--')}"
        config.save_pretrained(model / "snapshots" / "0")
        make_character_tokenizer("abcdefghij ").save_pretrained(model / "snapshots" / "0")
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("0")
    return folder


def test_problems_to_imitate_to_train_on_to_trust_and_to_test_on(place):
    folder = place / "data" / "gsm8k"
    parts = {name: read(folder / f"{name}.jsonl") for name in ("sft/train", "train", "trusted", "test")}
    assert {name: len(rows) for name, rows in parts.items()} == {
        "sft/train": 18,
        "train": 18,
        "trusted": 512,
        "test": 7,
    }
    assert not {row["prompt"] for row in parts["trusted"]} & {row["prompt"] for row in parts["train"]}
    assert parts["train"][0].keys() == {"prompt", "answer"}
    assert {row["answer"] for row in parts["train"]} == {"18"}
    solutions = {row["completion"] for row in parts["trusted"]}
    assert " She has 16-3-4=9 eggs.\nShe makes 9*2=$18.\n#### 18" in solutions
    assert re.fullmatch(r"Question: How many eggs, \d+\?\nAnswer:", parts["test"][0]["prompt"])


def test_a_right_answer():
    right = script("gsm8k").right
    responses = ["9 eggs, #### 1,018", "#### 18\n#### 1018.0", "1018", "", "#### 18", "#### -3", "none"]
    assert right([""] * 7, responses, ["1018"] * 5 + ["-3", "not a number"]) == [1, 1, 0, 0, 0, 1, 0]


def test_beginnings_of_rude_texts_and_comments_that_fit(place):
    train, test = (read(place / "data" / "detox" / f"{name}.jsonl") for name in ("train", "test"))
    assert len(train) == 2000
    assert {len(row["prompt"]) for row in train} == {10, 11, 12, 13, 14}  # a character is a token here
    assert sorted(len(row["prompt"]) for row in test) == [3, 256]


def test_the_tests_detector_is_read_by_its_labels(monkeypatch):
    detoxification = script("detoxification")

    def classify(responses, **options):
        return [[{"label": "not offensive", "score": 0.75}, {"label": "offensive", "score": 0.25}] for _ in responses]

    monkeypatch.setattr(detoxification, "_load_detector", lambda: classify)
    assert detoxification.civil(["a", "b"], ["c", "d"]) == [0.75, 0.75]


def dry_runs():
    """The page's dry runs: variables of the environment, and arguments."""
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    commands = []
    for command in re.findall(r"^(?:\w+=\S+ )*whence llm train [^#`]*?--dry-run", blocks, flags=re.MULTILINE):
        parts = shlex.split(command)
        at = parts.index("whence")
        commands.append((dict(part.split("=") for part in parts[:at]), parts[at + 1 :]))
    return commands


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(dry_runs())))
def test_the_pages_commands_are_what_whence_takes(place, number):
    environment, arguments = dry_runs()[number]
    offline = {"HF_HUB_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("whence")), *arguments, "--json"],
        cwd=place,
        env={**os.environ, **offline, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    estimate = json.loads(done.stdout)["estimate"]
    if "EleutherAI/gpt-neo-2.7B" in arguments:
        adapter = 32 * 16 * (4 * (2560 + 2560) + 2 * (2560 + 10240))
        assert (estimate["trained"], estimate["parameters"]) == (adapter + 2561, 2_651_307_520 + adapter + 2561)
        # bfloat16, no copy of the model; Adam in the adapter's own precision.
        assert estimate["stays"]["weights"] == pytest.approx(2 * 2_651_307_520, rel=0.05)
        assert (estimate["stays"]["start model"], estimate["prompt_tokens"]) == (0, 14)
        # Held-out responses run sixteen at a time through the policy for the target.
        assert estimate["stages"]["scoring"] > 4 * estimate["stages"]["optimisation"]
    else:
        assert estimate["parameters"] == estimate["trained"] == 1_100_048_384 + 2049
        assert estimate["stays"]["Adam"] == 8 * estimate["parameters"]
        assert estimate["stays"]["start model"] == pytest.approx(4 * 1_100_048_384, rel=1e-6)
        assert estimate["stages"]["optimisation"] > 4 * estimate["parameters"]
    assert not (place / "runs").exists()
    # What the page says of it.
    (row,) = [line for line in PAGE.splitlines() if line.startswith("| detox" if environment == {} else "| GSM8K")]
    assert f" {estimate['peak'] / 2**30:.0f} GiB: " in row
    assert f" {sum(estimate['flops'].values()) / 1e15:.1f} PFLOP " in row


def test_both_recipes_have_a_dry_run():
    assert [parts[parts.index("--selection") + 1] for _, parts in dry_runs()] == ["iif", "ippo"]
