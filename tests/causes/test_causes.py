"""What taught a policy a decision: scores of all rounds, decisions to ask about, and what is told of them."""

import json
import math
import re
import shutil
import warnings
from dataclasses import replace

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from scipy.stats import rankdata
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

from helpers.episodes import train
from helpers.gradients import differentiate
from helpers.moment_views import hostile_view, measure
from helpers.serving import Server, end_processes
from helpers.toys import MaskedToy, Toy
from whence import IIF, Action, RunDirectory, RunDirectoryError, WhenceError, attribute
from whence.causes import compare_log_probs, find_causes, play_episode, rank_moments, read_record, sum_rounds
from whence.page import CauseView, Decision, ExploredRun, describe_moment
from whence.page.pictures import draw_causes
from whence.page.questions import Questions
from whence.runs import write_flag
from whence.sb3 import InfluenceCallback, model_objective
from whence.stored.agents import load_round
from whence.stored.agents.rounds import load_agent

ROUNDS, STEPS = 3, 128


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    """A run of CartPole that drops records."""
    settings = {"rounds": ROUNDS, "n_steps": STEPS, "hyperparameters": {"n_epochs": 3, "learning_rate": 3e-3}}
    return train(tmp_path_factory.mktemp("cart") / "run", env="CartPole-v1", **settings)


def learn(path, env, *, algorithm=PPO, rounds=2, **settings) -> RunDirectory:
    model = algorithm("MlpPolicy", env, n_steps=64, batch_size=32, n_epochs=2, seed=1, device="cpu", **settings)
    model.learn(rounds * 64, callback=InfluenceCallback(IIF(drop=0.5), run=path))
    return RunDirectory.open(path)


STATES = np.array([[0.0, 0.1, 0.02, -0.1], [0.1, -0.2, 0.0, 0.3], [0.0, 0.0, 0.05, 0.0]], np.float32)
ACTIONS = np.array([1, 1, 0])


class TestScores:
    def test_a_plain_loop_over_rounds_gives_the_same(self, cart):
        causes = find_causes(cart, Action(STATES, ACTIONS))
        expected = []
        for number in range(1, ROUNDS + 1):
            model, records = load_round(cart, number)
            influence = attribute(
                model.policy, records, target=Action(STATES, ACTIONS), objective=model_objective(model)
            )
            keep = cart.round("records", number)["keep"].to_numpy()
            expected.append(np.where(keep, influence.scores.numpy(), 0))
        assert causes["score"].to_numpy() == pytest.approx(np.concatenate(expected), rel=1e-5, abs=1e-7)
        assert causes["round"].to_list() == [number for number in range(1, ROUNDS + 1) for _ in range(STEPS)]
        stored = pl.concat([cart.round("records", number) for number in cart.rounds()])
        for name in ("record_id", "episode_id", "step", "action", "advantage", "keep"):
            assert causes[name].to_list() == stored[name].to_list()
        assert (causes["score"] == 0).sum() == (~causes["keep"]).sum() > 0

    def test_what_cannot_be_scored_is_refused(self, cart, tmp_path):
        with pytest.raises(WhenceError, match=r"method is 'influenc'\. Did you mean influence"):
            find_causes(cart, Action(STATES[0], 1), method="influenc")
        with pytest.raises(RunDirectoryError, match="holds no rounds"):
            find_causes(RunDirectory.create(tmp_path / "empty", {}), Action(STATES[0], 1))

    def test_images_are_observed_again_where_they_are_not_stored(self, tmp_path):
        directory = learn(tmp_path / "run", Toy("image"), policy_kwargs={"net_arch": [8]})
        state = np.stack(directory.round("records", 1)["observation"].to_numpy())[3].reshape(3, 8, 8)
        whole = find_causes(directory, Action(state, 1), env=lambda: Toy("image"))
        for number in (1, 2):
            table = directory.round("records", number)
            directory.write_round("records", number, table.drop("observation"))
        again = find_causes(directory, Action(state, 1), env=lambda: Toy("image"))
        assert again["score"].to_numpy() == pytest.approx(whole["score"].to_numpy(), rel=1e-5, abs=1e-7)

    def test_action_masks(self, tmp_path):
        directory = learn(tmp_path / "run", MaskedToy(), algorithm=MaskablePPO)
        table = directory.round("records", 2)
        masks = np.stack(table["action_mask"].to_numpy())
        place = int(np.flatnonzero(masks.sum(axis=1) == 2)[0])
        state, action = np.stack(table["observation"].to_numpy())[place], table["action"][place]
        masked, free = (
            find_causes(directory, Action(state, action, mask), env=MaskedToy) for mask in (masks[place], None)
        )
        assert masked["score"].to_list() != free["score"].to_list()
        record = int(table["record_id"][place])
        target = read_record(directory, 2, record, env=MaskedToy)
        assert target.action_mask.tolist() == [masks[place].tolist()]
        _, last, _ = compare_log_probs(directory, target, env=MaskedToy)
        logits = load_agent(directory, 3, env=MaskedToy).policy.get_distribution(torch.as_tensor(state[None]))
        probabilities = logits.distribution.probs.detach().numpy()[0] * masks[place]
        assert math.exp(last) == pytest.approx(probabilities[action] / probabilities.sum(), rel=1e-4)


