"""Reading SB3's policies and buffers, and training on a selection."""

import copy
import json
import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import TRPO, MaskablePPO
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

import whence
from helpers.toys import Toy, model
from whence import InvalidRecords, Return, Selection, Unsupported, attribute
from whence.core import as_view, named_leaves
from whence.sb3 import InfluenceCallback, RecordResets, collect, snapshot
from whence.sb3.episodes.resets import STATE
from whence.sb3.rounds.rollout_buffer import Ongoing, number_episodes
from whence.sb3.rounds.sampling import select_from


def test_a_view_reads_the_parameters_it_is_given_and_puts_the_policys_own_back() -> None:
    # One features extractor stands under three names here.
    policy = model(observation="image").policy
    records = collect(model(observation="image"))
    before = {name: (id(p), p.requires_grad) for name, p in policy.named_parameters()}
    view = as_view(policy)
    assert set(view.parameters()) == set(dict(policy.named_parameters()))
    zeros = {name: torch.zeros_like(p) for name, p in view.parameters().items()}
    for _ in range(2):
        outputs = view(zeros, view.prepare(records))
        torch.testing.assert_close(outputs.log_prob, torch.full((len(records),), 1 / 3).log())
    assert {name: (id(p), p.requires_grad) for name, p in policy.named_parameters()} == before


class Snoop(InfluenceCallback):
    """Keep a copy of the buffer as it was when the rollout ended."""

    def _on_rollout_end(self) -> None:
        self.raw = copy.deepcopy({n: array for n, array in vars(self.model.rollout_buffer).items() if n in ARRAYS})
        super()._on_rollout_end()


ARRAYS = ("observations", "actions", "rewards", "advantages", "returns", "episode_starts", "log_probs", "values")


def test_a_snapshot_is_environment_by_environment_and_ids_are_time_steps() -> None:
    toy = model(n_envs=3, n_steps=16, batch_size=16)
    callback = Snoop(whence.KeepAll())
    toy.learn(96, callback=callback)
    records = callback.round.records
    for environment in range(3):
        for step in (0, 7, 15):
            row = environment * 16 + step
            assert int(records.ids[row]) == 48 + step * 3 + environment
            assert int(records.env_index[row]) == environment
            for name in ARRAYS:
                mine = getattr(records, name)[row]
                theirs = torch.as_tensor(callback.raw[name][step, environment])
                assert torch.equal(mine.reshape(-1).float(), theirs.reshape(-1).float()), name
    assert (records.gamma, records.gae_lambda) == (0.99, 0.95)


def test_episodes_are_numbered_and_carried_into_the_next_rollout() -> None:
    starts = np.array([[1, 0], [0, 0], [1, 0], [0, 1]], dtype=bool)
    ids, steps, ongoing = number_episodes(starts, Ongoing.unknown(starts.shape[1]))
    assert ids[:, 0].tolist() == [0, 0, 1, 1]
    assert ids[:, 1].tolist() == [2, 2, 2, 3]
    assert steps[:, 0].tolist() == [0, 1, 0, 1]
    assert steps[:, 1].tolist() == [-1, -1, -1, 0]
    assert ongoing.next_id == 4
    ids, steps, ongoing = number_episodes(np.array([[0, 0], [1, 0]], dtype=bool), ongoing)
    assert ids.T.tolist() == [[1, 4], [3, 3]]
    assert steps.T.tolist() == [[2, 0], [1, 2]]
    assert ongoing.lengths.tolist() == [1, 3]
    unknown = number_episodes(np.zeros((2, 1), bool), Ongoing.unknown(1))[2]
    assert unknown.lengths.tolist() == [-1]


def test_a_buffer_that_is_not_full_or_was_trained_on_is_refused() -> None:
    toy = model()
    with pytest.raises(InvalidRecords, match=r"holds 0 of 32 steps.*on_rollout_end.*collect"):
        snapshot(toy)
    toy.learn(32)
    with pytest.raises(InvalidRecords, match=r"flattened by train\(\)"):
        snapshot(toy)


