"""Rounds tried out before they happen: scores of whole rounds, the guard, advantages normalised once."""

import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO

import toys
from test_rounds import Dicts, Dropping, assert_untouched, model_of, recorded, rising, state_of
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
from whence.rounds import METHODS
from whence.rounds import replay as replay_round
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
    """Rehearses every round before it is trained on, and keeps what came of either."""

    def __init__(self):
        super().__init__(KeepAll(), recordings=range(1, 9))
        self.pairs = []

    def choose(self, records):
        rehearsal = Trial(self.model, self.next_round, self.progress_remaining)
        before = state_of(self.model)
        buffer = dict(vars(self.model.rollout_buffer))
        seen = buffer["observations"]
        parts = dict(seen) if isinstance(seen, dict) else {}
        self.rehearsed = rehearsal.train(records, KeepAll().select(records))
        assert_untouched(before, state_of(self.model))
        assert all(value is buffer[name] for name, value in vars(self.model.rollout_buffer).items())
        assert all(seen[name] is part for name, part in parts.items())
        return super().choose(records)

    def train_selected(self, train, selection):
        super().train_selected(train, selection)
        self.pairs.append((self.rehearsed, self.recording))


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_is_the_round_to_come_and_leaves_no_trace(name):
    made, watching = CASES[name](), Watching()
    steps = 3 * made.n_steps * made.n_envs
    made.learn(steps, callback=watching)
    assert len(watching.pairs) == 3
    for rehearsed, done in watching.pairs:
        assert all(torch.equal(rehearsed.end[key], done.end[key]) for key in done.end)
        assert [m.tolist() for m in rehearsed.minibatches] == [m.tolist() for m in done.minibatches]
        assert rehearsed.update == done.update
        assert rehearsed.optimizer.settings == done.optimizer.settings
        assert rehearsed.stopped == done.stopped
    plain = CASES[name]()
    plain.learn(steps)
    for key, tensor in named_tensors(plain.policy).items():
        assert torch.equal(tensor, named_tensors(made.policy)[key])


def test_rehearsals_are_silent(capsys):
    made = model_of(target_kl=1e-4, learning_rate=0.1, verbose=1)
    made.learn(3 * 64, callback=Watching())
    assert capsys.readouterr().out.count("Early stopping") == 3  # of the rounds themselves


class ScoreAndKeepAll(KeepAll):
    needs_influence = True


@pytest.mark.parametrize("score", METHODS)
def test_a_round_is_scored_as_it_is_trained(score):
    made = model_of()
    callback = ResearchCallback(ScoreAndKeepAll(), method=score, recordings=[2])
    made.learn(2 * 64, callback=callback)
    known = attribute_round(made.policy, callback.recording, target=Return(), method=score)
    assert torch.equal(callback.round.influence.scores, known.scores)
    assert callback.round.influence.engine == score
    plain = model_of()
    plain.learn(2 * 64)
    assert all(torch.equal(t, named_tensors(made.policy)[k]) for k, t in named_tensors(plain.policy).items())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"score": "unroled"}, "unrolled"),
        ({"score": "unrolled", "engine": "loop"}, "no effect"),
        ({"score": "unrolled", "objective": PPOClip()}, "no effect"),
        ({"score": "crossfit", "target": Action([0.0, 0.0, 0.0, 0.0], 1)}, "Take Return"),
        ({"score": "crossfit", "target": lambda view, params, records: None}, "Take Return"),
        ({"score": "unrolled", "draws": 64}, "'smoothed' alone draws any"),
        ({"score": "smoothed", "draws": 0}, "at least 1 is needed"),
        ({"advantage_norm": "bufer"}, "buffer"),
        ({"advantage_norm": "buffer", "recordings": [1]}, "recordings"),
    ],
)
def test_what_does_not_go_together_is_refused_at_the_door(wrong, said):
    with pytest.raises(WhenceError, match=said):
        ResearchCallback(IIF(), **wrong)


def test_draws_and_memory_are_those_asked_for():
    made = model_of()
    callback = ResearchCallback(ScoreAndKeepAll(), method="smoothed", draws=3, recordings=[1])
    made.learn(64, callback=callback)
    known = attribute_round(made.policy, callback.recording, target=Return(), method="smoothed", draws=3)
    assert torch.equal(callback.round.influence.scores, known.scores)
    for score in SCORES:
        made = model_of()
        with pytest.raises(WhenceError, match="memory is 1,000 bytes"):
            made.learn(64, callback=ResearchCallback(ScoreAndKeepAll(), method=score, memory=1000))


