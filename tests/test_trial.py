"""Trials of rounds: scores of whole rounds, the guard, advantages normalised once."""

import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO

import toys
from test_rounds import Dicts, Dropping, assert_untouched, model_of, rising, state_of
from whence import (
    A2C,
    IIF,
    Action,
    KeepAll,
    PPOClip,
    Return,
    Selection,
    TDErrorPriority,
    WhenceError,
    attribute,
    attribute_crossfit,
    attribute_round,
)
from whence.crossfitting import assign_folds
from whence.errors import Unsupported
from whence.experiments.rl.research_callback import ResearchCallback
from whence.experiments.rl.scoring import SCORES, Scoring
from whence.experiments.rl.trial import Trial, held_out_gain, normalise_advantages, restrict_recording
from whence.rounds import METHODS, replay
from whence.sb3 import InfluenceCallback, collect, replay_round
from whence.sb3.state import named_tensors

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")

CASES = {
    "adam": lambda: model_of(),
    "schedules": lambda: model_of(learning_rate=rising, clip_range=lambda left: 0.1 * (1 + left), n_envs=3),
    "target_kl": lambda: model_of(target_kl=1e-4, learning_rate=0.1),
    "momentum": lambda: model_of("SGD with momentum"),
    "dict observations": lambda: model_of(env=Dicts, policy="MultiInputPolicy"),
    "dict observations, masked actions": lambda: toys.model(MaskablePPO, observation="dict", n_envs=2),
}


class Watching(InfluenceCallback):
    """Makes a trial of every round before it is trained, and stores both recordings."""

    def __init__(self):
        super().__init__(KeepAll(), recordings=range(1, 9))
        self.pairs = []

    def choose(self, records):
        trial = Trial(self.model, self.next_round, self.progress_remaining)
        before = state_of(self.model)
        buffer = dict(vars(self.model.rollout_buffer))
        seen = buffer["observations"]
        parts = dict(seen) if isinstance(seen, dict) else {}
        self.trial_recording = trial.train(records, KeepAll().select(records))
        assert_untouched(before, state_of(self.model))
        assert all(value is buffer[name] for name, value in vars(self.model.rollout_buffer).items())
        assert all(seen[name] is part for name, part in parts.items())
        return super().choose(records)

    def train_selected(self, train, selection):
        super().train_selected(train, selection)
        self.pairs.append((self.trial_recording, self.recording))


@pytest.mark.parametrize("name", CASES)
def test_a_trial_is_the_round_to_come_and_leaves_no_trace(name):
    model, watching = CASES[name](), Watching()
    steps = 3 * model.n_steps * model.n_envs
    model.learn(steps, callback=watching)
    assert len(watching.pairs) == 3
    for tried, trained in watching.pairs:
        assert all(torch.equal(tried.end[key], trained.end[key]) for key in trained.end)
        assert [m.tolist() for m in tried.minibatches] == [m.tolist() for m in trained.minibatches]
        assert tried.update == trained.update
        assert tried.optimizer.settings == trained.optimizer.settings
        assert tried.stopped == trained.stopped
    plain = CASES[name]()
    plain.learn(steps)
    for key, tensor in named_tensors(plain.policy).items():
        assert torch.equal(tensor, named_tensors(model.policy)[key])


def test_trials_are_silent(capsys):
    model = model_of(target_kl=1e-4, learning_rate=0.1, verbose=1)
    model.learn(3 * 64, callback=Watching())
    assert capsys.readouterr().out.count("Early stopping") == 3  # of the rounds themselves


class ScoreAndKeepAll(KeepAll):
    needs_influence = True


