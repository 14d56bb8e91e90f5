"""Healthy trainings and trainings that break, recorded.

Run: `python -m studies.collapse.run [--runs out/collapse] [--only cartpole]`, in an environment with MuJoCo and
MiniGrid. A finished run is not trained again, one that was interrupted is trained anew.
"""

from pathlib import Path
from typing import Any

import torch
import typer
from stable_baselines3 import PPO

from studies.collapse.worlds import SEEDS, STEPS, WORLDS, World, make_copies
from studies.shared import Only, Runs, Workers, report, run_jobs
from whence.findings import LEAST_DEPTH, find_drop, read_returns
from whence.runs import RunDirectory
from whence.sb3 import Choice, InfluenceCallback


class Recorder(InfluenceCallback):
    """Records a training without scores."""

    def __init__(self, world: World, run: Path) -> None:
        super().__init__(run=run, overwrite=True)
        self.world = world

    def choose(self, records: Any) -> Choice:
        """Keep all records, and let a planted bonus for entropy begin."""
        if (pair := self.world.schedules.get("ent_coef")) is not None:
            self.model.ent_coef = pair[self.model.num_timesteps >= self.world.since * self.world.steps]
        return Choice(None, self.select(records, None))


def has_broken(path: Path) -> bool:
    """Return whether the return of a finished run fell."""
    drop = find_drop(*read_returns(RunDirectory.open(path))) if (path / "done").exists() else None
    return drop is not None and drop.depth >= LEAST_DEPTH


def train(name: str, seed: int, runs: Path) -> None:
    """Train and record a run, where that is not done."""
    path, world = runs / f"{name}-{seed}", WORLDS[name]
    if (path / "done").exists():
        return
    torch.set_num_threads(1)
    env = make_copies(name, seed)
    model = PPO("MlpPolicy", env, n_steps=STEPS // world.copies, seed=seed, device="cpu", **world.make_settings())
    model.learn(world.steps, callback=Recorder(world, path))
    env.close()
    (path / "done").touch()
    report(name, seed)


def main(runs: Runs = Path("out/collapse"), only: Only = "", workers: Workers = 1) -> None:
    """Train what is not there yet."""
    jobs = [(name, seed) for name, world in WORLDS.items() for seed in SEEDS[world.kind] if name.startswith(only)]
    order = {"planted": 0, "natural": 1, "healthy": 2}
    jobs.sort(key=lambda job: (order[WORLDS[job[0]].kind], job[1]))
    run_jobs(train, jobs, runs.resolve(), workers=workers)


if __name__ == "__main__":
    typer.run(main)
