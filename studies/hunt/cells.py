"""The table of the hunt: environments, planted faults, and which finding names each.

A line names a fault if its kind is one of the fault's kinds, and its text has the place, by every pattern.
Who knew what, and when:

- The first rules of findings were made with a view of the fourteen faults, which are of eight environments, and tuned
  on seeds 0 and 1 of all but acrobot and lake. A second author rewrote them, had the list of faults but was not to see
  this study. Runs here have other seeds, and swapped actions and the scaled environment moved to acrobot and lake.
- courier and tanks, and their faults, were written after that and shown to nobody before the runs were judged. Three
  faults of each were drawn by lot; a wrong sign and a frozen channel were added, as the lot drew settings mostly. Rules
  were mended on them and on the other eight since.
- taxi and walker, which are Gymnasium's, came after the last change of the rules, and no finding had been asked about
  them. Three faults and a setting of each were drawn by lot.
- Kinds and patterns were fixed and committed before findings were asked about any run of this study. Their author had
  read the class `Finding`, with its kinds, and the guide's page with one example; not the rules.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
from gymnasium.wrappers import TimeLimit
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize

from studies.hunt import faults, worlds


class World(NamedTuple):
    """An environment and the settings that learn it.

    `make` returns one copy; `steps` are of training; `actions` and `observations` are their names, as the run is told;
    `settings` are those of PPO that differ from `SETTINGS`, `n_envs` the copies, `wrap` the vectorised wrapper.
    """

    make: Callable[[], gym.Env[Any, Any]]
    steps: int
    actions: str
    observations: str = ""
    settings: Mapping[str, Any] = {}
    n_envs: int = 4
    wrap: Callable[..., VecEnv] | None = None

    @property
    def names(self) -> dict[str, list[str]]:
        """The names as `InfluenceCallback` takes them."""
        names = {"actions": self.actions.split(), "observations": self.observations.split()}
        return {kind: listed for kind, listed in names.items() if listed}


ONCE_HIDDEN, HIDDEN = ("courier", "tanks"), ("taxi", "walker")
"""Environments that were hidden from the rules' makers once, and those that still are."""

SETTINGS = {"policy": "MlpPolicy", "n_steps": 512, "batch_size": 128, "learning_rate": 1e-3, "device": "cpu"}
IMAGES = {"n_steps": 256, "policy": "CnnPolicy", "policy_kwargs": {"features_extractor_class": worlds.SmallCnn}}
DICT = {"policy": "MultiInputPolicy"}

WORLDS = {
    "cartpole": World(
        partial(gym.make, "CartPole-v1"), 12_288, "left right", "cart_position cart_speed pole_angle pole_speed"
    ),
    "lander": World(
        partial(gym.make, "LunarLander-v3"),
        *(20_480, "nothing left_engine main_engine right_engine", "x y x_speed y_speed angle spin left_leg right_leg"),
    ),
    "grid": World(
        lambda: worlds.Grid(gym.make("MiniGrid-Empty-6x6-v0", max_steps=80)),
        *(12_288, "left right forward", "", DICT),
    ),
    "pendulum": World(
        partial(gym.make, "Pendulum-v1"),
        *(16_384, "torque", "cos sin speed", {"gamma": 0.9, "batch_size": 64}),
        wrap=VecNormalize,
    ),
    "catch": World(worlds.Catch, 16_384, "left stay right", "", IMAGES, 8, lambda env: VecFrameStack(env, 2)),
    "depot": World(
        lambda: TimeLimit(worlds.Depot(), 40),
        *(12_288, "site_0 site_1 site_2 site_3 site_4", "load_0 load_1 load_2 load_3 load_4 van", {"gamma": 0.9}),
    ),
    "acrobot": World(
        partial(gym.make, "Acrobot-v1"),
        *(16_384, "push_back no_push push_forth", "cos_1 sin_1 cos_2 sin_2 speed_1 speed_2", {"n_steps": 256}, 8),
    ),
    "lake": World(partial(gym.make, "FrozenLake-v1", is_slippery=False), 12_288, "west south east north"),
    "courier": World(lambda: TimeLimit(worlds.Courier(), 40), 16_384, "east north west south", "", DICT),
    "tanks": World(
        lambda: TimeLimit(worlds.Tanks(), 80), 16_384, "inlet valve", "level_1 level_2 target", {"gamma": 0.95}
    ),
    "taxi": World(partial(gym.make, "Taxi-v4"), 16_384, "south north east west pickup dropoff"),
    "walker": World(
        partial(gym.make, "BipedalWalker-v3"),
        *(20_480, "hip_1 knee_1 hip_2 knee_2"),
        "angle spin x_speed y_speed hip_angle_1 hip_speed_1 knee_angle_1 knee_speed_1 contact_1 "
        "hip_angle_2 hip_speed_2 knee_angle_2 knee_speed_2 contact_2 "
        + " ".join(f"lidar_{number}" for number in range(10)),
    ),
}


class Cell(NamedTuple):
    """A run of the hunt: an environment, and the fault that is planted, or none.

    `kinds` are the kinds of findings that name the fault, none for a healthy run; `places` are patterns, all of which
    are in the text of such a line; `fault` is its class and options, None for a setting; `settings` are those of PPO
    that differ, and `wrap` arguments of the vectorised wrapper.
    """

    world: str
    kinds: str = ""
    places: Sequence[str] = ()
    fault: tuple[type[faults.Fault], Mapping[str, Any]] | None = None
    settings: Mapping[str, Any] = {}
    wrap: Mapping[str, Any] = {}