@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_scored_as_it_is_trained(method):
    model = model_of()
    callback = ResearchCallback(ScoreAndKeepAll(), method=method, recordings=[2])
    model.learn(2 * 64, callback=callback)
    expected = attribute_round(model.policy, callback.recording, target=Return(), method=method)
    assert torch.equal(callback.round.influence.scores, expected.scores)
    assert callback.round.influence.engine == method
    plain = model_of()
    plain.learn(2 * 64)
    assert all(torch.equal(t, named_tensors(model.policy)[k]) for k, t in named_tensors(plain.policy).items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "unroled"}, "unrolled"),
        ({"method": "unrolled", "engine": "loop"}, "no effect"),
        ({"method": "unrolled", "objective": PPOClip()}, "no effect"),
        ({"method": "crossfit", "target": Action([0.0, 0.0, 0.0, 0.0], 1)}, "Take Return"),
        ({"method": "crossfit", "target": lambda view, params, records: None}, "Take Return"),
        ({"method": "unrolled", "draws": 64}, "only 'smoothed' reads draws"),
        ({"method": "smoothed", "draws": 0}, "at least 1 is needed"),
        ({"advantage_norm": "bufer"}, "buffer"),
        ({"advantage_norm": "buffer", "recordings": [1]}, "recordings"),
    ],
)
def test_what_does_not_go_together_is_refused_at_the_door(arguments, message):
    with pytest.raises(WhenceError, match=message):
        ResearchCallback(IIF(), **arguments)


def test_draws_and_memory_are_those_asked_for():
    model = model_of()
    callback = ResearchCallback(ScoreAndKeepAll(), method="smoothed", draws=3, recordings=[1])
    model.learn(64, callback=callback)
    expected = attribute_round(model.policy, callback.recording, target=Return(), method="smoothed", draws=3)
    assert torch.equal(callback.round.influence.scores, expected.scores)
    for method in SCORES:
        model = model_of()
        with pytest.raises(WhenceError, match="memory is 1,000 bytes"):
            model.learn(64, callback=ResearchCallback(ScoreAndKeepAll(), method=method, memory=1000))


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [("NAdam", {}, "The optimiser NAdam cannot"), ("Adam", {"amsgrad": True}, "Adam with amsgrad=True cannot")],
)
def test_steps_that_cannot_be_gone_through_are_refused_at_the_door(optimizer, settings, message, tmp_path):
    def make():
        policy_kwargs = {"optimizer_class": getattr(torch.optim, optimizer), "optimizer_kwargs": settings}
        return model_of(policy_kwargs=policy_kwargs)

    refused = make()
    with pytest.raises(Unsupported, match=f"{message}.*take method='snapshot' or 'crossfit'"):
        refused.learn(64, callback=ResearchCallback(IIF(), method="unrolled", run=tmp_path / "run"))
    assert refused.num_timesteps == 0
    assert not (tmp_path / "run").exists()
    make().learn(64, callback=ResearchCallback(IIF(), guard=True))  # which lets SB3 step


def test_a_policy_of_two_minds_is_refused_at_the_door(tmp_path):
    refused = model_of(policy_kwargs={"features_extractor_class": Dropping})
    generator, modes = torch.get_rng_state(), [module.training for module in refused.policy.modules()]
    with pytest.raises(Unsupported, match=r"log_prob differs between train mode and eval mode.*\(whence\.attribute\)"):
        refused.learn(64, callback=ResearchCallback(IIF(), method="unrolled", run=tmp_path / "run"))
    assert refused.num_timesteps == 0
    assert not (tmp_path / "run").exists()
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in refused.policy.modules()] == modes
    refused.learn(64, callback=ResearchCallback(IIF(), method="crossfit", guard=True))


@pytest.mark.parametrize(
    ("observation", "action"),
    [("vector", "squashed"), ("discrete", "multidiscrete"), ("multidiscrete", "multibinary"), ("image", "gsde")],
)
def test_a_policy_of_one_mind_passes_the_door_whatever_its_spaces(observation, action):
    model = toys.model(observation=observation, action=action, n_envs=2, normalised=observation == "vector")
    callback = ResearchCallback(ScoreAndKeepAll(), method="unrolled")
    model.learn(64, callback=callback)
    assert bool(callback.round.influence.scores.any())


def test_all_methods_of_scoring():
    assert set(SCORES) == {
        *("snapshot", "crossfit", "trajectory", "optimizer", "optimizer-momentum", "unrolled", "smoothed"),
    }
    assert Scoring.create("snapshot").target == Return()


# Cross-fitting


@pytest.fixture(scope="module")
def rollout():
    model = model_of(n_steps=64)
    return model, collect(model)


