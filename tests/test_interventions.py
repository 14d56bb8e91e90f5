"""Single rounds trained again without the records that score below 0, and what the command makes of them."""

import importlib
import json
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from test_rounds import assert_untouched, model_of, recorded, state_of
from whence import IIF, Influence, Return, RunDirectory, WhenceError, attribute_round, cli
from whence.cli.terminal import console, parse_rounds
from whence.core import ReplayError
from whence.counterfactual import VARIANTS, intervene, interventions, summarise_changes
from whence.counterfactual.retrain import NOBODY, reshuffle
from whence.experiments import load_recording
from whence.experiments.rl.stored import measure_returns
from whence.influence import Provenance
from whence.sb3 import replay_round as replay_sb3
from whence.sb3.base.model_tensors import load_tensors

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")

command = importlib.import_module("whence.cli.commands.intervene_command")


@pytest.fixture(scope="module", params=["SGD", "Adam"])
def case(request):
    model = model_of(request.param)
    recording = recorded(model)
    scores = attribute_round(model.policy, recording, target=Return(), method="trajectory")
    assert 2 < int((scores.scores < 0).sum()) < 62
    return model, recording, scores


def make_influence(recording, scores):
    """Return an influence with these scores of a round."""
    provenance = Provenance("custom", "custom", "custom", "custom", ())
    return Influence(torch.as_tensor(scores, dtype=torch.float32), recording.records.ids.clone(), provenance)


def weight(params, order=0):
    """Return a number that differs between parameters by more than rounding."""
    return float(sum(tensor.double().square().sum() for tensor in params.values()))


@pytest.fixture
def trainings(monkeypatch):
    """The mask and the minibatches of each training."""
    pairs = []

    def spy(kept, *arguments):
        orders = reshuffle(kept, *arguments)
        for row, mask in enumerate(kept):
            minibatches = [order[row][order[row] != NOBODY] for order in orders]
            pairs.append((mask, [minibatch for minibatch in minibatches if len(minibatch)]))
        return orders

    monkeypatch.setattr(interventions, "reshuffle", spy)
    return pairs


