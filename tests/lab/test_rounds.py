"""Recorded rounds: done again by SB3 bit for bit, by the differentiable replay up to rounding; and their scores."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor

from helpers.recorded_rounds import OPTIMIZERS, SMALL, assert_untouched, model_of, recorded, replay, state_of
from helpers.toys import assert_close
from whence import IIF, Return, RoundRecording, WhenceError, attribute
from whence.core import NonFinite, Unsupported
from whence.lab import attribute_round
from whence.lab.rounds import METHODS, optimizers, retrain, round_scores
from whence.lab.rounds.replay import (
    clip_factor,
    iterate_points,
    minibatch_loss,
    objective_values,
    open_round,
    target_gradient,
)
from whence.lab.rules import TDErrorPriority
from whence.rounds import OptimizerState
from whence.sb3 import replay_round as replay_sb3

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


class Dicts(gym.Env):
    """Observations in two parts, actions in two."""

    observation_space = spaces.Dict({"where": spaces.Box(-1, 1, (3,)), "what": spaces.Discrete(4)})
    action_space = spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        return self._observe(), float(action[0] - action[1]), False, self._steps >= 7, {}

    def _observe(self):
        return {"where": self.np_random.uniform(-1, 1, 3).astype(np.float32), "what": int(self.np_random.integers(4))}


CASES = {
    **{name: {"name": name} for name in OPTIMIZERS},
    **{name: {} for name in ("filtered", "drawn by weight")},
    "target_kl": {"target_kl": 1e-4, "learning_rate": 0.1},
    "values clipped": {"clip_range_vf": 0.01},
    "entropy": {"ent_coef": 0.05},
    "schedules": {"learning_rate": lambda left: 0.01 * (1 + left), "clip_range": lambda left: 0.1 * (1 + left)},
    "a clip range that ends at 0": {"clip_range": lambda left: 0.2 * left},
    "advantages as they are": {"normalize_advantage": False},
    "no clipping": {"name": "SGD", "max_grad_norm": float("inf")},
    "a short last minibatch": {"batch_size": 24},
    "dict observations": {"env": Dicts, "policy": "MultiInputPolicy"},
    "continuous": {"env": "Pendulum-v1"},
    "states by number": {"env": "FrozenLake-v1"},
    "masked actions": {"env": lambda: InvalidActionEnvDiscrete(dim=6, n_invalid_actions=3), "algorithm": MaskablePPO},
    "a2c": {},
}
"""Settings of models."""


def record_case(name):
    """Return a case's model, and the recording of its second round."""
    rules = {"filtered": IIF(drop=1.0), "drawn by weight": TDErrorPriority()}
    model = model_of(**CASES[name])
    if name == "a2c":
        model = A2C("MlpPolicy", make_vec_env("CartPole-v1", n_envs=2, seed=0), n_steps=16, seed=0, device="cpu")
    return model, recorded(model, rules.get(name))


