"""Trainings that are interrupted and go on: to the same bits, or saying why not."""

import enum
import errno
import json
import logging
import multiprocessing
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv

import whence
from helpers.resuming import (
    MODELS,
    ROUNDS,
    RULE,
    STEPS,
    Interrupt,
    Walk,
    assert_same_model,
    assert_same_run,
    contents,
    gymnasium_env,
    in_processes,
    monitored,
    small,
    total,
    train,
)
from helpers.toys import copy_signed
from whence import DTV, IIF, FromMask, KeepAll, RunDirectory
from whence.core import RunDirectoryError, WhenceError, describe_part
from whence.runs import CheckpointClock, checkpoint_path, list_checkpoints, load_tree, save_tree
from whence.sb3 import InfluenceCallback, RecordResets, resume
from whence.sb3.episodes.environment_state import explain_inexact
from whence.sb3.episodes.resets import ResetTracker
from whence.sb3.resuming import build_rule

pytest.importorskip("Box2D")  # before EnvPool: see Pool.make


class Mode(enum.StrEnum):
    FAST = "fast"


class Noisy(gym.ObservationWrapper):
    """It draws from a generator of its own."""

    def __init__(self, env):
        super().__init__(env)
        self.rng = np.random.default_rng(0)

    def observation(self, observation):
        return observation + self.rng.normal(size=3).astype(np.float32)


class Place(NamedTuple):
    x: int
    y: int


class Keeping(gym.Wrapper):
    """Keep values of many types from episode to episode."""

    def __init__(self, env):
        super().__init__(env)
        self.counts, self.by_kind, self.mode, self.place = Counter(), defaultdict(int), Mode.FAST, Place(1, 2)
        self.label, self.long, self.marked = np.str_("x"), np.zeros(2, np.longdouble), {"whence": 1}

    def step(self, action):
        self.counts["up" if action[0] > 0 else "down"] += 1
        self.by_kind["up" if action[1] > 0 else "down"] += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward / self.counts.total(), terminated, truncated, info


SLOW = (
    *("a2c", "plain a2c", "a2c as tensorflow's", "masked", "masked dict", "normalised", "frames", "recurrent", "dict"),
    "schedule",
)
"""Models whose like is among the others, here or in TestResume."""


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.WARNING, logger="whence")


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    """A finished training's model and run directory; who trains on copies the directory first."""
    path = tmp_path_factory.mktemp("walk") / "run"
    return train(MODELS["walk"], path), path


@pytest.mark.parametrize("length", range(1, 9))
def test_what_a_checkpoint_returns_lies_where_numpy_and_torch_put_it(tmp_path, length):
    # Matrix products round otherwise on memory that is not aligned, and a file's entries begin anywhere.
    save_tree(tmp_path / "file", {"a" * length: np.ones(9, np.uint8), "array": np.ones((2, 9), np.float32),
                                  "tensor": torch.ones(3), "last": np.ones(5, np.float32)})  # fmt: skip
    tree = load_tree(tmp_path / "file")
    assert tree["array"].ctypes.data % 16 == tree["last"].ctypes.data % 16 == 0
    assert tree["tensor"].data_ptr() % 64 == 0


