"""Small stored runs of language models."""

import re
import shutil

import pytest
from click.testing import Result
from typer.testing import CliRunner

from whence import WhenceError, cli
from whence.lab.language.training import run
from whence.runs import RunDirectory
from whence.stored.language import LanguageConfig

QUICK_TRL = {"rounds": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}
QUICK = {"rounds": 2, "batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 1}


def tiny(arm="iif", seed=0, **more):
    settings = (QUICK if more.get("algorithm", "ppo") == "ppo" else QUICK_TRL) | more.pop("settings", {})
    return LanguageConfig(arm, seed, size="tiny", test_problems=8, samples=2, settings=settings, **more)


def invoke(*arguments) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def assert_refused(message, *arguments) -> BaseException:
    """Return the error by which the command refuses the arguments, whose text has a match of the message."""
    done = invoke(*arguments)
    assert isinstance(done.exception, WhenceError), done.output
    assert re.search(message, str(done.exception)), done.exception
    return done.exception


KEEP_ALL = {"save_every": 1, "keep_checkpoints": 9, "rounds": 3}
TRL_KEEPS = {
    "save_strategy": "steps",
    "save_steps": 1,
    "rounds": 3,
    "num_iterations": 2,
    "per_device_train_batch_size": 16,
}
RUNS = {
    "ppo": {"arm": "ippo", "settings": KEEP_ALL},
    "an adapter by tokens": {"arm": "iif-token", "lora": 2, "settings": KEEP_ALL},
    "divergence": {"arm": "iif", "settings": KEEP_ALL | {"init_kl_coef": 0.3, "adap_kl_ctrl": True, "horizon": 16}},
    "grpo": {"arm": "iif", "algorithm": "grpo", "settings": TRL_KEEPS | {"beta": 0.1, "loss_type": "grpo"}},
    "rloo": {"arm": "ippo", "algorithm": "rloo", "lora": 2, "settings": TRL_KEEPS},
}
NAMES = [pytest.param(name, marks=pytest.mark.long if name in ("rloo", "divergence", "ppo") else ()) for name in RUNS]


def train_run(name, path):
    run(tiny(**RUNS[name], select="before"), path)
    return RunDirectory.open(path)


def copy_run(directory, path):
    return RunDirectory.open(shutil.copytree(directory.path, path), trust=True)