@pytest.mark.parametrize(
    ("optimizer", "settings", "said"),
    [("NAdam", {}, "The optimiser NAdam cannot"), ("Adam", {"amsgrad": True}, "Adam with amsgrad=True cannot")],
)
def test_steps_that_cannot_be_gone_through_are_refused_at_the_door(optimizer, settings, said, tmp_path):
    def made():
        chosen = {"optimizer_class": getattr(torch.optim, optimizer), "optimizer_kwargs": settings}
        return model_of(policy_kwargs=chosen)

    refused = made()
    with pytest.raises(Unsupported, match=f"{said}.*take method='snapshot' or 'crossfit'"):
        refused.learn(64, callback=ResearchCallback(IIF(), method="unrolled", run=tmp_path / "run"))
    assert refused.num_timesteps == 0
    assert not (tmp_path / "run").exists()
    made().learn(64, callback=ResearchCallback(IIF(), guard=True))  # which lets SB3 step


def test_a_policy_of_two_minds_is_refused_at_the_door(tmp_path):
    refused = model_of(policy_kwargs={"features_extractor_class": Dropping})
    generator, modes = torch.get_rng_state(), [module.training for module in refused.policy.modules()]
    with pytest.raises(Unsupported, match=r"In train mode the policy's log_prob is another .* whence\.attribute"):
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
    made = toys.model(observation=observation, action=action, n_envs=2, normalised=observation == "vector")
    callback = ResearchCallback(ScoreAndKeepAll(), method="unrolled")
    made.learn(64, callback=callback)
    assert bool(callback.round.influence.scores.any())


def test_known_scores():
    assert set(SCORES) == {
        *("snapshot", "crossfit", "trajectory", "optimizer", "optimizer-momentum", "unrolled", "smoothed"),
    }
    assert Scoring.asked("snapshot", None, None, "auto").target == Return()


# Cross-fitting


@pytest.fixture(scope="module")
def rollout():
    made = model_of(n_steps=64)
    return made, collect(made)


def test_each_fold_is_scored_by_the_others(rollout):
    made, records = rollout
    for objective in (PPOClip(), A2C(ent_coef=0.1)):
        fold = assign_folds(records, 3)
        found = attribute_crossfit(made.policy, records, folds=3, objective=objective)
        for number in range(3):
            others = records.take(fold != number)
            alone = attribute(
                made.policy,
                records,
                target=lambda view, params, scored, others=others: Return()(view, params, others),
                objective=objective,
                engine="loop",
            )
            mine = fold == number
            largest = alone.scores.abs().max()
            assert (found.scores[mine] - alone.scores[mine]).abs().max() <= 1e-5 * largest
            assert (found.scores[~mine] - alone.scores[~mine]).abs().max() > 1e-2 * largest


def test_folds_keep_episodes_whole(rollout):
    _, records = rollout
    fold = assign_folds(records, 2)
    assert fold.bincount().min() > 0
    for env in (0, 1):
        for episode in records.episode_ids[records.env_index == env].unique():
            own = fold[(records.env_index == env) & (records.episode_ids == episode)]
            assert len(own.unique()) == 1


def test_fewer_episodes_than_folds_are_cut_into_stretches():
    made = model_of(env="Pendulum-v1", n_steps=9)
    records = collect(made)  # two environments, one episode each, 9 steps of either
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
    with pytest.raises(WhenceError, match="else use attribute"):
        attribute_crossfit(rollout[0].policy, records, target=Action([0.0] * 4, 1))


# Advantages normalised once


def test_advantages_are_normalised_once_over_the_rollout():
    made, seen = model_of(), []

    class Seeing(InfluenceCallback):
        def train_selected(self, train, selection):
            buffer = self.model.rollout_buffer
            raw = buffer.advantages.copy()

            def train():
                assert not self.model.normalize_advantage
                seen.extend(part.advantages for part in buffer.get(16))
                own_train()

            super().train_selected(train, selection)
            assert self.model.normalize_advantage
            assert np.array_equal(buffer.advantages, buffer.swap_and_flatten(raw))

    callback = Seeing(IIF(1.0), advantage_norm="buffer")
    made.learn(64, callback=callback)
    raw, keep = callback.round.records.advantages, callback.round.selection.keep
    assert 2 < int(keep.sum()) < 64
    # Less the mean over all 64, over the standard deviation with n - 1, whatever was dropped.
    known = ((raw - raw.mean()) / raw.std())[keep].sort().values
    assert torch.allclose(torch.cat(seen).flatten().sort().values, known, atol=1e-5)