LIKE_ANOTHER = {*OPTIMIZERS} - {"SGD with momentum", "Adam decoupled", "RMSprop centred"}
LIKE_ANOTHER |= {"a clip range that ends at 0", "advantages as they are", "no clipping", "a short last minibatch"}
LIKE_ANOTHER |= {"entropy", "continuous", "states by number"}
"""Cases that long tests have. A step of each optimiser is held against torch's own below."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long if name in LIKE_ANOTHER else ()) for name in CASES],
)
def case(request):
    return request.param, *record_case(request.param)


class TestReplay:
    def test_sb3_does_the_round_again_bit_for_bit(self, case):
        _, model, recording = case
        assert any(not torch.equal(recording.start[name], recording.end[name]) for name in recording.end)
        before = state_of(model)
        again = replay_sb3(model, recording)
        assert_untouched(before, state_of(model))
        assert again.keys() == recording.end.keys()
        assert_close(again, recording.end)

    def test_the_differentiable_replay_agrees(self, case):
        name, model, recording = case
        if name == "target_kl":
            assert recording.stopped
        before = state_of(model)
        again = replay(model.policy, recording)
        assert_untouched(before, state_of(model))
        scale = max(float(recording.end[name].abs().max()) for name in again)
        assert_close(again, recording.end, 1e-6 * scale)

    def test_a_saved_recording_is_the_same(self, case, tmp_path):
        _, model, recording = case
        recording.save(tmp_path / "round.safetensors")
        loaded = RoundRecording.load(tmp_path / "round.safetensors")
        again = replay_sb3(model, loaded)
        assert_close(again, recording.end)
        assert loaded.update == recording.update
        assert loaded.records.fingerprint == recording.records.fingerprint
        assert list(loaded.epochs) == list(recording.epochs)
        assert loaded.optimizer.settings == recording.optimizer.settings

    def test_records_of_no_weight_are_as_good_as_absent(self):
        model = model_of("SGD", normalize_advantage=True)
        recording = recorded(model)
        keep = torch.rand(len(recording.records), generator=torch.Generator().manual_seed(0)) < 0.5
        shorter = [minibatch[keep[minibatch]] for minibatch in recording.minibatches]
        assert min(len(minibatch) for minibatch in shorter) > 1
        absent = replay_sb3(model, replace(recording, minibatches=shorter))
        weightless = replay(model.policy, recording, weights=keep.float())
        assert_close(weightless, absent, 1e-6)

    def test_a_minibatch_without_weight_is_no_step(self):
        model = model_of("Adam")
        recording = recorded(model)
        *_, other, last = recording.minibatches  # of one epoch
        weights = torch.ones(len(recording.records))
        weights[last] = 0
        both = replace(recording, minibatches=[other, last], epochs=[0, 0])
        ended = replay(model.policy, both, weights=weights)
        alone = replay(model.policy, replace(recording, minibatches=[other], epochs=[0]))
        assert_close(ended, alone)
        assert any(not torch.equal(ended[name], recording.start[name]) for name in ended)


@pytest.fixture(
    scope="module",
    params=[
        *("SGD with momentum", "AdamW"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("SGD unclipped", "RMSprop")),
    ],
)
def small(request):
    """A small round, far from the clip, and the policy."""
    rate = {"SGD unclipped": 0.01, "SGD": 0.1, "SGD with momentum": 0.1}.get(request.param, 1e-3)
    most = float("inf") if request.param == "SGD unclipped" else 0.5
    settings = {"learning_rate": rate, "clip_range": 10.0, "ent_coef": 0.01, "n_epochs": 2, "max_grad_norm": most}
    model = model_of(request.param, n_envs=1, **settings)
    return request.param, model, recorded(model, rounds=2)


class TestScores:
    @pytest.mark.parametrize(
        "name",
        [
            *("a2c", "values clipped", "target_kl", "dict observations", "masked actions", "RMSprop centred", "AdamW"),
            *(pytest.param(name, marks=pytest.mark.long) for name in ("SGD with momentum", "SGD unclipped")),
            # Of these the replay is tested above, and the losses differ in nothing that is differentiated otherwise.
            *(
                pytest.param(name, marks=pytest.mark.long)
                for name in ("advantages as they are", "continuous", "entropy")
            ),
            *(pytest.param(name, marks=pytest.mark.long) for name in ("a short last minibatch", "filtered")),
        ],
    )
    def test_unrolled_is_the_derivative_by_weights(self, name):
        model, recording = record_case(name)
        n, step, target = len(recording.records), 1e-4, Return()
        scores = attribute_round(model.policy, recording, target=target, method="unrolled", dtype=torch.float64).scores
        moved = step * torch.eye(n, dtype=torch.float64)
        ended = retrain(model.policy, recording, torch.cat([1 + moved, 1 - moved]), dtype=torch.float64)
        round = open_round(model.policy, recording, dtype=torch.float64)
        by_row = ({name: tensor[row] for name, tensor in ended.items()} for row in range(2 * n))
        with torch.no_grad():
            outcomes = torch.stack([target(round.view, params, round.records) for params in by_row])
        numeric = (outcomes[:n] - outcomes[n:]) / (2 * step)
        assert float((scores - numeric).abs().max() / numeric.abs().max()) < 1e-6

    def test_trajectory_is_the_sum_of_what_the_loop_gives_each_step(self, small):
        _, model, recording = small
        by_loop = torch.zeros(len(recording.records), dtype=torch.float64)
        round = open_round(model.policy, recording, dtype=torch.float64)
        policy = model_of(n_envs=1).policy.double()

        def target(view, params, records):  # of the whole rollout, whichever records are scored
            return Return()(view, params, round.records)

        for number, point in zip(range(len(round)), iterate_points(round), strict=False):
            policy.load_state_dict(round.unflatten(point.params), strict=False)
            records = round.minibatch(number).records
            advantages = (records.advantages - records.advantages.mean()) / (records.advantages.std() + 1e-8)
            normalised = records.with_advantages(advantages)
            by_step = attribute(
                policy, normalised, target=target, objective=recording.update.objective(), engine="loop"
            )
            by_loop[recording.steps[number]] += by_step.scores
        influence = attribute_round(model.policy, recording, target=Return(), method="trajectory", dtype=torch.float64)
        assert torch.allclose(influence.scores, by_loop, rtol=0, atol=1e-9 * float(by_loop.abs().max()))

    @pytest.mark.parametrize(
        ("name", "rounds"),
        [
            *((name, 2) for name in ("SGD with momentum", "RMSprop with momentum", "RMSprop centred")),
            ("SGD damped", 1),  # before the first there is no momentum
            *(
                pytest.param(name, 2, marks=pytest.mark.long)
                for name in ("SGD", "SGD damped", "SGD of no momentum", "RMSprop")
            ),
            pytest.param("SGD with momentum", 1, marks=pytest.mark.long),
        ],
    )
    def test_for_small_steps_momentum_gives_the_derivative_less_its_mean(self, name, rounds, monkeypatch):
        # A weight also makes the minibatch larger, which takes its mean from every record's share. And it changes
        # RMSprop's scale, which the scores take as it stood.
        safe_sqrt = optimizers.safe_sqrt
        monkeypatch.setattr(optimizers, "safe_sqrt", lambda squares: safe_sqrt(squares).detach())
        settings = {"n_envs": 1, "batch_size": 32, "normalize_advantage": False, "max_grad_norm": 1e9}
        model = model_of(name, learning_rate=1e-6, **settings)
        recording = recorded(model, rounds=rounds)
        arguments = {"target": Return(), "dtype": torch.float64}
        exact = attribute_round(model.policy, recording, method="unrolled", **arguments)
        carried = attribute_round(model.policy, recording, method="optimizer-momentum", **arguments)
        expected = carried.scores - carried.scores.mean()
        assert torch.allclose(exact.scores, expected, rtol=0, atol=1e-3 * float(exact.scores.abs().max()))

    def test_adams_momentum_is_what_its_updates_carry_of_a_gradient(self):
        # Every update holds (1 - b) b^m of the gradient m before it, its bias corrected by its own count.
        model = model_of("Adam", n_envs=1, n_epochs=2, learning_rate=1e-3)
        recording = recorded(model, rounds=2)
        settings = recording.optimizer.settings
        first, second = settings["betas"]
        round = open_round(model.policy, recording, dtype=torch.float64)
        ascents = []
        for before, after in pairwise(iterate_points(round)):
            free = {name: p.detach().requires_grad_() for name, p in round.unflatten(before.params).items()}
            value = Return()(round.view, free, round.records)
            gradients = torch.autograd.grad(value, list(free.values()), materialize_grads=True, allow_unused=True)
            scaled, count = {}, after.state["step"]
            squares = round.unflatten(after.state["exp_avg_sq"])
            for gradient, (name, square) in zip(gradients, squares.items(), strict=True):
                root = (square / (1 - second**count)).sqrt()
                scaled[name] = gradient / (root + settings["eps"]) / (1 - first**count)
            ascents.append(scaled)
        expected = torch.zeros(len(round.records), dtype=torch.float64)
        for number, (index, point) in enumerate(zip(recording.steps, iterate_points(round), strict=False)):
            minibatch, ones = round.minibatch(number), torch.ones(len(index), dtype=torch.float64)
            params = round.unflatten(point.params)
            arguments = {"minibatch": minibatch, "weights": ones}
            gradients = torch.func.grad(partial(minibatch_loss, round, **arguments))(params)
            jacobian = torch.func.jacrev(partial(objective_values, round, **arguments))(params)
            gradient = torch.cat([one.flatten() for one in gradients.values()])
            factor = settings["lr"] * clip_factor(gradient, recording.update.max_grad_norm) / len(index)
            for ago, later in enumerate(ascents[number:]):
                products = sum((jacobian[name].flatten(1) * g.flatten()).sum(1) for name, g in later.items())
                expected[index] += factor * (1 - first) * first**ago * products
        arguments = {"target": Return(), "method": "optimizer-momentum", "dtype": torch.float64}
        scores = attribute_round(model.policy, recording, **arguments).scores
        assert torch.allclose(scores, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))

    def test_several_methods_share_the_targets_gradients(self, small, monkeypatch):
        _, model, recording = small
        settings = {"target": Return(), "dtype": torch.float64}
        alone = {method: attribute_round(model.policy, recording, method=method, **settings) for method in METHODS}
        gradients = []
        monkeypatch.setattr(
            round_scores, "target_gradient", lambda *args: gradients.append(None) or target_gradient(*args)
        )
        together = attribute_round(model.policy, recording, method=METHODS[::-1], **settings)
        assert list(together) == list(METHODS[::-1])
        for method, one in together.items():
            assert torch.allclose(one.scores, alone[method].scores, rtol=1e-9, atol=0)
            assert one.provenance == alone[method].provenance
        # One at each step; "unrolled" takes one at the end.
        assert len(gradients) == len(recording.steps) + 1

    @pytest.mark.parametrize("method", METHODS)
    def test_records_that_did_not_train_score_zero(self, method):
        model = model_of()
        recording = recorded(model, IIF(drop=1.0))
        trained = torch.zeros(len(recording.records), dtype=torch.bool)
        trained[torch.cat(list(recording.steps))] = True
        scores = attribute_round(model.policy, recording, target=Return(), method=method).scores
        assert 0 < int(trained.sum()) < len(trained)
        assert bool((scores[~trained] == 0).all())
        assert bool((scores[trained] != 0).all())


@pytest.fixture(scope="module")
def long():
    """A round of 24 steps, longer than a step's own memory hides, and the policy."""
    model = model_of("Adam", n_envs=2, n_epochs=6, learning_rate=1e-3, policy_kwargs={"net_arch": [64, 64]})
    return model, recorded(model)


