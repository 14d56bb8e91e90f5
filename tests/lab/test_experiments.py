import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from polars.testing import assert_frame_equal
from stable_baselines3 import PPO

from helpers.launching import Recorder
from helpers.toys import assert_close, copy_signed
from whence import Action
from whence.core import RunDirectoryError, WhenceError, preserve_rng_state
from whence.lab import Comparison, cluster, compare, load_comparison
from whence.lab.agents import (
    RunConfig,
    configure,
    default_policy,
    make_evaluation_env,
    make_training_env,
    plan_comparison,
)
from whence.lab.agents.training import is_finished, read_curve, run
from whence.lab.arms import ANY, ARMS, GROUPS, LANGUAGE_ARMS, SCORES, counts_scoring, place_arm, read_presets
from whence.lab.comparison import run_path
from whence.runs import RunDirectory
from whence.sb3.episodes import Pool
from whence.sb3.models import HYPERPARAMETERS
from whence.stored.agents import check_action
from whence.stored.agents.environments import measure_return

# Small enough that a policy that knows nothing finds the goal now and then: returns differ.
LAKE = {"desc": ["SFF", "FFF", "FHG"], "is_slippery": True}
PPO_SMALL = {"n_steps": 64, "batch_size": 32, "n_epochs": 4, "learning_rate": 0.01}
ROUNDS, ARM_NAMES = 2, ["ppo", "iif", "random"]
ENVPOOL_WARNS = "ignore:.*WARN.*Box (low|high)'s precision"


def planned(**changed):
    values = {"env": "FrozenLake-v1", "env_kwargs": LAKE, "hyperparameters": PPO_SMALL, "arms": ARM_NAMES, "seeds": 2}
    return plan_comparison(**values | {"rounds": ROUNDS, "eval_episodes": 20, "drop": 0.5} | changed)


def one(arm="ppo", **changed):
    return planned(arms=[arm], seeds=1, **changed)[0]


def stamps(path):
    files = [file for file in path.rglob("*") if file.is_file() and file.name not in (".lock", ".signature")]
    return {file.relative_to(path): file.stat().st_mtime_ns for file in files}


def generators():
    """The states of the global generators, to compare."""
    name, words, *rest = np.random.get_state()
    return random.getstate(), name, words.tolist(), rest, torch.get_rng_state().tolist()


def assert_same_results(mine, other):
    """Two finished runs hold the same in every file but the timings."""
    for table in ("metrics", "evaluations"):
        assert_frame_equal(mine.table(table), other.table(table), check_exact=True)
    assert mine.rounds() == other.rounds() == [1, 2]
    for number in mine.rounds():
        for name in ("records", "episodes"):
            assert_frame_equal(mine.round(name, number), other.round(name, number), check_exact=True)
    for number in (1, 2, 3):
        assert_close(mine.policy(number), other.policy(number))


def lake(kwargs):
    return RunConfig("FrozenLake-v1", "ppo", 0, env_kwargs=kwargs)


@pytest.fixture(scope="module")
def in_this_process(tmp_path_factory) -> Comparison:
    """A comparison whose runs are made in this process, one after the other."""
    configs, path = planned(), tmp_path_factory.mktemp("one")
    with preserve_rng_state():
        for config in configs:
            run(config, run_path(path, config))
    return compare(configs, path)


@pytest.fixture(scope="module")
def watch():
    """What was reported for `in_worker`."""
    return Recorder()


@pytest.fixture(scope="module")
def in_worker(tmp_path_factory, watch, in_this_process) -> Comparison:
    """The same comparison; its last run is made by a worker, since starting one takes longest."""
    configs, path = planned(), tmp_path_factory.mktemp("two") / "worker"
    for config in configs[:-1]:
        copy_signed(in_this_process.run(config).path, run_path(path, config))
    return compare(configs, path, watch=watch)


@pytest.fixture
def registered():
    """Register environments for one test."""
    names = []

    def register(name, entry_point):
        gym.register(name, entry_point)
        names.append(name)
        return name

    yield register
    for name in names:
        del gym.registry[name]


class Still(gym.Env):
    """Nothing happens; `space` is observed."""

    def __init__(self, space):
        self.observation_space, self.action_space = space, spaces.Discrete(2)