def test_normalised_over_the_buffer_by_hand():
    made = model_of()
    made.learn(64)
    buffer = made.rollout_buffer
    buffer.generator_ready = False
    raw = np.arange(64, dtype=np.float32).reshape(32, 2)
    buffer.advantages = raw
    with normalise_advantages(made):
        assert not made.normalize_advantage
        assert np.allclose(buffer.advantages, (raw - 31.5) / np.sqrt((64**2 - 1) / 12 * 64 / 63), atol=1e-6)
    assert buffer.advantages is raw
    assert made.normalize_advantage
    among = torch.arange(64) < 16  # steps 0 to 15 of the first environment, whose advantages are even
    for flat in (False, True):
        buffer.generator_ready = flat
        buffer.advantages = buffer.swap_and_flatten(raw) if flat else raw
        with normalise_advantages(made, among):
            found = buffer.advantages if flat else buffer.swap_and_flatten(buffer.advantages)
            assert np.allclose(found[:16, 0], (np.arange(0, 32, 2) - 15) / np.sqrt((16**2 - 1) / 12 * 4 * 16 / 15))
            assert np.allclose(found[32, 0], (1 - 15) / np.sqrt((16**2 - 1) / 12 * 4 * 16 / 15))


@pytest.mark.parametrize("score", METHODS)
def test_a_round_on_advantages_normalised_once_is_scored_as_it_is_trained(score):
    made, seen = model_of(), {}

    class Asking(InfluenceCallback):
        def choose(self, records):
            remaining = self._progress().remaining
            rehearsal = Trial(self.model, self.next_round, remaining, advantage_norm="buffer")
            seen["recording"] = rehearsal.train(records, KeepAll().select(records))
            return super().choose(records)

    callback = Asking(ScoreAndKeepAll(), method=score, advantage_norm="buffer")
    made.learn(2 * 64, callback=callback)
    recording, raw = seen["recording"], callback.round.records.advantages
    for name, tensor in named_tensors(made.policy).items():
        assert torch.equal(tensor, recording.end[name])
        assert torch.equal(tensor, replay_round(made, recording)[name])
    assert torch.allclose(recording.records.advantages, (raw - raw.mean()) / raw.std(), atol=1e-5)

    def of_raw(view, params, records):
        return Return()(view, params, records.with_advantages(raw))

    found = callback.round.influence
    known, normalised = (
        attribute_round(made.policy, recording, target=target, method=score) for target in (of_raw, Return())
    )
    assert torch.equal(found.scores, known.scores)
    assert not torch.allclose(found.scores * normalised.scores.norm(), normalised.scores * found.scores.norm())
    assert found.provenance.target == "Return()"
    assert found.provenance.records == callback.round.records.fingerprint


def test_with_everything_kept_in_one_minibatch_both_norms_are_one():
    trained = []
    for norm in ("minibatch", "buffer"):
        made = model_of(batch_size=64, n_epochs=2)
        made.learn(128, callback=ResearchCallback(KeepAll(), advantage_norm=norm))
        trained.append(named_tensors(made.policy))
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
    made = model_of()
    recording = None

    class Asking(InfluenceCallback):
        def choose(self, records):
            nonlocal recording
            rehearsal = Trial(self.model, 1, 1.0)
            fold = assign_folds(records, 2)

            def select(among):
                assert torch.equal(among, fold == 0) or torch.equal(among, fold == 1)
                return Selection.dropping(records.advantages[among] > 0, "for the test")

            before = state_of(self.model)
            self.gain = held_out_gain(rehearsal, records, select)
            assert_untouched(before, state_of(self.model))
            known = 0.0
            for half in range(2):
                mine = fold == half
                values = []
                for keep in (mine, mine & (records.advantages > 0)):
                    end = rehearsal.train(records, Selection.dropping(keep, "")).end
                    values.append(surrogate_of(self.model, end, records.take(~mine)))
                known += float((~mine).float().mean()) * (values[1] - values[0])
            self.known = known
            return super().choose(records)

    asking = Asking(KeepAll())
    made.learn(64, callback=asking)
    assert asking.gain == pytest.approx(asking.known, rel=1e-5)
    assert abs(asking.known) > 1e-6


