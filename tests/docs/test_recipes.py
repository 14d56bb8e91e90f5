"""The full-size recipes of results/llm/README.md: their data, their rewards, and their commands."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from helpers.examples import script
from whence import cli
from whence.lab.language import training as training
from whence.lab.language.laboratory_tasks import make_character_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "results" / "llm" / "README.md").read_text(encoding="utf-8")
SOLUTION = "She has 16-3-4=<<16-3-4=9>>9 eggs.\nShe makes 9*2=$<<9*2=18>>18.\n#### 18"
TEXT = "abcdefghij " * 4


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory for the page's commands: data as the examples write it."""
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
    texts = [*((TEXT, how, " " + TEXT) for how in [0.9] * 2000 + [0.1, None]), ("a", 1.0, "b")]
    rude = [{"prompt": {"text": one, "toxicity": how}, "continuation": {"text": other}} for one, how, other in texts]
    lines(folder / "hub" / "rude" / "train.jsonl", rude)
    comments = [("abc", 1), ("ij", 0), ("", 1), ("ab" * 129, 1), ("ab" * 128, 1)]
    labelled = [{"comment_text": text, "label": label} for text, label in comments]
    lines(folder / "hub" / "wiki" / "test.jsonl", labelled)
    with pytest.raises(typer.BadParameter):
        gsm8k.main(folder / "data" / "nothing", dataset=str(folder / "hub" / "gsm8k"), trusted=530)
    sources = [str(folder / name) for name in ("hub/rude", "hub/wiki", "reads")]
    detoxification.main(folder / "data" / "detox", *sources, toxicity=0.3, tested=400, longest=256)
    return folder


def test_problems_to_imitate_to_train_on_to_trust_and_to_test_on(place):
    folder = place / "data" / "gsm8k"
    parts = {name: read(folder / f"{name}.jsonl") for name in ("sft/train", "train", "trusted", "test")}
    assert [len(rows) for rows in parts.values()] == [18, 18, 512, 7]
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


def list_commands():
    """Return the page's trainings on data that its examples make: arguments of `whence`."""
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    commands = re.findall(
        r"^(?:\w+=\S+ )*whence (llm train [^#`\n]*--run runs/(?:detox|gsm8k))", blocks, flags=re.MULTILINE
    )
    return [shlex.split(command) for command in commands]


@pytest.mark.parametrize(("number", "arm", "rounds"), [(0, "iif", 109), (1, "ippo", 100)])
def test_the_pages_commands_are_what_whence_takes(monkeypatch, number, arm, rounds):
    configs = []

    def run(config, path, on_round, *, overwrite):
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run", run)
    monkeypatch.setattr(training, "is_finished", lambda config, path: False)
    CliRunner().invoke(cli.app, list_commands()[number])
    (config,) = configs
    assert (config.arm, config.rounds) == (arm, rounds)
