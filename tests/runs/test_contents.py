"""What a run's names point at is compared by its contents, and nothing is deleted before all was checked."""

import hashlib
import json
import sys

import pytest

from helpers import resuming
from helpers.language_runs import assert_refused, copy_run, invoke
from helpers.language_training import make_model, make_tokenizer, make_trainer
from helpers.launching import Recorder, run_one_by_one
from helpers.trl_training import make_trainer as make_trl_trainer
from whence import IIF
from whence.core import RunDirectoryError, WhenceError
from whence.lab import Planned, agents, compare, run_sweep
from whence.lab.agents import configure
from whence.runs import RunDirectory, digest_content
from whence.sb3 import InfluenceCallback

ENVIRONMENT = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

SCALE = 1

class Cart(CartPoleEnv):
    made = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        Cart.made += 1

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, SCALE * reward, *rest

def make():
    return gym.wrappers.TimeLimit(Cart(), 50)
"""


@pytest.fixture
def cart(tmp_path, monkeypatch):
    """Return a function that writes a module of a user's environment, with a reward that is scaled."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(scale):
        (tmp_path / "users_cart.py").write_text(ENVIRONMENT.replace("SCALE = 1", f"SCALE = {scale}"))
        sys.modules.pop("users_cart", None)
        return "users_cart:make"

    yield write
    sys.modules.pop("users_cart", None)


def cart_run(name, **more):
    settings = {"n_steps": 32, "batch_size": 32, "n_epochs": 1}
    return configure(env=name, arm="ppo", rounds=2, eval_episodes=2, hyperparameters=settings, **more)


def test_an_environment_of_another_reward_is_measured_anew(cart, tmp_path, caplog):
    config = cart_run(cart(1))
    agents.run(config, tmp_path / "run", recordings=[1, 2])
    agents.run(config, tmp_path / "run", recordings=[1, 2])  # it is finished
    options = ["--where", "action = 1 and step < 5", "--seeds", 1, "--test-episodes", 2, "--json"]
    returns = []
    for scale in (1, 100, 100):
        cart(scale)
        caplog.clear()
        shown = invoke("prove", tmp_path / "run", *options)
        assert shown.exit_code == 0, shown.output
        rows = json.loads(shown.stdout)["outcomes"]
        returns += [row["value"]["mean"] for row in rows if (row["outcome"], row["variant"]) == ("test return", "all")]
        assert ("not measured again" in caplog.text) == (len(returns) == 3)
    assert returns[1:] == [pytest.approx(100 * returns[0])] * 2
    with pytest.raises(RunDirectoryError, match=r"contents\.environment was"):
        agents.run(config, tmp_path / "run", recordings=[1, 2])


def test_a_sweeps_run_in_another_environment_is_not_taken_for_this_one(cart, tmp_path, monkeypatch):
    monkeypatch.setattr("whence.lab.cluster.run_all", run_one_by_one)
    planned = [Planned("cart", "ppo", cart_run(cart(1)))]
    for _ in range(2):
        assert run_sweep(planned, tmp_path / "out", Recorder()) == {}
    cart(100)
    with pytest.raises(RunDirectoryError, match=r"contents\.environment was"):
        run_sweep(planned, tmp_path / "out", Recorder())


