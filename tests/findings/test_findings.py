"""What findings say of tables made by hand, each with one thing wrong, and of noise."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy import stats

from whence.cli.commands.findings_command import findings
from whence.findings import agreement, environments
from whence.findings.evidence import Evidence, summarise
from whence.findings.finding import CHANCE
from whence.findings.finding_search import CAUSES, EFFECTS, find_settings
from whence.findings.subgroups import Condition, cut, list_conditions, refine, search
from whence.runs import RunDirectory

COPIES, EPISODES, LENGTH = 4, 25, 30
N = COPIES * EPISODES * LENGTH
STEP = np.arange(N) % LENGTH
EPISODE = np.arange(N) // LENGTH
COPY = EPISODE // EPISODES
TIMES = {"record_id": np.arange(N), "round": 1 + EPISODE % EPISODES // 5, "env_index": COPY, "step": STEP}


def healthy(seed: int = 0, push: float = 0.4) -> Evidence:
    """A point on a line that actions push; it is paid for coming nearer to 0. Episodes are cut after 30 steps."""
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, 3, N)
    place, speed = np.zeros(N), np.zeros(N)
    for i in range(N):
        if STEP[i] == 0:
            place[i], speed[i] = rng.normal(size=2)
        else:
            speed[i] = 0.9 * speed[i - 1] + push * (actions[i - 1] - 1) + 0.3 * rng.normal()
            place[i] = place[i - 1] + 0.2 * speed[i]
    reward = np.append(np.abs(place[:-1]) - np.abs(place[1:]), 0.0) - 0.01 * actions
    ends = np.where(STEP == LENGTH - 1, "truncated", "")
    reward[ends != ""] = 0.3 * rng.normal(size=COPIES * EPISODES)
    value = rng.normal(size=N)
    columns: dict[str, Any] = {name: column.astype(float) for name, column in TIMES.items()}
    columns |= {"episode_id": EPISODE, "reward": reward, "value": value, "return": value + rng.normal(size=N)}
    votes, names = rng.standard_t(4, size=(N, 8)), ["push back", "wait", "push forth"]
    evidence = Evidence({}, pl.DataFrame(), columns, votes, actions, names, {}, {}, ends)
    return with_features(evidence, place=place, speed=speed, colour=rng.normal(size=N))


def with_column(evidence: Evidence, **columns: Any) -> Evidence:
    return replace(evidence, columns={**evidence.columns, **columns})


def with_features(evidence: Evidence, **features: Any) -> Evidence:
    features = {**evidence.features, **features}
    return replace(evidence, features=features, blocks={name: values[:, None] for name, values in features.items()})


def spoil(where: Callable[[Evidence], Any], push: float = 0.4, **changes: Any) -> Callable[[Evidence], Evidence]:
    """Return what changes columns of some records of a run whose actions push so hard."""

    def plant(_: Evidence) -> Evidence:
        evidence = healthy(push=push)
        columns = evidence.columns
        return with_column(
            evidence,
            **{name: np.where(where(evidence), f(columns[name]), columns[name]) for name, f in changes.items()},
        )

    return plant


def speeds_forth(evidence: Evidence) -> Any:
    return (evidence.actions == 2) & (evidence.features["speed"] > 0.3)


def pay_again(evidence: Evidence) -> Evidence:
    reward = evidence.columns["reward"].copy()
    reward[STEP == LENGTH - 1] = -10.0
    starts = np.flatnonzero((STEP == 0) & (EPISODE % EPISODES > 0))
    reward[starts] += reward[starts - 1]
    return with_column(evidence, reward=reward)


def catch_balls(evidence: Evidence) -> Evidence:
    """Each tenth step pays 1 or −1, as the last one does, and the first step after an end what the end paid."""
    reward = np.where(STEP % 10 == 9, np.random.default_rng(0).choice([-1.0, 1.0], N), 0.0)
    starts = np.flatnonzero((STEP == 0) & (EPISODE % EPISODES > 0))
    reward[starts] = reward[starts - 1]
    return with_column(evidence, reward=reward)


def end_early(evidence: Evidence) -> Evidence:
    """Half of the episodes end with −10, the others where the colour is above 2, as any step."""
    is_last = STEP == LENGTH - 1
    colour = np.where(is_last & (EPISODE % 2 == 0), 2.5, np.minimum(evidence.features["colour"], 2.4))
    reward = np.where(is_last, np.where(EPISODE % 2 == 0, 0.01, -10.0), evidence.columns["reward"])
    ended = replace(evidence, ends=np.where(is_last, "terminated", ""))
    return with_features(with_column(ended, reward=reward), colour=colour)


def farm(evidence: Evidence) -> Evidence:
    """Half of the episodes end after 10 steps with 1; the others stand at one place and earn 0.2 at each step."""
    is_short = EPISODE % 2 == 0
    ends = np.where(is_short & (STEP == 9), "terminated", np.where(STEP == LENGTH - 1, "truncated", ""))
    other = with_column(replace(evidence, ends=ends), reward=np.where(is_short, (STEP == 9) * 1.0, 0.2))
    other = with_features(other, **{name: np.where(is_short, x, 1.0) for name, x in evidence.features.items()})
    taken = ~is_short | (STEP < 10)
    tables = {name: {key: x[taken] for key, x in getattr(other, name).items()} for name in ("columns", "features")}
    return replace(other, **tables, **{name: getattr(other, name)[taken] for name in ("actions", "votes", "ends")})


def change_settings(**hyperparameters: Any) -> Callable[[Evidence], Evidence]:
    def change(evidence: Evidence) -> Evidence:
        clipped = hyperparameters.pop("clipped", 0.1)
        metrics = pl.DataFrame({"round": range(1, 13), "train/clip_fraction": [clipped] * 12})
        settings = {"n_epochs": 10, **hyperparameters}
        return replace(evidence, metrics=metrics, config={"n_envs": COPIES, "hyperparameters": settings})

    return change


def swap_axes(evidence: Evidence) -> Evidence:
    """Two axes, of which the first one pushes; in environment 1 it is the second."""
    axes = np.stack([healthy(push=1.0).actions - 1.0, np.random.default_rng(0).normal(size=N)], axis=1)
    actions = np.where(COPY[:, None] == 1, axes[:, ::-1], axes)
    return replace(healthy(push=1.0), actions=actions, action_names=["push", "paint"])


def see_images(evidence: Evidence, *, frozen: bool, shown: Any = None) -> Evidence:
    """Two channels of 3 x 3 pixels; a channel may be frozen in environment 1."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (N, 2, 9), dtype=np.uint8)
    images[COPY == 1, 1] = np.where(frozen, 7, images[COPY == 1, 1])
    shown = np.arange(N) if shown is None else shown
    blocks = {f"channel {i}": images[shown, i] for i in range(2)}
    return replace(evidence, features=summarise(blocks), blocks=blocks, digests=shown)


