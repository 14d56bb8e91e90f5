"""Two runs that should agree: what was changed is named first, then where their data part, and in which form."""

import json
import math

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

from whence import ModuleView, Outputs, RecordBatch, Run, RunDirectory, WhenceError, record
from whence.core import packages
from whence.sb3 import InfluenceCallback
from whence.stored import compare_runs, import_rollouts
from whence.stored.differences import measure_change


class Cart(gym.Env):
    """A cart that is pushed, of which each part of a step is a method."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, dtype="float32"):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.dtype(dtype).type)

    def see(self):
        return np.array([*self.state, 1.0]).astype(self.observation_space.dtype)

    def pay(self, effort):
        return 1.0

    def ends(self):
        return self.steps == 9

    def action_masks(self):
        return np.array([True, True])

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.state, self.steps = self.np_random.uniform(-1, 1, 2), 0
        return self.see(), {}

    def step(self, action):
        self.state, self.steps = self.state + np.array([0.1 * self.state[1], 0.2 * action - 0.1]), self.steps + 1
        effort = abs(self.state[1])
        return self.see(), self.pay(effort), self.ends(), False, {"effort": effort}


def change(**methods):
    """A class of the same name in which methods are others."""
    return type("Cart", (gym.Env,), {**vars(Cart), **methods})


class Scaled(gym.ObservationWrapper):
    """It multiplies observations."""

    def __init__(self, env, factor):
        super().__init__(env)
        self.factor = factor

    def observation(self, observation):
        return self.factor * observation


class Cheap(gym.RewardWrapper):
    """It pays half."""

    def reward(self, reward):
        return 0.5 * reward


class Cast(FlattenExtractor):
    """It gives the policy numbers of the policy's dtype."""

    def forward(self, observations):
        return observations.to(self.dtype if hasattr(self, "dtype") else torch.float32)


def double(model):
    model.policy.features_extractor.dtype = torch.float64
    model.policy.double()


def train(path, make=Cart, kind=PPO, *, steps=64, n_envs=1, prepare=lambda model: None, **settings):
    settings = {"n_steps": 32, "batch_size": 16, "n_epochs": 1, "seed": 0, "device": "cpu", **settings}
    settings["policy_kwargs"] = {"net_arch": [4], **settings.get("policy_kwargs", {})}
    model = kind("MlpPolicy", DummyVecEnv([lambda: Monitor(make())] * n_envs), **settings)
    prepare(model)
    model.learn(steps, callback=InfluenceCallback(run=path, folds=None))


CAST = {"policy_kwargs": {"features_extractor_class": Cast}}
FIRST_LINES = {
    "nothing": ({}, {}, None, None),
    "seed": ({}, {"seed": 1}, "They differ only by chance: seed is 0 in A, 1 in B.", "generator_state"),
    "gamma": ({}, {"gamma": 0.95}, "gamma is 0.99 in A, 0.95 in B.", "advantage"),
    "learning rate": ({}, {"learning_rate": 0.01}, "learning_rate is 0.0003 in A, 0.01 in B.", "value"),
    "wrapper": ({}, {"make": lambda: Cheap(Cart())}, "Only B's environments have Cheap().", "reward"),
    "argument of a wrapper": (
        *({"make": lambda: Scaled(Cart(), 1.0)}, {"make": lambda: Scaled(Cart(), 2.0)}),
        *("Scaled(factor=1.0) in A, Scaled(factor=2.0) in B.", "observation"),
    ),
    "scale in the source": (
        {},
        {"make": change(see=lambda self: np.array([57.3 * self.state[0], self.state[1], 1.0], np.float32))},
        *("The environment's code differs: Cart.see.", "observation"),
    ),
    "action mask": (
        {"kind": MaskablePPO},
        {"kind": MaskablePPO, "make": change(action_masks=lambda self: np.array([True, self.steps != 3]))},
        *("The environment's code differs: Cart.action_masks.", "action_mask"),
    ),
    "version": ({}, {}, "torch is {} in A, 2.0.1 in B.", None),
    "environments": ({}, {"n_envs": 2}, "n_envs is 1 in A, 2 in B.", "action"),
    "part of the reward": (
        *({}, {"make": change(pay=lambda self, effort: 1.0 - 0.5 * effort)}),
        *("The environment's code differs: Cart.pay.", "reward"),
    ),
    "dtype of the policy": (
        *(CAST, {**CAST, "prepare": double}),
        "The initial parameters differ in kind: action_net.bias is float32 [2] in A, float64 [2] in B.",
        "value",
    ),
    "dtype of observations": (
        *({}, {"make": lambda: Cart("float64")}),
        *("observation_space.dtype is float32 in A, float64 in B.", "observation"),
    ),
    "threads": ({}, {}, "torch threads is 1 in A, 2 in B.", None),
    "source": (
        {},
        {"make": change(ends=lambda self: self.steps == 7)},
        *("The environment's code differs: Cart.ends.", "end"),
    ),
}
"""Pairs of trainings, the line that names what was changed, and the column by which data part."""