class TestMemory:
    @pytest.mark.parametrize("method", ["optimizer-momentum", "unrolled"])
    def test_points_made_again_change_nothing(self, long, method):
        model, recording = long
        short = replace(recording, minibatches=recording.minibatches[:7], epochs=recording.epochs[:7])
        round = open_round(model.policy, short, dtype=torch.float64)
        whole = round_scores.score_steps(round, Return(), [method], 1)[method]
        assert len(whole) == 7
        for interval in (2, 3, 7):
            again = round_scores.score_steps(round, Return(), [method], interval)[method]
            assert all(torch.allclose(x, y, rtol=1e-9, atol=0) for x, y in zip(whole, again, strict=True)), interval

    def test_as_many_points_are_stored_as_fit(self, long):
        model, recording = long
        round = open_round(model.policy, recording)
        # Of 24 steps, every second point, a segment, the point after it and the derivative are 16.
        for points, interval in ((27, 1), (26, 2), (16, 2), (15, 3), (1, 5)):
            assert round_scores._choose_interval(round, points * round.start.nbytes) == interval
        scores = [
            attribute_round(model.policy, recording, target=Return(), method="unrolled", memory=memory).scores
            for memory in (1, 2**31)
        ]
        assert torch.equal(*scores)


class Dropping(FlattenExtractor):
    """Observations of which training drops a half."""

    def forward(self, observations):
        return torch.nn.functional.dropout(super().forward(observations), 0.5, self.training)