class TestNearest:
    @pytest.mark.parametrize(
        ("action", "normalises"),
        [pytest.param("discrete", True, marks=pytest.mark.long), ("box", True), ("discrete", False)],
    )
    def test_advantage_times_cosine_by_plain_autograd(self, tmp_path, action, normalises):
        settings = {"policy_kwargs": {"net_arch": [8]}, "normalize_advantage": normalises}
        directory = learn(tmp_path / "run", Toy(action=action), **settings)
        table = directory.round("records", 2)
        states, actions = (np.stack(table[name].to_numpy())[:12] for name in ("observation", "action"))
        causes = find_causes(directory, Action(states, actions), method="nearest", env=lambda: Toy(action=action))
        for number in (1, 2):
            model, records = load_round(directory, number, env=lambda: Toy(action=action))
            gradients = []
            for pairs in (records, Action(states, actions).as_records(records)):
                log_probs = model.policy.evaluate_actions(pairs.observations, pairs.actions)[1]
                gradients.append([differentiate(each, model.policy.parameters()) for each in log_probs])
            ones, examples = (nn.functional.normalize(torch.stack(each), dim=1) for each in gradients)
            cosines = (ones @ examples.T).sort(dim=1, descending=True).values[:, :10]
            keep = directory.round("records", number)["keep"].to_numpy()
            advantages = records.advantages
            if normalises:  # as PPO trains on them
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            expected = (advantages * cosines.mean(dim=1)).double().numpy() * keep
            scores = causes.filter(round=number)["score"].to_numpy()
            assert scores == pytest.approx(expected, abs=1e-5 * abs(expected).max())