def save(model, folder):
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def write_rollouts(folder, *steps, reward=1.0):
    for step in steps:
        rows = [{"prompt": "ab", "response": text, "reward": reward * len(text)} for text in ("cd", "efg")]
        (folder / f"{step}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def rollouts(tmp_path):
    (tmp_path / "rollouts").mkdir()
    return write_rollouts(tmp_path / "rollouts", 1, 2)


def test_other_weights_or_rollouts_are_another_run_and_further_ones_are_not(rollouts, tmp_path):
    command = ["llm", "score", rollouts, "--model", save(make_model(), tmp_path / "model"), "--run", tmp_path / "run"]
    assert "in 2 rounds" in invoke(*command).stdout
    write_rollouts(rollouts, 3)
    assert "in 3 rounds" in invoke(*command).stdout
    write_rollouts(rollouts, 2, reward=2.0)
    assert_refused(r"contents\.rollouts\.2\.jsonl was", *command)
    write_rollouts(rollouts, 2)
    assert "in 3 rounds" in invoke(*command).stdout
    save(make_model(1), tmp_path / "model")
    assert_refused(r"contents\.model was", *command)


def test_a_model_of_other_weights_is_another_run_for_every_trainer(tmp_path):
    def load(seed):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(save(make_model(seed), tmp_path / "model"))

    def train_ppo(seed):
        make_trainer(tmp_path / "ppo", model=load(seed), rounds=1).train()

    def train_trl(seed):
        options = {"run": tmp_path / "grpo", "save_strategy": "steps", "save_steps": 1}
        trainer = make_trl_trainer("grpo", tmp_path / "grpo" / "trl", IIF(0.5), model=load(seed), **options)
        trainer.train(resume_from_checkpoint=trainer.find_checkpoint() is not None or None)

    for train in (train_ppo, train_trl):
        train(0)
        train(0)
        with pytest.raises(RunDirectoryError, match=r"weights was"):
            train(1)


def test_what_a_digest_is_of(tmp_path):
    model = tmp_path / "model"
    save(make_model(), model)
    digest = digest_content(model)
    (model / "optimizer.pt").write_bytes(b"state")
    (model / ".cache").write_bytes(b"hidden")
    (model / "checkpoint-5").mkdir()
    (model / "checkpoint-5" / "model.safetensors").write_bytes(b"later")
    assert digest_content(model) == digest
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    assert digest_content(model) != digest
    data = tmp_path / "data"
    (data / "train").mkdir(parents=True)
    (data / "train" / "data.arrow").write_bytes(b"rows")
    digest = digest_content(data)
    (data / "train" / "cache-123.arrow").write_bytes(b"mapped")
    assert digest_content(data) == digest
    (data / "train" / "data.arrow").write_bytes(b"sowr")
    assert digest_content(data) != digest
    assert digest_content(tmp_path / "no-such") is None


def digest_tree(path):
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Return the arguments of a command that has made a run of rollouts, in which nobody changes a byte."""
    folder = tmp_path_factory.mktemp("scored")
    (folder / "rollouts").mkdir()
    rollouts = write_rollouts(folder / "rollouts", 1, 2)
    command = [rollouts, "--model", save(make_model(), folder / "model"), "--run", folder / "run"]
    assert invoke("llm", "score", *command).exit_code == 0
    return command


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "mistyped", []), "holds no rollouts"),
        (lambda folder: (None, ["--column", "reward=scroe"]), "scroe"),
        (lambda folder: (None, ["--column", "prompt=response", "--column", "response=prompt_"]), "prompt_"),
        (
            lambda folder: (write_other(folder, [{"prompt": "a" * 99, "response": "b", "reward": 1}]), []),
            "can be scored",
        ),
        (lambda folder: (None, ["--target", "validation", "--demonstrations", str(folder / "none")]), "cannot be"),
        (lambda folder: (None, ["--reference", str(folder / "none"), "--beta", "0.1"]), "none"),
    ],
)
def test_rollouts_that_cannot_be_scored_delete_nothing(scored, tmp_path, change, message):
    before = digest_tree(scored[-1])
    path, options = change(tmp_path)
    assert_refused(message, "llm", "score", path or scored[0], *scored[1:], *options, "--overwrite")
    assert digest_tree(scored[-1]) == before


def test_rollouts_that_can_be_scored_overwrite(rollouts, tmp_path):
    command = [rollouts, "--model", save(make_model(), tmp_path / "model"), "--run", tmp_path / "run"]
    for options, temperature in ((["--temperature", 2], 2.0), (["--overwrite"], 1.0)):
        assert invoke("llm", "score", *command, *options).exit_code == 0
        run = RunDirectory.open(tmp_path / "run")
        assert (run.rounds(), run.config["temperature"]) == ([1, 2], temperature)


def write_other(folder, rows):
    (folder / "other.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "other.jsonl"


class TestOverwrite:
    @staticmethod
    def list_starts(path):
        walk = resuming.MODELS["walk"]
        config = cart_run("CartPole-v1")
        reward_fails = {"reward": lambda prompts, responses: 1 / 0}
        return {
            "callback": (
                lambda **more: walk().learn(64, callback=InfluenceCallback(IIF(0.5), run=path, **more)),
                lambda: walk().learn(
                    64, callback=InfluenceCallback(IIF(0.5), run=path, names={"actions": ["one"]}, overwrite=True)
                ),
            ),
            "train": (
                lambda **more: agents.run(config, path, **more),
                lambda: agents.run(cart_run("CartPole-v1", device="cuda:9"), path, overwrite=True),
            ),
            "compare": (
                lambda **more: compare([config], path, **more),
                lambda: compare([cart_run("CartPole-v1", policy_kwargs={"no": 1})], path, overwrite=True),
            ),
            "ppo": (
                lambda **more: make_trainer(path, rounds=1).train(**more),
                lambda: make_trainer(path, rounds=1, **reward_fails).train(overwrite=True),
            ),
            "trl": (
                lambda **more: make_trl_trainer("grpo", path / "trl", IIF(0.5), run=path, **more).train(),
                lambda: make_trl_trainer(
                    "grpo", path / "trl", IIF(0.5), run=path, overwrite=True, reward_funcs=lambda **columns: 1 / 0
                ).train(),
            ),
        }

    @pytest.mark.parametrize("kind", ["callback", "train", "compare", "ppo", "trl"])
    def test_what_is_refused_changes_no_byte(self, tmp_path, kind, monkeypatch):
        if kind == "compare":
            monkeypatch.setattr("whence.lab.cluster.run_all", run_one_by_one)
        start, fail = self.list_starts(tmp_path / "run")[kind]
        start()
        before = digest_tree(tmp_path / "run")
        with pytest.raises(WhenceError, match="overwrite is 'no'; True or False is needed"):
            start(overwrite="no")
        assert digest_tree(tmp_path / "run") == before
        with pytest.raises((WhenceError, ZeroDivisionError)):
            fail()
        assert digest_tree(tmp_path / "run") == before
        start(overwrite=True)
        assert digest_tree(tmp_path / "run").keys() == before.keys()


def test_an_untrusted_run_is_refused_before_it_is_trained_again(runs, tmp_path, monkeypatch):
    run = copy_run(runs("ppo"), tmp_path / "run")
    monkeypatch.setattr("whence.causes.language_retraining.train_again", lambda *rest, **more: pytest.fail("trained"))
    options = ["--prompt", "8-1?", "--response", "8-1=8;8", "--by", "bm25", "--answers", 0, "--top", 2]
    assert_refused("is not signed", "prove", run.path, *options)


def test_a_page_is_no_file_of_a_run(tmp_path):
    RunDirectory.create(tmp_path / "run", {}).release()
    before = digest_tree(tmp_path)
    for name in ("config.json", ".", "new"):
        assert_refused(r"--out is .*name the file", "report", tmp_path / "run", "--out", tmp_path / "run" / name)
    assert digest_tree(tmp_path) == before
