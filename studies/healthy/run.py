"""Healthy runs of public environments, which findings are held against.

Run: `python -m studies.healthy.run [--runs out/healthy] [--only MuJoCo] [--faulty]`, in an environment with
`requirements.txt`. PPO of Stable-Baselines3 with its defaults trains on each environment of the catalogue that is
healthy, three times: in one copy for half of its steps; in four copies, for a tenth; and in four copies with normalised
observations and rewards, for a quarter. A finished run is not trained again, one that was interrupted is trained anew.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecNormalize

from studies.healthy.environments import PublicEnvironment, make_copies, read_environments
from studies.shared import Only, Workers, report, run_jobs
from whence.sb3 import InfluenceCallback

STEPS = 2048
"""Records of a round."""


class Variant(NamedTuple):
    """How a run is trained: its copies, whether VecNormalize is there, and its share of the catalogue's steps."""

    copies: int
    normalises: bool
    share: float


VARIANTS = {"one": Variant(1, False, 0.5), "early": Variant(4, False, 0.1), "normalised": Variant(4, True, 0.25)}


def list_jobs(rows: Iterable[PublicEnvironment]) -> list[tuple[PublicEnvironment, str]]:
    """Return each environment with each variant, of all families by turns."""
    ordered = sorted(rows, key=lambda row: row.family)
    families = [list(group) for _, group in itertools.groupby(ordered, key=lambda row: row.family)]
    turns = [row for turn in itertools.zip_longest(*families) for row in turn if row is not None]
    shortest_first = sorted(VARIANTS, key=lambda name: VARIANTS[name].share)
    # The agents of a parallel world are its copies.
    return [(row, name) for name in shortest_first for row in turns if name != "one" or not row.parallel]


def place_run(runs: Path, row: PublicEnvironment, name: str) -> Path:
    """Return the directory of a run."""
    return runs / row.family.replace(" ", "_") / row.id.replace("/", "_").replace(":", "_") / name


def train(row: PublicEnvironment, name: str, runs: Path) -> None:
    """Train and record a run, where that is not done."""
    path, variant = place_run(runs, row, name), VARIANTS[name]
    if (path / "done").exists():
        return
    torch.set_num_threads(1)
    seed = [*VARIANTS].index(name)
    env = make_copies(row, variant.copies, seed)
    if variant.normalises:
        env = VecNormalize(env)
    model = PPO(row.policy, env, n_steps=max(2, STEPS // env.num_envs), seed=seed, device="cpu")
    steps = max(3 * STEPS, int(row.steps * variant.share))
    model.learn(steps, callback=InfluenceCallback(run=path, overwrite=True))
    env.close()
    (path / "done").touch()


def try_training(row: PublicEnvironment, name: str, runs: Path) -> None:
    """Train a run, and say if that fails: others go on."""
    try:
        train(row, name, runs)
        report(row.id, name)
    except Exception as failure:  # a package's environment may raise anything
        report(row.id, name, "failed:", type(failure).__name__, failure)


def main(
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("out/healthy"),
    only: Only = "",
    workers: Workers = 2,
    faulty: Annotated[bool, typer.Option("--faulty", help="Train environments with known faults instead.")] = False,
) -> None:
    """Train what is not there yet."""
    rows = [row for row in read_environments() if row.healthy != faulty and row.family.startswith(only)]
    jobs = list_jobs(rows)
    run_jobs(try_training, jobs, runs.resolve(), workers=workers)


if __name__ == "__main__":
    typer.run(main)