def test_collect_trains_nothing_and_leaves_the_buffer() -> None:
    toy = model(n_envs=2)
    before = copy.deepcopy(toy.policy.state_dict())
    first, second = collect(toy), collect(toy)
    assert all(torch.equal(before[name], tensor) for name, tensor in toy.policy.state_dict().items())
    assert not toy.rollout_buffer.full
    assert first.ids.max() + 1 == second.ids.min() == 64
    assert not torch.equal(first.observations, second.observations)
    assert attribute(toy.policy, second, target=Return()).scores.shape == (64,)


def test_collect_leaves_the_counts_and_the_logger_of_a_loaded_model(tmp_path: Any) -> None:
    toy = model(n_envs=2, normalised=True)
    toy.learn(128)
    toy.save(tmp_path / "model")
    loaded = PPO.load(
        tmp_path / "model", env=model(n_envs=2, normalised=True).env, device="cpu", print_system_info=False
    )
    before = dict(vars(loaded))
    records = collect(loaded)
    assert sorted(records.ids.tolist()) == list(range(128, 192))
    assert records.episode_starts[0] == 1
    changed = {name for name, value in vars(loaded).items() if name not in before or value is not before[name]}
    assert changed == {"num_timesteps", "_last_obs", "_last_original_obs", "_last_episode_starts"}


class OwnTrain(PPO):
    def train(self) -> None:
        super().train()


class OwnBuffer(RolloutBuffer):
    def get(self, batch_size: int | None = None) -> Any:
        return super().get(batch_size)


def override(owner: str, name: str) -> Any:
    """Return a model of which an object has an attribute in place of a method."""
    toy = model()
    changed = toy.rollout_buffer if owner == "buffer" else toy
    setattr(changed, name, getattr(changed, name))
    return toy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: override("model", "train"), r"PPO overrides train\(\)"),
        (lambda: override("buffer", "get"), r"RolloutBuffer overrides get\(\)"),
        (lambda: DQN("MlpPolicy", Toy(), buffer_size=10), "DQN is not supported: it is not on-policy"),
        (lambda: OwnTrain("MlpPolicy", Toy()), r"OwnTrain overrides train\(\).*Use PPO"),
        (lambda: PPO("MlpPolicy", Toy(), rollout_buffer_class=OwnBuffer), r"OwnBuffer overrides get\(\).*SB3's own"),
        (lambda: TRPO("MlpPolicy", Toy()), "TRPO is not supported: its loss is not known to whence"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_before_training(make: Any, message: str) -> None:
    unsupported = make()
    with pytest.raises(Unsupported, match=message):
        unsupported.learn(16, callback=InfluenceCallback(whence.KeepAll()))
    assert unsupported.num_timesteps == 0
    for function in (snapshot, collect):
        with pytest.raises(Unsupported, match=message):
            function(unsupported)


def all_state(toy: Any) -> dict[str, Any]:
    """Everything that scoring must leave as it is, as bytes and plain values."""
    policy, buffer = toy.policy, toy.rollout_buffer
    optimizer = policy.optimizer.state_dict()["state"]
    return {
        "parameters": {name: p.detach().numpy().tobytes() for name, p in policy.named_parameters()},
        "gradients": {n: None if p.grad is None else p.grad.numpy().tobytes() for n, p in policy.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in policy.named_parameters()},
        "identity": {name: id(p) for name, p in policy.named_parameters(remove_duplicate=False)},
        "modes": [module.training for module in policy.modules()],
        "hooks": [(len(module._forward_hooks), len(module._backward_hooks)) for module in policy.modules()],
        "tensor hooks": [p._backward_hooks for p in policy.parameters()],
        "optimizer": {(k, n): torch.as_tensor(v).numpy().tobytes() for k, s in optimizer.items() for n, v in s.items()},
        "buffer": {
            (name, leaf): array.tobytes()
            for name in ARRAYS
            for leaf, array in named_leaves(getattr(buffer, name), name)
        },
        "buffer attributes": set(vars(buffer)),
        "model attributes": set(vars(toy)),
        "class": type(toy),
        "generators": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().numpy().tobytes()),
        "dist": set(vars(policy.action_dist)),
        "exploration": getattr(policy.action_dist, "exploration_mat", torch.zeros(0)).detach().numpy().tobytes(),
        "statistics": toy.env.obs_rms.mean.tobytes() if isinstance(toy.env, VecNormalize) else None,
    }


