"""Runs of a script's trainings: their policies are found where the script's trainer wrote them, and nowhere else."""

import json
import shutil

import polars as pl
import pytest
import torch

from helpers import language_training, trl_training
from helpers.language_runs import assert_refused, invoke
from helpers.language_training import make_model, make_tokenizer
from helpers.trl_training import Watch
from whence import NonPositive, ScoreAll
from whence.causes import Examples, LanguageTraining, find_causes, prove
from whence.causes.response_causes import measure_trained
from whence.core import RunDirectoryError, WhenceError
from whence.llm.base import add_adapter
from whence.llm.ppo import read_recipe
from whence.llm.text import generate
from whence.page import ExploredRun
from whence.page.content.rounds import name_commands
from whence.runs import RunDirectory, write_flag
from whence.stored.language import has_policy, rebuild_round
from whence.stored.language.rounds import explain_response

QUESTION = Examples("ab", "cc")
GRADERS = """
def length(completions, **kwargs):
    assert len(kwargs["prompts"]) == len(completions)
    return [float(len(each)) for each in completions]

def vowels(prompts, responses):
    return [float(sum(letter in "aei" for letter in text)) for text in responses]
"""


def vowels(completions, **columns):
    return language_training.vowels(None, completions)


def save_start(folder):
    """Return a model as a script loads it from a folder, with its tokenizer there."""
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return type(make_model()).from_pretrained(folder)


def train(folder, kind="grpo", adapter=False, **more):
    """Train with four optimiser steps on each generation batch; return the trainer, and what was before each step."""
    model, watch = save_start(folder / "start"), Watch()
    settings = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 12, "save_strategy": "steps"}
    trainer = trl_training.make_trainer(
        kind,
        folder / "out",
        more.pop("rule", ScoreAll()),
        watch=watch,
        model=add_adapter(model, 2) if adapter else model,
        run=folder / "run",
        **settings | {"save_steps": 4, "select": "before"} | more,
    )
    trainer.train()
    return trainer, watch.states


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    return folder, *train(folder)


