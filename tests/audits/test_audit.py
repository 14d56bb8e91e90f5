"""What an audit says of small environments with one fault each, and that it calls nothing wrong in healthy ones."""

import json
from functools import cache, partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

import whence
from whence.audits import environment_checks
from whence.audits.environment_checks import LOOKS
from whence.cli.commands.audit_command import audit as audit_command
from whence.findings import inspection
from whence.findings.detectors import DETECTORS, Detector
from whence.findings.finding import CannotTellError, Sight

_COUNTER = {"made": 0}


class Line(gym.Env):
    """A point on a line that actions push; it is paid for being near 0, and an episode ends far from it."""

    limit, noise = 40, 0.1

    def __init__(self, actions: Any = None) -> None:
        self.observation_space = gym.spaces.Box(-10, 10, (2,), np.float64)
        self.action_space = gym.spaces.Discrete(3) if actions is None else actions

    def push(self, action: Any) -> float:
        return float(action) - 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed, self.time = *self.np_random.normal(size=2), 0
        return self.see(), {}

    def draw(self) -> float:
        return self.np_random.normal()

    def see(self) -> Any:
        return np.array([self.place, self.speed])

    def step(self, action):
        self.speed = 0.8 * self.speed + 0.3 * self.push(action) + self.noise * self.draw()
        self.place += 0.3 * self.speed
        self.time += 1
        return self.see(), -abs(self.place), abs(self.place) > 5, self.time >= self.limit, {}


class Buffered(Line):
    def see(self):
        self.buffer = getattr(self, "buffer", np.zeros(2))
        self.buffer[:] = self.place, self.speed
        return self.buffer


class GlobalNoise(Line):
    def draw(self):
        return np.random.normal()


class OwnNoise(Line):
    def draw(self):
        return np.random.default_rng().normal()


class Lingering(Line):
    """The time is not set back, so that the second episode is shorter."""

    def reset(self, *, seed=None, options=None):
        time = getattr(self, "time", 0)
        observation, info = super().reset(seed=seed)
        self.time = time % 30
        return observation, info


class Rounding(Line):
    """What is left of the episodes before is small, and in the reward."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.total = 1e-9 + getattr(self, "total", 0.0)
        return observation, reward + self.total, *rest


class MadeApart(Line):
    def __init__(self):
        super().__init__()
        _COUNTER["made"] += 1
        self.gain = _COUNTER["made"]

    def push(self, action):
        return self.gain * (float(action) - 1)


class OneStart(Line):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=3 if seed is None else seed)


class Late(Line):
    def push(self, action):
        self.last, before = float(action) - 1, getattr(self, "last", 0.0) if self.time else 0.0
        return before


class Deaf(Line):
    def push(self, action):
        return 0.0


class SeldomHears(Line):
    """An action is read at one time of an episode, later than those from which all are tried."""

    limit, noise = 100, 0.01

    def push(self, action):
        return 10.0 * action if self.time == 80 else -self.place


class Twins(Line):
    def push(self, action):
        return float(min(action, 1)) - 1


class DeadStretch(Line):
    def __init__(self):
        super().__init__(gym.spaces.Box(-1, 1, (2,), np.float32))

    def push(self, action):
        return max(float(action[0]), 0.0)


class IntEnds(Line):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, int(terminated), truncated, info


class NoNumber(Line):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward if self.time < 7 else float("nan"), *rest


class Beyond(Line):
    def see(self):
        return np.array([self.place + 20, self.speed])


class Narrow(Line):
    def see(self):
        return np.array([self.place, self.speed, 0.0])


class Unpaid(Line):
    """As many are: a factor of 0 leaves negative zeros."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, (reward + 1) * 0.0, *rest


class LimitAsEnd(Line):
    spec = EnvSpec("LimitAsEnd-v0", max_episode_steps=40)

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, truncated, False, info


class Endless(Line):
    limit = 10**9

    def push(self, action):
        return float(action) - 1 - self.place

    def step(self, action):
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}


