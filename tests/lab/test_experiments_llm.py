"""Post-training as experiments: configurations, run directories, the commands."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification

from helpers.language_runs import QUICK, QUICK_TRL, assert_refused, invoke, tiny
from helpers.language_training import make_model, make_tokenizer
from helpers.launching import run_one_by_one
from whence import lab
from whence.core import RunDirectoryError, Unsupported, WhenceError
from whence.engines import memory
from whence.lab.arms import split_arm
from whence.lab.comparison import run_path
from whence.lab.language import SIZES, check
from whence.lab.language.laboratory_tasks import make_character_tokenizer
from whence.lab.language.laboratory_tasks import make_model as make_lab_model
from whence.lab.language.selections import configure_trainer, make_rule, read_arm
from whence.lab.language.training import is_finished, prepare, read_curve, run
from whence.page import write_report
from whence.runs import RunDirectory
from whence.selection import DTV, IPPO, KeepAll, MaxVariance, NonPositive, RandomDrop
from whence.stored.language import LanguageConfig, rebuild_round
from whence.stored.language.language_config import digest_source
from whence.stored.language.tasks import load_function, make_trainer_config, scoring_memory

pytestmark = pytest.mark.usefixtures("laboratory_cache")

REWARDS = """
from dataclasses import dataclass

@dataclass
class Scale:
    factor: float = 100.0

def numbered(prompts, responses, number, completion):
    assert ["vwxyz"[one] for one in number] == list(completion)
    return [Scale().factor * one + len(text) for one, text in zip(number, responses)]

def length(prompts, responses):
    return [len(text) for text in responses]

constant = 3
"""
MINE = "SCALE = 2\n\n\ndef reward(prompts, responses):\n    return [SCALE * len(text) for text in responses]\n"


def train_own(own, *options, algorithm="ppo", selection="none", call=invoke, **settings):
    """Train a model of the user's, which answers in four tokens, on his prompts."""
    quick = QUICK | {"max_new_tokens": 4}
    if algorithm != "ppo":
        quick = QUICK_TRL | {"max_completion_length": 4, "num_generations": 4, "beta": 0.0}
    arguments = ["--model", own / "model", "--dataset", own / "prompts", "--algorithm", algorithm]
    arguments += ["--selection", selection, "--settings", json.dumps(quick | settings)]
    return call("llm", "train", *arguments, *options)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A model, prompts, demonstrations and a reward model of the user's, on disk."""
    folder = tmp_path_factory.mktemp("own")
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    config = make_model().config
    config.num_labels, config.id2label = 2, {0: "rude", 1: "polite"}
    torch.manual_seed(1)
    LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    make_tokenizer().save_pretrained(folder / "judge")
    texts = ["ab", "cd", "ef", "gh", "ij"]
    # TRL has names of its own for some columns, and leaves them out of what rewards get.
    columns = {"prompt": texts, "number": [0, 1, 2, 3, 4], "completion": ["v", "w", "x", "y", "z"], "images": texts}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "prompts")
    (folder / "test.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("ac", "bd", "ce")))
    (folder / "rewards.py").write_text(REWARDS)
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict({"prompt": ["ab", "aj"], "completion": ["cc", "dd"]})}
    ).save_to_disk(folder / "demonstrations")
    return folder