PURE: list[tuple[Any, dict[str, Any]]] = [
    (PPO, {"observation": "image", "action": "box"}),
    (PPO, {"n_envs": 8, "n_steps": 8}),
    (A2C, {"normalised": True}),
    (MaskablePPO, {"action": "multidiscrete"}),
    (PPO, {"observation": "dict", "action": "gsde"}),
    (A2C, {"action": "squashed", "n_envs": 8, "n_steps": 8}),
]


@pytest.mark.parametrize(
    ("algorithm", "kwargs", "engine"),
    [
        pytest.param(*case, engine, marks=() if place == 0 or engine == "ghost" else pytest.mark.long)
        for place, case in enumerate(PURE)
        for engine in ("ghost", "forward", "vmap", "loop")
    ],
)
def test_scoring_changes_nothing_also_when_it_raises(algorithm: Any, kwargs: dict[str, Any], engine: str) -> None:
    toy = model(algorithm, **kwargs)
    toy.learn(64)  # so that the optimiser has a state and parameters have gradients
    records = collect(toy)
    toy.policy.train()
    toy.policy.mlp_extractor.policy_net[0].eval()
    calls = []

    def target(view: whence.PolicyView, params: Any, records: whence.RecordBatch) -> Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        calls.append(None)
        return view(params, view.prepare(records)).log_prob.mean()

    def failing(view: whence.PolicyView, params: Any, records: whence.RecordBatch) -> Tensor:
        return target(view, params, records) / 0  # not finite: raises after the passes over the records

    before = all_state(toy)
    attribute(toy.policy, records, target={"a": target, "b": Return()}, engine=engine)
    assert calls
    assert all_state(toy) == before
    with pytest.raises(whence.NonFinite):
        attribute(toy.policy, records, target=failing, engine=engine)
    assert all_state(toy) == before
    if not toy.use_sde:  # gSDE's noise carries a graph in SB3 itself, scored or not
        copy.deepcopy(toy.policy)


def filled(n_steps: int = 32, **kwargs: Any) -> Any:
    toy = model(n_steps=n_steps, batch_size=n_steps, **kwargs)
    toy.learn(n_steps * toy.n_envs)
    return toy


def test_get_yields_the_kept_records_in_sb3s_order() -> None:
    buffer = filled(n_envs=2).rollout_buffer
    rows = [3, 10, 11, 40, 41, 63, 7]
    np.random.seed(5)
    order = np.random.permutation(64)
    after_permutation = np.random.get_state()[1].tobytes()
    expected = [row for row in order if row in rows]
    selection = Selection.dropping(torch.isin(torch.arange(64), torch.tensor(rows)), "test")
    with select_from(buffer, selection):
        np.random.seed(5)
        batches = list(buffer.get(3))
        assert np.random.get_state()[1].tobytes() == after_permutation
    assert [len(batch.advantages) for batch in batches] == [3, 4]  # the last one, alone, joined
    got = torch.cat([batch.advantages for batch in batches])
    assert torch.equal(got, torch.from_numpy(buffer.advantages[expected, 0]))
    assert vars(buffer).keys() == vars(filled().rollout_buffer).keys()


def test_weights_that_differ_become_sampling_probabilities() -> None:
    buffer = filled().rollout_buffer
    weights = torch.zeros(32)
    weights[4], weights[9] = 1, 3
    selection = Selection(weights > 0, weights, [None if w else "no" for w in weights])
    with select_from(buffer, selection):
        np.random.seed(0)
        draws = torch.cat([b.advantages for _ in range(50) for b in buffer.get(8)])
    assert len(draws) == 50 * 32
    share = (draws == float(buffer.advantages[9, 0])).float().mean()
    assert set(draws.tolist()) == {float(buffer.advantages[row, 0]) for row in (4, 9)}
    assert float(share) == pytest.approx(0.75, abs=0.03)


def test_resets_are_recorded_without_being_changed() -> None:
    def play(env: gym.Env[Any, Any]) -> tuple[list[Any], list[str]]:
        observations, states = [], []
        for seed in (7, None, None):
            observation, info = env.reset(seed=seed)
            observations.append(observation)
            states.append(info.get(STATE))
        return observations, states

    plain, _ = play(Toy())
    wrapped, states = play(RecordResets(Toy()))
    assert all((a == b).all() for a, b in zip(plain, wrapped, strict=True))
    assert json.loads(states[0])["seed"] == 7
    assert "PCG64" in states[1]
