"""Advantages by fresh rollouts: many records at once, held against the exact ones."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from sb3_contrib import MaskablePPO

from helpers.episodes import learn, train
from whence import ReplayError, RunDirectory, WhenceError
from whence.core import preserve_rng_state
from whence.sb3 import RecordResets
from whence.sb3.episodes.episode_replay import open_env, read_episode, reset_to, to_env_actions
from whence.stored.agents import estimate_advantages, make_replay_env
from whence.stored.agents.rounds import load_agent

pytest.importorskip("Box2D")  # before EnvPool: see Pool.make


class Counting(gym.Env):
    """It counts its steps and adds some noise."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._state = 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._state += 1.0 + float(action) + self.np_random.normal()
        observation = np.array([self._state], np.float32)
        return observation, float(action) + self._state / 10, bool(self._state > 12), False, {}


def play_plainly(run, number, record, count, seed):
    """The estimate of one record with environments of its own, each played up to it: what the batch has to equal."""
    row = run.round("records", number).filter(pl.col("record_id") == record)
    stored, step = read_episode(run, row["episode_id"][0]), row["step"][0]
    model, make_env = load_agent(run, number), make_replay_env(run)
    *env_seeds, action_seed = np.random.SeedSequence([seed, record]).spawn(count + 1)
    returns, envs = np.zeros(2 * count), [RecordResets(make_env()) for _ in range(2 * count)]
    observations = [None] * len(envs)
    with open_env(make_env) as first:
        actions = to_env_actions(stored.records["action"].to_numpy(), first.action_space, squashed=False)
    with preserve_rng_state():
        for at, env in enumerate(envs):
            observations[at], _ = reset_to(env, stored.generator_state)
            for action in actions[:step]:
                observations[at] = env.step(action)[0]
            env.unwrapped.np_random = np.random.default_rng(env_seeds[at % count])
        torch.manual_seed(int(action_seed.generate_state(1)[0]))
        alive, discount, passed = list(range(2 * count)), 1.0, 0
        while alive:
            chosen = model.predict(np.stack([np.asarray(observations[at]) for at in alive]), deterministic=False)[0]
            going = []
            for at, action in zip(alive, chosen, strict=True):
                taken = actions[step] if passed == 0 and at < count else action
                observations[at], reward, terminated, truncated, _ = envs[at].step(taken)
                returns[at] += discount * float(reward)
                if truncated and not terminated:
                    value = model.policy.predict_values(model.policy.obs_to_tensor(observations[at])[0])
                    returns[at] += discount * model.gamma * float(value)
                if not (terminated or truncated):
                    going.append(at)
            alive, discount, passed = going, discount * model.gamma, passed + 1
    return returns


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    return train(tmp_path_factory.mktemp("lake") / "run", preset="lda-code/frozenlake", n_steps=512)


@pytest.mark.parametrize("name", ["lda-code/frozenlake", "lda-code/lunarlander"])
def test_a_batch_has_the_numbers_of_each_record_alone(tmp_path, name):
    settings = {"preset": name} if "/" in name else {"env": name}
    run = train(tmp_path / "run", n_steps=128, **settings)
    records = run.round("records", 2)
    chosen = [int(record) for record in records["record_id"].to_numpy()[[90, 3, 127]]]
    table = estimate_advantages(run, 2, chosen, continuations=3, seed=5)
    assert table["record_id"].to_list() == chosen
    for row in table.iter_rows(named=True):
        returns = play_plainly(run, 2, row["record_id"], 3, 5)
        differences = returns[:3] - returns[3:]
        assert row["mc_advantage"] == pytest.approx(differences.mean(), abs=1e-12)
        assert row["mc_error"] == pytest.approx(differences.std(ddof=1) / np.sqrt(3), abs=1e-12)
        assert row["mc_value"] == pytest.approx(returns[3:].mean(), abs=1e-12)
        assert row["mc_value_error"] == pytest.approx(returns[3:].std(ddof=1) / np.sqrt(3), abs=1e-12)
    alone = estimate_advantages(run, 2, chosen[:1], continuations=3, seed=5)
    assert alone.rows() == table.rows()[:1]
    if name != "lda-code/frozenlake":  # where hardly any continuation reaches the goal
        assert alone.rows() != estimate_advantages(run, 2, chosen[:1], continuations=3, seed=6).rows()