class TestTheSameScript:
    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in MODELS]
    )
    def test_it_ends_with_the_same_bits(self, tmp_path, name, caplog):
        options = {"rule": DTV(warmup=2) if name == "image" else IIF(0.5)}
        whole = train(MODELS[name], tmp_path / "whole", **options)
        after = torch.rand(3), np.random.random(3)
        train(MODELS[name], tmp_path / "parts", until=0.9, **options).env.close()
        assert list_checkpoints(tmp_path / "parts") == [3, 4]
        torch.manual_seed(99), np.random.seed(99)
        model = train(MODELS[name], tmp_path / "parts", **options)
        assert torch.equal(torch.rand(3), after[0])
        assert np.array_equal(np.random.random(3), after[1])
        for each in (whole, model):
            each.env.close()
        assert_same_model(model, whole)
        assert_same_run(tmp_path / "parts", tmp_path / "whole")
        assert "going on after round 4" in caplog.text
        assert "not as if nothing had happened" not in caplog.text

    def test_a_rule_with_a_state_of_its_own(self, tmp_path):
        class Counting(KeepAll):
            def __init__(self):
                super().__init__()
                object.__setattr__(self, "calls", [])

            def select(self, records, influence=None, progress=None):
                self.calls.append(len(records))
                return super().select(records, influence, progress)

            def state_dict(self):
                return {"calls": list(self.calls)}

            def load_state_dict(self, state):
                self.calls[:] = state["calls"]

        train(MODELS["walk"], tmp_path, until=0.7, rule=Counting())
        rule = Counting()
        train(MODELS["walk"], tmp_path, rule=rule)
        assert rule.calls == [STEPS] * ROUNDS

    def test_what_a_wrapper_keeps_comes_back_in_the_same_type(self, tmp_path):
        def make():
            return small(monitored(lambda: Keeping(Walk())))

        whole = train(make, tmp_path / "whole")
        train(make, tmp_path / "parts", until=0.7)
        model = train(make, tmp_path / "parts")
        assert_same_model(model, whole)
        before, after = (vars(each.env.envs[0].env) for each in (whole, model))
        assert sum(before["counts"].values()) == sum(before["by_kind"].values()) == 5 * STEPS
        for name in ("counts", "by_kind", "mode", "place", "label", "long", "marked"):
            assert type(after[name]) is type(before[name])
            assert np.array_equal(after[name], before[name])


class TestFinished:
    def test_a_finished_run_is_left_alone_and_loaded(self, walk, tmp_path, caplog):
        whole, path = walk[0], copy_signed(walk[1], tmp_path / "run")
        before = contents(path)
        again = train(MODELS["walk"], path)
        assert_same_model(again, whole)
        assert contents(path) == before
        assert "finished after 5 rounds: nothing is trained. To train anew, pass overwrite=True" in caplog.text

    def test_of_a_finished_run_neither_checkpoint_nor_notes_change(self, tmp_path, caplog):
        def make():
            return small(monitored(lambda: Noisy(Walk())))  # whose episodes cannot be gone on with

        train(make, tmp_path)
        file = checkpoint_path(tmp_path, ROUNDS)
        before = file.stat().st_ino, (tmp_path / "config.json").read_text()
        caplog.clear()
        model = train(make, tmp_path)
        assert (file.stat().st_ino, (tmp_path / "config.json").read_text()) == before
        assert "The training goes on" not in caplog.text
        callback = InfluenceCallback(RULE, run=tmp_path, save_every=1)
        model.learn(STEPS, callback=callback, reset_num_timesteps=False)
        assert RunDirectory.open(tmp_path).rounds()[-1] == ROUNDS + 1
        (note,) = RunDirectory.open(tmp_path).notes["resumed"]
        assert note["after_round"] == ROUNDS

    def test_a_second_learn_is_not_gone_on_with_in_the_first(self, tmp_path):
        def script(*more):
            model, callback = MODELS["walk"](), InfluenceCallback(RULE, run=tmp_path, save_every=1)
            model.learn(3 * STEPS, callback=callback)
            model.learn(3 * STEPS, callback=[callback, *more])  # it counts its steps from 0 again
            return model

        with pytest.raises(KeyboardInterrupt):
            script(Interrupt(STEPS + 5))
        with pytest.raises(RunDirectoryError, match=r"a run of 2 calls of learn\(\), .* in its first\. .*sb3\.resume"):
            script()
        model, callback = resume(tmp_path, monitored(Walk))
        model.learn(3 * STEPS, callback=[callback])
        assert RunDirectory.open(tmp_path).rounds() == [1, 2, 3, 4, 5, 6]
        with pytest.raises(RunDirectoryError, match="2 calls"):  # it was the second that went on
            script()

    def test_a_longer_run_is_overwritten_when_asked(self, walk, tmp_path):
        path, model = copy_signed(walk[1], tmp_path / "run"), MODELS["walk"]()
        model.learn(2 * STEPS, callback=InfluenceCallback(RULE, run=path, overwrite=True))
        assert RunDirectory.open(path).rounds() == [1, 2]

    def test_more_steps_go_on_as_one_training(self, walk, tmp_path):
        whole = MODELS["walk"]()
        whole.learn(7 * STEPS)
        parts, model = copy_signed(walk[1], tmp_path / "parts"), MODELS["walk"]()
        model.learn(7 * STEPS, callback=InfluenceCallback(RULE, run=parts))
        assert_same_model(model, whole)

    def test_the_same_model_goes_on_with_a_new_callback(self, tmp_path):
        model = train(MODELS["walk"], tmp_path)
        model.learn(STEPS, callback=InfluenceCallback(RULE, run=tmp_path), reset_num_timesteps=False)
        assert RunDirectory.open(tmp_path).rounds() == [1, 2, 3, 4, 5, 6]

    def test_interrupted_before_its_first_checkpoint_it_starts_over(self, walk, tmp_path):
        train(MODELS["walk"], tmp_path, until=0.7, save_every=4)
        assert RunDirectory.open(tmp_path).table("metrics").height == 3
        model = train(MODELS["walk"], tmp_path, save_every=4)
        assert_same_model(model, walk[0])

    def test_training_ended_inside_a_round_writes_no_checkpoint_of_it(self, tmp_path):
        class Stop(Interrupt):
            def _on_step(self):
                return self.num_timesteps < self.at

        model = MODELS["walk"]()
        callback = InfluenceCallback(RULE, run=tmp_path, save_every=2)
        model.learn(total(model), callback=[callback, Stop(3.5 * STEPS)])
        assert list_checkpoints(tmp_path) == [2]


