"""Errors of scores: by hand, against a plain loop over folds, and how often their intervals hold the truth."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from torch import nn

import whence
from helpers.toys import model
from whence import IIF, Action, Influence, RecordBatch, Return, RunDirectory, attribute
from whence.core import BatchTarget
from whence.sb3 import InfluenceCallback, collect
from whence.scores.attribution import attribute_with_errors, score_targets
from whence.scores.folds import PartialTarget, balance_folds, count_folds, standard_errors
from whence.scores.influence import SIGNIFICANT

COVERED = (0.90, 0.98)
"""The share of the records whose interval has to hold the truth."""


def linear_view(features=3, actions=3, seed=0) -> whence.ModuleView:
    torch.manual_seed(seed)
    module = nn.Linear(features, actions)

    def outputs(module, inputs):
        logits = module(inputs["x"]).log_softmax(-1)
        return whence.Outputs(logits.gather(1, inputs["a"][:, None])[:, 0], None, None)

    return whence.ModuleView(module, outputs, lambda records: {"x": records.observations, "a": records.actions})


def play(view, episodes, length, generator) -> RecordBatch:
    """Episodes of a linear-softmax policy whose advantages share a part within each episode."""
    n = episodes * length
    x = torch.randn(n, 3, generator=generator)
    with torch.no_grad():
        log_probs = view.module(x).log_softmax(-1)
    actions = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
    shared = torch.randn(episodes, generator=generator).repeat_interleave(length)
    better = torch.tensor([-1.0, 0.0, 1.0])[actions] * x[:, 0]
    return RecordBatch(
        observations=x,
        actions=actions,
        log_probs=log_probs.gather(1, actions[:, None])[:, 0],
        advantages=better + shared + torch.randn(n, generator=generator),
        episode_ids=torch.arange(episodes).repeat_interleave(length),
    )


def small_records(lengths=(5, 3, 4, 2, 6), seed=0) -> tuple[whence.ModuleView, RecordBatch]:
    view = linear_view()
    records = play(view, sum(lengths), 1, torch.Generator().manual_seed(seed))
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return view, records.with_columns({"episode_ids": ids})


def test_by_hand():
    scores = torch.tensor([1.0, 2.0])
    by_fold = torch.tensor([[9.0, 2.0], [2.0, 9.0], [0.0, 5.0], [1.0, 1.0]])
    sizes = torch.tensor([1, 1, 2, 2])
    counted = count_folds(torch.tensor([0, 1, 2, 2, 3, 3]), torch.tensor([0, 1, 2, 2, 3, 3]))[:, :2]
    errors = standard_errors(scores, by_fold, sizes, counted)
    # Record 0: folds 1, 2, 3 hold 1, 2 and 2 of 5 records: w = .2, .4, .4; differences 1, -1, 0.
    # Two errors are a 95% interval: Student's t of 2 degrees of freedom has 4.3027 there.
    assert errors[0] == pytest.approx(np.sqrt((0.2**2 + 0.4**2) * 3 / 2) * 4.302653 / 2)
    # Record 1: folds 0, 2, 3 hold 1, 2 and 2: differences 0, 3, -1.
    assert errors[1] == pytest.approx(np.sqrt(((0.4 * 3) ** 2 + 0.4**2) * 3 / 2) * 4.302653 / 2)


def test_folds_that_hold_a_part_of_the_episode_do_not_count():
    # Episode 0 is cut into folds 0 and 1; episode 1 fills fold 2, and episode 2 fold 3.
    counted = count_folds(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1, 2]))
    assert counted[:, 0].tolist() == [False, False, True, True]
    assert counted[:, 2].tolist() == [True, True, False, True]
    # An episode in all folds but one leaves out its own fold only.
    assert count_folds(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 1]))[:, 0].tolist() == [False, True, True]


def test_folds_are_of_whole_episodes_and_about_equal():
    _, records = small_records((5, 3, 4, 2, 6))
    fold = balance_folds(records, 3)
    for episode in range(5):
        assert fold[records.episode_ids == episode].unique().numel() == 1
    assert sorted(fold.bincount().tolist()) == [6, 7, 7]


def test_episodes_longer_than_a_fold_are_cut():
    _, records = small_records((12, 3, 1))
    fold = balance_folds(records, 4)
    assert fold.bincount().tolist() == [4, 4, 4, 4]
    assert sorted(fold[:12].tolist()) == fold[:12].tolist()  # stretches of consecutive steps
    assert fold[12:].unique().numel() == 1


def test_targets_of_folds_pass_over_their_records_alone():
    view, records = small_records([2] * 24)
    fold = balance_folds(records, 8)
    parts = {str(number): PartialTarget(Return(), (fold == number).nonzero().flatten()) for number in range(8)}
    rows = []
    view.module.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    by_part = score_targets(view, records, parts, engine="ghost", chunk_size=5)
    assert sum(rows) < 5 * len(records)
    whole = score_targets(view, records, parts, engine="loop")
    for name in parts:
        torch.testing.assert_close(by_part[name].scores, whole[name].scores)


@pytest.mark.parametrize(
    "engine", ["ghost", "loop", *(pytest.param(name, marks=pytest.mark.long) for name in ("vmap", "forward"))]
)
def test_errors_are_those_of_a_plain_loop_over_folds(engine):
    view, records = small_records()
    influence = attribute(view, records, target=Return(), engine=engine, folds=3)
    fold = balance_folds(records, 3)
    expected = []
    for position in range(len(records)):
        others = [number for number in range(3) if number != fold[position]]
        sizes = np.array([float((fold == number).sum()) for number in others])
        scores = []
        for number in others:
            index = (fold == number).nonzero().flatten()

            def target(view, params, records, index=index):
                part = records.take(index)
                return (view(params, view.prepare(part)).log_prob * part.advantages).mean()

            scores.append(float(attribute(view, records, target=target, engine="loop").scores[position]))
        weights = sizes / sizes.sum()
        deviations = np.array(scores) - float(influence.scores[position])
        expected.append(np.sqrt(((weights * deviations) ** 2).sum() * 2 / 1) * 12.706205 / 2)
    np.testing.assert_allclose(influence.errors, expected, rtol=1e-4)


@pytest.mark.parametrize("engine", ["auto", pytest.param("loop", marks=pytest.mark.long)])
def test_scores_are_the_same_bits_with_errors(engine):
    toy = model()
    records = collect(toy)
    plain = attribute(toy.policy, records, target=Return(), engine=engine)
    whole = attribute(toy.policy, records, target=Return(), engine=engine, folds=3)
    assert torch.equal(plain.scores, whole.scores)
    assert plain.errors is None
    both = attribute(toy.policy, records, target={"one": Return(), "two": Return()}, engine=engine, folds=3)
    assert torch.equal(both["one"].errors, both["two"].errors)


def test_scores_and_errors_take_one_pass():
    view, records = small_records([2] * 24)
    attribute(view, records, target=Return(), engine="ghost", folds=8)  # notes what it needs to
    sizes = []
    view.module.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    attribute(view, records, target=Return(), engine="ghost", folds=8)
    assert sizes.count(len(records)) == 1


def test_a_recorder_goes_without_errors_where_the_target_is_no_mean(caplog):
    view, records = small_records()
    logged = set()
    for _ in range(2):
        influence = attribute_with_errors(view, 3, logged, records, target=Summed())
        assert influence.errors is None
    assert logged == {"errors"}
    assert len(caplog.records) == 1
    assert attribute_with_errors(view, 3, set(), records, target=Return()).errors is not None


def test_intervals_hold_the_truth_of_a_linear_softmax_policy():
    view = linear_view()
    generator = torch.Generator().manual_seed(1)
    many = play(view, 20_000, 20, generator)
    truth_target = Return()

    def truth(view, params, records):
        return truth_target(view, params, many)

    covered = []
    for _ in range(12):
        records = play(view, 60, 20, generator)
        influence = attribute(view, records, target=Return(), folds=8)
        true = attribute(view, records, target=truth).scores
        within = (influence.scores - true).abs() <= SIGNIFICANT * influence.errors
        covered.append(float(within.double().mean()))
    assert COVERED[0] <= np.mean(covered) <= COVERED[1], covered


class TestInfluence:
    def make(self) -> Influence:
        view, records = small_records()
        return attribute(view, records, target=Return(), folds=3)

    def test_significant_is_beyond_two_errors(self):
        influence = self.make()
        expected = influence.scores.abs() > 2 * influence.errors
        assert influence.is_significant().tolist() == expected.tolist()
        assert influence.is_significant(0.0).all()
        with pytest.raises(whence.InvalidInfluence, match="folds=8"):
            attribute(*small_records(), target=Return()).is_significant()

    def test_errors_stay_with_their_records(self, tmp_path):
        influence = self.make()
        by_id = dict(zip(influence.record_ids.tolist(), influence.errors.tolist(), strict=True))
        worst = influence.bottom(4)
        assert worst.errors.tolist() == [by_id[record] for record in worst.record_ids.tolist()]
        assert influence.to_polars()["error"].to_list() == influence.errors.tolist()
        influence.save(tmp_path / "scores.safetensors")
        assert torch.equal(Influence.load(tmp_path / "scores.safetensors").errors, influence.errors)
        assert (influence + influence).errors is None
        assert worst.to_polars().columns == ["record_id", "score", "error", "score_folds", "fold"]


class Summed(BatchTarget):
    def from_outputs(self, outputs, records):
        return (outputs.log_prob * records.advantages).sum()


@pytest.mark.parametrize(
    ("target", "lengths", "message"),
    [
        (Action(torch.zeros(3), 1), (5, 3, 4), "without folds"),  # it reads no records
        (Summed(), (5, 3, 4), "no mean over"),
        (Return(), (10, 10), "of 2 episodes"),
        (Return(), None, "where episodes begin"),
    ],
)
def test_what_has_no_folds_is_refused(target, lengths, message):
    view, records = small_records(lengths or (5, 3, 4))
    if lengths is None:
        records = RecordBatch(**{name: c for name, c in records.columns.items() if name != "episode_ids"})
    with pytest.raises(whence.WhenceError, match=message):
        attribute(view, records, target=target, folds=3)
    with pytest.raises(whence.WhenceError, match="folds is 2"):
        InfluenceCallback(IIF(0.5), folds=2)


class TestCallback:
    def learn(self, path, **options):
        toy = PPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=128, batch_size=64, n_epochs=2, seed=1, device="cpu")
        callback = InfluenceCallback(IIF(0.5), run=path, **options)
        toy.learn(256, callback=callback)
        return torch.nn.utils.parameters_to_vector(toy.policy.parameters()), callback

    def test_errors_are_written_and_change_nothing(self, tmp_path):
        with_errors, callback = self.learn(tmp_path / "with")
        without, _ = self.learn(tmp_path / "without", folds=None)
        assert torch.equal(with_errors, without)
        table = RunDirectory.open(tmp_path / "with").round("records", 2)
        assert table["error"].to_list() == callback.round.influence.errors.tolist()
        shares = np.bincount(table["fold"]) / len(table)
        np.testing.assert_allclose(table["score_folds"].to_numpy() @ shares, table["score"], rtol=1e-3, atol=1e-4)
        share = (table["score"].abs() > 2 * table["error"]).mean()
        assert RunDirectory.open(tmp_path / "with").table("metrics")["significant_share"][1] == pytest.approx(share)
        assert "error" not in RunDirectory.open(tmp_path / "without").round("records", 2).columns

    def test_a_target_that_reads_no_records_has_none(self, tmp_path):
        _, callback = self.learn(tmp_path / "run", target=Action(np.zeros(4, np.float32), 1))
        assert callback.round.influence.errors is None