def test_an_estimate_ends_between_two_steps_by_what_is_raised_there(lake):
    calls = []

    def end():
        calls.append(None)
        if len(calls) == 3:
            raise WhenceError("another record was opened")

    with pytest.raises(WhenceError, match=r"^another record was opened$"):
        estimate_advantages(lake, 1, lake.round("records", 1)["record_id"].to_list()[:1], continuations=2, on_step=end)
    assert len(calls) == 3


class OneForbidden(Counting):
    """It rewards the action that it forbids."""

    def action_masks(self):
        return np.array([True, False])


def test_continuations_take_allowed_actions_only(tmp_path):
    run = learn(tmp_path / "run", OneForbidden(), algorithm=MaskablePPO)
    records = run.round("records", 1)["record_id"].to_list()[:6]
    table = estimate_advantages(run, 1, records, env=OneForbidden, continuations=3)
    # Every continuation takes the one allowed action, so that those of a pair are the same.
    assert table.select("mc_advantage", "mc_error").to_numpy().tolist() == [[0.0, 0.0]] * 6
    with pytest.raises(ReplayError, match="action_masks"):
        estimate_advantages(run, 1, records, env=Counting, continuations=3)


class Echo(gym.Env):
    """Its state never changes, and its reward is the action: without noise all continuations are alike."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.full(2, 0.5, np.float32), {}

    def step(self, action):
        self._step += 1
        return np.full(2, 0.5, np.float32), float(action[0]), self._step == 4, False, {}


@pytest.mark.parametrize("every", [-1, 1])
def test_gsde_gives_each_continuation_noise_of_its_own(tmp_path, every):
    run = learn(tmp_path / "run", Echo(), use_sde=True, sde_sample_freq=every, gamma=1.0)
    first, second = (run.round("records", 1)["record_id"].to_list()[start] for start in (0, 4))
    table = estimate_advantages(run, 1, [first, second], env=Echo, continuations=200)
    one, other = table["mc_value"].to_list()
    assert one != other
    assert abs(one - other) < 4 * float(np.hypot(*table["mc_value_error"].to_list()))
    # Four actions share their noise, or each has its own.
    error = table["mc_value_error"][0] * np.sqrt(200)
    assert (error > 2.5) == (every < 0)
    assert error > 1


def test_records_have_randomness_of_their_own_and_the_global_generators_are_left_alone(lake):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    # Two records of one state and one action would otherwise have the same errors, which then do not average out.
    records = lake.round("records", 1)
    pair = records.filter((pl.col("observation") == 0) & (pl.col("action") == 2) & (pl.col("step") == 0))
    first, second = pair["record_id"].to_list()[:2]
    one, other = (estimate_advantages(lake, 1, [record], continuations=32)["mc_value"][0] for record in (first, second))
    assert one != other
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_estimates_are_as_far_from_the_truth_as_their_errors_say(lake, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from studies.diagnosis.run import policy_table, solve

    records = lake.round("records", 2)
    rows = records.gather_every(9).head(50)
    model = load_agent(lake, 2)
    with open_env(make_replay_env(lake)) as env:
        values, advantages = solve(env.unwrapped.P, policy_table(model), model.gamma)
    table = estimate_advantages(lake, 2, rows["record_id"].to_list(), continuations=24)
    at = rows["observation"].to_numpy()
    true = advantages[at, rows["action"].to_numpy()]
    known = table["mc_error"].to_numpy() > 0
    distance = ((table["mc_advantage"].to_numpy() - true) / np.maximum(table["mc_error"].to_numpy(), 1e-12))[known]
    assert known.mean() > 0.3
    assert abs(distance.mean()) < 0.6
    assert 0.5 < distance.std() < 1.6
    assert np.abs(table["mc_value"].to_numpy() - values[at]).mean() < 0.05


def test_what_cannot_be_estimated_is_refused(lake, tmp_path):
    with pytest.raises(ReplayError, match="at least 2"):
        estimate_advantages(RunDirectory(Path(tmp_path), {}, {}), 1, [0], continuations=1)
    with pytest.raises(ReplayError, match="Record 99999 is not in round 1"):
        estimate_advantages(lake, 1, [99999])
    records = lake.round("records", 1)
    unknown = records.with_columns(step=pl.lit(None, pl.Int64))
    lake.write_round("records", 1, unknown)
    try:
        with pytest.raises(ReplayError, match="no known place in an episode"):
            estimate_advantages(lake, 1, records["record_id"].to_list()[:1])
    finally:
        lake.write_round("records", 1, records)