def make_linear():
    return small(monitored(Walk), learning_rate=LinearSchedule(3e-3, 1e-3, 0.5))


class TestResume:
    @pytest.mark.parametrize(
        "name",
        [
            *("normalised", "a2c as tensorflow's", "masked dict", "recurrent", "linear schedule"),
            *(pytest.param(name, marks=pytest.mark.long) for name in ("plain a2c", "masked")),
        ],
    )
    def test_from_the_directory_alone(self, tmp_path, name):
        make = make_linear if name == "linear schedule" else MODELS[name]
        folds = 3 if name == "linear schedule" else None  # errors of scores take most of the time
        whole = train(make, tmp_path / "whole", rule=IIF(0.5), folds=folds)
        train(make, tmp_path / "parts", until=0.7, rule=IIF(0.5), folds=folds)
        model, callback = resume(tmp_path / "parts", make().env)
        assert model.num_timesteps == 3 * model.n_steps * model.n_envs
        model.learn(total(model) - model.num_timesteps, callback=callback, reset_num_timesteps=False)
        assert_same_model(model, whole)
        assert_same_run(tmp_path / "parts", tmp_path / "whole")
        if name == "linear schedule":
            rate = RunDirectory.open(tmp_path / "parts").config["hyperparameters"]["learning_rate"]
            assert rate == {"schedule": "linear", "start": 3e-3, "end": 1e-3, "end_fraction": 0.5}

    def test_arguments_of_the_callback_are_sent_to_it(self, tmp_path):
        train(MODELS["walk"], tmp_path, until=0.7)
        with pytest.raises(RunDirectoryError, match=r"recordings is no hyper-parameter of PPO.*make the callback"):
            resume(tmp_path, monitored(Walk), recordings=[4])
        model, _ = resume(tmp_path, monitored(Walk))
        model.learn(total(model), callback=InfluenceCallback(RULE, run=tmp_path, recordings=[4]))
        assert RunDirectory.open(tmp_path).round_path("recordings", 4).exists()

    def test_schedules_are_asked_for(self, tmp_path):
        whole = train(MODELS["schedule"], tmp_path / "whole")
        train(MODELS["schedule"], tmp_path / "parts", until=0.7)
        with pytest.raises(RunDirectoryError, match=r"learning_rate as a schedule of the code .*rate=lambda"):
            resume(tmp_path / "parts", monitored(Walk))
        schedules = {"learning_rate": lambda left: 3e-3 * left, "clip_range": lambda left: left}
        model, callback = resume(tmp_path / "parts", monitored(Walk), **schedules)
        model.learn(total(model), callback=callback)
        assert_same_model(model, whole)

    def test_what_cannot_be_built_is_asked_for(self, tmp_path):
        class Own(KeepAll):
            pass

        target = whence.Action(np.zeros(3, np.float32), np.zeros(3, np.float32))
        model = MODELS["walk"]()
        model.learn(2 * STEPS, callback=InfluenceCallback(Own(), target=target, run=tmp_path))
        with pytest.raises(RunDirectoryError, match=r"scored for the target .*Pass it: target=\.\.\."):
            resume(tmp_path, monitored(Walk))
        with pytest.raises(WhenceError, match=r"The rule .*Own.* cannot be built from the run\. Pass it: rule=\.\.\."):
            resume(tmp_path, monitored(Walk), target=target)
        resume(tmp_path, monitored(Walk), target=target, rule=Own())

    def test_a_language_models_run_is_refused(self, tmp_path):
        RunDirectory.create(tmp_path, {"kind": "language", "algorithm": "grpo"})
        with pytest.raises(RunDirectoryError, match=r"a language model's run, which goes on with its trainer"):
            resume(tmp_path, monitored(Walk))

    @pytest.mark.parametrize(
        "rule",
        [
            *(IIF(0.25, warmup=2), IIF(0.5, unit="episode"), FromMask([3, 7]), DTV(unit="record", leave_one_out=True)),
            *(KeepAll(), whence.RandomDrop(0.5, seed=1), whence.MaxVariance(4), whence.IPPO(weighted=False)),
            whence.RandomDrop(like=whence.AdvantageMagnitude(0.5)),
        ],
        ids=repr,
    )
    def test_rules_from_what_is_stored(self, rule):
        stored = json.loads(json.dumps(describe_part("rule", rule)))
        assert build_rule(stored) == rule
        assert type(build_rule(stored)) is type(rule)

    @pytest.mark.parametrize(
        "stored",
        [
            *(None, "", 3, {}, {"rule": 3}, {"rule": "IIF", "drop": 7}, {"rule": "IIF", "drop": {"rule": "os.system"}}),
            *("IIF(drop=0.5, warmup=0)", {"rule": "IIF", "more": 1}, {"rule": "FromMask", "ids": "/etc/passwd"}),
            *({"rule": "os.system", "command": "x"}, {"rule": "Selection"}, {"rule": "SelectionRule"}, {"rule": "np"}),
            *({"rule": "Progress", "round": 1}, {"rule": "IIF", "drop": {"schedule": "function", "name": "open"}}),
            {"rule": "FromMask", "ids": {"digest": "d28ec0677d25"}},
            {"rule": "TDErrorPriority", "exponent": 0.6},  # one of the laboratory's
        ],
    )
    def test_nothing_else_is_built_from_what_is_stored(self, stored):
        with pytest.raises(WhenceError):
            build_rule(stored)


