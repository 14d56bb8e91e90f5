"""The callback inside SB3's training: what it must not change, and what it must."""

import copy
import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.logger import configure
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

import whence
from helpers.toys import OnRolloutEnd, Toy, model
from whence import DTV, IIF, KeepAll, RecordBatch, Return, RunDirectory, Selection, WhenceError, replay_episode
from whence.sb3 import Choice, InfluenceCallback, model_objective
from whence.sb3.models.descriptions import HYPERPARAMETERS
from whence.selection import ScoreAll


def parameters(toy: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in toy.policy.parameters()]


def identical(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Nothing(BaseCallback):
    def _on_step(self) -> bool:
        return True


def guard(kind: Any) -> Any:
    """SB3's evaluation samples actions from torch's global generator; here it must not disturb the training's."""

    class Guarded(kind):  # type: ignore[misc]
        def _on_step(self) -> bool:
            with whence.core.preserve_rng_state():
                return super()._on_step()

    return Guarded


def evaluating(algorithm: Any, **kwargs: Any) -> EvalCallback:
    env = model(algorithm, **kwargs).get_env()
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    kind = guard(MaskableEvalCallback if algorithm is MaskablePPO else EvalCallback)
    return kind(env, n_eval_episodes=2, eval_freq=20, deterministic=False, verbose=0, warn=False)


EIGHT = {"n_envs": 8, "n_steps": 8}
KINDS: list[dict[str, Any]] = [{}, {"observation": "dict"}, {"action": "gsde"}, {"normalised": True}]
VARIANTS = [
    # Of dicts MaskablePPO is below, of VecNormalize A2C, and of the others cases with more of their own.
    *(pytest.param(PPO, kind, marks=pytest.mark.long) for kind in KINDS),
    pytest.param(A2C, {}, marks=pytest.mark.long),
    (A2C, EIGHT | KINDS[3]),
    (MaskablePPO, KINDS[1] | {"n_steps": 16}),
    pytest.param(MaskablePPO, EIGHT, marks=pytest.mark.long),
    (PPO, {"action": "squashed", "ent_coef": 0.01}),
    pytest.param(MaskablePPO, {"action": "multidiscrete", "ent_coef": 0.01}, marks=pytest.mark.long),
    (PPO, {"action": "box", "ent_coef": 0.01, "clip_range_vf": 0.2}),
    (PPO, {"observation": "image", "shared": False}),
    (PPO, {"n_steps": 33, "batch_size": 16}),  # SB3 then trains on a minibatch of one record
    (PPO, {"target_kl": 1e-4, "normalize_advantage": False}),
    pytest.param(A2C, {"n_envs": 3, "normalize_advantage": True}, marks=pytest.mark.long),
    (A2C, {"n_steps": 1}),  # a round of one record
    (PPO, {"n_steps": 1, "batch_size": 1, "normalize_advantage": False}),
]


def named(value: Any) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{key}={entry}" for key, entry in value.items()) or "plain"
    return getattr(value, "__name__", None)


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
@pytest.mark.parametrize(("algorithm", "kwargs"), VARIANTS, ids=named)
def test_keeping_all_is_training_without_the_callback(algorithm: Any, kwargs: dict[str, Any], tmp_path: Path) -> None:
    trained = []
    folds = 3 if algorithm is A2C else None  # errors take longer than all else
    recorder = InfluenceCallback(run=tmp_path, folds=folds)
    for callback in (None, recorder, InfluenceCallback(DTV(leave_one_out=True, warmup=9))):
        evaluation = evaluating(algorithm, **kwargs)
        toy = model(algorithm, **kwargs)
        for rounds in (2, 1):
            steps = rounds * toy.n_steps * toy.n_envs
            toy.learn(steps, callback=CallbackList([evaluation, *([callback] if callback else [])]))
        assert evaluation.n_calls > 0
        trained.append(parameters(toy))
    assert identical(trained[0], trained[1])
    assert identical(trained[0], trained[2])
    assert not identical(trained[0], parameters(model(algorithm, **kwargs)))
    assert "score" in RunDirectory.open(tmp_path).round("records", 3).columns


def break_off(toy: Any) -> None:
    """Break training off when the second rollout ends, without whence."""
    if toy.num_timesteps > toy.n_steps * toy.n_envs:
        raise KeyError("broken off")


@pytest.mark.parametrize("algorithm", [PPO, A2C, MaskablePPO])
@pytest.mark.parametrize("kind", [{}, {"normalised": True}], ids=named)
def test_an_exception_inside_scoring_leaves_training_as_without_whence(algorithm: Any, kind: dict[str, Any]) -> None:
    calls = []

    def target(view: Any, params: Any, records: Any) -> torch.Tensor:
        calls.append(None)
        if len(calls) == 2:
            torch.rand(3), np.random.rand(3)
            raise KeyError("broken off")
        return view(params, view.prepare(records)).log_prob.mean()

    trained = []
    for callback in (OnRolloutEnd(break_off), InfluenceCallback(ScoreAll(), target=target)):
        toy = model(algorithm, **kind)
        with pytest.raises(KeyError, match="broken off"):
            toy.learn(3 * 32, callback=callback)
        toy.learn(2 * 32)
        trained.append(parameters(toy))
    assert identical(*trained)


def add_bonus(buffer: Any, replaces: bool) -> None:
    bonus = np.sign(np.sin(np.arange(buffer.buffer_size, dtype=np.float32)))[:, None]
    for name in ("rewards", "advantages", "returns"):
        if replaces:
            setattr(buffer, name, getattr(buffer, name) + bonus)
        else:
            getattr(buffer, name)[:] += bonus


class ShapedPPO(PPO):
    replaces = False

    def collect_rollouts(self, env: Any, callback: Any, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        goes_on = super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        add_bonus(rollout_buffer, self.replaces)
        return goes_on


@pytest.mark.parametrize("run", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("where", ["a callback", "the model"])
def test_a_rollout_is_scored_as_train_gets_it(tmp_path: Path, where: str, replaces: bool, run: bool) -> None:
    toy = model(ShapedPPO if where == "the model" else PPO)
    toy.replaces = replaces
    start, callback = copy.deepcopy(toy.policy), InfluenceCallback(IIF(0.5), run=tmp_path if run else None)
    bonus = OnRolloutEnd(lambda toy: add_bonus(toy.rollout_buffer, replaces))
    seen = torch.cat(seen_by_train(toy, CallbackList([callback, bonus] if where == "a callback" else [callback])))
    records, keep = callback.round.records, callback.round.selection.keep
    assert torch.equal(records.advantages, torch.as_tensor(toy.rollout_buffer.advantages).flatten())
    assert seen.sort()[0].tolist() == records.advantages[keep].repeat(toy.n_epochs).sort()[0].tolist()
    assert torch.equal(whence.attribute(start, records, target=Return()).scores, callback.round.influence.scores)


class Rescaling(RolloutBuffer):
    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        samples = super()._get_samples(batch_inds, env)
        return samples._replace(advantages=2 * samples.advantages)


def test_advantages_that_change_while_they_are_read_are_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    model(rollout_buffer_class=Rescaling).learn(64, callback=InfluenceCallback(KeepAll()))
    assert caplog.text.count("train() gets other advantages than were scored, for 16 of the 16 records") == 1


class Fixed:
    """Keep the first `count` records."""

    needs_influence = False

    def __init__(self, count: int) -> None:
        self.count = count

    def select(self, records: RecordBatch, influence: Any, progress: whence.Progress) -> Selection:
        return Selection.dropping(torch.arange(len(records)) < self.count, "test")


def seen_by_train(toy: Any, callback: BaseCallback | None) -> list[torch.Tensor]:
    """Train for one round and return the advantages of every minibatch that train() sees."""
    seen: list[torch.Tensor] = []
    samples = type(toy.rollout_buffer)._get_samples

    class Recording(type(toy.rollout_buffer)):  # type: ignore[misc]
        def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
            batch = samples(self, batch_inds, env)
            seen.append(batch.advantages)
            return batch

    toy.rollout_buffer.__class__ = Recording
    toy.learn(toy.n_steps, callback=callback)
    return seen


@pytest.mark.parametrize(
    ("kept", "last", "sizes"),
    [
        *((0, "keep", []), (1, "keep", []), (2, "keep", [2]), (65, "keep", [65]), (66, "keep", [64, 2])),
        *((100, "keep", [64, 36]), (100, "drop", [64])),
    ],
)
def test_rounds_that_keep_few_records_train_or_are_skipped(kept: int, last: Any, sizes: list[int]) -> None:
    toy = model(n_steps=128, batch_size=64)
    before = parameters(toy)
    callback = InfluenceCallback(Fixed(kept), last=last)
    assert callback.settings().get("last", "keep") == last
    seen = seen_by_train(toy, callback)
    assert [len(advantages) for advantages in seen] == 2 * sizes
    assert identical(before, parameters(toy)) == (kept < 2)
    assert callback.skipped_rounds == (kept < 2)
    if kept == sum(sizes):
        expected = sorted(callback.round.records.advantages[:kept].tolist())
        assert sorted(torch.cat([torch.zeros(0), *seen[: len(sizes)]]).tolist()) == expected
    toy.learn(128)  # the next training is whole again
    assert toy.rollout_buffer.full


def test_the_records_of_an_episode_share_a_fate(tmp_path: Path) -> None:
    toy = model(n_envs=3, n_steps=16, batch_size=8)
    callback = InfluenceCallback(IIF(1.0, unit="episode"), run=tmp_path, recordings=[1])
    toy.learn(48, callback=callback)
    table = RunDirectory.open(tmp_path).round("records", 1)
    episodes = table.group_by("env_index", "episode_id").agg(pl.col("keep").n_unique().alias("fates"), "keep", "score")
    assert (episodes["fates"] == 1).all()
    assert episodes["keep"].list.first().to_list() == (episodes["score"].list.mean() >= 0).to_list()
    assert 0 < episodes["keep"].list.first().sum() < len(episodes)
    assert (table.filter(pl.col("keep"))["score"] < 0).any()
    trained = torch.cat([*callback.recording.minibatches]).unique()  # of eight records, from several episodes
    assert callback.recording.records.ids[trained].sort().values.tolist() == sorted(table.filter("keep")["record_id"])


def pristine(toy: Any) -> bool:
    return type(toy) is PPO and "train" not in vars(toy) and not {"get", "_get_samples"} & set(vars(toy.rollout_buffer))


def test_everything_is_restored_when_train_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = model()

    def broken(*_: object) -> None:
        raise KeyError("broken optimiser")

    with monkeypatch.context() as patch:
        patch.setattr(toy.policy.optimizer, "step", broken)
        with pytest.raises(KeyError, match="broken optimiser"):
            toy.learn(32, callback=InfluenceCallback(IIF(0.5)))
    assert pristine(toy)
    toy.learn(32)


def test_a_selection_does_not_outlive_a_rollout_that_was_never_trained_on() -> None:
    def fail(toy: Any) -> None:
        raise KeyError("another callback")

    toy = model(n_steps=128, batch_size=64)
    with pytest.raises(KeyError, match="another callback"):
        toy.learn(128, callback=[InfluenceCallback(Fixed(65)), OnRolloutEnd(fail)])
    sizes = [len(advantages) for advantages in seen_by_train(toy, None)]
    assert sizes == [64, 64] * 2
    assert pristine(toy)


class Halving(InfluenceCallback):
    """Train on the first half of what is selected."""

    def train_selected(self, train: Any, selection: Selection) -> None:
        half = Selection.dropping(torch.arange(len(selection.keep)) < int(selection.keep.sum()) // 2, "half")
        super().train_selected(train, half)


def test_how_the_selected_train_can_be_overridden() -> None:
    seen = seen_by_train(model(n_steps=128, batch_size=64), Halving(Fixed(100)))
    assert [len(advantages) for advantages in seen] == [50, 50]


def test_a_model_saved_between_scoring_and_training_is_sb3s_own(tmp_path: Path) -> None:
    def save(toy: Any) -> None:
        toy.save(tmp_path / "model")
        copy.deepcopy(toy.policy)

    toy = model()
    toy.learn(32, callback=[InfluenceCallback(IIF(0.5)), OnRolloutEnd(save)])
    loaded = PPO.load(tmp_path / "model", env=toy.get_env(), device="cpu")
    assert type(loaded) is PPO
    assert not [name for name in vars(loaded) if "whence" in name or name == "train"]
    loaded.learn(32)


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_the_objective_is_read_from_the_model(algorithm: Any) -> None:
    toy = model(algorithm, ent_coef=0.02, normalize_advantage=True, vf_coef=0.7)
    expected = whence.PPOClip(clip_range=0.2, ent_coef=0.02) if algorithm is PPO else whence.A2C(ent_coef=0.02)
    assert model_objective(toy) == expected
    assert model_objective(model(algorithm, normalize_advantage=False)).advantage_norm == "none"


def test_a_run_directory_and_the_models_logger_hold_what_happened(tmp_path: Path) -> None:
    toy = model(n_envs=2)
    callback = InfluenceCallback(IIF(0.5), run=tmp_path / "run")
    toy.set_logger(configure(str(tmp_path), ["csv"]))
    toy.learn(3 * 64, callback=callback)
    toy.logger.close()
    progress = pl.read_csv(tmp_path / "progress.csv")
    for name in ("dropped_share", "negative_share", "mean", "seconds", "skipped_rounds"):
        assert progress[f"influence/{name}"].null_count() == progress["train/loss"].null_count() == 1
    for name in ("influence/mean", "train/loss"):  # SB3 writes a round's figures with the next one, and the last never
        expected = [row[name.removeprefix("influence/")] for row in callback.metrics[:-1]]
        assert progress[name].drop_nulls().to_list() == pytest.approx(expected)
    run = RunDirectory.open(tmp_path / "run")
    assert run.rounds() == [1, 2, 3]
    metrics, timings = run.table("metrics"), run.table("timings")
    assert metrics["round"].to_list() == timings["round"].to_list() == [1, 2, 3]
    assert metrics["timestep"].to_list() == [64, 128, 192]
    assert "train/approx_kl" in metrics.columns
    last = run.round("records", 3)
    assert last["score"].to_list() == callback.round.influence.scores.tolist()
    assert last["keep"].to_list() == callback.round.selection.keep.tolist()
    assert (last["keep"] == last["reason"].is_null()).all()
    assert last["record_id"].to_list() == callback.round.records.ids.tolist()
    final = run.policy(4)
    assert all(torch.equal(p, final[name]) for name, p in toy.policy.named_parameters())
    # Episode ids go on from round to round, and steps with them.
    both = run.round("records", 2).vstack(last).filter(env_index=0)
    for (episode,), rows in both.group_by("episode_id"):
        known = rows["step"].drop_nulls()
        assert known.to_list() == list(range(int(known[0]), int(known[0]) + len(rows))), episode
    assert run.round("episodes", 2)["generator_state"].null_count() == 0
    with pytest.raises(whence.RunDirectoryError, match="rule was"):
        model(n_envs=2).learn(64, callback=InfluenceCallback(IIF(0.25), run=tmp_path / "run"))


class ChoosesTooFew(InfluenceCallback):
    def choose(self, records: RecordBatch) -> Choice:
        return Choice(None, KeepAll().select(records.take(slice(0, 5))))


@pytest.mark.parametrize(
    ("make", "message", "steps"),
    [
        (lambda: InfluenceCallback(Fixed(1), strict=True), "keeps 1 of 32 records", 32),
        (lambda: [InfluenceCallback(Fixed(16)), InfluenceCallback(Fixed(8))], r"Two InfluenceCallbacks.*Pass one", 0),
        (
            lambda: ChoosesTooFew(KeepAll()),
            *(r"ChoosesTooFew\.choose\(\) returned a selection of 5 records for .* of 32", 32),
        ),
        (
            lambda: EveryNTimesteps(4, InfluenceCallback(KeepAll())),
            *(r"inside of EveryNTimesteps.*Pass both to learn\(\)", 0),
        ),
    ],
)
def test_what_cannot_train_is_refused_and_the_model_trains_on(make: Any, message: str, steps: int) -> None:
    toy = model()
    with pytest.raises(WhenceError, match=message):
        toy.learn(32, callback=make())
    assert toy.num_timesteps == steps
    assert pristine(toy)
    toy.learn(32, callback=InfluenceCallback(Fixed(16)))


class BetterHalf(InfluenceCallback):
    def choose(self, records: RecordBatch) -> Choice:
        keep = records.advantages > records.advantages.median()
        selection = Selection.dropping(keep, "advantage at or below the median")
        return Choice(None, selection, {"least_advantage": float(records.advantages[keep].min())})


def test_a_choice_of_ones_own_trains_and_its_metrics_are_logged(tmp_path: Path) -> None:
    toy, callback = model(), BetterHalf(KeepAll())
    toy.set_logger(configure(str(tmp_path), ["csv"]))
    toy.learn(64, callback=callback)
    toy.logger.close()
    advantages, keep = callback.round.records.advantages, callback.round.selection.keep
    assert 0 < int(keep.sum()) <= 16
    assert callback.metrics[-1]["kept"] == int(keep.sum())
    assert callback.metrics[-1]["least_advantage"] == float(advantages[keep].min())
    assert "influence/least_advantage" in (tmp_path / "progress.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": IIF}, "rule is <class"),
        ({"rule": 0.5}, "rule is 0.5; pass an instance"),
        ({"rule": whence.MaxVariance(2)}, "selects by group; the units here are record, episode"),
        ({"rule": IIF(0.5, unit="row")}, "selects by row; the units here are record, episode"),
        ({"rule": KeepAll(), "engine": "gohst"}, "Did you mean ghost"),
        ({"rule": KeepAll(), "memory": "2GB"}, "memory is '2GB'; a number of bytes above 0"),
        ({"rule": KeepAll(), "last": "all"}, "last is 'all'"),
        ({"rule": KeepAll(), "target": Return}, "target is <class"),
        ({"rule": KeepAll(), "run": 5}, "run is 5; pass the directory's path"),
        *(
            ({"rule": KeepAll(), "recordings": numbers}, r"recordings is .*; give .*, from 1, such as \[5, 20\]")
            for numbers in (5, "12", [0], [2.5], [None])
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WhenceError, match=message):
        InfluenceCallback(arguments.pop("rule"), **arguments)


def test_a_rule_reads_how_far_training_has_come() -> None:
    seen = []

    class Watching(KeepAll):
        def select(self, records: RecordBatch, influence: Any = None, progress: Any = None) -> Selection:
            seen.append((progress.round, progress.remaining))
            return super().select(records, influence)

    toy = model()
    callback = InfluenceCallback(Watching())
    toy.learn(4 * 32, callback=callback)
    assert seen == [(1, 0.75), (2, 0.5), (3, 0.25), (4, 0.0)]
    # train() sees the same figure, one rollout later than the model's attribute has it in on_rollout_end.
    assert toy._current_progress_remaining == 0.0
    toy.learn(2 * 32, callback=callback)
    assert seen[4:] == [(5, 0.5), (6, 0.0)]
    toy.learn(2 * 32, callback=callback, reset_num_timesteps=False)
    assert seen[6:] == [(7, 0.25), (8, 0.0)]


class Sized(Toy):
    """An environment with a setting."""

    def __init__(self, size: Any = 1) -> None:
        super().__init__()


gym.register("Sized-v0", Sized)


def first_round(
    path: Path, size: Any = 1, *, algorithm: Any = PPO, more: Any = None, normalised: Any = None, **kwargs: Any
) -> dict[str, Any]:
    """Train for one round and return the configuration that its directory holds."""
    more = {} if more is None else more
    env: Any = DummyVecEnv([lambda: gym.make("Sized-v0", disable_env_checker=True, size=size)])
    env = env if normalised is None else VecNormalize(env, **normalised)
    if algorithm is PPO:
        kwargs = {"batch_size": 16, "n_epochs": 1, **kwargs}
    algorithm("MlpPolicy", env, n_steps=32, device="cpu", **kwargs).learn(
        32, callback=InfluenceCallback(KeepAll(), run=path, **more)
    )
    return dict(RunDirectory.open(path).config)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"size": 2}),
        ({}, {"size": np.arange(3)}),
        ({}, {"policy_kwargs": {"activation_fn": torch.nn.ReLU}}),
        ({"learning_rate": 1e-3}, {"learning_rate": lambda left: 1e-3 * left}),
        ({"learning_rate": lambda left: 1e-3}, {"learning_rate": lambda left: 1e-3 * left}),
        ({"clip_range": 0.1}, {"clip_range": 0.2}),
        ({"clip_range": 0.1}, {"clip_range": lambda left: 0.1 * left}),
        ({"clip_range": lambda left: 0.1 * left}, {"clip_range": lambda left: 0.1 * left**2}),
        ({"clip_range_vf": None}, {"clip_range_vf": 0.1}),
        ({"target_kl": None}, {"target_kl": 0.1}),
        ({"normalised": {}}, {"normalised": {"clip_obs": 5.0}}),
    ],
)
def test_a_run_of_other_settings_is_another_run(tmp_path: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    first_round(tmp_path, **one)
    first_round(tmp_path, **one)
    with pytest.raises(whence.RunDirectoryError, match="another configuration"):
        first_round(tmp_path, **other)


def test_the_configuration_is_written_as_data(tmp_path: Path) -> None:
    extractor = {"features_extractor_class": FlattenExtractor, "optimizer_kwargs": {"betas": (0.9, np.float64(0.5))}}
    config = first_round(
        tmp_path / "ppo",
        size=functools.partial(max, 1),
        clip_range=lambda left: 0.25 * left,
        max_grad_norm=float("inf"),
        policy_kwargs=extractor | {"activation_fn": torch.nn.ReLU, "net_arch": {"pi": [8]}},
        seed=7,
    )
    assert config["env"] == "Sized-v0"
    assert config["env_kwargs"] == {"size": {"call": "builtins.max", "args": [1], "kwargs": {}}}
    assert config["policy_kwargs"] == {
        "features_extractor_class": "stable_baselines3.common.torch_layers.FlattenExtractor",
        "optimizer_kwargs": {"betas": [0.9, 0.5]},
        "activation_fn": "torch.nn.modules.activation.ReLU",
        "net_arch": {"pi": [8]},
    }
    settings = config["hyperparameters"]
    assert settings["clip_range"].keys() == {"schedule", "code"}
    assert settings["clip_range"]["schedule"] == "function"
    assert config["rule"] == {"rule": "KeepAll"}
    assert config["target"] == {"target": "Return"}
    assert config["objective"] is None
    assert config["vec_wrappers"] == []
    assert (settings["learning_rate"], settings["max_grad_norm"]) == (3e-4, "inf")
    assert (settings["seed"], settings["target_kl"]) == (7, None)
    assert set(settings) == {*HYPERPARAMETERS, "seed"}
    a2c = first_round(tmp_path / "a2c", algorithm=A2C)
    assert a2c["policy_kwargs"]["optimizer_class"].endswith(".RMSprop")
    assert set(a2c["hyperparameters"]) < set(settings)


def test_a_run_with_functions_of_ones_own_can_be_started_over(tmp_path: Path) -> None:
    for _ in range(2):

        class Target:
            def __call__(self, view: Any, params: Any, records: RecordBatch) -> torch.Tensor:
                return view(params, view.prepare(records)).log_prob.mean()

        more = {"target": Target(), "objective": lambda outputs, records: outputs.log_prob}
        config = first_round(tmp_path, size=lambda: 1, more=more)
    assert "0x" not in str(config)


@pytest.mark.parametrize("seeded", [True, False])
def test_a_seed_that_waits_for_cuda_is_the_users_again(seeded, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(123)
    with whence.core.preserve_rng_state():
        if seeded:
            torch.manual_seed(4)
    assert seeds == ([123, 4, 123] if seeded else [123])
    assert torch.initial_seed() == 123


@pytest.mark.parametrize("replaces", [False, True])
def test_buffers_that_a_layer_writes_in_eval_mode_are_restored(replaces: bool) -> None:
    class Counting(torch.nn.Module):
        def forward(self) -> None:
            assert not self.training
            self.count = self.count + 1 if replaces else self.count.add_(1)

    layer = Counting()
    layer.register_buffer("count", torch.zeros(()))
    with whence.core.eval_mode([layer]):
        layer()
    assert layer.count == 0
    assert layer.training


class Curriculum(Toy):
    """An environment whose reward depends on a level that is set from outside."""

    level = 0

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float(self.level), *rest


class RaiseLevel(Nothing):
    """Raise the level at each rollout."""

    def _on_rollout_start(self) -> None:
        self.training_env.set_attr("level", self.num_timesteps)


def test_attributes_set_in_environments_reach_them_while_a_run_is_written(tmp_path: Path) -> None:
    env = DummyVecEnv([Curriculum])
    toy = PPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, device="cpu", gamma=0)
    callback = InfluenceCallback(KeepAll(), run=tmp_path)
    toy.learn(96, callback=[RaiseLevel(), callback])
    rewards = [RunDirectory.open(tmp_path).round("records", number)["reward"].unique().to_list() for number in (1, 3)]
    assert rewards == [[0], [64]]
    assert type(env.envs[0]) is Curriculum
    with pytest.raises(KeyboardInterrupt):
        toy.learn(96, callback=[callback, Interrupts()], reset_num_timesteps=False)
    assert type(env.envs[0]) is Curriculum
    assert type(toy) is PPO


class Interrupts(Nothing):
    def _on_step(self) -> bool:
        assert copy.deepcopy(self.training_env).get_attr("level") == [64]  # of an environment that is wrapped now
        raise KeyboardInterrupt


class Silent(VecEnvWrapper):
    """Environments whose steps have no infos, and whose episodes do not end."""

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        observations, rewards, dones, _ = self.venv.step_wait()
        return observations, rewards, np.zeros_like(dones), []


class Foreign:
    """What another library takes for a VecEnv: a wrapper of SB3's is around it."""

    def __init__(self, envs: Any) -> None:
        self._envs, self.unwrapped = envs, self

    def __getattr__(self, name: str) -> Any:
        if name in ("_envs", "envs", "reset_infos", "spec"):
            raise AttributeError(name)
        return getattr(self._envs, name)


@pytest.mark.parametrize("around", [lambda envs: envs, Foreign])
def test_environments_without_infos_are_trained_in(tmp_path: Path, around: Any) -> None:
    callback, envs = InfluenceCallback(IIF(0.5), run=tmp_path), Silent(around(DummyVecEnv([Toy])))
    PPO("MlpPolicy", envs, n_steps=32, batch_size=16, n_epochs=1).learn(64, callback=callback)
    assert [row["flat"] for row in callback.metrics] == [False, False]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_actions_that_sb3_rounds_as_it_stores_them_are_warned_of(caplog: Any, dtype: Any) -> None:
    env = Toy(action="box")
    env.action_space = gym.spaces.Box(-3, 3, (2,), dtype)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1)
    model.learn(64, callback=InfluenceCallback(IIF(0.5)))
    # SB3 before 2.8 stores them as they are.
    is_rounded = np.issubdtype(model.rollout_buffer.actions.dtype, np.integer)
    counts = caplog.text.count("The policy's log-probs are not those that the rollout holds")
    assert counts == int(is_rounded)


