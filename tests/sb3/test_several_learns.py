"""Callbacks that are used more than once, for one model or for several, and those that are inside of others."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.monitor import Monitor

from helpers.resuming import STEPS, Interrupt, Walk, contents, monitored, small
from helpers.toys import model
from whence import IIF, FromMask, RunDirectory
from whence.core import RunDirectoryError, WhenceError
from whence.sb3 import InfluenceCallback, resume
from whence.sb3.episodes import digest_code
from whence.selection import Progress, ScoreAll, Selection


def make_callback(path: Path, **options: Any) -> InfluenceCallback:
    return InfluenceCallback(IIF(0.5), run=path, folds=None, save_every=1, **options)


class TestSeveralModels:
    @pytest.mark.parametrize("interrupted", [False, True])
    def test_a_run_is_of_one_model(self, tmp_path: Path, interrupted: bool) -> None:
        callback, first = make_callback(tmp_path), model(seed=0)
        try:
            first.learn(96, callback=[callback, *([Interrupt(80)] if interrupted else [])])
        except KeyboardInterrupt:
            assert interrupted
        before, other = contents(tmp_path), model(seed=0)
        with pytest.raises(WhenceError, match=r"has scored another model, and .* Make a callback for each model"):
            other.learn(64, callback=callback)
        assert other.num_timesteps == 0
        assert contents(tmp_path) == before
        first.learn(32, callback=callback, reset_num_timesteps=False)  # its own model still trains
        assert len(RunDirectory.open(tmp_path).rounds()) == 3 + (not interrupted)

    def test_a_model_that_was_loaded_is_the_one_that_was_saved(self, tmp_path: Path) -> None:
        callback, first = make_callback(tmp_path / "run"), model()
        first.learn(64, callback=callback)
        first.save(tmp_path / "model.zip")
        loaded = PPO.load(tmp_path / "model.zip", env=first.get_env())
        loaded.learn(32, callback=callback, reset_num_timesteps=False)
        assert RunDirectory.open(tmp_path / "run").rounds() == [1, 2, 3]

    def test_without_a_run_each_model_is_scored_by_itself(self) -> None:
        shared, makers = InfluenceCallback(IIF(0.5, warmup=1)), ({"n_envs": 2}, {"n_envs": 3}, {"action": "box"})
        for kwargs in makers:
            ids = []
            for callback in (shared, InfluenceCallback(IIF(0.5, warmup=1))):
                toy = model(**kwargs)
                toy.learn(3 * toy.n_steps * toy.n_envs, callback=callback)
                assert callback.round is not None
                assert [row["round"] for row in callback.metrics] == [1, 2, 3]
                records = callback.round.records
                ids.append((callback.metrics[0]["kept"], *map(np.asarray, (records.ids, records.episode_ids))))
            assert all(np.array_equal(one, other) for one, other in zip(*ids, strict=True))

    def test_the_state_of_a_rule_is_of_one_model(self) -> None:
        class Counting(ScoreAll):
            def state_dict(self) -> dict[str, Any]:
                return {}

            def load_state_dict(self, state: Any) -> None:
                pass

        callback = InfluenceCallback(Counting())
        model().learn(32, callback=callback)
        with pytest.raises(WhenceError, match="its rule has a state"):
            model().learn(32, callback=callback)

    def test_a_run_that_was_deleted_in_between_is_not_written(self, tmp_path: Path) -> None:
        callback, toy = make_callback(tmp_path / "run"), model()
        toy.learn(32, callback=callback)
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(RunDirectoryError, match="run is not there"):
            toy.learn(32, callback=callback)
        assert toy.num_timesteps == 0
        assert not (tmp_path / "run").exists()


class Forwarding(BaseCallback):
    """Call another callback whenever SB3 calls this one."""

    def __init__(self, inner: BaseCallback) -> None:
        super().__init__()
        self.inner = inner

    def _init_callback(self) -> None:
        self.inner.init_callback(self.model)

    def _on_training_start(self) -> None:
        self.inner.on_training_start(self.locals, self.globals)

    def _on_rollout_start(self) -> None:
        self.inner.on_rollout_start()

    def _on_step(self) -> bool:
        return self.inner.on_step()

    def _on_rollout_end(self) -> None:
        self.inner.on_rollout_end()

    def _on_training_end(self) -> None:
        self.inner.on_training_end()


class ForwardingAll(BaseCallback):
    """The same by the methods that SB3 calls."""

    def __init__(self, inner: BaseCallback) -> None:
        super().__init__()
        self.inner = inner

    def init_callback(self, model: Any) -> None:
        super().init_callback(model)
        self.inner.init_callback(model)

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        self.inner.on_training_start(locals_, globals_)

    def on_rollout_start(self) -> None:
        self.inner.on_rollout_start()

    def update_locals(self, locals_: dict[str, Any]) -> None:
        self.inner.update_locals(locals_)

    def _on_step(self) -> bool:
        return self.inner.on_step()

    def on_rollout_end(self) -> None:
        self.inner.on_rollout_end()

    def on_training_end(self) -> None:
        self.inner.on_training_end()


def evaluate(name: str) -> Any:
    return lambda inner: EvalCallback(Monitor(Walk()), eval_freq=10**9, verbose=0, warn=False, **{name: inner})


class TestInsideOfOthers:
    @pytest.mark.parametrize(
        "wrap",
        [
            evaluate("callback_on_new_best"),
            evaluate("callback_after_eval"),
            lambda inner: CallbackList([EveryNTimesteps(10**9, inner)]),
            lambda inner: EveryNTimesteps(10**9, CallbackList([CallbackList([inner])])),
        ],
    )
    def test_of_events_it_is_refused_before_anything_is_lost(self, tmp_path: Path, wrap: Any) -> None:
        small(monitored(Walk)).learn(STEPS, callback=make_callback(tmp_path))
        before, toy = contents(tmp_path), small(monitored(Walk))
        with pytest.raises(WhenceError, match=r"is inside of \w+, .*for each rollout.*Pass both to learn\(\)"):
            toy.learn(2 * STEPS, callback=wrap(make_callback(tmp_path, overwrite=True)))
        assert toy.num_timesteps == 0
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("wrap", [lambda inner: CallbackList([CallbackList([inner])]), Forwarding, ForwardingAll])
    def test_of_lists_it_records(self, tmp_path: Path, wrap: Any) -> None:
        small(monitored(Walk)).learn(2 * STEPS, callback=wrap(make_callback(tmp_path)))
        assert RunDirectory.open(tmp_path).rounds() == [1, 2]

    def test_a_training_that_an_event_begins_is_a_training_of_its_own(self, tmp_path: Path) -> None:
        class Train(BaseCallback):
            def _on_step(self) -> bool:
                small(monitored(Walk)).learn(STEPS, callback=make_callback(tmp_path))
                return False

        small(monitored(Walk)).learn(STEPS, callback=EveryNTimesteps(4, Train()))
        assert RunDirectory.open(tmp_path).rounds() == [1]


class Breaks:
    """Fail at the first selection."""

    needs_influence = False

    def select(self, records: Any, influence: Any, progress: Progress) -> Selection:
        raise KeyError("broken")


@pytest.mark.parametrize("second", [False, True])
def test_what_fails_before_its_first_round_is_written_overwrites_nothing(tmp_path: Path, second: bool) -> None:
    small(monitored(Walk)).learn(STEPS, callback=make_callback(tmp_path))
    before, toy = contents(tmp_path), small(monitored(Walk))
    replacing = InfluenceCallback(ScoreAll() if second else Breaks(), run=tmp_path, overwrite=True)
    with pytest.raises((KeyError, WhenceError), match=r"broken|Two InfluenceCallbacks"):
        toy.learn(STEPS, callback=[replacing, *([InfluenceCallback()] if second else [])])
    assert contents(tmp_path) == before
    callback = make_callback(tmp_path, overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        toy.learn(2 * STEPS, callback=[callback, Interrupt(5)])
    assert contents(tmp_path) == before
    toy.learn(2 * STEPS, callback=callback)
    run = RunDirectory.open(tmp_path)
    assert run.table("metrics")["round"].to_list() == [1, 2]
    assert run.notes == {"save_every": 1, "policies_every": 1, "code": digest_code(toy.env)}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_stays_where_it_is_while_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    class Leaves(BaseCallback):
        def _on_step(self) -> bool:
            os.chdir(tmp_path / "elsewhere")
            return True

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    callback, toy = make_callback(Path("run")), small(monitored(Walk))
    if resumed:
        toy.learn(STEPS, callback=callback)
        toy, callback = resume("run", monitored(Walk))
    toy.learn(3 * STEPS, callback=[Leaves(), callback])
    assert not any((tmp_path / "elsewhere").iterdir())
    run = RunDirectory.open(tmp_path / "run")
    assert run.rounds() == run.table("metrics")["round"].to_list() == [1, 2, 3]


class TestRecordIds:
    def test_they_continue_over_several_learns(self, tmp_path: Path) -> None:
        callback, toy = make_callback(tmp_path / "run"), model(n_envs=2)
        for reset in (True, True, False, True):
            toy.learn(2 * 64, callback=callback, reset_num_timesteps=reset)
        run = RunDirectory.open(tmp_path / "run")
        ids = [run.round("records", number)["record_id"].sort().to_list() for number in run.rounds()]
        assert [each for ids_of_round in ids for each in ids_of_round] == list(range(8 * 64))
        assert run.scan().filter(pl.col("record_id") == 70).collect()["round"].to_list() == [2]

    def test_a_mask_drops_one_record(self) -> None:
        toy, callback = model(), InfluenceCallback(FromMask([40]))
        for _ in range(3):
            toy.learn(64, callback=callback)
        assert [row["kept"] for row in callback.metrics] == [32, 31, 32, 32, 32, 32]

    def test_a_resumed_learn_numbers_as_one_that_was_not_interrupted(self, tmp_path: Path) -> None:
        def script(path: Path, *more: BaseCallback) -> None:
            toy, callback = small(monitored(Walk)), make_callback(path)
            toy.learn(2 * STEPS, callback=callback)
            toy.learn(3 * STEPS, callback=[callback, *more])

        script(tmp_path / "whole")
        with pytest.raises(KeyboardInterrupt):
            script(tmp_path / "parts", Interrupt(STEPS + 5))
        toy, callback = resume(tmp_path / "parts", monitored(Walk))
        toy.learn(3 * STEPS, callback=callback)
        whole, parts = (RunDirectory.open(tmp_path / name) for name in ("whole", "parts"))
        assert whole.rounds() == parts.rounds() == [1, 2, 3, 4, 5]
        for number in whole.rounds():
            assert parts.round("records", number).equals(whole.round("records", number))
        assert whole.round("records", 5)["record_id"].max() == 5 * STEPS - 1

    def test_a_number_that_is_not_finite_is_named_by_its_id(self) -> None:
        toy, callback = model(), InfluenceCallback()
        toy.learn(64, callback=callback)
        toy.learn(64, callback=callback)
        step_wait = toy.env.step_wait

        def spoil() -> Any:
            observations, rewards, *rest = step_wait()
            return observations, rewards * np.float32("nan"), *rest

        toy.env.step_wait = spoil
        with pytest.raises(WhenceError, match="is nan in record 128 "):
            toy.learn(64, callback=callback)