def surrogate_of(made, params, records):
    twin = model_of()
    twin.policy.load_state_dict(params, strict=False)
    with torch.no_grad():
        _, log_probs, _ = twin.policy.evaluate_actions(records.observations, records.actions)
    advantages = records.advantages - records.advantages.mean()
    return float(((log_probs - records.log_probs).exp() * advantages).mean())


def test_an_advantage_that_all_records_share_has_no_say():
    made = model_of()
    gains, raw = {}, {}

    class Asking(InfluenceCallback):
        def choose(self, records):
            rehearsal, fold = Trial(self.model, 1, 1.0), assign_folds(records, 2)
            keep = torch.arange(len(records)) % 3 > 0
            ratios = []
            for half in range(2):
                mine = fold == half
                for kept in (mine, mine & keep):
                    end = rehearsal.train(records, Selection.dropping(kept, "")).end
                    ratios.append(mean_ratio_of(end, records.take(~mine)) * float((~mine).float().mean()))
            drift = ratios[1] - ratios[0] + ratios[3] - ratios[2]
            for shift in (0.0, 1e4, -1e4):  # what trains is the buffer's, and the same
                shifted = records.with_advantages(records.advantages + shift)
                gains[shift] = held_out_gain(rehearsal, shifted, lambda among: Selection.dropping(keep[among], ""))
                raw[shift] = gains[0.0] + shift * drift
            return super().choose(records)

    made.learn(64, callback=Asking(KeepAll()))
    assert raw[1e4] * raw[-1e4] < 0  # raw advantages would turn the verdict with the shift
    assert gains[1e4] == pytest.approx(gains[0.0], rel=1e-2)
    assert gains[-1e4] == pytest.approx(gains[0.0], rel=1e-2)


def mean_ratio_of(params, records):
    twin = model_of()
    twin.policy.load_state_dict(params, strict=False)
    with torch.no_grad():
        _, log_probs, _ = twin.policy.evaluate_actions(records.observations, records.actions)
    return float((log_probs - records.log_probs).exp().mean())


@pytest.mark.parametrize("score", ["snapshot", "optimizer"])
def test_the_guard_falls_back_where_selecting_does_harm(score):
    # One gentle step on a rollout of many episodes, so that what half of them say holds for the other half.
    settings = {"n_steps": 512, "batch_size": 1024, "n_epochs": 2, "learning_rate": 0.01}
    fell_back = {}
    for sign in (1, -1):
        made = model_of("SGD", **settings)
        callback = ResearchCallback(Chosen(sign), guard=True, method=score)
        made.learn(3 * 1024, callback=callback)
        fell_back[sign] = [row["fell_back"] for row in callback.metrics]
        for row in callback.metrics:
            assert row["fell_back"] == (row["held_out_gain"] < 0)
            assert row["kept"] == (1024 if row["fell_back"] else 512)
    assert fell_back == {1: [False] * 3, -1: [True] * 3}
    plain = model_of("SGD", **settings)
    plain.learn(3 * 1024)  # every round fell back
    assert all(torch.equal(t, named_tensors(made.policy)[k]) for k, t in named_tensors(plain.policy).items())


