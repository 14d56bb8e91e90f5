"""Does it pay to choose records with the PPO that people use, and at the same divergence a round?

Run: `python -m studies.practice.run results/practice [--only cartpole] [--workers 2]`. Runs are made seed
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
`ppo` in the flat ones. The code of targets and of `iif-rewarded` is in the history, in the version of 2026-11-25: their
runs are tabulated, and no more are made.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import typer

from studies.shared import Out, Workers
from whence.cli.terminal import PlannedBars
from whence.lab import Planned, make_label, run_sweep
from whence.lab.agents import configure

DROP = 0.125
"""The usual share to drop."""

SEEDS, LDA_SEEDS, FEW = 10, 20, 3
"""The seeds of the main questions, of LDA's script, and of settings that answer none of the main questions."""

ARM_SEEDS: Mapping[tuple[str, float], int] = {("random", DROP): 10, ("iif", 0.5): 5}
"""The seeds of the controls."""

Settings = Mapping[str, Any]


class World(NamedTuple):
    """An environment of the study, how long it is trained in, its settings, and other people's, by name."""

    env: str
    rounds: int
    settings: Settings
    others: Mapping[str, Settings] = {}


def configure_zoo(rounds: int, n_envs: int, **hyperparameters: Any) -> dict[str, Any]:
    """Return the zoo's settings at their rate; at a target they are not trained any more."""
    return {"zoo": {"rounds": rounds, "n_envs": n_envs, "hyperparameters": hyperparameters}, "zoo_kl0.02": {}}


_POOL = {"evaluate_with": "envpool"}
_CNN = {"policy": "CnnPolicy", "policy_kwargs": {"features_extractor_class": "MiniGridCNN"}}
_GRID = _POOL | _CNN | {"observe": "image"}
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

MAIN = (("ppo", DROP), ("iif", DROP))
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


def list_steps(world: World) -> Iterator[tuple[str, Settings, Mapping[tuple[str, float], int]]]:
    """Yield the rates and other settings of an environment: name, settings, and the seeds of each arm."""
    for rate in RATES:
        name = f"lr{rate:g}"
        controls = {arm: ARM_SEEDS[arm] for arm, names in CONTROLS.items() if name in names}
        yield name, {"hyperparameters": {"learning_rate": rate}}, dict.fromkeys(MAIN, SEEDS) | controls
    for name, each in SETTINGS.items():
        yield name, {"hyperparameters": {**each}}, {MAIN[0]: FEW}
    for name, each in world.others.items():
        if each:  # else it is not trained any more
            yield name, each, dict.fromkeys(MAIN, LDA_SEEDS if name == "lda" else FEW)


def plan_study(names: list[str]) -> list[Planned]:
    """Return the runs of some environments: rates seed by seed, then the other settings."""
    runs = []
    for name in names:
        world = WORLDS[name]
        for place, (steps, settings, arms) in enumerate(list_steps(world)):
            rounds = settings.get("rounds", world.rounds)
            fixed = {"rounds": rounds, "eval_every": max(1, rounds // 5), "eval_episodes": 50, "drop": DROP}
            config = configure(env=world.env, **{**world.settings, **fixed, **settings})
            for (arm, drop), count in arms.items():
                for seed in range(count):
                    run = replace(config, seed=seed, arm=arm, drop=drop)
                    planned = Planned(f"{name}-{steps}", make_label(run, DROP), run)
                    runs.append((place >= len(RATES), seed, len(runs), planned))
    return [planned for *_, planned in sorted(runs, key=lambda run: run[:3])]


def main(
    out: Out,
    only: Annotated[str, typer.Option(help="Environments, separated by commas.")] = ",".join(WORLDS),
    workers: Workers = 2,
) -> None:
    """Train what is not there yet."""
    runs = plan_study(only.split(","))
    with PlannedBars(runs) as table:
        failures = run_sweep(runs, out, table, workers=workers)
    for name, failure in failures.items():
        print(f"{name} failed: {failure}")


if __name__ == "__main__":
    typer.run(main)