@pytest.fixture
def copy(script, tmp_path):
    """The script's run and its checkpoints in another folder; the run is signed there, and names the checkpoints."""
    shutil.copytree(script[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["config"] |= {"output_dir": str(tmp_path / "out"), "model": str(tmp_path / "start")}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    RunDirectory.open(tmp_path / "run").sign()
    return RunDirectory.open(tmp_path / "run")


class TestTrl:
    def test_each_rounds_policy_is_the_one_that_drew_it(self, script):
        folder, trainer, states = script
        run = RunDirectory.open(folder / "run")
        for number in run.rounds():
            rebuilt = rebuild_round(run, number, make_target=lambda task: None)
            before = states[(number - 1) * 4]
            assert all(torch.equal(tensor, before[name]) for name, tensor in rebuilt.model.named_parameters())
        assert number == 3
        causes = find_causes(run, QUESTION, method="nearest")
        assert causes["round"].unique().to_list() == [1, 2, 3]
        assert causes.group_by("round").agg(pl.col("score").abs().sum())["score"].min() > 0
        trained = measure_trained(run, QUESTION)
        assert trained != pytest.approx(causes["log_prob"][-1], abs=1e-6)
        trainer.model.eval()
        ids = torch.tensor([[2, 3, 4, 4, 1]])
        log_probs = trainer.model(input_ids=ids).logits[0].log_softmax(-1).detach()
        assert trained == pytest.approx(float(log_probs[[1, 2, 3], [4, 4, 1]].sum()), abs=1e-5)

    @pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.long)])
    def test_scores_computed_again_are_those_that_were_stored(self, tmp_path, kind):
        train(tmp_path, kind, beta=0.1, max_steps=8)
        run = RunDirectory.open(tmp_path / "run")
        for number in (1, 2):
            table = run.round("records", number)
            worst = table.sort("score").row(0, named=True)
            explanation = explain_response(run, number, worst["record_id"])
            assert explanation.note is None
            assert sum(explanation.parts) == pytest.approx(worst["score"], rel=1e-3)

    def test_an_adapters_first_round_is_not_known(self, tmp_path):
        _, states = train(tmp_path, adapter=True, max_steps=8)
        run = RunDirectory.open(tmp_path / "run")
        assert [has_policy(run, number) for number in (1, 2, 3)] == [False, True, True]
        parameters = dict(rebuild_round(run, 2, make_target=lambda task: None).model.named_parameters())
        trained = [name for name in parameters if parameters[name].requires_grad]
        assert len(trained) == 28
        assert all(torch.equal(parameters[name], states[4][name]) for name in trained)
        assert find_causes(run, QUESTION, method="nearest")["round"].unique().to_list() == [2]
        with pytest.raises(RunDirectoryError, match=r"round 1 was not kept: the script began with .* a new adapter"):
            rebuild_round(run, 1, make_target=lambda task: None)

    def test_frozen_parameters_are_refused(self, copy):
        copy.config["trained_parameters"] -= 8
        with pytest.raises(WhenceError, match="the script froze or changed some"):
            rebuild_round(copy, 2, make_target=lambda task: None)

    def test_a_run_in_its_output_dir_may_move(self, tmp_path):
        folder = tmp_path / "first"
        model = save_start(tmp_path / "start")
        settings = {"run": folder, "save_strategy": "steps", "save_steps": 1, "max_steps": 2, "model": model}
        trl_training.make_trainer("grpo", folder / "out", None, **settings).train()
        run = RunDirectory.open(folder.rename(tmp_path / "second"), trust=True)
        assert run.config["output_dir"] == "out"
        assert [has_policy(run, number) for number in (1, 2, 3)] == [True, True, True]

    def test_a_training_that_continues_in_another_output_dir_names_that_one(self, tmp_path):
        settings = {"run": tmp_path / "run", "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
        model = save_start(tmp_path / "start")
        trl_training.make_trainer("grpo", tmp_path / "one", None, model=model, **settings).train()
        (tmp_path / "one").rename(tmp_path / "two")
        model = save_start(tmp_path / "start")
        later = trl_training.make_trainer("grpo", tmp_path / "two", None, model=model, max_steps=2, **settings)
        later.train(resume_from_checkpoint=True)
        run = RunDirectory.open(tmp_path / "run")
        assert (run.config["output_dir"], run.is_trusted) == (str(tmp_path / "two"), True)
        assert [has_policy(run, number) for number in (1, 2, 3)] == [True, True, True]

    def test_what_is_gone_is_named(self, copy, tmp_path):
        shutil.rmtree(tmp_path / "out" / "checkpoint-4")
        why = "why", copy.path, "--prompt", "ab", "--response", "cc"
        shown = " ".join(invoke(*why).output.split())
        assert "The policies of 1 of 3 rounds were not kept" in shown
        assert "train with save_strategy='steps', save_steps=4. Without policies: --by bm25" in shown
        (tmp_path / "out").rename(tmp_path / "elsewhere")
        (tmp_path / "start" / "model.safetensors").write_bytes(b"another")
        assert_refused(f"{tmp_path / 'start'} has changed since", *why)
        copy.config["model"] = None  # the script made it
        with pytest.raises(RunDirectoryError, match=rf"rounds 1, 2, 3 of .* are not in {tmp_path / 'out'}\."):
            find_causes(copy, QUESTION, method="nearest")
        assert_refused("--model FOLDER", "prove", copy.path, "--prompt", "ab", "--response", "cc", "--rounds", "2-3")

    def test_another_runs_checkpoint_is_refused(self, copy, tmp_path):
        run = RunDirectory.open(copy.path)
        run.notes = {**run.notes, "id": "another"}
        with pytest.raises(RunDirectoryError, match="is of another run than"):
            rebuild_round(run, 2, make_target=lambda task: None)

    def test_a_stranger_opens_no_folder(self, copy, tmp_path, monkeypatch):
        (copy.path / ".signature").unlink()
        loaded = []
        load = "whence.stored.language.policies.load_checkpoint"
        monkeypatch.setattr(load, lambda name, dtype: loaded.append(name))
        why = "why", copy.path, "--prompt", "ab", "--response", "cc"
        assert_refused("is not signed as a run that you made", *why)
        assert_refused("is not signed as a run that you made", "prove", copy.path, *why[2:], "--by", "bm25")
        assert invoke(*why, "--by", "bm25").exit_code == 0
        assert loaded == []
        monkeypatch.undo()
        assert invoke(*why, "--trust").exit_code == 0

    def test_a_proof_is_from_the_checkpoints(self, copy):
        left_out = copy.round("records", 2).head(4).select(pl.lit(2).alias("round"), "record_id")
        proof = prove(copy, QUESTION, left_out, rounds=[2, 3], seeds=1, training=LanguageTraining(answers=0))
        assert len({*map(str, proof.outcomes["log-probability"].values())}) == 4
        assert proof.stored["log-probability"] == pytest.approx(measure_trained(copy, QUESTION), abs=1e-5)
        untrained = LanguageTraining(answers=0, learning_rate=1e-9)
        proof = prove(copy, QUESTION, left_out, rounds=[2, 3], seeds=1, training=untrained)
        causes = find_causes(copy, QUESTION, method="nearest")
        before = causes.filter(pl.col("round") == 2)["log_prob"][0]
        for values in proof.outcomes["log-probability"].values():
            assert values == pytest.approx([before], abs=1e-5)

    def test_several_rewards_are_measured_in_one_pass(self, tmp_path, monkeypatch):
        train(tmp_path, reward_funcs=[trl_training.reward, vowels], rule=None, max_steps=4)
        graders = tmp_path / "graders.py"
        graders.write_text(GRADERS)
        path, passes = tmp_path / "run", []
        for record in range(4):
            write_flag(path, 1, record, "")

        def count(*arguments):
            passes.append(1)
            return generate(*arguments)

        monkeypatch.setattr("whence.causes.language_retraining.generate", count)
        options = ["prove", path, "--flagged", "--seeds", 1, "--answers", 9, "--json"]
        rewards = [f"{graders}:{name}" for name in ("length", "vowels")]
        together = json.loads(invoke(*options, "--reward", rewards[0], "--reward", rewards[1]).stdout)
        assert len(passes) == 4 + 1
        assert "Not measured: reward.reward. Name each one's function: --reward FILE.PY:FUNCTION." in together["notes"]
        assert [*together["verdicts"]] == ["log-probability", "reward.length", "reward.vowels"]
        alone = json.loads(invoke(*options, "--reward", rewards[1]).stdout)
        assert together["stored"]["reward.vowels"] == alone["stored"]["reward"]
        shared = [row for row in together["outcomes"] if row["outcome"] == "reward.vowels"]
        single = [row for row in alone["outcomes"] if row["outcome"] == "reward"]
        assert [row["variant"] for row in shared] == ["all", "without", "random", "placebo"]
        assert [(row["value"], row["change"]) for row in shared] == [(row["value"], row["change"]) for row in single]
        lengths = [row["value"] for row in together["outcomes"] if row["outcome"] == "reward.length"]
        for values in (lengths, [row["value"] for row in shared]):
            assert len({value["mean"] for value in values}) > 1

    def test_rewards_of_one_name_keep_their_files(self, copy, tmp_path):
        names = []
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "graders.py").write_text(GRADERS)
            names.append(f"{tmp_path / folder / 'graders.py'}:length")
        options = LanguageTraining(answers=4, reward=names)
        proof = prove(copy, QUESTION, method="bm25", top=1, seeds=1, training=options)
        assert [*proof.outcomes] == ["log-probability", *(f"reward.{name}" for name in names)]
        assert len({*(str(proof.outcomes[f"reward.{name}"]) for name in names)}) == 1

    def test_no_clipping_is_none(self):
        assert read_recipe({"trl": {"max_grad_norm": 0.0}}).max_grad_norm is None


def test_a_script_of_ppo(tmp_path):
    model = save_start(tmp_path / "start")
    settings = {"rounds": 2, "save_every": 1, "keep_checkpoints": 9, "model": model}
    trainer = language_training.make_trainer(tmp_path / "run", NonPositive(), select="before", **settings)
    trainer.train()
    run = RunDirectory.open(tmp_path / "run")
    for number in (1, 2):
        record = run.round("records", number).sort("score")["record_id"][0]
        assert explain_response(run, number, record).note is None
    assert measure_trained(run, QUESTION) is None
    trainer.save_model()
    assert measure_trained(run, QUESTION) < 0
    left_out = run.round("records", 1).filter("keep").head(1).select(pl.lit(1).alias("round"), "record_id")
    proof = prove(run, QUESTION, left_out, seeds=1, training=LanguageTraining(answers=0))
    assert proof.stored["log-probability"] == pytest.approx(measure_trained(run, QUESTION), abs=1e-5)
    assert len({*map(str, proof.outcomes["log-probability"].values())}) > 1
    assert "whence why" in name_commands(ExploredRun(run))["why"]
    assert find_causes(run, QUESTION)["round"].unique().to_list() == [1, 2]