def test_a_get_that_another_callback_replaces_is_refused() -> None:
    def replace_get(toy: Any) -> None:
        toy.rollout_buffer.get = toy.rollout_buffer.get

    with pytest.raises(whence.Unsupported, match=r"RolloutBuffer overrides get\(\)"):
        model().learn(32, callback=[InfluenceCallback(KeepAll()), OnRolloutEnd(replace_get)])


def test_a_clip_range_that_ends_at_0_lets_a_second_learn_begin() -> None:
    toy = model(clip_range=lambda left: 0.2 * left)
    callback = InfluenceCallback(IIF(0.5))
    toy.learn(64, callback=callback)
    assert toy.clip_range(toy._current_progress_remaining) == 0
    toy.learn(64, callback=callback)
    assert model_objective(toy) == whence.PPOClip(clip_range=0.2)


@pytest.mark.parametrize("case", ["the same, reset", "others", "others, not reset"])
def test_episodes_begin_anew_in_new_environments(tmp_path: Path, case: str) -> None:
    toy = model(n_steps=32)
    callback = InfluenceCallback(KeepAll(), run=tmp_path)
    toy.learn(32, callback=callback)
    assert not toy._last_episode_starts.all()
    others = model(seed=5).get_env()
    others.reset()
    others.seed(5)
    toy.set_env(toy.env if case == "the same, reset" else others, force_reset="not" not in case)
    toy.learn(32, callback=callback, reset_num_timesteps=False)
    run = RunDirectory.open(tmp_path)
    before, after = (set(run.round("records", number)["episode_id"]) for number in (1, 2))
    assert not before & after
    if case != "others, not reset":
        # The generator's state before a reset is known if that was its first, or a wrapper was there.
        for episode in run.round("episodes", 2)["episode_id"].to_list()[case == "the same, reset" :]:
            assert replay_episode(run, episode, env=Toy).mismatch is None