def compare(a, b):
    return compare_runs(RunDirectory.open(a), RunDirectory.open(b))


def find(compared, kind):
    return [each for each in compared.differences if each.kind == kind]


FORMS = {
    "wrapper": "1 in A, 0.5 in B throughout",
    "argument of a wrapper": "B = 2 × A",
    "scale in the source": "entry 0: B = 57.3 × A",
    "part of the reward": "B = A − 0.5 × info.effort",
    "dtype of observations": "by rounding, at most ",
}
"""In what form columns of the first records that part differ."""


@pytest.mark.parametrize("name", FIRST_LINES)
def test_what_was_changed_is_named_first(name, tmp_path, monkeypatch, whence):
    first, second, line, column = FIRST_LINES[name]
    threads, read = torch.get_num_threads(), packages._read_version
    torch.set_num_threads(1)
    train(tmp_path / "a", **first)
    if name == "version":
        monkeypatch.setattr(packages, "_read_version", lambda library: "2.0.1" if library == "torch" else read(library))
    torch.set_num_threads(2 if name == "threads" else 1)
    train(tmp_path / "b", **second)
    torch.set_num_threads(threads)
    compared = compare(tmp_path / "a", tmp_path / "b")
    _, printed, _ = whence("diff", tmp_path / "a", tmp_path / "b")
    if line is None:
        assert (compared.differences, printed) == ([], "No difference: 2 rounds, 64 records equal to the bit.\n")
        return
    line = line.format(torch.__version__)
    assert (compared.differences[0].text, printed.splitlines()[0]) == (line, line)
    assert len(printed.splitlines()) <= 10
    if column is None:
        assert (len(compared.differences), compared.rounds, compared.records) == (1, 2, 64)
    else:
        parting = next(each for each in find(compared, "records") if each.record_id is not None)
        assert parting.subject == column
    if name in FORMS:
        texts = [each.text for each in find(compared, "records")]
        assert f"In round 1 it differs in 32 of 32 records: {FORMS[name]}" in texts[1]


def write(path, config, *tables, **notes):
    run = RunDirectory.create(path, {"kind": "agent", **config})
    run.note(**notes)
    for number, columns in enumerate(tables, 1):
        count = len(columns["reward"])
        run.write_round("records", number, pl.DataFrame({"record_id": range(count), **columns}))
    run.release()
    return run


STEPS = {"env_index": [0, 0, 1, 1], "observation": [1.0, 2.0, 5.0, 7.0], "action": [0] * 4, "reward": [1.0] * 4}
SWAPPED = {**STEPS, "observation": [5.0, 7.0, 1.0, 2.0]}
GAMMA = [{"hyperparameters": {"gamma": gamma, "seed": 0}} for gamma in (0.9, 0.8)]


def test_environments_in_another_order_are_seen(tmp_path):
    compared = compare_runs(write(tmp_path / "a", {}, STEPS), write(tmp_path / "b", {}, SWAPPED))
    assert "environments are in another order" in compared.differences[1].text


@pytest.mark.parametrize("is_on_policy", [True, False])
def test_a_setting_that_acts_later_does_not_come_first(is_on_policy, tmp_path):
    shifted = {**STEPS, "observation": [4.0, 5.0, 8.0, 10.0]}
    for name, steps, config in zip("ab", (STEPS, shifted), GAMMA, strict=True):
        run = write(tmp_path / name, config, steps)
        if is_on_policy:  # others train while they collect
            run.write_policy(1, {"weight": torch.zeros(1)})
            run.release()
    compared = compare(tmp_path / "a", tmp_path / "b")
    kinds = [each.kind for each in compared.differences]
    assert kinds == (["records"] * 3 + ["setting"] if is_on_policy else ["setting"] + ["records"] * 3)
    assert "B = A + 3" in find(compared, "records")[1].text