def test_a_round_of_some_records_knows_no_others():
    made = model_of(n_steps=128, target_kl=0.05)

    class Asking(InfluenceCallback):
        def choose(self, records):
            self.among = assign_folds(records, 2) == 0
            rehearsal = Trial(self.model, 1, 1.0)
            self.whole = rehearsal.train(records, Selection.dropping(self.among, ""))
            return super().choose(records)

    asking = Asking(KeepAll())
    made.learn(256, callback=asking)
    whole, some = asking.whole, restrict_recording(asking.whole, asking.among)
    assert 2 < len(some.records) < 254
    assert torch.equal(some.records.ids, whole.records.ids[asking.among])
    for mine, theirs in zip(some.minibatches, whole.minibatches, strict=True):
        assert torch.equal(some.records.ids[mine], whole.records.ids[theirs])
    for name, tensor in replay_round(made.policy, some).items():
        assert torch.allclose(tensor, whole.end[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["minibatch", "buffer"])
@pytest.mark.parametrize("score", SCORES)
def test_a_half_is_scored_by_what_it_says_itself(score, norm):
    made, found = model_of(n_steps=128), []

    class Asking(InfluenceCallback):
        def choose(self, records):
            among = assign_folds(records, 2) == 0
            rehearsal = Trial(self.model, 1, 1.0, advantage_norm=norm)
            scoring = Scoring.asked(score)
            advantages = self.model.rollout_buffer.advantages
            flat = _flat(advantages)
            for factor in (1.0, -3.0):  # of what the other half says
                flat[~among.numpy()] *= factor
                self.model.rollout_buffer.advantages = flat.reshape(advantages.T.shape).T
                other = records.with_advantages(torch.from_numpy(flat.copy()))
                found.append(scoring.influence(rehearsal, other, among))
            self.model.rollout_buffer.advantages = advantages
            self.recording = restrict_recording(rehearsal.train(records, Selection.dropping(among, "")), among)
            return super().choose(records)

    asking = Asking(KeepAll())
    made.learn(256, callback=asking)
    assert torch.equal(found[0].scores, found[1].scores)
    assert torch.equal(found[0].record_ids, asking.recording.records.ids)
    if score in METHODS and norm == "minibatch":
        known = attribute_round(made.policy, asking.recording, target=Return(), method=score)
        assert torch.equal(found[0].scores, known.scores)


def _flat(array):
    return array.T.flatten()


def test_by_weights_a_half_draws_as_many_as_it_has():
    drawn = []

    class Counting(Trial):
        def train(self, records, selection, among=None):
            found = super().train(records, selection, among)
            each = torch.tensor([len(minibatch) for minibatch in found.minibatches])
            drawn.append([int(each[torch.tensor(found.epochs) == epoch].sum()) for epoch in range(3)])
            return found

    class Asking(InfluenceCallback):
        def choose(self, records):
            select = lambda among: TDErrorPriority().select(records.take(among), None)  # noqa: E731
            held_out_gain(Counting(self.model, 1, 1.0), records, select)
            self.halves = assign_folds(records, 2).bincount().tolist()
            return super().choose(records)

    asking = Asking(KeepAll())
    model_of().learn(64, callback=asking)
    first, second = asking.halves
    assert drawn == [[first] * 3] * 2 + [[second] * 3] * 2


def test_the_guard_falls_back_where_a_half_is_left_with_nothing():
    class Few(Chosen):
        def select(self, records, influence, progress=None):
            keep = torch.zeros(len(records), dtype=torch.bool)
            keep[: 2 if len(records) == 64 else 1] = True
            return Selection.dropping(keep, "for the test")

    made = model_of()
    callback = ResearchCallback(Few(1), guard=True)
    made.learn(64, callback=callback)
    assert np.isnan(callback.metrics[0]["held_out_gain"])
    assert callback.metrics[0]["fell_back"]
    assert callback.metrics[0]["kept"] == 64


def test_nothing_dropped_is_nothing_to_judge():
    made = model_of()
    callback = ResearchCallback(ScoreAndKeepAll(), guard=True)
    made.learn(64, callback=callback)
    assert callback.metrics[0]["held_out_gain"] is None
    assert not callback.metrics[0]["fell_back"]


def test_recording_a_guarded_round_holds_what_trained():
    made = model_of(n_steps=128, batch_size=64)
    recording = recorded(made, Chosen(-1), rounds=1, guard=True)
    trained = torch.cat(list(recording.steps)).unique()
    assert len(trained) == 256


def test_the_last_rollout_goes_beyond_the_end():
    made, watching = model_of(learning_rate=rising), Watching()
    made.learn(100, callback=watching)
    assert made.num_timesteps == 128
    rehearsed, done = watching.pairs[-1]
    assert rehearsed.optimizer.settings == done.optimizer.settings
    assert done.optimizer.settings["lr"] < 0.01  # as SB3 has it below 0
    assert all(torch.equal(rehearsed.end[key], done.end[key]) for key in done.end)


def test_a_round_beyond_the_end_is_scored_as_it_is_trained():
    made = model_of(learning_rate=rising)
    callback = ResearchCallback(ScoreAndKeepAll(), method="optimizer", recordings=[2])
    made.learn(100, callback=callback)
    known = attribute_round(made.policy, callback.recording, target=Return(), method="optimizer")
    assert torch.equal(callback.round.influence.scores, known.scores)


@pytest.mark.parametrize("asked", [{"guard": True}, {"score": "unrolled"}, {"recordings": [1]}])
def test_optimisers_of_two_groups_are_refused_at_the_door(asked):
    made = model_of()
    group = made.policy.optimizer.param_groups[0]
    group["params"], last = group["params"][:-1], group["params"][-1]
    made.policy.optimizer.add_param_group({"params": [last]})
    with pytest.raises(Unsupported, match="The optimiser has 2 groups of parameters"):
        made.learn(64, callback=ResearchCallback(IIF(), **asked))
    assert made.num_timesteps == 0