class TestIntervene:
    def test_each_training_is_sb3s_of_the_same_minibatches(self, case, trainings):
        model, recording, scores = case
        trained = []

        def evaluate(params, order):
            trained.append(params)
            return weight(params)

        table = intervene(model.policy, recording, scores, evaluate=evaluate)
        assert table["variant"].to_list() == list(VARIANTS)
        assert table["kept"].to_list() == [int(kept.sum()) for kept, _ in trainings]
        for (_, minibatches), params, outcome in zip(trainings, trained, table["value"], strict=True):
            epochs = [epoch for epoch in range(3) for _ in range(len(minibatches) // 3)]
            as_sb3 = replay_sb3(model, replace(recording, minibatches=minibatches, epochs=epochs))
            assert params.keys() == dict(model.policy.named_parameters()).keys()
            for name, tensor in params.items():
                assert torch.allclose(tensor, as_sb3[name], rtol=0, atol=1e-6), name
            assert outcome == weight(params)

    def test_what_is_kept(self, case, trainings):
        model, recording, _ = case
        values = torch.linspace(-1, 1, 64)[torch.randperm(64)]
        values[:5] = 0.0
        intervene(model.policy, recording, make_influence(recording, values), evaluate=weight)
        full, filtered, random = (kept for kept, _ in trainings)
        assert full.all()
        assert torch.equal(filtered, values >= 0)
        assert int(random.sum()) == int(filtered.sum()) < 64
        assert not torch.equal(random, filtered)

    def test_an_order_is_one_permutation_for_all(self, case, trainings):
        model, recording, scores = case
        table = intervene(model.policy, recording, scores, evaluate=weight, orders=2)
        assert table["order"].to_list() == [1, 1, 1, 2, 2, 2]

        def epochs(minibatches):
            return torch.cat(minibatches).reshape(3, -1)

        for first in (0, 3):
            whole = epochs(trainings[first][1])
            for kept, minibatches in trainings[first : first + 3]:
                filtered = torch.stack([permutation[kept[permutation]] for permutation in whole])
                assert torch.equal(epochs(minibatches), filtered)
                assert len(minibatches[0]) == 16
        assert not torch.equal(epochs(trainings[0][1]), epochs(trainings[3][1]))
        assert torch.equal(trainings[1][0], trainings[4][0])
        assert not torch.equal(trainings[2][0], trainings[5][0])

    def test_nothing_is_touched_and_each_test_of_an_order_draws_the_same(self, case):
        model, recording, scores = case
        before = state_of(model)
        numbers, stages = [], []

        def evaluate(params, order):
            numbers.append((order, float(torch.rand(())), float(np.random.random())))
            return 0.0

        intervene(model.policy, recording, scores, evaluate=evaluate, orders=2, on_stage=stages.append)
        assert_untouched(before, state_of(model))
        assert [order for order, *_ in numbers] == [1, 1, 1, 2, 2, 2]
        assert len(set(numbers)) == 2
        assert len({values[1:] for values in numbers}) == 2
        assert stages[:3] == [
            "training, order 1 of 2",
            "measuring full, order 1 of 2",
            "measuring filtered, order 1 of 2",
        ]

    def test_a_round_that_a_rule_selected_from_has_all_its_records(self, trainings):
        model = model_of()
        recording = recorded(model, IIF(drop=1.0))
        assert len(torch.cat(list(recording.minibatches)).unique()) < 64
        scores = attribute_round(model.policy, recording, target=Return(), method="trajectory")
        assert intervene(model.policy, recording, scores, evaluate=weight)["kept"][0] == 64


class TestGroups:
    def test_what_is_left_out_are_the_groups_records(self, case, trainings):
        model, recording, _ = case
        group = recording.records.ids[[3, 10, 40]].tolist()
        table = intervene(model.policy, recording, group, orders=2)
        full, filtered, random = (kept for kept, _ in trainings[:3])
        assert full.all()
        assert (~filtered).nonzero()[:, 0].tolist() == [3, 10, 40]
        assert int(random.sum()) == 61
        assert not torch.equal(random, trainings[5][0])
        assert table["kept"].to_list() == [64, 61, 61] * 2

    def test_the_probability_is_the_policys_of_what_the_group_did(self, case):
        model, recording, _ = case
        chosen = torch.tensor([5, 6, 50])
        trained = []
        table = intervene(
            model.policy,
            recording,
            recording.records.ids[chosen].tolist(),
            evaluate=lambda params, _: trained.append(params) or 0.0,
            orders=1,
        )
        probability = table.filter(pl.col("outcome") == "probability")
        records = recording.records.take(chosen)
        for params, value in zip(trained, probability["value"], strict=True):
            model = model_of()
            load_tensors(dict(model.policy.named_parameters()), params)
            with torch.no_grad():
                _, log_probs, _ = model.policy.evaluate_actions(records.observations, records.actions)
            assert value == pytest.approx(float(log_probs.exp().mean()), abs=1e-6)
        assert probability["value"].n_unique() == 3
        changes = probability["value"] - probability["value"][0]
        assert probability["change"].to_list() == pytest.approx(changes.to_list(), abs=1e-15)

    def test_differences_by_hand(self):
        outcomes = {"full": [1.0, 5.0], "filtered": [8.0, 2.0], "random": [4.0, 1.0]}
        rows = [
            {"order": order, "variant": variant, "outcome": "evaluated", "value": values[order - 1]}
            for order in (2, 1)
            for variant, values in outcomes.items()
        ]
        summary = summarise_changes(pl.DataFrame(rows))
        assert summary["difference"].to_list() == ["filtered - full", "random - full", "filtered - random"]
        assert summary["mean"].to_list() == [2.0, -0.5, 2.5]
        half = stats.t.ppf(0.975, 1) * np.array([5.0, 3.5, 1.5])  # the errors of two values are half their distance
        assert summary["high"].to_list() == pytest.approx([2.0 + half[0], -0.5 + half[1], 2.5 + half[2]])
        assert summary["low"].to_list() == pytest.approx([2.0 - half[0], -0.5 - half[1], 2.5 - half[2]])


class TestRounds:
    @pytest.mark.parametrize(
        ("text", "rounds"),
        [
            (None, []),
            ("5,20", [5, 20]),
            (" 20, 5 ,5", [5, 20]),
            ("10-13", [10, 11, 12, 13]),
            ("10-40:10", [10, 20, 30, 40]),
            ("10-39:10,3,7-7", [3, 7, 10, 20, 30]),
            ("1-3,2-4", [1, 2, 3, 4]),
        ],
    )
    def test_numbers_and_ranges(self, text, rounds):
        assert parse_rounds("--rounds", text) == rounds


CART = ["CartPole-v1", "--selection", "ppo", "--rounds", "3"]
CART += ["--n-steps", "64", "--batch-size", "32", "--n-epochs", "2"]


def whence(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def stamps(run):
    return {file.name: file.stat().st_mtime_ns for file in (run / "interventions").iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "cart"
    result = whence("train", *CART, "--record-rounds", "1-3:2", "--run", path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def run(trained, tmp_path):
    path = shutil.copytree(trained, tmp_path / "cart")
    RunDirectory.open(path).sign()  # as a copy it is a stranger's
    return path


class TestCommand:
    def test_it_intervenes_in_all_recorded_rounds(self, run):
        result = whence("intervene", run, "--test-episodes", 3, "--orders", 2)
        assert result.exit_code == 0, result.output
        assert "Mean of the test returns over 2 rounds, filtered - full: " in result.output
        assert f"Numbers: {run / 'interventions'}" in result.output
        assert sorted(stamps(run)) == ["round_00001.json", "round_00003.json"]
        content = json.loads((run / "interventions" / "round_00003.json").read_text())
        assert content["round"] == 3
        assert len(content["rows"]) == 6
        rows = pl.DataFrame(content["rows"])
        printed = json.loads(whence("intervene", run, "--test-episodes", 3, "--orders", 2, "--json").stdout)
        row = printed["rounds"][1]
        assert (row["round"], row["records"], row["outcome"]) == (3, 64, "evaluated")
        means = {variant: rows.filter(variant=variant)["value"].mean() for variant in VARIANTS}
        assert {variant: row[variant] for variant in VARIANTS} == pytest.approx(means)
        assert row["filtered - full"]["mean"] == pytest.approx(means["filtered"] - means["full"])
        changes = [one["filtered - full"]["mean"] for one in printed["rounds"]]
        assert printed["mean_change"]["filtered - full"]["mean"] == pytest.approx(np.mean(changes))

    def test_rounds_that_are_there_are_not_done_again(self, run):
        arguments = ["intervene", run, "--test-episodes", 2]
        assert whence(*arguments, "--rounds", 3).exit_code == 0
        first = stamps(run)
        assert whence(*arguments).exit_code == 0
        both = stamps(run)
        assert both["round_00003.json"] == first["round_00003.json"]
        (run / "interventions" / "round_00001.json").write_text("{")
        assert whence(*arguments).exit_code == 0
        repaired = stamps(run)
        assert repaired["round_00003.json"] == first["round_00003.json"]
        assert json.loads((run / "interventions" / "round_00001.json").read_text())["round"] == 1
        assert whence(*arguments, "--seed", 1).exit_code == 0
        assert stamps(run)["round_00003.json"] != first["round_00003.json"]

    def test_without_the_statistics_of_observations_nothing_is_tested(self, tmp_path):
        settings = {"norm_obs": True, "clip_obs": 10.0, "clip_reward": 10.0}
        config = {"env": "CartPole-v1", "vec_wrappers": ["VecNormalize"], "VecNormalize": settings}
        run = RunDirectory.create(tmp_path / "run", config)
        with (
            pytest.raises(ReplayError, match="does not hold VecNormalize's statistics of round 1"),
            measure_returns(run, None, 1, episodes=2, seed=0),
        ):
            pass

    def test_a_group_is_left_out_by_a_condition(self, run, monkeypatch):
        monkeypatch.setattr(console, "width", 160)  # no cell of the table is broken
        arguments = ["intervene", run, "--test-episodes", 2, "--orders", 2, "--rounds", 3, "--seed", 5]
        where = 'action = 1 and step < 9 and "pole angle" > -9 and score < 9'
        result = whence(*arguments, "--where", where)
        assert result.exit_code == 0, result.output
        directory = RunDirectory.open(run)
        model, recording = load_recording(directory, 3)
        records = directory.round("records", 3)
        group = records.filter((pl.col("action") == 1) & (pl.col("step") < 9))["record_id"]
        orders, tests = np.random.SeedSequence([5, 3]).generate_state(2)
        with measure_returns(directory, model, 3, episodes=2, seed=int(tests)) as measure:
            table = intervene(model.policy, recording, group, evaluate=measure, orders=2, seed=int(orders))
        content = json.loads((run / "interventions" / "round_00003_where.json").read_text())
        assert content["rows"] == table.to_dicts()
        assert f"without {where}" in " ".join(result.output.split())
        rows = json.loads(whence(*arguments, "--where", where, "--json").stdout)["rounds"]
        changes = {(one["outcome"], one["difference"]): one["mean"] for one in summarise_changes(table).to_dicts()}
        for row in rows:
            assert (row["round"], row["records"] - row["kept"]) == (3, len(group))
            for difference in ("filtered - full", "filtered - random"):
                mean = changes[row["outcome"], difference]
                assert row[difference]["mean"] == pytest.approx(mean)
                assert f"{mean:+.4g} [" in result.output
        # It stands apart from what leaving out the records below 0 did.
        assert whence(*arguments).exit_code == 0
        assert sorted(stamps(run)) == ["round_00003.json", "round_00003_where.json"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--rounds", "2"], "Round 2 of .* was not recorded. Recorded rounds: 1, 3"),
            (["--rounds", "b"], "--rounds is 'b'; whole numbers or ranges"),
            (["--where", "action"], "--where is 'action'"),
            (["--where", "action = 7"], "holds for none of the round's 64 records"),
        ],
    )
    def test_what_is_refused(self, run, options, message):
        result = whence("intervene", run, *options)
        with pytest.raises(WhenceError, match=message):
            raise result.exception
        assert not (run / "interventions").exists()