FAULTS: Mapping[str, tuple[Callable[[Evidence], Any], Callable[[Evidence], Evidence], str]] = {
    # Where an action pushes hard, the next observation tells it, and the prediction learns the wrong sign as well.
    "reversed reward": (
        agreement.find_reward_faults,
        spoil(speeds_forth, 0.2, reward=np.negative),
        r"wrong sign for (?=.*push forth)(?=.*speed ≥)",
    ),
    "lost reward": (
        agreement.find_reward_faults,
        spoil(lambda e: (e.actions == 0) & (e.columns["round"] >= 4), reward=np.zeros_like),
        r"not paid for (?=.*push back)(?=.*round 4 and later)",
    ),
    "swapped actions": (
        agreement.find_action_faults,
        lambda e: replace(e := healthy(push=1.0), actions=np.where(COPY == 2, 2 - e.actions, e.actions)),
        r"Actions push (back|forth) and push (back|forth) are swapped for environment 2: in 100%",
    ),
    "swapped actions in three long episodes": (
        agreement.find_action_faults,
        lambda e: with_column(
            FAULTS["swapped actions"][1](e), episode_id=np.arange(N) // 250, step=np.arange(N) % 250.0
        ),
        r"Actions push (back|forth) and push (back|forth) are swapped for environment 2",
    ),
    "swapped axes": (agreement.find_action_faults, swap_axes, r"Actions push and paint are swapped for environment 1"),
    "repeated": (
        environments.find_repeated,
        lambda e: with_features(e, **{name: x[np.arange(N) - STEP % 2] for name, x in e.features.items()}),
        r"does not change in 5\d% of the steps, mostly at even steps",
    ),
    "repeated image": (
        environments.find_repeated,
        lambda e: see_images(e, frozen=False, shown=np.arange(N) - STEP % 2),
        r"does not change in 5\d% of the steps",
    ),
    "constant": (
        environments.find_constant,
        lambda e: with_features(e, speed=np.zeros(N)),
        r"speed never changes: it is 0",
    ),
    "frozen": (
        environments.find_constant,
        lambda e: with_features(e, speed=np.where(COPY == 1, 0.5, e.features["speed"])),
        r"speed never changes: it is 0.5 in all 750 records of environment 1",
    ),
    "frozen channel": (
        environments.find_constant,
        lambda e: see_images(e, frozen=True),
        r"channel 1 never changes, .* environment 1",
    ),
    "clipped": (
        environments.find_clipped,
        lambda e: with_features(e, place=np.clip(e.features["place"], -0.5, 0.5)),
        r"clipped at a bound: place \(at ±0.5",
    ),
    "limit": (
        environments.find_limit_as_end,
        lambda e: replace(e, ends=np.where(e.ends != "", "terminated", "")),
        r"time limit is reported as an end: 100 episodes are terminated after exactly 30 steps",
    ),
    "early end": (
        environments.find_unpaid_ends,
        end_early,
        r"end where colour ≥ 2.5, and nothing .* it: \d+ of \d+ ends",
    ),
    "paid again": (
        environments.find_paid_again,
        pay_again,
        r"last reward of an episode is paid again .* after 96 of 96 ends",
    ),
    "often paid again": (
        environments.find_paid_again,
        catch_balls,
        r"last reward of an episode is paid again .* after 96 of 96 ends",
    ),
    "loop": (environments.find_loops, farm, r"0.2 is collected again and again .* earn 6, those that reach it 1"),
    "scaled copy": (
        environments.find_odd_copies,
        lambda e: with_column(e, reward=np.where(COPY == 3, 100, 1) * e.columns["reward"]),
        r"size of rewards in environment 3 is \d+ times that in the other 3",
    ),
    "scaled copy of rare rewards": (
        environments.find_odd_copies,
        lambda e: with_column(
            e, reward=np.where((STEP == 20) & (EPISODE % 3 == 0), np.where(COPY == 3, 100.0, 1.0), 0)
        ),
        r"size of rewards other than 0 in environment 3 is 100 times that in the other 3",
    ),
    "discount": (find_settings, change_settings(gamma=0.5), r"γ = 0.5 looks 2 steps ahead, while an episode takes 30"),
    "few steps": (find_settings, change_settings(n_steps=16), r"too short: 16 steps of 4 environments are 64 records"),
    "rate": (find_settings, change_settings(learning_rate=0.03, clipped=0.7), r"about: 70% of the ratios are clipped"),
    "harm": (
        agreement.find_harm,
        lambda e: replace(e, votes=np.where(speeds_forth(e), -2.0, 1.0)[:, None] + e.votes),
        r"(?=.*speed ≥)(?=.*push forth).* undo \d+% of what the others gain",
    ),
    "critic": (
        agreement.find_critic_faults,
        spoil(lambda e: e.features["speed"] > 0.3, value=lambda values: values - 4.0),
        r"critic is too low for .*speed ≥",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(name: str) -> None:
    detector, plant, title = FAULTS[name]
    finding, *_ = detector(plant(healthy()))
    assert re.search(title, finding.title), finding.title
    assert finding.p is None or finding.p <= CHANCE
    assert finding.evidence
    assert finding.advice


@pytest.mark.parametrize("seed", range(2))
def test_nothing_stands_out_in_a_healthy_run(seed: int) -> None:
    findings = [finding for detector in (*CAUSES, *EFFECTS) for finding in detector(healthy(seed))]
    assert [one.title for one in findings if one.p is None or one.p <= CHANCE] == []


def test_a_search_over_noise_finds_nothing() -> None:
    """Of 60 searches at 5%, at most 8 find something, with a probability of 99%."""
    units = np.repeat(np.arange(40), 10)
    chances = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        # The noise of an episode's records goes together, as rewards of an episode do.
        votes = rng.normal(size=(400, 1)) + rng.normal(size=40)[units, None]
        conditions = [one for name in "abc" for one in cut(name, rng.normal(size=400))]
        groups = search(votes, units, conditions, sign=-1, seed=seed)
        chances.append(min((group.p for group in groups), default=1.0))
    assert sum(p <= 0.05 for p in chances) <= 8


def test_a_search_finds_a_pair_of_conditions_and_a_finer_cut() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 2000))
    units = np.repeat(np.arange(100), 20)
    conditions = [*cut("a", a, is_place=True), *cut("b", b, is_place=True)]
    conditions += [Condition("action", "action 1", rng.random(2000) < 0.5)]
    inside = (a >= np.quantile(a, 0.6)) & (b < np.quantile(b, 0.4))
    best = search((rng.normal(size=2000) - 1.5 * inside)[:, None], units, conditions, sign=-1)[0]
    assert {one.column for one in best.conditions} == {"a", "b"}
    assert best.p < 1e-3
    assert (best.mask & inside).sum() > 0.9 * inside.sum()
    votes = (1.0 - 3.0 * (a >= np.quantile(a, 0.7)) + 2 * rng.normal(size=2000))[:, None]
    finer = refine(search(votes, units, conditions[:8], sign=-1)[0], votes, units, cut("a", a, 10, is_place=True))
    assert np.isclose(finer.mask.mean(), 0.3)


