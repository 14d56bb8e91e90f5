"""Moments in the terminal, as JSON and as pictures."""

import json
import re
import shutil
from dataclasses import replace

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from stable_baselines3 import PPO
from torch.distributions import Normal, kl_divergence

from helpers.episodes import train
from helpers.moment_views import TABLE, hostile_view, measure
from helpers.toys import Toy
from whence import IIF, Return, RunDirectory, attribute
from whence.page import choose_frames, read_window
from whence.page.content.moment_view import PolicyChange, describe_score
from whence.page.pictures import draw_moment
from whence.sb3 import InfluenceCallback, model_objective
from whence.scores.moments import find_moment, find_moments
from whence.stored.agents import load_round
from whence.stored.agents.environments import action_labels, box_action_labels, state_names
from whence.stored.agents.rounds import compare_policies


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    """A run of CartPole, three rounds of 256 records."""
    path = tmp_path_factory.mktemp("cart") / "run"
    return train(path, env="CartPole-v1", rounds=3, hyperparameters={"n_epochs": 2})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The path of a run of CartPole that trained without scores, one round of 64 records."""
    return train(tmp_path_factory.mktemp("plain") / "run", env="CartPole-v1", arm="ppo", rounds=1, n_steps=64).path


def worst(directory, number):
    records = directory.round("records", number)
    errors = pl.max_horizontal("error", pl.col("error").median())
    return records.sort(pl.col("score") / errors, "record_id").row(0, named=True)


class TestChangedPolicies:
    def test_before_is_what_collected_and_after_is_the_next_policy(self, cart):
        changes = compare_policies(cart, 2)
        records = cart.round("records", 2).join(changes, on="record_id", how="left", maintain_order="left")
        taken = [row["before"][row["action"]] for row in records.to_dicts()]
        assert np.log(taken) == pytest.approx(records["log_prob"].to_numpy(), abs=1e-5)
        assert records["value_before"].to_numpy() == pytest.approx(records["value"].to_numpy(), abs=1e-4)
        # The third round's records were collected by the policy after the second.
        model, _ = load_round(cart, 3)
        tensors = {name: tensor.clone() for name, tensor in model.policy.named_parameters()}
        stored = cart.policy(3)
        assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
        second = torch.as_tensor(np.stack(cart.round("records", 2)["observation"].to_numpy()))
        with torch.no_grad():
            after = model.policy.get_distribution(second).distribution.probs
            values = model.policy.predict_values(second).flatten()
        assert np.stack(records["after"].to_numpy()) == pytest.approx(after.numpy(), abs=1e-6)
        assert records["value_after"].to_numpy() == pytest.approx(values.numpy(), abs=1e-5)

    def test_divergence_by_hand_and_largest_first(self, cart):
        changes = compare_policies(cart, 1)
        assert changes["divergence"].is_sorted(descending=True)
        for row in changes.head(5).to_dicts():
            by_hand = sum(p * np.log(p / q) for p, q in zip(row["before"], row["after"], strict=True))
            assert row["divergence"] == pytest.approx(by_hand, abs=1e-6)

    @pytest.mark.parametrize("action", ["box", pytest.param("multidiscrete", marks=pytest.mark.long), "multibinary"])
    def test_other_actions(self, tmp_path, action):
        model = PPO("MlpPolicy", Toy(action=action), n_steps=32, batch_size=32, n_epochs=3, seed=0, device="cpu")
        model.learn(64, callback=InfluenceCallback(IIF(), run=tmp_path / "run"))
        table = compare_policies(tmp_path / "run", 1, env=lambda: Toy(action=action))
        assert len(table) == 32
        assert (table["divergence"] > 0).all()
        if action == "box":
            row = table.row(7, named=True)
            before, after = (
                Normal(*(torch.tensor(row[f"{part}_{when}"]) for part in ("mean", "std")))
                for when in ("before", "after")
            )
            assert row["divergence"] == pytest.approx(float(kl_divergence(before, after).sum()), rel=1e-4)


class TestLabels:
    def test_environments_go_by_their_names_without_module_and_version(self):
        assert action_labels("LunarLander-v3") == action_labels("gymnasium:LunarLander-v2")
        assert action_labels("MiniGrid-DoorKey-6x6-v0")[2] == "forward"
        assert action_labels("highway-v0")[0] == action_labels("highway-fast-v0")[0] == "LANE_LEFT"
        assert action_labels("Nobody-v0") is action_labels(None) is action_labels("") is None

    @pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1", "FrozenLake-v1"])
    def test_there_is_a_name_for_each_action_and_axis(self, name):
        env = gym.make(name)
        if isinstance(env.action_space, gym.spaces.Discrete):
            assert len(action_labels(name)) == env.action_space.n
        else:
            assert len(box_action_labels(name)) == env.action_space.shape[0]
        if state_names(name) is not None:
            assert len(state_names(name)) == env.observation_space.shape[0]


class TestWindows:
    def test_neighbours_are_of_the_same_episode_and_frames_inside_the_round(self):
        window = read_window(TABLE, find_moment(TABLE, 58))
        assert window["record_id"].to_list() == list(range(34, 60))
        moment = find_moment(TABLE, 30)
        assert choose_frames(read_window(TABLE, moment), moment) == [20, 25, 30, 35, 40]
        last = find_moment(TABLE, 59)
        assert choose_frames(read_window(TABLE, last), last)[-1] == 59

    def test_a_record_is_the_face_of_the_moment_around_it(self):
        moment = find_moment(TABLE, 31)
        assert (moment.record_id, moment.record_ids) == (31, (29, 30, 31))
        alone = find_moment(TABLE.drop("score"), 5)
        assert alone.record_ids == (5,)
        assert np.isnan(alone.score)


class TestCommand:
    def test_the_most_harmful_moment_of_the_last_round(self, cart, whence):
        code, out, _ = whence("show", cart.path, "--continuations", 2)
        face = worst(cart, 3)
        assert code == 0
        assert f"Record {face['record_id']} of CartPole-v1, round 3" in out
        assert f"{face['score']:.3g}" in out
        for text in ("Measured by 2 fresh rollouts", "pole angle", "left"):
            assert text in out, text

    def test_json_is_all_of_it(self, cart, whence):
        code, out, _ = whence("show", cart.path, "--round", 2, "--json", "--continuations", 0, "--bottom", 3)
        content = json.loads(out)
        face = worst(cart, 2)
        moment = content["moment"]
        assert (code, content["round"], moment["record"]) == (0, 2, face["record_id"])
        assert moment["action"] == ["left", "right"][face["action"]]
        assert [found["record"] for found in content["moments"]] == [
            found.record_id for found in find_moments(cart.round("records", 2), lowest=True, most=3)
        ]
        assert moment["significant"] == (abs(face["score"]) > 2 * face["error"])

    def test_a_record_is_found_in_its_round(self, cart, whence):
        code, out, _ = whence("show", cart.path, "--record", 300, "--json", "--continuations", 0)
        assert (code, json.loads(out)["round"], json.loads(out)["moment"]["record"]) == (0, 2, 300)

    def test_pictures(self, cart, whence, tmp_path):
        # A picture of one frame is drawn below, and by `whence why`.
        code, out, _ = whence("show", cart.path, "--out", tmp_path / "moment.gif", "--continuations", 0)
        assert code == 0
        assert f"Picture: {tmp_path / 'moment.gif'}" in out
        size, images = measure(tmp_path / "moment.gif")
        assert size[0] == 1200
        assert images >= 5

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--record", "1", "--top", "3"], "--record, --top and --bottom exclude each other"),
            (["--record", "99999"], "No round of .* holds record 99999; it holds rounds 1 to 3"),
            (["--round", "9"], "holds rounds 1 to 3"),
            (["--round", "1", "--record", "300"], "Record 300 is not in this round"),
            (["--out", "moment.jpg"], r"has to end in \.png or \.gif"),
        ],
    )
    def test_what_cannot_be_is_refused(self, cart, whence, arguments, said):
        code, _, err = whence("show", cart.path, *arguments)
        assert code == 2
        assert re.search(said, err), err

    def test_a_round_that_trained_without_scores_is_scored_now(self, plain, whence):
        code, out, err = whence("show", plain, "--bottom", 2, "--continuations", 0, "--json")
        assert code == 0
        assert "These scores were computed now, for the return" in err
        model, records = load_round(RunDirectory.open(plain), 1)
        influence = attribute(model.policy, records, target=Return(), objective=model_objective(model))
        (lowest,) = influence.bottom(1).to_polars().to_dicts()
        moment = json.loads(out)["moment"]
        assert moment["record"] == lowest["record_id"]
        assert moment["score"] == pytest.approx(lowest["score"], rel=1e-4)

    def test_what_cannot_be_replayed_is_said_and_the_numbers_are_drawn(self, cart, whence, tmp_path):
        shutil.copytree(cart.path, tmp_path / "run")
        for file in (tmp_path / "run" / "episodes").iterdir():
            table = pl.read_parquet(file)
            table.with_columns(generator_state=pl.lit(None, dtype=pl.String)).write_parquet(file)
        code, out, _ = whence("show", tmp_path / "run", "--out", tmp_path / "m.gif")
        assert code == 0
        assert "No frames" in out
        assert "Not measured by fresh rollouts: " in out
        assert measure(tmp_path / "m.gif")[1] == 1

    def test_a_language_models_response(self, tmp_path, whence):
        directory = RunDirectory.create(tmp_path / "run", {"kind": "language"})
        table = {"record_id": [0, 1], "score": [1.0, -2.0], "keep": [True, False], "reason": [None, "harms"]}
        texts = {"prompt": ["a", "[red]b[/]"], "response": ["c", "\x1b[31md"]}
        directory.write_round("records", 1, pl.DataFrame(table | texts))
        code, out, _ = whence("show", tmp_path / "run")
        assert code == 0
        assert "[red]b[/]" in out
        assert "\x1b[31md" not in out
        assert "lowers the target" in out
        code, _, err = whence("show", tmp_path / "run", "--out", tmp_path / "m.png")
        assert code == 2
        assert "is a run of a language model, and --out is for agents: leave it out" in err


def test_hostile_text_is_drawn_as_it_is_the_face_stands_out_and_the_numbers_change(tmp_path):
    for name in ("m.png", "m.gif"):
        draw_moment(hostile_view(), tmp_path / name)
        assert measure(tmp_path / name)[0][0] == 1200
    images, durations = [], []
    with Image.open(tmp_path / "m.gif") as picture:
        for at in range(picture.n_frames):
            picture.seek(at)
            durations.append(picture.info["duration"])
            images.append(np.asarray(picture.convert("RGB"), int))
    assert len(images) == 3
    assert durations[1] > durations[0]
    assert np.abs(images[0] - images[2]).sum() > 0


def test_a_box_policy_is_drawn(tmp_path):
    change = PolicyChange(["a", "b"], [0.1, 1.0], [0.2, -1.0], ((1.0, 2.0), (1.0, 1.0)), (0.0, 1.0))
    heights = []
    for policy in (None, change):
        draw_moment(replace(hostile_view(), policy=policy, action_labels=None), tmp_path / "m.png")
        heights.append(measure(tmp_path / "m.png")[0][1])
    assert heights[0] < heights[1]


@pytest.mark.parametrize(
    ("score", "error", "words"),
    [
        (-9.0, 2.0, "-9 ± 2, training on it lowers the target"),
        (9.0, None, "9 (error not known), training on it raises the target"),
        (-9.0, 8.0, "-9 ± 8, cannot be told from 0"),
        (float("nan"), None, "not computed"),
    ],
)
def test_a_headline_claims_no_more_than_can_be_told(score, error, words):
    assert describe_score(score, error) == words
