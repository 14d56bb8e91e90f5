"""Does it pay to choose records with the PPO that people use, and at the same divergence a round?

Run: `python -m studies.practice.run results/practice [--seeds 0,1] [--only cartpole] [--workers 2]`. Runs are made seed
by seed, all environments before the next seed; the settings that have few seeds come last. A finished run is not made
again, an interrupted one goes on. Tables: `python -m studies.practice.tables`.

Each run has SB3's default settings, Adam and one environment. It trains

- at a fixed learning rate: SB3's default, 3e-4, and three others; or
- at a target: a controller steered the rate, from the default, so that each round had the same divergence; or
- with SB3's own `target_kl`, which ends a round early, or with other epochs or another lambda of GAE (`ppo` alone); or
- with RL Baselines3 Zoo's hyper-parameters, at their rate and at a target, for about as many steps (its linear
  schedules are constants here, and observations and rewards are not normalised); or
- as LDA's published script does on LunarLander: Adam at 1e-3, 100 rounds, gradients not clipped.

Arms: `ppo`; `iif`, which drops an eighth of the records that score below 0; the same with one half; `random`, which
drops as many as `iif`, at random; and, where rounds can be flat, `iif-rewarded`, which is `iif` in the other rounds and
`ppo` in the flat ones. `SEEDS`, `ARM_SEEDS` and `FEW` say how many seeds each has. The code of targets and of
`iif-rewarded` is in the history, in the version of 2026-11-25: their runs are tabulated, and no more are made.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

import typer

from studies.shared import Out, Workers
from whence.cli.terminal import SweepBars
from whence.experiments import Planned, RunConfig, configure, make_label, run_sweep

DROP = 0.125
"""The usual share to drop."""

FEW = 3
"""The seeds of settings that answer none of the main questions."""

ARM_SEEDS: Mapping[tuple[str, float], int] = {("random", DROP): 10, ("iif", 0.5): 5}
"""The seeds of some arms, where the environment has more."""


@dataclass(frozen=True)
class World:
    """An environment of the study, and how long it is trained in."""

    env: str
    rounds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other people's settings of the environment, by name."""


def configure_zoo(rounds: int, n_envs: int, **hyperparameters: Any) -> dict[str, Any]:
    """Return the zoo's settings at their rate; at a target they are not trained any more."""
    settings = {"rounds": rounds, "n_envs": n_envs, "hyperparameters": hyperparameters}
    return {"zoo": settings, "zoo_kl0.02": None}


_POOL = {"evaluate_with": "envpool"}
_GRID = _POOL | {
    "observe": "image",
    "policy": "CnnPolicy",
    "policy_kwargs": {"features_extractor_class": "MiniGridCNN"},
}
_MUJOCO = _POOL | {"collect_with": "envpool"}

_CARTPOLE_ZOO = configure_zoo(
    rounds=160, n_envs=8, n_steps=32, batch_size=256, n_epochs=20, gamma=0.98, gae_lambda=0.8, learning_rate=1e-3
)
_ACROBOT_ZOO = configure_zoo(rounds=12, n_envs=16, n_steps=256, n_epochs=4, gae_lambda=0.94)
_LUNARLANDER_ZOO = configure_zoo(
    rounds=8, n_envs=16, n_steps=1024, n_epochs=4, gamma=0.999, gae_lambda=0.98, ent_coef=0.01
)
_LDA = {"rounds": 100, "hyperparameters": {"learning_rate": 1e-3, "max_grad_norm": math.inf}}

WORLDS: Mapping[str, World] = {
    "cartpole": World("CartPole-v1", 20, _POOL, _CARTPOLE_ZOO),
    "acrobot": World("Acrobot-v1", 25, _POOL, _ACROBOT_ZOO),
    "lunarlander": World("LunarLander-v3", 60, _POOL, _LUNARLANDER_ZOO | {"lda": _LDA}),
    "halfcheetah": World("HalfCheetah-v5", 50, _MUJOCO),
    "minigrid-empty": World("minigrid:MiniGrid-Empty-8x8-v0", 15, _GRID),
    "hopper": World("Hopper-v5", 50, _MUJOCO),
    "walker2d": World("Walker2d-v5", 50, _MUJOCO),
    "bipedalwalker": World("BipedalWalker-v3", 60, _POOL),
    "minigrid-doorkey": World("minigrid:MiniGrid-DoorKey-5x5-v0", 40, _GRID),
}
"""The environments, in the order in which each seed is trained."""

SEEDS: Mapping[str, int] = dict.fromkeys(WORLDS, 10) | {"lunarlander": 20}
"""The seeds of rates and targets in each environment, and of LDA's script."""