def test_a_round_that_was_trained_with_dropout_is_none_to_step_through():
    model = model_of(policy_kwargs={"features_extractor_class": Dropping})
    recording = recorded(model)
    model.policy.train()
    model.policy.mlp_extractor.eval()
    before = state_of(model)
    score = lambda: attribute_round(model.policy, recording, target=Return())  # noqa: E731
    for refused in (lambda: replay(model.policy, recording), score):
        with pytest.raises(Unsupported, match=r"log_prob differs between train .* eval mode.*sb3\.replay"):
            refused()
    assert_untouched(before, state_of(model))
    modes = {name: module.training for name, module in model.policy.named_children()}
    assert modes.pop("mlp_extractor") is False
    assert all(modes.values())
    again = replay_sb3(model, recording)
    assert_close(again, recording.end)
    assert_untouched(before, state_of(model))


class Centred(FlattenExtractor):
    """Observations less their mean over the minibatch."""

    def forward(self, observations):
        features = super().forward(observations)
        return features - features.mean(0)


def test_a_policy_that_mixes_records_is_refused_for_that():
    model = model_of(policy_kwargs={"features_extractor_class": Centred})
    with pytest.raises(Unsupported, match=r"changes by up to .* the other records"):
        replay(model.policy, recorded(model))


def test_an_optimiser_of_some_parameters_is_recorded_if_the_others_are_frozen():
    model = model_of()
    model.policy.optimizer = torch.optim.Adam(model.policy.action_net.parameters())
    with pytest.raises(Unsupported, match=r"does not hold `mlp_extractor\.policy_net\.0\.weight`"):
        recorded(model)
    model.policy.mlp_extractor.requires_grad_(False)
    model.policy.value_net.requires_grad_(False)
    recording = recorded(model)
    after = replay(model.policy, recording)
    assert after.keys() == {"action_net.weight", "action_net.bias"}
    assert_close(after, {name: recording.end[name] for name in after}, 1e-5)