def test_each_fold_is_scored_by_the_others(rollout):
    model, records = rollout
    for objective in (PPOClip(), A2C(ent_coef=0.1)):
        fold = assign_folds(records, 3)
        crossfit = attribute_crossfit(model.policy, records, folds=3, objective=objective)
        for number in range(3):
            others = records.take(fold != number)
            alone = attribute(
                model.policy,
                records,
                target=lambda view, params, scored, others=others: Return()(view, params, others),
                objective=objective,
                engine="loop",
            )
            inside = fold == number
            largest = alone.scores.abs().max()
            assert (crossfit.scores[inside] - alone.scores[inside]).abs().max() <= 1e-5 * largest
            assert (crossfit.scores[~inside] - alone.scores[~inside]).abs().max() > 1e-2 * largest


def test_folds_keep_episodes_whole(rollout):
    _, records = rollout
    fold = assign_folds(records, 2)
    assert fold.bincount().min() > 0
    for env in (0, 1):
        for episode in records.episode_ids[records.env_index == env].unique():
            folds = fold[(records.env_index == env) & (records.episode_ids == episode)]
            assert len(folds.unique()) == 1


def test_fewer_episodes_than_folds_are_cut_into_stretches():
    model = model_of(env="Pendulum-v1", n_steps=9)
    records = collect(model)  # two environments, one episode each, 9 steps of either
    assert assign_folds(records, 3).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] * 2
    assert assign_folds(records, 2).tolist() == [0] * 9 + [1] * 9


def test_folds_that_cannot_be(rollout):
    _, records = rollout
    for folds in (1, 129):
        with pytest.raises(WhenceError, match="from 2 to the number of records"):
            assign_folds(records, folds)
    nameless = records.with_columns({"episode_ids": None})
    with pytest.raises(WhenceError, match="episode_ids"):
        assign_folds(nameless, 2)
    with pytest.raises(WhenceError, match="or use attribute"):
        attribute_crossfit(rollout[0].policy, records, target=Action([0.0] * 4, 1))


# Advantages normalised once


def test_advantages_are_normalised_once_over_the_rollout():
    model, seen = model_of(), []

    class Seeing(ResearchCallback):
        def train_selected(self, train, selection):
            buffer = self.model.rollout_buffer
            raw = buffer.advantages.copy()

            def observed_train():
                assert not self.model.normalize_advantage
                seen.extend(part.advantages for part in buffer.get(16))
                train()

            super().train_selected(observed_train, selection)
            assert self.model.normalize_advantage
            assert np.array_equal(buffer.advantages, buffer.swap_and_flatten(raw))

    callback = Seeing(IIF(1.0), advantage_norm="buffer")
    model.learn(64, callback=callback)
    raw, keep = callback.round.records.advantages, callback.round.selection.keep
    assert 2 < int(keep.sum()) < 64
    # Less the mean over all 64, over the standard deviation with n - 1, whatever was dropped.
    expected = ((raw - raw.mean()) / raw.std())[keep].sort().values
    assert torch.allclose(torch.cat(seen).flatten().sort().values, expected, atol=1e-5)


def test_normalised_over_the_buffer_by_hand():
    model = model_of()
    model.learn(64)
    buffer = model.rollout_buffer
    buffer.generator_ready = False
    raw = np.arange(64, dtype=np.float32).reshape(32, 2)
    buffer.advantages = raw
    with normalise_advantages(model):
        assert not model.normalize_advantage
        assert np.allclose(buffer.advantages, (raw - 31.5) / np.sqrt((64**2 - 1) / 12 * 64 / 63), atol=1e-6)
    assert buffer.advantages is raw
    assert model.normalize_advantage
    among = torch.arange(64) < 16  # steps 0 to 15 of the first environment, whose advantages are even
    for flat in (False, True):
        buffer.generator_ready = flat
        buffer.advantages = buffer.swap_and_flatten(raw) if flat else raw
        with normalise_advantages(model, among):
            normalised = buffer.advantages if flat else buffer.swap_and_flatten(buffer.advantages)
            by_hand = (np.arange(0, 32, 2) - 15) / np.sqrt((16**2 - 1) / 12 * 4 * 16 / 15)
            assert np.allclose(normalised[:16, 0], by_hand)
            assert np.allclose(normalised[32, 0], (1 - 15) / np.sqrt((16**2 - 1) / 12 * 4 * 16 / 15))