def _word(name: str) -> str:
    return rf"\b{name}\b"


def _env(number: int) -> str:
    return rf"(environment|env|env_index|worker|copy)\W{{0,4}}{number}\b"


START = r"first (step|record|reward)|\bstep\W{0,4}[01]\b|reset|\bstart|begin"
END = r"terminat|\bends?\b|ended|ending|\bdone"


def _twice(world: str) -> Cell:
    return Cell(world, "reward episode", [START], (faults.PaidTwice, {}))


def _sign(world: str, places: Sequence[str], **options: Any) -> Cell:
    return Cell(world, "reward records", [*map(_word, places)], (faults.WrongSign, options))


def _early(world: str, name: str, feature: int, above: float) -> Cell:
    return Cell(world, "episode", [END, _word(name)], (faults.EarlyEnd, {"feature": feature, "above": above}))


def _frozen(world: str, name: str, feature: int) -> Cell:
    never = r"never|constant|frozen|always|not (change|vary)|does not|same"
    return Cell(world, "observation", [never, _word(name)], (faults.Frozen, {"feature": feature}))


def _swapped(world: str, only: int, *actions: int) -> Cell:
    return Cell(world, "dynamics", [_env(only)], (faults.Swapped, {"actions": actions, "only": only}))


def _stale(world: str) -> Cell:
    repeats = r"stale|identical|repeat|same|unchanged|not change|delay|behind|before"
    return Cell(world, "observation dynamics", [r"observation", repeats], (faults.Stale, {}))


def _limit(world: str, steps: str) -> Cell:
    return Cell(world, "episode", [rf"limit|truncat|\b{steps}\b", END], (faults.LimitAsEnd, {}))


def _setting(world: str, name: str, **settings: float) -> Cell:
    higher = r"few|short|small|more|raise|longer|larger|higher|increase"
    lower = r"too (long|large|high|far|big)|lower|reduce|smaller|shorter|decrease"
    return Cell(world, "setting", [name, lower if "rate" in name else higher], settings=settings)


GAMMA, RATE, STEPS = r"gamma|γ|discount", r"learning.?rate", r"n_steps"

CELLS = {
    **{f"healthy-{world}": Cell(world) for world in WORLDS},
    "sign-lander": _sign("lander", ["main_engine", "y"], action=2, feature=1, below=0.5),
    "stale-cartpole": _stale("cartpole"),
    "frozen-lander": _frozen("lander", "y_speed", 3),
    "swapped-acrobot": _swapped("acrobot", 3, 0, 2),
    "limit-pendulum": _limit("pendulum", "200"),
    "early-lander": _early("lander", "x", 0, 0.3),
    "worker-lake": Cell("lake", "reward", [_env(2)], (faults.Scaled, {"only": 2})),
    "twice-catch": _twice("catch"),
    "farm-grid": Cell(
        "grid",
        "reward episode",
        [r"loop|farm|repeat|again|revisit|cycle|circl|each step|every step|over and over|already"],
        (faults.Checkpoint, {}),
    ),
    "clipped-pendulum": Cell(
        "pendulum",
        "observation",
        [r"clip|bound|saturat|limit|pile", r"observation|feature|\bcos\b|\bsin\b|\bspeed\b"],
        wrap={"clip_obs": 0.5},
    ),
    "gamma-lander": _setting("lander", GAMMA, gamma=0.5),
    "rate-catch": _setting("catch", RATE, learning_rate=3e-2),
    "steps-pendulum": _setting("pendulum", STEPS, n_steps=16),
    "lost-depot": Cell("depot", "reward records", [_word("site_2")], (faults.Lost, {"action": 2, "after": 1_500})),
    "sign-courier": _sign("courier", ["north", "laden"], action=1, feature="laden", below=1),
    "twice-courier": _twice("courier"),
    "rate-courier": _setting("courier", RATE, learning_rate=3e-2),
    "steps-courier": _setting("courier", STEPS, n_steps=16, batch_size=64),
    "frozen-tanks": _frozen("tanks", "level_1", 0),
    "swapped-tanks": _swapped("tanks", 1, 0, 1),
    "early-tanks": _early("tanks", "level_2", 1, 0.6),
    "steps-tanks": _setting("tanks", STEPS, n_steps=16, batch_size=64),
    "limit-taxi": _limit("taxi", "200"),
    "sign-taxi": _sign("taxi", ["pickup"], action=4, feature=None, below=200),
    "twice-taxi": _twice("taxi"),
    "gamma-taxi": _setting("taxi", GAMMA, gamma=0.5),
    "limit-walker": _limit("walker", "1,?600"),
    "stale-walker": _stale("walker"),
    "swapped-walker": _swapped("walker", 2, 0, 1),
    "rate-walker": _setting("walker", RATE, learning_rate=3e-2),
}


def make_env(cell: Cell, copy: int = 0) -> gym.Env[Any, Any]:
    """Return one copy of a cell's environment, with its fault."""
    fault, options = cell.fault or (faults.Fault, {})
    return faults.Task(WORLDS[cell.world].make(), fault(copy, **options))


def make_model(cell: Cell, seed: int) -> Any:
    """Return the model of a cell, untrained."""
    world = WORLDS[cell.world]
    env: VecEnv = DummyVecEnv([lambda copy=copy: make_env(cell, copy) for copy in range(world.n_envs)])
    if world.wrap is not None:
        env = world.wrap(env, **cell.wrap)
    settings = {**SETTINGS, **world.settings, **cell.settings}
    algorithm = MaskablePPO if cell.world == "depot" else PPO
    return algorithm(env=env, seed=seed, **settings)