class TestWhereItCannotBeHad:
    def check(self, tmp_path, make, reason, caplog):
        train(make, tmp_path, until=0.5).env.close()
        assert "If this training is interrupted, it can go on, but with new episodes" in caplog.text
        caplog.clear()
        model = train(make, tmp_path)
        model.env.close()
        assert f"not as if nothing had happened: {reason}" in " ".join(caplog.text.split())
        run = RunDirectory.open(tmp_path)
        assert run.rounds() == [1, 2, 3, 4, 5]
        ((first, why),) = [(note["after_round"], note["reason"]) for note in run.notes["resumed"]]
        assert (first, why.startswith(reason)) == (2, True)
        ids = np.concatenate([run.round("records", number)["record_id"].to_numpy() for number in run.rounds()])
        assert sorted(ids) == list(range(total(model)))
        starts = run.round("records", 3).group_by("env_index").first()["episode_start"]
        assert starts.all()

    def test_a_generator_of_a_wrappers_own(self, tmp_path, caplog):
        reason = "Noisy has a random generator of its own, rng"
        self.check(tmp_path, lambda: small(monitored(lambda: Noisy(Walk()))), reason, caplog)

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (gymnasium_env, "a SubprocVecEnv does not say how its episodes began"),
            *(
                (
                    lambda kind=kind: kind(RecordResets(gymnasium_env())),
                    f"{kind.__name__} keeps statistics from episode to episode",
                )
                for kind in (NormalizeObservation, NormalizeReward)
            ),
            (lambda: RecordResets(gymnasium_env()), None),
        ],
    )
    def test_of_other_processes_it_is_known(self, make, reason):
        vec_env = in_processes(make)
        with closing(vec_env), ResetTracker(vec_env).wrapped():
            found = explain_inexact(vec_env)
        assert found is None if reason is None else found.startswith(reason)

    def test_randomness_that_nothing_shows_is_found_when_it_goes_on(self, tmp_path, caplog):
        class Hidden(Walk):
            def step(self, action):
                self.place = self.place + np.random.random()
                return super().step(action)

        make = lambda: small(monitored(Hidden))  # noqa: E731
        train(make, tmp_path, until=0.5)
        assert "can go on" not in caplog.text
        train(make, tmp_path)
        (note,) = RunDirectory.open(tmp_path).notes["resumed"]
        assert "environment 0: its ongoing episode came out otherwise when it was played again" in note["reason"]

    def test_an_attribute_of_another_kind(self, tmp_path, caplog):
        class Lazy(gym.Wrapper):
            def __init__(self, env):
                super().__init__(env)
                self.statistics = None

            def step(self, action):
                observation, reward, terminated, truncated, info = self.env.step(action)
                if truncated:  # not when its ongoing episode is played again
                    self.statistics = RunningMeanStd(shape=())
                return observation, reward, terminated, truncated, info

        def make():
            return small(monitored(lambda: Lazy(gym.wrappers.TimeLimit(Walk(), 20))))

        train(make, tmp_path, until=0.5)
        train(make, tmp_path)
        (note,) = RunDirectory.open(tmp_path).notes["resumed"]
        assert "Lazy.statistics is of another kind in a new wrapper" in note["reason"]

    def test_another_version_is_noted(self, tmp_path, caplog):
        train(MODELS["walk"], tmp_path, until=0.5)
        document = json.loads((tmp_path / "config.json").read_text())
        document["versions"]["torch"] = "2.6.0"
        (tmp_path / "config.json").write_text(json.dumps(document))
        train(MODELS["walk"], tmp_path)
        (note,) = RunDirectory.open(tmp_path).notes["resumed"]
        assert note["reason"].startswith("torch was '2.6.0', now ")

    def test_a_walker_that_keeps_its_world(self):
        def reason(*wrappers):
            def make():
                env = gym.make("BipedalWalker-v3")
                for wrapper in wrappers:
                    env = wrapper(env)
                return env

            vec_env = DummyVecEnv([make])
            with ResetTracker(vec_env).wrapped():
                return explain_inexact(vec_env)

        assert "BipedalWalker reuses its Box2D world" in reason()
        assert reason(RecordResets) is None
        assert reason(RecordResets, Monitor) is None