@pytest.mark.parametrize("method", METHODS)
def test_a_round_on_advantages_normalised_once_is_scored_as_it_is_trained(method):
    model, seen = model_of(), {}

    class Trying(ResearchCallback):
        def choose(self, records):
            trial = Trial(self.model, self.next_round, self.progress_remaining, advantage_norm="buffer")
            seen["recording"] = trial.train(records, KeepAll().select(records))
            return super().choose(records)

    callback = Trying(ScoreAndKeepAll(), method=method, advantage_norm="buffer")
    model.learn(2 * 64, callback=callback)
    recording, raw = seen["recording"], callback.round.records.advantages
    for name, tensor in named_tensors(model.policy).items():
        assert torch.equal(tensor, recording.end[name])
        assert torch.equal(tensor, replay_round(model, recording)[name])
    assert torch.allclose(recording.records.advantages, (raw - raw.mean()) / raw.std(), atol=1e-5)

    def of_raw(view, params, records):
        return Return()(view, params, records.with_advantages(raw))

    influence = callback.round.influence
    expected, normalised = (
        attribute_round(model.policy, recording, target=target, method=method) for target in (of_raw, Return())
    )
    assert torch.equal(influence.scores, expected.scores)
    assert not torch.allclose(influence.scores * normalised.scores.norm(), normalised.scores * influence.scores.norm())
    assert influence.provenance.target == "Return()"
    assert influence.provenance.records == callback.round.records.fingerprint


def test_with_everything_kept_in_one_minibatch_both_norms_are_one():
    trained = []
    for norm in ("minibatch", "buffer"):
        model = model_of(batch_size=64, n_epochs=2)
        model.learn(128, callback=ResearchCallback(KeepAll(), advantage_norm=norm))
        trained.append(named_tensors(model.policy))
    for key, tensor in trained[0].items():
        assert torch.allclose(tensor, trained[1][key], rtol=0, atol=1e-5), key


# The guard


