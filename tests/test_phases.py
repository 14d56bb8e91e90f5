"""When behaviours arose: the graph and its roughness, change points, behaviours, the command and the page's part."""

import itertools
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from stable_baselines3 import PPO

from test_report import page_of, run_of
from toys import Toy
from whence import IIF, RunDirectory, attribute
from whence.diagnosis import (
    behaviour_by_hand,
    behaviour_of_records,
    find_behaviour,
    summarise_history,
    trace_phases,
    write_history,
)
from whence.diagnosis.decisions import rank_rises
from whence.diagnosis.phases import describe_history, find_rise
from whence.diagnosis.roughness import (
    Segment,
    compute_roughness,
    expect_roughness,
    link_similar,
    median_distance,
    name_pattern,
    split_curve,
)
from whence.experiments import configure, load_round, run
from whence.page import ExploredRun
from whence.page.html import list_figures
from whence.sb3 import InfluenceCallback, model_objective


def roughness_by_loop(embeddings, values, neighbours):
    """LDA's formula (C.2), pair by pair; nodes as near as the last neighbour are neighbours."""
    n = len(values)
    distances = [[math.dist(a, b) for b in embeddings] for a in embeddings]
    sigma = np.median([distances[i][j] for i in range(n) for j in range(i)])
    reach = [sorted(distances[i][j] for j in range(n) if j != i)[min(neighbours, n - 1) - 1] for i in range(n)]
    above = below = 0.0
    for i in range(n):
        for j in range(i + 1, n):
            if distances[i][j] <= max(reach[i], reach[j]):
                weight = math.exp(-((distances[i][j] / sigma) ** 2))
                above += weight * (values[i] - values[j]) ** 2
                below += weight
    return above / below


class TestRoughness:
    LINE = np.array([[0.0], [1.0], [3.0]])
    VALUES = np.array([1.0, 0.5, 0.0])

    def test_three_nodes_by_hand(self):
        # Distances 1, 2 and 3, so σ is 2.
        near, far, farthest = math.exp(-1 / 4), math.exp(-4 / 4), math.exp(-9 / 4)
        by_hand = (near * 0.25 + far * 0.25 + farthest * 1) / (near + far + farthest)
        assert compute_roughness(link_similar(self.LINE, 2), self.VALUES) == pytest.approx(by_hand, rel=1e-12)

    def test_a_pair_counts_once_if_either_is_the_others_neighbour(self):
        graph = link_similar(self.LINE, 1)  # the third's neighbour is the second, whose neighbour is the first
        assert list(zip(graph.first, graph.second, strict=True)) == [(0, 1), (1, 2)]
        assert graph.weights == pytest.approx([math.exp(-1 / 4), math.exp(-1)])
        assert compute_roughness(graph, self.VALUES) == pytest.approx(0.25)

    @pytest.mark.parametrize("neighbours", [1, 5, 20, 100])
    def test_it_is_what_a_double_loop_computes(self, neighbours):
        generator = np.random.default_rng(0)
        embeddings = generator.integers(-9, 10, size=(40, 3)).astype(float)  # whole: equal distances are exactly so
        embeddings[25:31] = embeddings[3]  # equal states
        values = generator.uniform(size=40)
        computed = compute_roughness(link_similar(embeddings, neighbours), values)
        assert computed == pytest.approx(roughness_by_loop(embeddings.tolist(), values, neighbours), rel=1e-10)

    def test_the_expected_roughness_is_the_mean_over_all_permutations(self):
        embeddings, values = np.array([[0.0], [1.0], [1.5], [4.0]]), np.array([0.1, 1.0, 0.4, 0.7])
        graph = link_similar(embeddings, 2)
        every = [compute_roughness(graph, np.array(order)) for order in itertools.permutations(values)]
        assert expect_roughness(values) == pytest.approx(np.mean(every), rel=1e-12)

    def test_distances_of_mostly_equal_states(self):
        assert median_distance(np.array([[0.0]] * 9 + [[2.0]])) == 2.0
        assert median_distance(np.zeros((5, 2))) == 1.0
        assert math.isnan(compute_roughness(link_similar(np.zeros((1, 2))), np.ones(1)))