def test_a_setting_may_have_no_effect(tmp_path):
    compared = compare_runs(write(tmp_path / "a", GAMMA[0], STEPS), write(tmp_path / "b", GAMMA[1], STEPS))
    assert ([each.subject for each in compared.differences], compared.records) == (["hyperparameters.gamma"], 4)


def test_what_is_equal_until_records_part_is_counted(tmp_path):
    later = {**STEPS, "reward": [1.0, 1.0, 1.0, 3.0]}
    compared = compare_runs(write(tmp_path / "a", {}, STEPS, STEPS, STEPS), write(tmp_path / "b", {}, STEPS, later))
    parting, *_, length = compared.differences
    assert (parting.subject, parting.round, parting.record_id, parting.a, parting.b) == ("reward", 2, 3, 1.0, 3.0)
    assert (length.kind, length.a, length.b, compared.rounds, compared.records) == ("length", 3, 2, 1, 4)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"observation": pl.Series([[1.0, 2.0]] * 4, dtype=pl.Array(pl.Float64, 2))}, "4 of 4 records"),
        ({"observation": [np.nan, 2.0, 5.0, 7.0]}, "1 of 4 records"),
        ({"reward": ["a"] * 4}, "4 of 4 records"),
        ({"action": [0, 0, 0, 1]}, "1 of 4 records"),
    ],
)
def test_columns_of_other_kinds_part(columns, text, tmp_path):
    compared = compare_runs(write(tmp_path / "a", {}, STEPS), write(tmp_path / "b", {}, {**STEPS, **columns}))
    assert text in compared.differences[1].text


def test_an_interrupted_round_and_a_run_without_rounds(tmp_path):
    whole, part = write(tmp_path / "a", {}, STEPS), {name: column[:3] for name, column in STEPS.items()}
    (length,) = compare_runs(whole, write(tmp_path / "b", {}, part)).differences
    assert length.text == "Round 1 has 4 records in A, 3 in B."
    (length,) = compare_runs(whole, write(tmp_path / "c", {})).differences
    assert length.text == "A has 1 rounds, B has 0."


def test_columns_that_one_lacks_are_named_and_the_rest_is_compared(tmp_path):
    more = {**STEPS, "info.speed": [0.0] * 4, "score": [1.0] * 4}
    compared = compare_runs(write(tmp_path / "a", {}, STEPS), write(tmp_path / "b", {}, more))
    assert [each.text for each in compared.differences] == ["Only records of B hold info.speed."]
    assert compared.records == 4


def test_a_continuation_is_named(tmp_path):
    resumed = [{"after_round": 1, "reason": "new episodes begin."}]
    runs = write(tmp_path / "a", {}, STEPS), write(tmp_path / "b", {}, STEPS, resumed=resumed)
    (one,) = compare_runs(*runs).differences
    assert one.text == "B was interrupted after round 1, and continued otherwise: new episodes begin."


def test_an_agent_and_a_language_model_are_refused(tmp_path):
    with pytest.raises(WhenceError, match=r"b is of a language model and .*a of an agent: give two of one kind"):
        compare_runs(write(tmp_path / "a", {}, STEPS), write(tmp_path / "b", {"kind": "language"}))


def test_responses_are_compared(tmp_path):
    rows = {"prompt": ["1+1?", "2+2?"], "response": ["2", "4"], "reward": [1.0, 1.0]}
    config = {"kind": "language"}
    other = {**rows, "response": ["2", "5"], "reward": [1.0, 0.0]}
    compared = compare_runs(write(tmp_path / "a", config, rows), write(tmp_path / "b", config, other))
    assert (compared.differences[0].subject, compared.differences[0].record_id) == ("response", 1)


def test_without_seeds_it_is_chance(tmp_path):
    for name in "ab":
        train(tmp_path / name, steps=32, seed=None)
    first, *_ = compare(tmp_path / "a", tmp_path / "b").differences
    assert (first.kind, first.subject) == ("chance", "parameters")


def test_weights_that_were_loaded_are_no_chance(tmp_path):
    train(tmp_path / "a", steps=32)
    train(tmp_path / "b", steps=32, prepare=lambda model: torch.nn.init.zeros_(model.policy.value_net.weight))
    first, *_ = compare(tmp_path / "a", tmp_path / "b").differences
    assert (first.kind, first.subject, first.round) == ("parameters", "parameters", 1)
    assert "in value_net.weight" in first.text


