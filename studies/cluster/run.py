"""A sweep over two nodes of a Ray cluster, one killed midway, against the same sweep without Ray.

`python -m studies.cluster.run` writes results/cluster/summary.json.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import typer

from studies.shared import Out
from whence.cli.terminal import PlannedBars
from whence.core import preserve_rng_state, write_json
from whence.lab import KEYS, Planned, cluster, read_rows, read_sweep, run_sweep
from whence.lab.agents import run
from whence.lab.workers import Job, OnJobRound

SWEEP = """
[[experiment]]
name = "lake"
env = "FrozenLake-v1"
env_kwargs = {{ is_slippery = true }}
arms = ["ppo", "iif", "random", "mean"]
seeds = {seeds}
rounds = {rounds}
eval_episodes = 20
hyperparameters = {{ n_steps = 128, batch_size = 64, n_epochs = 4, learning_rate = 0.003 }}
"""

SEEDS, ROUNDS, AFTER, SAVE_SECONDS = 10, 20, 15, 1.0
"""Runs of each arm and their rounds, runs that end before a node is killed, seconds between copies of an unfinished."""


@contextmanager
def start_cluster(nodes: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a cluster on this machine and its nodes, of one core each; RAY_ADDRESS is its address meanwhile.

    The head has no core, so that no run is there.
    """
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")  # loopback alone
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        workers = [ray_cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(nodes)]
        with patch.dict(os.environ, RAY_ADDRESS=ray_cluster.address):
            yield ray_cluster, workers
    finally:
        ray_cluster.shutdown()


class Killer:
    """A sweep's watch that kills a node once enough runs have ended and each node is in the middle of one.

    Args:
        ray_cluster: from `start_cluster`.
        nodes: its nodes; the first one that this process is not connected to is killed.
        after: the number of runs that end first.
        rounds: the rounds that each run under way has done when the node is killed.

    Attributes:
        failures: why runs failed, by name; None for those that did not.
        starts: runs that were started again: by name, the rounds that were done, and the round that they went on after.
        killed: how many runs had ended when the node was killed; None: it was not.
    """

    def __init__(self, ray_cluster: Any, nodes: Sequence[Any], *, after: int, rounds: int) -> None:
        self._cluster, self._nodes, self._after, self._rounds = ray_cluster, nodes, after, rounds
        self._done: dict[str, int] = {}
        self.failures: dict[str, str | None] = {}
        self.starts: dict[str, tuple[int, int]] = {}
        self.killed: int | None = None

    def kept(self, planned: Planned) -> None:
        """Refuse a finished run: there are none at the start."""
        raise RuntimeError(f"{planned.name} was finished before")

    def rounds(self, planned: Planned, done: int) -> None:
        """Note a run that was started again, and kill the node when it is time."""
        if done <= self._done.get(planned.name, -1):
            self.starts[planned.name] = self._done[planned.name], done
        self._done[planned.name] = done
        under_way = [each for name, each in self._done.items() if name not in self.failures]
        ready = sum(self._rounds <= each < planned.config.rounds for each in under_way) == len(self._nodes)
        if self.killed is None and len(self.failures) >= self._after and ready:
            self.killed = len(self.failures)
            import ray

            here = ray.get_runtime_context().get_node_id()
            node = next(node for node in self._nodes if node.node_id != here)
            self._cluster.remove_node(node, allow_graceful=False)

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Note that a run has ended."""
        self.failures[planned.name] = failure


def read_lines(out: Path) -> list[str]:
    """Return the results of a sweep, a line for each run, in the order of their text."""
    return [json.dumps(row, sort_keys=True) for row in read_rows(out / "curves.parquet", KEYS).values()]


def run_here(runs: Sequence[Planned], out: Path) -> None:
    """Run a sweep in this process, one run after the other, with one torch thread, as a node does."""
    torch.set_num_threads(1)

    def run_one_by_one(jobs: Sequence[Job], workers: int | None, on_round: OnJobRound) -> Iterator[tuple[int, None]]:
        for place, (config, path) in enumerate(jobs):
            with preserve_rng_state():
                run(config, path)
            yield place, None

    with patch.object(cluster, "run_all", run_one_by_one), PlannedBars(runs) as table:
        run_sweep(runs, out, table)


def main(out: Out = Path("results/cluster")) -> None:
    """Run a sweep on two nodes and kill one, run it in this process, and compare the results."""
    cluster.SAVE_SECONDS = SAVE_SECONDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sweep.toml").write_text(SWEEP.format(seeds=SEEDS, rounds=ROUNDS))
        runs, times = read_sweep(folder / "sweep.toml"), [time.monotonic()]
        with start_cluster(2) as (ray_cluster, workers):
            watch = Killer(ray_cluster, workers, after=AFTER, rounds=2)
            run_sweep(runs, folder / "ray", watch, on="ray")
        times.append(time.monotonic())
        run_here(runs, folder / "local")
        times.append(time.monotonic())
        ray, local = (read_lines(folder / place) for place in ("ray", "local"))
    summary = {
        "runs": len(runs),
        "results": len(ray),
        "equal": len({*ray} & {*local}),
        "failures": {name: failure for name, failure in watch.failures.items() if failure is not None},
        "nodes": 2,
        "killed_after": watch.killed,
        "started_again": {
            name: {"rounds_done": done, "went_on_after": start} for name, (done, start) in watch.starts.items()
        },
        "seconds": dict(zip(("ray", "one process"), map(round, np.diff(times).tolist()), strict=True)),
        "settings": {"seeds": SEEDS, "rounds": ROUNDS, "save_seconds": SAVE_SECONDS},
        "versions": {name: version(name) for name in ("ray", "torch", "stable-baselines3")},
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
    }
    write_json(out / "summary.json", summary)
    print(json.dumps(summary, indent=2))
    if watch.killed is None or summary["equal"] != len(runs):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