class TestPlan:
    def test_a_preset_is_what_the_published_code_runs(self):
        (config,) = plan_comparison(preset="lda-code/frozenlake", arms=["iif"], seeds=1)
        assert config.to_json() == {
            "env": "FrozenLake-v1",
            "env_kwargs": {"map_name": "4x4", "is_slippery": False},
            "n_envs": 1,
            "policy": "MlpPolicy",
            "optimizer": "SGD",
            "hyperparameters": {
                **{"learning_rate": 5e-3, "n_steps": 2048, "batch_size": 64, "n_epochs": 10, "gamma": 0.99},
                **{"gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": "inf"},
            },
            "arm": "iif",
            "drop": 0.5,
            "rounds": 50,
            "eval_episodes": 1000,
            "seed": 0,
            **{
                "policy_kwargs": {},
                **{"warmup": 0, "unit": None},
                "target": "return",
                "target_args": {},
                "engine": "auto",
                "device": "cpu",
                **{"eval_every": 1, "collect_with": "gymnasium", "evaluate_with": "gymnasium", "pool_kwargs": {}},
                "observe": None,
            },
        }
        assert config.hyperparameters["max_grad_norm"] == math.inf

    @pytest.mark.parametrize(
        "changed",
        [
            {},
            {"env_kwargs": {"limits": [math.inf, {"low": -math.inf}], "name": "infinite"}},
            {"hyperparameters": {"target_kl": -math.inf}},
            {"policy_kwargs": {"log_std_init": math.inf, "net_arch": [64]}},
        ],
    )
    @pytest.mark.parametrize("name", list(read_presets()))
    def test_a_configuration_comes_back_from_json(self, name, changed):
        config = replace(RunConfig(arm="iif", seed=3, **read_presets()[name]), **changed)
        assert RunConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False))) == config

    def test_overrides_replace_what_the_preset_says_one_by_one_and_none_does_not(self):
        given = {"env_kwargs": {"is_slippery": True}, "policy_kwargs": {"net_arch": [8]}}
        given |= {"rounds": 3, "drop": 0.25, "eval_episodes": None, "n_envs": None}
        (config,) = plan_comparison(preset="lda-code/frozenlake", arms=["iif"], seeds=1, **given)
        assert (config.rounds, config.drop, config.eval_episodes, config.n_envs) == (3, 0.25, 1000, 1)
        assert config.optimizer == "SGD"
        assert config.env_kwargs == {"map_name": "4x4", "is_slippery": True}
        assert config.policy_kwargs == {"net_arch": [8]}
        pytest.importorskip("minigrid")
        config = configure(preset="lda-code/minigrid", eval_episodes=0, policy_kwargs={"net_arch": [8]})
        assert config.policy_kwargs == {"features_extractor_class": "MiniGridCNN", "net_arch": [8]}

    def test_an_environment_is_trained_with_sb3s_defaults(self):
        (config,) = plan_comparison(env="CartPole-v1", arms=["ppo"], seeds=1)
        assert config == RunConfig(env="CartPole-v1", arm="ppo", seed=0)
        assert (config.optimizer, dict(config.hyperparameters)) == ("Adam", {})
        assert (config.rounds, config.eval_episodes, config.drop, config.n_envs) == (50, 100, 0.125, 1)

    def test_runs_come_arm_by_arm_within_each_seed(self):
        found = [(config.seed, config.arm) for config in planned(arms=["random", "ppo"], seeds=3)]
        assert found == [(0, "random"), (0, "ppo"), (1, "random"), (1, "ppo"), (2, "random"), (2, "ppo")]

    @pytest.mark.parametrize(
        ("space", "policy", "extractor"),
        [
            (spaces.Box(0, 255, (36, 36, 3), np.uint8), "CnnPolicy", None),
            (spaces.Box(0, 255, (1, 36, 36), np.uint8), "CnnPolicy", None),
            (spaces.Box(0, 255, (7, 7, 3), np.uint8), "CnnPolicy", "MiniGridCNN"),
            (spaces.Box(0, 255, (3, 35, 90), np.uint8), "CnnPolicy", "MiniGridCNN"),
            (spaces.Box(0, 255, (5, 5, 1), np.uint8), "CnnPolicy", "MiniGridCNN"),
            (spaces.Box(0, 255, (4, 9, 3), np.uint8), "MlpPolicy", None),
            (spaces.Box(0, 1, (36, 36, 3), np.float32), "MlpPolicy", None),
            (spaces.Box(0, 255, (36,), np.uint8), "MlpPolicy", None),
            (spaces.Box(-1, 1, (4,), np.float32), "MlpPolicy", None),
            (spaces.Discrete(5), "MlpPolicy", None),
        ],
    )
    def test_the_policy_follows_from_what_is_observed(self, registered, space, policy, extractor):
        assert default_policy(space) == policy
        given = {"env_kwargs": {"space": space}, "policy_kwargs": {"net_arch": [8]}}
        # Plans build the model, so the network takes such images.
        configs = plan_comparison(env=registered("WhenceStill-v0", Still), arms=["ppo", "iif"], seeds=1, **given)
        assert [config.policy for config in configs] == [policy] * 2
        chosen = {} if extractor is None else {"features_extractor_class": extractor}
        assert all(config.policy_kwargs == {"net_arch": [8], **chosen} for config in configs)

    def test_observations_that_sb3_does_not_read_are_refused_with_the_part_to_observe(self):
        pytest.importorskip("minigrid")
        asked = {"env": "minigrid:MiniGrid-Empty-5x5-v0", "eval_episodes": 0}
        message = r"MissionSpace.*, which .* does not read\. Observe one part: --observe image \(of dir"
        with pytest.raises(WhenceError, match=message):
            configure(**asked)
        config = configure(**asked, observe="image")
        assert (config.policy, config.policy_kwargs) == ("CnnPolicy", {"features_extractor_class": "MiniGridCNN"})
        with pytest.raises(WhenceError, match=r"observes a Tuple.*, which .* does not read\. Register"):
            configure(env="Blackjack-v1")

    @pytest.mark.parametrize(
        ("device", "message"),
        [
            ("cuda", r"device is 'cuda', but torch .* finds 0 GPUs, .* --device cpu"),
            ("gpu", r"PPO refuses these settings: .*gpu"),
        ],
    )
    def test_a_device_that_is_not_there_is_refused(self, device, message, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(WhenceError, match=message):
            configure(env="CartPole-v1", device=device)
        assert configure(env="CartPole-v1", device="auto").device == "auto"

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"env": "FrozenLke-v1"}, r"No environment 'FrozenLke-v1' is registered.*Did you mean FrozenLake-v1, "),
            (
                {"preset": "frozenlake"},
                r"preset 'frozenlake' is unknown\. Did you mean paper/frozenlake, lda-code/frozenlake\?",
            ),
            ({"env": "CartPole-v1", "preset": "lda-code/frozenlake"}, "Give either an environment.* not both, not non"),
            ({"env": "CartPole-v1", "arms": ["ppo", "if"]}, r"arm 'if' is unknown\. Did you mean iif\?"),
            ({"env": "CartPole-v1", "arms": []}, r"arms is ''; name each arm once\. Known: ppo, iif, "),
            ({"env": "CartPole-v1", "optimizer": "SDG"}, r"optimizer 'SDG' is unknown\. Did you mean SGD\?"),
            ({"env": "CartPole-v1", "n_evns": 2}, r"A run has no 'n_evns'\. Did you mean n_envs"),
            ({"env": "CartPole-v1", "seed": 2}, r"A comparison has no 'seed': `seeds` says"),
            ({"env": "CartPole-v1", "seeds": 0}, "seeds is 0; at least 1 is needed, and 2 for intervals"),
            ({"env": "CartPole-v1", "eval_episodes": 1}, "eval_episodes is 1; a standard error needs 2"),
            ({"env": "CartPole-v1", "drop": 1.01}, r"drop is 1\.01; .* in \(0, 1\]"),
            (
                {"env": "CartPole-v1", "env_kwargs": {"wings": 2}},
                "'CartPole-v1' cannot be made with .'wings': 2.: .*wings",
            ),
        ],
    )
    def test_what_cannot_be_is_refused(self, given, message):
        with pytest.raises(WhenceError, match=message):
            plan_comparison(**{"arms": ["ppo"], "seeds": 1} | given)

    def test_an_error_inside_of_it_names_the_environment(self, registered):
        env = registered("WhenceWrapped-v0", lambda: {}["size"])
        with pytest.raises(WhenceError, match=r"'WhenceWrapped-v0' cannot be made: KeyError: 'size'") as caught:
            configure(env=env)
        assert isinstance(caught.value.__cause__, KeyError)

    def test_a_run_that_is_in_both_libraries_is_told_both_their_settings(self, monkeypatch):
        lake_spaces = {"observation_space": spaces.Discrete(16), "action_space": spaces.Discrete(4)}
        monkeypatch.setattr(Pool, "make", lambda *made: SimpleNamespace(**lake_spaces, close=lambda: None))
        asked = {"env": "FrozenLake-v1", "evaluate_with": "envpool"}
        with pytest.raises(WhenceError, match=r"would not reach EnvPool's environments.*pool_kwargs"):
            configure(**asked, env_kwargs={"is_slippery": True})
        for pool_kwargs in ({}, {"is_slippery": True}):  # an empty one says that there is nothing to change
            config = configure(**asked, env_kwargs={"is_slippery": True}, pool_kwargs=pool_kwargs)
            assert (config.env_kwargs, config.pool_kwargs) == ({"is_slippery": True}, pool_kwargs)
        # Where nothing is evaluated, Gymnasium's environments are all there are.
        assert configure(**asked, env_kwargs={"is_slippery": True}, eval_episodes=0).pool_kwargs == {}
        assert configure(**asked, pool_kwargs={"max_episode_steps": 9}).env_kwargs == {}

    @pytest.mark.filterwarnings(ENVPOOL_WARNS)
    @pytest.mark.parametrize("name", [name for name in read_presets() if name.startswith("lda-code/")])
    def test_every_preset_can_be_made(self, name):
        for module in ("Box2D", "envpool", "minigrid"):  # Box2D before EnvPool: see Pool.make
            pytest.importorskip(module)
        values = read_presets()[name]
        config = configure(preset=name)
        assert (config.env_kwargs, config.pool_kwargs) == (values["env_kwargs"], values.get("pool_kwargs", {}))

    @pytest.mark.filterwarnings(ENVPOOL_WARNS)
    def test_a_pool_is_trained_in_and_gymnasium_evaluated_in(self):
        for module in ("Box2D", "envpool"):
            pytest.importorskip(module)
        config = RunConfig("CartPole-v1", "ppo", 0, collect_with="envpool")
        test, trial = make_evaluation_env(config, 3), make_training_env(config)
        assert (type(test).__name__, test.num_envs) == ("DummyVecEnv", 3)
        assert (type(trial).__name__, trial.num_envs) == ("EnvPoolVecEnv", 1)

    def test_what_each_arm_reads(self):
        made = {name: RunConfig("FrozenLake-v1", name, 0) for name in ARMS}
        fields = ("drop", "warmup", "target", "engine")
        found = {name: {field for field in fields if config.reads(field)} for name, config in made.items()}
        assert found["ppo"] == found["td-error"] == set()
        assert found["nonpositive"] == {"warmup", "target", "engine"}
        assert found["advantage-1"] == {"drop", "warmup"}
        for name in ("iif", "mean", "negative-random", "random"):
            assert found[name] == set(fields)

    BOX, IMAGE = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(0, 255, (2, 2, 1), np.uint8)

    @pytest.mark.parametrize(
        ("observation", "action", "observations", "actions"),
        [
            (3, 2, spaces.Discrete(16), spaces.Discrete(4)),
            ([3, 4], [2, 0], spaces.Discrete(16), spaces.Discrete(4)),
            ([0, 0.1, 1], [0.5, 7, 0], BOX, BOX),  # a policy samples beyond an action's bounds
            ([0, 0.1, 1], 0.5, BOX, spaces.Box(-1, 1, (1,), np.float32)),
            ([[0, 0, 0], [0, 0, 0]], [[1, 0], [1, 1]], BOX, spaces.MultiBinary(2)),
            (np.full((2, 2, 1), 255).tolist(), [1, 2], IMAGE, spaces.MultiDiscrete([2, 3])),
            ({"a": [0, 0, 0], "b": 1}, 1, spaces.Dict(a=BOX, b=spaces.Discrete(2)), spaces.Discrete(2)),
        ],
    )
    def test_what_the_spaces_hold_can_be_asked_for(self, observation, action, observations, actions):
        check_action(Action(observation, action), observations, actions)

    @pytest.mark.parametrize(
        ("observation", "action", "observations", "actions", "message"),
        [
            (3, 0.7, spaces.Discrete(16), spaces.Discrete(4), r"action of the target is 0\.7; one of Discrete\(4\)"),
            (16, 0, spaces.Discrete(16), spaces.Discrete(4), r"observation of the target is 16; .* Discrete\(16\)"),
            ([[0, 0], [0]], 0, BOX, spaces.Discrete(4), "observation of the target is"),
            ([0, 0], 0, BOX, spaces.Discrete(4), r"observation of the target is \[0, 0\]; one of Box\("),
            (np.full((2, 2, 1), 256).tolist(), 0, IMAGE, spaces.Discrete(4), "observation of the target is"),
            ([0, 0, 1], [2, 0], BOX, spaces.MultiDiscrete([2, 3]), "action of the target is"),
            ({"a": [0, 0, 2]}, 0, spaces.Dict(a=BOX), spaces.Discrete(4), r"observation\.a of the target is"),
            (3, [1, 2], spaces.Discrete(16), spaces.Discrete(4), "not as many actions as observations"),
        ],
    )
    def test_what_they_do_not_hold_is_refused(self, observation, action, observations, actions, message):
        with pytest.raises(WhenceError, match=message):
            check_action(Action(observation, action), observations, actions)

    def test_a_run_asks_for_an_action_of_its_environment(self):
        asked = {"env": "FrozenLake-v1", "target": "action"}
        configure(**asked, target_args={"observation": 3, "action": 2})
        with pytest.raises(WhenceError, match=r"The action of the target is 9; .*Discrete\(4\)"):
            configure(**asked, target_args={"observation": 3, "action": 9})

    def test_planning_touches_no_generator(self):
        before = generators()
        planned()
        assert generators() == before