def play(path, make, seed=0, action=lambda step: step % 2):
    env = record(make(), path, round=32)
    env.reset(seed=seed)
    for step in range(40):
        _, _, terminated, truncated, _ = env.step(action(step))
        if terminated or truncated:
            env.reset()
    env.close()


RECORDED = {
    "nothing": ({}, None, None),
    "seed": ({"seed": 1}, "chance", "generator_state"),
    "a wrapper": ({"make": lambda: Scaled(Cart(), 2.0)}, "setting", "observation"),
    "code": ({"make": change(ends=lambda self: self.steps == 7)}, "code", "end"),
    "actions": ({"action": lambda step: step > 4}, "records", "action"),
    "spaces": ({"make": lambda: gym.make("CartPole-v1")}, "setting", "observation"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_environments(name, tmp_path):
    settings, kind, column = RECORDED[name]
    play(tmp_path / "a", Cart)
    play(tmp_path / "b", **{"make": Cart, **settings})
    compared = compare(tmp_path / "a", tmp_path / "b")
    assert [each.kind for each in compared.differences[:1]] == ([] if kind is None else [kind])
    assert column is None or next(each for each in compared.differences if each.record_id is not None).subject == column
    assert compared.records == (40 if kind is None else 0)


def test_imported_rollouts(tmp_path):
    arrays = {
        "obs": np.arange(8.0).reshape(8, 1),
        "act": np.zeros(8, int),
        "rew": np.ones(8),
        "dones": np.zeros(8, bool),
    }
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        np.savez(tmp_path / f"{name}.npz", **{**arrays, "rew": factor * arrays["rew"]})
        import_rollouts(tmp_path / f"{name}.npz", tmp_path / name)
    assert find(compare(tmp_path / "a", tmp_path / "c"), "records")[0].subject == "reward"
    assert compare(tmp_path / "a", tmp_path / "b").records == 8


def test_runs_of_a_loop(tmp_path):
    for name, weight in (("a", 0.0), ("b", 0.0), ("c", 1.0)):
        policy = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(policy.weight, weight)
        torch.nn.init.zeros_(policy.bias)
        view = ModuleView(policy, lambda module, inputs: Outputs(module(inputs["observations"])[:, 0], None, None))
        columns = {"log_probs": torch.zeros(4), "advantages": torch.arange(4.0)}
        run = Run(tmp_path / name, folds=None)
        run.write_round(view, RecordBatch(observations=torch.ones(4, 2), actions=torch.zeros(4, dtype=int), **columns))
        run.close()
    assert compare(tmp_path / "a", tmp_path / "b") == compare(tmp_path / "a", tmp_path / "a")
    first, *rest = compare(tmp_path / "a", tmp_path / "c").differences
    assert (first.kind, first.subject, rest) == ("chance", "parameters", [])


def test_json_is_the_same(tmp_path, whence):
    write(tmp_path / "a", GAMMA[0], STEPS)
    write(tmp_path / "b", GAMMA[1], STEPS)
    printed = json.loads(whence("diff", tmp_path / "a", tmp_path / "b", "--json")[1])
    assert [(each["subject"], each["a"], each["b"]) for each in printed["differences"]] == [
        ("hyperparameters.gamma", 0.9, 0.8)
    ]
    assert (printed["rounds"], printed["records"]) == (1, 4)


def test_a_run_notes_the_code_that_it_began_with(tmp_path):
    train(tmp_path / "a", steps=32)
    before = RunDirectory.open(tmp_path / "a").notes["code"]
    train(tmp_path / "a", change(pay=lambda self, effort: 2.0), steps=64)
    run = RunDirectory.open(tmp_path / "a")
    assert (run.notes["code"], {"Cart.pay", "Cart.step", "Cart.see"} <= before.keys()) == (before, True)
    assert "the code of Cart.pay differs" in run.notes["resumed"][0]["reason"]
    assert {"torch threads", "device", "CPU", "python"} <= run.versions.keys()


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.nan, 2.0], [math.nan, 2.0], 0.0),
        ([math.nan, 2.0], [1.0, 2.0], math.inf),
        ([math.inf, 2.0], [math.inf, 2.0], 0.0),
        ([math.inf, 2.0], [-math.inf, 2.0], math.inf),
    ],
)
def test_parameters_that_are_not_finite(old: list[float], new: list[float], change: float) -> None:
    assert measure_change(torch.tensor(old), torch.tensor(new)) == change