WITHOUT_THE_EXTRA = """
import sys

for name in ("transformers", "trl", "accelerate", "peft", "datasets"):
    sys.modules[name] = None
from whence.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """A finished comparison of two arms, and what the command printed."""
    path = tmp_path_factory.mktemp("comparison")
    arguments = ["--size", "tiny", "--arms", "none,iif-sequence", "--seeds", 1, "--workers", 1, "--out", path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.lab.cluster.run_all", run_one_by_one)
        done = invoke("llm", "compare", *arguments, "--settings", json.dumps(QUICK), "--json")
    assert done.exit_code == 0, done.output
    return path, done.stdout


class TestConfig:
    def test_arms_name_rule_and_target(self):
        assert split_arm("iif-token") == ("iif", "token")
        assert split_arm("ippo-unweighted") == ("ippo-unweighted", None)
        assert split_arm("ippo-unweighted-sequence") == ("ippo-unweighted", "sequence")
        for arm, rule, target in (
            ("ppo", KeepAll(), None),
            ("random", RandomDrop(1.0, 3, zeros=True), "sequence"),
            ("iif", NonPositive(), "sequence"),
            ("iif-validation", NonPositive(), "validation"),
            ("ippo", IPPO(), "validation"),
            ("ippo-unweighted", IPPO(weighted=False), "validation"),
            ("dtv-loo", DTV(leave_one_out=True), None),
            ("max-variance", MaxVariance(2), None),  # of four
            ("random-max-variance", RandomDrop(seed=3, like=MaxVariance(2)), None),
            ("random-iif-token", RandomDrop(seed=3, like=NonPositive()), "token"),
        ):
            config = tiny(arm, seed=3, settings={"num_generations": 4})
            assert (make_rule(config), read_arm(arm)[1]) == (rule, target)

    def test_it_survives_json(self):
        config = tiny("ippo", lora=2, settings={"learning_rate": 0.5})
        assert LanguageConfig.from_json(json.loads(json.dumps(config.to_json()))) == config

    def test_settings_are_the_tasks_and_then_ones_own(self):
        trainer_config = make_trainer_config(tiny(seed=4, settings={"gamma": 0.5}), "somewhere")
        assert (trainer_config.gamma, trainer_config.rounds, trainer_config.seed) == (0.5, 2, 4)
        assert trainer_config.output_dir == "somewhere"
        assert trainer_config.learning_rate == 1e-3  # the laboratory's

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"arm": "iiff"}, "arm 'iiff' is unknown"),
            ({"arm": "iif-tokens"}, "target 'tokens' is unknown"),
            ({"arm": "ppo-token"}, "has no effect: ppo reads none"),
            ({"arm": "iif", "task": "algebra"}, "task 'algebra' is unknown"),
            ({"arm": "iif", "size": "huge"}, "no size 'huge'"),
            ({"arm": "ippo", "held_out": 3}, "reads no responses to held-out"),
            ({"arm": "iif", "model": "x"}, "model and a task were both given"),
            ({"arm": "iif", "task": None, "model": "x"}, "Neither a task nor dataset, reward was given"),
            (
                {"arm": "ippo", "task": None, "model": "x", "dataset": "y", "reward_model": "z"},
                "give a data set of them",
            ),
            ({"arm": "iif", "settings": {"learning_rte": 1}}, r"PPO has no 'learning_rte'.*learning_rate"),
            ({"arm": "iif", "settings": {"seed": 1}}, "no setting seed"),
            ({"arm": "iif", "dtype": "bfloat16"}, "too coarse"),
            ({"arm": "iif", "algorithm": "grpo", "settings": {"rounds": 0}}, "rounds is 0"),
            ({"arm": "ppo", "algorithm": "grpo", "settings": {"steps_per_generation": 8}}, "one step on a generation"),
            ({"arm": "iif", "algorithm": "grpo", "held_out": 3}, "held_out is an option of PPO"),
            ({"arm": "iif", "algorithm": "grpo", "settings": {"betta": 1}}, r"TRL refuses these settings: .*'betta'"),
            ({"arm": "iif", "algorithm": "rloo", "settings": {"num_generations": 3}}, "TRL refuses these settings"),
            ({"arm": "iif", "algorithm": "grpo", "settings": {"entropy_coef": 0.1}}, "selected with entropy_coef"),
            ({"arm": "random", "algorithm": "grpo", "settings": {"loss_type": "bnpo"}}, "bnpo' with several passes"),
            ({"arm": "random-zero-variance"}, "needs several responses to a prompt: --settings"),
            ({"arm": "iif", "unit": "group"}, "needs several responses to a prompt: --settings"),
            ({"arm": "max-variance", "unit": "row", "algorithm": "grpo"}, "max-variance selects by row"),
        ],
    )
    def test_what_is_refused(self, fields, message):
        with pytest.raises(WhenceError, match=message):
            configure_trainer(LanguageConfig(**{"seed": 0, **fields}), "runs/checked")

    @pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
    def test_a_run_refuses_settings_before_anything_is_made(self, tmp_path, monkeypatch, algorithm):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for refuse in (run, lambda config, path: prepare(config)):
            with pytest.raises(WhenceError, match="learning_rte"):
                refuse(tiny(algorithm=algorithm, settings={"learning_rte": 1}), tmp_path / "run")
        assert not list(tmp_path.iterdir())

    def test_an_arm_that_keeps_all_takes_what_others_cannot(self):
        for name, value in (("entropy_coef", 0.1), ("loss_type", "bnpo")):
            config = LanguageConfig("ppo", 0, algorithm="grpo", settings={name: value})
            assert getattr(configure_trainer(config), name) == value
            with pytest.raises(Unsupported, match=name):
                configure_trainer(replace(config, arm="iif"))


class TestRun:
    @pytest.mark.parametrize(
        ("algorithm", "arm"),
        [("ppo", "ippo"), ("grpo", "dtv-loo"), pytest.param("rloo", "ppo", marks=pytest.mark.long)],
    )
    def test_a_run_leaves_curve_tables_and_model(self, tmp_path, algorithm, arm):
        config, reported = tiny(arm, algorithm=algorithm), []
        assert algorithm == "ppo" or config.rounds == 2
        run(config, tmp_path, lambda number, row: reported.append(number))
        assert reported == [0, 1, 2]
        assert is_finished(config, tmp_path)
        found = read_curve(config, tmp_path)
        assert len(found.returns) == 3
        assert (found.seconds > 0).all()
        directory = RunDirectory.open(tmp_path)
        table, metrics, timings = directory.round("records", 2), directory.table("metrics"), directory.table("timings")
        assert directory.config["arm"] == arm
        assert table.height == 8
        assert {"prompt", "response", "reward", "keep", "weight", "reason"} <= set(table.columns)
        assert ("score" in table.columns) == (arm != "ppo")
        assert metrics["kept"][1] == table["keep"].sum()
        assert directory.rounds("answers") == [0, 1, 2]
        assert directory.round("answers", 2).columns == ["prompt", "response", "reward"]
        rewards = [float(check(row["prompt"], row["response"]).right) for row in table.iter_rows(named=True)]
        assert table["reward"].to_list() == rewards
        assert (timings["generation_cpu"] > 0).all()
        assert (timings["optimisation_cpu"] > 0).all()
        assert ("scoring_cpu" in timings.columns) == (arm != "ppo")
        write_report(directory, tmp_path / "report.html")
        reported.clear()
        run(config, tmp_path, lambda number, row: reported.append(number))
        assert reported == [2]  # it was finished
        if arm == "dtv-loo":
            with pytest.raises(Unsupported, match="the objective of the steps that were taken"):
                rebuild_round(directory, 1)
        with pytest.raises(RunDirectoryError, match=f"arm was '{arm}', now 'iif'"):
            is_finished(tiny("iif", algorithm=algorithm), tmp_path)

    def test_a_control_is_not_charged_for_scoring(self, comparison, tmp_path):
        control = tiny("random")
        run(control, tmp_path)
        scored = lab.load_comparison(comparison[0]).configs[1]
        scored_path = run_path(comparison[0], scored)
        for config, path, left_out in ((control, tmp_path, ["scoring_cpu"]), (scored, scored_path, [])):
            timings = RunDirectory.open(path).table("timings")
            assert "scoring_cpu" in timings.columns
            stages = [name for name in timings.columns if name.endswith("_cpu") and name not in left_out]
            whole = timings.select(stages).sum_horizontal().to_list()
            assert read_curve(config, path).seconds.tolist() == pytest.approx(whole)

    @pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.long)])
    def test_a_broken_off_run_goes_on_from_its_checkpoint(self, tmp_path, algorithm):
        class Killed(Exception):
            pass

        def break_off(number, row):
            if number == 2:
                raise Killed

        every = {"save_every": 1} if algorithm == "ppo" else {"save_steps": 2}
        config = tiny("iif", algorithm=algorithm, settings={"rounds": 2, **every})
        with pytest.raises(Killed):
            run(config, tmp_path / "broken", break_off)
        reported = []
        run(config, tmp_path / "broken", lambda number, row: reported.append(number))
        assert reported == [0, 2]
        run(config, tmp_path / "whole")
        tables = [RunDirectory.open(tmp_path / name) for name in ("broken", "whole")]
        for name in ("metrics", "evaluations"):
            assert tables[0].table(name).equals(tables[1].table(name))
        assert tables[0].table("timings")["round"].to_list() == [1, 2]
        models = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("broken", "whole")]
        assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())

    def test_checkpoints_of_grpo_are_written_by_default(self, tmp_path):
        run(tiny("ppo", algorithm="grpo"), tmp_path)
        written = (tmp_path / "trl").glob("checkpoint-*/whence.safetensors")
        assert max(file.parent.name for file in written) == "checkpoint-4"  # two steps a round
        (tmp_path / "model").rename(tmp_path / "elsewhere")
        reported = []
        run(tiny("ppo", algorithm="grpo"), tmp_path, lambda number, row: reported.append(number))
        assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
            tmp_path / "elsewhere" / "model.safetensors"
        ).read_bytes()
        assert reported == []  # nothing was trained
        shutil.rmtree(tmp_path / "trl" / "checkpoint-4")  # as if the run had been broken off in the second round
        shutil.rmtree(tmp_path / "model")
        run(tiny("ppo", algorithm="grpo"), tmp_path, lambda number, row: reported.append(number))
        assert reported[-1] == 2
        assert (tmp_path / "model" / "model.safetensors").read_bytes() == (
            tmp_path / "elsewhere" / "model.safetensors"
        ).read_bytes()

    @pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.long)])
    def test_in_half_precision(self, tmp_path, algorithm):
        # Before the steps: GRPO's groups here have equal rewards, so no target's gradient is known in the step.
        config = tiny("iif", dtype="bfloat16", lora=2, algorithm=algorithm, select="before", settings={"rounds": 1})
        run(config, tmp_path)
        directory = RunDirectory.open(tmp_path)
        assert directory.round("records", 1)["score"].is_finite().all()
        saved = load_file(tmp_path / "model" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}  # in which small steps count

    def test_held_out_prompts_do_not_train(self, tmp_path):
        config = tiny("iif", held_out=120, settings={"batch_size": 16})  # of 128
        run(config, tmp_path)
        directory = RunDirectory.open(tmp_path)
        assert len({prompt for number in (1, 2) for prompt in directory.round("records", number)["prompt"]}) <= 8
        assert directory.config["held_out"] == 120
        assert (directory.table("timings")["held_out_wall"] > 0).all()
        with pytest.raises(WhenceError, match="held_out is 128, and there are 128 prompts"):
            run(tiny("iif", held_out=128), tmp_path / "all")


class TestCommand:
    def test_train_and_again(self, tmp_path):
        settings = json.dumps({name: value for name, value in QUICK.items() if name != "rounds"})
        arguments = ["llm", "train", "--task", "arithmetic", "--size", "tiny", "--selection", "iif"]
        arguments += ["--target", "token", "--rounds", "2", "--settings", settings, "--run", tmp_path / "r"]
        done = invoke(*arguments)
        assert done.exit_code == 0, done.output
        assert "arithmetic, iif-token, seed 0: 2 rounds done. Last round: test return" in done.output
        found = json.loads(invoke(*arguments, "--json").stdout)
        assert found["config"]["arm"] == "iif-token"
        page = (tmp_path / "r" / "report.html").read_text()
        for heading in ("Learning curves", "Reward", "Unfaithful answers", "Divergence from the start model"):
            assert f"<h2>{heading}</h2>" in page

    def test_a_model_and_data_of_ones_own(self, own, tmp_path):
        options = ["--reward-model", own / "judge", "--reward-label", "polite", "--test-dataset", own / "test.jsonl"]
        options += ["--demonstrations", own / "demonstrations", "--run", tmp_path / "run"]
        done = train_own(own, *options, selection="ippo")
        assert done.exit_code == 0, done.output
        directory = RunDirectory.open(tmp_path / "run")
        assert directory.table("evaluations")["round"].to_list() == [0, 1, 2]
        judged = directory.round("records", 1)["reward"]
        assert judged.n_unique() > 1

    # With PPO, the test of a reward that has changed trains on one's own, too.
    @pytest.mark.parametrize(
        "algorithm", ["grpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("ppo", "rloo"))]
    )
    def test_a_reward_of_ones_own(self, own, tmp_path, algorithm):
        options = ["--reward", f"{own / 'rewards.py'}:numbered", "--run", tmp_path / "run"]
        options += ["--test-dataset", own / "test.jsonl", "--test-reward", f"{own / 'rewards.py'}:length"]
        done = train_own(own, *options, algorithm=algorithm, selection="iif")
        assert done.exit_code == 0, done.output
        directory = RunDirectory.open(tmp_path / "run")
        records = directory.round("records", 1)
        numbers = {"ab": 0, "cd": 1, "ef": 2, "gh": 3, "ij": 4}
        for prompt, response, reward in records.select("prompt", "response", "reward").iter_rows():
            assert reward == 100 * numbers[prompt.replace(" ", "")] + len(response)
        tested = directory.table("evaluations")["test_return"]
        assert tested.is_between(0, 7).all()  # texts of four tokens; the test's prompts have no number

    @pytest.mark.parametrize("algorithm", ["ppo", "grpo", pytest.param("rloo", marks=pytest.mark.long)])
    def test_prompts_and_responses_have_to_fit_into_the_context(self, own, tmp_path, algorithm):
        name = "max_new_tokens" if algorithm == "ppo" else "max_completion_length"
        options = ["--reward", f"{own / 'rewards.py'}:length", "--run", tmp_path / "run"]
        for tokens, message in (
            (31, f"Prompt 0 has 2 tokens; from 1 to 1 are needed.*or lower .*{name}"),
            (32, "from 1 to 0 are needed: the model reads 32 tokens in all, 32 for a response"),
        ):
            call = partial(assert_refused, message)
            train_own(own, *options, algorithm=algorithm, call=call, **{name: tokens})
        assert not (tmp_path / "run" / "metrics.parquet").exists()

    def test_a_reward_that_has_changed_is_another_run(self, own, tmp_path):
        mine = tmp_path / "mine.py"
        mine.write_text(MINE)
        train = partial(train_own, own, "--reward", f"{mine}:reward", "--run", tmp_path / "run")
        assert train().exit_code == 0
        assert train().exit_code == 0
        mine.write_text(MINE.replace("SCALE = 2", "SCALE = 3"))
        refusal = train(call=partial(assert_refused, "contents.reward was"))
        assert isinstance(refusal, RunDirectoryError)
        assert train("--overwrite").exit_code == 0
        assert {reward % 3 for reward in RunDirectory.open(tmp_path / "run").round("records", 1)["reward"]} == {0}

    @pytest.mark.parametrize("algorithm", ["ppo", pytest.param("grpo", marks=pytest.mark.long)])
    def test_an_error_in_a_reward_names_its_line_and_leaves_nothing_to_delete(self, own, tmp_path, algorithm):
        file, folder = tmp_path / "mine.py", tmp_path / "run"
        file.write_text("def reward(prompts, responses):\n    return [points(text) for text in responses]\n\n\n")
        file.write_text(file.read_text() + "def points(text):\n    return {'known': 1.0}[text + '!']\n")
        train = partial(train_own, own, "--reward", f"{file}:reward", "--run", folder, algorithm=algorithm)
        message = rf"^The reward reward failed in {file}, line 6: KeyError: '.*!'\. "
        assert isinstance(train(call=partial(assert_refused, message)).__cause__, KeyError)
        (folder / "model").mkdir()  # that of a run which was there before
        file.write_text("def reward(prompts, responses):\n    return [len(text) for text in responses]\n")
        done = train(learning_rate=1e-4)
        assert done.exit_code == 0, done.output
        assert "2 rounds done" in done.output
        assert (folder / "model" / "config.json").exists()

    def test_a_module_is_known_by_its_file(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "whence_local.py").write_text(MINE)
        assert digest_source("whence_local:reward") == digest_source("whence_local.py:reward") is not None
        assert digest_source("no.such:function") is digest_source("no_such.py:function") is None

    def test_a_module_in_the_working_directory(self, own, tmp_path, monkeypatch):
        (tmp_path / "whence_beside.py").write_text("SCALE = 3.0\n")
        (tmp_path / "whence_mine.py").write_text(
            "from whence_beside import SCALE\ndef reward(prompts, responses):\n    return [SCALE for _ in responses]\n"
        )
        monkeypatch.chdir(tmp_path)
        for name in ("whence_mine:reward", "whence_mine.py:reward"):
            assert load_function(name)([], ["a"]) == [3.0]
        assert load_function("whence_mine.py:reward") is load_function(f"{tmp_path / 'whence_mine.py'}:reward")
        assert str(tmp_path) not in sys.path

    def test_prompts_that_a_run_refuses(self, own, tmp_path):
        (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "ab" * 20}) + "\n")
        (tmp_path / "none.csv").write_text("prompt\n")
        options = ["--reward", f"{own / 'rewards.py'}:length", "--run", tmp_path / "run"]
        for more, message in (
            (["--held-out", 5], "at least one has to train"),
            (["--dataset", tmp_path / "long.jsonl"], "from 1 to 2 are needed"),
            (["--dataset", tmp_path / "none.csv"], "none.csv cannot be loaded"),
        ):
            call = partial(assert_refused, message)
            train_own(own, *options, *more, selection="iif", call=call, max_prompt_length=2)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"--reward": "rewards.py", "--reward-model": None, "--reward-label": None}, "names no function"),
            (
                {"--reward": "nowhere.py:f", "--reward-model": None, "--reward-label": None},
                "nowhere.py, from nowhere.py:f, cannot be run",
            ),
            (
                {"--reward": "no.such:f", "--reward-model": None, "--reward-label": None},
                "No module named 'no'. Modules are looked for in the working directory",
            ),
            ({"--reward": "OWN:lenght", "--reward-model": None, "--reward-label": None}, "no function 'lenght'"),
            ({"--reward": "OWN:constant", "--reward-model": None, "--reward-label": None}, "no function 'constant'"),
            ({"--reward": "OWN:length"}, "a function can call the model"),
            ({"--reward": "OWN:length", "--reward-model": None}, "no reward_model with labels"),
            ({"--test-reward": "OWN:length"}, "no test_dataset to measure on"),
            ({"--test-reward": "OWN:numbered", "--test-dataset": "TEST"}, "asks for 'number'"),
            ({"--reward-model": None, "--reward-label": None}, "Neither a task nor reward was given"),
            ({"--reward-label": "kind"}, "label is 'kind', and the reward model's labels are rude, polite"),
            ({"--reward-label": None}, "label is None, and the reward model's labels are rude, polite: choose one"),
            ({"--dataset": "nowhere.jsonl"}, "The data set nowhere.jsonl cannot be loaded"),
        ],
    )
    def test_what_is_refused_of_ones_own(self, own, tmp_path, monkeypatch, changed, message):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it is tried again and again
        arguments = {
            **{"--model": own / "model", "--dataset": own / "prompts", "--reward-model": own / "judge"},
            **{"--reward-label": "polite", "--selection": "iif", "--run": tmp_path / "run", **changed},
        }
        places = {"OWN": own / "rewards.py", "TEST": own / "test.jsonl"}
        for word, place in places.items():
            arguments = {name: value and str(value).replace(word, str(place)) for name, value in arguments.items()}
        pairs = [part for name, value in arguments.items() if value is not None for part in (name, value)]
        assert_refused(message, "llm", "train", *pairs)
        assert not (tmp_path / "run" / "metrics.parquet").exists()

    def test_compare(self, comparison):
        path, output = comparison
        summary = json.loads(output)["environments"]
        assert list(summary["arithmetic"]) == ["ppo", "iif-sequence"]
        page = (path / "report.html").read_text()
        assert "1 seed, 2 rounds, up to 512 prompts of the test." in page
        loaded = lab.load_comparison(path)
        assert [config.arm for config in loaded.configs] == ["ppo", "iif-sequence"]

    def test_a_comparison_is_reported_without_whence_llm(self, comparison, tmp_path, monkeypatch):
        """Reading a finished comparison imports no trainer anew; the long test below imports nothing before."""
        extra = ("transformers", "trl", "accelerate", "peft", "datasets", "whence.llm", "whence.lab.language.training")
        for name in {*extra, *(name for name in sys.modules if name.startswith("whence.llm."))}:
            monkeypatch.setitem(sys.modules, name, None)
        done = invoke("report", comparison[0], "--out", tmp_path / "page.html")
        assert done.exit_code == 0, done.exception
        assert "up to 512 prompts of the test." in (tmp_path / "page.html").read_text()

    @pytest.mark.long
    def test_a_comparison_is_reported_without_the_extra(self, comparison, tmp_path):
        """Reading a finished comparison imports no trainer, and nothing else of the extra `llm`."""
        command = [sys.executable, "-c", WITHOUT_THE_EXTRA, "report", comparison[0], "--out", tmp_path / "page.html"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "up to 512 prompts of the test." in (tmp_path / "page.html").read_text()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--arms", "none,none"], "name each arm once"),
            (["--arms", ""], "name each arm once"),
            (["--arms", "iif", "--size", "tiny"], "lack 'ppo'"),
            (["--model", "m", "--dataset", "d", "--reward-model", "r", "--arms", "none"], "--test-dataset"),
        ],
    )
    def test_what_compare_refuses(self, tmp_path, arguments, message):
        assert_refused(message, "llm", "compare", *arguments, "--out", tmp_path)

    def test_held_out_prompts_are_of_the_arms_that_score(self, tmp_path, monkeypatch):
        compared = []
        monkeypatch.setattr(
            "whence.cli.commands.train_command._compare", lambda configs, *_, **__: compared.extend(configs)
        )
        arguments = ["--task", "arithmetic", "--size", "tiny", "--arms", "none,iif-token", "--seeds", 1]
        done = invoke("llm", "compare", *arguments, "--held-out", 8, "--out", tmp_path)
        assert done.exit_code == 0, done.output
        assert [(config.arm, config.held_out) for config in compared] == [("ppo", 0), ("iif-token", 8)]


@pytest.mark.parametrize("size", SIZES)
def test_the_budget_of_a_laboratory_is_ample(size):
    with torch.device("meta"):
        model = make_lab_model(make_character_tokenizer("0123456789"), SIZES[size], 128, 0)
    gradient = sum(parameter.nbytes for parameter in model.parameters())
    budget = scoring_memory(LanguageConfig("iif", 0, task="arithmetic", size=size))
    assert budget is None or memory._MARGIN * gradient < budget / 2  # the target's gradient is held throughout