KINDS = "float", "tuple", "dict", "array", "tensor", "entry"
"""Keys by which a checkpoint's JSON tells what JSON lacks; a user's dict may have them, too."""


TEXTS = st.text('a0 "\\\0\n\u2028\ud7ffé😀')
"""Of few characters: Hypothesis takes seconds to list all that there are."""


class TestFiles:
    def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(self, walk, tmp_path, caplog):
        train(MODELS["walk"], tmp_path / "parts", until=0.9, save_every=1)
        latest = checkpoint_path(tmp_path / "parts", 4)
        latest.write_bytes(latest.read_bytes()[:-10])
        model = train(MODELS["walk"], tmp_path / "parts", save_every=1)
        assert "round_00004.safetensors is damaged" in caplog.text
        assert "going on after round 3" in caplog.text
        assert_same_model(model, walk[0])

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
            lambda inner: (
                st.lists(inner) | st.dictionaries(TEXTS | st.sampled_from(KINDS), inner) | st.tuples(inner, inner)
            ),
        )
    )
    @settings(max_examples=25, deadline=None)
    def test_trees_come_back(self, value):
        path = Path(f"/tmp/whence-tree-{multiprocessing.current_process().pid}.safetensors")
        try:
            save_tree(path, {"value": value})
            assert load_tree(path) == {"value": value}
        finally:
            path.unlink()

    def test_arrays_and_tensors_come_back_bit_for_bit(self, tmp_path):
        tree = {
            "long": [float(number) for number in range(200)],
            "nan": np.array([np.nan, -0.0, np.inf]),
            "scalar": np.float32(0.1),
            "uint64": np.array([2**64 - 1], np.uint64),
            "transposed": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
            "empty": np.zeros((0, 4), bool),
        }
        save_tree(tmp_path / "x", tree)
        again = load_tree(tmp_path / "x")
        assert again["long"] == tree["long"]
        for name in ("nan", "scalar", "uint64", "empty"):
            assert (again[name].dtype, again[name].tobytes()) == (tree[name].dtype, tree[name].tobytes())
            assert again[name].shape == tree[name].shape
        assert torch.equal(again["transposed"], tree["transposed"])

    @pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
    def test_arrays_come_back_as_they_lay_in_memory(self, tmp_path, axes):
        images = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5).transpose(axes)
        save_tree(tmp_path / "x", {"images": images})
        again = load_tree(tmp_path / "x")["images"]
        assert np.array_equal(again, images)
        assert again.strides == images.strides

    @pytest.mark.parametrize("value", [object(), {1: 2}, np.array([None]), Mode.FAST])
    def test_nothing_else_is_stored(self, tmp_path, value):
        with pytest.raises(TypeError):
            save_tree(tmp_path / "x", {"value": value})

    def test_large_policies_are_kept_every_second_round(self, tmp_path, monkeypatch):
        monkeypatch.setattr("whence.runs.recorder.POLICY_BYTES", 1500)
        model = train(MODELS["walk"], tmp_path)
        size = sum(parameter.numel() * 4 for parameter in model.policy.parameters())
        run = RunDirectory.open(tmp_path)
        every = -(-size * ROUNDS // 1500)
        assert run.notes["policies_every"] == every > 1
        assert run.rounds("policies") == [*range(1, ROUNDS + 1, every), ROUNDS + 1]
        with pytest.raises(RunDirectoryError, match=rf"keeps the policy of one round in {every}, to save space"):
            run.policy(2)


class TestClock:
    def test_checkpoints_take_at_most_two_percent(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr("whence.runs.checkpoints.time.perf_counter", lambda: now[0])
        clock, saved = CheckpointClock(None), []
        for number in range(1, 201):
            now[0] += 1.0  # a round
            if clock.is_due(number):
                with clock.time_checkpoint(number):
                    now[0] += 0.5
                saved.append(number)
        assert saved == list(range(1, 201, 25))
        assert clock.is_behind(200)
        assert not clock.is_behind(176)

    def test_a_number_of_rounds_is_exact(self):
        clock = CheckpointClock(3)
        due = [number for number in range(1, 10) if clock.is_due(number)]
        assert due == [3, 6, 9]
        assert not any(CheckpointClock(0).is_due(number) for number in range(9))
        assert not CheckpointClock(0).is_behind(3)


class TestLock:
    @pytest.mark.parametrize("name", ["ENOLCK", "ENOSYS", "ENOTSUP", "EBADF"])
    def test_a_file_system_without_locks_is_written_to(self, tmp_path, monkeypatch, caplog, name):
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(getattr(errno, name), "no locks")))
        self.test_a_later_writer_of_this_process_takes_over(tmp_path)
        assert f"The file system of {tmp_path} has no locks (no locks)" in caplog.text

    def test_a_later_writer_of_this_process_takes_over(self, tmp_path):
        first = RunDirectory.create(tmp_path, {"a": 1})
        second = RunDirectory.create(tmp_path, {"a": 1})
        with pytest.raises(RunDirectoryError, match="written by a later run of this process"):
            first.append("metrics", {"round": 1})
        second.append("metrics", {"round": 1})
        second.release()
        assert not second.table("metrics").is_empty()