def split_by_brute_force(values, segments, least):
    """The smallest sum of squares in so many segments."""
    n = len(values)

    def squares(part):
        return ((part - part.mean()) ** 2).sum()

    cuts = (
        (0, *between, n)
        for between in itertools.combinations(range(1, n), segments - 1)
        if min(np.diff([0, *between, n])) >= least
    )
    return min(cuts, key=lambda cut: sum(squares(values[a:b]) for a, b in itertools.pairwise(cut)))


class TestChangePoints:
    def test_a_made_curve(self):
        noise = np.random.default_rng(0).normal(size=37) / 20
        curve = np.r_[np.full(10, 3.0), np.full(7, 2.0), np.full(20, 1.0)] + noise
        segments = split_curve(curve)
        assert [(segment.start, segment.end) for segment in segments] == [(0, 10), (10, 17), (17, 37)]
        assert [segment.level for segment in segments] == pytest.approx([3, 2, 1], abs=0.05)

    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_the_best_of_all_segments(self, seed):
        curve = np.cumsum(np.random.default_rng(seed).normal(size=15)) * 5
        segments = split_curve(curve)
        bounds = (0, *(segment.end for segment in segments))
        assert bounds == split_by_brute_force(curve, len(segments), 3)

    def test_noise_is_one_segment(self):
        generator = np.random.default_rng(0)
        counts = [len(split_curve(generator.normal(size=50))) for _ in range(200)]
        assert np.mean(np.array(counts) == 1) > 0.95

    @pytest.mark.parametrize("curve", [[], [1.0], [1.0, 9.0, 1.0, 9.0, 9.0], [2.0] * 30])
    def test_short_and_constant_curves(self, curve):
        assert split_curve(np.array(curve)) == ([Segment(0, len(curve), np.mean(curve))] if curve else [])

    def test_patterns(self):
        assert name_pattern([3, 2, 1]) == "three phases"
        assert name_pattern([3, 1, 2]) == name_pattern([2, 3, 1]) == name_pattern([2, 1]) == "one fall"
        assert name_pattern([1]) == name_pattern([1, 2]) == name_pattern([2, 1, 3]) == "no fall"


HYPERPARAMETERS = {"n_steps": 128, "n_epochs": 2, "batch_size": 64}


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    """A run of CartPole of seven rounds, whose selection drops records."""
    path = tmp_path_factory.mktemp("cart") / "run"
    run(configure(env="CartPole-v1", arm="iif", rounds=7, eval_episodes=0, hyperparameters=HYPERPARAMETERS), path)
    return RunDirectory.open(path)


@pytest.fixture(scope="module")
def history(cart):
    """The history of what was done in a record of round 6."""
    return trace_phases(cart, behaviour_of_records(cart, [700]), neighbours=10)


class TestBehaviours:
    def test_rises_by_hand(self):
        curves = np.array([[0.1, 0.1, 0.9, 0.5], [0.5, 0.7, 0.5, 0.5], [0.9, 0.5, 0.1, 0.5]])
        # A steady rise of 0.8; a rise of 0.4 over steps of 0.8; a steady fall; nothing.
        assert rank_rises(curves) == pytest.approx([0.8, 0.4 * 0.4 / 0.8, -0.8, 0])

    def test_what_training_raised_most_is_found(self, cart, tmp_path):
        # A copy that pushes to the side of the pole's angle more and more, the more the larger the angle.
        directory = RunDirectory.create(tmp_path / "made", cart.config)
        directory.write_round("records", 7, cart.round("records", 7))
        model, records = load_round(cart, 7)
        with torch.no_grad():
            for parameter in model.policy.parameters():
                parameter.zero_()
            for layer in (model.policy.mlp_extractor.policy_net[0], model.policy.mlp_extractor.policy_net[2]):
                layer.weight[0, 2 if layer.in_features == 4 else 0] = 1.0
        for number in (1, 2, 3):
            with torch.no_grad():
                model.policy.action_net.weight[1, 0] = 3.0 * (number - 1)
            directory.write_policy(number, dict(model.policy.named_parameters()))
        behaviour = find_behaviour(directory)
        place = int((records.ids == behaviour.record_ids[0]).nonzero())
        angles = records.observations[:, 2].double().numpy()
        assert place == np.abs(angles).argmax()
        assert int(behaviour.target.as_records(records).actions) == (angles[place] > 0)

    def test_records_name_a_state_and_an_action(self, cart):
        _, records = load_round(cart, 6)
        position = int((records.ids == 700).nonzero())
        action = int(records.actions[position])
        own, other = (behaviour_of_records(cart, [700], action=chosen) for chosen in (None, 1 - action))
        states = [each.target.as_records(records) for each in (own, other)]
        assert all(torch.equal(each.observations[0], records.observations[position]) for each in states)
        assert [int(each.actions) for each in states] == [action, 1 - action]
        assert (own.round, own.record_ids) == (6, (700,))
        by_hand = behaviour_by_hand(cart, records.observations[position].tolist(), action)
        assert by_hand.key == own.key != other.key