def test_a_run_is_read_with_its_names_and_named_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    evidence = FAULTS["swapped actions"][1](healthy())
    columns = {name: column.astype(int) if name in TIMES else column for name, column in evidence.columns.items()}
    places = np.stack([evidence.features["place"], evidence.features["speed"]], axis=1)
    table = pl.DataFrame({**columns, "action": evidence.actions, "observation": places, "end": evidence.ends})
    names = {"actions": evidence.action_names, "observations": ["place", "speed"]}
    run = RunDirectory.create(tmp_path / "run", {"names": names, "action_space": {"type": "Discrete", "n": 3}})
    for number in range(1, 6):
        run.write_round("records", number, table.filter(pl.col("round") == number).drop("round"))
    findings(run.path, json=True)
    (first, *_) = json.loads(capsys.readouterr().out)["findings"]
    assert re.search(r"Actions push (back|forth) and push (back|forth) are swapped", first["title"])
    findings(run.path)
    assert f"1. {first['title']}." in capsys.readouterr().out
    shown = set(table.filter(pl.col("env_index") == 2)["record_id"])
    assert set(first["record_ids"]) <= shown


@pytest.mark.parametrize("is_late", [False, True])
def test_an_action_that_nobody_takes_where_another_does_what_it_does(is_late: bool) -> None:
    """It counts in one environment only: an agent that goes elsewhere may meet a wall there."""
    evidence = healthy()
    is_usual = TIMES["round"] < 5 if is_late else COPY != 1
    renamed = np.select([is_usual, evidence.actions == 2], [evidence.actions, 0], 1)
    claims = list(agreement.find_action_faults(replace(evidence, actions=renamed)))
    title = "Action push back does what push forth does elsewhere, for environment 1"
    assert [claim.title.split(":")[0] for claim in claims] == ([] if is_late else [title])