class Chosen:
    """Keep what raises the target most, or least."""

    needs_influence = True

    def __init__(self, sign):
        self.sign = sign

    def select(self, records, influence, progress=None):
        order = (self.sign * influence.scores).argsort(descending=True)
        keep = torch.zeros(len(records), dtype=torch.bool)
        keep[order[: len(records) // 2]] = True
        return Selection.dropping(keep, "for the test")


def test_the_gain_by_hand():
    model = model_of()

    class Trying(InfluenceCallback):
        def choose(self, records):
            trial = Trial(self.model, 1, 1.0)
            fold = assign_folds(records, 2)

            def select(among):
                assert torch.equal(among, fold == 0) or torch.equal(among, fold == 1)
                return Selection.dropping(records.advantages[among] > 0, "for the test")

            before = state_of(self.model)
            self.gain = held_out_gain(trial, records, select)
            assert_untouched(before, state_of(self.model))
            expected = 0.0
            for half in range(2):
                training = fold == half
                values = []
                for keep in (training, training & (records.advantages > 0)):
                    end = trial.train(records, Selection.dropping(keep, "")).end
                    values.append(centred_surrogate(end, records.take(~training)))
                expected += float((~training).float().mean()) * (values[1] - values[0])
            self.expected = expected
            return super().choose(records)

    trying = Trying(KeepAll())
    model.learn(64, callback=trying)
    assert trying.gain == pytest.approx(trying.expected, rel=1e-5)
    assert abs(trying.expected) > 1e-6


def centred_surrogate(params, records):
    twin = model_of()
    twin.policy.load_state_dict(params, strict=False)
    with torch.no_grad():
        _, log_probs, _ = twin.policy.evaluate_actions(records.observations, records.actions)
    advantages = records.advantages - records.advantages.mean()
    return float(((log_probs - records.log_probs).exp() * advantages).mean())


def test_an_advantage_that_all_records_share_has_no_say():
    model = model_of()
    gains, raw = {}, {}

    class Trying(InfluenceCallback):
        def choose(self, records):
            trial, fold = Trial(self.model, 1, 1.0), assign_folds(records, 2)
            keep = torch.arange(len(records)) % 3 > 0
            ratios = []
            for half in range(2):
                training = fold == half
                for mask in (training, training & keep):
                    end = trial.train(records, Selection.dropping(mask, "")).end
                    ratios.append(mean_ratio_of(end, records.take(~training)) * float((~training).float().mean()))
            drift = ratios[1] - ratios[0] + ratios[3] - ratios[2]
            for shift in (0.0, 1e4, -1e4):  # what trains is the buffer's, and the same
                shifted = records.with_advantages(records.advantages + shift)
                gains[shift] = held_out_gain(trial, shifted, lambda among: Selection.dropping(keep[among], ""))
                raw[shift] = gains[0.0] + shift * drift
            return super().choose(records)

    model.learn(64, callback=Trying(KeepAll()))
    assert raw[1e4] * raw[-1e4] < 0  # raw advantages would turn the verdict with the shift
    assert gains[1e4] == pytest.approx(gains[0.0], rel=1e-2)
    assert gains[-1e4] == pytest.approx(gains[0.0], rel=1e-2)


def mean_ratio_of(params, records):
    twin = model_of()
    twin.policy.load_state_dict(params, strict=False)
    with torch.no_grad():
        _, log_probs, _ = twin.policy.evaluate_actions(records.observations, records.actions)
    return float((log_probs - records.log_probs).exp().mean())


@pytest.mark.parametrize("method", ["snapshot", "optimizer"])
def test_the_guard_falls_back_where_selecting_does_harm(method):
    # One gentle step on a rollout of many episodes, so that what half of them say holds for the other half.
    settings = {"n_steps": 512, "batch_size": 1024, "n_epochs": 2, "learning_rate": 0.01}
    fell_back = {}
    for sign in (1, -1):
        model = model_of("SGD", **settings)
        callback = ResearchCallback(Chosen(sign), guard=True, method=method)
        model.learn(3 * 1024, callback=callback)
        fell_back[sign] = [row["fell_back"] for row in callback.metrics]
        for row in callback.metrics:
            assert row["fell_back"] == (row["held_out_gain"] < 0)
            assert row["kept"] == (1024 if row["fell_back"] else 512)
    assert fell_back == {1: [False] * 3, -1: [True] * 3}
    plain = model_of("SGD", **settings)
    plain.learn(3 * 1024)  # every round fell back
    assert all(torch.equal(t, named_tensors(model.policy)[k]) for k, t in named_tensors(plain.policy).items())


def test_a_round_of_some_records_knows_no_others():
    model = model_of(n_steps=128, target_kl=0.05)

    class Trying(InfluenceCallback):
        def choose(self, records):
            self.among = assign_folds(records, 2) == 0
            trial = Trial(self.model, 1, 1.0)
            self.whole = trial.train(records, Selection.dropping(self.among, ""))
            return super().choose(records)

    trying = Trying(KeepAll())
    model.learn(256, callback=trying)
    whole, some = trying.whole, restrict_recording(trying.whole, trying.among)
    assert 2 < len(some.records) < 254
    assert torch.equal(some.records.ids, whole.records.ids[trying.among])
    for restricted, minibatch in zip(some.minibatches, whole.minibatches, strict=True):
        assert torch.equal(some.records.ids[restricted], whole.records.ids[minibatch])
    for name, tensor in replay(model.policy, some).items():
        assert torch.allclose(tensor, whole.end[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["minibatch", "buffer"])
@pytest.mark.parametrize("method", SCORES)
def test_a_half_is_scored_by_what_it_says_itself(method, norm):
    model, influences = model_of(n_steps=128), []

    class Trying(InfluenceCallback):
        def choose(self, records):
            among = assign_folds(records, 2) == 0
            trial = Trial(self.model, 1, 1.0, advantage_norm=norm)
            scoring = Scoring.create(method)
            advantages = self.model.rollout_buffer.advantages
            flat = _flatten(advantages)
            for factor in (1.0, -3.0):  # of what the other half says
                flat[~among.numpy()] *= factor
                self.model.rollout_buffer.advantages = flat.reshape(advantages.T.shape).T
                other = records.with_advantages(torch.from_numpy(flat.copy()))
                influences.append(scoring.influence(trial, other, among))
            self.model.rollout_buffer.advantages = advantages
            self.recording = restrict_recording(trial.train(records, Selection.dropping(among, "")), among)
            return super().choose(records)

    trying = Trying(KeepAll())
    model.learn(256, callback=trying)
    assert torch.equal(influences[0].scores, influences[1].scores)
    assert torch.equal(influences[0].record_ids, trying.recording.records.ids)
    if method in METHODS and norm == "minibatch":
        expected = attribute_round(model.policy, trying.recording, target=Return(), method=method)
        assert torch.equal(influences[0].scores, expected.scores)


def _flatten(array):
    return array.T.flatten()


def test_by_weights_a_half_draws_as_many_as_it_has():
    draws_by_training = []

    class Counting(Trial):
        def train(self, records, selection, among=None):
            recording = super().train(records, selection, among)
            sizes = torch.tensor([len(minibatch) for minibatch in recording.minibatches])
            epochs = torch.tensor(recording.epochs)
            draws_by_training.append([int(sizes[epochs == epoch].sum()) for epoch in range(3)])
            return recording

    class Trying(InfluenceCallback):
        def choose(self, records):
            select = lambda among: TDErrorPriority().select(records.take(among), None)  # noqa: E731
            held_out_gain(Counting(self.model, 1, 1.0), records, select)
            self.halves = assign_folds(records, 2).bincount().tolist()
            return super().choose(records)

    trying = Trying(KeepAll())
    model_of().learn(64, callback=trying)
    first, second = trying.halves
    assert draws_by_training == [[first] * 3] * 2 + [[second] * 3] * 2


def test_the_guard_falls_back_where_a_half_is_left_with_nothing():
    class Few(Chosen):
        def select(self, records, influence, progress=None):
            keep = torch.zeros(len(records), dtype=torch.bool)
            keep[: 2 if len(records) == 64 else 1] = True
            return Selection.dropping(keep, "for the test")

    model = model_of()
    callback = ResearchCallback(Few(1), guard=True)
    model.learn(64, callback=callback)
    assert np.isnan(callback.metrics[0]["held_out_gain"])
    assert callback.metrics[0]["fell_back"]
    assert callback.metrics[0]["kept"] == 64


def test_nothing_dropped_is_nothing_to_judge():
    model = model_of()
    callback = ResearchCallback(ScoreAndKeepAll(), guard=True)
    model.learn(64, callback=callback)
    assert callback.metrics[0]["held_out_gain"] is None
    assert not callback.metrics[0]["fell_back"]


def test_recording_a_guarded_round_holds_what_trained():
    model = model_of(n_steps=128, batch_size=64)
    callback = ResearchCallback(Chosen(-1), recordings=[1], guard=True)
    model.learn(256, callback=callback)
    recording = callback.recording
    trained = torch.cat(list(recording.steps)).unique()
    assert len(trained) == 256


def test_the_last_rollout_goes_beyond_the_end():
    model, watching = model_of(learning_rate=rising), Watching()
    model.learn(100, callback=watching)
    assert model.num_timesteps == 128
    tried, trained = watching.pairs[-1]
    assert tried.optimizer.settings == trained.optimizer.settings
    assert trained.optimizer.settings["lr"] < 0.01  # as SB3 has it below 0
    assert all(torch.equal(tried.end[key], trained.end[key]) for key in trained.end)


def test_a_round_beyond_the_end_is_scored_as_it_is_trained():
    model = model_of(learning_rate=rising)
    callback = ResearchCallback(ScoreAndKeepAll(), method="optimizer", recordings=[2])
    model.learn(100, callback=callback)
    expected = attribute_round(model.policy, callback.recording, target=Return(), method="optimizer")
    assert torch.equal(callback.round.influence.scores, expected.scores)


@pytest.mark.parametrize("arguments", [{"guard": True}, {"method": "unrolled"}, {"recordings": [1]}])
def test_optimisers_of_two_groups_are_refused_at_the_door(arguments):
    model = model_of()
    group = model.policy.optimizer.param_groups[0]
    group["params"], last = group["params"][:-1], group["params"][-1]
    model.policy.optimizer.add_param_group({"params": [last]})
    with pytest.raises(Unsupported, match="The optimiser has 2 groups of parameters"):
        model.learn(64, callback=ResearchCallback(IIF(), **arguments))
    assert model.num_timesteps == 0
