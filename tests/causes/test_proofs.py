"""What taught a behaviour, proved by trainings without it: rounds in a row, controls, sentences, the commands."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from helpers.language_runs import assert_refused, invoke
from whence import Action, NonFinite, RunDirectory, WhenceError
from whence.causes import AgentTraining, find_causes, measure_trained, prove
from whence.causes.decisions import read_log_probs
from whence.causes.proofs import Proof, check_left_out
from whence.causes.retraining import VARIANTS, list_choices, match_advantages, train_variants
from whence.cli.commands.prove_command import _print_proof
from whence.llm.ppo import evaluate_log_probs, read_recipe, train_again
from whence.runs import write_flag
from whence.sb3.rounds import replay_rounds
from whence.stored.agents import load_agent, read_records
from whence.stored.agents.rounds import leave_out, load_trainable_rounds
from whence.stored.language.policies import load_trained_task
from whence.stored.language.rounds import load_start_policy, make_stored_rows

pytestmark = [
    pytest.mark.usefixtures("laboratory_cache"),
    pytest.mark.filterwarnings("ignore:You have specified a mini-batch size"),
]

TRAINED = pl.DataFrame({"round": [1] * 6 + [2] * 6, "record_id": range(12), "advantage": [0.0, 1, 2, 3, 4, 5] * 2})
LEFT_OUT = pl.DataFrame({"round": [1, 1, 2], "record_id": [0, 1, 8]})


class TestControls:
    def run(self, folder, measure, seeds):
        others = TRAINED.join(LEFT_OUT, on=["round", "record_id"], how="anti")
        choose = partial(match_advantages, TRAINED, LEFT_OUT)
        choices = list_choices(LEFT_OUT, others, choose)
        trainings = {
            name: lambda seed, choose_group=choose_group: measure(choose_group(seed), seed)
            for name, choose_group in choices.items()
        }
        return train_variants(trainings, seeds, folder, [], {})

    def test_what_is_left_out_by_hand(self, tmp_path):
        calls = []
        self.run(tmp_path, lambda group, seed: calls.append(group.rows()) or {"probability": 0.5}, seeds=3)
        groups = {variant: calls[place::4] for place, variant in enumerate(VARIANTS)}
        assert groups["all"] == [[]] * 3
        assert groups["without"] == [[(1, 0), (1, 1), (2, 8)]] * 3
        for control in ("random", "placebo"):
            assert len(set(map(tuple, groups[control]))) > 1
            for group in groups[control]:
                assert [number for number, _ in group] == [1, 1, 2]
                assert len(set(group) - {(1, 0), (1, 1), (2, 8)}) == 3

    def test_a_placebo_has_the_advantages_of_what_is_left_out(self):
        advantages = np.arange(1000.0)
        trained = pl.DataFrame({"round": [1] * 1000, "record_id": range(1000), "advantage": advantages})
        left_out = trained[[3, 500, 501, 990]].select("round", "record_id")
        draws = [match_advantages(trained, left_out, np.random.default_rng(seed)) for seed in range(40)]
        assert len({tuple(draw["record_id"]) for draw in draws}) > 30
        for draw in draws:
            low, *middle, high = draw["record_id"]
            assert low <= 10
            assert high >= 985
            assert all(494 <= record <= 507 for record in middle)

    def test_it_goes_on_after_the_training_that_was_interrupted(self, tmp_path):
        calls = []

        def measure(group, seed):
            if len(calls) == 5:
                calls.append("killed")
                raise KeyboardInterrupt
            calls.append((seed, len(group)))
            return {"probability": float(len(group))}

        with pytest.raises(KeyboardInterrupt):
            self.run(tmp_path, measure, seeds=2)
        table, file = self.run(tmp_path, measure, seeds=2)
        assert calls == [(0, 0), (0, 3), (0, 3), (0, 3), (1, 0), "killed", (1, 3), (1, 3), (1, 3)]
        assert table["value"].to_list() == [0.0, 3, 3, 3] * 2
        file.write_text("{")
        self.run(tmp_path, measure, seeds=1)
        assert len(calls) == 13

    @pytest.mark.parametrize(
        ("left_out", "message"),
        [
            ([(1, 99)], "None of the 1 records to leave out trained in these rounds, in which 12 did"),
            ([(2, record) for record in (6, 7, 8, 9)], "4 of the 6 records that trained in round 2 are to be left out"),
        ],
    )
    def test_what_cannot_be_compared(self, left_out, message):
        table = pl.DataFrame(left_out, schema=["round", "record_id"], orient="row")
        with pytest.raises(WhenceError, match=message):
            check_left_out(TRAINED, table)

    def test_what_a_training_did_not_give_is_kept_as_no_number(self, tmp_path):
        def measure(group, seed):
            if seed == 1 and len(group) == 0:
                raise NonFinite("Training diverged.")
            return {"log-probability": -1.0, "reward": float("nan") if seed == 2 and len(group) else 0.5}

        for _ in range(2):  # the second time, from the file
            table, file = self.run(tmp_path, measure, seeds=3)
            lost = table.filter(pl.col("value").is_null()).select("seed", "variant", "outcome").rows()
            diverged = [(1, "all", "log-probability"), (1, "all", "reward")]
            assert lost == [*diverged, *((2, name, "reward") for name in ("without", "random", "placebo"))]
            assert len(table) == 3 * 4 * 2
        assert "NaN" not in file.read_text()


LEVEL = [-3.1, -3.0, -2.9]


def make_proof(outcomes, run=None, behaviour="X"):
    """A proof by hand: values over seeds of each outcome, by variant."""
    rows = [
        (seed, variant, outcome, value)
        for outcome, values in outcomes.items()
        for variant, column in values.items()
        for seed, value in enumerate(column)
    ]
    table = pl.DataFrame(rows, schema=["seed", "variant", "outcome", "value"], orient="row", infer_schema_length=None)
    return Proof(behaviour, "rollouts", 64, table, run or {}, [], Path("numbers.json"))


def level(**changed):
    return dict.fromkeys(VARIANTS, LEVEL) | changed


class TestVerdicts:
    def test_what_falls_in_one_outcome_only(self):
        share = {
            "all": [0.52, 0.515, 0.51],
            "without": [0.0] * 3,
            "random": [0.48, 0.49, 0.494],
            "placebo": [0.44, 0.445, 0.45],
        }
        proof = make_proof({"log-probability": level(), "gamed": share, "reward": level(without=LEVEL[::-1])})
        assert proof.verdicts == {"log-probability": "no difference", "gamed": "falls", "reward": "no difference"}
        assert proof.text == (
            "Without these 64 rollouts the gamed falls from 0.515 to 0; without 64 random ones it is 0.488, without a "
            "placebo's 0.445. "
            "No difference is seen in the log-probability of X: it is −3 with all, −3 without these 64 rollouts, "
            "−3 without random ones, −3 without a placebo's; chance or other sets of records may do as much. "
            "No difference is seen in the reward: it is −3 with all, −3 without these 64 rollouts, "
            "−3 without random ones, −3 without a placebo's; chance or other sets of records may do as much."
        )

    def test_a_control_that_moves_as_far_is_no_difference(self):
        fallen = [-9.1, -9.0, -8.8]
        assert make_proof({"reward": level(without=fallen)}).verdicts == {"reward": "falls"}
        for control in ("random", "placebo"):
            for values in (fallen, [-19.1, -19.0, -18.8]):
                assert make_proof({"reward": level(without=fallen, **{control: values})}).verdicts["reward"] != "falls"
        assert make_proof({"reward": level(without=[2.0, 2.1, 2.3])}).verdicts == {"reward": "rises"}

    @pytest.mark.parametrize("control", ["random", "placebo"])
    def test_one_more_set_of_a_control_is_no_difference(self, control):
        # Changes of 0, -.1 and .1: one more set is within t(2) = 4.303 times .1 times sqrt(4 / 3), .497.
        sets = {control: [value + change for value, change in zip(LEVEL, (0, -0.1, 0.1), strict=True)]}
        for change, verdict in ((-0.49, "no difference"), (-0.51, "falls"), (0.49, "no difference"), (0.51, "rises")):
            proof = make_proof({"reward": level(without=[value + change for value in LEVEL], **sets)})
            assert proof.verdicts == {"reward": verdict}

    def test_a_change_that_may_be_0_is_no_difference(self):
        assert make_proof({"reward": level(without=[-3.2, -4.0, -2.9])}).verdicts == {"reward": "no difference"}

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("column", [[-9.0, float("nan"), -9.1], [-9.0, None, -9.1], [-9.0, -9.1], []])
    def test_what_is_not_measured_is_no_verdict_and_no_crash(self, variant, column):
        fallen = level(without=[-9.1, -9.0, -8.9])
        proof = make_proof({"log-probability": fallen, "reward": fallen | {variant: column}})
        assert proof.verdicts == {"log-probability": "falls", "reward": "not measured"}
        assert f"Not measured: the reward; only {9 if not column else 11} of 12 trainings gave a number." in proof.text
        assert "No difference" not in proof.text
        row = next(row for row in proof.summarise() if (row["outcome"], row["variant"]) == ("reward", variant))
        assert row["value"] == row["change"] == {"mean": None, "low": None, "high": None}

    @pytest.mark.parametrize("value", [None, float("nan")])
    def test_an_outcome_of_the_run_alone_is_shown(self, value, capsys):
        proof = make_proof({"reward": level()}, {"test return": value, "reward": value})
        assert proof.verdicts == {"reward": "no difference", "test return": "not measured"}
        _print_proof(proof, Path("runs/mine"), json=True)
        printed = json.loads(capsys.readouterr().out)
        assert (printed["text"], printed["verdicts"]) == (proof.text, proof.verdicts)
        assert (printed["run"], printed["stored"]) == ("runs/mine", {"test return": None, "reward": None})
        _print_proof(proof, Path("runs/mine"), json=False)
        assert re.search("test return . the run itself +. not measured", shown := capsys.readouterr().out)
        assert proof.text in shown
        assert make_proof({}).text == "Nothing was measured."

    def test_a_replay_unlike_the_run_has_no_verdict(self):
        returns = {
            "all": [-230.0, -223, -216],
            "without": [-400.0, -401, -402],
            "random": [-230.0, -223, -216],
            "placebo": [-230.0, -223, -216],
        }
        outcomes = {"log-probability": level(without=[-9.1, -9.0, -8.9]), "test return": returns}
        proof = make_proof(outcomes, {"log-probability": -3.05, "test return": -45.0})
        assert proof.verdicts == {"log-probability": "not comparable", "test return": "unlike the run"}
        assert proof.text == (
            "Nothing can be said, since training again on all rollouts does not give the run: the test return is −223 "
            "with all and −45 in the run itself, further off than seeds differ."
        )
        # One more seed lies within -223 ± t(2) = 4.303 times 7 √(1 + 1/3) = 34.8.
        for run, verdict in (
            (-189.0, "falls"),
            (-187.0, "unlike the run"),
            (-257.0, "falls"),
            (-259, "unlike the run"),
        ):
            assert make_proof({"test return": returns}, {"test return": run}).verdicts["test return"] == verdict

    def test_what_a_control_lacks_does_not_hide_that_the_replay_is_unlike_the_run(self):
        proof = make_proof({"reward": level(random=[None] * 3)}, {"reward": 4.0})
        assert proof.verdicts == {"reward": "unlike the run"}

    @pytest.mark.parametrize(
        ("outcome", "full", "run", "is_run"),
        [
            ("reward", -12.0, -12.1, True),
            ("reward", -12.0, -12.2, False),
            ("reward", 0.0, 0.004, False),
            ("share", 0.0, 0.004, True),
            ("share", 0.0, 0.02, False),
            ("log-probability of a token", -0.0001, -0.0004, True),
        ],
    )
    def test_seeds_that_differ_by_rounding_are_the_run(self, outcome, full, run, is_run):
        proof = make_proof({outcome: {variant: [full] * 3 for variant in VARIANTS}}, {outcome: run})
        assert proof.verdicts == {outcome: "no difference" if is_run else "unlike the run"}

    def test_one_seed_says_nothing(self):
        proof = make_proof({"share": {variant: [0.5] for variant in VARIANTS}}, {"share": 0.1}, behaviour="“1”")
        assert proof.text == (
            "Nothing can be said of the share of “1”: it is 50.0% with all, 50.0% without these 64 rollouts, 50.0% "
            "without random ones, 50.0% without a placebo's; one seed has no interval."
        )

    def test_changes_are_paired_by_seed(self):
        proof = make_proof({"reward": level(random=[-3.1, -3.01, -2.89])})
        changes = {row["variant"]: row["change"] for row in proof.summarise()}
        # The errors of paired differences 0, -.01, .01: t(2) = 4.303 times .01 / sqrt(3).
        assert changes["random"]["high"] == pytest.approx(0.0 + 4.303 * 0.01 / 3**0.5, abs=1e-4)


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    """A run of CartPole whose first three of four rounds were recorded."""
    path = tmp_path_factory.mktemp("runs") / "cart"
    settings = ["--selection", "ppo", "--rounds", 4, "--n-steps", 64, "--batch-size", 32, "--n-epochs", 2]
    result = invoke("train", "CartPole-v1", *settings, "--eval-episodes", 0, "--record-rounds", "1-3", "--run", path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture
def agent(cart, tmp_path):
    directory = RunDirectory.open(shutil.copytree(cart, tmp_path / "cart"))
    directory.sign()  # as a copy it is a stranger's
    return directory


class TestAgents:
    def test_recorded_rounds_in_a_row_are_the_runs_own_to_the_bit(self, agent):
        model, rounds, recorded = load_trainable_rounds(agent, [1, 2, 3])
        assert recorded == [1, 2, 3]
        trained, stored = replay_rounds(model, rounds), agent.policy(4)
        assert all(torch.equal(trained[name], tensor) for name, tensor in stored.items())

    def test_what_a_round_lacks_goes_on_into_the_next_whose_ratios_begin_at_1(self, agent, monkeypatch):
        model, rounds, _ = load_trainable_rounds(agent, [1, 2])
        log_probs, train = [], type(model).train

        def spy(model):
            records = rounds[len(log_probs)].records
            present = read_log_probs(model, records).numpy()
            log_probs.append((records.log_probs.numpy(), model.rollout_buffer.log_probs[:, 0], present))
            train(model)

        monkeypatch.setattr(type(model), "train", spy)
        replay_rounds(model, [leave_out(rounds[0], rounds[0].records.ids[:8].tolist()), rounds[1]])
        assert [len(minibatch) for minibatch in leave_out(rounds[0], rounds[0].records.ids.tolist()).minibatches] == []
        (stored, buffered, _), (next_stored, next_buffered, present) = log_probs
        np.testing.assert_array_equal(buffered, stored)
        np.testing.assert_allclose(next_buffered, present, atol=1e-6)
        assert abs(next_buffered - next_stored).mean() > 1e-4

    def test_a_round_that_was_not_recorded_is_trained_by_its_settings(self, agent):
        recording = load_trainable_rounds(agent, [1])[1][0]
        agent.round_path("recordings", 1).unlink()
        _, (composed,), recorded = load_trainable_rounds(agent, [1])
        assert recorded == []
        assert composed.update == recording.update
        assert composed.optimizer.settings == recording.optimizer.settings
        assert composed.optimizer.state == recording.optimizer.state == {}
        assert composed.records.fingerprint == recording.records.fingerprint

    def test_all_records_give_the_runs_own_policy_and_others_do_not(self, agent):
        record = agent.round("records", 2).row(5, named=True)
        action = Action(np.array(record["observation"], np.float32), record["action"])
        proof = prove(agent, action, rounds=[1, 2, 3], top=8, seeds=2, training=AgentTraining(test_episodes=0))
        table = proof.table.filter(outcome="log-probability")
        values = dict(table.filter(seed=0).select("variant", "value").iter_rows())
        assert values["all"] == proof.stored["log-probability"]
        assert len(set(values.values())) == 4
        assert table.filter(seed=1, variant="all")["value"][0] != values["all"]
        content = json.loads(proof.file.read_text())
        assert len(content["left_out"]["record_id"]) == proof.size == 8
        assert proof.file.parent == agent.path / "proofs"

    @pytest.mark.parametrize("alike", [0, 3, 99])
    def test_a_placebo_shares_a_tenth_at_most(self, agent, monkeypatch, alike):
        asked = []

        def find(run, behaviour, **settings):
            """The first 32 records for what is in question and for the next `alike` placebos, then 3 of them."""
            table = run.round("records", 1).select(pl.lit(1, dtype=pl.Int64).alias("round"), "record_id")
            places = pl.int_range(pl.len())
            first = pl.when(places < 3).then(2.0) if len(asked) > alike else pl.when(places < 32).then(2.0)
            asked.append(behaviour)
            return table.with_columns(score=first.when(places >= 32).then(1.0).otherwise(-1.0))

        monkeypatch.setattr("whence.causes.proofs.find_causes", find)
        groups = []
        monkeypatch.setattr("whence.causes.agent_retraining.replay_rounds", lambda model, rounds: agent.policy(1))
        monkeypatch.setattr(
            "whence.causes.agent_retraining.leave_out",
            lambda recording, records: groups.append(records) or leave_out(recording, records),
        )
        record = agent.round("records", 1).row(5, named=True)
        action = Action(np.array(record["observation"], np.float32), record["action"])
        prove(agent, action, rounds=[1], top=32, seeds=1, training=AgentTraining(test_episodes=0))
        first = agent.round("records", 1)["record_id"][:32].to_list()
        assert [*map(len, groups)] == [0, 32, 32, 32]
        assert groups[1] == first
        assert len({*groups[3]} & {*first}) == (3 if alike < 99 else 0)
        assert len(asked) == (1 + alike + 1 if alike < 99 else 11)

    def test_a_training_that_diverged_is_not_measured(self, agent, monkeypatch):
        trained = []

        def diverge(model, rounds):
            tensors = replay_rounds(model, rounds)
            trained.append(len(trained))
            return {name: tensor * (float("nan") if trained[-1] == 1 else 1) for name, tensor in tensors.items()}

        monkeypatch.setattr("whence.causes.agent_retraining.replay_rounds", diverge)
        left_out = agent.round("records", 2)[:4].select(pl.lit(2, dtype=pl.Int64).alias("round"), "record_id")
        proof = prove(agent, None, left_out, rounds=[2], seeds=2, training=AgentTraining(test_episodes=2))
        lost = proof.table.filter(pl.col("value").is_null()).select("seed", "variant", "outcome").rows()
        assert lost == [(0, "without", "log-probability"), (0, "without", "test return")]
        assert set(proof.verdicts.values()) == {"not measured"}
        assert "Not measured: the log-probability of what these records did; only 7 of 8 trainings" in proof.text

    def test_the_command_leaves_out_what_a_condition_or_flags_name(self, agent):
        for record in agent.round("records", 2)["record_id"][:3]:
            write_flag(agent.path, 2, record, "odd")
        options = ["--rounds", 2, "--seeds", 2, "--test-episodes", 0]
        shown = invoke("prove", agent.path, "--flagged", *options)
        assert shown.exit_code == 0, shown.output
        assert "3 records left out, 2 seeds, 95% intervals" in shown.output
        where = 'action = 1 and step < 9 and "pole angle" > -9 and score < 9'
        printed = json.loads(invoke("prove", agent.path, "--where", where, *options, "--json").stdout)
        records = agent.round("records", 2)
        assert printed["left_out"] == len(records.filter((pl.col("action") == 1) & (pl.col("step") < 9)))
        assert {row["variant"] for row in printed["outcomes"]} == set(VARIANTS)

    def test_the_command_leaves_out_what_taught_what_was_flagged(self, agent):
        flagged = [(number, agent.round("records", number)["record_id"][3]) for number in (1, 2)]
        for number, record in flagged:
            write_flag(agent.path, number, record, "odd")
        causes = find_causes(agent, agent.flags(), rounds=[1, 2, 3], method="nearest")
        assert not {*flagged} & {*causes["round", "record_id"].rows()}
        assert len(causes) == 3 * 64 - 2
        options = ["--rounds", "1-3", "--seeds", 2, "--test-episodes", 0, "--top", 5]
        printed = json.loads(invoke("prove", agent.path, "--why-flagged", *options, "--json").stdout)
        assert "log-probability of one of 2 flagged records" in printed["text"]
        (file,) = (agent.path / "proofs").iterdir()
        left_out = json.loads(file.read_text())["left_out"]
        best = causes.sort("score", descending=True)["round", "record_id"].rows()[:5]
        assert sorted(zip(*left_out.values(), strict=True)) == sorted(best)
        model = load_agent(agent, 4)
        parts = [read_records(agent, number, model, ids=[record]) for number, record in flagged]
        expected = np.mean([float(read_log_probs(model, part)) for part in parts])
        assert printed["stored"]["log-probability"] == pytest.approx(expected, abs=1e-6)
        assert_refused("both name the behaviour", "prove", agent.path, "--why-flagged", "--record", 5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "Nothing says what to leave out. Name a behaviour"),
            (["--why-flagged"], "Nothing of .* is flagged"),
            (["--flagged"], "None of the 0 records to leave out trained in these rounds"),
            (["--flagged", "--where", "action = 1"], "--flagged and --where both name the records"),
            (["--where", "action = 7"], "holds for no record of these rounds"),
            (["--where", "action"], "--where is 'action'"),
            (["--record", 5, "--top", 999], "score above 0, and top is 999"),
            (["--record", 5, "--by", "nobody"], "method is 'nobody'"),
            (["--record", 5, "--by", "bm25"], "--by bm25 is for language models: leave it out"),
            (["--prompt", "a"], "--prompt is for language models"),
            (["--record", 5, "--rounds", "1,3"], "Round 2 is missing between rounds 1 and 3"),
            (["--record", 5, "--rounds", 9], "Round 9 is not in"),
            (["--prompt", "a", "--response", "b"], "is a run of an agent, and --prompt is for language models"),
            (["--flagged", "--learning-rate", 0.1], "--learning-rate is for language models: leave it out"),
        ],
    )
    def test_what_is_refused(self, agent, options, message):
        assert_refused(message, "prove", agent.path, "--test-episodes", 0, *options)
        assert not (agent.path / "proofs").exists()


class TestLanguageModels:
    def test_trls_steps_are_taken_again(self, runs):
        directory = runs("grpo")
        policy, tokenizer = load_start_policy(directory, 1)
        tables = {number: directory.round("records", number) for number in directory.rounds()}
        rows = {number: make_stored_rows(table, tokenizer, "cpu") for number, table in tables.items()}
        weights = {number: torch.tensor(table["keep"].to_list()).float() for number, table in tables.items()}
        recipe = read_recipe(directory.config)
        assert (recipe.epochs, recipe.beta, recipe.schedule) == (2, 0.1, "linear")
        before = evaluate_log_probs(policy, rows[3], recipe)
        train_again(policy, rows, weights, recipe, seed=0)
        after = evaluate_log_probs(policy, rows[3], recipe)
        stored = evaluate_log_probs(load_trained_task(directory)[0].model, rows[3], recipe)
        assert (after - stored).abs().max() < 1e-3 * (before - stored).abs().max()

    @pytest.mark.parametrize(
        ("algorithm", "loss_type", "averages"),
        [("grpo", "grpo", True), ("grpo", "dr_grpo", False), ("grpo", "dapo", False), ("rloo", None, True)],
    )
    def test_a_step_is_a_mean_as_trls_loss_is(self, algorithm, loss_type, averages):
        settings = {} if loss_type is None else {"loss_type": loss_type}
        assert read_recipe({"algorithm": algorithm, "trl": settings}).averages_rows is averages

    def test_what_taught_flagged_responses_is_proved(self, runs, tmp_path, monkeypatch):
        directory = RunDirectory.open(shutil.copytree(runs("ppo").path, tmp_path / "run"))
        directory.sign()
        flagged = directory.round("records", 2)["record_id"][[1, 4]].to_list()
        for record in flagged:
            write_flag(directory.path, 2, record, "gamed")
        questions = []

        def find(run, behaviour, **settings):
            questions.append(behaviour["round", "record_id"].rows())  # a placebo's are asked about as keys, too
            return find_causes(run, behaviour, **settings)

        monkeypatch.setattr("whence.causes.proofs.find_causes", find)
        options = ["--by", "bm25", "--top", 1, "--seeds", 1, "--answers", 4, "--json"]
        done = invoke("prove", directory.path, "--why-flagged", *options)
        assert done.exit_code == 0, done.exception
        printed = json.loads(done.stdout)
        assert questions[0] == [(2, record) for record in flagged]
        assert [len(stored) for stored in questions] == [2] * len(questions)
        assert len(questions) > 1
        (file,) = (directory.path / "proofs").iterdir()
        content = json.loads(file.read_text())
        best = find_causes(directory, directory.flags(), method="bm25").filter(pl.col("score") != 0)
        best = best.sort("score", descending=True)["round", "record_id"].rows()[:1]
        assert sorted(zip(*content["left_out"].values(), strict=True)) == sorted(best)
        assert content["records"] == [[2, record] for record in flagged]
        assert {row["outcome"] for row in printed["outcomes"]} == {"log-probability", "reward"}
        expected = measure_trained(directory, directory.flags())
        assert printed["stored"]["log-probability"] == pytest.approx(expected, abs=1e-5)

    def test_the_command_proves_a_response(self, runs, tmp_path):
        directory = RunDirectory.open(shutil.copytree(runs("ppo").path, tmp_path / "run"))
        directory.sign()
        row = directory.round("records", 1).row(3, named=True)
        example = ["--prompt", row["prompt"], "--response", row["response"], "--by", "bm25", "--top", 1]
        options = ["--seeds", 1, "--answers", 4, "--match", "1"]
        shown = invoke("prove", directory.path, *example, *options)
        assert shown.exit_code == 0, shown.output
        assert "Nothing can be said of the share of “1”: it is" in shown.output
        assert "Nothing can be said of the log-probability: it is −" in shown.output
        assert "Nothing can be said of the reward: it is " in shown.output
        assert "Trained by AdamW, learning rate" in shown.output
        write_flag(directory.path, 2, directory.round("records", 2).filter("keep")["record_id"][0], "")
        graders = tmp_path / "graders.py"
        graders.write_text("def grade(prompts, responses):\n    return [float('nan'), *map(len, responses[1:])]\n")
        options += ["--reward", f"{graders}:grade", "--json"]
        broken = json.loads(invoke("prove", directory.path, "--flagged", *options).stdout)
        assert broken["left_out"] == 1
        outcomes = ["share", "log-probability", "reward"]
        assert list(dict.fromkeys(row["outcome"] for row in broken["outcomes"])) == outcomes
        rows = [row for row in broken["outcomes"] if row["outcome"] == "log-probability"]
        assert broken["verdicts"] == {"share": "one seed", "log-probability": "one seed", "reward": "not measured"}
        assert len({row["value"]["mean"] for row in rows if row["variant"] in ("all", "without", "random")}) == 3

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--flagged", "--record", 0], "is a run of a language model, and --record is for agents: leave it out"),
            (["--where", "action = 1"], "--where is for agents"),
            (["--flagged", "--test-episodes", 0], "--test-episodes is for agents"),
            (["--prompt", "a"], "--prompt and --response go together"),
            (["--flagged", "--answers", -1], "answers is -1; at least 0 is needed"),
        ],
    )
    def test_what_is_refused(self, tmp_path, options, message):
        RunDirectory.create(tmp_path, {"kind": "language"}).write_round("records", 1, pl.DataFrame({"record_id": [0]}))
        assert_refused(message, "prove", tmp_path, *options)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"behaviour": Action(0, 0)}, r"is a run of a language model, and .* is for agents"),
            ({"training": AgentTraining()}, r"is a run of a language model, and .* is for agents"),
            ({"env": "E-v1"}, r"is a run of a language model, and .* is for agents"),
            ({}, "Give the trainer's learning rate"),  # which rollouts of another trainer do not say
        ],
    )
    def test_in_python_too(self, tmp_path, given, message):
        directory = RunDirectory.create(tmp_path, {"kind": "language", "algorithm": "scored"})
        table = {"record_id": [0], "prompt_ids": [[1]], "response_ids": [[2]], "advantage": [0.5]}
        directory.write_round("records", 1, pl.DataFrame(table))
        with pytest.raises(WhenceError, match=message):
            prove(directory, left_out=pl.DataFrame({"round": [1], "record_id": [0]}), **given)
