"""The examples run; ppo.py learns, and whence changes nothing in it but the records it trains on."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

import whence
from helpers.examples import script


@pytest.fixture(scope="module")
def ppo() -> Any:
    return script("ppo")


@pytest.mark.parametrize("selection", [pytest.param(False, marks=pytest.mark.long), True])
def test_learns(ppo: Any, selection: bool) -> None:
    curve = ppo.train(rounds=8, selection=selection)
    assert len(curve) == 8
    assert curve[0] < 40
    assert np.mean(curve[-3:]) > 100


def test_selection_with_nothing_dropped_is_no_selection(ppo: Any) -> None:
    without = ppo.train(rounds=2, n_steps=64, selection=False)
    # Of at most 256 records, so small a share is not one.
    assert ppo.train(rounds=2, n_steps=64, drop=1e-6) == without
    assert ppo.train(rounds=2, n_steps=64, drop=0.5) != without


@pytest.mark.parametrize("selection", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_seed_decides_everything(ppo: Any, selection: bool) -> None:
    one = ppo.train(rounds=2, n_steps=64, selection=selection, seed=3)
    assert ppo.train(rounds=2, n_steps=64, selection=selection, seed=3) == one
    assert ppo.train(rounds=2, n_steps=64, selection=selection, seed=4) != one


def test_minibatches_with_too_few_records_are_left_out(ppo: Any) -> None:
    curve = ppo.train(rounds=2, n_steps=64, drop=1.0, minibatch_size=2, epochs=1)
    assert np.isfinite(curve).all()


@pytest.fixture
def scored(ppo: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the first rollout hands to whence, of episodes cut off after 5 steps: no pole has fallen by then."""

    def call(value: Callable[[Tensor], Tensor], **kwargs: Any) -> whence.RecordBatch:
        def attribute(view: Any, records: whence.RecordBatch, **_: Any) -> None:
            seen.append(records)
            raise StopIteration

        seen: list[whence.RecordBatch] = []
        make = partial(gymnasium.make_vec, max_episode_steps=5)
        monkeypatch.setattr(ppo, "gym", SimpleNamespace(make_vec=make, spaces=gymnasium.spaces))
        monkeypatch.setattr(ppo, "attribute", attribute)
        monkeypatch.setattr(ppo.Agent, "value", lambda agent, observations: value(observations))
        with pytest.raises(StopIteration):
            ppo.train(rounds=1, **kwargs)
        return seen[0]

    return call


def test_the_next_state_counts_after_a_time_limit_too(scored: Any) -> None:
    records = scored(lambda observations: observations[..., 0], gamma=1.0, gae_lambda=0.0)
    # The value is the cart's position, which moves by 0.02 s times its speed in a step; the reward is 1.
    torch.testing.assert_close(records.advantages, 1 + 0.02 * records.observations[:, 1], rtol=0, atol=1e-5)


def test_advantages_end_with_the_episode(scored: Any) -> None:
    records = scored(lambda observations: torch.zeros(observations.shape[:-1]), gamma=1.0, gae_lambda=1.0, n_steps=10)
    assert records.advantages.reshape(10, 4)[:, 0].tolist() == [5, 4, 3, 2, 1, 5, 4, 3, 2, 1]


def test_command(ppo: Any) -> None:
    found = CliRunner().invoke(ppo.app, ["--rounds", "1", "--drop", "0.5", "--seed", "2"])
    assert found.exit_code == 0, found.output
    kept, total = found.output.partition("trained on ")[2].split(" records")[0].split(" of ")
    assert 0 < int(kept) < int(total) == 1024
    found = CliRunner().invoke(ppo.app, ["--rounds", "1", "--no-selection"])
    assert found.exit_code == 0, found.output
    assert "trained on 1024 of 1024 records" in found.output


def test_command_and_function_have_the_same_defaults(ppo: Any) -> None:
    function, command = (inspect.signature(one).parameters for one in (ppo.train, ppo.main))
    assert {name: one.default for name, one in command.items()} == {name: function[name].default for name in command}


def test_command_refuses_other_spaces(ppo: Any) -> None:
    found = CliRunner().invoke(ppo.app, ["--env-id", "Pendulum-v1"])
    assert found.exit_code == 2
    assert "Pendulum-v1 has Box" in found.output


@pytest.mark.usefixtures("laboratory_cache")
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        pytest.param("llm_ppo", [], "whence report run", marks=pytest.mark.long),
        pytest.param("llm_ppo", ["--rule", "none"], "whence report run", marks=pytest.mark.long),
        ("llm_ppo", ["--rule", "ippo", "--lora", "2"], "whence report run"),
        ("llm_grpo", [], "Of the last 16 completions"),
        pytest.param("llm_grpo", ["--no-selection"], "Right answers", marks=pytest.mark.long),
    ],
)
def test_language_models_are_trained(
    name: str, options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(script(name).main)
    found = CliRunner().invoke(app, ["--size", "tiny", "--rounds", "2", "--output", "run", *options])
    assert found.exit_code == 0, found.output
    assert "after 2 rounds" in found.output
    assert said in found.output
    assert ("Of the last" in found.output) == (name != "llm_ppo" and "--no-selection" not in options)


def test_an_unknown_rule_is_refused() -> None:
    app = typer.Typer()
    app.command()(script("llm_ppo").main)
    found = CliRunner().invoke(app, ["--rule", "iff"])
    assert found.exit_code == 2
    assert "iff is unknown" in found.output