def test_a_fixed_length_that_the_last_observation_shows_is_a_rule_of_the_game() -> None:
    evidence = replace(healthy(), ends=np.where(STEP == LENGTH - 1, "terminated", ""))
    row = {"row": (STEP % 10).astype(float)}
    assert list(environments.find_limit_as_end(with_features(evidence, **row))) == []
    assert len(list(environments.find_limit_as_end(with_features(evidence, row=row["row"] % 2)))) == 1


def test_a_reward_is_missed_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plant, _ = FAULTS["lost reward"]
    for share, count in ((0.05, 1), (1.0, 0)):
        monkeypatch.setattr(agreement, "_MATTERS", share)
        assert len(list(agreement.find_reward_faults(plant(healthy())))) == count


def test_a_critic_that_says_the_same_of_all_states_is_a_setting() -> None:
    metrics = pl.DataFrame({"round": range(1, 9), "train/explained_variance": [-0.1, 0.2, *[0.0] * 6]})
    assert [one.title for one in find_settings(replace(healthy(), metrics=metrics))] == [
        "The critic gives every state the same value"
    ]
    assert find_settings(replace(healthy(), metrics=metrics.head(5))) == []


def test_a_number_that_varies_by_rounding_alone_is_no_state() -> None:
    evidence = healthy()
    rounded = np.where(np.arange(N) % 2, 0.1, np.nextafter(0.1, 1))
    assert with_features(evidence, rounded=rounded).state.shape == evidence.state.shape