def test_what_is_logged_beside_numbers_does_not_end_training(tmp_path: Path) -> None:
    def log(toy: Any) -> None:
        toy.logger.record("train/note", "all is well", exclude="tensorboard")
        toy.logger.record("train/list", [1, 2], exclude=("stdout", "log", "csv", "json", "tensorboard"))
        toy.logger.record("train/one", torch.ones(1), exclude="tensorboard")

    callback = InfluenceCallback(KeepAll())
    model().learn(32, callback=[OnRolloutEnd(log), callback], log_interval=10)
    row = callback.metrics[-1]
    assert row["train/one"] == 1
    assert not {"train/note", "train/list"} & row.keys()


def test_a_summed_target_has_no_errors_and_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Total(Return):
        def from_outputs(self, outputs: Any, records: RecordBatch) -> torch.Tensor:
            return super().from_outputs(outputs, records) * len(records)

    callback = InfluenceCallback(IIF(0.5), target=Total(), run=tmp_path)
    toy = model(n_steps=64)
    toy.learn(128, callback=callback)
    assert "influence_error" not in RunDirectory.open(tmp_path).round("records", 2).columns
    (warning,) = [record.message for record in caplog.records if "without errors" in record.message]
    assert warning.startswith("Scores are written without errors. The parts of the target")
    assert "do not add up to it" in warning
