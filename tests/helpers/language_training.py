"""A tiny language model, PPO on it, and rules, rewards and interruptions for the tests of trainers."""

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from whence import AdvantageMagnitude, FromMask, MaxVariance, Selection, ZeroVariance
from whence.engines import Refused
from whence.llm.base import PPOConfig
from whence.llm.ppo import PPOTrainer
from whence.runs import RunDirectory

LETTERS = "abcdefghij"


def make_tokenizer(pad=True):
    vocabulary = {token: number for number, token in enumerate(["<pad>", "</s>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>"} if pad else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **special)


def make_model(seed=0, **more):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 12,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | more))


def vowels(prompts, responses):
    return [float(sum(letter in "aei" for letter in text)) for text in responses]


def make_config(tmp_path, **more):
    settings = {
        "rounds": 2,
        "batch_size": 8,
        "mini_batch_size": 4,
        "ppo_epochs": 2,
        "learning_rate": 1e-2,
        "max_new_tokens": 5,
        "generation_batch_size": 3,
        "disable_tqdm": True,
    }
    return PPOConfig(str(tmp_path), **settings | more)


PROMPTS = ["ab", "cde", "f", "ghij", "aa"]
_ARGUMENTS = ["target", "objective", "on_rollout", "engine", "select", "held_out", "evaluate", "sample_prompts"]


def make_trainer(tmp_path, rule=None, model=None, **more):
    arguments = {name: more.pop(name) for name in _ARGUMENTS if name in more}
    reward, prompts = more.pop("reward", vowels), more.pop("prompts", PROMPTS)
    config, model = make_config(tmp_path, **more), model or make_model()
    return PPOTrainer(config, model, make_tokenizer(), reward, prompts, rule=rule, **arguments)


def train(folder, rule=None, model=None, scaled=False, **more):
    """Return a trainer after its training, and what `on_rollout` got of each round; `scaled` is as with fp16."""
    rounds = []
    trainer = make_trainer(folder, rule, model, on_rollout=lambda *about: rounds.append(about), **more)
    if scaled:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.optimizer.optimizer)
    trainer.train()
    return trainer, rounds


@contextmanager
def in_mixed_precision():
    """Let trainers evaluate and train in bfloat16."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def copy_state(trainer):
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


class Keep:
    """Keep the rows at some positions, with some weights."""

    needs_influence = False

    def __init__(self, positions, weights=None):
        self.positions, self.weights = positions, weights

    def select(self, records, influence=None, progress=None):
        keep = torch.zeros(len(records), dtype=torch.bool)
        keep[self.positions] = True
        weights = torch.zeros(len(records))
        weights[self.positions] = torch.tensor(self.weights or [1.0] * len(self.positions))
        return Selection(keep, weights, [None if kept else "for the test" for kept in keep.tolist()])


UNSCORED = [
    ZeroVariance(),
    MaxVariance(2),
    AdvantageMagnitude(0.5),
    FromMask([0, 3, 4, 6, 900]),
    FromMask([5], unit="group"),
]


def one_flat_group(prompts, completions, **columns):
    return [2.0, 2.0, 2.0, 2.0, 0.0, 1.0, 1.0, 3.0]


class Killed(BaseException):
    pass


class Drawing:
    """A rule with a state of its own."""

    needs_influence = True

    def __init__(self):
        self.seen = 0

    def select(self, records, influence=None, progress=None):
        self.seen += 1
        keep = torch.ones(len(records), dtype=torch.bool)
        keep[self.seen % len(records)] = False
        return Selection.dropping(keep, "its turn")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Noisy:
    """A reward that draws from its own generator, and from those of Python and NumPy."""

    def __init__(self):
        self.generator = np.random.default_rng(5)

    def __call__(self, prompts, responses):
        noise = [self.generator.normal() + random.random() + np.random.rand() for _ in responses]
        return [value + 0.1 * one for value, one in zip(vowels(prompts, responses), noise, strict=True)]

    def state_dict(self):
        return {"generator": dict(self.generator.bit_generator.state)}

    def load_state_dict(self, state):
        self.generator.bit_generator.state = state["generator"]


def list_results(folder):
    """Return what a run directory holds that does not depend on time."""
    run = RunDirectory.open(folder)
    tables = {name: run.table(name).to_dict(as_series=False) for name in ("metrics", "evaluations")}
    for name, numbers in (("records", run.rounds()), ("answers", run.rounds("answers"))):
        tables |= {(name, number): run.round(name, number).to_dict(as_series=False) for number in numbers}
    return tables | {"timed": run.table("timings")["round"].to_list()}


def break_off(monkeypatch, place, count):
    """Raise as a kill would at the count-th call of a function of a module."""
    module, name = place
    function, calls = getattr(module, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            raise Killed
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, interrupted)


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}j{% endif %}"


def refuse():
    raise Refused("no pass to take apart.")