MANY, SHORT = 2_000, 5


@pytest.fixture(scope="module")
def crowd() -> Evidence:
    """2,000 environments of 50 steps in ten episodes; only environment 1,234 pays five times as much."""
    n = MANY * 10 * SHORT
    rng, episodes = np.random.default_rng(0), np.arange(n) // SHORT
    columns: dict[str, Any] = {"record_id": np.arange(n), "round": 1.0 + episodes % 10, "episode_id": episodes}
    columns |= {"env_index": episodes // 10.0, "step": np.arange(n) % SHORT * 1.0}
    columns["reward"] = rng.uniform(1, 2, n) * np.where(columns["env_index"] == 1234, 5, 1)
    columns |= {name: rng.normal(size=n) for name in ("value", "return")}
    ends = np.where(columns["step"] == SHORT - 1, "truncated", "")
    actions = rng.integers(0, 2, n)
    other = Evidence({}, pl.DataFrame(), columns, np.full((n, 1), np.nan), actions, ["a", "b"], {}, {}, ends)
    return with_features(other, place=rng.normal(size=n), sensor=rng.normal(size=n), speed=rng.normal(size=n))


class TestManyEnvironments:
    """What costs a pass for each environment, where it need not."""

    def test_the_odd_one_is_found_with_the_chance_that_a_test_of_it_alone_gives(self, crowd: Evidence) -> None:
        (claim,) = environments.find_odd_copies(crowd)
        assert "environment 1234 is 5" in claim.title
        sizes = np.bincount(crowd.episodes, np.abs(crowd.columns["reward"])) / SHORT
        is_odd = np.arange(len(sizes)) // 10 == 1234
        numbers = 3 + len(crowd.features)
        assert claim.p == stats.mannwhitneyu(sizes[is_odd], sizes[~is_odd]).pvalue * MANY * numbers

    def test_environments_too_small_to_be_a_subgroup_have_no_mask(self, crowd: Evidence) -> None:
        rows = np.ones(len(crowd), dtype=bool)
        assert [one.text for one in list_conditions(crowd, rows) if one.column == "env_index"] == []
        few = crowd.columns["env_index"] < 100
        assert len([one for one in list_conditions(crowd, few) if one.column == "env_index"]) == 100

    def test_of_many_with_a_sensor_that_stands_still_five_are_named(self, crowd: Evidence) -> None:
        still = np.where(crowd.columns["env_index"] % 2 == 0, 1.0, crowd.features["sensor"])
        claims = list(environments.find_constant(with_features(crowd, sensor=still)))
        assert [claim.title.rpartition(" ")[2] for claim in claims] == ["0", "2", "4", "6", "8"]
        assert all(claim.mask.sum() == 10 * SHORT for claim in claims)

    def test_searches_see_whole_episodes_of_some_records(self, crowd: Evidence) -> None:
        sample = crowd.thin(40_000)
        assert len(sample) == 40_000
        assert (np.bincount(sample.episodes) == SHORT).all()
        assert (sample.has_next == (sample.columns["step"] < SHORT - 1)).all()
        assert len(np.unique(sample.columns["env_index"])) > 0.9 * MANY
        rows = sample.columns["record_id"].astype(int)
        assert (sample.features["place"] == crowd.features["place"][rows]).all()
        assert len(healthy().thin(N)) == N