class Draw(gym.Env):
    """One step, whose reward is drawn when the episode begins and does not depend on the action."""

    observation_space, action_space = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, broken=False):
        self.broken = broken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.reward = float(self.np_random.integers(100))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.broken:
            raise RuntimeError("the pump is dry")
        return np.zeros(1, np.float32), self.reward, True, False, {}


class TestEvaluate:
    STILL_LAKE = LAKE | {"is_slippery": False}

    @pytest.fixture
    def model(self):
        return PPO("MlpPolicy", gym.make("FrozenLake-v1", **self.STILL_LAKE), device="cpu", seed=0)

    def test_actions_are_sampled_and_a_seed_decides_the_figures_whatever_came_before(self, model):
        env = make_evaluation_env(lake(self.STILL_LAKE), 20)
        first = mean, error = measure_return(model, env, episodes=20, seed=5)
        # The lake is not slippery, so that a policy without chance would reach the goal always or never.
        assert 0 < mean < 1
        assert error > 0
        random.random(), np.random.random(), torch.rand(3)
        measure_return(model, env, episodes=7, seed=1)
        assert measure_return(model, env, episodes=20, seed=5) == first
        fresh = make_evaluation_env(lake(self.STILL_LAKE), 20)
        assert measure_return(model, fresh, episodes=20, seed=5) == first
        assert len({measure_return(model, env, episodes=20, seed=seed)[0] for seed in range(3)}) > 1

    def test_the_environments_own_chance_follows_the_seed(self, model):
        env = make_evaluation_env(lake(LAKE), 3)
        with torch.no_grad():
            model.policy.action_net.weight.zero_()
            model.policy.action_net.bias.copy_(torch.tensor([0.0, 0.0, 100.0, 0.0]))  # always to the right
        found = [measure_return(model, env, episodes=30, seed=seed) for seed in (0, 1, 0, 1)]
        assert found[:2] == found[2:]
        assert len(set(found)) > 1

    def test_mean_and_standard_error_by_hand(self, registered):
        name = registered("WhenceDraw-v0", Draw)
        model = PPO("MlpPolicy", gym.make(name), device="cpu")
        env = make_evaluation_env(RunConfig(name, "ppo", 0), 5)
        assert env.num_envs == 5
        draws = [int(gym.utils.seeding.np_random(11 + index)[0].integers(100)) for index in range(5)]
        assert len(set(draws)) == 5
        mean = sum(draws) / 5
        error = math.sqrt(sum((draw - mean) ** 2 for draw in draws) / 4 / 5)
        assert measure_return(model, env, episodes=5, seed=11) == pytest.approx((mean, error), rel=1e-12)

    @pytest.mark.parametrize("broken", [False, True])
    def test_generators_and_modes_are_as_before(self, registered, broken):
        name = registered("WhenceDraw-v0", Draw)
        model = PPO("MlpPolicy", gym.make(name), device="cpu", seed=0)
        model.policy.set_training_mode(True)
        model.policy.mlp_extractor.eval()
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        np.random.standard_normal()  # leaves the second of a pair behind

        def state():
            modes = [module.training for module in model.policy.modules()]
            return generators(), modes

        before, parameters = state(), [parameter.clone() for parameter in model.policy.parameters()]
        env = make_evaluation_env(RunConfig(name, "ppo", 0, env_kwargs={"broken": broken}), 4)
        if broken:
            with pytest.raises(RuntimeError, match="the pump is dry"):
                measure_return(model, env, episodes=4, seed=9)
        else:
            measure_return(model, env, episodes=4, seed=9)
        assert state() == before
        assert all(map(torch.equal, parameters, model.policy.parameters()))