class TestHistories:
    def test_a_round_is_measured_as_lda_does(self, cart, history):
        """Positive scores over the largest, on the graph of the last policy's penultimate layer."""
        model, records = load_round(cart, 4)
        target = history.behaviour.target
        influence = attribute(model.policy, records, target=target, objective=model_objective(model))
        scores = influence.scores.double().numpy()
        last, _ = load_round(cart, 7)
        with torch.no_grad():
            for name, parameter in last.policy.named_parameters():
                parameter.copy_(cart.policy(8)[name])
            latent = last.policy.mlp_extractor.policy_net(records.observations).double().numpy()
        positive = scores > 0
        values = scores[positive] / scores.max()
        row = history.rounds.row(3, named=True)
        assert row["roughness"] == pytest.approx(roughness_by_loop(latent[positive], values, 10), rel=1e-5)
        assert row["expected"] == pytest.approx(2 * values.var(ddof=1), rel=1e-6)
        assert row["relative"] == pytest.approx(row["roughness"] / row["expected"])
        assert (row["nodes"], row["low"] < row["expected"] < row["high"]) == (positive.sum(), True)

    def test_the_probability_is_that_of_each_rounds_policy(self, cart, history):
        model, records = load_round(cart, 6)
        state = records.observations[records.ids == 700]
        action = int(records.actions[records.ids == 700])
        rates = []
        for number in range(1, 9):
            with torch.no_grad():
                for name, parameter in model.policy.named_parameters():
                    parameter.copy_(cart.policy(number)[name])
                rates.append(float(model.policy.get_distribution(state).distribution.logits[0, action]))
        assert history.rounds["log_prob"].to_list() == pytest.approx(rates[:-1], abs=1e-6)
        assert history.rounds["log_prob_after"].to_list() == pytest.approx(rates[1:], abs=1e-6)

    def test_moments_are_of_records_that_trained(self, cart, history, tmp_path):
        for phase in history.phases:
            scores = [moment.score for _, moment in phase.moments]
            assert scores == sorted(scores, reverse=True)
            assert all(phase.first <= number <= phase.last for number, _ in phase.moments)
        number, best = history.phases[0].moments[0]
        shutil.copytree(cart.path, tmp_path / "run")
        directory = RunDirectory.open(tmp_path / "run")
        dropped = pl.when(pl.col("record_id").is_in(best.record_ids)).then(False).otherwise(pl.col("keep"))
        directory.write_round("records", number, directory.round("records", number).with_columns(keep=dropped))
        again = trace_phases(directory, history.behaviour, neighbours=10)
        assert best.record_id not in [moment.record_id for _, moment in again.phases[0].moments]
        assert again.rounds.equals(history.rounds)

    @pytest.mark.parametrize(("action", "is_density"), [("box", True), ("multidiscrete", False)])
    def test_other_actions(self, tmp_path, action, is_density):
        model = PPO("MlpPolicy", Toy(action=action), n_steps=32, batch_size=32, n_epochs=3, seed=0, device="cpu")
        model.learn(160, callback=InfluenceCallback(IIF(), run=tmp_path / "run"))
        directory = RunDirectory.open(tmp_path / "run")
        settings = {"env": lambda: Toy(action=action)}
        behaviour = find_behaviour(directory, **settings)
        history = trace_phases(directory, behaviour, neighbours=5, permutations=3, **settings)
        assert history.is_density is is_density
        last = directory.round("records", 5).filter(pl.col("record_id") == behaviour.record_ids[0])
        assert history.rounds["log_prob"][-1] == pytest.approx(last["log_prob"][0], abs=1e-5)


