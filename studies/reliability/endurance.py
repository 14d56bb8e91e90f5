"""Memory, open files, threads and checkpoints of a long training: `python -m studies.reliability.endurance`."""

import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import typer
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from whence import IIF
from whence.guards import write_atomically
from whence.runs import RunDirectory
from whence.sb3 import InfluenceCallback


def measure_process() -> dict[str, float]:
    """Return the resident memory of this process in MiB, and its numbers of open files and threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


class Watch(BaseCallback):
    """Measures the process at the start of some rounds.

    Args:
        every: rounds from one measurement to the next.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every, self._rounds = every, 0
        self.measures: dict[int, dict[str, float]] = {}

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        if self._rounds and self._rounds % self._every == 0:
            self.measures[self._rounds] = measure_process()
        self._rounds += 1


def main(
    out: Annotated[Path, typer.Argument(help="Where endurance.json is written.")] = Path("results/reliability"),
    rounds: Annotated[int, typer.Option(help="Rounds of the training.")] = 2000,
) -> None:
    """Train FrozenLake for many short rounds, and compare the process after a tenth of them and in the end."""
    tenth = rounds // 10
    with tempfile.TemporaryDirectory() as folder:
        env = gym.make("FrozenLake-v1", is_slippery=True)
        model = PPO("MlpPolicy", env, n_steps=128, batch_size=64, n_epochs=2, seed=0, device="cpu")
        watch, begin = Watch(tenth), time.monotonic()
        model.learn((rounds + 1) * 128, callback=[watch, InfluenceCallback(IIF(0.5), run=Path(folder) / "run")])
        seconds = time.monotonic() - begin
        timings = RunDirectory.open(Path(folder) / "run").table("timings")
        checkpoints = timings["checkpoint_wall"].sum()
    first, last = watch.measures[tenth], watch.measures[rounds]
    result: dict[str, Any] = {
        "rounds": rounds,
        "seconds": seconds,
        "measures": watch.measures,
        "growth": {name: last[name] / first[name] - 1 for name in first},
        "checkpoint_share": checkpoints / seconds,
        "machine": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
    }
    with write_atomically(out / "endurance.json") as temporary:
        temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps(result["growth"] | {"checkpoint_share": result["checkpoint_share"]}))


if __name__ == "__main__":
    typer.run(main)