class Bandit(gym.Env):
    """Two states that are told apart; in a tenth of the steps action 1 pays 3 in the first of them, else none does."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def _observe(self):
        self._state = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self._state]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        pays = self._state == 0 and action == 1 and self.np_random.random() < 0.1
        return self._observe(), 3.0 * pays + 0.1 * float(self.np_random.normal()), True, False, {}


@pytest.fixture(scope="module")
def bandit(tmp_path_factory):
    return learn(tmp_path_factory.mktemp("bandit") / "run", Bandit(), rounds=8, learning_rate=3e-3)


@pytest.mark.parametrize("method", ["influence", "nearest"])
def test_a_planted_cause_is_found_again(bandit, method):
    causes = find_causes(bandit, Action([1.0, 0.0], 1), method=method, env=Bandit)
    paid = causes["reward"].to_numpy() > 1.5
    trained = causes["keep"].to_numpy()
    assert 5 < (paid & trained).sum() < 0.15 * len(paid)
    ranks = rankdata(causes["score"].to_numpy())[trained]
    count = (paid & trained).sum()
    auroc = (ranks[paid[trained]].sum() - count * (count + 1) / 2) / (count * (trained.sum() - count))
    assert auroc > 0.95
    best = causes.sort("score", descending=True).head(5)
    assert (best["reward"] > 1.5).mean() >= 0.8


class TestRanking:
    CAUSES = pl.DataFrame(
        {
            "round": [1] * 6 + [2] * 6,
            "record_id": range(12),
            "env_index": [0] * 12,
            "episode_id": range(12),
            "step": [0] * 12,
            "action": [0] * 12,
            "advantage": [1.0] * 12,
            "score": [9.0, 8.0, 7.0, 6.0, -1.0, 0.0, 5.0, -2.0, 4.0, -3.0, 0.0, 0.5],
        }
    )

    def test_no_round_fills_the_list(self):
        moments = rank_moments(self.CAUSES, lowest=False, most=5)
        assert [(entry.round, entry.moment.score) for entry in moments] == [(1, 9), (1, 8), (1, 7), (2, 5), (2, 4)]
        moments = rank_moments(self.CAUSES, lowest=True, most=2)
        assert [(entry.round, entry.moment.score) for entry in moments] == [(2, -3), (2, -2)]

    def test_sums_by_round(self):
        assert sum_rounds(self.CAUSES).to_dicts() == [
            {"round": 1, "records": 6, "raised": 30.0, "lowered": -1.0},
            {"round": 2, "records": 6, "raised": 9.5, "lowered": -5.0},
        ]


class TestDecisions:
    def test_an_episode_is_played_again_by_its_seed(self, cart):
        episodes = []
        for place, seed in enumerate((3, 3, 4)):
            torch.manual_seed(place)  # which is to play no part
            episodes.append(play_episode(cart, seed=seed))
        first, again, other = episodes
        assert torch.equal(first.records.observations, again.records.observations)
        assert torch.equal(first.records.actions, again.records.actions)
        assert not torch.equal(first.records.observations[0], other.records.observations[0])
        env = gym.make("CartPole-v1")
        observation, _ = env.reset(seed=3)
        for step, action in enumerate(first.records.actions.tolist()):
            assert np.array_equal(first.records.observations[step].numpy(), observation)
            observation, _, terminated, truncated, _ = env.step(action)
            assert (terminated or truncated) == (step == len(first) - 1)

    def test_probabilities_are_of_the_last_and_of_the_first_policy(self, cart):
        episode = play_episode(cart, seed=1)
        for number, log_probs in ((1, episode.first_log_probs), (ROUNDS + 1, episode.records.log_probs)):
            policy = load_agent(cart, number).policy
            with torch.no_grad():
                expected = policy.get_distribution(episode.records.observations).log_prob(episode.records.actions)
            assert log_probs.numpy() == pytest.approx(expected.numpy(), abs=1e-6)
        target = episode.target(2)
        before, after, is_discrete = compare_log_probs(cart, target)
        assert (before, after) == pytest.approx(
            (float(episode.first_log_probs[2]), float(episode.records.log_probs[2])), abs=1e-5
        )
        assert is_discrete

    def test_policies_that_read_more_than_an_environment_shows(self, tmp_path):
        normalised = learn(tmp_path / "normalised", VecNormalize(DummyVecEnv([Toy])))
        masked = learn(tmp_path / "masked", MaskedToy(), algorithm=MaskablePPO)
        assert play_episode(normalised, env=Toy).records.action_masks is None
        assert play_episode(masked, env=MaskedToy).records.action_masks is not None


class TestCommand:
    def test_the_default_asks_about_the_step_that_rose_most(self, cart, whence):
        code, out, _ = whence("why", cart.path, "--top", 3)
        episode = play_episode(cart)
        step = episode.choose_step()
        assert code == 0
        assert "the one whose action's probability rose most" in out
        action = ["left", "right"][int(episode.records.actions[step])]
        assert f"“{action}” at step {step} of an episode with seed 0: its probability was" in out
        for text in (
            "Sums of scores in rounds 1 to 3",
            "The 3 moments that speak for it most",
            "speak against it most",
        ):
            assert text in out, text

    def test_json_says_what_the_function_finds(self, cart, whence):
        code, out, _ = whence("why", cart.path, "--episode-seed", 2, "--step", 1, "--json", "--top", 4)
        content = json.loads(out)
        target = play_episode(cart, seed=2).target(1)
        causes = find_causes(cart, target, method="nearest")
        assert code == 0
        assert content["sums"]["raised"] == pytest.approx(sum_rounds(causes)["raised"].to_list(), rel=1e-5)
        for name, lowest in (("raised", False), ("lowered", True)):
            expected = rank_moments(causes, lowest=lowest, most=4)
            assert [(row["round"], row["record"]) for row in content[name]] == [
                (entry.round, entry.moment.record_id) for entry in expected
            ]
        assert content["raised"][0]["action"] in ("left", "right")

    def test_a_stored_record_and_an_observation_in_json(self, cart, whence):
        row = cart.round("records", 2).row(5, named=True)
        code, out, _ = whence("why", cart.path, "--record", row["record_id"], "--json")
        stored = json.loads(out)
        assert code == 0
        place = f"in record {row['record_id']} (step {row['step']} of episode {row['episode_id']}, round 2)"
        assert place in stored["decision"]
        written = ["--observation", json.dumps(list(row["observation"])), "--action", row["action"]]
        code, out, _ = whence("why", cart.path, *written, "--json")
        content = json.loads(out)
        assert code == 0
        assert content["raised"] == stored["raised"]
        assert content["log_prob"] == pytest.approx(stored["log_prob"])

    def test_flagged_decisions_are_asked_about_by_their_mean(self, cart, whence, tmp_path):
        directory = RunDirectory.open(shutil.copytree(cart.path, tmp_path / "cart"))
        directory.sign()
        assert "is flagged" in whence("why", directory.path, "--flagged")[2]
        flagged = [(number, directory.round("records", number)["record_id"][4]) for number in (1, 3)]
        for number, record in flagged:
            write_flag(directory.path, number, record, "")
        code, out, _ = whence("why", directory.path, "--flagged", "--by", "influence", "--json")
        content = json.loads(out)
        assert code == 0
        assert content["decision"].startswith("What was done in one of 2 flagged records")
        single = [find_causes(directory, read_record(directory, number, record)) for number, record in flagged]
        expected = single[0].with_columns(score=(single[0]["score"] + single[1]["score"]) / 2)
        causes = find_causes(directory, directory.flags())
        rows = causes.join(expected, on=["round", "record_id"], how="left")
        np.testing.assert_allclose(rows["score"], rows["score_right"], rtol=1e-5, atol=1e-6)
        assert len(causes) == len(expected) - 2
        pairs = [compare_log_probs(directory, read_record(directory, *key))[:2] for key in flagged]
        before, now = zip(*pairs, strict=True)
        assert content["log_prob_first"] == pytest.approx(np.mean(before), abs=1e-6)
        assert content["log_prob"] == pytest.approx(np.mean(now), abs=1e-6)
        assert "both name decisions" in whence("why", directory.path, "--flagged", "--step", 3)[2]

    def test_pictures(self, cart, whence, tmp_path):
        code, out, _ = whence("why", cart.path, "--out", tmp_path / "why.png")
        assert code == 0
        assert f"Picture: {tmp_path / 'why.png'}" in out
        assert measure(tmp_path / "why.png")[0][0] == 1200

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--record", "1", "--step", "3"], "--step and --record name two decisions"),
            (["--record", "1", "--observation", "[1]"], "--record and --observation name two decisions"),
            (["--observation", "[1]"], "by both --observation and --action"),
            (["--observation", "[1]", "--action", "0"], "observation"),
            (["--observation", "[0,0,0,0]", "--action", "7"], "7"),
            (["--by", "guess"], "guess"),
            (["--out", "why.jpg"], r"has to end in \.png"),
            (["--record", "99999"], "No round of .* holds record 99999"),
            (["--step", "99999"], "has steps 0 to"),
        ],
    )
    def test_what_cannot_be_is_refused(self, cart, whence, arguments, text):
        code, _, err = whence("why", cart.path, *arguments)
        assert code == 2
        assert re.search(text, err), err


def make_view(text="left", **settings):
    rounds = sum_rounds(TestRanking.CAUSES)
    ends = {name: rank_moments(TestRanking.CAUSES, lowest=name == "lowered", most=3) for name in ("raised", "lowered")}
    rows = {name: [describe_moment(e.moment, [text]) | {"round": e.round} for e in end] for name, end in ends.items()}
    frames = {row["record"]: np.zeros((40, 60, 3), np.uint8) for row in rows["raised"]}
    frame = np.full((40, 60, 3), 200, np.uint8)
    decision = Decision(f"“{text}” at {text}", math.log(0.25), math.log(0.97), frame=frame)
    view = CauseView(text, text, decision, "influence", rounds, **rows, frames=frames)
    return replace(view, **settings)


class TestTelling:
    def test_sentences(self):
        view = make_view()
        assert view.decision.text == "“left” at left: its probability was 25% under the first policy and is 97% now."
        assert view.text == (
            "Round 1 speaks for it most: it holds 76% of the sum of all rounds' scores above 0. The strongest moment "
            "is step 0 of episode 0 in round 1."
        )
        density = replace(view.decision, is_discrete=False, before=-1.0, after=2.5)
        assert "its log-density was -1 under the first policy and is 2.5 now" in density.text
        assert replace(view, raised=[]).text == "No record of any round speaks for it."

    @pytest.mark.parametrize("bare", [False, True])
    def test_hostile_text_is_drawn_as_it_is(self, tmp_path, bare):
        text = hostile_view().env
        view = make_view(text, notes=[text])
        if bare:
            view = replace(view, frames={}, lowered=[], decision=replace(view.decision, frame=None))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            draw_causes(view, tmp_path / "why.png")
        assert measure(tmp_path / "why.png")[0][0] == 1200


@pytest.fixture(scope="module")
def server(cart, tmp_path_factory):
    path = tmp_path_factory.mktemp("language")
    language = RunDirectory.create(path / "run", {"kind": "language"})
    table = pl.DataFrame({"record_id": [0], "score": [1.0], "prompt": ["a"], "response": ["b"]})
    language.write_round("records", 1, table)
    yield Server([ExploredRun(cart.path), ExploredRun(language)])
    end_processes()


class TestServed:
    def test_the_answer_is_the_functions(self, cart, server, monkeypatch):
        # In this process; test_viewer.py has questions in processes of their own.
        monkeypatch.setattr(Questions, "ask", lambda self, answer, *about: answer(*about, lambda *_: None))
        record = int(cart.round("records", 2)["record_id"][7])
        answer = server.get(f"/api/runs/0/rounds/2/records/{record}/causes")
        target = read_record(cart, 2, record)
        causes = find_causes(cart, target, method="nearest")
        assert answer["rounds"] == [1, 2, 3]
        assert answer["sums"]["raised"] == pytest.approx(sum_rounds(causes)["raised"].to_list(), rel=1e-5)
        expected = [(entry.round, entry.moment.record_id) for entry in rank_moments(causes, lowest=True, most=6)]
        assert [(moment["round"], moment["record"]) for moment in answer["lowered"]] == expected
        assert all(moment["thumb"].startswith("data:image/webp;base64,") for moment in answer["raised"])
        assert "under the first policy" in answer["decision"]
        influence = server.get(f"/api/runs/0/rounds/2/records/{record}/causes?by=influence")
        assert (answer["by"], influence["by"]) == ("nearest", "influence")
        assert influence["raised"] != answer["raised"]