class TestSentences:
    def test_when_a_curve_rose_by_hand(self):
        # A tenth of the way is left after value 2, nine tenths are reached at value 4: steps 2 and 3.
        assert find_rise([0.0, 0.3, 0.05, 0.5, 0.95, 1.0]) == (2, 3)
        assert find_rise([1.0, 0.0]) == (0, 0)
        assert find_rise([0.5, 0.9, 0.5]) is None

    @pytest.mark.parametrize(
        ("levels", "permuted", "words"),
        [
            ([3, 2, 1], ["three phases"] * 15, "three phases appear"),
            ([3, 2, 1], ["three phases"] * 15, "15 of 20 histories show the same: the scores' .* can make it"),
            ([3, 2, 1], ["three phases"], " 1 of 20 histories show the same: the scores' .* does not make it"),
            ([2, 1], ["one fall"] * 20, "three phases do not appear .roughness ends lower"),
            ([1, 2], ["no fall"] * 20, "three phases do not appear .roughness does not end lower"),
        ],
    )
    def test_what_phases_are_said_to_be(self, history, levels, permuted, words):
        phases = tuple(replace(history.phases[0], roughness=level) for level in levels)
        patterns = tuple(permuted + ["no fall" if permuted[0] != "no fall" else "one fall"] * (20 - len(permuted)))
        made = replace(history, phases=phases, permuted_patterns=patterns)
        assert any(re.search(words, sentence) for sentence in describe_history(made))


class TestCommand:
    def test_sentences_tables_and_numbers(self, whence, cart, tmp_path):
        code, out, err = whence("phases", cart.path, "--record", 700)
        assert code == 0, err
        assert out.index("LDA's three phases") < out.index("Phases") < out.index("Moments that raised")
        files = list((cart.path / "phases").glob("*.json"))
        assert any(json.loads(file.read_text())["behaviour"]["records"] == [700] for file in files)


HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def put_history(directory, history, **changes):
    content = summarise_history(history) | changes
    return write_history(directory, history, content)


class TestPage:
    def test_results_are_drawn_and_escaped(self, tmp_path, history):
        directory = run_of(tmp_path / "run", {"env": "CartPole-v1"}, (1, 2))
        behaviour = {"name": HOSTILE, "round": 6, "records": [700]}
        put_history(directory, history, behaviour=behaviour, sentences=[HOSTILE])
        page = page_of(directory)
        axes = [figure["layout"]["yaxis"]["title"]["text"] for figure in page.data("figures-data")]
        assert axes == ["share of records kept", "π(a|s)", "roughness", "roughness / permuted"]
        # Text in the place of numbers would name categories, in which Plotly reads tags.
        layouts = [figure["layout"] for figure in page.data("figures-data")]
        assert {layout[axis]["type"] for layout in layouts for axis in ("xaxis", "yaxis")} == {"linear"}
        text = (tmp_path / "page.html").read_text()
        assert text.count("<script>window.hacked") == 0
        assert f"#run=0&amp;round={history.phases[0].moments[0][0]}" in text
        titles = [figure["title"] for figure in list_figures([ExploredRun(directory)])]
        assert titles[-3:] == [
            f"{kind}: {HOSTILE}" for kind in ("Probability", "Roughness", "Roughness next to chance")
        ]

    def test_text_in_the_place_of_a_number_leaves_out_its_file_alone(self, tmp_path, history):
        directory = run_of(tmp_path / "run", {"env": "CartPole-v1"}, (1, 2))
        phases = summarise_history(history)["phases"]
        phases[0]["moments"][0]["advantage"] = HOSTILE
        path = put_history(directory, history, phases=phases)
        page_of(directory)
        assert f"{path} is not shown" in (tmp_path / "page.html").read_text()