class TestComparison:
    def test_results_do_not_depend_on_the_process(self, in_this_process, in_worker):
        assert in_this_process.configs == in_worker.configs
        for config in in_this_process.configs:
            assert_same_results(in_this_process.run(config), in_worker.run(config))

    def test_it_holds_a_summary_and_each_run_these_files_and_no_others(self, in_worker):
        summary = json.loads((in_worker.path / "summary.json").read_text(encoding="utf-8"))
        assert summary == in_worker.summary
        assert list(summary) == ["FrozenLake-v1"]
        assert list(summary["FrozenLake-v1"]) == ARM_NAMES
        names = {"config.json", "metrics.parquet", "timings.parquet", "evaluations.parquet"}
        names |= {f"{folder}/round_0000{n}.parquet" for folder in ("records", "episodes") for n in (1, 2)}
        names |= {f"policies/round_0000{n}.safetensors" for n in (1, 2, 3)}
        names |= {f"checkpoints/round_0000{n}.safetensors" for n in (1, 2)}
        for config in in_worker.configs:
            assert {str(name) for name in stamps(in_worker.run(config).path)} == names
        top = {entry.name for entry in in_worker.path.iterdir()}
        assert top == {"runs", "comparison.json", "summary.json", ".lock"}

    def test_each_run_says_what_it_is(self, in_worker):
        for config in in_worker.configs:
            directory = in_worker.run(config)
            assert directory.experiment == config.to_json()
            assert directory.config["env_kwargs"].items() >= LAKE.items()
            hyperparameters = directory.config["hyperparameters"]
            assert hyperparameters.items() >= PPO_SMALL.items()
            assert hyperparameters.keys() >= HYPERPARAMETERS.keys()
            assert (directory.config["algorithm"], hyperparameters["gamma"]) == ("PPO", 0.99)
            assert RunConfig.from_json(directory.experiment) == config
            assert set(directory.versions) >= {"whence", "torch", "stable-baselines3", "gymnasium"}

    def test_tables_of_all_runs_below_each_other(self, in_worker):
        evaluations = in_worker.table("evaluations")
        assert evaluations.columns == ["round", "test_return", "standard_error", "episodes", "arm", "seed"]
        assert evaluations.select("arm", "seed", "round").rows() == [
            (arm, seed, number) for seed in (0, 1) for arm in ARM_NAMES for number in (0, 1, 2)
        ]
        assert set(evaluations["episodes"]) == {20}
        metrics = in_worker.table("metrics")
        assert metrics.select("arm", "seed", "round").rows() == [
            (arm, seed, number) for seed in (0, 1) for arm in ARM_NAMES for number in (1, 2)
        ]
        # Nothing is scored for an arm that needs no scores.
        unscored = metrics.filter(metrics["arm"] == "ppo")
        assert unscored["q50"].null_count() == len(unscored)
        assert metrics.filter(metrics["arm"] != "ppo")["q50"].null_count() == 0
        assert metrics["train/policy_gradient_loss"].null_count() == 0

    def test_seconds_count_scoring_only_where_it_is_the_arms_own(self, in_worker):
        for config in in_worker.configs:
            timings = in_worker.run(config).table("timings")
            expected = timings["collection_cpu"] + timings["optimisation_cpu"]
            if config.arm == "iif":
                expected = expected + timings["scoring_cpu"]
            found = read_curve(config, run_path(in_worker.path, config))
            assert found.seconds.tolist() == expected.to_list()
            assert found.returns.shape == found.standard_errors.shape == (3,)

    def test_arms_of_a_seed_start_alike(self, in_worker):
        for seed in (0, 1):
            runs = [in_worker.run(config) for config in in_worker.configs if config.seed == seed]
            first, *others = ((r.policy(1), r.table("evaluations").row(0), r.round("records", 1)) for r in runs)
            for policy, evaluation, records in others:
                assert_close(policy, first[0])
                assert evaluation == first[1]
                columns = ["record_id", "episode_id", "observation", "action", "reward", "advantage"]
                assert_frame_equal(records.select(columns), first[2].select(columns), check_exact=True)
            trained = [r.policy(3)["action_net.weight"] for r in runs]
            assert not torch.equal(trained[0], trained[1])
            assert not torch.equal(trained[1], trained[2])

    def test_every_round_is_reported(self, in_worker, watch):
        *finished, last = (f"{config.arm}/seed_{config.seed}" for config in in_worker.configs)
        assert watch.skipped == finished
        assert watch.reports == [(last, number) for number in (0, 1, 2)]
        assert watch.ends == {last: None}

    def test_finished_runs_are_not_repeated(self, in_worker):
        before, watch = stamps(in_worker.path / "runs"), Recorder()
        again = compare(planned(), in_worker.path, workers=2, watch=watch)
        assert stamps(in_worker.path / "runs") == before
        assert len(before) == 78
        assert watch.skipped == [f"{config.arm}/seed_{config.seed}" for config in planned()]
        assert watch.reports == []
        assert again.summary == in_worker.summary

    def test_killed_in_a_run_that_replaces_another_it_is_not_finished(self, in_worker, tmp_path, monkeypatch):
        def kill(jobs, workers, on_round):
            raise KeyboardInterrupt
            yield

        monkeypatch.setattr(cluster, "run_all", kill)
        copy_signed(in_worker.path, tmp_path / "again")
        with pytest.raises(KeyboardInterrupt):
            compare(planned(), tmp_path / "again", overwrite=True)
        with pytest.raises(WhenceError, match=r"comparison\.json is not there: .*again holds no finished comparison\."):
            load_comparison(tmp_path / "again")

    @pytest.mark.parametrize(
        "text",
        [
            '[{"env": "Fro',
            "\udcff",
            "3",
            '[{"env": "FrozenLake-v1"}]',
            '[{"env": "a", "arm": "iif", "seed": "0"}]',
        ],
    )
    def test_damage_is_named(self, tmp_path, text):
        (tmp_path / "comparison.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        (tmp_path / "summary.json").write_text('{"a": {"iif": {}}}')
        with pytest.raises(WhenceError, match=r"is no such file of a comparison .*give the same whence compare again"):
            load_comparison(tmp_path)


class TestRun:
    @pytest.mark.parametrize("optimizer", [pytest.param("Adam", marks=pytest.mark.long), "SGD"])
    def test_the_ppo_arm_is_plain_ppo(self, optimizer, tmp_path):
        config = one(optimizer=optimizer)
        with preserve_rng_state():
            run(config, tmp_path / "run")
            kwargs = {} if optimizer == "Adam" else {"policy_kwargs": {"optimizer_class": torch.optim.SGD}}
            plain = PPO("MlpPolicy", gym.make("FrozenLake-v1", **LAKE), seed=0, device="cpu", **PPO_SMALL, **kwargs)
            untrained = {name: tensor.clone() for name, tensor in plain.policy.state_dict().items()}
            plain.learn(ROUNDS * 64)
        found = RunDirectory.open(tmp_path / "run")
        assert_close(found.policy(1), untrained)
        assert_close(found.policy(3), dict(plain.policy.named_parameters()))
        assert not torch.equal(found.policy(3)["action_net.weight"], untrained["action_net.weight"])

    def test_an_unfinished_run_goes_on_and_a_finished_one_is_left_alone(self, in_worker, tmp_path):
        config = in_worker.configs[2]
        path, calls = tmp_path / "run", []
        copy_signed(run_path(in_worker.path, config), path)
        assert is_finished(config, path)
        before = stamps(path)
        run(config, path, lambda number, metrics: calls.append(number))
        assert stamps(path) == before
        assert calls == [2]
        found = RunDirectory.open(path).table("evaluations")
        found.head(2).write_parquet(path / "evaluations.parquet")  # stopped before the last evaluation
        (path / "records" / "round_00009.parquet").write_bytes(b"of another time")
        assert not is_finished(config, path)
        with pytest.raises(RunDirectoryError, match="holds an unfinished run; run it again to finish it"):
            read_curve(config, path)
        with preserve_rng_state():
            run(config, path, lambda number, metrics: calls.append(number))
        assert calls == [2, 2]
        assert is_finished(config, path)
        assert_same_results(RunDirectory.open(path), in_worker.run(config))

    def test_a_finished_run_goes_on_to_more_rounds_as_if_they_had_been_planned(self, tmp_path):
        settings = {"eval_episodes": 2, "eval_every": 2}
        with preserve_rng_state():
            run(one("iif", rounds=2, **settings), tmp_path / "whole")
            run(one("iif", rounds=1, **settings), tmp_path / "run")
            assert not is_finished(one("iif", rounds=2, **settings), tmp_path / "run")
            assert RunDirectory.open(tmp_path / "run").table("evaluations")["round"].to_list() == [0, 1]
            run(one("iif", rounds=2, **settings), tmp_path / "run")
        longer, whole = RunDirectory.open(tmp_path / "run"), RunDirectory.open(tmp_path / "whole")
        assert_same_results(longer, whole)
        assert longer.config == whole.config
        assert "resumed" not in longer.notes

    def test_more_rounds_of_other_settings_and_fewer_rounds_are_refused(self, in_worker):
        path = run_path(in_worker.path, in_worker.configs[0])
        before = stamps(path)
        with pytest.raises(RunDirectoryError, match=r"\(experiment\.rounds was 2, now 1\)"):
            run(one(rounds=1), path)
        with pytest.raises(RunDirectoryError, match=r"\(experiment\.drop was 0\.5, now 0\.25\)"):
            run(one(rounds=3, drop=0.25), path)
        assert stamps(path) == before


class TestRefusals:
    def test_runs_of_another_configuration_are_refused_before_anything_is_trained(self, tmp_path):
        # The last of the runs to come, so that all the others would have been trained before it.
        config = planned(drop=0.25)[-1]
        RunDirectory.create(run_path(tmp_path, config), {"experiment": config.to_json()})
        before, watch = stamps(tmp_path), Recorder()
        with pytest.raises(RunDirectoryError, match=r"random.seed_1 holds a run .*drop was 0\.25, now 0\.5"):
            compare(planned(), tmp_path, workers=1, watch=watch)
        assert stamps(tmp_path) == before
        assert watch.reports == watch.skipped == []

    def test_arms_without_the_standard_are_refused(self, tmp_path):
        with pytest.raises(WhenceError, match="The arms iif, random lack 'ppo', which the others are measured against"):
            compare(planned(arms=["iif", "random"]), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_every_arm_is_data(self):
        assert next(iter(ARMS)) == "ppo"
        made = {name: RunConfig("FrozenLake-v1", name, 7, drop=0.3, warmup=2).rule() for name in ARMS}
        assert {name: (repr(rule), counts_scoring(name)) for name, rule in made.items()} == {
            "ppo": ("KeepAll()", False),
            "iif": ("IIF(drop=0.3, warmup=2)", True),
            "mean": ("BelowMean(drop=0.3, warmup=2)", True),
            "nonpositive": ("NonPositive(warmup=2)", True),
            "negative-random": ("NegativeRandom(drop=0.3, seed=7, warmup=2)", True),
            "random": ("RandomDrop(drop=0.3, seed=7, warmup=2, zeros=False)", False),
            "dtv": ("DTV(leave_one_out=False, warmup=2)", True),
            "dtv-loo": ("DTV(leave_one_out=True, warmup=2)", True),
            "advantage-magnitude": ("AdvantageMagnitude(drop=0.3, warmup=2)", True),
            "advantage-1": ("AdvantageMismatch(order='distance', drop=0.3, warmup=2)", True),
            "advantage-2": ("AdvantageMismatch(order='product', drop=0.3, warmup=2)", True),
            "td-error": ("TDErrorPriority(exponent=0.6)", True),
            "ppo-lr-0.5": ("KeepAll()", False),
            "ppo-lr-2": ("KeepAll()", False),
            "ppo-lr-4": ("KeepAll()", False),
        }
        for arm in (*ARMS.values(), *LANGUAGE_ARMS.values()):  # what `whence list arms` says of them
            rule = arm.make_rule(drop=0.3, keep=2)
            assert ("unit" in rule.__dataclass_fields__) == (arm.unit == ANY)
            assert getattr(rule, "needs_groups", False) == (arm.needs == GROUPS)
            assert rule.needs_influence == (arm.needs == SCORES)
        control = RunConfig("FrozenLake-v1", "random-iif", 7, drop=0.3, unit="episode")
        assert repr(control.rule().like) == "IIF(drop=0.3, warmup=0, unit='episode')"
        assert control.rule().seed == 7
        assert control.reads("unit")
        assert not counts_scoring("random-iif")

    def test_a_name_that_no_arm_has_is_refused(self, tmp_path):
        with pytest.raises(WhenceError, match=r"The arm 'iff' is unknown\. Did you mean iif"):
            configure(env="CartPole-v1", arm="iff")
        config = RunConfig("CartPole-v1", "iif-guarded", 0)  # a study's
        with pytest.raises(WhenceError, match=r"The arm 'iif-guarded' is unknown"):
            run(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        assert [place_arm(name) for name in ("td-error", "ppo-matched", "ppo-lr-0.5")] == [11, 11.5, 12]
        assert [counts_scoring(name) for name in ("iif", "iif-guarded", "ppo-matched")] == [True, True, False]


def test_a_run_that_fails_is_named_and_nothing_is_summarised(tmp_path, monkeypatch):
    configs = planned(arms=["ppo", "iif"])
    jobs = []

    def fail(todo, workers, on_round):
        jobs.extend(todo)
        yield 3, "the pump is dry"

    monkeypatch.setattr(cluster, "run_all", fail)
    with pytest.raises(WhenceError, match=r"The run of arm iif, seed 1, failed: the pump is dry"):
        compare(configs, tmp_path / "out")
    assert [path for _, path in jobs] == [run_path(tmp_path / "out", config) for config in configs]
    assert not (tmp_path / "out" / "summary.json").exists()