class StartsAgain(Line):
    """An episode's last observation is the next one's first."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = float(np.random.default_rng(0 if seed is None else seed % 3).normal())
        self.speed = 0.0
        return self.see(), {}

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return self.reset(seed=1)[0] if terminated or truncated else observation, reward, terminated, truncated, info


class ChangesAction(Line):
    def __init__(self):
        super().__init__(gym.spaces.Box(-1, 1, (1,), np.float32))

    def push(self, action):
        action *= 2
        return float(action[0])


class Wide(Line):
    def __init__(self):
        super().__init__(gym.spaces.Box(0, 2000, (1,), np.float32))

    def push(self, action):
        return float(action[0]) / 1000 - 1


class Fragile(Line):
    def step(self, action):
        return super().step([0, 1, 2][action] if self.time < 9 else None)


def look(make, steps=5000):
    return whence.audit(make, steps=steps)


@cache
def look_at_line():
    return look(Line)


@pytest.mark.parametrize(
    ("make", "name", "rank", "words"),
    [
        (Buffered, "arrays that change later", "wrong", "changes the observation of the step before"),
        (ChangesAction, "arrays that change later", "wrong", "changes the action"),
        (GlobalNoise, "seeds", "wrong", "from step 1 on: something draws from a global generator"),
        (OwnNoise, "seeds", "wrong", "does not repeat its episode, from step 1 on"),
        (Lingering, "seeds", "wrong", "depends on those before it"),
        (Rounding, "seeds", "unusual", "depends on those before it, from step 1 on"),
        (MadeApart, "seeds", "unusual", "made alike"),
        (OneStart, "starts", "wrong", "one start 12 times"),
        (Late, "effects of actions", "unusual", "not in the observation after it"),
        (Deaf, "effects of actions", "wrong", "No action does anything"),
        (SeldomHears, "effects of actions", "unusual", "No action does anything in most states"),
        (Twins, "effects of actions", "unusual", "Actions 1, 2 do the same"),
        (DeadStretch, "effects of actions", "unusual", "a0 does the same from −1 to 0; a1 does nothing"),
        (IntEnds, "types of what is returned", "wrong", "Terminated is of type int"),
        (NoNumber, "types of what is returned", "wrong", "The reward is NaN"),
        (Beyond, "spaces of observations", "wrong", "leaves its bounds"),
        (Narrow, "spaces of observations", "wrong", "another shape"),
        (Unpaid, "rewards", "unusual", "Every reward is 0.0"),
        (LimitAsEnd, "time limit as end", "unusual", "terminated after exactly 40 steps"),
        (Endless, "ends", "unusual", "No episode ends within 500 steps"),
        (StartsAgain, "ends", "unusual", "is one that reset returns"),
        (Wide, "ranges of actions", "unusual", "from 0 to 2000"),
        (Fragile, "errors", "wrong", "raised TypeError"),
    ],
)
def test_a_fault_is_named(make, name, rank, words, monkeypatch):
    assert not any(each in check.text for check in look_at_line() for each in words.split("; "))
    # Detectors read the records; nearly all faults are noticed without one, and they take as long as the play.
    monkeypatch.setattr(inspection, "DETECTORS", {each: DETECTORS[each] for each in {name} & {*DETECTORS}})
    checks = look(make, steps=5000 if name in ("effects of actions", "ends") else 1000)
    titles = [check.finding.title for check in checks if (check.name, check.outcome) == (name, rank)]
    assert all(any(each in title for title in titles) for each in words.split("; ")), checks


def make(name: str, wrapper: Any = None) -> gym.Env:
    env = gym.make(name, disable_env_checker=True)
    return env if wrapper is None else wrapper(env)


HEALTHY = [
    Line,
    pytest.param(partial(make, "CartPole-v1"), marks=pytest.mark.long),  # which the command audits below
    partial(make, "Pendulum-v1"),
    partial(make, "FrozenLake-v1"),
    partial(make, "Blackjack-v1", gym.wrappers.FlattenObservation),
]


@pytest.mark.parametrize("make", HEALTHY)
def test_a_healthy_environment_has_nothing_wrong_and_all_is_looked_at(make):
    checks = look(make)
    assert {check.outcome for check in checks} <= {"fine", "unusual"}, checks
    assert [check.name for check in checks if check.finding] == []
    assert {*LOOKS} <= {check.name for check in checks}


def test_without_a_seed_that_repeats_actions_cannot_be_compared():
    (check,) = (check for check in look(OwnNoise, steps=1000) if check.name == "effects of actions")
    assert (check.outcome, "a seed does not repeat" in check.text) == ("could not be looked at", True)


def test_with_the_global_generators_seeded_actions_are_compared():
    class TwinsOfNoise(GlobalNoise, Twins):
        pass

    assert any("Actions 1, 2 do the same" in check.text for check in look(TwinsOfNoise))


def test_an_action_that_acts_only_where_play_hardly_comes_is_no_twin():
    """Of two that mostly do nothing, one does something in a few states of random play."""

    class Picks(Line):
        def push(self, action):
            return min(float(action), 1) - 1

        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, float(action == 2 and self.time == 37), *rest

    assert [check for check in look(Picks) if "do the same" in check.text] == []


def test_one_object_is_looked_at_without_others_and_generators_stay():
    env = Line()
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    checks = look(env, steps=1000)
    assert [check.name for check in checks if check.finding] == []
    assert "another object" not in next(check.text for check in checks if check.name == "seeds")
    assert (np.random.get_state()[1] == before).all()
    env.reset()


def test_detectors_read_the_records_and_say_at_most_that_it_is_unusual(monkeypatch):
    seen = []

    def look_at_place(evidence):
        seen.append(evidence)
        return Sight(float(np.abs(evidence.features["x0"]).max()), "observation", "It is far away")

    def look_at_value(evidence):
        raise CannotTellError("there is no learner")

    detectors = dict.fromkeys(("far", "near", "unknown"), Detector(look_at_place, 0.0))
    detectors["value"] = Detector(look_at_value, 0.0)
    monkeypatch.setattr("whence.findings.inspection.DETECTORS", detectors)
    monkeypatch.setattr(environment_checks, "read_reference", lambda: {"far": [0.1], "near": [100.0], "value": [1.0]})
    checks = [check for check in look(Line) if check.name not in LOOKS]
    assert {check.name: check.outcome for check in checks} == {"far": "unusual", "near": "fine"}
    assert checks[0].finding.rank == "unusual"
    evidence = seen[0]
    assert evidence.config["observation_space"]["shape"] == [2]
    assert [*evidence.blocks] == ["x0", "x1"]
    assert set(evidence.ends) == {"", "terminated", "truncated"}
    assert np.isnan(evidence.columns["value"]).all()
    assert (
        evidence.has_next == (evidence.columns["episode_id"] == np.append(evidence.columns["episode_id"][1:], -1))
    ).all()


def test_the_budget_is_kept(monkeypatch):
    steps = []
    monkeypatch.setattr(Line, "step", lambda self, action, step=Line.step: steps.append(1) or step(self, action))
    seen = []
    whence.audit(Line, steps=2000, on_steps=lambda done, count: seen.append((done, count)))
    assert 1800 < len(steps) < 2200
    assert seen == sorted(seen)
    assert seen[-1] == (2000, 2000)


def test_the_command_prints_findings_then_what_was_looked_at(capsys):
    audit_command("test_audit:Unpaid", steps=2000)
    text = capsys.readouterr().out
    assert text.startswith("1. unusual: Every reward is 0.0, in ")
    assert "Fine: errors, " in text


def test_the_command_prints_json(capsys):
    audit_command("CartPole-v1", steps=2000, json=True)
    content = json.loads(capsys.readouterr().out)
    assert content["env"] == "CartPole-v1"
    assert {check["outcome"] for check in content["checks"]} == {"fine"}


@pytest.mark.parametrize(("rank", "code"), [("wrong", 0), ("unusual", 3)])
def test_a_rank_fails_the_command(whence: Any, rank: str, code: int) -> None:
    assert whence("audit", "test_audit:Unpaid", "--steps", 2000, "--fail-on", rank)[0] == code