@pytest.mark.parametrize("which", ["it begins", "it ends"])
def test_rounds_that_diverge(which):
    model = model_of("SGD", max_grad_norm=float("inf"))
    recording = recorded(model)
    if which == "it begins":
        start = {**recording.start, "action_net.bias": torch.full((2,), float("nan"))}
        broken, message = replace(recording, start=start), r"Round 2 began with `action_net\.bias` not finite"
    else:
        settings = {**recording.optimizer.settings, "lr": 1e38}
        optimizer = replace(recording.optimizer, settings=settings)
        broken, message = replace(recording, optimizer=optimizer), "Training round 2 diverged: "
    with pytest.raises(NonFinite, match=message):
        replay(model.policy, broken)
    with pytest.raises(NonFinite, match=message if which == "it begins" else "diverged"):
        attribute_round(model.policy, broken, target=Return())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_torchs_even_after_unequal_steps(name):
    shapes = {"one": (3, 2), "other": (4,)}
    parameters = {key: torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for key, shape in shapes.items()}
    optimizer = getattr(torch.optim, name.split()[0])(parameters.values(), lr=0.1, **OPTIMIZERS[name])

    def step_on(names):
        for parameter_name, parameter in parameters.items():
            parameter.grad = torch.randn_like(parameter) if parameter_name in names else None
        optimizer.step()

    step_on(["one"])
    for _ in range(2):
        tensors = {key: dict(optimizer.state[p]) for key, p in parameters.items() if p in optimizer.state}
        copies = {key: {k: v.clone() for k, v in of.items() if v is not None} for key, of in tensors.items()}
        settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        recorded_state = OptimizerState(type(optimizer).__name__, settings, copies)
        state = optimizers.initial_state(recorded_state, parameters)
        before = torch.cat([p.detach().flatten() for p in parameters.values()])
        step_on(parameters)
        gradient = torch.cat([p.grad.flatten() for p in parameters.values()])
        params, _ = optimizers.step(recorded_state, before, gradient, state)
        expected = torch.cat([p.detach().flatten() for p in parameters.values()])
        assert torch.allclose(params, expected, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def round():
    model = model_of()
    return model, recorded(model)


class TestRefusals:
    def test_another_policy(self, round):
        _, recording = round
        with pytest.raises(WhenceError, match=r"of another policy: `.*` has shape"):
            replay(model_of(policy_kwargs={"net_arch": [9]}).policy, recording)
        with pytest.raises(WhenceError, match="of another policy: only one"):
            replay(model_of(policy_kwargs={"net_arch": [8, 8]}).policy, recording)
        with pytest.raises(WhenceError, match="optimiser is Adam, the model's SGD"):
            replay_sb3(model_of("SGD"), recording)

    @pytest.mark.parametrize("env", ["CartPole-v1", Dicts, "Pendulum-v1"])
    def test_another_policy_of_the_same_shapes(self, env):
        kind = "MultiInputPolicy" if env is Dicts else "MlpPolicy"
        recording = recorded(model_of(env=env, policy=kind))
        other = model_of(env=env, policy=kind, policy_kwargs={"activation_fn": torch.nn.ReLU})
        before = state_of(other)
        for refused in (
            lambda: replay(other.policy, recording),
            lambda: attribute_round(other.policy, recording, target=Return(), dtype=torch.float64),
            lambda: replay_sb3(other, recording),
        ):
            with pytest.raises(WhenceError, match=r"of another policy: .* round 2 .* log-probs"):
                refused()
        assert_untouched(before, state_of(other))

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (-torch.ones(64), "weight is negative or not finite"),
            (torch.full((64,), float("nan")), "weight is negative or not finite"),
            (torch.zeros(64), "keeps 0 of 64 records .*fewer than two"),
            (torch.eye(64)[3], "keeps 1 of 64 records .*weight above 0"),
        ],
    )
    def test_weights_that_cannot_be(self, round, weights, message):
        model, recording = round
        with pytest.raises(WhenceError, match=message):
            replay(model.policy, recording, weights=weights)

    def test_an_optimiser_that_is_not_known(self):
        class Custom(torch.optim.SGD):
            pass

        vec_env = make_vec_env("CartPole-v1", n_envs=1, seed=0)
        model = PPO("MlpPolicy", vec_env, device="cpu", policy_kwargs={"optimizer_class": Custom}, **SMALL)
        recording = recorded(model, rounds=1)
        again = replay_sb3(model, recording)
        assert_close(again, recording.end)
        with pytest.raises(Unsupported, match="optimiser Custom cannot be replayed"):
            replay(model.policy, recording)