RATES = (3e-4, 1e-3, 3e-3, 1e-4)
TARGETS = (0.02, 0.01, 0.04, 0.005)
DEFAULT_RATE, USUAL_TARGET = RATES[0], TARGETS[0]
DEFAULT, USUAL = f"lr{DEFAULT_RATE:g}", f"kl{USUAL_TARGET:g}"
BEST_RATE = "lr0.001"
"""That at which `ppo` and `iif` train best."""

CONTROLS: Mapping[tuple[str, float], Sequence[str]] = {
    ("random", DROP): (DEFAULT, BEST_RATE, USUAL),
    ("iif", 0.5): (DEFAULT, USUAL),
}
"""The rates and targets at which arms run that do not run at all of them."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "early0.02": {"target_kl": 0.02},
    "epochs5": {"n_epochs": 5},
    "epochs20": {"n_epochs": 20},
    "lambda0.9": {"gae_lambda": 0.9},
    "lambda1": {"gae_lambda": 1.0},
}
"""Other hyper-parameters than SB3's defaults, for `ppo` alone."""


CAN_BE_FLAT = ("minigrid-doorkey", "acrobot", "minigrid-empty", "cartpole")
"""Environments in which a round may give every action the same reward."""


@dataclass(frozen=True)
class Steps:
    """How large steps are: what a group of runs shares; None as settings: they are not trained any more."""

    name: str
    settings: Mapping[str, Any] | None
    arms: Sequence[tuple[str, float]] = (("ppo", DROP), ("iif", DROP))


def list_steps() -> list[Steps]:
    """Return the rates and targets, those that answer most first."""
    rates = [Steps(f"lr{rate:g}", {"hyperparameters": {"learning_rate": rate}}) for rate in RATES]
    targets = [Steps(f"kl{target:g}", None) for target in TARGETS]
    ordered = [rates[0], targets[0], rates[1], targets[1], targets[2], rates[2], rates[3], targets[3]]
    return [
        replace(steps, arms=[*steps.arms, *(arm for arm, names in CONTROLS.items() if steps.name in names)])
        for steps in ordered
    ]


def list_settings(world: World, seed: int) -> list[Steps]:
    """Return the other settings of a seed: LDA's script, and of the first seeds the rest."""
    some = [Steps(name, {"hyperparameters": {**each}}, arms=[("ppo", DROP)]) for name, each in SETTINGS.items()]
    others = [Steps(name, each) for name, each in world.others.items()]
    return [steps for steps in (*some, *others) if seed < FEW or steps.name == "lda"]


def configure_world(name: str, **settings: Any) -> RunConfig:
    """Return the settings of an environment, at SB3's defaults where no others are given."""
    world = WORLDS[name]
    rounds = settings.get("rounds", world.rounds)
    fixed = {"eval_every": max(1, rounds // 5), "eval_episodes": 50, "drop": DROP}
    return configure(env=world.env, **world.settings, **{"rounds": rounds, **fixed, **settings})


def list_arms(name: str, seed: int, steps: Steps) -> list[tuple[str, float]]:
    """Return the arms that have this seed in an environment, with the share that each drops."""
    return [arm for arm in steps.arms if seed < min(SEEDS[name], ARM_SEEDS.get(arm, math.inf))]


def plan_runs(name: str, seed: int, compared: Iterable[Steps]) -> Iterator[Planned]:
    """Yield the runs of an environment and a seed."""
    for steps in compared:
        if steps.settings is None:
            continue
        for arm, drop in list_arms(name, seed, steps):
            run = replace(configure_world(name, **steps.settings), seed=seed, arm=arm, drop=drop)
            yield Planned(f"{name}-{steps.name}", make_label(run, DROP), run)


def plan_study(names: Sequence[str], seeds: Iterable[int]) -> list[Planned]:
    """Return the runs of some environments: rates seed by seed, then the other settings."""
    pairs = [(name, seed) for seed in seeds for name in names]
    runs = [plan_runs(name, seed, list_steps()) for name, seed in pairs]
    runs += [plan_runs(name, seed, list_settings(WORLDS[name], seed)) for name, seed in pairs]
    return list(chain.from_iterable(runs))


def main(
    out: Out,
    only: Annotated[str, typer.Option(help="Environments, separated by commas.")] = ",".join(WORLDS),
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; empty: all.")] = "",
    workers: Workers = 2,
) -> None:
    """Train what is not there yet."""
    numbers = [int(seed) for seed in seeds.split(",")] if seeds else range(max(SEEDS.values()))
    runs = plan_study(only.split(","), numbers)
    with SweepBars(runs) as table:
        failures = run_sweep(runs, out, table, workers=workers)
    for name, failure in failures.items():
        print(f"{name} failed: {failure}")


if __name__ == "__main__":
    typer.run(main)
